"""``pytest benchmarks --benchmark-enable``: each case checked against float64, then timed. No assertion on time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from conditioned_kernels.bench.case import Case, Skipped
from conditioned_kernels.bench.machine import Rates
from conditioned_kernels.bench.measure import Result, check, chosen, measure

from .conftest import CPU


@pytest.mark.parametrize("case", chosen(CPU), ids=lambda case: case.name)
def test_case(case: Case, benchmark: Any, results: list[Result], request: pytest.FixtureRequest) -> None:
    """Ours by pytest-benchmark, all contestants in turns; with benchmarks disabled only our accuracy is checked."""
    benchmark.group = case.group
    ours = case.contestants()[0]
    if isinstance(ours, Skipped):
        pytest.skip(ours.reason)
    if benchmark.disabled:
        benchmark(lambda: None)
        _, _, refused = check(case, ours)
        assert not refused
        return
    rates: Rates = request.getfixturevalue("rates")
    results.append(result := measure(case, rates=rates))
    benchmark.extra_info |= dataclasses.asdict(result)
    benchmark.pedantic(ours.run, rounds=result.turns, warmup_rounds=1)
