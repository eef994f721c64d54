"""condition_number: the bracket holds the float64 SVD's kappa every time, and is as narrow as its status says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import conditioned_kernels as ck
from conditioned_kernels import ConditionEstimate, Status, _torch

from . import tolerances
from .matrices import (
    DTYPES,
    SPECTRA,
    STRIDES,
    from_spectrum,
    gaussian,
    geometric,
    residual,
    restrided,
    svd,
)

pytestmark = pytest.mark.usefixtures("each_backend")

RTOL = 1e-3
sizes = st.integers(1, 24)
shapes = st.lists(st.integers(1, 3), max_size=2).flatmap(lambda b: st.tuples(*map(st.just, b), sizes, sizes))


def check(x: Tensor, estimate: ConditionEstimate, rtol: float = RTOL) -> None:
    """Every promise of a ConditionEstimate, against the float64 SVD of the stored values."""
    s = svd(x)[1]
    top, bottom = s[..., 0], s[..., -1]
    kappa = top / bottom
    noise = tolerances.svd64(*x.shape[-2:]) * top
    for low, value, high in (
        (estimate.sigma_max_low, top, estimate.sigma_max_high),
        (estimate.sigma_min_low, bottom, estimate.sigma_min_high),
    ):
        assert (low <= value + noise).all()
        assert (value - noise <= high).all()
    # kappa of the oracle is itself uncertain by its sigma_min; NaN (0/0) is checked by name elsewhere.
    uncertain_high = torch.where(bottom > noise, (top + noise) / (bottom - noise), math.inf)
    assert (estimate.low <= uncertain_high).all()
    assert ((top - noise) / (bottom + noise) <= estimate.high).all()
    assert (estimate.low <= estimate.kappa).all()
    assert (estimate.kappa <= estimate.high).all()
    assert (estimate.low >= 1).all()
    converged = estimate.status == Status.CONVERGED
    width = (estimate.high / estimate.low)[converged]
    assert (width <= (1 + rtol) * (1 + 8 * tolerances.EPS64)).all()
    assert ((estimate.kappa / kappa - 1).abs() <= rtol + tolerances.kappa64(*x.shape[-2:], 1) * kappa)[converged].all()


@given(shape=shapes, dtype=st.sampled_from(DTYPES), how=st.sampled_from(STRIDES), rtol=st.sampled_from((1e-1, 1e-3)))
def test_any_shape_dtype_and_stride(shape: tuple[int, ...], dtype: torch.dtype, how: str, rtol: float) -> None:
    x = restrided(gaussian(*shape, seed=sum(shape), dtype=dtype), how)
    before = x.clone()
    estimate = ck.condition_number(x, rtol=rtol)
    assert torch.equal(x, before)
    assert estimate.kappa.shape == estimate.status.shape == shape[:-2]
    assert estimate.kappa.dtype == estimate.high.dtype == torch.float64
    check(x, estimate, rtol)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [(8, 8), (16, 20), (6, 48), (40, 12)], ids=str)
def test_the_bracket_holds_on_thousands_of_random_matrices(size: tuple[int, int], seed: int) -> None:
    """Gaussian, log-uniform spectra up to 1e8, and both plus a large mean: 4 x 4 x 600 matrices in float32."""
    number, short = 200, min(size)
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(number, short, generator=generator, dtype=torch.float64) * 8
    exponents *= torch.rand(number, 1, generator=generator, dtype=torch.float64)
    spectra = from_spectrum(10**-exponents, *size, seed=seed, dtype=torch.float32)
    x = torch.cat((gaussian(number, *size, seed=seed), spectra, gaussian(number, *size, seed=seed + 9) + 100.0))
    estimate = ck.condition_number(x)
    check(x, estimate)
    # Of 600, only matrices near kappa 1e8 and beyond may stay open.
    assert int((estimate.status == Status.CONVERGED).sum()) >= 590


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA, ids=lambda f: f.__name__)
def test_known_spectra(spectrum, dtype: torch.dtype) -> None:
    """kappa 1, repeated, clustered, and up to 1e7 in float32: bracketed as tightly as kappa = 2."""
    kappas = (1.0, 1 + 1e-6, 1.5, 1e1, 1e3, 1e5, 1e7)
    x = from_spectrum(torch.stack([spectrum(12, kappa) for kappa in kappas]), 30, 12, dtype=dtype)
    estimate = ck.condition_number(x)
    check(x, estimate)
    assert (estimate.status == Status.CONVERGED).all()
    if dtype not in tolerances.HALF:
        asked = torch.tensor(kappas, dtype=torch.float64)
        assert ((estimate.kappa / asked - 1).abs()[:-1] <= RTOL + 12 * tolerances.eps(dtype) * asked[:-1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("kind", ["constant columns", "one large row", "large mean", "graded"])
@pytest.mark.parametrize("size", [(8, 4096), (512, 24), (16, 63)], ids=str)
def test_inputs_made_to_spoil_a_gram_matrix(size: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    """Sums whose rounding errors all have one sign, cancellation, and rows of very different size."""
    noise = gaussian(3, *size, dtype=torch.float64)
    x = {
        "constant columns": 0.1 + 1e-3 * noise,
        "one large row": noise * torch.where(torch.arange(size[0]) == 1, 1e4, 1.0)[:, None],
        "large mean": 1e3 + noise,
        "graded": noise * torch.logspace(0, -6, size[0], dtype=torch.float64)[:, None],
    }[kind].to(dtype)
    check(x, ck.condition_number(x))


def test_exactly_constant_rows_in_one_gram_block() -> None:
    """0.1 is no binary fraction: 4096 equal products, each rounded the same way."""
    x = torch.full((2, 4096), 0.1)
    x[1, ::2] = -0.1
    estimate = ck.condition_number(x)
    check(x, estimate)
    assert float(estimate.kappa) == pytest.approx(1, abs=RTOL)
    assert float(estimate.sigma_max) == pytest.approx(float(torch.tensor(0.1)) * 64, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-44, 1e-40, 1e-30, 1e-20, 1e-10, 1e10, 1e18, 1e30])
def test_e01_any_scale_of_float32(scale: float) -> None:
    """Products underflow from 1e-20 and overflow from 1e19; denormal input is taken as stored."""
    x = (from_spectrum(torch.stack((geometric(8, 30.0), geometric(8, 1.0))), 8, 20) * scale).float()
    estimate = ck.condition_number(x)
    check(x, estimate)
    if scale > 1e-38:
        assert (estimate.kappa - torch.tensor([30.0, 1.0])).abs().max() <= 30 * RTOL
        assert torch.allclose(estimate.sigma_max, torch.tensor(scale).double(), rtol=RTOL)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200, 1e300])
def test_e01_any_scale_of_float64(scale: float) -> None:
    x = from_spectrum(geometric(8, 30.0), 8, 20) * scale
    estimate = ck.condition_number(x)
    assert float(estimate.kappa) == pytest.approx(30, rel=RTOL)
    assert float(estimate.sigma_max) == pytest.approx(scale, rel=RTOL)
    assert float(estimate.sigma_min) == pytest.approx(scale / 30, rel=RTOL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_a18_singular_matrices_among_regular_ones(dtype: torch.dtype) -> None:
    """A18: inf and a flag where singular, for those entries only; zeros are inf with zero_matrix, not NaN."""
    x = torch.stack(
        (torch.ones(2, 2), torch.diag(torch.tensor([1.0, 0.0])), torch.zeros(2, 2), torch.eye(2), 3 * torch.eye(2))
    ).to(dtype)
    estimate = ck.condition_number(x)
    assert estimate.kappa.tolist() == [math.inf] * 3 + [1, 1]
    assert estimate.high.tolist()[:3] == [math.inf] * 3
    assert estimate.rank_deficient.tolist() == [True, True, True, False, False]
    assert estimate.zero_matrix.tolist() == [False, False, True, False, False]
    assert not estimate.nonfinite.any()
    assert (estimate.low[:2] > 1e14).all()
    assert estimate.sigma_max.tolist() == pytest.approx([2, 1, 0, 1, 3])
    assert [sentence.split(":")[0] for sentence in estimate.failures()] == ["matrix 0", "matrix 1", "matrix 2"]
    assert "rank deficient" in estimate.failures()[0]
    for matrix in x:  # alone as in the batch
        alone = ck.condition_number(matrix)
        assert float(alone.kappa) in (1, math.inf)


def test_a_rank_deficient_product_is_not_given_a_finite_kappa() -> None:
    """Rank 5 in exact float64 arithmetic of small integers, whatever the Gram matrix rounds to."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randint(-3, 4, (12, 5), generator=generator), torch.randint(-3, 4, (5, 40), generator=generator)
    estimate = ck.condition_number((left @ right).float())
    assert float(estimate.kappa) == math.inf
    assert estimate.rank_deficient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_singular_head_is_proved_so_by_a_null_vector(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tall enough for the bound, no SVD is asked; a null space of any size and place, and none where there is none."""
    x = gaussian(6, 16, 512, dtype=dtype)
    x[0, 15] = x[0, 0]
    x[1, 3] = 0
    x[2, 4:] = x[2, :4].repeat(3, 1)
    x[3] *= 2.0**100 if dtype != torch.bfloat16 else 1
    x[3, 7] = x[3, 2]
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "_extremes_svd", lambda w: pytest.fail("the SVD was asked"))
        estimate = ck.condition_number(x)
    assert estimate.rank_deficient.tolist() == [True] * 4 + [False] * 2
    assert (estimate.kappa[:4] == math.inf).all()
    assert (estimate.low[:4] > 1e11).all()
    check(x, estimate)
    exact = svd(x)[1]
    assert torch.allclose(estimate.sigma_max, exact[:, 0], rtol=RTOL)


def test_nearly_singular_heads_are_not_taken_for_singular() -> None:
    """Singular values just above what counts as zero, where a null vector has to say no."""
    for small in (1e-9, 1e-11, 1e-12):
        x = from_spectrum(torch.cat((torch.ones(15), torch.tensor([small]))).double(), 16, 512)
        estimate = ck.condition_number(x)
        check(x, estimate)
        assert not estimate.rank_deficient
        assert float(estimate.kappa) == pytest.approx(1 / small, rel=0.2)


def test_a_batch_that_float32_cannot_bracket_is_not_tried_in_it_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Easy heads among hard ones, and hard ones among easy ones, after the first few have been looked at."""
    monkeypatch.setattr(_torch, "SCOUTS", 3)
    hard = from_spectrum(geometric(12, 1e4).expand(20, 12), 30, 12, dtype=torch.float32)
    easy = gaussian(20, 30, 12)
    for x in (torch.cat((hard, easy)), torch.cat((easy, hard))):
        estimate = ck.condition_number(x)
        check(x, estimate)
        assert (estimate.status == Status.CONVERGED).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [(0, 0), (3, 5), (-1, -1)], ids=str)
