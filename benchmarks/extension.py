"""The extension's numbers, side by side in one process: ``python benchmarks/extension.py``.

Every case is run in turn, many times over, and the best time of each is kept, so that a busy machine slows all
alike. Prints milliseconds and the ratio to the peer named first in its group.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

import conditioned_kernels as ck
from conditioned_kernels import _ops, _torch, sampling

Cases = dict[str, Callable[[], object]]


def best(cases: Cases, repetitions: int) -> dict[str, float]:
    times = dict.fromkeys(cases, float("inf"))
    for _ in range(repetitions):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def groups() -> dict[str, Cases]:
    w = torch.randn(432, 64, 768, generator=torch.Generator().manual_seed(0))
    heads, whole = torch.empty(32, 2048, 64), torch.empty(2048, 2048)
    gram, terms = _torch.gram_blocked(w)
    error = _torch.gram_rounding(gram, terms).double()
    vectors = _ops.spectrum_bracket(gram, error, 1e-3, 64)[1]

    def loop() -> None:
        for head in heads:
            torch.nn.init.orthogonal_(head)

    return {
        "4.2 M normal samples, float32": {
            "torch.randn": lambda: torch.randn(32 * 2048 * 64),
            "philox_normal": lambda: sampling.philox_normal(1, range(32), range(2048 * 64), backend="extension"),
            "philox_normal, torch backend": lambda: sampling.philox_normal(
                1, range(32), range(2048 * 64), backend="torch"
            ),
        },
        "random semi-orthogonal, 32 heads of 2048 x 64": {
            "loop of nn.init.orthogonal_": loop,
            "semi_orthogonal_": lambda: ck.semi_orthogonal_(heads),
        },
        "the same against one 2048 x 2048 matrix": {
            "nn.init.orthogonal_": lambda: torch.nn.init.orthogonal_(whole),
            "semi_orthogonal_ on its heads": lambda: ck.semi_orthogonal_(heads),
        },
        "kappa of 432 heads of 768 x 64, rtol 1e-3": {
            "torch.linalg.cond": lambda: torch.linalg.cond(w),
            "condition_number": lambda: ck.condition_number(w),
            "condition_number, torch backend": lambda: ck.condition_number(w, backend="torch"),
            "Gram matrices alone": lambda: _torch.gram_blocked(w),
        },
        "both ends of 432 spectra, 64 x 64": {
            "torch.linalg.eigvalsh": lambda: torch.linalg.eigvalsh(gram),
            "spectrum_bracket": lambda: _ops.spectrum_bracket(gram, error, 1e-3, 64),
            "spectrum_bracket, warm": lambda: _ops.spectrum_bracket(gram, error, 1e-3, 64, vectors),
        },
        "432 polar factors, 64 x 64": {
            "torch (Newton-Schulz by bmm)": lambda: _torch.factor(gram, "polar"),
            "gram_factor": lambda: _ops.gram_factor(gram, "polar"),
        },
        "432 inverse Cholesky factors, 64 x 64": {
            "torch.linalg": lambda: _torch.factor(gram, "qr"),
            "gram_factor": lambda: _ops.gram_factor(gram, "qr"),
        },
    }


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, best of {repetitions}")
    for title, cases in groups().items():
        times = best(cases, repetitions)
        first = next(iter(times.values()))
        print(title)
        for name, seconds in times.items():
            print(f"  {name:32} {seconds * 1e3:8.2f} ms {first / seconds:7.2f}x")


if __name__ == "__main__":
    main()
