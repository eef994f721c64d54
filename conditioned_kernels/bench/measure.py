"""Measure the contestants of a case side by side.

They take turns in one process, so that a slow moment of the machine hits all of them, and each one's best turn
counts. A result is checked against float64 first: ours must hold the case's limits, a peer that does not is listed
with what it is off by and not timed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from . import growth, suite
from .case import Case, Contestant, Errors, Skipped
from .machine import Rates, environment, measured_rates, seconds

BUDGET = 4.0
"""Seconds of turns per case."""
TURNS = (3, 25)
"""The fewest and the most turns."""
GROWTH = "growth"
"""The group that is no list of cases but :mod:`.growth`."""


class WrongResult(RuntimeError):
    """A contestant's result is not what was asked for; its time would mean nothing."""


@dataclass(frozen=True)
class Row:
    """One contestant of one case.

    Attributes
    ----------
    contestant : its name; ours comes first.
    best, median : seconds of one run, of the whole job.
    first : seconds of the run before the turns, which loads and compiles what has to be.
    ratio : its best divided by ours.
    floor : the job's floor divided by its best.
    target : what the ratio should be at least, if there is a target.
    errors : against float64, by name.
    equal : whether it returns what ours returns, at the case's accuracy; a ratio is a claim only then.
    note : what it leaves undone.
    share : the part of the job that was run; its times are divided by it.
    skipped : why it was not timed; its times are None then.
    """

    contestant: str
    best: float | None = None
    median: float | None = None
    first: float | None = None
    ratio: float | None = None
    floor: float | None = None
    target: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    equal: bool = True
    note: str = ""
    share: float = 1.0
    skipped: str = ""


@dataclass(frozen=True)
class Result:
    """One case.

    Attributes
    ----------
    name, title, group, source : the case's.
    turns : how often each contestant ran.
    seconds : the most ours should take, where that is a target.
    floor : seconds that the machine's measured rates need for the least work, None if that is not known.
    bound : which rate makes the floor: "memory" or "arithmetic".
    rows : the contestants, ours first.
    """

    name: str
    title: str
    group: str
    source: str
    turns: int
    seconds: float | None
    floor: float | None
    bound: str
    rows: tuple[Row, ...]


def wrong(errors: Errors, limits: Errors) -> str:
    """Which error is above its limit, or has none; "" if all hold. NaN is above every limit."""
    for kind, error in errors.items():
        if not error <= limits.get(kind, -math.inf):
            return f"off by {error:.2g} in {kind}, allowed {limits.get(kind, 0):.2g}"
    return "" if errors else "not compared with anything"


def check(case: Case, each: Contestant) -> tuple[dict[str, float], float, str]:
    """(errors, seconds of the run, why the result is refused or "")."""
    errors, first, refused = {}, 0.0, ""
    try:
        first, result = seconds(each.run, _device(case))
        errors = {kind: float(error) for kind, error in each.errors(result).items()}
        refused = wrong(errors, {**case.limits, **each.stated})
    except (RuntimeError, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        refused = f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return errors, first / each.share, refused


def measure(case: Case, *, rates: Rates | None = None, budget: float = BUDGET, most: int = TURNS[1]) -> Result:
    """Check every contestant of ``case``, then time those that are right, in turns.

    Parameters
    ----------
    rates : the machine's, for the floor.
    budget : seconds of turns; there are never fewer than three.
    most : turns at most.

    Raises
    ------
    WrongResult
        if ours is wrong or fails.
    """
    device = _device(case)
    rows: dict[str, Row] = {}
    timed: list[Contestant] = []
    for number, each in enumerate(case.contestants()):
        if isinstance(each, Skipped):
            rows[each.name] = Row(each.name, skipped=each.reason)
            continue
        errors, first, refused = check(case, each)
        if refused and number == 0:
            raise WrongResult(f"{case.name}: {each.name} is {refused}")
        rows[each.name] = Row(
            each.name,
            first=first,
            target=case.targets.get(each.name),
            errors=errors,
            equal=not each.stated,
            note=each.note,
            share=each.share,
            skipped=f"refused, {refused}" if refused else "",
        )
        if not refused:
            timed.append(each)
    if not timed or timed[0].name != next(iter(rows)):  # without ours there is nothing to compare
        timed = []
    turn = sum((rows[each.name].first or 0) * each.share for each in timed)
    turns = max(min(TURNS[0], most), min(most, int(budget / turn))) if timed else 0
    times: dict[str, list[float]] = {each.name: [] for each in timed}
    for _ in range(turns):
        for each in timed:
            times[each.name].append(seconds(each.run, device)[0] / each.share)
    floor, bound = rates.floor(case.work) if rates and case.work else (None, "")
    for each in timed:
        best = min(times[each.name])
        rows[each.name] = replace(
            rows[each.name],
            best=best,
            median=statistics.median(times[each.name]),
            ratio=best / min(times[timed[0].name]),
            floor=floor / best if floor is not None and not each.stated else None,
        )
    return Result(
        case.name, case.title, case.group, case.source, turns, case.seconds, floor, bound, tuple(rows.values())
    )


def _device(case: Case) -> torch.device:
    return torch.device(case.device)


def available(device: str) -> torch.device:
    """``device`` if it can be measured on.

    Raises
    ------
    ValueError
        for a device that torch does not know, or does not see here.
    """
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be cpu or a CUDA device, got {device!r}") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or a CUDA device, got {device!r}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {device!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices")
    return found


def chosen(device: torch.device, groups: Sequence[str] = (), names: Sequence[str] = ()) -> list[Case]:
    """The cases of ``groups`` (default all) that ``names`` (default all) are of.

    Raises
    ------
    ValueError
        for a group or a case that does not exist.
    """
    known = (*suite.GROUPS, GROWTH)
    if unknown := [group for group in groups if group not in known]:
        raise ValueError(f"group must be one of {', '.join(known)}, got {', '.join(unknown)}")
    makers = {name: make for name, make in suite.GROUPS.items() if not groups or name in groups}
    cases = [replace(case, group=name, device=str(device)) for name, make in makers.items() for case in make(device)]
    if unknown := [name for name in names if name not in {case.name for case in cases}]:
        raise ValueError(f"no case {', '.join(map(repr, unknown))}; --list lists the cases")
    return [case for case in cases if not names or case.name in names]


def run(
    device: torch.device,
    *,
    groups: Sequence[str] = (),
    names: Sequence[str] = (),
    budget: float = BUDGET,
    most: int = TURNS[1],
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The record of a whole run: environment, the machine's rates, and a result per case; plain data for JSON.

    Parameters
    ----------
    groups, names : select cases, as :func:`chosen` does; "growth" is measured unless others are named.
    budget, most : as of :func:`measure`.
    say : told what is being measured.

    Raises
    ------
    ValueError, WrongResult
        as :func:`chosen` and :func:`measure`.
    """
    cases = chosen(device, groups, names)
    rates = measured_rates(device)
    record: dict[str, Any] = {"environment": environment(device), "rates": asdict(rates), "results": []}
    for case in cases:
        say(case.title)
        record["results"].append(asdict(measure(case, rates=rates, budget=budget, most=most)))
    if GROWTH in groups or not (groups or names):
        record["growth"] = growth.run(device, say)
    return record


def as_json(record: dict[str, Any]) -> str:
    """A record as text for a file; what is not finite becomes null, since JSON has no word for it."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(record), indent=1, ensure_ascii=False) + "\n"
