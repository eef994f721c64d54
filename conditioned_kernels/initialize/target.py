"""One projection in one model: where it is read and written, and its shape."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import distributed
from ..heads.discover import AttentionLayer, Discovery
from ..heads.layout import Projection

WHOLE = "*"
"""The role of a target that is a whole parameter outside the attention weights; written, not measured."""


@dataclass(frozen=True)
class Target:
    """One projection in one model, ready to be read and written.

    Attributes
    ----------
    layer : the attention layer.
    projection : which of its projections.
    owner : the module that holds the weight, and ``attribute`` its name there.
    name : the weight's name in the user's model.
    chunk : which heads, by flat index, a scheme shall draw now; of a sharded weight only those that a rank needs.
    """

    layer: AttentionLayer
    projection: Projection
    owner: nn.Module
    attribute: str
    name: str
    chunk: range = range(0)

    @property
    def weight(self) -> Tensor:
        """The stored weight; recomputed on each read where it is parametrized."""
        return getattr(self.owner, self.attribute)

    @property
    def parametrized(self) -> bool:
        """Whether the weight is recomputed by ``torch.nn.utils.parametrize``."""
        return parametrize.is_parametrized(self.owner, self.attribute)

    @property
    def heads(self) -> Tensor:
        """View (*heads, head_dim, in_features) of the weight, which must be here as a whole."""
        if self.piece is not None:
            raise ValueError(
                f"{self.name} is sharded, so its old values are not here as heads; use what does not need them, or "
                "initialize before sharding"
            )
        return self.projection.view(self.weight.detach())

    @functools.cached_property
    def piece(self) -> distributed.Piece | None:
        """The part of the heads that this rank holds of a sharded weight; None for a weight that is here."""
        weight = self.weight
        if own := getattr(self.projection.view, "piece", None):
            return own(weight)
        return distributed.piece_of(self.projection.view, weight, self.name) if distributed.is_sharded(weight) else None

    def part(self, chunk: range) -> Target:
        """The same target, of which a scheme shall draw the heads ``chunk``."""
        part = replace(self, chunk=chunk)
        part.__dict__["piece"] = self.piece
        return part

    @property
    def shape(self) -> tuple[int, ...]:
        """(*heads, head_dim, in_features) of the whole projection, sharded or not."""
        return self.piece.shape if self.piece is not None else tuple(self.heads.shape)

    @property
    def count(self) -> int:
        """Heads of the whole projection."""
        return math.prod(self.shape[:-2])

    @property
    def drawn_shape(self) -> tuple[int, int, int]:
        """(heads in ``chunk``, head_dim, in_features): what a scheme returns."""
        head_dim, in_features = self.shape[-2:]
        return len(self.chunk), head_dim, in_features

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored weight."""
        return self.weight.dtype

    @property
    def work(self) -> torch.dtype:
        """Of computations: float64 for a weight in float64, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def device(self) -> torch.device:
        """Where the weight, or this rank's part of it, lies."""
        return distributed.local_part(self.weight).device

    @property
    def key(self) -> tuple[str, str]:
        """(name, role): unique in a model, and the names of the sample stream."""
        return self.name, self.stream_role

    @property
    def stream_role(self) -> str:
        """Role in the sample stream's key: the role, and the part where there is one."""
        return self.projection.label


def resolve(found: Discovery, *, outputs: bool = False) -> list[Target]:
    """The discovery's projections with the modules that own their weights; with ``outputs``, each layer's W_O too."""
    targets = []
    for layer in found.layers:
        for projection in (*layer.projections, *([layer.output] if outputs and layer.output else [])):
            name = projection.parameter.rpartition(".")[2]
            targets.append(Target(layer, projection, layer.owner(projection), name, layer.parameter_name(projection)))
    return targets
