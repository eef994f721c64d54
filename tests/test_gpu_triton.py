"""The Triton backend on a real GPU. Without one every test skips, and says so."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

import conditioned_kernels as ck  # noqa: E402
from conditioned_kernels import _ops, _torch, _triton  # noqa: E402
from conditioned_kernels._triton.sample import normal_tile  # noqa: E402
from conditioned_kernels.orthogonalize import _redraw  # noqa: E402
from conditioned_kernels.sampling import philox_normal, stream_key  # noqa: E402

REASON = "no GPU" if not torch.cuda.is_available() else _triton.unavailable(torch.device("cuda", 0))
pytestmark = pytest.mark.skipif(REASON != "", reason=f"the triton backend cannot run here: {REASON}")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 1), (3, 17), (63, 65), (64, 768), (80, 511), (127, 513), (128, 4096))
DEVICE = torch.device("cuda", 0)
GAUSSIAN = {torch.float32: 1e-6, torch.float16: 1.1e-3, torch.bfloat16: 8e-3}
"""Residual allowed as stored."""


@triton.jit
def _tile_kernel(out_ptr, key, C: tl.constexpr, HAS_QUADS: tl.constexpr):
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    head = tl.full((), 3, tl.int64)
    tile = normal_tile(row, 0, C, C, 1, head, key, HAS_QUADS)
    tl.store(out_ptr + row[:, None] * C + tl.arange(0, C)[None, :], tile)


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["polar", "qr"])
def test_orthogonalize_against_fp64(method: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = gaussian(3, *shape, dtype=dtype)
    q, certificate = ck.certify(w, method=method, backend="triton")
    assert certificate.failures() == []
    exact = ck.orthogonalize(w.cpu().double(), method=method)
    kappa = float(ck.condition_number(w.cpu()).kappa.max())
    bound = 1e-6 * (1 + kappa) if dtype == torch.float32 else 2 * GAUSSIAN[dtype] + 1e-6 * kappa
    assert float((q.cpu().double() - exact).abs().max()) <= bound
    assert float(certificate.residual.max()) <= GAUSSIAN[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_first_pass_is_enough_for_gaussian_heads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("the certificate refused a Gaussian head")

    monkeypatch.setattr(_torch, "careful", refused)
    ck.orthogonalize(gaussian(64, 128, 4096, dtype=dtype), backend="triton")
    ck.orthogonalize(gaussian(64, 64, 768, dtype=dtype), backend="triton")


@pytest.mark.parametrize("dtype", DTYPES)
def test_condition_number_brackets_the_truth(dtype: torch.dtype) -> None:
    w = gaussian(6, 64, 768, dtype=dtype)
    w[1] *= torch.linspace(1, 100, 64, device=DEVICE)[:, None]
    estimate = ck.condition_number(w, backend="triton")
    exact = torch.linalg.cond(w.double())
    assert bool((estimate.low <= exact * (1 + 1e-9)).all())
    assert bool((estimate.high >= exact * (1 - 1e-9)).all())
    assert estimate.failures() == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 64, 768), (1, 128, 4096), (2, 33, 70), (2, 48, 20)])
def test_drawn_heads_equal_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    out = torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)
    ck.semi_orthogonal_(out, seed=5, key="w", role="q", gain=0.5, backend="triton")
    expected = ck.semi_orthogonal(shape, seed=5, key="w", role="q", gain=0.5, device="cpu")
    bound = {torch.float32: 1e-4 if shape[1:] == (48, 20) else 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    assert float((out.cpu().float() - expected).abs().max()) <= bound


def test_bits_do_not_depend_on_the_batch_or_the_call() -> None:
    whole = ck.semi_orthogonal((40, 64, 768), seed=1, device=DEVICE, backend="triton")
    again = ck.semi_orthogonal((40, 64, 768), seed=1, device=DEVICE, backend="triton")
    part = ck.semi_orthogonal((3, 64, 768), seed=1, device=DEVICE, backend="triton")
    later = ck.semi_orthogonal((3, 64, 768), seed=1, first=37, device=DEVICE, backend="triton")
    assert torch.equal(later, whole[37:])
    assert torch.equal(whole, again)
    assert torch.equal(whole[:3], part)
    w = gaussian(33, 24, 500)
    results = [ck.orthogonalize(w, backend="triton") for _ in range(6)]
    assert all(torch.equal(results[0], result) for result in results)
    alone = torch.stack([ck.orthogonalize(matrix, backend="triton") for matrix in w])
    assert float((alone - results[0]).abs().max()) <= 4 * torch.finfo(torch.float32).eps


def test_samples_on_the_device_are_the_stream_to_the_last_bit() -> None:
    key = stream_key(1, "a", "q")
    expected = philox_normal(key, range(3, 4), range(1 << 20), backend="torch").view(-1, 64)
    for quads in (True, False):
        out = torch.full((1 << 14, 64), torch.nan, device=DEVICE)
        signed = key - (1 << 64) if key >= 1 << 63 else key
        _tile_kernel[(1 << 10,)](out, signed, C=64, HAS_QUADS=quads, enable_fp_fusion=False)
        assert torch.equal(out.cpu().view(torch.int32), expected.view(torch.int32))


def test_beyond_31_bits_of_offset() -> None:
    parent = torch.zeros(3, 1 << 30, dtype=torch.bfloat16, device=DEVICE)
    heads = parent[:, -64 * 768 :].unflatten(1, (64, 768))
    ck.semi_orthogonal_(heads, seed=2, backend="triton")
    expected = ck.semi_orthogonal((3, 64, 768), seed=2, device="cpu")
    assert float((heads.cpu().float() - expected).abs().max()) < 4e-3
    assert float(parent[:, : -64 * 768].abs().max()) == 0


@pytest.mark.parametrize("shape", [(2, 300, 500), (1, 1024, 1024), (1, 512, 2048)])
@pytest.mark.parametrize("tf32", [True, False])
def test_whole_matrices_whatever_the_global_switch(shape: tuple[int, ...], tf32: bool) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        q, certificate = ck.certify(gaussian(*shape), backend="triton")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert certificate.failures() == []
    assert float(certificate.residual.max()) < 1e-5
    error = q.double() @ q.double().mT - torch.eye(shape[1], device=DEVICE)
    assert float(error.abs().max()) < 1e-5


def test_non_finite_zero_and_singular_neighbors() -> None:
    w = gaussian(5, 12, 40)
    w[1] = 0
    w[2, 3] = w[2, 4]
    w[3, 0, 0] = torch.nan
    q, certificate = ck.certify(w, backend="triton", nonfinite="nan")
    expected, reference = ck.certify(w.cpu(), nonfinite="nan")
    assert torch.equal(certificate.status.cpu(), reference.status)
    assert torch.equal(q.isnan().cpu(), expected.isnan())
    assert float((q[[0, 4]].cpu() - expected[[0, 4]]).abs().max()) < 2e-6


def test_a_model_of_many_layers_is_few_launches() -> None:
    tensors = [torch.empty(12, 64, 768, device=DEVICE) for _ in range(48)]
    keys = [stream_key(0, str(i), "q") for i in range(48)]
    _ops.semi_orthogonal_(tensors, keys, [0] * 48, [1.0] * 48, "polar", _redraw("polar"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        residual = _ops.semi_orthogonal_(tensors, keys, [0] * 48, [1.0] * 48, "polar", _redraw("polar"))
        torch.cuda.synchronize()
    ours = [event for event in profile.events() if event.name.startswith(("gram_kernel", "apply_kernel"))]
    assert len(ours) == 2
    assert float(residual.max()) < 1e-6
    assert torch.equal(
        tensors[7], ck.semi_orthogonal((12, 64, 768), key="7", role="q", device=DEVICE, backend="triton")
    )
