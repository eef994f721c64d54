"""GPU benchmark: this package's Triton path against torch's own initializers and factorizations.

``python -m benchmarks.device --json FILE`` measures, writes JSON and prints a short table last. Each time is the
median of repeated runs between CUDA events, after warm-up; the first call, which compiles, is listed apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import conditioned_kernels as ck
from conditioned_kernels import _ops
from conditioned_kernels.orthogonalize import _redraw
from conditioned_kernels.sampling import stream_key

DEVICE = torch.device("cuda", 0)


def milliseconds(run: Callable[[], object], budget: float) -> tuple[float, float]:
    """(first call, median of further calls) in ms, with about ``budget`` seconds for the latter."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    repeats = max(2, min(50, int(budget / max(first, 1e-3))))
    run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * first, statistics.median(times)


def drawn(layers: int, heads: int, rows: int, cols: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """All heads of ``layers`` weights drawn in place, the residual per head as the result."""
    tensors = [torch.empty(heads, rows, cols, dtype=dtype, device=DEVICE) for _ in range(layers)]
    keys = [stream_key(0, str(layer), "q") for layer in range(layers)]
    return lambda: _ops.semi_orthogonal_(tensors, keys, [1.0] * layers, "polar", _redraw("polar"))


def newton_schulz() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """gram-newton-schulz where it is installed, with its kernels if it can: an optimizer's accuracy, not ours."""
    try:
        from gram_newton_schulz import GramNewtonSchulz
    except ImportError:
        return None
    try:
        return GramNewtonSchulz(compile_kwargs=None)
    except ImportError:  # its kernels need a package of their own
        return GramNewtonSchulz(ns_use_kernels=False, compile_kwargs=None)


def residual(q: torch.Tensor) -> float:
    """max |Q Q^T - I|, rows at most columns."""
    gram = q.double() @ q.double().mT
    return float((gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).abs().max())


def rows(budget: float) -> list[dict]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    result = []

    def add(case: str, contestant: str, heads: int, run: Callable[[], object], error: float | None = None) -> None:
        try:
            first, median = milliseconds(run, budget)
        except (RuntimeError, torch.OutOfMemoryError) as failure:
            result.append({"case": case, "contestant": contestant, "failed": str(failure).splitlines()[0]})
            return
        row = {
            "case": case,
            "contestant": contestant,
            "first_ms": first,
            "ms": median,
            "us_per_head": 1e3 * median / heads,
        }
        result.append(row | ({} if error is None else {"residual": error}))

    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        case = f"init Q, K 4096x128 x2048 {name}"
        run = drawn(64, 32, 128, 4096, dtype)
        add(case, "triton, in place", 2048, run, float(run().max()))
        one = torch.empty(128, 4096, device=DEVICE)
        add(case, "torch.nn.init.orthogonal_ (one head, fp32)", 1, lambda one=one: torch.nn.init.orthogonal_(one))
        w = torch.randn(3072, 128, 4096, device=DEVICE, generator=generator, dtype=torch.float32).to(dtype)
        case = f"kappa 4096x128 x3072 {name}"
        add(case, "condition_number, triton", 3072, lambda w=w: ck.condition_number(w, backend="triton"))
        small = w[:8].float()
        add(case, "torch.linalg.cond (8 heads, fp32)", 8, lambda small=small: torch.linalg.cond(small))
        case = f"orthogonalize 4096x128 x3072 {name}"
        _, certificate = ck.certify(w[:64], backend="triton")
        run = lambda w=w: ck.orthogonalize(w, backend="triton")  # noqa: E731
        add(case, "orthogonalize, triton", 3072, run, float(certificate.residual.max()))
        add(case, "orthogonalize, torch", 256, lambda w=w: ck.orthogonalize(w[:256], backend="torch"))
        add(case, "torch.linalg.qr (8 heads, fp32)", 8, lambda small=small: torch.linalg.qr(small.mT))
        add(
            case,
            "torch.linalg.svd (8 heads, fp32)",
            8,
            lambda small=small: torch.linalg.svd(small, full_matrices=False),
        )
        if (peer := newton_schulz()) is not None:
            add(case, "gram-newton-schulz", 3072, lambda w=w, peer=peer: peer(w), residual(peer(w[:8])))
        del w, small
    case = "init 48 layers x 12 heads 768x64 float32"
    run = drawn(48, 12, 64, 768, torch.float32)
    add(case, "triton, in place", 576, run, float(run().max()))
    for size in (1024, 4096):
        w = torch.randn(1, size, size, device=DEVICE, generator=generator)
        _, certificate = ck.certify(w, backend="triton")
        case = f"whole matrix {size}x{size} float32"
        run = lambda w=w: ck.orthogonalize(w, backend="triton")  # noqa: E731
        add(case, "orthogonalize, triton", 1, run, float(certificate.residual.max()))
        if (peer := newton_schulz()) is not None:
            add(case, "gram-newton-schulz", 1, lambda w=w, peer=peer: peer(w), residual(peer(w)))
        add(case, "torch.linalg.qr", 1, lambda w=w: torch.linalg.qr(w))
        add(case, "torch.linalg.svd", 1, lambda w=w: torch.linalg.svd(w))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per contestant")
    arguments = parser.parse_args()
    import triton

    table = rows(arguments.budget)
    machine = {
        "device": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "backends": ck.backends(),
        "precision": "tf32 for bf16 results, three tf32 products for fp16 and fp32; the global switches are not read",
    }
    arguments.json.write_text(json.dumps({"machine": machine, "rows": table}, indent=1) + "\n")
    print(machine["device"], "torch", machine["torch"], "triton", machine["triton"])
    print(f"{'case':42} {'contestant':42} {'ms':>10} {'us/head':>10} {'first ms':>10} {'residual':>9}")
    for row in table:
        if "failed" in row:
            print(f"{row['case']:42} {row['contestant']:42} failed: {row['failed'][:60]}")
            continue
        error = f"{row['residual']:9.1e}" if "residual" in row else ""
        print(
            f"{row['case']:42} {row['contestant']:42} {row['ms']:10.3f} {row['us_per_head']:10.3f} "
            f"{row['first_ms']:10.1f} {error}"
        )


if __name__ == "__main__":
    main()
