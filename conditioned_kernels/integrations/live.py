"""A table of condition numbers in the terminal, redrawn at every flush."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..monitor.records import JACOBIAN, Record
from ..report import printable

LAYERS = 32
"""Rows at most: the layers whose worst head is worst."""

_COLORS = ((1.5, "green"), (2.5, "yellow"), (math.inf, "red"))
"""By log10 kappa of the worst head."""


class LiveView:
    """Latest kappa per layer and projection: the median head, the worst, and how many are not finite.

    Parameters
    ----------
    console : of rich; None for the standard error stream. Where it is no terminal, the last table is printed on close.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._latest: dict[tuple[str, str], list[Record]] = {}
        self._live = Live(console=console or Console(stderr=True), auto_refresh=False)
        self._live.start()

    def write(self, records: Sequence[Record]) -> None:
        groups: dict[tuple[str, str, int], list[Record]] = {}
        for record in records:
            if record.head >= 0 and not record.spectrum:
                groups.setdefault((record.layer, record.projection, record.step), []).append(record)
        for (layer, projection, _), group in groups.items():  # in the order of steps, so the last one stays
            self._latest[layer, projection] = group
        self._live.update(self.render(), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> Any:
        """What is shown now."""
        projections = sorted({projection for _, projection in self._latest}, key=lambda name: (name == JACOBIAN, name))
        layers = list(dict.fromkeys(layer for layer, _ in self._latest))
        shown = layers
        if len(layers) > LAYERS:
            worst = sorted(layers, key=self._badness, reverse=True)[:LAYERS]
            shown = [layer for layer in layers if layer in worst]
        every = [record for group in self._latest.values() for record in group]
        step = max((record.step for record in every), default=0)
        nonfinite = sum(not math.isfinite(record.kappa) for record in every)
        table = Table(title=f"Condition numbers after step {step}: median head, worst head", header_style="bold")
        table.add_column("attention layer", overflow="fold")
        for projection in projections:
            table.add_column("Jacobian" if projection == JACOBIAN else f"W_{projection.upper()}", justify="right")
        for layer in shown:
            table.add_row(Text(printable(layer)), *(self._cell(layer, projection) for projection in projections))
        notes = [Text(f"{nonfinite} heads without a finite kappa", style="red" if nonfinite else "dim")]
        if len(shown) < len(layers):
            notes.append(Text(f"the worst {len(shown)} of {len(layers)} layers", style="dim"))
        return Group(table, *notes)

    def _badness(self, layer: str) -> float:
        return max(record.log10_kappa for (name, _), group in self._latest.items() if name == layer for record in group)

    def _cell(self, layer: str, projection: str) -> Text:
        kappas = sorted(
            record.kappa if record.kappa == record.kappa else math.inf
            for record in self._latest.get((layer, projection), ())
        )
        if not kappas:
            return Text("")
        worst = kappas[-1]
        log = math.log10(worst) if worst > 0 else 0.0
        color = next(color for limit, color in _COLORS if log <= limit)
        return Text.assemble(f"{kappas[(len(kappas) - 1) // 2]:.4g}  ", (f"{worst:.4g}", color))
