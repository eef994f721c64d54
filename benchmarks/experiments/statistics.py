"""The statistics of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

LEVEL = 0.95
NONE = "no difference shown"
WORDS = ("better", "perhaps better", "worse", "perhaps worse", NONE)

K = TypeVar("K")


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

    @property
    def p(self) -> float:
        """Two-sided p-value of a difference, from the same t; 1 for one value."""
        from scipy.stats import t

        if math.isinf(self.half) or self.mean == 0:
            return 1.0
        if self.half == 0:
            return 0.0
        freedom = self.number - 1
        return float(2 * t.sf(abs(self.mean) / self.half * t.ppf((1 + LEVEL) / 2, freedom), freedom))


def interval(values: Sequence[float]) -> Interval:
    """Mean and confidence interval of independent values."""
    from scipy.stats import t

    number, mean = len(values), float(np.mean(values)) if values else math.nan
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


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: below 1 - LEVEL for a true null hypothesis once in twenty families, not comparisons."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted


def verdicts(family: Mapping[K, Interval], *, higher_is_better: bool) -> dict[K, str]:
    """What each difference of a family of comparisons shows: one of WORDS.

    "better" and "worse": significant after Holm's correction over the family; with "perhaps": the interval excludes
    0, but not after the correction.
    """
    adjusted = dict(zip(family, holm([each.p for each in family.values()]), strict=True))
    words = {}
    for key, each in family.items():
        word = "better" if (each.mean > 0) == higher_is_better else "worse"
        if each.p >= 1 - LEVEL:
            word = NONE
        elif adjusted[key] >= 1 - LEVEL:
            word = f"perhaps {word}"
        words[key] = word
    return words
