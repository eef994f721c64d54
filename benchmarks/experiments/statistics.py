"""The statistics of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with half the width of its confidence interval at LEVEL, from Student's t; infinite for one value."""

    mean: float
    half: float
    number: int

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half

    def verdict(self, *, higher_is_better: bool) -> str:
        """Of a difference: "better" or "worse" where the interval excludes 0, else "no difference shown"."""
        if self.low <= 0 <= self.high:
            return "no difference shown"
        return "better" if (self.mean > 0) == higher_is_better else "worse"


def interval(values: Sequence[float]) -> Interval:
    """Mean and confidence interval of independent values."""
    from scipy.stats import t

    number, mean = len(values), float(np.mean(values))
    if number < 2:
        return Interval(mean, math.inf, number)
    error = float(np.std(values, ddof=1)) / math.sqrt(number)
    return Interval(mean, float(t.ppf((1 + LEVEL) / 2, number - 1)) * error, number)


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval | None:
    """Interval of the difference to ``reference``, over the seeds that both have; None if there is none."""
    seeds = sorted(set(values) & set(reference))
    return interval([values[seed] - reference[seed] for seed in seeds]) if seeds else None


def first_step(curve: Sequence[tuple[float, float]], threshold: float, *, higher_is_better: bool) -> float:
    """First step of a validation curve that is at least as good as ``threshold``; inf if none is."""
    sign = 1 if higher_is_better else -1
    return next((step for step, value in curve if sign * value >= sign * threshold), math.inf)
