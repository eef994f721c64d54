"""orthogonalize and certify against the float64 SVD and QR."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import conditioned_kernels as ck
from conditioned_kernels import Status, _torch

from . import tolerances
from .matrices import (
    DTYPES,
    SPECTRA,
    STRIDES,
    from_spectrum,
    gaussian,
    geometric,
    polar_oracle,
    qr_oracle,
    residual,
    restrided,
    svd,
    wide,
)

pytestmark = pytest.mark.usefixtures("each_backend")

METHODS = ("polar", "qr")
ORACLES = {"polar": polar_oracle, "qr": qr_oracle}
methods = pytest.mark.parametrize("method", METHODS)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

sizes = st.integers(0, 24)
shapes = st.lists(st.integers(0, 4), max_size=3).flatmap(lambda b: st.tuples(*map(st.just, b), sizes, sizes))


def forward_tolerance(method: str, x: Tensor) -> Tensor:
    """Per matrix, (..., 1, 1)."""
    s = svd(x)[1]
    short = s.shape[-1]
    if not short:
        return torch.zeros(())
    allowed = [
        getattr(tolerances, method)(x.dtype, float(kappa), short) for kappa in (s[..., 0] / s[..., -1]).reshape(-1)
    ]
    return torch.tensor(allowed, dtype=torch.float64).reshape(*s.shape[:-1], 1, 1)


@given(shape=shapes, dtype=st.sampled_from(DTYPES), method=st.sampled_from(METHODS), how=st.sampled_from(STRIDES))
def test_any_shape_dtype_and_stride(shape: tuple[int, ...], dtype: torch.dtype, method: str, how: str) -> None:
    x = restrided(gaussian(*shape, seed=sum(shape), dtype=dtype), how)
    before = x.clone()
    q, certificate = ck.certify(x, method=method)
    assert torch.equal(x, before)
    assert q.shape == x.shape
    assert q.dtype == dtype
    assert q.is_contiguous()
    assert q.device == x.device
    assert certificate.status.shape == certificate.residual.shape == shape[:-2]
    singular = (certificate.status != Status.CONVERGED)[..., None, None]  # half types round to singular now and then
    kept = torch.where(singular, ORACLES[method](x).to(dtype), q)
    assert residual(kept) <= tolerances.orthogonality(dtype)
    difference = (kept.to(wide(dtype)) - ORACLES[method](x)).abs()
    assert (difference <= forward_tolerance(method, x)).all()


@methods
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kappa", [1.0, 1.5, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7])
def test_any_condition_number(method: str, dtype: torch.dtype, spectrum, kappa: float) -> None:
    """Also with kappa near 1 / eps(float32), where one Cholesky pass has lost all orthogonality."""
    x = from_spectrum(spectrum(16, kappa).expand(2, 16), 40, 16, dtype=dtype)
    q, certificate = ck.certify(x, method=method, verify=True)
    assert residual(q) <= tolerances.orthogonality(dtype)
    assert float(certificate.residual.max()) <= tolerances.orthogonality(dtype)
    difference = (q.to(wide(dtype)) - ORACLES[method](x)).abs()
    assert (difference <= forward_tolerance(method, x)).all()


@all_dtypes
@methods
def test_the_certificate_is_the_residual_of_what_is_returned(method: str, dtype: torch.dtype) -> None:
    x = gaussian(3, 48, 12, dtype=dtype)
    q, certificate = ck.certify(x, method=method)
    for i in range(3):
        # Both are measured: one in the working precision, one in float64.
        assert float(certificate.residual[i]) == pytest.approx(residual(q[i]), abs=12 * tolerances.work_eps(dtype))
    assert certificate.failures() == []


@methods
def test_a01_a30_every_dtype_has_both_factors(method: str) -> None:
    """A01, A30: half types work in float32 and are cast once; complex gives a unitary factor."""
    for dtype, allowed in ((torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.complex64, 1e-6)):
        q = ck.orthogonalize(gaussian(4, 16, 64, dtype=dtype), method=method)
        assert q.dtype == dtype
        assert residual(q) < allowed


@methods
def test_a03_half_square_matrices_return(method: str) -> None:
    x = gaussian(64, 64, dtype=torch.float16)
    assert residual(ck.orthogonalize(x, method=method)) <= tolerances.orthogonality(torch.float16)
    x[3, 5] = math.inf
    with pytest.raises(ValueError, match="non-finite input"):
        ck.orthogonalize(x, method=method)


@methods
@pytest.mark.parametrize("batch", [1, 2, 7, 33])
def test_a07_batched_equals_one_by_one(method: str, batch: int) -> None:
    x = gaussian(batch, 8, 40)
    x[0] = from_spectrum(geometric(8, 1e5), 8, 40, dtype=torch.float32)  # takes the careful path among the others
    together = ck.orthogonalize(x, method=method)
    alone = torch.stack([ck.orthogonalize(matrix, method=method) for matrix in x])
    assert (together - alone).abs().max() <= 4 * tolerances.eps(torch.float32)


@methods
def test_chunks_do_not_show(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = gaussian(7, 8, 40)
    whole = ck.orthogonalize(x, method=method)
    monkeypatch.setattr(_torch, "CHUNK_BYTES", 3 * 8 * 40 * 4)
    assert (ck.orthogonalize(x, method=method) - whole).abs().max() <= 4 * tolerances.eps(torch.float32)


@methods
def test_a08_three_dimensional_input_is_a_batch(method: str) -> None:
    """nn.init.orthogonal_ flattens it, and each block then has an error near 1."""
    x = gaussian(8, 16, 64)
    assert all(residual(block) < 1e-6 for block in ck.orthogonalize(x, method=method))
    assert residual(torch.nn.init.orthogonal_(x.clone())[0]) > 0.5
    assert "leading dimensions are batch" in (ck.orthogonalize.__doc__ or "").splitlines()[0]


def test_a09_four_dimensional_input_is_a_batch() -> None:
    x = gaussian(4, 3, 3, 8)
    q = ck.orthogonalize(x)
    assert q.shape == x.shape
    assert all(residual(block) < 1e-6 for block in q.flatten(0, 1))


@methods
@pytest.mark.parametrize("shape", [(0, 1), (1, 0), (0, 0), (3, 0, 8), (0, 4, 8), (1, 0, 2, 4, 5)], ids=str)
def test_a10_a11_empty_input_is_a_no_op(method: str, shape: tuple[int, ...]) -> None:
    """A10, A11: no rows, no columns or no heads; the shape comes back."""
    q, certificate = ck.certify(torch.empty(shape), method=method, verify=True)
    assert q.shape == shape
    assert certificate.status.shape == shape[:-2]
    assert certificate.failures() == []


@methods
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_a12_e03_degenerate_matrices_are_flagged_and_finite(method: str, dtype: torch.dtype) -> None:
    """A12, E03: zero, zero row, equal rows and the identity; polar of 0 is 0, and neighbours are unaffected."""
    generic = gaussian(4, 8, dtype=dtype)
    zero_row, equal_rows = generic.clone(), generic.clone()
    zero_row[1] = 0
    equal_rows[3] = equal_rows[0]
    x = torch.stack((torch.zeros(4, 8, dtype=dtype), zero_row, generic, equal_rows))
    q, certificate = ck.certify(x, method=method)
    assert q.isfinite().all()
    assert certificate.status.tolist() == [
        Status.ZERO_MATRIX,
        Status.RANK_DEFICIENT,
        Status.CONVERGED,
        Status.RANK_DEFICIENT,
    ]
    assert [sentence.partition(":")[0] for sentence in certificate.failures()] == ["matrix 0", "matrix 1", "matrix 3"]
    assert torch.equal(q[2], ck.orthogonalize(generic, method=method))
    identity = torch.eye(8, dtype=dtype)
    assert torch.equal(ck.orthogonalize(identity, method=method), identity)
    if method == "polar":
        assert (q[0] == 0).all()
        # The partial isometry: singular values 1, 1, 1, 0.
        s = torch.linalg.svdvals(q[[1, 3]].to(wide(dtype)))
        assert torch.allclose(s, s.new_tensor([1, 1, 1, 0]), atol=tolerances.sigma(dtype, 4))
    else:
        assert residual(q) <= tolerances.orthogonality(dtype)  # a completed orthonormal basis


@methods
def test_verify_names_the_failing_matrices(method: str) -> None:
    x = gaussian(2, 3, 4, 8)
    x[1, 2] = 0
    with pytest.raises(RuntimeError, match=r"1 matrices: matrix \(1, 2\): every element of the matrix is zero"):
        ck.orthogonalize(x, method=method, verify=True)


@methods
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a19_a20_a_non_finite_head_is_named_and_harms_no_other(method: str, value: float) -> None:
    """A19, A20: the message names the head and says non-finite; nonfinite="nan" gives NaN there only."""
    x = gaussian(12, 8, 16)
    x[2, 3, 5] = value
    with pytest.raises(ValueError, match=r"matrix 2: .*non-finite input.*nonfinite='nan'"):
        ck.orthogonalize(x, method=method)
    q, certificate = ck.certify(x, method=method, nonfinite="nan")
    assert q[2].isnan().all()
    assert certificate.status.tolist() == [Status.NON_FINITE if i == 2 else Status.CONVERGED for i in range(12)]
    others = [i for i in range(12) if i != 2]
    assert (q[others] - ck.orthogonalize(x[others], method=method)).abs().max() <= 4 * tolerances.eps(torch.float32)


def test_a22_a23_no_silent_gradient() -> None:
    """A22, A23: no gradient at the very point these functions lead to, and none that is NaN."""
    x = torch.eye(4, requires_grad=True)
    q = ck.orthogonalize(x)
    assert q.grad_fn is None
    assert not q.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        q.sum().backward()
    deficient = torch.cat((torch.rand(8, 3), torch.zeros(8, 5)), 1).requires_grad_()
    assert ck.orthogonalize(deficient, method="qr").grad_fn is None
    assert deficient.requires_grad
    assert "no gradient" in (ck.orthogonalize.__doc__ or "")


@methods
@pytest.mark.parametrize("size", [(512, 512), (1024, 256)], ids=str)
def test_a28_large_matrices_in_full_precision_whatever_the_switches(method: str, size: tuple[int, int]) -> None:
    """A28, E10: entries must not be off by 1e-2 because some process-wide switch allows low-precision products."""
    switch = torch.backends.mkldnn.matmul
    before = switch.fp32_precision
    try:
        switch.fp32_precision = "bf16"
        q = ck.orthogonalize(gaussian(*size), method=method)
        assert switch.fp32_precision == "bf16"
    finally:
        switch.fp32_precision = before
    assert residual(q) <= tolerances.orthogonality(torch.float32)


def test_e10_the_switches_are_at_full_precision_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every processor has a low-precision product to show the difference, so look at the switches themselves."""
    switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [switch.fp32_precision for switch in switches]
    seen = []

    def spied(original: Callable[..., object]) -> Callable[..., object]:
        def spy(*args: object) -> object:
            seen.append([switch.fp32_precision for switch in switches])
            return original(*args)

        return spy

    for name in ("_orthogonalize_chunk", "_spectrum_chunk"):
        monkeypatch.setattr(_torch, name, spied(getattr(_torch, name)))
    try:
        switches[0].fp32_precision, switches[1].fp32_precision = "tf32", "bf16"
        ck.orthogonalize(gaussian(8, 16))
        ck.condition_number(gaussian(8, 16))
        with pytest.raises(KeyboardInterrupt), _torch.full_precision():
            raise KeyboardInterrupt
        assert [switch.fp32_precision for switch in switches] == ["tf32", "bf16"]
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value
    assert seen == [["ieee", "ieee"]] * 2


