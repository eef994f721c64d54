"""What is measured: every case is data, its contestants the ways to do one job on one input.

The first contestant is ours. Each contestant says how wrong its result is against float64, and a result that is
wrong by more than the case's limits is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import conditioned_kernels as ck
from conditioned_kernels.sampling import philox_normal, stream_key

Errors = Mapping[str, float]
RESIDUAL = "max |QᵀQ - I|"
POLAR = "max |Q - UVᵀ|"
QR = "max |Q - Q of QR|"
MOMENT = "max |mean|, |variance - 1|"
KAPPA = "max |kappa / kappa of float64 - 1|"
SIGMA = "max |sigma - 1|"


@dataclass(frozen=True)
class Contestant:
    """One way to do the job.

    Attributes
    ----------
    name : as the table shows it.
    run : does the job once, on an input made beforehand; this is what is timed.
    errors : of a result, against float64, by name.
    """

    name: str
    run: Callable[[], Any]
    errors: Callable[[Any], Errors]


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes
    ----------
    name : its key in the results.
    title : the job and its size, in words.
    contestants : makes the input and returns the contestants, ours first.
    limits : largest error of each kind that may be timed.
    targets : by contestant, how many times as long it should take as ours.
    seconds : the most ours should take, where that is a target.
    """

    name: str
    title: str
    contestants: Callable[[], tuple[Contestant, ...]]
    limits: Errors
    targets: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None


