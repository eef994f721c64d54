"""The scaling plot: time against heads, rows and columns, ours beside the SVD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLORS = ("#0b6e99", "#c8553d", "#588157", "#8a8a8a")
MARKERS = ("o", "s", "^", "x")


def scaling_figure(record: Mapping[str, Any]) -> Any:
    """A matplotlib figure of a record's growth, one panel per axis, both scales logarithmic.

    Raises
    ------
    ValueError
        for a record without growth.
    """
    from matplotlib.figure import Figure

    if not record.get("growth"):
        raise ValueError("the record has no growth to plot; measure with --group growth")
    fits = record["growth"]["fits"]
    axes_names = list(dict.fromkeys(fit["axis"] for fit in fits))
    operations = list(dict.fromkeys(fit["operation"] for fit in fits))
    figure = Figure(figsize=(4.1 * len(axes_names), 4.4), layout="constrained")
    panels = figure.subplots(1, len(axes_names), squeeze=False, sharey=True)[0]
    for panel, axis in zip(panels, axes_names, strict=True):
        here = [fit for fit in fits if fit["axis"] == axis]
        for fit in here:
            look = operations.index(fit["operation"])
            panel.plot(
                fit["sizes"],
                [1e3 * value for value in fit["seconds"]],
                color=COLORS[look % len(COLORS)],
                marker=MARKERS[look % len(MARKERS)],
                markersize=4.5,
                linewidth=1.4,
                label=f"{fit['operation']}, exponent {fit['exponent']:.2f}",
            )
        start = dict(zip(("heads", "rows", "cols"), here[0]["start"], strict=True))
        fixed = " of ".join(f"{size} {name}" for name, size in start.items() if name != axis)
        panel.set(xscale="log", yscale="log", xlabel=axis, title=f"{axis} grow ({fixed.replace(' of ', ', ')})")
        panel.title.set_fontsize(10)
        sizes = max((fit["sizes"] for fit in here), key=len)
        if sizes[-1] < 100 * sizes[0]:  # too few decades for powers of ten to say where a point is
            panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
            panel.set_xticks([], minor=True)
        panel.grid(alpha=0.3, which="both", linewidth=0.4)
        panel.legend(frameon=False, fontsize=7.5, loc="upper left")
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low, high * 12)  # room for the legend
    panels[0].set_ylabel("ms")
    environment = record["environment"]
    figure.suptitle(f"{environment['device']}, threads: {environment['threads']}, {environment['date']}", fontsize=9)
    return figure
