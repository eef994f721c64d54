"""What a benchmark is: a job, the ways to do it, how wrong each may be, and the least work it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Errors = Mapping[str, float]

RESIDUAL = "max |QᵀQ - I|"
POLAR = "max |Q - UVᵀ|"
QR = "max |Q - Q of QR|"
MOMENT = "max |mean|, |variance - 1|"
KAPPA = "max |kappa / kappa of float64 - 1|"
INVERSE_KAPPA = "max |1/kappa - 1/kappa of float64|"
TOP = "max |sigma_max / sigma_max of float64 - 1|"
SIGMA = "max |sigma - 1|"


@dataclass(frozen=True)
class Contestant:
    """One way to do the job.

    Attributes
    ----------
    name : as the table shows it.
    run : does the job once, on an input made beforehand; this is what is timed.
    errors : of a result, against float64, by name.
    stated : the errors its authors allow themselves, where those are above the case's limits or of another kind. Such a
        contestant is timed, marked, and no part of a claim, since what it returns is not the same.
    note : what it leaves undone, for the table.
    share : the part of the job it does, where the whole would take too long; its time is divided by it.
    """

    name: str
    run: Callable[[], Any]
    errors: Callable[[Any], Errors]
    stated: Errors = field(default_factory=dict)
    note: str = ""
    share: float = 1.0


class Skipped(NamedTuple):
    """A contestant that cannot run here, and why."""

    name: str
    reason: str


class Work(NamedTuple):
    """The least that any way of doing the job must move (bytes) and compute (flop, at the rate of ``dtype``)."""

    bytes: float
    flops: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes
    ----------
    name : its key in the results.
    title : the job and its size, in words.
    contestants : makes the input and returns the contestants, ours first.
    limits : largest error of each kind that may be timed.
    targets : by contestant, how many times as long it should take as ours.
    seconds : the most ours should take, where that is a target.
    group : what ``--group`` selects it by.
    work : the floor under its time, if one is known.
    source : where its size comes from.
    device : where it runs, so that its work is waited for.
    """

    name: str
    title: str
    contestants: Callable[[], tuple[Contestant | Skipped, ...]]
    limits: Errors
    targets: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None
    group: str = ""
    work: Work | None = None
    source: str = ""
    device: str = "cpu"
