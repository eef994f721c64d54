"""kappa(J) of attention heads: ours beside what one would otherwise do.

Each function returns contestants for a case; errors are against the SVD of autograd's J, or where J is too large to
hold, the eigenvalues of J J^T in float64, both without this package's reduction.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import conditioned_kernels as ck
from conditioned_kernels.jacobian.dense import gram
from conditioned_kernels.jacobian.linear import linearize

from .cases import KAPPA, Case, Contestant, Errors


def random_heads(heads: int, tokens: int, width: int, head_dim: int, std: float = 0.02) -> ck.AttentionHeads:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return ck.AttentionHeads(normal(tokens, width), *(std * normal(heads, head_dim, width) for _ in range(3)))


def autograd_kappa(heads: ck.AttentionHeads) -> Tensor:
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


def eigenvalue_kappa(heads: ck.AttentionHeads, number: int) -> Tensor:
    """All eigenvalues of J J^T in closed form, of the first ``number`` heads."""
    out = []
    for index in torch.arange(number).split(1):
        values = torch.linalg.eigvalsh(gram(linearize(heads.select(index))))[0]
        out.append((values[-1] / values[0]).sqrt())
    return torch.stack(out)


def against(reference: Tensor) -> tuple:
    """Errors of an estimate, infinite where its bracket misses the reference, and of plain values."""

    def plain(kappa: Tensor) -> Errors:
        return {KAPPA: float((kappa[: len(reference)] / reference - 1).abs().max())}

    def bracket(estimate: ck.JacobianEstimate) -> Errors:
        low, high = estimate.low[: len(reference)], estimate.high[: len(reference)]
        held = bool(((low <= reference * (1 + 1e-6)) & (reference * (1 - 1e-6) <= high)).all())
        return plain(estimate.kappa) if held else {KAPPA: math.inf}

    return bracket, plain


def layer(heads: int, tokens: int, width: int, head_dim: int) -> tuple[Contestant, ...]:
    """Lanczos first, as the faster of ours, and the exact method as what it should beat."""
    problem = random_heads(heads, tokens, width, head_dim)
    bracket, _ = against(eigenvalue_kappa(problem, min(heads, 2)))
    return (
        Contestant(
            "jacobian_condition, lanczos, 10 %", lambda: ck.jacobian_condition(problem, method="lanczos"), bracket
        ),
        Contestant("jacobian_condition, exact", lambda: ck.jacobian_condition(problem, method="exact"), bracket),
    )


def one_head(tokens: int, width: int, head_dim: int) -> tuple[Contestant, ...]:
    problem = random_heads(1, tokens, width, head_dim)
    bracket, plain = against(eigenvalue_kappa(problem, 1))
    return (
        Contestant("jacobian_condition, exact", lambda: ck.jacobian_condition(problem, method="exact"), bracket),
        Contestant("J Jᵀ in closed form + eigvalsh", lambda: eigenvalue_kappa(problem, 1), plain),
    )


def small(heads: int, tokens: int, width: int, head_dim: int) -> tuple[Contestant, ...]:
    problem = random_heads(heads, tokens, width, head_dim)
    bracket, plain = against(autograd_kappa(problem))
    return (
        Contestant("jacobian_condition, exact", lambda: ck.jacobian_condition(problem, method="exact"), bracket),
        Contestant(
            "jacobian_condition, lanczos, 10 %", lambda: ck.jacobian_condition(problem, method="lanczos"), bracket
        ),
        Contestant("jacrev + svdvals", lambda: autograd_kappa(problem), plain),
        Contestant("J Jᵀ in closed form + eigvalsh", lambda: eigenvalue_kappa(problem, heads), plain),
    )


JACOBIAN_CASES: tuple[Case, ...] = (
    Case(
        "jacobian_layer",
        "kappa(J) of GPT-2 small's 12 heads of 768x64, 32 tokens",
        lambda: layer(12, 32, 768, 64),
        {KAPPA: 0.1},
        {"jacobian_condition, exact": 5},
    ),
    Case(
        "jacobian_head",
        "kappa(J) of one head of 768x64, 32 tokens",
        lambda: one_head(32, 768, 64),
        {KAPPA: 1e-6},
        seconds=4 / 12,
    ),
    Case(
        "jacobian_small",
        "kappa(J) of 4 heads of 128x16, 16 tokens",
        lambda: small(4, 16, 128, 16),
        {KAPPA: 0.1},
    ),
)
