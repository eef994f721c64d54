"""Prints the interleaved ratios after pytest-benchmark's own table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from .measure import Result, environment, markdown

RESULTS = pytest.StashKey[list[Result]]()


@pytest.fixture
def results(pytestconfig: pytest.Config) -> list[Result]:
    """Where a benchmark leaves what it measured."""
    return pytestconfig.stash.setdefault(RESULTS, [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    measured = config.stash.get(RESULTS, [])
    if measured:
        record = {"environment": environment(), "results": [asdict(result) for result in measured]}
        terminalreporter.section("measured in turns")
        terminalreporter.write_line(markdown(record))
