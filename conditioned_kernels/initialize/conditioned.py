"""Conditioned initialization: Algorithm 1 of Conditioned Initialization for Attention (ICLR 2026)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _validate, distributed
from ..heads.discover import Where
from ..heads.layout import LATENT, ROLES, LayoutFunction
from ..orthogonalize import grouped, identity_together_, semi_orthogonal, semi_orthogonal_together_
from ..sampling import resolve_seed
from .apply import Draw, Scheme, named_errors
from .calibrate import calibrate_gain, conditioned_then_calibrated
from .init_report import InitReport
from .scope import Scope
from .target import Target

Gain = float | Literal["unit", "preserve", "calibrated"]
MADE = {"semi_orthogonal": "semi-orthogonal"}
VALUES = ("block", "repeat", "semi_orthogonal", "keep")


def conditioned_(
    model: nn.Module,
    *,
    seed: int = 0,
    gain: Gain | Mapping[str, Gain] = "unit",
    value: str = "block",
    where: Where | None = None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None = None,
    strict: bool = True,
    include_frozen: bool = False,
    overwrite: bool = False,
    generator: torch.Generator | None = None,
    calibration: Any = None,
) -> InitReport:
    """Give every attention head of ``model``, in place, W_Q and W_K semi-orthogonal and W_V a rectangular identity.

    For every head, W_Q and W_K become gain * U V^T with U S V^T the SVD of an independent Gaussian, and W_V
    becomes gain * I, so that kappa(W_Q) = kappa(W_K) = kappa(W_V) = 1. Grouped K/V heads are treated per K/V
    head. Everything else (W_O, MLP, norms, biases, gates, position tables) stays bit-identical, and so does
    the whole model if the call fails.

    Parameters
    ----------
    model : any module whose attention classes are in the family table, registered, or in ``layouts``. Parameters
        in float16, bfloat16, float32 or float64, on any device but meta.
    seed : of the sample stream. Weights depend on (seed, parameter name, role, head) alone: not on the device,
        to float32 rounding, nor on the order or number of layers. torch's global random state is not touched.
    gain : the singular value. "unit" is 1, as in the paper; "preserve" keeps each projection's Frobenius norm, so
        that only the spectrum changes; or a number. A mapping gives it per role: ``{"q": "unit", "v": 0.3}``, the
        others "unit". "calibrated" makes the weights with gain 1 and then runs :func:`calibrate_gain` on
        ``calibration``; alone it means W_Q and W_K calibrated and W_V "unit".
    value : W_V. "block": row i of the stacked weight is the unit vector e_(i mod in_features), so each head reads
        its own coordinates; "repeat": every head gets the same identity, as Algorithm 1 reads literally (stacked
        rank head_dim only); "semi_orthogonal": as W_Q; "keep": W_V stays as it is. A head with more rows than
        columns has its identity in the first ``in_features`` rows and zeros below; there, and for Q and K, where such
        a head has orthonormal columns, kappa is sigma_max over the ``in_features``-th singular value.
    where : keeps only layers for which ``where(name, module)`` is true.
    layouts : layout functions by class, for this call only.
    strict : refuse models with attention of an unknown class, or with none. False leaves those alone, and warns
        if nothing is left to do.
    include_frozen : also write weights with ``requires_grad=False``.
    overwrite : also write weights that transformers loaded from a checkpoint.
    generator : if given, replaces ``seed`` by one 63-bit draw from it.
    calibration : for gain="calibrated", a batch as the model's forward takes it: a tensor, a tuple or a dict.

    Returns
    -------
    InitReport: what was touched, skipped and unknown, and sigma_max, sigma_min and kappa per head, measured after
    the cast to the parameter's dtype.

    Raises
    ------
    NoAttentionFound
        see ``strict``.
    LayoutError
        when a class does not have the weights its layout says.
    TypeError, ValueError
        for quantized, meta, sharded, frozen, loaded or tied weights and for arguments outside the above; the
        message names the parameter and the remedy.
    RuntimeError
        for a weight made under ``torch.inference_mode()``.

    Notes
    -----
    *Rules where the paper is silent* are in the family table, one per class (``conditioned-kernels layouts``). In
    short: grouped heads per K/V head; cross-attention as self-attention; of a gated query projection the query rows
    only; channel attention (XCiT, DaViT) per head of channels; QK norms, biases, temperatures and position tables
    untouched; weights that share memory written once, and refused where they would need two values. Low-rank attention
    (MLA), where W_Q = B A and A is shared by all heads: A semi-orthogonal as one matrix with gain 1 (a norm follows
    it), B per head as above, rotary and non-rotary rows apart, and W_V = B A with B the block identity. With A of rank
    at most ``in_features`` and at least a head's rows, A has orthonormal rows and so has each B, so every head's
    effective map, the norm taken as identity, has kappa 1 and the gain asked for; with a smaller rank, rank-many
    singular values equal to it and the others 0; with a larger one no such promise.

    *Accuracy.* kappa - 1 < 1e-6 in float32, and below eps in half types, whose rounding alone gives that (2e-4 in
    float16, 2e-3 in bfloat16 for heads of 768 x 64); W_V is exact. *Cost.* about 10 in_features head_dim^2 flops and
    one write per head, and a second copy of the Q, K and V weights while it runs.
    """
    scope = Scope(where, layouts, strict, include_frozen, overwrite)
    gains = _gains(gain)
    _validate.choice(value, "value", VALUES)
    seed = resolve_seed(seed, generator)
    if moving := "".join(role for role in "qkv" if gains[role] == "calibrated"):
        if calibration is None:
            raise ValueError("gain='calibrated' needs a batch of the model's inputs: pass calibration=")
        fixed = {role: "unit" if role in moving else size for role, size in gains.items() if role != "kv"}
        return conditioned_then_calibrated(
            model,
            scope,
            lambda: conditioned_(model, seed=seed, gain=fixed, value=value, **vars(scope)),
            lambda: calibrate_gain(model, calibration, roles=moving, **vars(scope)),
        )

    sizes: dict[tuple[str, str], float] = {}
    made: dict[tuple[str, str], Tensor] = {}

    def kind_of(target: Target) -> str:
        return value if target.projection.role == "v" else "semi_orthogonal"

    def prepare(targets: list[Target]) -> None:
        chosen = [target for target in targets if kind_of(target) != "keep"]
        sizes.update(_sizes(chosen, gains))
        for kind in dict.fromkeys(map(kind_of, chosen)):
            alike = [t for t in chosen if kind_of(t) == kind and t.piece is None and grouped(t.heads)]
            if alike:
                made.update(_make_together(alike, kind, [sizes[target.key] for target in alike], seed))

    def draw(target: Target) -> Draw:
        kind = kind_of(target)
        if kind == "keep":
            return Draw(None, "value='keep'")
        size = sizes[target.key]
        if target.key in made:
            return Draw(made.pop(target.key), MADE.get(kind, f"identity, {kind}"), size)
        with named_errors(target):
            if kind == "semi_orthogonal":
                return Draw(semi_orthogonal_heads(target, seed, target.stream_role, size), MADE[kind], size)
            new = torch.empty(target.drawn_shape, dtype=target.dtype, device=target.device)
            new = identity_heads(new, size, block=kind == "block", first=target.chunk.start)
            return Draw(new, f"identity, {kind}", size)

    return Scheme("conditioned", seed, draw, prepare).apply(model, scope)


def _make_together(targets: list[Target], kind: str, sizes: list[float], seed: int) -> dict[tuple[str, str], Tensor]:
    """New heads of all targets by their keys, in one launch per kind of head: 48 layers cost what one does."""
    made: dict[tuple[str, str], Tensor] = {}
    for device in dict.fromkeys(target.heads.device for target in targets):
        here = [(target, size) for target, size in zip(targets, sizes, strict=True) if target.heads.device == device]
        new = [torch.empty(target.heads.shape, dtype=target.heads.dtype, device=device) for target, _ in here]
        if kind == "semi_orthogonal":
            names = [(target.name, target.stream_role) for target, _ in here]
            semi_orthogonal_together_(new, seed=seed, names=names, gains=[size for _, size in here])
        else:
            identity_together_(new, [size for _, size in here], block=kind == "block")
        made.update((target.key, tensor) for (target, _), tensor in zip(here, new, strict=True))
    return made


def semi_orthogonal_heads(target: Target, seed: int, role: str, gain: float = 1.0) -> Tensor:
    """What the target's stream has for the heads of its chunk, in the stream's role ``role``."""
    return semi_orthogonal(
        target.drawn_shape,
        seed=seed,
        key=target.name,
        role=role,
        first=target.chunk.start,
        gain=gain,
        dtype=target.work,
        device=target.device,
    )


def identity_heads(like: Tensor, gain: float = 1.0, *, block: bool = True, first: int = 0) -> Tensor:
    """Rectangular identities times ``gain``, shaped (*heads, head_dim, in_features) as ``like``; exact in every dtype.

    With ``block``, row r of head h is e_((h * head_dim + r) mod in_features), so heads * head_dim > in_features
    wraps around and leaves no head dead; without, every head is I. Rows r >= in_features are zero. ``first`` is the
    number h of the first head here.
    """
    rows, cols = like.shape[-2:]
    out = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    heads = out.view(-1, rows, cols)
    row = torch.arange(min(rows, cols), device=like.device)
    head = torch.arange(heads.shape[0], device=like.device)[:, None]
    heads[head, row, ((first + head) * rows * block + row) % cols] = gain
    return out


def _gains(gain: Gain | Mapping[str, Gain]) -> dict[str, Gain]:
    if gain == "calibrated":
        gain = {"q": gain, "k": gain}
    given = dict(gain) if isinstance(gain, Mapping) else dict.fromkeys(("q", "k", "v"), gain)
    if unknown := set(given) - {"q", "k", "v"}:
        raise ValueError(f"gain may name the roles 'q', 'k' and 'v', got {sorted(map(str, unknown))}")
    for role, size in given.items():
        if isinstance(size, str):
            _validate.choice(size, f"gain[{role!r}]", ("unit", "preserve", "calibrated"))
        else:
            _validate.positive(size, f"gain[{role!r}]")
    return {role: given.get(role, "unit") for role in ROLES}


def _sizes(targets: list[Target], gains: dict[str, Gain]) -> dict[tuple[str, str], float]:
    """The singular value of each target, by its key."""
    sizes: dict[tuple[str, str], float] = {}
    preserved = []
    for target in targets:
        gain = 1.0 if target.projection.part == LATENT else gains[target.projection.role]
        if gain == "preserve":
            preserved.append(target)
        else:
            sizes[target.key] = 1.0 if gain == "unit" else float(gain)
    for target, norm in zip(preserved, _norms(preserved), strict=True):
        if not math.isfinite(norm) or norm == 0:
            raise ValueError(
                f"{target.name} ({target.projection.role}): gain='preserve' needs weights with a norm, got "
                f"{_broken(target) if norm else 'all zeros'}; initialize the model first, or give a number"
            )
        sizes[target.key] = norm / math.sqrt(target.count * min(target.shape[-2:]))
    return sizes


def _norms(targets: list[Target]) -> list[float]:
    """Frobenius norms; of the sharded targets with one reduction for all of them, on every rank."""
    sharded = [(target.piece, target.weight) for target in targets if target.piece is not None]
    for target in targets:
        if target.piece is not None and not distributed.is_sharded(target.weight):
            raise ValueError(
                f"{target.name} ({target.projection.role}): gain='preserve' needs the norm of the whole projection, "
                "and this is one rank's plain part of it; give a number"
            )
    squares = iter(distributed.squared_norms(sharded))
    return [
        float(torch.linalg.vector_norm(target.heads, dtype=torch.float64))
        if target.piece is None
        else math.sqrt(next(squares))
        for target in targets
    ]


def _broken(target: Target) -> str:
    if target.piece is not None:
        return "non-finite input"
    heads = target.heads.reshape(-1, *target.shape[-2:])
    return f"non-finite input in heads {[i for i, head in enumerate(heads) if not head.isfinite().all()]}"
