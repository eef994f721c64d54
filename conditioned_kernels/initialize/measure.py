"""Reports of heads: their condition numbers and singular values, as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from .. import distributed
from ..condition import ConditionEstimate, condition_number, condition_of_gram
from .init_report import ProjectionReport, stacked_rank
from .target import Target


def sigma_tolerance(dtype: torch.dtype) -> float:
    """Largest |sigma / gain - 1| a conditioned head may have: 1e-5 in float32, 1e-11 in float64, eps in half types."""
    return {torch.float32: 1e-5, torch.float64: 1e-11}.get(dtype) or torch.finfo(dtype).eps


def measure(
    target: Target, heads: Tensor, *, made: str, gain: float, local: Sequence[int] | None = None
) -> ProjectionReport:
    """kappa and singular values of ``heads`` (*heads, head_dim, in_features) as stored, to half the tolerance.

    ``local`` says which of the projection's heads these are, where they may not be all.
    """
    flat = heads.reshape(-1, *heads.shape[-2:])
    rank = stacked_rank(flat)
    estimate = condition_number(flat, rtol=_rtol(heads.dtype))
    # A tensor from a file may have another dtype than the architecture it is of.
    entry = described(target, estimate, made=made, gain=gain, local=local, rank=rank)
    return entry if entry.dtype == heads.dtype else replace(entry, dtype=heads.dtype)


def measure_all(targets: list[Target], gains: list[float]) -> list[ProjectionReport]:
    """:func:`measure` of what the targets hold now.

    Of sharded targets every head is measured, the same on every rank. That is a collective: all ranks call it with the
    same targets in one order.
    """
    shards = [target for target in targets if distributed.is_sharded(target.weight)]
    distributed.check_agreement([(target.name, target.weight) for target in shards])
    grams = iter(distributed.grams([(target.piece, target.weight) for target in shards if target.piece is not None]))
    entries = []
    for target, gain in zip(targets, gains, strict=True):
        if target.piece is None:
            entries.append(measure(target, target.heads, made="", gain=gain))
        elif distributed.is_sharded(target.weight):
            terms = distributed.gram_terms(target.weight, target.shape[-1])
            estimate = condition_of_gram(next(grams), terms, rtol=_rtol(target.dtype))
            entries.append(described(target, estimate, made="", gain=gain))
        else:
            # A rank's plain part of a weight: the heads that are here as a whole.
            here = target.piece.held.all(-1).nonzero()[0].tolist()
            rows = [target.piece.read(target.weight.detach(), range(head, head + 1)) for head in here]
            heads = torch.stack(rows) if rows else target.weight.new_empty(0, *target.shape[-2:])
            entries.append(measure(target, heads, made="", gain=gain, local=here))
    return entries


def described(
    target: Target,
    estimate: ConditionEstimate,
    *,
    made: str,
    gain: float,
    local: Sequence[int] | None = None,
    rank: int | None = None,
) -> ProjectionReport:
    """A report's entry for an estimate of the target's heads, or of the heads ``local`` of it."""
    heads, (head_dim, in_features) = target.count, target.shape[-2:]
    return ProjectionReport(
        layer=target.layer.name,
        parameter=target.name,
        role=target.projection.role,
        part=target.projection.part,
        heads=heads,
        head_dim=head_dim,
        in_features=in_features,
        dtype=target.dtype,
        made=made,
        gain=gain,
        estimate=estimate,
        stacked_rank=rank,
        local=None if local is None or len(local) == heads else tuple(local),
    )


def joined_chunks(entries: list[ProjectionReport]) -> ProjectionReport:
    """One entry for several chunks of one projection's heads."""
    if len(entries) == 1:
        return entries[0]
    parts = [entry.estimate for entry in entries]
    estimate = ConditionEstimate(
        **{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(ConditionEstimate)}
    )
    local = tuple(head for entry in entries for head in entry.local or ())
    return replace(
        entries[0], estimate=estimate, local=None if len(local) == entries[0].heads else local, stacked_rank=None
    )


def _rtol(dtype: torch.dtype) -> float:
    return min(1e-3, sigma_tolerance(dtype) / 2)
