"""Which implementation runs, and why. Pure: nothing here computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import _extension, _triton
from ._validate import choice

MAX_SHORT = {"cpu": 256, "cuda": 128}
"""Largest short side for the extension: above it, on the CPU, LAPACK's blocked factorizations win; on a GPU, the
matrices have to fit shared memory (:func:`shared_memory`)."""


class Backend(NamedTuple):
    """A choice: the backend's name, the device it computes on, and the reason in words."""

    name: str
    device: torch.device
    reason: str


def shared_memory(short: int, dtype: torch.dtype) -> int:
    """Bytes of shared memory one block of the factor kernel needs; ``factor_workspace`` of csrc/small_matrix.cuh."""
    item = 8 if dtype == torch.float64 else 4
    padded = -(-short * item // 16) * 16 // item
    return (padded * padded * (3 if padded == short else 4) + 2 * padded) * item


def _no_torch(device: torch.device, dtype: torch.dtype, short: int) -> str:
    return ""


def extension_refusal(device: torch.device, dtype: torch.dtype, short: int) -> str:
    """Why the extension cannot serve matrices on ``device`` of ``dtype`` with this smaller side; "" if it can."""
    if dtype.is_complex:
        return f"it has real dtypes only, not {str(dtype).removeprefix('torch.')}"
    if short > MAX_SHORT[device.type]:
        return f"its matrices have at most {MAX_SHORT[device.type]} rows on {device.type}, not {short}"
    found = _extension.load()
    if not found.available:
        return found.sentence
    if device.type == "cuda":
        if not found.cuda:
            return "it was built without CUDA code (python -m conditioned_kernels.build, with nvcc, compiles it)"
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        if (bytes_ := shared_memory(short, dtype)) > limit:
            return f"{short} rows need {bytes_} bytes of shared memory, and {device} has {limit}"
    return ""


class _Row(NamedTuple):
    refusal: Callable[[torch.device, torch.dtype, int], str]
    does: str


_TABLE = {
    "triton": _Row(_triton.refusal, "Gram matrices, products and samples in Triton kernels"),
    "extension": _Row(
        extension_refusal, "n x n stages and sampling in C++; on the CPU Gram matrices and products, too"
    ),
    "torch": _Row(_no_torch, "torch.linalg and batched matrix products"),
}
"""In the order in which "auto" prefers them; all have the same accuracy class."""

BACKENDS = ("auto", *_TABLE)
"""What ``backend=`` accepts. "auto" may choose; a named backend never falls back."""


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype = torch.float32, short: int = 1) -> Backend:
    """The backend for matrices on ``device`` of ``dtype`` whose smaller side is ``short``.

    Raises
    ------
    ValueError
        for a backend that does not exist.
    RuntimeError
        for a named backend that cannot do it, with the reason.
    """
    choice(requested, "backend", BACKENDS)
    detour = ""
    if device.type not in MAX_SHORT:
        # Accelerators without LAPACK-grade kernels (MPS has no QR, and its eigh hangs on some sizes: field report A25).
        detour = f"{device.type} lacks batched factorizations: computed on the CPU; "
        device = torch.device("cpu")
    refused: list[str] = []
    for name, row in _TABLE.items():
        if requested not in ("auto", name):
            continue
        if not (why := row.refusal(device, dtype, short)):
            aside = f" ({'; '.join(refused)})" if refused else ""
            return Backend(name, device, f"{detour}{row.does} on {device.type}{aside}")
        refused.append(f"no {name}: {why}")
    raise RuntimeError(
        f"backend={requested!r} cannot be used here: {refused[0].partition(': ')[2]}; pass backend='auto'"
    )


def explain_backend(tensor: torch.Tensor, backend: str = "auto") -> Backend:
    """What would run for ``tensor`` (..., rows, cols): name, compute device and reason.

    Raises
    ------
    ValueError
        for a backend that does not exist.
    RuntimeError
        for a named backend that cannot do it, with the reason.
    """
    short = min(tensor.shape[-2:]) if tensor.ndim >= 2 else 1
    return choose_backend(backend, tensor.device, tensor.dtype, short)


def backends() -> dict[str, str]:
    """Every backend with one sentence on whether it is available and, if not, why."""
    found = _extension.load()
    return {
        "triton": _triton.sentence(),
        "extension": found.sentence if found.available else f"not available: {found.sentence}",
        "torch": f"available: torch {torch.__version__} on every device",
    }
