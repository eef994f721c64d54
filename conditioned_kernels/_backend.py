"""Which implementation runs, and why. Pure: nothing here computes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._validate import choice

BACKENDS = ("auto", "torch")
"""What ``backend=`` accepts. "auto" may choose; a named backend never falls back."""


class Backend(NamedTuple):
    """A choice: the backend's name, the device it computes on, and the reason in words."""

    name: str
    device: torch.device
    reason: str


def choose_backend(requested: str, device: torch.device) -> Backend:
    """The backend for tensors on ``device``; the same accuracy class whichever it is."""
    choice(requested, "backend", BACKENDS)
    if device.type in ("cpu", "cuda"):
        return Backend("torch", device, f"torch.linalg and batched matrix products on {device.type}")
    # Accelerators without LAPACK-grade kernels (MPS has no QR, and its eigh hangs on some sizes: field report A25).
    return Backend("torch", torch.device("cpu"), f"{device.type} lacks batched factorizations: computed on the CPU")


def explain_backend(tensor: torch.Tensor, backend: str = "auto") -> Backend:
    """What would run for ``tensor``: name, compute device and reason.

    Raises
    ------
    ValueError
        for a backend that does not exist.
    """
    return choose_backend(backend, tensor.device)


def backends() -> dict[str, str]:
    """Every backend with one sentence on whether it is available and, if not, why."""
    return {"torch": f"available: torch {torch.__version__} on every device"}