def gaussian(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def residual(q: Tensor) -> Errors:
    q = q.double()
    gram = q.mT @ q if q.shape[-2] >= q.shape[-1] else q @ q.mT
    return {RESIDUAL: float((gram - torch.eye(gram.shape[-1], dtype=gram.dtype)).abs().max())}


def signed_qr(matrix: Tensor) -> Tensor:
    """What nn.init.orthogonal_ does once it has drawn its Gaussian."""
    q, r = torch.linalg.qr(matrix)
    return q * r.diagonal().sign()


def svd_polar(weights: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(weights, full_matrices=False)
    return u @ vh


def orthogonal_loop(like: Tensor) -> Tensor:
    out = torch.empty_like(like)
    for head in out:
        nn.init.orthogonal_(head)
    return out


def orthogonalize(method: str, heads: int, rows: int, cols: int) -> tuple[Contestant, ...]:
    weights = gaussian(heads, rows, cols)
    exact = {
        "polar": lambda: svd_polar(weights.double()),
        "qr": lambda: torch.stack([signed_qr(head) for head in weights.double()]),
    }
    reference = {kind: make() for kind, make in exact.items()}
    label = {"polar": POLAR, "qr": QR}

    def against(kind: str) -> Callable[[Tensor], Errors]:
        return lambda q: {**residual(q), label[kind]: float((q - reference[kind]).abs().max())}

    return (
        Contestant(f"orthogonalize, {method}", lambda: ck.orthogonalize(weights, method=method), against(method)),
        Contestant("linalg.svd, U Vᵀ", lambda: svd_polar(weights), against("polar")),
        Contestant("orthogonal_ loop, no sampling", lambda: torch.stack([*map(signed_qr, weights)]), against("qr")),
        Contestant("orthogonal_ loop", lambda: orthogonal_loop(weights), residual),
    )


def semi_orthogonal(heads: int, rows: int, cols: int) -> tuple[Contestant, ...]:
    out, whole = torch.empty(heads, rows, cols), torch.empty(rows, heads * cols)
    return (
        Contestant("semi_orthogonal_", lambda: ck.semi_orthogonal_(out), residual),
        Contestant("orthogonal_ loop", lambda: orthogonal_loop(out), residual),
        Contestant("orthogonal_ on the whole", lambda: nn.init.orthogonal_(whole), residual),
        Contestant("randn + linalg.svd, U Vᵀ", lambda: svd_polar(torch.randn_like(out)), residual),
    )


def samples(number: int) -> tuple[Contestant, ...]:
    key = stream_key(0, "benchmark")

    def error(z: Tensor) -> Errors:
        return {MOMENT: max(abs(float(z.double().mean())), abs(float(z.double().var()) - 1))}

    return (
        Contestant("philox_normal", lambda: philox_normal(key, range(1), range(number)), error),
        Contestant("torch.randn", lambda: torch.randn(number), error),
    )


def condition(heads: int, rows: int, cols: int, rtol: float) -> tuple[Contestant, ...]:
    weights = gaussian(heads, rows, cols)
    exact = torch.linalg.cond(weights.double())

    def error(kappa: Tensor) -> Errors:
        return {KAPPA: float((kappa / exact - 1).abs().max())}

    def bracket(estimate: ck.ConditionEstimate) -> Errors:
        held = bool(((estimate.low <= exact * (1 + 1e-12)) & (exact * (1 - 1e-12) <= estimate.high)).all())
        return {KAPPA: float((estimate.kappa / exact - 1).abs().max()) if held else float("inf")}

    def from_values(values: Tensor) -> Errors:
        return error(values[:, 0] / values[:, -1])

    return (
        Contestant(f"condition_number, rtol {rtol:g}", lambda: ck.condition_number(weights, rtol=rtol), bracket),
        Contestant("linalg.cond", lambda: torch.linalg.cond(weights), error),
        Contestant("linalg.svdvals", lambda: torch.linalg.svdvals(weights), from_values),
    )


def model_init(layers: int, width: int, heads: int) -> tuple[Contestant, ...]:
    """A stack with the attention weights of GPT-2 small: Q, K and V packed, 12 layers of 12 heads of 768 x 64."""
    model = nn.ModuleList(nn.MultiheadAttention(width, heads) for _ in range(layers))

    def split(layer: nn.Module) -> Tensor:
        return layer.in_proj_weight.detach().view(3, heads, width // heads, width)

    def loop() -> None:
        for layer in model:
            q, k, v = split(layer)
            for head in (*q, *k):
                nn.init.orthogonal_(head)
            nn.init.eye_(v.reshape(width, width))

    def svd() -> None:
        for layer in model:
            q, k, v = split(layer)
            for each in (q, k):
                each.copy_(svd_polar(torch.randn_like(each)))
            nn.init.eye_(v.reshape(width, width))

    def error(_: object) -> Errors:
        every = torch.cat([split(layer).flatten(0, 1) for layer in model]).double()
        return {SIGMA: float((torch.linalg.svdvals(every) - 1).abs().max())}

    return (
        Contestant("conditioned_, with its report", lambda: ck.conditioned_(model), error),
        Contestant("orthogonal_ loop", loop, error),
        Contestant("randn + linalg.svd, U Vᵀ", svd, error),
    )


CASES: tuple[Case, ...] = (
    Case(
        "orthogonalize_polar",
        "orthogonalize, polar: 32 heads of 2048x64, float32",
        lambda: orthogonalize("polar", 32, 2048, 64),
        {RESIDUAL: 5e-6, POLAR: 5e-6, QR: 5e-6},
        {"linalg.svd, U Vᵀ": 6, "orthogonal_ loop, no sampling": 3},
    ),
    Case(
        "orthogonalize_qr",
        "orthogonalize, QR: 32 heads of 2048x64, float32",
        lambda: orthogonalize("qr", 32, 2048, 64),
        {RESIDUAL: 5e-6, POLAR: 5e-6, QR: 5e-6},
        {"linalg.svd, U Vᵀ": 6, "orthogonal_ loop, no sampling": 3},
    ),
    Case(
        "semi_orthogonal",
        "semi-orthogonal random: 32 heads of 2048x64, float32",
        lambda: semi_orthogonal(32, 2048, 64),
        {RESIDUAL: 5e-6},
        {"orthogonal_ loop": 3, "orthogonal_ on the whole": 15},
    ),
    Case(
        "samples",
        "4.2 million normal samples, float32",
        lambda: samples(32 * 2048 * 64),
        {MOMENT: 4e-3},
        {"torch.randn": 3},
    ),
    Case(
        "condition_number",
        "condition number: 432 heads of 768x64, float32",
        lambda: condition(432, 768, 64, 1e-3),
        {KAPPA: 1e-3},
        {"linalg.cond": 8},
    ),
    Case(
        "conditioned_gpt2_small",
        "condition Q, K, V of GPT-2 small's attention: 12 layers of 12 heads of 768x64, float32",
        lambda: model_init(12, 768, 12),
        {SIGMA: 1e-5},
        seconds=1.5,
    ),
)
