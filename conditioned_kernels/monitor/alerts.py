"""Conditions on records that call back with a sentence naming layer, projection, head and step.

An alert speaks when its condition begins to hold for a head, and again only after the head has recovered.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .. import _validate
from .records import Record

Callback = Callable[[str, Record], None]
Head = tuple[str, str, int, int]


def warn(message: str, record: Record) -> None:
    """The default callback: a Python warning."""
    warnings.warn(message, stacklevel=2)


@dataclass
class Alert:
    """Base of the alerts; subclasses say in :meth:`message` whether a head is in trouble.

    Attributes
    ----------
    callback : called with (sentence, record). What it raises reaches whoever called ``flush`` or ``step``, so a
        callback may stop a run.
    """

    callback: Callback = field(default=warn, kw_only=True)
    _raised: set[Head] = field(default_factory=set, init=False, repr=False)

    def message(self, record: Record, head: Head) -> str:
        """What is wrong with the head, without its place; "" if nothing."""
        raise NotImplementedError

    def check(self, records: Sequence[Record]) -> None:
        """Look at new records, oldest first."""
        for record in records:
            if record.head < 0 or record.spectrum:
                continue
            head = (record.layer, record.projection, record.head, record.sample)
            said = self.message(record, head)
            if not said:
                self._raised.discard(head)
            elif head not in self._raised:
                self._raised.add(head)
                self.callback(f"step {record.step}: {record.place}: {said}", record)


@dataclass
class KappaAbove(Alert):
    """kappa above ``threshold``, or not finite. Certain only where the record's ``low`` is above it too."""

    threshold: float

    def __post_init__(self) -> None:
        _validate.positive(self.threshold, "threshold")

    def message(self, record: Record, head: Head) -> str:
        if record.kappa <= self.threshold:
            return ""
        return f"kappa {record.kappa:.4g} is above {self.threshold:g}"


@dataclass
class KappaGrowth(Alert):
    """kappa grows by more than the factor ``per_step`` (1.1 is 10 %) per step since the head's last record."""

    per_step: float
    _last: dict[Head, tuple[int, float]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if _validate.positive(self.per_step, "per_step") <= 1:
            raise ValueError(f"per_step must be a factor above 1, such as 1.1 for 10 % per step, got {self.per_step!r}")

    def message(self, record: Record, head: Head) -> str:
        step, before = self._last.get(head, (record.step, record.kappa))
        self._last[head] = (record.step, record.kappa)
        if record.step <= step or not math.isfinite(before):
            return ""
        steps = record.step - step
        growth = (record.kappa / before) ** (1 / steps)
        if growth <= self.per_step:
            return ""
        said = f"kappa went from {before:.4g} to {record.kappa:.4g} in {steps} step{'s' if steps > 1 else ''}"
        if not math.isfinite(growth):
            return f"{said}, above a factor {self.per_step:g} per step"
        return f"{said}, a factor {growth:.4g} per step, above {self.per_step:g}"


@dataclass
class SigmaCollapse(Alert):
    """sigma_min below ``fraction`` of the head's first one."""

    fraction: float
    _first: dict[Head, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if _validate.positive(self.fraction, "fraction") >= 1:
            raise ValueError(f"fraction must be in (0, 1), got {self.fraction!r}")

    def message(self, record: Record, head: Head) -> str:
        if not math.isfinite(record.sigma_min):
            return ""
        first = self._first.setdefault(head, record.sigma_min)
        if record.sigma_min >= self.fraction * first:
            return ""
        return f"sigma_min fell from {first:.4g} to {record.sigma_min:.4g}, below {self.fraction:g} of it"
