"""The random baselines the paper compares with, per head and from the same sample stream."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from .. import _validate
from ..heads.discover import Where
from ..heads.layout import LayoutFunction
from ..sampling import philox_normal, stream_key
from .apply import Draw, Scheme
from .conditioned import semi_orthogonal_heads
from .init_report import InitReport
from .scope import Scope
from .target import Target

KINDS = ("trunc_normal", "xavier", "kaiming", "orthogonal")


def random_(
    model: nn.Module,
    *,
    kind: str = "trunc_normal",
    std: float = 0.02,
    seed: int = 0,
    where: Where | None = None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None = None,
    strict: bool = True,
    include_frozen: bool = False,
    overwrite: bool = False,
) -> InitReport:
    """Give every attention head's W_Q, W_K and W_V, in place, one of the usual random initializations.

    With fan_in = in_features and fan_out = heads * head_dim of the one projection (never of a packed weight, whose
    fan_out is three times too large):

    ========================  =====================================================================
    ``kind``                  elements
    ========================  =====================================================================
    ``trunc_normal``          N(0, std^2) cut at +-2, the vision default; at std 0.02 the cut is at 100 std, so
                              it never acts, and the sample stream's reach of 6.66 std is the only one
    ``xavier``                N(0, 2 / (fan_in + fan_out)) (Glorot and Bengio, AISTATS 2010)
    ``kaiming``               N(0, 2 / fan_in) (He et al., ICCV 2015)
    ``orthogonal``            each head semi-orthogonal, V too (Saxe et al., ICLR 2014, per head)
    ========================  =====================================================================

    Parameters
    ----------
    std : standard deviation for ``trunc_normal``, in (0, 0.3].
    Other parameters, returns and errors as :func:`conditioned_`.
    """
    _validate.choice(kind, "kind", KINDS)
    if _validate.positive(std, "std") > 0.3:
        raise ValueError(
            f"std must be at most 0.3, where the cut at 2 is beyond the stream's reach of 6.66 std, got {std}"
        )

    def draw(target: Target) -> Draw:
        rows, cols = target.shape[-2:]
        role = f"{kind}/{target.stream_role}"
        if kind == "orthogonal":
            return Draw(semi_orthogonal_heads(target, seed, role), "semi-orthogonal", 1.0)
        scale = {
            "trunc_normal": std,
            "xavier": math.sqrt(2 / (cols + target.count * rows)),
            "kaiming": math.sqrt(2 / cols),
        }[kind]
        key = stream_key(seed, target.name, role)
        samples = philox_normal(key, target.chunk, range(rows * cols), device=target.device)
        return Draw(samples.view(target.drawn_shape).to(target.work).mul_(scale), f"{kind}, std {scale:.4g}")

    scope = Scope(where, layouts, strict, include_frozen, overwrite)
    return Scheme(f"random, {kind}", seed, draw).apply(model, scope)
