"""A monitored run as one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import HtmlReport, printable
from .pictures import depth_curves, heat_maps, jacobian_curves, latest, moments, spectra, spectra_figure, weight_curves
from .records import Record

WORST = 12
"""Heads in the table of the worst."""


def run_html(path: str | Path, name: str, records: Sequence[Record]) -> None:
    """Write the page of ``conditioned-kernels report``.

    Parameters
    ----------
    path : the HTML file.
    name : of the run, for the title.
    records : in the order of their steps, as :func:`~conditioned_kernels.integrations.files.read_records` gives them.

    Raises
    ------
    ValueError
        without any record.
    """
    if not records:
        raise ValueError(f"{name} has no records; was the monitor flushed or closed?")
    steps = sorted({record.step for record in records})
    page = HtmlReport(f"Conditioning of {printable(name)}")
    weights = [record for record in records if not record.is_jacobian]
    page.paragraph(
        f"{len(records)} records of {len({record.layer for record in records})} attention layers, from step {steps[0]} "
        f"to step {steps[-1]}. kappa = sigma_max / sigma_min of one head's matrix; a step is the number of optimizer "
        "steps taken before."
    )
    if weights:
        _weights(page, weights)
    rows = [record for record in records if record.is_jacobian]
    if rows:
        _jacobians(page, rows)
    page.write(path)


def _weights(page: HtmlReport, records: Sequence[Record]) -> None:
    when = moments(records)
    page.heading("Heads over training")
    page.figure(heat_maps(records, when), "log10 kappa by attention layer and head; gray is singular or not finite")
    if curves := weight_curves(records):
        page.heading("Worst head of each layer")
        page.figure(depth_curves(curves, y="kappa"), "Largest finite kappa over the heads of a layer")
    if spectra(records):
        page.heading("Spectra")
        page.figure(
            spectra_figure(records), "All singular values of sampled heads, descending, at the start and the end"
        )
    first, last = (latest(records, moment) for moment in (when[0], when[-1]))
    page.heading("By projection")
    page.table([_projection(projection, first, last) for projection in dict.fromkeys(key[1] for key in last)])
    page.heading("Worst heads at the end")
    worst = sorted(last.values(), key=lambda record: (-record.log10_kappa, record.layer))[:WORST]
    page.table([_head(record, first) for record in worst])


def _jacobians(page: HtmlReport, rows: Sequence[Record]) -> None:
    page.heading("Attention Jacobian")
    measured = [row for row in rows if row.head >= 0]
    if measured:
        page.paragraph(
            "kappa(J) of the head's parameter Jacobian on a few tokens of the real batch, over its non-zero singular "
            "values, beside the product of factors of Theorem 3.1; medians over heads and samples."
        )
        if not all(row.theorem for row in measured):
            page.paragraph(
                "This attention has biases, rotary positions, norms or a soft cap, which the theorem does not cover: "
                "there the second panel is the same formula and no bound."
            )
        if curves := jacobian_curves(measured):
            page.figure(depth_curves(curves, y="condition number"), "kappa(J) and the theorem's product by layer")
        singular = sum(row.status == "rank_deficient" for row in measured)
        if singular:
            page.paragraph(f"{singular} of {len(measured)} Jacobians are numerically rank deficient.")
    missing = {(row.layer, row.status) for row in rows if row.head < 0}
    if missing:
        page.paragraph("Without a Jacobian:")
        page.table([{"layer": layer, "reason": reason} for layer, reason in sorted(missing)])


def _projection(projection: str, first: dict, last: dict) -> dict[str, Any]:
    row: dict[str, Any] = {"projection": projection}
    for when, heads in (("first", first), ("last", last)):
        kappas = [record.kappa for (_, label, _), record in heads.items() if label == projection]
        finite = sorted(filter(math.isfinite, kappas))
        row[f"{when}: median"] = _short(finite[(len(finite) - 1) // 2] if finite else math.nan)
        row[f"{when}: max"] = _short(finite[-1] if finite else math.nan)
        row[f"{when}: not finite"] = len(kappas) - len(finite)
    return row


def _head(record: Record, first: dict) -> dict[str, Any]:
    before = first.get((record.layer, record.projection, record.head))
    return {
        "layer": record.layer,
        "projection": record.projection,
        "head": record.head,
        "kappa": _short(record.kappa),
        "between": f"{_short(record.low)} and {_short(record.high)}",
        "at first": _short(before.kappa if before else math.nan),
        "sigma_min": _short(record.sigma_min),
        "sigma_max": _short(record.sigma_max),
        "stable rank": _short(record.stable_rank),
        "status": record.status.replace("_", " "),
    }


def _short(value: float) -> str:
    return f"{value:.4g}"
