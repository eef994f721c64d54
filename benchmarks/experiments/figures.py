"""One plot per suite: validation through training, and kappa(J) with its bound."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .models import MODELS
from .schemes import SCHEMES
from .statistics import interval
from .summary import Row, Summary
from .tasks import TASKS

FEW = 6
"""Up to so many curves have their bands drawn; of more, the default's and the paper's initialization's alone."""

CEILING = 1e30
"""A larger kappa or bound, an infinite one too, leaves a gap."""


def draw(summary: Summary, path: Path) -> str:
    """Write the suite's plot; returns its name."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    traced = any(row.jacobian for row in summary.rows)
    legend = 0.25 * math.ceil(len(summary.rows) / (3 if traced else 1))
    size = (15 if traced else 6.5, 4.4 + legend)
    figure, axes = plt.subplots(1, 3 if traced else 1, figsize=size, squeeze=False, layout="constrained")
    metric, few = TASKS[summary.suite.task].metric, len(summary.rows) <= FEW
    styles = _styles(plt.get_cmap("tab10").colors)
    for row in summary.rows:
        style = styles[row.scheme] | {"label": f"{SCHEMES[row.scheme].title}, rate {row.rate:g}"}
        _curve(axes[0, 0], row, style, band=few or row.scheme in ("default", "conditioned"))
        for axis, name in zip(axes[0, 1:], ("kappa", "bound"), strict=False):
            values = [each[name] if (each[name] or math.inf) <= CEILING else math.nan for each in row.jacobian]
            axis.plot([each["step"] for each in row.jacobian], values, marker=".", markersize=4, **style)
    _limit(axes[0, 0], summary)
    bands = "" if few else " (two shown)"
    axes[0, 0].set(ylabel=f"validation {metric}", title=f"mean and 95 % interval{bands} over {_seeds(summary)} seeds")
    for axis, title in zip(axes[0, 1:], ("exact κ(J), middle layer", "its bound (Theorem 3.1)"), strict=False):
        axis.set(
            title=f"{title}\ngaps: infinite, or above {CEILING:.0e}",
            ylabel="median over heads, last seed",
            yscale="log",
        )
    for axis in axes[0]:
        axis.set(xlabel="step")
        axis.grid(alpha=0.3)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=3 if traced else 1)
    names = (MODELS[summary.suite.model].title, f"{TASKS[summary.suite.task].title}, {summary.suite.steps} steps")
    figure.suptitle(("; " if traced else "\n").join(names), fontsize=11)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path.name


def _seeds(summary: Summary) -> str:
    """How many, from the fewest to the most of any row."""
    numbers = [len(row.values) for row in summary.rows]
    return str(max(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _limit(axis: Any, summary: Summary) -> None:
    """Accuracy between 0 and 1; a loss from where the worst mean is after a fifth of the validations."""
    if summary.higher_is_better:
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, 0.0), min(high, 1.02))
    else:
        early = [curve[len(curve) // 5][1] for row in summary.rows for curve in row.curves.values()]
        axis.set_ylim(top=max(early))


def _styles(colors: list[Any]) -> dict[str, dict[str, Any]]:
    """The same line for a scheme in every plot: the default black, then ten colors once solid and once dotted."""
    others = [name for name in SCHEMES if name != "default"]
    lines = [{"color": color, "linestyle": line} for line in ("-", ":") for color in colors]
    return {"default": {"color": "black", "linestyle": "--"}} | dict(zip(others, lines, strict=False))


def _curve(axis: Any, row: Row, style: dict[str, Any], *, band: bool) -> None:
    length = max(len(curve) for curve in row.curves.values())
    curves = [curve for curve in row.curves.values() if len(curve) == length]
    steps = [step for step, _ in curves[0]]
    intervals = [interval([curve[i][1] for curve in curves]) for i in range(length)]
    axis.plot(steps, [each.mean for each in intervals], **style)
    if band and len(curves) > 1:
        low, high = [each.low for each in intervals], [each.high for each in intervals]
        axis.fill_between(steps, low, high, color=style["color"], alpha=0.12, linewidth=0)
