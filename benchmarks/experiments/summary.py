"""What the results of one suite say, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from .cell import Cell
from .run import finals, finished
from .statistics import Interval, first_step, interval, paired
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
    values : final metric by seed at that rate, of the runs that did not diverge; ``diverged`` is how many did.
    best : interval of the paired difference to the default, each at its own best rate; None for the default itself.
    same : the same with both at the default's best rate, over the seeds there are.
    steps : first step at which each seed reached the final metric of the default of the same seed, inf if never.
    curves : validation curve (step, metric) by seed.
    jacobian : rows of ``step``, ``kappa`` and ``bound`` of the last seed, if traced.
    weights : kappa of W_Q, W_K and W_V at start and end, of the first seed.
    """

    scheme: str
    rate: float
    values: Mapping[int, float]
    diverged: int
    best: Interval | None
    same: Interval | None
    steps: tuple[float, ...]
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


@dataclass(frozen=True)
class Summary:
    """One suite: the rows of its finished schemes, the names of the others, and what it cost in all."""

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

    def verdict(self, scheme: str) -> str:
        """The rule's word on a scheme against the default, each at its best rate; "not run" if it was not."""
        row = self.row(scheme)
        if row is None or row.best is None:
            return "not run"
        return row.best.verdict(higher_is_better=self.higher_is_better)

    def recommended(self) -> Row:
        """Of the schemes that are better than the default by the rule, the one with the best mean; else the default."""
        sign = 1 if self.higher_is_better else -1
        better = [row for row in self.rows if self.verdict(row.scheme) == "better"]
        return max(better, key=lambda row: sign * row.best.mean if row.best else 0.0, default=self.rows[0])

    def equals(self) -> tuple[Row, ...]:
        """The other schemes that are better than the default, and not shown to differ from the recommended one."""
        top, equal = self.recommended(), []
        for row in self.rows:
            difference = paired(row.values, top.values)
            if row is not top and self.verdict(row.scheme) == "better" and difference is not None:
                equal += [row] if difference.verdict(higher_is_better=True) == "no difference shown" else []
        return tuple(equal)


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
    best = {}
    for scheme in suite.schemes:
        rate = suite.best_rate(scheme, values)
        if rate is not None and all(suite.cell(scheme, rate, seed) in done for seed in range(suite.seeds)):
            best[scheme] = rate
    default = suite.schemes[0]
    if default not in best:
        return None
    reference = _values(suite, default, best[default], values)
    rows = tuple(_row(suite, scheme, rate, best[default], reference, done) for scheme, rate in best.items())
    runs = list({record["config"]: record for record in done.values()}.values())
    unfinished = tuple(scheme for scheme in suite.schemes if scheme not in best)
    return Summary(name, suite, rows, unfinished, len(runs), sum(record["processor_seconds"] for record in runs))


def _row(
    suite: Suite, scheme: str, rate: float, default_rate: float, reference: Mapping[int, float], done: Records
) -> Row:
    values = finals(done)
    own, at_default = (_values(suite, scheme, each, values) for each in (rate, default_rate))
    curves = _curves(suite, scheme, rate, done)
    is_default = scheme == suite.schemes[0]
    higher = TASKS[suite.task].higher_is_better
    trace = done.get(suite.cell(scheme, rate, suite.seeds - 1, trace=True))
    return Row(
        scheme,
        rate,
        own,
        suite.seeds - len(own),
        None if is_default else paired(own, reference),
        None if is_default else paired(at_default, reference),
        tuple(first_step(curves[seed], value, higher_is_better=higher) for seed, value in reference.items()),
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
    records = {seed: done[suite.cell(scheme, rate, seed)] for seed in range(suite.seeds)}
    return {seed: tuple((row[0], row[column]) for row in record["curve"]) for seed, record in records.items()}
