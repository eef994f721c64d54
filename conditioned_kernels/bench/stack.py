"""The attention weights of a real model and nothing else of it, for the jobs that take a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .shapes import Shape


class Attention(nn.Module):
    """The Q, K and V projections of one layer, as nn.Linear stores them."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        self.heads = {"q": shape.q, "k": shape.kv, "v": shape.kv}
        self.roles = nn.ModuleDict(
            {
                role: nn.Linear(shape.width, heads * shape.head_dim, bias=False, device=device)
                for role, heads in self.heads.items()
            }
        )


def stack(shape: Shape, layers: int, device: torch.device) -> nn.ModuleList:
    """So many layers of a model."""
    return nn.ModuleList(Attention(shape, device) for _ in range(layers))


def layout(module: Any) -> dict[str, Tensor]:
    """Where the heads are, for this package: views (heads, head_dim, width) of the parameters."""
    return {role: linear.weight.unflatten(0, (module.heads[role], -1)) for role, linear in module.roles.items()}


def views(module: Any) -> dict[str, Tensor]:
    """The same without gradients, for everybody else."""
    return {role: view.detach() for role, view in layout(module).items()}
