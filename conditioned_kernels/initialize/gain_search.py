"""The factors of W_Q, W_K and W_V that minimize the exact condition number of one layer's attention Jacobian."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from torch import Tensor

from ..jacobian import AttentionHeads, jacobian_condition

CAP = 1e16
"""What a singular Jacobian counts as, so that means stay finite."""

Gains = dict[str, float]
"""Logarithms of factors, by role."""

COMMON = tuple(math.log(2.0) * step / 2 for step in range(-6, 9))
"""Logarithms of the common factors of W_Q and W_K that are tried first: 1/8 to 16 in steps of sqrt(2)."""

APART = tuple(math.log(8.0) * step / 2 for step in range(-2, 3))
"""Logarithms of the factors that W_Q and W_K are moved apart by, or that W_V is scaled by, first: 1/8 to 8."""

Axis = tuple[Gains, tuple[float, ...]]
"""A direction, and the evenly spaced offsets along it that are tried first."""

_GOLDEN = (math.sqrt(5) - 1) / 2


def geometric_mean(kappa: Tensor) -> float:
    """exp of the mean logarithm, an infinite kappa counted as 1e16."""
    return math.exp(_objective(kappa))


def best_gains(problem: AttentionHeads, roles: str, rtol: float = 1e-2) -> tuple[dict[str, float], Tensor, Tensor, int]:
    """The best factors by role for one problem, kappa(J) before and after, and the number of candidates tried.

    The mean of log kappa(J) has several minima, so a grid over each plane of directions comes first, and then golden
    section along each direction, twice, since the directions are not independent.
    """
    tried: dict[tuple[float, float, float], Tensor] = {}

    def kappa(gains: Gains) -> Tensor:
        key = (gains["q"], gains["k"], gains["v"])
        if key not in tried:
            scaled = (weight * math.exp(log) for weight, log in zip(problem.weights, key, strict=True))
            tried[key] = jacobian_condition(problem.with_weights(*scaled), method="exact").kappa
        return tried[key]

    def value(gains: Gains) -> float:
        return _objective(kappa(gains))

    best = dict.fromkeys("qkv", 0.0)
    before = kappa(best)
    if bool(before.isnan().any()):
        raise ValueError("kappa(J) is not a number on this batch: a weight or an input of the layer is not finite")
    planes = _planes(roles)
    for plane in planes:
        best = min((best, *_grid(best, plane)), key=value)
    axes = [axis for plane in planes for axis in plane]
    for direction, offsets in axes * min(2, len(axes)):
        best = _golden_section(value, best, direction, offsets[1] - offsets[0], rtol)
    return {role: math.exp(best[role]) for role in roles}, before, kappa(best), len(tried)


def _planes(roles: str) -> list[list[Axis]]:
    """Directions that are searched together: the logits' common factor and the ratio of Q to K; then V."""
    logits = {role: 1.0 for role in "qk" if role in roles}
    planes: list[list[Axis]] = [[(logits, COMMON)]] if logits else []
    if len(logits) == 2:
        planes[0].append(({"q": 1.0, "k": -1.0}, APART))
    if "v" in roles:
        planes.append([({"v": 1.0}, APART)])
    return planes


def _grid(start: Gains, plane: list[Axis]) -> list[Gains]:
    points = [start]
    for direction, offsets in plane:
        points = [_moved(point, direction, offset) for point, offset in itertools.product(points, offsets)]
    return points


def _moved(start: Gains, direction: Gains, offset: float) -> Gains:
    return {role: log + offset * direction.get(role, 0.0) for role, log in start.items()}


def _golden_section(
    value: Callable[[Gains], float], start: Gains, direction: Gains, reach: float, rtol: float
) -> Gains:
    """The best point tried within ``reach`` of ``start`` along ``direction``, ``start`` among them."""
    low, high = -reach, reach
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at = {offset: _moved(start, direction, offset) for offset in (0.0, left, right)}
    while high - low > rtol:
        if value(at[left]) <= value(at[right]):
            high, right = right, left
            left = high - _GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + _GOLDEN * (high - low)
        for offset in (left, right):
            at.setdefault(offset, _moved(start, direction, offset))
    return min(at.values(), key=value)


def _objective(kappa: Tensor) -> float:
    return float(kappa.clamp_max(CAP).log().mean())