def test_a19_a_non_finite_head_is_nan_and_harms_no_other(value: float, position: tuple[int, int]) -> None:
    """torch's svdvals raises for the whole batch, so it cannot be called blindly."""
    x = gaussian(13, 8, 24)
    x[4][position] = value
    estimate = ck.condition_number(x)
    assert estimate.nonfinite.tolist() == [i == 4 for i in range(13)]
    for tensor in (estimate.kappa, estimate.low, estimate.high, estimate.sigma_max, estimate.sigma_min):
        assert tensor[4].isnan()
    healthy = [i for i in range(13) if i != 4]
    assert (estimate.status[healthy] == Status.CONVERGED).all()
    exact = svd(x[healthy])[1]
    assert torch.allclose(estimate.kappa[healthy], exact[:, 0] / exact[:, -1], rtol=RTOL)
    assert len(estimate.failures()) == 1
    assert "non-finite input" in estimate.failures()[0]


def test_f06_small_singular_values_survive_the_gram_matrix() -> None:
    """F06: smin/smax of 1e-2 to 1e-6 in float32 within 1 %; a float32 Gram matrix alone gives 0 from 1e-4 on."""
    for ratio in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        x = from_spectrum(geometric(8, 1 / ratio), 8, 8, dtype=torch.float32)
        estimate = ck.condition_number(x)
        assert float(estimate.sigma_min) == pytest.approx(float(svd(x)[1][-1]), rel=1e-2)
        assert estimate.status == Status.CONVERGED


