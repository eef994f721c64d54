"""Measurements as tables, pictures and one self-contained HTML file.

matplotlib draws the pictures and is imported only when one is asked for. Tensor names are data from files, so
everything written to HTML or a terminal is escaped.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .initialize.init_report import ProjectionReport, head_rows

ROLE_NAMES = {"q": "W_Q", "k": "W_K", "v": "W_V", "kv": "W_KV"}


@dataclass(frozen=True)
class Summary:
    """kappa over many head matrices: the finite ones' range and (lower) median, and how many are not finite."""

    heads: int
    low: float
    median: float
    high: float
    infinite: int
    nonfinite: int

    def __str__(self) -> str:
        text = f"{self.heads} head matrices"
        if self.heads > self.infinite + self.nonfinite:
            text += f", kappa from {self.low:.3f} to {self.high:.3f}, median {self.median:.3f}"
        if self.infinite:
            text += f", {self.infinite} singular (kappa infinite)"
        if self.nonfinite:
            text += f", {self.nonfinite} with NaN or infinite elements"
        return text


def summarize(entries: Sequence[ProjectionReport]) -> Summary:
    """Summary of kappa over every head of ``entries``."""
    kappa = torch.cat([entry.estimate.kappa.reshape(-1).cpu() for entry in entries]) if entries else torch.empty(0)
    finite = kappa[kappa.isfinite()]
    low, median, high = (
        (float(finite.min()), float(finite.median()), float(finite.max())) if finite.numel() else (math.nan,) * 3
    )
    return Summary(kappa.numel(), low, median, high, int(kappa.isinf().sum()), int(kappa.isnan().sum()))


def layer_table(entries: Sequence[ProjectionReport]) -> list[dict[str, Any]]:
    """One row per layer and role: the heads' number and shape; kappa, sigma_min and sigma_max over the heads."""
    rows = []
    any_nonfinite = bool(summarize(entries).nonfinite)
    for entry in entries:
        summary = summarize([entry])
        rows.append(
            {
                "layer": entry.layer,
                "role": entry.label,
                "heads": f"{entry.heads}x{entry.head_dim}x{entry.in_features}",
                "kappa min": _number(summary.low),
                "median": _number(summary.median),
                "max": _number(math.inf if summary.infinite else summary.high),
                "sigma_min": _number(float(entry.estimate.sigma_min.min())),
                "sigma_max": _number(float(entry.estimate.sigma_max.max())),
            }
            | ({"not finite": summary.nonfinite} if any_nonfinite else {})
        )
    return rows


