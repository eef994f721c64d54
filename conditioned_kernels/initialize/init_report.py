"""What an initialization did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..condition import ConditionEstimate

if TYPE_CHECKING:
    from .calibrate import CalibrationReport


@dataclass(frozen=True)
class ProjectionReport:
    """One projection of one layer, measured on the values in the model (or, for a dry run, those to be written).

    Attributes
    ----------
    layer : the attention module's name in the user's model.
    parameter : the weight's name in the user's model.
    role : "q", "k", "v" or "kv"; "o" for W_O, whose in_features are its outputs, where a scheme writes it.
    part : tells apart several projections of one role.
    heads, head_dim, in_features : how many, of (head_dim, in_features) each; K/V heads where they are grouped.
    dtype : of the stored weight.
    made : in words, what was written, e.g. "semi-orthogonal", "identity, block"; "" if only measured.
    gain : the singular value asked for; NaN where the scheme has none.
    estimate : sigma_max, sigma_min and kappa per measured head, with brackets; shape (heads,), or as ``local``.
    stacked_rank : exact rank of the stacked (heads*head_dim, in_features) weight where every row has at most one
        non-zero, as an identity has; None elsewhere, since it is not measured.
    local : the heads that were measured, where not all: those of which this rank holds a part of a sharded weight.
        They were measured whole, as every rank that holds a part has drawn them.
    """

    layer: str
    parameter: str
    role: str
    part: str
    heads: int
    head_dim: int
    in_features: int
    dtype: torch.dtype
    made: str
    gain: float
    estimate: ConditionEstimate
    stacked_rank: int | None
    local: tuple[int, ...] | None = None

    @property
    def measured(self) -> tuple[int, ...]:
        """The heads of ``estimate``, in its order."""
        return tuple(range(self.heads)) if self.local is None else self.local

    @property
    def label(self) -> str:
        """The role with its part: "q", "k.rope"."""
        return f"{self.role}.{self.part}" if self.part else self.role


@dataclass(frozen=True)
class InitReport:
    """What an initialization did to a model.

    Attributes
    ----------
    scheme : its name.
    seed : of the sample stream.
    touched : one entry per projection written, in model order.
    skipped : (name, reason) of layers or projections of known classes that were left alone.
    unknown : (name, reason) of modules that look like attention but have no layout.
    others : names of the parameters beside the attention weights that a scheme wrote.
    calibration : the gains and kappa(J) per layer of gain="calibrated"; None elsewhere.
    deferred : (name, reason) of projections on the meta device, which ``materialize_`` will initialize; nothing else
        was done then.
    """

    scheme: str
    seed: int
    touched: tuple[ProjectionReport, ...]
    skipped: tuple[tuple[str, str], ...]
    unknown: tuple[tuple[str, str], ...]
    others: tuple[str, ...] = ()
    calibration: CalibrationReport | None = None
    deferred: tuple[tuple[str, str], ...] = ()

    def rows(self) -> list[dict[str, object]]:
        """One dict per head: layer, parameter, role, head, sigma_max, sigma_min, kappa, low, high. Reads the device."""
        return head_rows(self.touched)

    def __str__(self) -> str:
        heads = sum(entry.heads for entry in self.touched)
        measured = sum(len(entry.measured) for entry in self.touched)
        lines = [
            f"{self.scheme}, seed {self.seed}: {heads} head matrices in {len(self.touched)} projections of "
            f"{len({entry.layer for entry in self.touched})} attention layers"
        ]
        if measured < heads:
            lines.append(f"  measured on this rank: the {measured} of which it holds a part")
        for label in dict.fromkeys(entry.label for entry in self.touched if entry.measured):
            entries = [entry for entry in self.touched if entry.label == label]
            kappa = torch.cat([entry.estimate.kappa.cpu() for entry in entries])
            sigma = torch.cat([entry.estimate.sigma_max.cpu() for entry in entries])
            lines.append(
                f"  {label}: {entries[0].made or 'measured'}, kappa {kappa.min():.6g} to {kappa.max():.6g}, "
                f"sigma_max {sigma.min():.6g} to {sigma.max():.6g}"
            )
        if self.others:
            lines.append(f"  and other parameters: {len(self.others)}")
        if self.deferred:
            lines.append(
                f"  deferred: {len(self.deferred)} projections on the meta device, until materialize_ is called"
            )
        lines += [f"  skipped {name}: {reason}" for name, reason in self.skipped]
        lines += [f"  unknown {name}: {reason}" for name, reason in self.unknown]
        return "\n".join(lines)


def head_rows(entries: tuple[ProjectionReport, ...]) -> list[dict[str, object]]:
    """Entries as one plain dict per head, for tables, CSV and JSON."""
    rows: list[dict[str, object]] = []
    for entry in entries:
        measured = {
            name: getattr(entry.estimate, name).reshape(-1).tolist()
            for name in ("sigma_max", "sigma_min", "kappa", "low", "high")
        }
        for index, head in enumerate(entry.measured):
            rows.append(
                {"layer": entry.layer, "parameter": entry.parameter, "role": entry.label, "head": head}
                | {name: values[index] for name, values in measured.items()}
            )
    return rows


def stacked_rank(heads: Tensor) -> int | None:
    """Exact rank of the stacked weight if every row has at most one non-zero element, else None."""
    flat = heads.reshape(-1, heads.shape[-1])
    # The first row settles it for every dense matrix, without a pass over all of it.
    if flat.numel() == 0 or int(flat[0].count_nonzero()) > 1:
        return None
    rows, columns = flat.nonzero().unbind(-1)
    return None if bool((rows.diff() == 0).any()) else columns.unique().numel()
