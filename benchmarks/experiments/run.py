"""Train what is missing, in worker processes of one thread each."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing.connection import wait as wait_for_handles
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .cell import Cell
from .store import Store
from .suites import SUITES, Suite
from .train import run_cell


def device() -> str:
    """The device that cells run on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def finished(suite: Suite, store: Store, on: str) -> dict[Cell, dict[str, Any]]:
    """Results of the suite's cells as they are defined now; those of another definition are left out.

    A traced run is also the result of the same run without the measurement, which does not change it.
    """
    fields = Cell.__dataclass_fields__
    cells = {}
    for config, record in store.load().items():
        try:
            cell = Cell(**{name: record[name] for name in fields})
            current = cell.config(on)
        except KeyError:
            continue
        if current == config:
            cells[cell] = record
    return {replace(cell, trace=False): record for cell, record in cells.items()} | cells


def run_suite(
    name: str,
    *,
    folder: Path,
    schemes: Iterable[str] | None = None,
    workers: int = 1,
    seconds: float | None = None,
    same_rate: bool = False,
    console: Console | None = None,
    run: Callable[[Cell, str], dict[str, Any]] = run_cell,
) -> int:
    """Train the cells of the suite ``name`` that ``folder`` has no result of, and append each as it finishes.

    Parameters
    ----------
    schemes : only these; default all of the suite.
    workers : processes, of one thread each.
    seconds : start no cell after this long.
    same_rate : also all seeds of every scheme at the default's best rate.

    Returns
    -------
    The number of cells trained.
    """
    suite, store, on, console = SUITES[name], Store(folder, name), device(), console or Console(stderr=True)
    chosen = [scheme for scheme in suite.schemes if schemes is None or scheme in set(schemes)]
    end = float("inf") if seconds is None else time.monotonic() + seconds
    trained = 0
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_worker) as pool,
        Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        ) as bar,
    ):
        while True:
            done = finished(suite, store, on)
            queue = suite.pending(chosen, finals(done), same_rate=same_rate)
            if not queue or time.monotonic() > end:
                return trained
            task = bar.add_task(name, total=len(queue))
            running: dict[Future[dict[str, Any]], Cell] = {}
            while running or (queue and time.monotonic() <= end):
                while queue and len(running) < workers and time.monotonic() <= end:
                    cell = queue.pop(0)
                    running[pool.submit(run, cell, on)] = cell
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    cell, record = running.pop(future), future.result()
                    if record["config"] != cell.config(on):
                        raise RuntimeError(f"{cell} was trained by other code than this; run again")
                    store.append({"suite": name, **record})
                    trained += 1
                    bar.advance(task)
                    if not console.is_terminal:
                        console.print(
                            f"{name} {cell.scheme} rate {cell.rate:g} seed {cell.seed} trace {cell.trace}: "
                            f"{record['final']} in {record['seconds']} s, {len(queue)} to go",
                            highlight=False,
                            soft_wrap=True,
                        )


def finals(done: Mapping[Cell, Mapping[str, Any]]) -> dict[Cell, float | None]:
    """Final metric of every finished cell."""
    return {cell: record["final"] for cell, record in done.items()}


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="transformers")
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def leave_with_parent() -> None:
        # A worker whose parent was killed would wait for work for ever.
        wait_for_handles([parent.sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
