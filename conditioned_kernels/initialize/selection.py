"""Which elements of a larger model a smaller one takes: along an axis, in a stack of layers, and by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..sampling import philox_normal, stream_key

LAYERS = ("first", "uniform")
ELEMENTS = ("uniform", "consecutive", "random")


@dataclass(frozen=True)
class Selection:
    """The choice along one axis, a function of its two sizes: axes of the same sizes choose alike in the whole model.

    ``elements`` "uniform": i teacher // student; "consecutive": i; "random": sorted, from the sample stream.
    """

    elements: str
    seed: int

    def __call__(self, teacher: int, student: int, what: str) -> Tensor:
        """(student,) indices below ``teacher``; ``what`` names the axis in an error."""
        if student > teacher:
            raise ValueError(
                f"{what}: the student has {student} and the teacher only {teacher}; weight selection needs a teacher "
                "that is at least as large in every dimension"
            )
        return _choose(self.elements, self.seed, teacher, student)


@cache
def _choose(elements: str, seed: int, teacher: int, student: int) -> Tensor:
    every = torch.arange(student, device="cpu")
    if elements == "consecutive" or teacher == student:
        return every
    if elements == "uniform":
        return every * teacher // student
    samples = philox_normal(stream_key(seed, f"{teacher} to {student}", "weight_selection"), range(1), range(teacher))
    return samples[0].argsort()[:student].sort().values


def aligned_prefix(wanted: Iterable[str], available: Iterable[str]) -> tuple[str, str]:
    """(removed, added): the change of a name's beginning, such as "bert.", by which most ``wanted`` are available."""
    wanted, available = list(wanted), set(available)
    begins = [_beginnings(wanted), _beginnings(available)]
    changes = [("", "")] + [(begin, "") for begin in begins[0]] + [("", begin) for begin in begins[1]]
    return max(changes, key=lambda change: sum(renamed(name, change) in available for name in wanted))


def renamed(name: str, change: tuple[str, str]) -> str:
    """``name`` after a change found by :func:`aligned_prefix`."""
    removed, added = change
    return added + name.removeprefix(removed)


def _beginnings(names: Iterable[str]) -> list[str]:
    """Every first and first-two segments, with their dots."""
    found: dict[str, None] = {}
    for name in names:
        first, _, rest = name.partition(".")
        if rest:
            found[f"{first}."] = None
            second, _, more = rest.partition(".")
            if more:
                found[f"{first}.{second}."] = None
    return list(found)


def stack_sizes(names: Iterable[str]) -> dict[str, int]:
    """Length of every numbered stack: the largest number after each beginning, plus 1."""
    sizes: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                stack = ".".join(parts[:i])
                sizes[stack] = max(sizes.get(stack, 0), int(part) + 1)
    return sizes


def layer_name(name: str, student: dict[str, int], teacher: dict[str, int], layers: str) -> str:
    """The teacher's name for the student's ``name``, numbers of stacks replaced: "first" keeps them, "uniform" spreads
    them as i teacher // student. Stacks inside stacks are mapped from the outside in."""
    ours = name.split(".")
    theirs = list(ours)
    for i, part in enumerate(ours):
        if not part.isdecimal():
            continue
        here, there = student[".".join(ours[:i])], teacher.get(".".join(theirs[:i]), 0)
        if here > there:
            raise ValueError(
                f"the stack {'.'.join(ours[:i])!r} has {here} layers in the student and {there} in the teacher; weight "
                "selection needs a teacher that is at least as deep, of the same family"
            )
        theirs[i] = str(int(part) * there // here) if layers == "uniform" else part
    return ".".join(theirs)
