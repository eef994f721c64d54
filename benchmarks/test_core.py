"""``pytest benchmarks --benchmark-enable``: each case checked against float64, then timed. No assertion on time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from .cases import CASES, RESIDUAL, Case, Contestant, residual
from .measure import Result, WrongResult, check, measure


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, benchmark: Any, results: list[Result]) -> None:
    """Ours by pytest-benchmark, all contestants in turns; with benchmarks disabled only the accuracy is checked."""
    benchmark.group = case.name
    if benchmark.disabled:
        ours, *peers = case.contestants()
        check(case, ours.name, dict(ours.errors(benchmark(ours.run))))
        for each in peers:
            check(case, each.name, dict(each.errors(each.run())))
        return
    results.append(result := measure(case))
    benchmark.extra_info |= dataclasses.asdict(result)
    benchmark.pedantic(case.contestants()[0].run, rounds=result.repeats, warmup_rounds=1)


def test_a_wrong_result_is_not_timed() -> None:
    for wrong in (torch.ones(2, 4, 2), torch.full((2, 4, 2), torch.nan)):
        case = Case("job", "a job", lambda q=wrong: (Contestant("wrong", lambda: q, residual),), {RESIDUAL: 1e-6})
        with pytest.raises(WrongResult, match="job: wrong is off by"):
            measure(case, repeats=1)
