"""Prints the tables of what was measured in turns after pytest-benchmark's own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from conditioned_kernels.bench.machine import Rates, environment, measured_rates
from conditioned_kernels.bench.measure import Result
from conditioned_kernels.bench.tables import as_markdown

CPU = torch.device("cpu")
RESULTS = pytest.StashKey[list[Result]]()
RATES = pytest.StashKey[Rates]()


@pytest.fixture
def results(pytestconfig: pytest.Config) -> list[Result]:
    """Where a benchmark leaves what it measured."""
    return pytestconfig.stash.setdefault(RESULTS, [])


@pytest.fixture
def rates(pytestconfig: pytest.Config) -> Rates:
    """The machine's limits, measured once."""
    if RATES not in pytestconfig.stash:
        pytestconfig.stash[RATES] = measured_rates(CPU)
    return pytestconfig.stash[RATES]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if measured := config.stash.get(RESULTS, []):
        rates = asdict(config.stash[RATES])
        record = {"environment": environment(CPU), "rates": rates, "results": [asdict(each) for each in measured]}
        terminalreporter.section("measured in turns")
        terminalreporter.write_line(as_markdown(record))
