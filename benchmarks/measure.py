"""Measure every case side by side in one process, and write what was measured.

``python -m benchmarks.measure --json benchmarks/results/NAME.json`` measures, prints a table and writes JSON;
``python -m benchmarks.measure --markdown benchmarks/results/NAME.json`` prints that file as README tables.

The contestants of a case take turns, so that a slow moment of the machine hits all of them, and each one's best
repetition counts. A result is checked against float64 before anything is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import conditioned_kernels as ck

from .cases import CASES, Case

REPEATS = 9


@dataclass(frozen=True)
class Row:
    """One contestant of one case.

    Attributes
    ----------
    contestant : its name; ours comes first.
    best, median : seconds of one run.
    ratio : its best divided by ours.
    target : what the ratio should be at least, if there is a target.
    errors : against float64, by name.
    """

    contestant: str
    best: float
    median: float
    ratio: float
    target: float | None
    errors: dict[str, float]


@dataclass(frozen=True)
class Result:
    """One case: ``seconds`` is the most ours should take, where that is a target."""

    name: str
    title: str
    repeats: int
    seconds: float | None
    rows: tuple[Row, ...]


class WrongResult(RuntimeError):
    """A contestant's result is not what it claims; it is not timed."""


def check(case: Case, name: str, errors: dict[str, float]) -> dict[str, float]:
    """The errors, if all are within the case's limits."""
    wrong = {kind: error for kind, error in errors.items() if not error <= case.limits[kind]}
    if wrong:
        raise WrongResult(f"{case.name}: {name} is off by {wrong}, allowed is {dict(case.limits)}; not timed")
    return errors


def measure(case: Case, repeats: int = REPEATS) -> Result:
    """Check every contestant, then time them in turns."""
    contestants = case.contestants()
    errors = {each.name: check(case, each.name, dict(each.errors(each.run()))) for each in contestants}
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    for _ in range(repeats):
        for each in contestants:
            start = time.perf_counter()
            each.run()
            seconds[each.name].append(time.perf_counter() - start)
    ours = min(seconds[contestants[0].name])
    rows = tuple(
        Row(
            each.name,
            min(seconds[each.name]),
            statistics.median(seconds[each.name]),
            min(seconds[each.name]) / ours,
            case.targets.get(each.name),
            errors[each.name],
        )
        for each in contestants
    )
    return Result(case.name, case.title, repeats, case.seconds, rows)


def environment() -> dict[str, Any]:
    """The machine and the versions a measurement belongs to."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "conditioned_kernels": ck.__version__,
        "backend": ck.explain_backend(torch.empty(1, 1)).name,
        "date": datetime.date.today().isoformat(),
    }


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def markdown(record: dict[str, Any]) -> str:
    """The README's tables of a record that --json wrote."""
    machine = record["environment"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}, "
        f"{machine['date']}; best of {record['results'][0]['repeats']}, in turns.",
        "",
    ]
    for result in record["results"]:
        kinds = list(dict.fromkeys(kind for row in result["rows"] for kind in row["errors"]))
        lines += [
            f"**{result['title']}**" + (f" (target {result['seconds']:g} s)" if result["seconds"] else ""),
            "",
            "| | ms | times ours | " + " | ".join(kind.replace("|", "\\|") for kind in kinds) + " |",
            "|---|--:|--:|" + "--:|" * len(kinds),
        ]
        for row in result["rows"]:
            ratio = f"{row['ratio']:.1f}" + (f" (target {row['target']:g})" if row["target"] else "")
            errors = [f"{row['errors'][kind]:.1e}" if kind in row["errors"] else "" for kind in kinds]
            lines.append(f"| {row['contestant']} | {row['best'] * 1e3:.1f} | {ratio} | {' | '.join(errors)} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measure", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--markdown", type=Path, help="print the record in this file as tables, and measure nothing")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="these cases alone")
    options = parser.parse_args(arguments)
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text(encoding="utf-8"))))
        return 0
    record: dict[str, Any] = {"environment": environment(), "results": []}
    for case in CASES:
        if not options.only or case.name in options.only:
            print(f"{case.title} ...", file=sys.stderr)
            record["results"].append(asdict(measure(case, options.repeats)))
    print(markdown(record))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
