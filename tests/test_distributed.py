"""Two processes over gloo on the CPU: what one rank computes is what another receives, and computes itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import conditioned_kernels as ck

from .matrices import gaussian

RANKS = 2
LIMIT = 120
"""Seconds after which the group counts as hung."""


def work(rank: int, rendezvous: str, results: str) -> None:
    """Rank 0's results go to both ranks by broadcast; every rank also computes its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    try:
        torch.manual_seed(rank)  # the ranks' global random states differ, and must not matter
        x = gaussian(3, 16, 40)
        own = {
            "semi_orthogonal": ck.semi_orthogonal((4, 8), seed=3),
            "polar": ck.orthogonalize(x),
            "qr": ck.orthogonalize(x, method="qr"),
            "qr of a tall": ck.orthogonalize(x.mT, method="qr"),
            "singular": ck.orthogonalize(torch.ones(2, 8, 8), method="qr"),
            "float64": ck.orthogonalize(x.double()),
        }
        model = nn.MultiheadAttention(32, 4)
        ck.conditioned_(model, seed=5)
        own["conditioned"] = model.in_proj_weight.detach()
        received = {}
        for name, tensor in own.items():
            received[name] = tensor if rank == 0 else torch.full_like(tensor, torch.nan)
            dist.broadcast(received[name], 0)
        torch.save({"own": own, "received": received}, f"{results}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("gloo")
    group = torch.multiprocessing.start_processes(
        work, (str(folder / "rendezvous"), str(folder)), nprocs=RANKS, join=False, start_method="spawn"
    )
    end = time.monotonic() + LIMIT
    try:
        while not group.join(1):  # true once every process has ended; raises what one of them raised
            assert time.monotonic() < end, "the group hangs"
    finally:
        for process in group.processes:
            process.kill()
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


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