def write_csv(path: str | Path, entries: Sequence[ProjectionReport]) -> None:
    """One line per head: layer, parameter, role, head, sigma_max, sigma_min, kappa, low, high."""
    rows = head_rows(tuple(entries))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["layer"])
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: str | Path, entries: Sequence[ProjectionReport]) -> None:
    """The rows of :func:`write_csv` as a JSON list; infinite and NaN become the strings "inf" and "nan"."""
    rows = [
        {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        for row in head_rows(tuple(entries))
    ]
    Path(path).write_text(json.dumps(rows, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


def kappa_figure(panels: Mapping[str, Sequence[ProjectionReport]]) -> Any:
    """A matplotlib figure of kappa, layers down and heads across.

    One row of panels per entry of ``panels``, one column per role. The colors are log10 kappa on one scale for
    all panels; gray is singular or not finite.
    """
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(entry.label for entries in panels.values() for entry in entries))
    layers = {name: list(dict.fromkeys(entry.layer for entry in entries)) for name, entries in panels.items()}
    depth = max((len(names) for names in layers.values()), default=1)
    figure = Figure(
        figsize=(1.2 + 2.9 * max(len(labels), 1), 0.9 + len(panels) * (1.0 + min(max(0.16 * depth, 1.2), 7))),
        layout="constrained",
    )
    axes = figure.subplots(len(panels), max(len(labels), 1), squeeze=False)
    grids = {
        (name, label): _grid([entry for entry in entries if entry.label == label], layers[name])
        for name, entries in panels.items()
        for label in labels
    }
    finite = [value for grid in grids.values() for row in grid for value in row if math.isfinite(value)]
    top = max([0.3, *finite])
    image = None
    for row, name in enumerate(panels):
        for column, label in enumerate(labels):
            axis = axes[row][column]
            axis.set_facecolor("0.8")
            image = axis.imshow(
                grids[name, label], vmin=0, vmax=top, cmap="viridis", aspect="auto", interpolation="nearest"
            )
            title = f"{name}: {role_name(label)}" if name else role_name(label)
            axis.set_title(title, fontsize=9, parse_math=False)  # names may come from a file
            axis.set_xlabel("head", fontsize=8)
            if column == 0:
                axis.set_ylabel("attention layer", fontsize=8)
            axis.tick_params(labelsize=7)
            for line in (axis.xaxis, axis.yaxis):
                line.get_major_locator().set_params(integer=True, min_n_ticks=1)  # one row has one tick
    if image is not None:
        bar = figure.colorbar(image, ax=axes.ravel().tolist(), shrink=0.8)
        bar.set_label("log10 kappa", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    return figure


def curves_figure(curves: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str) -> Any:
    """A matplotlib figure of named (x, y) curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    for (name, points), style in zip(curves.items(), ("-", "--", "-.", ":") * len(curves), strict=False):
        axis.plot([point[0] for point in points], [point[1] for point in points], style, label=name, linewidth=1.6)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
    return figure


def write_png(path: str | Path, figure: Any) -> None:
    """Write a figure as PNG, 150 dots per inch."""
    figure.savefig(path, format="png", dpi=150)


@dataclass
class HtmlReport:
    """One HTML file without outside references: headings, paragraphs, tables and pictures, added in order."""

    title: str
    _parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """Add a section heading."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Add a paragraph of plain text."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def table(self, rows: Sequence[Mapping[str, Any]], *, folded: str = "") -> None:
        """Add a table, one column per key of the first row; behind a fold with the summary ``folded`` if given."""
        if not rows:
            return
        head = "".join(f"<th>{html.escape(str(name))}</th>" for name in rows[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell(value))}</td>" for value in row.values()) + "</tr>" for row in rows
        )
        table = f"<div class=wide tabindex=0><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        if folded:
            table = f"<details><summary>{html.escape(folded)}</summary>{table}</details>"
        self._parts.append(table)

    def figure(self, figure: Any, caption: str) -> None:
        """Add a matplotlib figure as an embedded PNG."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
        data = base64.b64encode(buffer.getvalue()).decode("ascii")
        text = html.escape(caption, quote=True)
        self._parts.append(
            f'<figure tabindex=0><img alt="{text}" src="data:image/png;base64,{data}">'
            f"<figcaption>{text}</figcaption></figure>"
        )

    def write(self, path: str | Path) -> None:
        """Write the file."""
        title = html.escape(self.title)
        Path(path).write_text(
            "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
            '<meta name=viewport content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{_STYLE}</style></head><body><main><h1>{title}</h1>"
            + "\n".join(self._parts)
            + "</main></body></html>\n",
            encoding="utf-8",
        )


_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1c2024;background:#fff;margin:0}
main{max-width:62rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;border-bottom:1px solid #dde1e6;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:9rem}
figure{margin:1rem 0;overflow-x:auto}
img{max-width:100%;height:auto}figcaption{color:#5b636d;font-size:.85rem}
@media(max-width:40rem){figure img{max-width:none;width:44rem}}
summary{cursor:pointer;margin:.8rem 0}
"""


def inspection_html(path: str | Path, source: str, entries: Sequence[ProjectionReport]) -> None:
    """The report of ``conditioned-kernels inspect``: summary, heat map, table per layer, table per head."""
    report = HtmlReport(f"Condition numbers of {printable(source)}")
    report.paragraph(f"{summarize(entries)}.")
    report.paragraph(
        "kappa = sigma_max / sigma_min of one head's stored matrix. Each value comes with a certified interval "
        "(columns low and high of the per-head table)."
    )
    if entries:
        report.figure(
            kappa_figure({"": entries}), "log10 kappa by attention layer and head; gray is singular or not finite"
        )
    report.heading("By layer")
    report.table(layer_table(entries))
    report.table(head_rows(tuple(entries)), folded="Every head")
    report.write(path)


def printable(text: str) -> str:
    """``text`` with control characters, such as terminal escapes, made visible."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def _grid(entries: Sequence[ProjectionReport], layers: Sequence[str]) -> list[list[float]]:
    width = max((entry.heads for entry in entries), default=1)
    grid = [[math.nan] * width for _ in layers]
    for entry in entries:
        kappa = entry.estimate.kappa.reshape(-1).tolist()
        grid[layers.index(entry.layer)][: len(kappa)] = [math.log10(k) if math.isfinite(k) else math.nan for k in kappa]
    return grid


def role_name(label: str) -> str:
    role, _, part = label.partition(".")
    return f"{ROLE_NAMES.get(role, role)} {part}".strip()


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) and abs(value - 1) < 1e-3 else f"{value:.4g}"


def cell(value: Any) -> str:
    """A table cell as text, control characters made visible."""
    return printable(f"{value:.6g}" if isinstance(value, float) else str(value))
