"""kappa(J) of a layer while it trains."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import conditioned_kernels as ck
from conditioned_kernels.heads.mechanics import attention_heads

from .models import Model
from .tasks import IGNORED, Data

TOKENS = 16


@torch.no_grad()
def trace(kind: Model, model: nn.Module, data: Data, device: str, step: int) -> dict[str, Any]:
    """kappa(J), exact and bound, of the middle layer on TOKENS tokens of the first validation example.

    Returns
    -------
    ``step``; medians over the heads of ``kappa``, ``effective`` (over the singular values that are not numerically
    zero) and ``bound``, None where they are infinite.
    """
    layers = ck.find_attention(model).layers
    layer = layers[len(layers) // 2]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    handle = layer.module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        model.eval()
        kind.logits(model, data.inputs[:1].to(device), (data.targets[:1] != IGNORED).to(device))
    finally:
        handle.remove()
    args, kwargs = calls[0]
    heads = attention_heads(layer, args, kwargs, samples=1, tokens=TOKENS)
    estimate, bound = ck.jacobian_condition(heads, method="exact"), ck.jacobian_bound(heads)
    values = {"kappa": estimate.kappa, "effective": estimate.effective, "bound": bound.bound}
    medians = {name: float(value.flatten().median()) for name, value in values.items()}
    return {"step": step} | {name: value if math.isfinite(value) else None for name, value in medians.items()}
