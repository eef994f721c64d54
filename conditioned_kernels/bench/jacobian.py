"""kappa(J) of attention heads: ours beside what one would otherwise do.

Errors are against the SVD of autograd's J, or where J is too large to hold, against the eigenvalues of J J^T in
float64, both without this package's reduction.
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
from .tables import OURS

REFERENCES = 2
"""Heads of a layer compared with all eigenvalues of their J J^T, which take seconds."""


def random_heads(heads: int, tokens: int, width: int, head_dim: int, device: torch.device) -> AttentionHeads:
    """Gaussian tokens, and weights of standard deviation 0.02 as GPT-2 starts from."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    w_q, w_k, w_v = (0.02 * normal(heads, head_dim, width) for _ in range(3))
    return AttentionHeads(normal(tokens, width), w_q, w_k, w_v)


def autograd_kappa(heads: AttentionHeads) -> Tensor:
    """torch.func.jacrev of each head in float64, and the SVD of the result."""
    x, out = heads.x.double(), []

    def attend(w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
        q, k, v = (x @ weight.mT for weight in (w_q, w_k, w_v))
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v

    for weights in zip(*(weight.double() for weight in heads.weights), strict=True):
        parts = torch.func.jacrev(attend, argnums=(0, 1, 2))(*weights)
        values = torch.linalg.svdvals(torch.cat([part.flatten(2) for part in parts], -1).flatten(0, 1))
        out.append(values[0] / values[-1])
    return torch.stack(out)


def eigenvalue_kappa(heads: AttentionHeads, number: int) -> Tensor:
    """All eigenvalues of J J^T in closed form, of the first ``number`` heads."""
    out = []
    for index in torch.arange(number, device=heads.x.device).split(1):
        values = torch.linalg.eigvalsh(gram(linearize(heads.select(index))))[0]
        out.append((values[-1] / values[0]).sqrt())
    return torch.stack(out)


def ours(heads: AttentionHeads, method: str, reference: Tensor) -> Contestant:
    """One of our methods; a bracket that misses the reference is an infinite error."""

    def errors(estimate: JacobianEstimate) -> Errors:
        low, high, kappa = (each[: len(reference)] for each in (estimate.low, estimate.high, estimate.kappa))
        held = bool(((low <= reference * (1 + 1e-6)) & (reference * (1 - 1e-6) <= high)).all())
        return plain(reference)(kappa) if held else {KAPPA: math.inf}

    return Contestant(f"{OURS}, {method}", lambda: jacobian_condition(heads, method=method), errors)


def plain(reference: Tensor) -> Callable[[Tensor], Errors]:
    """Errors of plain values, of as many heads as there are."""

    def errors(kappa: Tensor) -> Errors:
        count = min(len(kappa), len(reference))
        return {KAPPA: float((kappa[:count] / reference[:count] - 1).abs().max())}

    return errors


def layer(methods: tuple[str, str], tokens: int, device: torch.device) -> tuple[Contestant, ...]:
    """The heads of one layer of GPT-2 small; J of one head has 2048 x 147456 elements at 32 tokens, 2.4 GB."""
    shape = SHAPES["gpt2"]
    heads = random_heads(shape.q, tokens, shape.width, shape.head_dim, device)
    reference = eigenvalue_kappa(heads, REFERENCES)
    eigenvalues = Contestant(
        "J Jᵀ in closed form + eigvalsh", lambda: eigenvalue_kappa(heads, 1), plain(reference), share=1 / shape.q
    )
    return ours(heads, methods[0], reference), ours(heads, methods[1], reference), eigenvalues


def small(device: torch.device) -> tuple[Contestant, ...]:
    """What fits autograd."""
    heads = random_heads(4, 16, 128, 16, device)
    reference = autograd_kappa(heads)
    return (
        ours(heads, "exact", reference),
        ours(heads, "lanczos", reference),
        Contestant("jacrev + svdvals", lambda: autograd_kappa(heads), plain(reference)),
        Contestant("J Jᵀ in closed form + eigvalsh", lambda: eigenvalue_kappa(heads, 4), plain(reference)),
    )


def jacobian_cases(device: torch.device) -> list[Case]:
    """Exact and bracketed kappa(J) of a layer, and of heads small enough for autograd."""
    title = "kappa(J) of 12 heads of 768x64, 32 tokens"
    source = SHAPES["gpt2"].source
    return [
        Case(
            "jacobian exact",
            f"{title}, to 1e-3",
            partial(layer, ("exact", "lanczos"), 32, device),
            {KAPPA: 0.1},
            seconds=4.0 if device.type == "cpu" else None,
            source=source,
        ),
        Case(
            "jacobian lanczos",
            f"{title}, to 10 %",
            partial(layer, ("lanczos", "exact"), 32, device),
            {KAPPA: 0.1},
            {f"{OURS}, exact": 5},
            source=source,
        ),
        Case("jacobian small", "kappa(J) of 4 heads of 128x16, 16 tokens", partial(small, device), {KAPPA: 0.1}),
    ]
