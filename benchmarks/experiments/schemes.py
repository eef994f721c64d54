"""The initializations that are compared, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import conditioned_kernels as ck
from conditioned_kernels.initialize.apply import Draw, Target, apply_scheme


@dataclass(frozen=True)
class Scheme:
    """One initialization: what is called on the freshly built model, and with which options.

    Attributes
    ----------
    title : in the tables.
    call : a name in :data:`CALLS`.
    options : keyword arguments of that function.
    """

    title: str
    call: str
    options: Mapping[str, Any] = field(default_factory=dict)


def rescaled_(model: nn.Module, *, seed: int = 0) -> None:
    """Multiply every W_Q and W_K so that its Frobenius norm is that of semi-orthogonal heads: a control.

    Against the default it changes the scale alone, and against semi-orthogonal W_Q, W_K the spectrum alone.
    """

    def draw(target: Target) -> Draw:
        if target.projection.role == "v":
            return Draw(None, "left alone")
        heads = target.heads
        norm = math.sqrt(math.prod(heads.shape[:-2]) * min(heads.shape[-2:]))
        return Draw(heads * (norm / torch.linalg.vector_norm(heads)), "rescaled")

    apply_scheme(
        model,
        draw,
        scheme="rescaled",
        seed=seed,
        where=None,
        layouts=None,
        strict=True,
        include_frozen=False,
        overwrite=False,
    )


CALLS: dict[str, Callable[..., Any]] = {
    "nothing": lambda model, seed: None,
    "random": ck.random_,
    "conditioned": ck.conditioned_,
    "rescaled": rescaled_,
    "mimetic": ck.mimetic_,
}

SCHEMES: dict[str, Scheme] = {
    "default": Scheme("the model's own", "nothing"),
    "redraw": Scheme("trunc. normal .02 (another draw)", "random", {"kind": "trunc_normal"}),
    "xavier": Scheme("Xavier", "random", {"kind": "xavier"}),
    "conditioned": Scheme("conditioned, block", "conditioned"),
    "repeat": Scheme("conditioned, repeat", "conditioned", {"value": "repeat"}),
    "semi-v": Scheme("conditioned, W_V semi-orthogonal", "conditioned", {"value": "semi_orthogonal"}),
    "qk": Scheme("W_Q, W_K conditioned, W_V kept", "conditioned", {"value": "keep"}),
    "v-preserve": Scheme("conditioned, W_V at its own norm", "conditioned", {"gain": {"v": "preserve"}}),
    "preserve": Scheme("conditioned, all at their own norm", "conditioned", {"gain": "preserve"}),
    "mimetic": Scheme("mimetic", "mimetic"),
    "qk-rescaled": Scheme("W_Q, W_K rescaled only", "rescaled"),
}


def initialize(name: str, model: nn.Module, seed: int) -> None:
    """Apply the scheme ``name`` to ``model``."""
    scheme = SCHEMES[name]
    CALLS[scheme.call](model, seed=seed, **scheme.options)