@methods
@pytest.mark.parametrize("case", ["kappa 1.6e3", "equal columns but for rounding", "gaussian", "square gaussian"])
def test_a31_one_cholesky_pass_is_not_enough(method: str, case: str) -> None:
    """The four inputs of the report; Cholesky does not fail on two equal columns, so only a residual can tell."""
    x = {
        "kappa 1.6e3": from_spectrum(geometric(64, 1.6e3), 512, 64, dtype=torch.float32),
        "equal columns but for rounding": gaussian(512, 64),
        "gaussian": gaussian(768, 64),
        "square gaussian": gaussian(64, 64),
    }[case]
    if case.startswith("equal"):
        x[:, 1] = x[:, 0] * (1 + 1e-6 * gaussian(512, seed=1))
    assert residual(ck.orthogonalize(x, method=method, verify=True)) < 1e-6


@methods
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-20, 1e-12, 1.0, 1e12, 1e30])
def test_e01_any_scale(method: str, scale: float, dtype: torch.dtype) -> None:
    """Products underflow and overflow, denormal input included; what is stored is what counts."""
    x = (gaussian(2, 32, 128, dtype=torch.float64) * scale).to(dtype)
    q = ck.orthogonalize(x, method=method, verify=True)
    assert residual(q) <= tolerances.orthogonality(dtype)
    # A power of two scales the input without rounding it.
    exact = ORACLES[method](x.double() * 2.0 ** -round(math.log2(scale)))
    assert ((q.double() - exact).abs() <= forward_tolerance(method, x.double().mul(1 / scale).to(x.dtype))).all()


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e200, 1e300])
@methods
def test_e01_any_scale_of_float64(method: str, scale: float) -> None:
    x = gaussian(8, 20, dtype=torch.float64) * scale
    q = ck.orthogonalize(x, method=method, verify=True)
    assert residual(q) <= tolerances.orthogonality(torch.float64)


