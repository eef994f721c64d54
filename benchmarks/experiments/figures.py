"""One plot per suite: validation through training, and kappa(J) with its bound."""

from __future__ import annotations

from pathlib import Path

from .models import MODELS
from .schemes import SCHEMES
from .statistics import interval
from .summary import Row, Summary
from .tasks import TASKS


def draw(summary: Summary, path: Path) -> str:
    """Write the suite's plot; returns its name."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    traced = any(row.jacobian for row in summary.rows)
    figure, axes = plt.subplots(1, 3 if traced else 1, figsize=(15 if traced else 6.5, 4.4), squeeze=False)
    colors = dict(zip(SCHEMES, plt.get_cmap("tab10").colors + plt.get_cmap("Dark2").colors, strict=False))
    metric = TASKS[summary.suite.task].metric
    for row in summary.rows:
        style = {"color": colors[row.scheme], "label": f"{SCHEMES[row.scheme].title}, rate {row.rate:g}"}
        style["linestyle"] = "--" if row.best is None else "-"
        _band(axes[0, 0], row, style)
        for axis, name in zip(axes[0, 1:], ("kappa", "bound"), strict=False):
            points = [(each["step"], each[name]) for each in row.jacobian if each[name] is not None]
            if points:
                axis.semilogy(*zip(*points, strict=True), **style)
    axes[0, 0].set(ylabel=f"validation {metric}", title=f"mean and 95 % interval over {summary.suite.seeds} seeds")
    axes[0, 0].legend(fontsize=7, title="initialization", title_fontsize=7)
    for axis, title in zip(axes[0, 1:], ("exact κ(J), middle layer", "its bound (Theorem 3.1)"), strict=False):
        axis.set(title=title, ylabel="median over heads, last seed")
    for axis in axes[0]:
        axis.set(xlabel="step")
        axis.grid(alpha=0.3)
    figure.suptitle(f"{MODELS[summary.suite.model].title}; {TASKS[summary.suite.task].title}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path.name


def _band(axis: object, row: Row, style: dict[str, object]) -> None:
    length = max(len(curve) for curve in row.curves.values())
    curves = [curve for curve in row.curves.values() if len(curve) == length]
    steps = [step for step, _ in curves[0]]
    intervals = [interval([curve[i][1] for curve in curves]) for i in range(length)]
    axis.plot(steps, [each.mean for each in intervals], **style)  # type: ignore[attr-defined]
    if len(curves) > 1:
        axis.fill_between(  # type: ignore[attr-defined]
            steps,
            [each.low for each in intervals],
            [each.high for each in intervals],
            color=style["color"],
            alpha=0.12,
            linewidth=0,
        )
