"""What the results of one suite say, as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from .cell import Cell
from .run import finals, finished
from .statistics import LEVEL, NONE, Interval, first_step, interval, paired, verdicts
from .store import Store
from .suites import SUITES, Suite
from .tasks import TASKS

DEVICES = ("cpu", "cuda")
Records = Mapping[Cell, Mapping[str, Any]]
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Row:
    """One scheme of one suite.

    Attributes
    ----------
    scheme, rate : its name and its best learning rate.
    tried : mean final metric over the sweep's seeds by rate, in order; not finite where a run diverged.
    values : final metric by seed at that rate, of the runs that did not diverge; ``diverged`` is how many did.
    best : interval of the paired difference to the default, each at its own best rate; None for the default itself.
    same : the same with both at the default's best rate, over the seeds there are.
    steps : first step at which each seed reached the final metric of the default of the same seed, inf if never.
    ratio : interval of the logarithm of these steps over the default's own; None if a seed never got there.
    curves : validation curve (step, metric) by seed.
    jacobian : rows of ``step``, ``kappa`` and ``bound`` of the last seed, if traced.
    weights : kappa of W_Q, W_K and W_V at start and end, of the first seed.
    """

    scheme: str
    rate: float
    tried: Mapping[float, float]
    values: Mapping[int, float]
    diverged: int
    best: Interval | None
    same: Interval | None
    steps: tuple[float, ...]
    ratio: Interval | None
    curves: Mapping[int, Curve]
    jacobian: tuple[Mapping[str, Any], ...]
    weights: Mapping[str, Any]

    @property
    def final(self) -> Interval:
        """Of the final metric."""
        return interval(list(self.values.values()))

    @property
    def median_step(self) -> float:
        """Median of ``steps``; inf if at least half of the seeds never got there."""
        return median(self.steps)

    @property
    def at_the_end(self) -> bool:
        """Whether the best rate is the smallest or the largest of several tried."""
        return len(self.tried) > 1 and self.rate in (min(self.tried), max(self.tried))


@dataclass(frozen=True)
class Summary:
    """One suite: the rows of the schemes whose best rate is known, the names of the others, and what it cost in all."""

    name: str
    suite: Suite
    rows: tuple[Row, ...]
    unfinished: tuple[str, ...]
    runs: int
    processor_seconds: float

    @property
    def higher_is_better(self) -> bool:
        """Of the suite's metric."""
        return TASKS[self.suite.task].higher_is_better

    def row(self, scheme: str) -> Row | None:
        """The row of a scheme, None if it is not finished."""
        return next((row for row in self.rows if row.scheme == scheme), None)

    @cached_property
    def verdicts(self) -> Mapping[str, str]:
        """By scheme, the word on its difference to the default, each at its best rate; these are one family."""
        family = {row.scheme: row.best for row in self.rows if row.best is not None}
        return verdicts(family, higher_is_better=self.higher_is_better)

    def difference(self, first: str, second: str) -> Interval | None:
        """Of two schemes, each at its best rate, paired by seed; None if one is not finished."""
        a, b = self.row(first), self.row(second)
        return paired(a.values, b.values) if a and b else None

    def recommended(self) -> Row:
        """Of the schemes that are better than the default, the one with the best mean; then of those perhaps better.

        The default if there are none.
        """
        sign = 1 if self.higher_is_better else -1
        for word in ("better", "perhaps better"):
            rows = [row for row in self.rows if self.verdicts.get(row.scheme) == word]
            if rows:
                return max(rows, key=lambda row: sign * row.best.mean if row.best else 0.0)
        return self.rows[0]

    def equals(self) -> tuple[Row, ...]:
        """The other schemes of the same word that are not shown to differ from the recommended one."""
        top = self.recommended()
        word = self.verdicts.get(top.scheme, NONE)
        others = [row for row in self.rows if row is not top and self.verdicts.get(row.scheme) == word]
        apart = {row.scheme: paired(row.values, top.values) for row in others}
        return tuple(row for row in others if (each := apart[row.scheme]) is not None and each.p >= 1 - LEVEL)


def summaries(folder: Path) -> list[Summary]:
    """Of every suite whose default is finished, but the smoke test."""
    found = []
    for name, suite in SUITES.items():
        done = next((done for on in DEVICES if (done := finished(suite, Store(folder, name), on))), {})
        summary = summarize(name, suite, done) if name != "smoke" else None
        if summary is not None:
            found.append(summary)
    return found


def summarize(name: str, suite: Suite, done: Records) -> Summary | None:
    """The suite's numbers; None while its default is unfinished."""
    values = finals(done)
    rates = {scheme: suite.best_rate(scheme, values) for scheme in suite.schemes}
    best = {scheme: rate for scheme, rate in rates.items() if rate is not None}
    default = suite.schemes[0]
    if default not in best:
        return None
    rows = tuple(_row(suite, scheme, rate, best[default], done) for scheme, rate in best.items())
    runs = list({record["config"]: record for record in done.values()}.values())
    unfinished = tuple(scheme for scheme in suite.schemes if scheme not in best)
    return Summary(name, suite, rows, unfinished, len(runs), sum(record["processor_seconds"] for record in runs))


def _row(suite: Suite, scheme: str, rate: float, default_rate: float, done: Records) -> Row:
    values = finals(done)
    reference = _values(suite, suite.schemes[0], default_rate, values)
    own, at_default = (_values(suite, scheme, each, values) for each in (rate, default_rate))
    curves = _curves(suite, scheme, rate, done)
    is_default = scheme == suite.schemes[0]
    higher = TASKS[suite.task].higher_is_better
    sign = 1 if higher else -1
    own_steps, default_steps = (
        {
            seed: first_step(each[seed], value, higher_is_better=higher)
            for seed, value in reference.items()
            if seed in each
        }
        for each in (curves, _curves(suite, suite.schemes[0], default_rate, done))
    )
    ratios = [math.log(step / default_steps[seed]) for seed, step in own_steps.items() if math.isfinite(step)]
    complete = 1 < len(ratios) == len(own_steps) and not is_default
    trace = done.get(suite.cell(scheme, rate, suite.seeds - 1, trace=True))
    return Row(
        scheme,
        rate,
        {each: sign * mean for each, mean in suite.tried(scheme, values).items()},
        own,
        len(curves) - len(own),
        None if is_default else paired(own, reference),
        None if is_default else paired(at_default, reference),
        tuple(own_steps.values()),
        interval(ratios) if complete else None,
        curves,
        tuple(trace["jacobian"]) if trace else (),
        done[suite.cell(scheme, rate, 0)]["kappa"],
    )


def _values(suite: Suite, scheme: str, rate: float, finals: Mapping[Cell, float | None]) -> dict[int, float]:
    """Final metric by seed, of the runs that finished without diverging."""
    found = {seed: finals.get(suite.cell(scheme, rate, seed)) for seed in range(suite.seeds)}
    return {seed: value for seed, value in found.items() if value is not None}


def _curves(suite: Suite, scheme: str, rate: float, done: Records) -> dict[int, Curve]:
    column = 1 if TASKS[suite.task].metric == "accuracy" else 2
    found = {seed: done.get(suite.cell(scheme, rate, seed)) for seed in range(suite.seeds)}
    records = {seed: record for seed, record in found.items() if record is not None}
    return {seed: tuple((row[0], row[column]) for row in record["curve"]) for seed, record in records.items()}
