"""Sharded weights, in groups of one to four processes over gloo."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from . import sharded_checks
from .ranks import GROUP_TIMEOUT, ROOT, errors, run_ranks

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def importable() -> pytest.MonkeyPatch:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield patch


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def group(request: pytest.FixtureRequest, importable: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"ranks-{request.param}")
    codes = run_ranks(sharded_checks.run_checks, request.param, folder)
    assert codes == [0] * request.param, errors(folder)
    return folder


@pytest.mark.parametrize("check", sharded_checks.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_every_rank(group: Path, check: object) -> None:
    outcomes = {path.name: path.read_text() for path in group.glob(f"{check.__name__}-*.txt")}
    assert outcomes
    assert not any(outcomes.values()), "\n".join(f"{name}:\n{text}" for name, text in outcomes.items() if text)


def test_a_distributed_checkpoint_of_four_ranks_verifies_on_two(importable: object, tmp_path: Path) -> None:
    for name, world in (("save", 4), ("load", 2)):
        folder = tmp_path / name
        codes = run_ranks(getattr(sharded_checks, f"{name}_checkpoint"), world, folder)
        assert codes == [0] * world, errors(folder)


def test_a_rank_that_dies_leaves_an_error_and_no_hang(importable: object, tmp_path: Path) -> None:
    start = time.monotonic()
    codes = run_ranks(sharded_checks.lose_a_rank, 3, tmp_path)
    assert codes[1] == 7
    assert codes[0] == codes[2] == 1  # verify, which needs the lost rank, raised
    assert (tmp_path / "initialized-0").exists() and (tmp_path / "initialized-2").exists()
    assert time.monotonic() - start < GROUP_TIMEOUT + 30
