"""Which attention weights of a model a call is about."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .. import distributed
from ..heads.discover import Discovery, NoAttentionFound, Where, find_attention
from ..heads.layout import LayoutFunction
from ..heads.wrappers import is_offloaded, quiet_parametrizations


@dataclass(frozen=True)
class Scope:
    """The arguments of those names, put together where a user's call comes in; see :func:`conditioned_`."""

    where: Where | None = None
    layouts: Mapping[type[nn.Module], LayoutFunction] | None = None
    strict: bool = True
    include_frozen: bool = False
    overwrite: bool = False


@contextmanager
def weights_of(model: nn.Module) -> Iterator[None]:
    """The state in which weights are read and written: outside inference mode, no gradients, nothing recomputed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    with torch.inference_mode(False), torch.no_grad(), quiet_parametrizations(model):
        yield


def locate(model: nn.Module, scope: Scope) -> Discovery:
    """:func:`find_attention`, refusing a model without known attention and, if ``strict``, with unknown attention."""
    distributed.reshard(model)
    found = find_attention(model, where=scope.where, layouts=scope.layouts)
    weights = ((layer, each) for layer in found.layers for each in layer.projections)
    away = next((pair for pair in weights if distributed.is_meta(pair[0].weight(pair[1]))), None)
    if away is not None and is_offloaded(model):
        raise ValueError(
            f"{away[0].parameter_name(away[1])} is offloaded: its values are not in the model but in accelerate's "
            "hooks, which put them back for each forward; initialize before dispatching the model, or take the hooks "
            "off with accelerate.hooks.remove_hook_from_submodules(model)"
        )
    unknown = "; ".join(f"{name or 'the model itself'}: {reason}" for name, reason in found.unknown)
    remedy = (
        "Tell where its heads are with layouts={Class: function} or register_layout(Class, function), where function "
        "returns {'q': view, 'k': view, 'v': view}, each a strided view (heads, head_dim, in_features) of a parameter"
    )
    if found.unknown and scope.strict:
        raise NoAttentionFound(f"unknown attention: {unknown}. {remedy}; or pass strict=False to leave it alone")
    if not found.layers:
        reasons = (
            unknown
            or "; ".join(f"{name}: {reason}" for name, reason in found.skipped)
            or "no module looks like attention"
        )
        message = f"no attention layer to initialize in {type(model).__name__} ({reasons}). {remedy}"
        if scope.strict:
            raise NoAttentionFound(message)
        warnings.warn(message, stacklevel=5)
    return found