@methods
def test_e04_the_default_is_orthogonal(method: str) -> None:
    s = svd(ck.orthogonalize(gaussian(64, 768), method=method))[1]
    assert float(s[0] / s[-1]) < 1 + 2 * tolerances.sigma(torch.float32, 64) < 1 + 1e-4
    assert float(s[0] / s[-1]) < 1 + 1e-5


def test_e06_offsets_beyond_two_to_the_31() -> None:
    """A small view into a huge parent: untouched pages cost no memory, and its offsets need 64 bits."""
    parent = torch.empty(2**31 + 4096, dtype=torch.float16)
    view = parent.as_strided((3, 8, 16), (2**30, 16, 1))
    view.copy_(gaussian(3, 8, 16))
    q = ck.orthogonalize(view)
    assert residual(q) <= tolerances.orthogonality(torch.float16)
    assert torch.equal(q, ck.orthogonalize(view.contiguous()))
    assert (ck.condition_number(view).kappa - ck.condition_number(view.contiguous()).kappa == 0).all()


@methods
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (7, 1)], ids=str)
def test_vectors_and_scalars_become_unit_vectors(method: str, size: tuple[int, int]) -> None:
    x = gaussian(5, *size)
    expected = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    if method == "qr" and size == (1, 1):
        expected = x.sign()
    assert torch.allclose(ck.orthogonalize(x, method=method), expected, atol=4 * tolerances.eps(torch.float32))


