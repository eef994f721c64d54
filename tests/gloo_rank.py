"""One of two processes over gloo, started by test_distributed.py as a script: rank, rendezvous file, result folder."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import conditioned_kernels as ck

RANKS = 2


def main(rank: int, rendezvous: str, results: str) -> None:
    """Rank 0's results go to both ranks by broadcast; every rank also computes its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    try:
        torch.manual_seed(rank)  # the ranks' global random states differ, and must not matter
        x = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0))
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


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
