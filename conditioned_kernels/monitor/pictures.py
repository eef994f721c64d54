"""Figures of a run: heat maps over training, curves by depth, spectra before and after. matplotlib draws them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..condition import ConditionEstimate
from ..initialize.init_report import ProjectionReport
from ..report import kappa_figure, role_name
from .records import Record

Curve = list[tuple[int, float]]


def heat_maps(records: Sequence[Record], moments: Sequence[int]) -> Any:
    """log10 kappa, layers down and heads across: one row of panels per moment, one column per projection.

    Where layers take turns, a panel shows each layer's last figures up to that moment.
    """
    return kappa_figure({f"step {moment}": _entries(records, moment) for moment in moments})


def moments(records: Iterable[Record]) -> list[int]:
    """First, middle and last step with figures of weights."""
    steps = sorted({record.step for record in records if not record.is_jacobian})
    return sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []


def depth_curves(panels: Mapping[str, Mapping[str, Curve]], *, y: str) -> Any:
    """Curves over steps on one log scale, a panel per entry, a line per layer colored by its depth.

    ``panels`` maps a title to curves by layer, all with the layers in the model's order.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    layers = list(dict.fromkeys(layer for curves in panels.values() for layer in curves))
    # The bright end of the map is hard to see on white.
    colors = ListedColormap(colormaps["viridis"](np.linspace(0, 0.88, 256)))
    scale = Normalize(0, max(len(layers) - 1, 1))
    figure = Figure(figsize=(1.4 + 3.2 * len(panels), 3.1), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for layer, points in curves.items():
            style = "o-" if len(points) < 30 else "-"
            depth = layers.index(layer)
            axis.plot(*zip(*points, strict=True), style, color=colors(scale(depth)), linewidth=1.3, markersize=2.5)
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        if high < 30 * low:  # less than a power of ten or so has no labels of its own
            axis.yaxis.set_minor_locator(LogLocator(subs=(1.5, 2, 3, 5, 7)))
            axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_title(title, fontsize=9, parse_math=False)
        axis.set_xlabel("optimizer steps", fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.grid(alpha=0.3, which="both", linewidth=0.5)
        axis.tick_params(labelsize=7, which="both")
    axes[0].set_ylabel(y, fontsize=8)
    if len(layers) > 1:
        bar = figure.colorbar(ScalarMappable(scale, colors), ax=list(axes), shrink=0.9)
        bar.set_label("attention layer", fontsize=8)
        bar.ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        bar.ax.tick_params(labelsize=7)
    return figure


def weight_curves(records: Iterable[Record]) -> dict[str, dict[str, Curve]]:
    """The worst head's kappa by projection and layer; heads without a finite kappa are left out."""
    return _curves((record for record in records if not record.is_jacobian), lambda record: record.kappa, _title, max)


def jacobian_curves(records: Iterable[Record]) -> dict[str, dict[str, Curve]]:
    """The median over heads and samples of kappa(J) over the non-zero spectrum, and of the bound, by layer."""
    rows = [record for record in records if record.is_jacobian and record.head >= 0]
    bound = "B(J) of Theorem 3.1" if all(row.theorem for row in rows) else "formula of B(J), no bound here"
    return _curves(rows, lambda row: row.effective, lambda _: "kappa(J)", _median) | _curves(
        rows, lambda row: row.bound, lambda _: bound, _median
    )


def spectra(records: Iterable[Record]) -> list[Record]:
    """Records with a spectrum that can be drawn."""
    return [record for record in records if record.spectrum and all(map(math.isfinite, record.spectrum))]


def spectra_figure(records: Sequence[Record], most: int = 4) -> Any:
    """Singular values of the sampled heads at the start and the end, for at most ``most`` layers spread over depth.

    At least one of the records has to be one of :func:`spectra`.
    """
    from matplotlib.figure import Figure

    rows = spectra(records)
    labels = list(dict.fromkeys(row.projection for row in rows))
    layers = list(dict.fromkeys(row.layer for row in rows))
    count = min(most, len(layers))
    chosen = [layers[round(i * (len(layers) - 1) / max(count - 1, 1))] for i in range(count)]
    figure = Figure(figsize=(0.8 + 2.6 * len(labels), 0.5 + 1.75 * len(chosen)), layout="constrained")
    axes = figure.subplots(len(chosen), len(labels), squeeze=False)
    for line, layer in zip(axes, chosen, strict=True):
        for axis, label in zip(line, labels, strict=True):
            mine = [row for row in rows if (row.layer, row.projection) == (layer, label)]
            steps = sorted({row.step for row in mine})
            for step, color in zip(steps[:1] + steps[1:][-1:], ("0.6", "C0"), strict=False):
                for row in (each for each in mine if each.step == step):
                    axis.plot(range(1, len(row.spectrum) + 1), row.spectrum, color=color, linewidth=1.4)
                axis.plot([], [], color=color, label=f"step {step}")
            axis.set_ylim(bottom=0)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3, linewidth=0.5)
            axis.set_title(f"layer {layers.index(layer)}: {role_name(label)}", fontsize=8, parse_math=False)
    axes[0][0].legend(frameon=False, fontsize=7)
    axes[-1][0].set_xlabel("index", fontsize=8)
    axes[0][0].set_ylabel("singular value", fontsize=8)
    return figure


def latest(records: Iterable[Record], moment: int) -> dict[tuple[str, str, int], Record]:
    """Each head's last figures of its weights up to ``moment``, by (layer, projection, head)."""
    found = {}
    for record in records:  # in the order of steps
        if not (record.is_jacobian or record.spectrum) and record.step <= moment:
            found[record.layer, record.projection, record.head] = record
    return found


def _entries(records: Iterable[Record], moment: int) -> list[ProjectionReport]:
    groups: dict[tuple[str, str], list[Record]] = {}
    for (layer, projection, _), record in latest(records, moment).items():
        groups.setdefault((layer, projection), []).append(record)
    entries = []
    for (layer, projection), group in groups.items():
        role, _, part = projection.partition(".")
        columns = {
            name: torch.tensor([getattr(record, name) for record in group], dtype=torch.float64)
            for name in ("kappa", "low", "high", "sigma_max", "sigma_min")
        }
        ends = {f"{name}_{end}": columns[name] for name in ("sigma_max", "sigma_min") for end in ("low", "high")}
        estimate = ConditionEstimate(**columns, **ends, status=torch.zeros(len(group), dtype=torch.int8))
        entries.append(
            ProjectionReport(layer, "", role, part, len(group), 0, 0, torch.float64, "", math.nan, estimate, None)
        )
    return entries


def _curves(rows: Iterable[Record], value: Any, title: Any, join: Any) -> dict[str, dict[str, Curve]]:
    values: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        if not row.spectrum and math.isfinite(number := value(row)):
            layers = values.setdefault(title(row), {})
            layers.setdefault(row.layer, {}).setdefault(row.step, []).append(number)
    return {
        name: {layer: [(step, join(steps[step])) for step in sorted(steps)] for layer, steps in layers.items()}
        for name, layers in values.items()
    }


def _title(record: Record) -> str:
    return f"{role_name(record.projection)}, worst head"


def _median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
