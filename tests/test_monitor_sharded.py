"""The monitor on sharded models, in a group of two processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from .ranks import ROOT, errors, run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")


def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C09, C11, F22; what each check proves is said in tests/monitor_ranks.py."""
    monkeypatch.syspath_prepend(ROOT)
    from . import monitor_ranks

    codes = run_ranks(monitor_ranks.run_checks, 2, tmp_path)
    assert codes == [0, 0], errors(tmp_path)
    for check in monitor_ranks.CHECKS:
        assert all((tmp_path / f"{check.__name__}-{rank}").exists() for rank in range(2)), check.__name__
