"""Two processes over gloo on the CPU: what one rank computes is what another receives, and computes itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import conditioned_kernels as ck

from .gloo_rank import RANKS

LIMIT = 120
"""Seconds after which the group counts as hung."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("gloo")
    script = Path(__file__).parent / "gloo_rank.py"
    env = os.environ | {"PYTHONPATH": str(Path(ck.__file__).parent.parent)}  # the package under test, wherever it is
    group = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(folder / "rendezvous"), str(folder)], env=env)
        for rank in range(RANKS)
    ]
    try:
        assert [process.wait(LIMIT) for process in group] == [0] * RANKS
    finally:
        for process in group:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def test_a16_a_broadcast_result_arrives_bit_for_bit(ranks: list[dict[str, dict[str, torch.Tensor]]]) -> None:
    """A16: LAPACK's Q is column-major, and code that sends raw storage transmits the transpose."""
    for name, sent in ranks[0]["own"].items():
        assert sent.is_contiguous(), name
        assert torch.equal(ranks[1]["received"][name], sent), name


def test_ranks_compute_the_same_weights_without_communication(
    ranks: list[dict[str, dict[str, torch.Tensor]]],
) -> None:
    for name, own in ranks[0]["own"].items():
        assert torch.equal(ranks[1]["own"][name], own), name
