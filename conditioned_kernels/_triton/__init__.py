"""Triton kernels for GPUs. Importing this imports no triton: :func:`refusal` says why it cannot be used, if so."""

from __future__ import annotations

import functools
import importlib

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OLDEST = (3, 6)
CAPABILITY = (8, 0)


def refusal(device: torch.device, dtype: torch.dtype, short: int) -> str:
    """Why the kernels cannot serve matrices on ``device`` of ``dtype`` with smaller side ``short``; "" if they can."""
    if device.type != "cuda":
        return f"it runs on CUDA and ROCm devices, not on {device.type}"
    if dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        return f"its kernels have {names}, not {str(dtype).removeprefix('torch.')}"
    return unavailable(device)


@functools.cache
def unavailable(device: torch.device) -> str:
    """Why the kernels cannot run on ``device`` at all; "" if they can. Found out once, with a tiny run at the end."""
    if why := missing():
        return why
    try:
        if not torch.version.hip and (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
            return f"it needs compute capability 8.0 or newer, and {device} has {found[0]}.{found[1]}"
        return importlib.import_module(f"{__name__}.route").self_test(device)
    except Exception as error:  # Nor must a broken driver or compiler end a training run.
        lines = str(error).strip().splitlines() or [""]
        return f"its first run on {device} failed: {type(error).__name__}: {lines[0]}"


@functools.cache
def missing() -> str:
    """Why there is no usable triton, or ""."""
    try:
        found = importlib.import_module("triton").__version__
        version = tuple(int(part) for part in found.split(".")[:2])
    except Exception as error:  # Not only ImportError: a damaged installation raises anything (field report E15).
        return f"triton cannot be imported ({type(error).__name__}: {error}); pip install triton"
    if version < OLDEST:
        return f"it needs triton {OLDEST[0]}.{OLDEST[1]} or newer, found {found}"
    return ""


def sentence() -> str:
    """One sentence on availability, for :func:`conditioned_kernels.backends`."""
    if why := missing():
        return f"not available: {why}"
    if not torch.cuda.is_available():
        return "not available: torch sees no GPU"
    device = torch.device("cuda", torch.cuda.current_device())
    if why := unavailable(device):
        return f"not available: {why}"
    version = importlib.import_module("triton").__version__
    return f"available: triton {version} on {torch.cuda.get_device_name(device)}"
