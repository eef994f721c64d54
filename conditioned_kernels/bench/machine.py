"""The machine: what it is, how fast it copies and multiplies, and how much memory a call takes."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._backend import backends, explain_backend
from .._version import __version__
from .case import Work

COPY_BYTES = 256 << 20
MATMUL_SIDE = {"cpu": 1536, "cuda": 8192}


def synchronize(device: torch.device) -> None:
    """Wait for the device, where it runs on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """(wall time of one call, its result), the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    result = run()
    synchronize(device)
    return time.perf_counter() - start, result


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the versions a measurement belongs to."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model(),
        "kind": device.type,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "conditioned_kernels": __version__,
        "backend": explain_backend(torch.empty(1, 1, device=device)).name,
        "backends": backends(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "date": datetime.date.today().isoformat(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Rates:
    """Measured limits of a machine.

    Attributes
    ----------
    copy : bytes per second of a large copy, read plus write.
    matmul : by the name of the multiplied type, flop per second of a large square product.
    """

    copy: float
    matmul: Mapping[str, float]

    def floor(self, work: Work) -> tuple[float, str]:
        """Seconds the work takes at these rates, and which of the two binds."""
        memory, arithmetic = work.bytes / self.copy, work.flops / self.matmul[self._unit(work.dtype)]
        return max(memory, arithmetic), "memory" if memory >= arithmetic else "arithmetic"

    def _unit(self, dtype: torch.dtype) -> str:
        return next(unit for unit in UNITS[dtype] if unit in self.matmul)


UNITS = {
    torch.float64: ("float64",),
    torch.float32: ("tf32", "float32"),
    torch.float16: ("float16", "float32"),
    torch.bfloat16: ("bfloat16", "float32"),
}
"""The fastest unit that a job in a dtype could use, where the device has it; CPUs compute half types in float32."""


def measured_rates(device: torch.device, repeats: int = 5) -> Rates:
    """Copy bandwidth and matmul rates, the best of a few runs; takes about a second."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * COPY_BYTES / min(seconds(lambda: target.copy_(source), device)[0] for _ in range(repeats))
    kinds = {"float32": torch.float32, "float64": torch.float64}
    if device.type == "cuda":
        kinds |= {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32}
    return Rates(copy, {name: _matmul_rate(dtype, device, name == "tf32", repeats) for name, dtype in kinds.items()})


def _matmul_rate(dtype: torch.dtype, device: torch.device, tf32: bool, repeats: int) -> float:
    side = MATMUL_SIDE[device.type] // (2 if dtype == torch.float64 else 1)
    a = torch.randn(side, side, dtype=dtype, device=device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        return 2 * side**3 / min(seconds(lambda: a @ a, device)[0] for _ in range(repeats))
    finally:
        torch.set_float32_matmul_precision(before)


def peak_memory(run: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes that one call needs at its worst beyond what was held before it; None where that cannot be read."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        _return_free_memory()
        Path("/proc/self/clear_refs").write_text("5")  # the peak restarts at what is resident now
    except OSError:
        return None
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def _return_free_memory() -> None:
    """Give the system what earlier calls freed, which a call would otherwise use again without a trace."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def resident(field: str) -> int:
    """Resident memory of this program in bytes, from Linux: now ("VmRSS"), or at most so far ("VmHWM").

    ru_maxrss would start at what the program that ran this one had.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")
