"""The CUDA ops against the CPU ones, on streams, on a second device, in a graph, and under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

import conditioned_kernels as ck
from conditioned_kernels import _extension, _ops, sampling


@pytest.fixture(scope="module", autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    found = _extension.load()
    if not found.cuda:
        pytest.skip(f"the extension has no CUDA code: {found.sentence}")


def gram(b: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    w = torch.randn(b, n, 12 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return (w @ w.mT).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 7, 17, 32, 63, 64, 65, 80, 96, 112, 128])
def test_parity_with_the_cpu(n: int, dtype: torch.dtype) -> None:
    """Field report E09: odd sizes too."""
    g = gram(5, n, dtype)
    error = torch.zeros(5).double()
    eps = torch.finfo(dtype).eps
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    from conditioned_kernels._backend import shared_memory

    if shared_memory(n, dtype) > limit:
        with pytest.raises(RuntimeError, match="shared memory"):
            _ops.gram_factor(g.cuda(), "polar")
    else:
        for method in ("polar", "qr"):
            cpu, gpu = _ops.gram_factor(g, method), _ops.gram_factor(g.cuda(), method)
            assert torch.allclose(gpu[0].cpu() * n**0.5, cpu[0] * n**0.5, rtol=100 * eps, atol=100 * eps)
            assert (gpu[1].cpu() - cpu[1]).abs().max() <= 64 * eps
            assert torch.equal(gpu[2].cpu(), cpu[2])
    cpu, gpu = (_ops.spectrum_bracket(x, e, 1e-3, n) for x, e in ((g, error), (g.cuda(), error.cuda())))
    assert torch.allclose(gpu[0].cpu(), cpu[0], rtol=2e-3)
    assert torch.equal(gpu[3].cpu(), cpu[3])


@pytest.mark.parametrize("elements", [range(40_000), range(7, 7003), range(4 * 2**32 - 5, 4 * 2**32 + 99)])
def test_samples_are_equal_to_the_last_bit(elements: range) -> None:
    """Field report A26."""
    cpu = sampling.philox_normal(2**63 + 9, range(3, 6), elements)
    gpu = sampling.philox_normal(2**63 + 9, range(3, 6), elements, device="cuda", backend="extension")
    assert torch.equal(gpu.cpu().view(torch.int32), cpu.view(torch.int32))


def test_public_functions_agree_across_devices() -> None:
    w = torch.randn(24, 64, 512, generator=torch.Generator().manual_seed(0))
    assert ck.explain_backend(w.cuda()).name == "extension"
    assert (ck.orthogonalize(w.cuda()).cpu() - ck.orthogonalize(w)).abs().max() < 4e-6
    cpu, gpu = ck.condition_number(w), ck.condition_number(w.cuda())
    assert torch.allclose(gpu.kappa.cpu(), cpu.kappa, rtol=1e-5)
    one, two = (ck.semi_orthogonal((8, 64, 256), seed=1, device=d) for d in ("cpu", "cuda"))
    assert (one - two.cpu()).abs().max() < 1e-6


def test_work_goes_to_the_current_stream_without_a_sync() -> None:
    """Field report F18."""
    g, error = gram(64, 64).cuda(), torch.zeros(64).double().cuda()
    expected = _ops.gram_factor(g, "polar")[0]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            copied = g.clone()
            got = _ops.gram_factor(copied, "polar")[0]
            _ops.spectrum_bracket(copied, error, 1e-3, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert torch.equal(got, expected)


def test_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    g = gram(4, 32)
    one, two = (_ops.gram_factor(g.to(f"cuda:{i}"), "qr")[0] for i in (0, 1))
    assert two.device.index == 1 and torch.cuda.current_device() == 0
    assert torch.equal(one.cpu(), two.cpu())


def test_graph_capture_and_replay() -> None:
    g, error = gram(16, 64).cuda(), torch.zeros(16).double().cuda()
    samples = torch.empty(4, 1000, device="cuda")
    other = gram(16, 64).flip(0).cuda() * 2

    def work() -> tuple:
        _ops.philox_normal_(samples, 1, 0, 0)
        return _ops.gram_factor(g, "polar")[0], _ops.spectrum_bracket(g, error, 1e-3, 64)[0]

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        factor, bounds = work()
    g.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(factor, _ops.gram_factor(other, "polar")[0])
    assert torch.equal(bounds, _ops.spectrum_bracket(other, error, 1e-3, 64)[0])


def test_same_bits_every_time_and_for_every_batch() -> None:
    """Field report A06."""
    for n in (16, 17, 24, 32, 40, 48):
        g = gram(64, n).cuda()
        first = _ops.gram_factor(g, "polar")[0]
        for _ in range(5):
            assert torch.equal(_ops.gram_factor(g, "polar")[0], first)
        many = g.repeat(16, 1, 1)
        assert torch.equal(_ops.gram_factor(many, "polar")[0], first.repeat(16, 1, 1))


@pytest.mark.parametrize("backend", ["extension", "triton"])
def test_f18_the_monitor_never_waits_on_ordinary_steps(backend: str) -> None:
    """Field report F18; tests/test_monitor.py asks the dispatcher the same without a GPU."""
    from torch import nn

    if backend == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).cuda()
    monitor = ck.ConditioningMonitor(model, backend=backend, layers_per_step=2)
    monitor.step()  # compiles
    monitor.flush()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            monitor.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    records = [record for record in monitor.flush() if record.step > 1]
    assert {record.step for record in records} == set(range(2, 7))
    heads = {f"layers.{i}.self_attn": model.layers[i].self_attn.in_proj_weight.view(3, 4, 32, 128) for i in range(3)}
    for record in records:
        weight = heads[record.layer]["qkv".index(record.projection), record.head]
        kappa = float(torch.linalg.cond(weight.detach().double()))
        assert record.low <= kappa * (1 + 1e-9) and kappa <= record.high * (1 + 1e-9)
        assert abs(record.kappa / kappa - 1) <= 1e-2


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    code = (
        "import torch; from conditioned_kernels import _ops;"
        "w = torch.randn(2, 17, 40); g = (w @ w.mT).cuda(); e = torch.zeros(2).double().cuda();"
        "_ops.gram_factor(g, 'polar'); _ops.gram_factor(g, 'qr'); _ops.spectrum_bracket(g, e, 1e-3, 17);"
        "_ops.philox_normal_(torch.empty(2, 99, device='cuda'), 1, 0, 3); torch.cuda.synchronize()"
    )
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--kernel-regex",
        "kns=ck",
        sys.executable,
        "-c",
        code,
    ]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