@pytest.mark.parametrize(
    ("argument", "error", "words"),
    [
        ({"weights": [[1.0]]}, TypeError, "weights must be a torch.Tensor, got list"),
        ({"weights": torch.ones(2, 2, dtype=torch.int8)}, TypeError, "got int8.*dequantize"),
        ({"weights": torch.ones(2, 2).to(torch.float8_e4m3fn)}, TypeError, "float8_e4m3fn"),
        ({"weights": torch.ones(2, 2).to_sparse()}, TypeError, "to_dense"),
        ({"weights": torch.ones(4)}, ValueError, r"at least 2 dimensions, got \(4,\)"),
        ({"weights": torch.ones(2, 2, device="meta")}, ValueError, "meta device.*materialize"),
        ({"method": "svd"}, ValueError, "method must be one of 'polar', 'qr', got 'svd'"),
        ({"nonfinite": "skip"}, ValueError, "nonfinite must be one of"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_named(argument: dict[str, object], error: type[Exception], words: str) -> None:
    for function in (ck.orthogonalize, ck.certify):
        arguments = {"weights": torch.ones(2, 2)} | argument
        with pytest.raises(error, match=words):
            function(arguments.pop("weights"), **arguments)


@pytest.mark.usefixtures("untouched_rng")
def test_c01_ambient_device_and_dtype_do_not_leak_in() -> None:
    x = gaussian(3, 8, 16)
    x[1] = from_spectrum(geometric(8, 1e5), 8, 16, dtype=torch.float32)
    expected = {method: ck.orthogonalize(x, method=method) for method in METHODS}
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            for method in METHODS:
                assert torch.equal(ck.orthogonalize(x, method=method), expected[method])
    finally:
        torch.set_default_dtype(torch.float32)


def test_a29_works_in_a_forked_child() -> None:
    """LAPACK in the parent, then in a forked child, 60 s limit."""
    code = (
        "import os, torch, conditioned_kernels as ck\n"
        "torch.set_num_threads(1)\n"
        "x = torch.randn(4, 32, 128)\n"
        "ck.condition_number(x); ck.orthogonalize(x)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    ck.condition_number(x); ck.orthogonalize(x); os._exit(7)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 7


@methods
@pytest.mark.parametrize("shape", [(1 << 17, 8), (8, 1 << 17)], ids=str)
def test_a_head_of_many_rows_takes_one_pass(
    shape: tuple[int, int], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounding of a Gram matrix does not grow with the rows, so that nothing has to be done again in float64."""
    monkeypatch.setattr(_torch, "careful", lambda *_: pytest.fail("the first pass was refused"))
    x = gaussian(*shape)
    q, certificate = ck.certify(x, method=method)
    assert certificate.status == Status.CONVERGED
    assert residual(q) <= tolerances.orthogonality(torch.float32)
