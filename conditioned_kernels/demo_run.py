"""The demo on a terminal: progress bars, tables, and its report page."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import _extension, build, demo
from ._backend import backends
from .report import HtmlReport, curves_figure, kappa_figure, summarize

INTRODUCTION = (
    "Every attention head gets W_Q and W_K semi-orthogonal and W_V a rectangular identity, so that each of these "
    "matrices has condition number 1 (Conditioned Initialization for Attention, ICLR 2026)."
)
CAVEAT = (
    "One seed, one small model, a few hundred steps: this shows the tool at work, and is no evidence on which "
    "initialization is best."
)


def run_demo(out: Console, err: Console, path: Path, *, steps: int, seed: int) -> None:
    """Run the demo, print to ``out``, show progress on ``err``, and write the report to ``path``."""
    start = time.perf_counter()
    page = HtmlReport("conditioned_kernels: demo")
    page.paragraph(INTRODUCTION)
    _compile_extension(out, err)
    out.print(
        "1. GPT-2 small at full size (124 M parameters, 12 layers, 12 heads), built and conditioned", style="bold"
    )
    with err.status("building and conditioning GPT-2 small"):
        before, after, seconds = demo.condition_gpt2(seed)
    show(out, page, "Condition numbers of GPT-2 small", _kappa_rows(before, after.touched))
    text = (
        f"conditioned_ took {seconds:.2f} s for {sum(entry.heads for entry in after.touched)} head matrices, measured."
    )
    out.print(text, highlight=False)
    page.paragraph(text)
    page.figure(
        kappa_figure({"before": before, "after": after.touched}),
        "GPT-2 small before and after: log10 kappa by layer and head",
    )
    with err.status("making the Q and K matrices three ways"):
        timings = demo.time_orthogonal()
    ours = timings[0].seconds
    rows = [
        {
            "288 matrices of 64 x 768": timing.name,
            "seconds": f"{timing.seconds:.3f}",
            "times ours": f"{timing.seconds / ours:.1f}",
            "max |Q Q^T - I|": f"{timing.residual:.1e}",
        }
        for timing in timings
    ]
    show(out, page, "The same matrices made three ways, random numbers included", rows)
    out.print(f"\n2. A byte-level language model on Python's own sources, {steps} steps each", style="bold")
    runs = _train(err, steps, seed)
    show(out, page, "Training a byte-level language model (width 128, 4 layers, 4 heads)", demo.conclusion(runs))
    curves = {name: run.curve for name, run in runs.items()}
    page.figure(
        curves_figure(curves, x="step", y="validation loss (nats per byte)"), "Validation loss through training"
    )
    for line in (CAVEAT, _environment(time.perf_counter() - start)):
        out.print(line, highlight=False)
        page.paragraph(line)
    page.write(path)


def _compile_extension(out: Console, err: Console) -> None:
    """Build the extension if it can be built here: on a fresh machine the package was installed before torch was."""
    if _extension.find() is None:
        with err.status("compiling the extension, once"):
            build.optional_build(build.default_folder(), cuda=torch.cuda.is_available())
    for name, status in backends().items():
        out.print(f"{name}: {status}", highlight=False, markup=False)


def show(out: Console, page: HtmlReport, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """One table on the terminal and on the page."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(str, row.values()))
    out.print(table)
    page.heading(title)
    page.table(rows)


def _train(err: Console, steps: int, seed: int) -> dict[str, demo.Run]:
    text = demo.standard_library_text()
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    runs = {}
    with Progress(*columns, console=err) as bar:
        tasks = {name: bar.add_task(name, total=steps, loss=float("nan")) for name in demo.SCHEMES}
        for name, task in tasks.items():
            bar.reset(task)
            runs[name] = demo.train(
                name,
                text,
                steps=steps,
                seed=seed,
                progress=lambda step, loss, task=task: bar.update(task, completed=step, loss=loss),  # type: ignore[misc]
            )
    return runs


def _kappa_rows(before: Sequence[Any], after: Sequence[Any]) -> list[dict[str, str]]:
    rows = []
    for role, name in (("q", "W_Q"), ("k", "W_K"), ("v", "W_V")):
        row = {"": name}
        for label, entries in (("before", before), ("after", after)):
            summary = summarize([entry for entry in entries if entry.role == role])
            row["heads"] = str(summary.heads)
            for column, kappa in (("kappa min", summary.low), ("median", summary.median), ("max", summary.high)):
                row[f"{label}: {column}"] = f"{kappa:.7f}" if kappa < 1.001 else f"{kappa:.4f}"
        rows.append(row)
    return rows


def _environment(seconds: float) -> str:
    return (
        f"{seconds:.0f} s on {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"Python {platform.python_version()}."
    )
