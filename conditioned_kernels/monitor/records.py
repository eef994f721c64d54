"""What the monitor reports: one row per head and step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

JACOBIAN = "jacobian"
"""``projection`` of the rows about a head's attention Jacobian."""

LOG10_CAP = 16.0
"""log10 kappa of a singular or non-finite head in plots and scalars, where it is counted as well (field report F19)."""


@dataclass(frozen=True, slots=True)
class Record:
    """One head at one step.

    Attributes
    ----------
    step : number of optimizer steps taken before the values were measured; 0 is the start.
    layer : the attention module's name in the user's model.
    projection : "q", "k", "v" (with a part, as in "k.rope", where a class has several), or "jacobian".
    head : index within the projection; -1 for a row about the whole layer, whose ``status`` is a sentence.
    sample : of a Jacobian row, index in the batch.
    kappa : condition number of the head's matrix, or of its attention Jacobian; inf where it is beyond what its
        precision resolves, NaN for a non-finite matrix.
    low, high : bracket of kappa.
    sigma_max, sigma_min : extreme singular values, of a weight in its units.
    stable_rank : ||W||_F^2 / sigma_max^2; NaN in Jacobian rows.
    status : "converged" or another :class:`~conditioned_kernels.Status` in lower case; or why there is no figure.
    effective : of a Jacobian row, kappa over the singular values that are not numerically zero; NaN elsewhere.
    bound : of a Jacobian row, B(J) of Theorem 3.1; NaN elsewhere.
    theorem : whether the theorem is about this attention; elsewhere ``bound`` is the same formula and bounds nothing.
    kappa_x, kappa_p, kappa_lambda, kappa_q, kappa_k, kappa_v : the bound's factors.
    spectrum : every singular value of the matrix, descending, in the extra rows that sampled heads get at the start and
        the end of a run; () elsewhere.
    """

    step: int
    layer: str
    projection: str
    head: int
    sample: int = 0
    kappa: float = math.nan
    low: float = math.nan
    high: float = math.nan
    sigma_max: float = math.nan
    sigma_min: float = math.nan
    stable_rank: float = math.nan
    status: str = "converged"
    effective: float = math.nan
    bound: float = math.nan
    theorem: bool = False
    kappa_x: float = math.nan
    kappa_p: float = math.nan
    kappa_lambda: float = math.nan
    kappa_q: float = math.nan
    kappa_k: float = math.nan
    kappa_v: float = math.nan
    spectrum: tuple[float, ...] = ()

    @property
    def is_jacobian(self) -> bool:
        """Whether the row is about the attention Jacobian."""
        return self.projection == JACOBIAN

    @property
    def log10_kappa(self) -> float:
        """log10 kappa, at most :data:`LOG10_CAP`, which also stands for what is not finite."""
        return capped_log10(self.kappa)

    @property
    def place(self) -> str:
        """Layer, projection and head in words."""
        where = f"{self.layer} {self.projection}" if self.layer else self.projection
        return where if self.head < 0 else f"{where} head {self.head}"

    def as_dict(self) -> dict[str, Any]:
        """Field names to values."""
        return asdict(self)


FIELDS = tuple(field.name for field in fields(Record))


def capped_log10(kappa: float) -> float:
    """log10 of ``kappa``, :data:`LOG10_CAP` for inf and NaN."""
    return min(math.log10(kappa), LOG10_CAP) if math.isfinite(kappa) and kappa > 0 else LOG10_CAP


class Sink(Protocol):
    """Takes new records at every flush."""

    def write(self, records: Sequence[Record]) -> None: ...

    def close(self) -> None: ...


def summarize(records: Iterable[Record]) -> list[tuple[int, dict[str, float]]]:
    """Records as scalars per step, each step once and in order, for loggers.

    Per layer and projection: ``log10_kappa_max``, ``log10_kappa_median`` and ``sigma_min`` over the heads; for Jacobian
    rows ``log10_bound_max`` too. Over all: ``nonfinite_heads``, how many head matrices have a kappa that is not finite,
    and ``nonfinite_jacobians``, apart since a step's Jacobians may come a flush after its weights. Every value is
    finite, so that a logger neither fails on it nor hides it (field report F19): a sigma_min over heads that are all
    non-finite is left out.
    """
    steps: dict[int, dict[tuple[str, str], list[Record]]] = {}
    for record in records:
        if record.head >= 0 and not record.spectrum:
            steps.setdefault(record.step, {}).setdefault((record.projection, record.layer), []).append(record)
    rows = []
    for step in sorted(steps):
        scalars: dict[str, float] = {}
        nonfinite: dict[str, float] = {}
        for (projection, layer), group in steps[step].items():
            tag = f"{projection}/{layer}" if layer else projection
            logs = sorted(record.log10_kappa for record in group)
            count = "nonfinite_jacobians" if projection == JACOBIAN else "nonfinite_heads"
            nonfinite[count] = nonfinite.get(count, 0.0) + sum(not math.isfinite(record.kappa) for record in group)
            scalars[f"log10_kappa_max/{tag}"] = logs[-1]
            scalars[f"log10_kappa_median/{tag}"] = logs[(len(logs) - 1) // 2]
            if projection == JACOBIAN:
                scalars[f"log10_bound_max/{tag}"] = max(capped_log10(record.bound) for record in group)
            elif finite := [record.sigma_min for record in group if math.isfinite(record.sigma_min)]:
                scalars[f"sigma_min/{tag}"] = min(finite)
        rows.append((step, scalars | nonfinite))
    return rows