@pytest.mark.parametrize("batch", [1, 2, 7, 33])
def test_a07_batched_equals_one_by_one(batch: int) -> None:
    x = gaussian(batch, 8, 20)
    together = ck.condition_number(x)
    alone = torch.stack([ck.condition_number(matrix).kappa for matrix in x])
    assert torch.allclose(together.kappa, alone, rtol=20 * tolerances.eps(torch.float32) * float(alone.max()))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = gaussian(7, 8, 40)
    whole = ck.condition_number(x)
    monkeypatch.setattr(_torch, "CHUNK_BYTES", 3 * 8 * 40 * 4)
    chunked = ck.condition_number(x)
    assert torch.allclose(chunked.kappa, whole.kappa, rtol=1e-5)
    check(x, chunked)


@pytest.mark.parametrize("shape", [(0, 1), (1, 0), (0, 0), (3, 0, 8), (0, 4, 8), (1, 0, 2, 4, 5)], ids=str)
def test_a10_a11_empty_input(shape: tuple[int, ...]) -> None:
    """A10, A11: the batch shape comes back; a matrix without elements has kappa 1 by convention."""
    estimate = ck.condition_number(torch.empty(shape))
    assert estimate.kappa.shape == estimate.status.shape == shape[:-2]
    assert (estimate.kappa == 1).all()
    assert estimate.failures() == []


