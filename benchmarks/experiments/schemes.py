"""The initializations that are compared, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import conditioned_kernels as ck
from conditioned_kernels.initialize import apply
from conditioned_kernels.initialize.scope import Scope
from conditioned_kernels.initialize.target import Target

from .docstrings import teacher_folder


@dataclass(frozen=True)
class Scheme:
    """One initialization: what is called on the freshly built model, and with which options.

    Attributes
    ----------
    title : in the tables.
    call : a name in :data:`CALLS`.
    options : keyword arguments of that function.
    batch : its keyword argument that takes a batch of training inputs; "" if it needs none.
    """

    title: str
    call: str
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: str = ""

    @property
    def code(self) -> str:
        """The call in Python; "" where it is no single public function."""
        function = CALLS[self.call].__name__
        if not hasattr(ck, function):
            return ""
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{function}({', '.join(['model', *options, *([self.batch + '=batch'] if self.batch else [])])})"


def rescaled_(model: nn.Module, *, seed: int = 0) -> None:
    """Multiply every W_Q and W_K so that its Frobenius norm is that of semi-orthogonal heads: a control.

    Against the default it changes the scale alone, and against semi-orthogonal W_Q, W_K the spectrum alone.
    """

    def draw(target: Target) -> apply.Draw:
        if target.projection.role == "v":
            return apply.Draw(None, "left alone")
        heads = target.heads
        norm = math.sqrt(math.prod(heads.shape[:-2]) * min(heads.shape[-2:]))
        return apply.Draw(heads * (norm / torch.linalg.vector_norm(heads)), "rescaled")

    apply.Scheme("rescaled", seed, draw).apply(model, Scope())


def select_weights_(model: nn.Module, *, seed: int = 0) -> None:
    """Weight selection from all-MiniLM-L6-v2; the head over the vocabulary, which it lacks, stays."""
    ck.weight_selection_(model, teacher_folder(), leave=("cls.",), seed=seed)


def spectral_conditioning(model: nn.Module, *, seed: int = 0, **options: Any) -> None:
    """:func:`conditioned_kernels.spectral_conditioning`, which draws nothing."""
    ck.spectral_conditioning(model, **options)


CALLS: dict[str, Callable[..., Any]] = {
    "nothing": lambda model, seed: None,
    "random": ck.random_,
    "conditioned": ck.conditioned_,
    "rescaled": rescaled_,
    "mimetic": ck.mimetic_,
    "weight selection": select_weights_,
    "spectral conditioning": spectral_conditioning,
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
    "calibrated": Scheme(
        "W_Q, W_K conditioned, gain calibrated, W_V kept",
        "conditioned",
        {"gain": {"q": "calibrated", "k": "calibrated"}, "value": "keep"},
        batch="calibration",
    ),
    "weight-selection": Scheme("weight selection", "weight selection"),
    "spectral": Scheme("spectral conditioning, λ = 10", "spectral conditioning", {"lam": 10.0}),
    "qk-rescaled": Scheme("W_Q, W_K rescaled only", "rescaled"),
}


def initialize(name: str, model: nn.Module, seed: int, inputs: Tensor) -> None:
    """Apply the scheme ``name`` to ``model``; ``inputs`` is a batch of training inputs."""
    scheme = SCHEMES[name]
    batch = {scheme.batch: inputs} if scheme.batch else {}
    CALLS[scheme.call](model, seed=seed, **scheme.options, **batch)
