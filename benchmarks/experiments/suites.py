"""The suites, as data, and which of their cells remain to be trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .cell import Cell
from .tasks import TASKS

PAPER = ("default", "conditioned", "qk", "mimetic")
"""The schemes of the smaller suites: the paper's three, and W_Q, W_K alone."""

ALL = (
    "default",
    "conditioned",
    "qk",
    "v-preserve",
    "preserve",
    "qk-rescaled",
    "repeat",
    "semi-v",
    "mimetic",
    "calibrated",
    "spectral",
    "redraw",
    "xavier",
)


@dataclass(frozen=True)
class Suite:
    """One table of the report: one task and model, several schemes.

    Every scheme is trained at every rate with the first ``sweep`` seeds; its best rate is the one with the best mean
    there; then with all ``seeds`` at that rate. The last ``traced`` seeds at the best rate have kappa(J) measured.

    Attributes
    ----------
    task, model, schemes : names in TASKS, MODELS and SCHEMES; the first scheme is what the others are compared with.
    rates : peak learning rates.
    sweep, seeds, traced : numbers of seeds.
    """

    task: str
    model: str
    schemes: tuple[str, ...]
    rates: tuple[float, ...]
    steps: int
    batch: int
    every: int
    sweep: int
    seeds: int
    traced: int = 1

    def cell(self, scheme: str, rate: float, seed: int, *, trace: bool = False) -> Cell:
        """One cell of the grid."""
        return Cell(self.task, self.model, scheme, rate, seed, self.steps, self.batch, self.every, trace)

    def swept(self, schemes: Iterable[str]) -> list[Cell]:
        """The cells that find every scheme's best rate; seed by seed, so that a stopped sweep is balanced."""
        schemes = list(schemes)
        final = len(self.rates) == 1
        return [
            self.cell(scheme, rate, seed, trace=final and self.is_traced(seed))
            for seed in range(self.sweep)
            for rate in self.rates
            for scheme in schemes
        ]

    def is_traced(self, seed: int) -> bool:
        """Whether kappa(J) is measured in this seed's runs at the best rate."""
        return seed >= self.seeds - self.traced

    def best_rate(self, scheme: str, finals: Mapping[Cell, Any]) -> float | None:
        """The rate with the best mean final metric over the sweep's seeds; None while the sweep is unfinished.

        ``finals`` is the final metric of every finished cell, None where it diverged, which is worse than any other.
        """
        sign = 1 if TASKS[self.task].higher_is_better else -1
        means = {}
        for rate in self.rates:
            cells = [self.cell(scheme, rate, seed) for seed in range(self.sweep)]
            if any(cell not in finals for cell in cells):
                return None
            values = [finals[cell] for cell in cells]
            means[rate] = float("-inf") if None in values else sign * sum(values) / len(values)
        return max(means, key=lambda rate: means[rate])

    def pending(self, schemes: Iterable[str], finals: Mapping[Cell, Any], *, same_rate: bool = False) -> list[Cell]:
        """The cells to be trained next: the sweep's, then those at the best rates; empty when all is done.

        With ``same_rate`` all seeds at the default's best rate are wanted too.
        """
        schemes = list(schemes)
        sweep = [cell for cell in self.swept(schemes) if cell not in finals]
        if sweep:
            return sweep
        best = {scheme: self.best_rate(scheme, finals) for scheme in schemes}
        default = self.best_rate(self.schemes[0], finals)
        wanted = []
        for rates in (best, dict.fromkeys(schemes, default) if same_rate else {}):
            wanted += [
                self.cell(scheme, rate, seed, trace=self.is_traced(seed) and rate == best[scheme])
                for seed in range(self.seeds)
                for scheme, rate in rates.items()
                if rate is not None
            ]
        return [cell for cell in dict.fromkeys(wanted) if cell not in finals]


SUITES: dict[str, Suite] = {
    "digits-vit": Suite("digits", "vit-8", ALL, (1e-3, 2e-3, 4e-3), 500, 24, every=25, sweep=3, seeds=10),
    "language-gpt": Suite("language", "gpt", ALL, (2e-3, 4e-3, 8e-3), 300, 8, every=20, sweep=3, seeds=5),
    "language-gpt-long": Suite(
        "language",
        "gpt",
        ("default", "conditioned", "qk", "v-preserve", "preserve", "mimetic"),
        (4e-3,),
        1000,
        8,
        every=50,
        sweep=5,
        seeds=5,
    ),
    "mnist-vit": Suite("mnist", "vit-28", PAPER, (2e-3,), 300, 24, every=25, sweep=3, seeds=3),
    "mnist-swin": Suite("mnist-32", "swin", PAPER, (4e-3,), 300, 24, every=25, sweep=3, seeds=3),
    "mnist-xcit": Suite("mnist-32", "xcit", PAPER, (4e-3,), 200, 24, every=20, sweep=3, seeds=3, traced=0),
    "masked-bert": Suite(
        "masked-language", "bert-half", (*PAPER, "weight-selection"), (1e-3,), 100, 8, every=10, sweep=3, seeds=3
    ),
    "listops-nystromformer": Suite(
        "listops", "nystromformer", PAPER, (2e-3,), 200, 16, every=20, sweep=3, seeds=3, traced=0
    ),
    "retrieval-gpt": Suite("retrieval", "gpt-retrieval", PAPER, (4e-3,), 400, 16, every=25, sweep=3, seeds=3),
    "smoke": Suite("digits", "vit-smoke", ("default", "conditioned"), (1e-3, 2e-3), 12, 8, every=4, sweep=1, seeds=2),
}
