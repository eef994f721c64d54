"""Is a record slower than an older one? Ratios are compared, never times: machines differ, and so do moments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TOLERANCE = 0.25
"""A ratio that fell by more than this part is a regression; two runs on one busy machine differ by about half of it."""


def load(path: Path) -> dict[str, Any]:
    """A record that ``bench --json`` wrote.

    Raises
    ------
    ValueError
        for a file that is none.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        ratios(record)
    except OSError as error:
        raise ValueError(f"--compare: cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"--compare: {path} is no record of a benchmark: expected what bench --json wrote") from error
    return record


def ratios(record: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """(case, contestant) to how many times as long it takes as ours, peers of equal results alone."""
    return {
        (result["name"], row["contestant"]): row["ratio"]
        for result in record["results"]
        for row in result["rows"][1:]
        if row["ratio"] is not None and row["equal"]
    }


def shared(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The ratios of ``old`` in cases that ``new`` ran.

    Raises
    ------
    ValueError
        where there is none, and so nothing to compare.
    """
    ran = {result["name"] for result in new["results"]}
    found = {key: ratio for key, ratio in ratios(old).items() if key[0] in ran}
    if not found:
        raise ValueError("--compare: the older record has no ratio of a case of this run, so nothing was compared")
    return found


def regressions(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float = TOLERANCE) -> Iterator[str]:
    """A sentence per ratio of ``new`` that is lower than in ``old`` by more than ``tolerance``, or is gone.

    Cases that ``new`` did not run are not compared.
    """
    after = ratios(new)
    for (case, peer), was in shared(old, new).items():
        now = after.get((case, peer))
        if now is None:
            yield f"{case}: {peer} took {was:.2f} times as long as ours and is no longer measured"
        elif now < was * (1 - tolerance):
            yield f"{case}: {peer} takes {now:.2f} times as long as ours, it took {was:.2f} times"
