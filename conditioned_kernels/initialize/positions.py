"""Learned absolute position tables: where models keep them, and the sinusoids of Vaswani et al. (2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..heads.discover import AttentionLayer, named_modules
from ..heads.layout import Projection
from ..heads.wrappers import unwrap
from .target import WHOLE, Target

TABLES = {
    "pos_embed": "timm's vision transformers",
    "position_embeddings": "ViT, DeiT, BEiT and DINOv2 of transformers",
    "position_embeddings.weight": "the BERT family",
    "position_embedding.weight": "CLIP, SigLIP",
    "wpe.weight": "GPT-2, GPT-Neo, GPT-BigCode",
    "embed_positions.weight": "BART, OPT, Whisper",
}
"""Ends of the names under which the supported models keep a learned table (..., positions, width), and which do."""


@dataclass(frozen=True)
class TableView:
    """A table (positions, width) or (1, positions, width) as one matrix (1, positions, width)."""

    def __call__(self, weight: Tensor) -> Tensor:
        return weight if weight.ndim == 3 else weight[None]


def position_targets(model: nn.Module, positions: str) -> list[Target]:
    """The tables of ``model``: those of :data:`TABLES` for "sinusoidal", else the parameter named ``positions``."""
    if not isinstance(positions, str):
        raise TypeError(f'positions must be None, "sinusoidal" or the name of a parameter, got {positions!r}')
    wanted = tuple(TABLES) if positions == "sinusoidal" else (positions,)
    found, seen = [], set[int]()
    for name, module in named_modules(model):
        for attribute, parameter in module._parameters.items():
            path = f"{name}.{attribute}" if name else attribute
            hit = any(path == end or path.endswith(f".{end}") for end in wanted)
            if parameter is None or not hit or id(parameter) in seen:
                continue
            if positions != "sinusoidal" and path != positions:
                continue
            seen.add(id(parameter))
            if not (parameter.ndim == 2 or (parameter.ndim == 3 and parameter.shape[0] == 1)):
                raise ValueError(
                    f"{path} must be a table (positions, width) or (1, positions, width) to be written with sinusoids, "
                    f"got shape {tuple(parameter.shape)}"
                )
            # Under the model's own class, by which transformers' weights are marked.
            layer = AttentionLayer("", unwrap(model), "", ())
            found.append(Target(layer, Projection(WHOLE, path, TableView()), module, attribute, path))
    if not found:
        missing = (
            "no learned table of absolute positions under a known name"
            if positions == "sinusoidal"
            else (f"no parameter {positions!r}")
        )
        raise ValueError(
            f"positions={positions!r}: {type(model).__name__} has {missing} (known: {', '.join(TABLES)}); give the "
            "parameter's name, or positions=None"
        )
    return found


def sinusoids(like: Tensor) -> Tensor:
    """Row p of every table (..., positions, width): sin(p / 10000^(2i/width)) in column 2i, cos in column 2i + 1."""
    length, width = like.shape[-2:]
    position = torch.arange(length, dtype=torch.float64, device=like.device)[:, None]
    column = torch.arange(width, device=like.device)
    angle = position * 10000.0 ** (-(column - column % 2).double() / width)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos()).expand(like.shape)