def test_a22_the_estimate_has_no_gradient() -> None:
    x = torch.eye(4, requires_grad=True)
    estimate = ck.condition_number(x)
    assert not estimate.kappa.requires_grad
    assert float(estimate.kappa) == 1


def test_vectors_have_kappa_one() -> None:
    for size in ((1, 1), (1, 9), (9, 1)):
        x = gaussian(4, *size)
        estimate = ck.condition_number(x)
        assert (estimate.kappa == 1).all()
        assert torch.allclose(estimate.sigma_max, torch.linalg.vector_norm(x.double(), dim=(1, 2)), rtol=1e-6)


def test_orthogonal_matrices_have_kappa_one_to_rounding() -> None:
    q = ck.orthogonalize(gaussian(5, 64, 768))
    estimate = ck.condition_number(q)
    assert float((estimate.kappa - 1).max()) <= 2 * tolerances.sigma(torch.float32, 64)
    assert float((estimate.kappa - 1).max()) < 1e-6 * 8
    assert residual(q) < 1e-6


@pytest.mark.parametrize("rtol", [1e-1, 1e-4, 1e-8, 1e-13])
def test_rtol_is_met_or_the_status_says_not(rtol: float) -> None:
    x = gaussian(20, 16, 64)
    estimate = ck.condition_number(x, rtol=rtol)
    width, converged = estimate.high / estimate.low - 1, estimate.status == Status.CONVERGED
    assert (width[~converged] >= rtol - 8 * tolerances.EPS64).all()  # no status is worse than its bracket
    assert bool(converged.all()) == (rtol >= 1e-8)
    check(x, estimate, rtol)


@pytest.mark.usefixtures("untouched_rng")
def test_c01_ambient_device_and_dtype_do_not_leak_in() -> None:
    x = torch.stack((gaussian(8, 16), from_spectrum(geometric(8, 1e5), 8, 16, dtype=torch.float32), torch.zeros(8, 16)))
    expected = ck.condition_number(x)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            inside = ck.condition_number(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(inside.kappa, expected.kappa)
    assert torch.equal(inside.status, expected.status)


def test_low_precision_switches_do_not_widen_the_bracket() -> None:
    switch = torch.backends.mkldnn.matmul
    before = switch.fp32_precision
    x = gaussian(4, 64, 128)
    try:
        switch.fp32_precision = "bf16"
        check(x, ck.condition_number(x))
        assert switch.fp32_precision == "bf16"
    finally:
        switch.fp32_precision = before


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"weights": [[1.0]]}, TypeError, "weights must be a torch.Tensor, got list"),
        ({"weights": torch.ones(2, 2, dtype=torch.uint8)}, TypeError, "got uint8"),
        ({"weights": torch.ones(4)}, ValueError, "at least 2 dimensions"),
        ({"weights": torch.ones(2, 2, device="meta")}, ValueError, "meta device"),
        ({"rtol": 0.0}, ValueError, r"rtol must be a positive finite number, got 0\.0"),
        ({"rtol": math.inf}, ValueError, "rtol must be"),
        ({"rtol": "1e-3"}, ValueError, "rtol must be"),
        ({"backend": "nope"}, ValueError, "backend must be one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_named(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    arguments = {"weights": torch.ones(2, 2)} | arguments
    with pytest.raises(error, match=words):
        ck.condition_number(arguments.pop("weights"), **arguments)


def test_statuses_are_sentences_and_indices_are_those_of_the_batch() -> None:
    assert {status.sentence for status in Status} == {Status(code).sentence for code in range(5)}
    assert len({status.sentence for status in Status}) == 5
    x = gaussian(2, 3, 4, 8)
    x[1, 2] = 0
    assert ck.condition_number(x).failures() == ["matrix (1, 2): every element of the matrix is zero"]
