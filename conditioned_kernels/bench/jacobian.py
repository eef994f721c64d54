"""kappa(J) of attention heads: ours beside what one would otherwise do.

Errors are against the SVD of autograd's J in float64, or where that is too large to hold, the eigenvalues of J J^T in
float64; both without this package's reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..jacobian import AttentionHeads, JacobianEstimate, jacobian_condition
from ..jacobian.dense import gram
from ..jacobian.linear import linearize
from .case import KAPPA, Case, Contestant, Errors
from .shapes import SHAPES

TOKENS = 32
CHECKED = 2
"""Heads of a large layer that are compared; one head's kappa does not depend on the others."""


def random_heads(heads: int, tokens: int, width: int, head_dim: int, device: torch.device) -> AttentionHeads:
    """Gaussian tokens, and weights as GPT-2 draws them."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x = normal(tokens, width)
    w_q, w_k, w_v = (0.02 * normal(heads, head_dim, width) for _ in range(3))
    return AttentionHeads(x, w_q, w_k, w_v)


def autograd_kappa(heads: AttentionHeads) -> Tensor:
    """torch.func.jacrev of each head in float64, and the SVD of the result."""

    def attend(w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
        q, k, v = (x @ weight.mT for weight in (w_q, w_k, w_v))
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v

    x, out = heads.x.double(), []
    for weights in zip(*(weight.double() for weight in heads.weights), strict=True):
        parts = torch.func.jacrev(attend, argnums=(0, 1, 2))(*weights)
        values = torch.linalg.svdvals(torch.cat([part.flatten(2) for part in parts], -1).flatten(0, 1))
        out.append(values[0] / values[-1])
    return torch.stack(out)


def eigenvalue_kappa(heads: AttentionHeads, number: int) -> Tensor:
    """All eigenvalues of J J^T in closed form, of the first ``number`` heads."""
    out = []
    for index in torch.arange(number).split(1):
        values = torch.linalg.eigvalsh(gram(linearize(heads.select(index))))[0]
        out.append((values[-1] / values[0]).sqrt())
    return torch.stack(out)


def _plain(reference: Tensor) -> Callable[[Tensor], Errors]:
    return lambda kappa: {KAPPA: float((kappa[: len(reference)] / reference[: len(kappa)] - 1).abs().max())}


def _bracket(reference: Tensor) -> Callable[[JacobianEstimate], Errors]:
    """The error of an estimate, infinite where its bracket misses the reference."""

    def error(estimate: JacobianEstimate) -> Errors:
        low, high = estimate.low[: len(reference)], estimate.high[: len(reference)]
        held = bool(((low <= reference * (1 + 1e-6)) & (reference * (1 - 1e-6) <= high)).all())
        return _plain(reference)(estimate.kappa) if held else {KAPPA: math.inf}

    return error


def layer(device: torch.device) -> tuple[Contestant, ...]:
    """All heads of a layer by Lanczos and exactly; and all eigenvalues of the closed form, of few heads."""
    shape = SHAPES["gpt2"]
    heads = random_heads(shape.q, TOKENS, shape.width, shape.head_dim, device)
    reference = eigenvalue_kappa(heads, CHECKED)
    return (
        Contestant(LANCZOS, lambda: jacobian_condition(heads, method="lanczos"), _bracket(reference)),
        Contestant(EXACT, lambda: jacobian_condition(heads, method="exact"), _bracket(reference)),
        Contestant(EIGENVALUES, lambda: eigenvalue_kappa(heads, 1), _plain(reference), share=1 / shape.q),
    )


def head(device: torch.device) -> tuple[Contestant, ...]:
    """One head exactly."""
    shape = SHAPES["gpt2"]
    heads = random_heads(1, TOKENS, shape.width, shape.head_dim, device)
    reference = eigenvalue_kappa(heads, 1)
    return (
        Contestant(EXACT, lambda: jacobian_condition(heads, method="exact"), _bracket(reference)),
        Contestant(EIGENVALUES, lambda: eigenvalue_kappa(heads, 1), _plain(reference)),
    )


def small(device: torch.device) -> tuple[Contestant, ...]:
    """Heads so small that autograd's J can be held."""
    heads = random_heads(4, 16, 128, 16, device)
    reference = autograd_kappa(heads)
    return (
        Contestant(EXACT, lambda: jacobian_condition(heads, method="exact"), _bracket(reference)),
        Contestant(LANCZOS, lambda: jacobian_condition(heads, method="lanczos"), _bracket(reference)),
        Contestant("torch.func.jacrev + svdvals", lambda: autograd_kappa(heads), _plain(reference)),
        Contestant(EIGENVALUES, lambda: eigenvalue_kappa(heads, 4), _plain(reference)),
    )


EXACT = "jacobian_condition, exact"
LANCZOS = "jacobian_condition, lanczos, 10 %"
EIGENVALUES = "J Jᵀ in closed form + eigvalsh"


def cases(device: torch.device) -> list[Case]:
    """kappa of the attention Jacobian."""
    source = SHAPES["gpt2"].source
    return [
        Case(
            "jacobian layer",
            f"kappa(J) of GPT-2 small's 12 heads of 768x64, {TOKENS} tokens",
            partial(layer, device),
            {KAPPA: 0.1},
            {EXACT: 5},
            source=source,
        ),
        Case(
            "jacobian head",
            f"kappa(J) of one head of 768x64, {TOKENS} tokens",
            partial(head, device),
            {KAPPA: 1e-6},
            seconds=4 / 12 if device.type == "cpu" else None,
            source=source,
        ),
        Case("jacobian small", "kappa(J) of 4 heads of 128x16, 16 tokens", partial(small, device), {KAPPA: 0.1}),
    ]
