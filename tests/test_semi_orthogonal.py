"""semi_orthogonal and semi_orthogonal_: singular values, distribution, and what the weights may depend on."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import conditioned_kernels as ck
from conditioned_kernels import sampling

from . import tolerances
from .matrices import gaussian, polar_oracle, qr_oracle, residual, svd

pytestmark = pytest.mark.usefixtures("each_backend")

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
sizes = st.integers(0, 20)
shapes = st.lists(st.integers(0, 3), max_size=3).flatmap(lambda b: st.tuples(*map(st.just, b), sizes, sizes))


@given(
    shape=shapes,
    dtype=st.sampled_from(REAL),
    method=st.sampled_from(("polar", "qr")),
    gain=st.sampled_from((1, 0.02, 3.5)),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_singular_value_is_the_gain(
    shape: tuple[int, ...], dtype: torch.dtype, method: str, gain: float, seed: int
) -> None:
    w = ck.semi_orthogonal(shape, seed=seed, gain=gain, method=method, dtype=dtype)
    assert w.shape == shape
    assert w.dtype == dtype
    assert w.is_contiguous()
    s = svd(w)[1] / gain
    short = min(shape[-2:])
    # The product with the gain rounds each element once more.
    allowed = tolerances.sigma(dtype, short) + math.sqrt(short) * (tolerances.eps(dtype) + tolerances.cast(dtype))
    assert ((s - 1).abs() <= allowed).all()


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)], ids=str)
def test_a01_half_types_are_filled_in_place(dtype: torch.dtype, allowed: float) -> None:
    w = torch.empty(4, 16, 64, dtype=dtype)
    assert ck.semi_orthogonal_(w) is w
    assert w.dtype == dtype
    assert residual(w) < allowed
    # Work in float32, one cast.
    assert torch.equal(w, ck.semi_orthogonal((4, 16, 64), dtype=torch.float32).to(dtype))


@pytest.mark.parametrize(("method", "oracle"), [("polar", polar_oracle), ("qr", qr_oracle)], ids=["polar", "qr"])
@pytest.mark.parametrize("shape", [(3, 8, 32), (3, 32, 8), (2, 12, 12)], ids=str)
def test_it_is_the_factor_of_the_documented_samples(method: str, oracle, shape: tuple[int, ...]) -> None:
    key = sampling.stream_key(5, "name", "q")
    samples = sampling.philox_normal(key, range(shape[0]), range(shape[1] * shape[2])).view(shape)
    w = ck.semi_orthogonal(shape, seed=5, key="name", role="q", method=method)
    kappa = float((svd(samples)[1][:, 0] / svd(samples)[1][:, -1]).max())
    allowed = getattr(tolerances, method)(torch.float32, kappa, min(shape[1:]))
    assert float((w - oracle(samples)).abs().max()) <= allowed


def test_a14_no_dead_columns_in_a_wide_matrix() -> None:
    w = ck.semi_orthogonal((16, 256))
    assert residual(w) <= tolerances.orthogonality(torch.float32)
    norms = w.square().sum(0)
    assert float(norms.min()) > 0
    assert float(norms.mean()) == pytest.approx(16 / 256, rel=1e-6)


def test_it_is_haar_distributed() -> None:
    """Entries of a Haar matrix have mean 0, variance 1/n and fourth moment 3/(n(n+2)); signs are symmetric."""
    number, n = 20_000, 6
    for method in ("polar", "qr"):
        w = ck.semi_orthogonal((number, 2, n), seed=11, method=method).double()
        first = w[:, 0]  # uniform on the sphere
        second, fourth = 1 / n, 3 / (n * (n + 2))
        assert (first.mean(0).abs() <= tolerances.sampling(math.sqrt(second / number))).all()
        spread = math.sqrt((fourth - second**2) / number)
        assert ((first.square().mean(0) - second).abs() <= tolerances.sampling(spread)).all()
        eighth = 105 / (n * (n + 2) * (n + 4) * (n + 6))
        assert ((first**4).mean(0) - fourth).abs().max() <= tolerances.sampling(math.sqrt(eighth / number))
        product = (first[:, 0] * w[:, 1, 1]).mean()
        assert abs(float(product)) <= tolerances.sampling(1 / n / math.sqrt(number))


def test_the_weights_depend_on_seed_key_role_and_head_alone() -> None:
    """Any leading part of a batch, in any shape of batch, is the same matrices; other names are other matrices."""
    w = ck.semi_orthogonal((6, 8, 16), seed=3, key="a", role="q")
    allowed = 4 * tolerances.eps(torch.float32)
    assert (ck.semi_orthogonal((2, 3, 8, 16), seed=3, key="a", role="q").flatten(0, 1) - w).abs().max() <= allowed
    assert (ck.semi_orthogonal((2, 8, 16), seed=3, key="a", role="q") - w[:2]).abs().max() <= allowed
    others = [
        ck.semi_orthogonal((6, 8, 16), seed=seed, key=key, role=role)
        for seed, key, role in ((4, "a", "q"), (3, "b", "q"), (3, "a", "k"), (3, "", "q"), (-3, "a", "q"))
    ]
    stacked = torch.stack((w, *others)).flatten(0, 1).flatten(1)
    # Rows of norm sqrt(8): cosines of independent matrices are about 1/sqrt(128).
    cosine = stacked @ stacked.mT / 8 - torch.eye(36)
    assert float(cosine.abs().max()) < 6 / math.sqrt(128)


@pytest.mark.usefixtures("untouched_rng")
def test_a26_c01_ambient_device_and_default_dtype() -> None:
    """A26, C01: what is asked for is what comes; a meta result is refused, since it would silently be nothing."""
    expected = ck.semi_orthogonal((4, 8), dtype=torch.float32, device="cpu")
    with torch.device("meta"):
        assert torch.equal(ck.semi_orthogonal((4, 8), dtype=torch.float32, device="cpu"), expected)
        with pytest.raises(ValueError, match="tensor is on the meta device"):
            ck.semi_orthogonal((4, 8))
    torch.set_default_dtype(torch.float64)
    try:
        w = ck.semi_orthogonal((4, 8))
        assert w.dtype == torch.float64
        assert residual(w) <= tolerances.orthogonality(torch.float64)
        assert torch.equal(ck.semi_orthogonal((4, 8), dtype=torch.float32), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    # The float64 result is that of the same samples.
    assert (w - expected).abs().max() <= tolerances.polar(torch.float32, 10, 4)


@pytest.mark.usefixtures("untouched_rng")
def test_a27_a_generator_replaces_the_seed() -> None:
    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(7)

    one = ck.semi_orthogonal((4, 8), generator=generator())
    assert torch.equal(ck.semi_orthogonal((4, 8), generator=generator()), one)
    used = generator()
    assert torch.equal(ck.semi_orthogonal((4, 8), seed=99, generator=used), one)
    assert not torch.equal(ck.semi_orthogonal((4, 8), generator=used), one)
    drawn = int(torch.randint(2**63 - 1, (), generator=generator()))
    assert torch.equal(ck.semi_orthogonal((4, 8), seed=drawn), one)


def test_a32_parameters_are_filled_in_place() -> None:
    """A32: same object and storage, version counted, still a leaf; inside no_grad and inference mode too."""
    parameter = nn.Parameter(torch.zeros(3, 4, 8))
    storage, version = parameter.data_ptr(), parameter._version
    ck.semi_orthogonal_(parameter)
    assert parameter.data_ptr() == storage
    assert parameter._version > version
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    expected = parameter.detach().clone()
    for context in (torch.no_grad(), torch.inference_mode()):
        parameter.data.zero_()
        with context:
            ck.semi_orthogonal_(parameter)
        assert torch.equal(parameter, expected)
        parameter.sum().backward()
    with torch.inference_mode():
        inside = torch.empty(4, 8)
    with pytest.raises(RuntimeError, match=r"tensor was created under torch\.inference_mode"):
        ck.semi_orthogonal_(inside)


@given(st.sampled_from(["transposed", "rows", "columns", "offset", "permuted"]))
def test_in_place_through_any_strides_touches_nothing_else(how: str) -> None:
    parent = torch.full((6, 16, 24), math.nan)
    view = {
        "transposed": parent.mT[:3],
        "rows": parent[1:4, ::2],
        "columns": parent[:3, :, 1::3],
        "offset": parent[3:, 5:, 2:],
        "permuted": parent.permute(1, 0, 2)[:3],
    }[how]
    ck.semi_orthogonal_(view, seed=2)
    assert torch.equal(view, ck.semi_orthogonal(view.shape, seed=2))
    assert int(parent.isfinite().sum()) == view.numel()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8).expand(4, 8),
        torch.zeros(4, 1).expand(4, 8),
        torch.zeros(1, 4, 8).expand(3, 4, 8),
        torch.zeros(20).as_strided((4, 8), (1, 2)),
        torch.zeros(40).as_strided((4, 8), (5, 1)),
    ],
    ids=["rows", "columns", "batch", "overlap", "overlapping rows"],
)
def test_elements_that_share_memory_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="tensor has elements that share memory"):
        ck.semi_orthogonal_(tensor)
    assert (tensor == 0).all()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"shape": (4,)}, ValueError, "shape must be"),
        ({"shape": (4, -1)}, ValueError, "sizes >= 0"),
        ({"shape": 4}, TypeError, "shape must be a sequence"),
        ({"gain": 0}, ValueError, "gain must be a positive finite number, got 0"),
        ({"gain": -1.0}, ValueError, "gain must be"),
        ({"gain": math.nan}, ValueError, "gain must be"),
        ({"gain": True}, ValueError, "gain must be"),
        ({"method": "svd"}, ValueError, "method must be one of"),
        ({"dtype": torch.complex64}, TypeError, "complex64"),
        ({"dtype": torch.int64}, TypeError, "int64"),
        ({"backend": "nope"}, ValueError, "backend must be one of"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    arguments = {"shape": (4, 8)} | arguments
    with pytest.raises(error, match=words):
        ck.semi_orthogonal(arguments.pop("shape"), **arguments)


@pytest.mark.parametrize("shape", [(0, 1), (1, 0), (0, 0), (3, 0, 8), (0, 4, 8)], ids=str)
def test_a10_empty_shapes(shape: tuple[int, ...]) -> None:
    assert ck.semi_orthogonal(shape).shape == shape


def test_a_singular_draw_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw of the stream is never singular in practice; the check is there all the same."""
    module = sys.modules[ck.semi_orthogonal_.__module__]  # the package's name "orthogonalize" is the function
    monkeypatch.setattr(module, "philox_normal", lambda key, heads, elements, **_: torch.ones(len(heads), 32))
    w = gaussian(2, 4, 8)
    with pytest.raises(RuntimeError, match=r"numerically singular matrix \(matrix 0: .*use another seed"):
        ck.semi_orthogonal_(w)
