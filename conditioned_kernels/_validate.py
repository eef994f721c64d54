"""Checks of arguments. Every message names the argument, what was expected, what came and what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)


def matrices(weights: object, name: str, *, allow_complex: bool = True) -> Tensor:
    """Check that ``weights`` is a dense floating tensor (..., rows, cols) with values, and return it."""
    if not isinstance(weights, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(weights).__name__}; convert it with torch.as_tensor")
    if weights.layout is not torch.strided:
        raise TypeError(f"{name} must be dense (strided), got layout {weights.layout}; call .to_dense() first")
    floating(weights, name, allow_complex=allow_complex)
    if weights.ndim < 2:
        raise ValueError(
            f"{name} must have shape (..., rows, cols) with at least 2 dimensions, got {tuple(weights.shape)}; "
            "reshape a flat weight to its matrices first"
        )
    not_meta(weights, name)
    return weights


def floating(tensor: Tensor, name: str, *, allow_complex: bool = False) -> None:
    allowed = REAL + COMPLEX if allow_complex else REAL
    if tensor.dtype not in allowed:
        raise TypeError(
            f"{name} must have one of the dtypes {', '.join(map(_short, allowed))}, got {_short(tensor.dtype)}; "
            "quantized and integer storage has no singular values of its own, so dequantize it first"
        )


def not_meta(tensor: Tensor, name: str) -> None:
    if tensor.is_meta:
        raise ValueError(
            f"{name} is on the meta device and has no values; materialize it first "
            "(for a module: module.to_empty(device=...), then initialize)"
        )


def shape(value: Sequence[int], name: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in value)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers (..., rows, cols), got {value!r}") from None
    if len(sizes) < 2 or min(sizes) < 0:
        raise ValueError(f"{name} must be (..., rows, cols) with sizes >= 0, got {sizes}")
    return sizes


def positive(value: float, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    return float(value)


def count(value: int, name: str, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def choice(value: object, name: str, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def writable(tensor: Tensor, name: str) -> None:
    """Refuse tensors where an in-place write would fail, or would write one element twice."""
    if tensor.is_inference():
        raise RuntimeError(
            f"{name} was created under torch.inference_mode() and cannot be updated in place; "
            "build the model outside inference mode, or replace the parameter by a clone"
        )
    if overlaps_itself(tensor):
        raise ValueError(
            f"{name} has elements that share memory (strides {tensor.stride()}, shape {tuple(tensor.shape)}), "
            "so an in-place write is ambiguous; call .contiguous() first"
        )


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two indices of ``tensor`` may reach one element. Exact for every view torch's indexing makes."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
