"""How time and memory grow with the number of heads, their rows and their columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..condition import condition_number
from ..orthogonalize import orthogonalize, semi_orthogonal_
from .machine import peak_memory, seconds
from .peers import svd_polar
from .spectra import gaussian

OPERATIONS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "orthogonalize": (orthogonalize, True),
    "semi_orthogonal_": (semi_orthogonal_, True),
    "condition_number": (condition_number, True),
    "linalg.svd, U Vᵀ": (svd_polar, False),
}
"""Name to (function of a batch, whether it is ours and its memory is measured)."""

THREE_DECADES = (1, 3, 10, 30, 100, 300, 1000)
AXES: dict[str, tuple[tuple[int, int, int], tuple[int, ...]]] = {
    "heads": ((4, 128, 32), THREE_DECADES),
    "rows": ((4, 128, 64), THREE_DECADES),
    "cols": ((16, 1024, 16), (1, 2, 4, 8, 16)),
}
"""What grows: the smallest (heads, rows, cols), and by how much."""
MOST = 0.15
"""Seconds: as long an operation is repeated at one size, and a peer that takes longer is not run at the next."""
FEWEST = 3
"""Sizes that a line is fitted to at least."""
TURNS = 7
"""The most runs of one size."""
CALLS = 60
"""After how many calls memory is looked at for what they left behind."""


@dataclass(frozen=True)
class Growth:
    """One operation along one axis.

    Attributes
    ----------
    operation, axis, start : what was run, along what, from which (heads, rows, cols).
    sizes, seconds : of the axis; best of a few runs.
    exponent, r_squared : of the least-squares line through log(seconds) against log(size), every size counted.
    memory : bytes beyond the input that a call needs at its worst, in units of the input's own; per size, None where
        it cannot be read.
    """

    operation: str
    axis: str
    start: tuple[int, int, int]
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    exponent: float
    r_squared: float
    memory: tuple[float | None, ...]


def fit(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(exponent, R^2) of times ~ sizes^exponent."""
    x, y = ([math.log(value) for value in values] for values in (sizes, times))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    sxx = sum((a - mean_x) ** 2 for a in x)
    sxy = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope = sxy / sxx
    left = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    total = sum((b - mean_y) ** 2 for b in y)
    return slope, 1 - left / total if total else 1.0


def measure_growth(operation: str, axis: str, device: torch.device) -> Growth:
    """Time ``operation`` at every size of ``axis``, a peer as far as it is quick."""
    function, ours = OPERATIONS[operation]
    start, factors = AXES[axis]
    position = list(AXES).index(axis)
    sizes, times, memory = [], [], []
    for factor in factors:
        shape = list(start)
        shape[position] *= factor
        weights = gaussian(shape[0], shape[1], shape[2], device)
        run = partial(function, weights)
        extra = peak_memory(run, device) if ours else None  # the first run, which also loads what has to be
        tried = [seconds(run, device)[0]]
        while sum(tried) < MOST and len(tried) < TURNS:
            tried.append(seconds(run, device)[0])
        sizes.append(shape[position])
        times.append(min(tried))
        memory.append(None if extra is None else extra / (weights.numel() * weights.itemsize))
        if not ours and min(tried) > MOST and len(sizes) >= FEWEST:
            break
    exponent, r_squared = fit(sizes, times)
    return Growth(operation, axis, start, tuple(sizes), tuple(times), exponent, r_squared, tuple(memory))


def leak(operation: str, device: torch.device) -> float | None:
    """Growth of the most memory held, from one call to many, in units of the input's own."""
    function, _ = OPERATIONS[operation]
    weights = gaussian(64, 256, 64, device)

    def repeated(number: int) -> None:
        for _ in range(number):
            function(weights)

    repeated(3)
    more = peak_memory(lambda: repeated(CALLS), device)
    once = peak_memory(lambda: repeated(1), device)
    return None if more is None or once is None else (more - once) / (weights.numel() * weights.itemsize)


def run(device: torch.device, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Every operation along every axis, and what repeated calls leave behind; plain data for JSON."""
    grown = []
    for operation in OPERATIONS:
        for axis in AXES:
            say(f"growth of {operation} with {axis}")
            grown.append(asdict(measure_growth(operation, axis, device)))
    return {"fits": grown, "leak": {name: leak(name, device) for name, (_, ours) in OPERATIONS.items() if ours}}
