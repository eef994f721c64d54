"""Extreme singular values of every head's weights, per step, without a word between device and host.

A projection's heads are read where they lie, as strided views. Heads of one shape, dtype and device make a group: one
Gram matrix each, then one batched call for both ends of all spectra, started from the vectors of the step before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import _ops, _torch, _validate, distributed
from .._backend import choose_backend
from .._status import Status
from ..heads.layout import LayoutError
from ..heads.wrappers import quiet_parametrizations
from ..initialize.target import Target
from .records import Record

MAX_SHORT = 1024
"""Heads with a larger smaller side are left out: an eigenvalue solve of that size is no work for every step."""

COLUMNS = 7
"""Of one head's raw figures: lambda_max, its low and high, lambda_min, its low and high, and the trace of W W^T."""


class Unreadable(ValueError):
    """A weight cannot be measured; the message is the reason."""


def head_matrices(target: Target) -> Tensor:
    """The projection's heads as they are now, (heads, short, long), a view of the weight wherever one exists.

    Raises
    ------
    Unreadable
        where the weight holds no values of its own: sharded, meta, quantized, or of another shape than its layout says.
    """
    state: AbstractContextManager = quiet_parametrizations(target.owner) if target.parametrized else nullcontext()
    try:
        with state:
            weight = target.weight
        if distributed.is_sharded(weight):
            raise Unreadable("it is sharded, and was not")
        _validate.floating(weight, target.name)
        _validate.not_meta(weight, target.name)
        heads = target.projection.view(weight.detach())
    except (LayoutError, TypeError, ValueError, AttributeError) as error:
        raise error if isinstance(error, Unreadable) else Unreadable(str(error)) from error
    heads = heads.reshape(-1, *heads.shape[-2:])
    return heads if heads.shape[-2] <= heads.shape[-1] else heads.mT


@dataclass
class Watched:
    """One projection under watch.

    Attributes
    ----------
    target : where its weight is.
    heads : indices of the heads measured.
    select : the same as a tensor on the weight's device; None for all.
    kind : (heads stored, short, long), dtype and device of what :func:`head_matrices` gives.
    wide : whether its Gram matrices are formed in float64.
    piece : this rank's part of a sharded weight, whose Gram matrices are summed over the ranks; None for others.
    """

    target: Target
    heads: tuple[int, ...]
    select: Tensor | None
    kind: tuple[torch.Size, torch.dtype, torch.device]
    wide: bool
    piece: distributed.Piece | None = None

    @property
    def work(self) -> torch.dtype:
        return torch.float64 if self.wide else _torch.work_dtype(self.kind[1])

    def read(self) -> Tensor:
        """(heads measured, short, long), in the dtype of the weight.

        Raises
        ------
        Unreadable
            where the weight has another shape, dtype or device than before.
        """
        matrices = head_matrices(self.target)
        if (matrices.shape, matrices.dtype, matrices.device) != self.kind:
            raise Unreadable(f"it was {self.kind}, and is {(matrices.shape, matrices.dtype, matrices.device)}")
        return matrices if self.select is None else matrices.index_select(0, self.select)

    def shard(self) -> tuple[distributed.Piece, Any]:
        """The rank's piece and the DTensor. Raises :class:`Unreadable` where the weight is none any more."""
        weight = self.target.weight
        if self.piece is None or not distributed.is_sharded(weight) or weight.dtype != self.kind[1]:
            raise Unreadable("it was sharded, and is not")
        return self.piece, weight


def watch(target: Target, heads: Sequence[int] | None) -> Watched:
    """The heads of one projection, checked by reading them once. Raises :class:`Unreadable`."""
    # Reading a parametrized weight recomputes it, which head_matrices does with care.
    if not target.parametrized and distributed.is_sharded(target.weight):
        piece, dtype = _piece(target), target.weight.dtype
        shape = torch.Size((piece.count, *piece.shape[-2:]))
        device = torch.device(target.weight.device_mesh.device_type)  # type: ignore[attr-defined]
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
    else:
        matrices, piece = head_matrices(target), None
        shape, dtype, device = matrices.shape, matrices.dtype, matrices.device
    number, short, long = shape
    if number * short * long == 0:
        raise Unreadable("it has no elements")
    if short > MAX_SHORT:
        raise Unreadable(f"its smaller side is {short}, and above {MAX_SHORT} a head is no work for every step")
    kept = tuple(range(number)) if heads is None else tuple(head for head in heads if head < number)
    if not kept:
        raise Unreadable(f"it has {number} heads, none of them in heads={tuple(heads or ())}")
    select = torch.tensor(kept, device=device) if len(kept) < number else None
    wide = dtype == torch.float64 or piece is not None
    return Watched(target, kept, select, (shape, dtype, device), wide, piece)


def _piece(target: Target) -> distributed.Piece:
    try:
        _validate.floating(target.weight, target.name)
        if distributed.is_meta(target.weight):
            raise Unreadable("it is on the meta device and has no values")
        piece = target.piece
    except (LayoutError, TypeError, ValueError) as error:
        raise error if isinstance(error, Unreadable) else Unreadable(str(error)) from error
    if piece is None or piece.shape[-2] > piece.shape[-1]:
        raise Unreadable("it is sharded and its heads have more rows than columns")
    return piece


class Place(NamedTuple):
    """One row of a group: a projection and a head in it."""

    watched: Watched
    head: int


@dataclass
class Group:
    """Heads that one batched call serves: one shape, work dtype and device."""

    members: list[Watched]
    rtol: float
    backend: str = "auto"
    vectors: Tensor | None = field(default=None, repr=False)
    terms: int = 0
    unit: float = 0.0

    @property
    def places(self) -> list[Place]:
        return [Place(watched, head) for watched in self.members for head in watched.heads]

    @property
    def device(self) -> torch.device:
        return self.members[0].kind[2]

    @property
    def sharded(self) -> bool:
        return self.members[0].piece is not None

    @property
    def rows(self) -> int:
        return sum(len(watched.heads) for watched in self.members)

    def measure(self) -> Tensor:
        """(COLUMNS, heads) in float64, on the device: eigenvalue brackets of the exact Gram matrices, and the trace.

        NaN where the matrix is not finite, or its squares leave the range of the Gram matrix's dtype.
        """
        (_, short, _), _, device = self.members[0].kind
        work = self.members[0].work
        backend = choose_backend(self.backend, device, work, short)
        with _torch.full_precision():
            grams = self._shared_grams() if self.sharded else self._grams(backend.name, backend.device, work)
            gram = torch.cat(grams) if len(grams) > 1 else grams[0]
            small = _ops.small_matrix(backend.name, gram)
            rounding = _torch.gram_rounding(gram, self.terms).double()
            values, self.vectors = small.follow(gram, rounding, self.rtol, self.vectors)
            trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).double()
            self.unit = torch.finfo(gram.dtype).eps / 2
            usable = rounding.isfinite() & (rounding > _torch.smallest_rounding(work))
            return torch.cat((torch.where(usable, values, torch.nan), trace[None])).to(device)

    def _grams(self, backend: str, device: torch.device, work: torch.dtype) -> list[Tensor]:
        grams = []
        for watched in self.members:
            matrices = watched.read().to(device)
            small = _ops.small_matrix(backend, matrices)
            gram, self.terms = small.gram_terms(matrices, work)
            grams.append(gram)
        return grams

    def _shared_grams(self) -> list[Tensor]:
        """A collective: every rank of the weights' meshes forms the same groups in the same order."""
        shards = [watched.shard() for watched in self.members]
        self.terms = distributed.gram_terms(shards[0][1], self.members[0].kind[0][2])
        grams = distributed.grams(shards)
        return [
            gram if watched.select is None else gram.index_select(0, watched.select)
            for watched, gram in zip(self.members, grams, strict=True)
        ]

    def figures(self, raw: np.ndarray, step: int) -> list[Record]:
        """Records of what :meth:`measure` gave, on the host."""
        (_, short, _) = self.members[0].kind[0]
        top, _, _, bottom, bottom_low, _, trace = raw
        with np.errstate(all="ignore"):
            sigma = np.sqrt(np.maximum(raw[:6], 0))  # NaN stays
            sigma_max, sigma_max_low, sigma_max_high, sigma_min, sigma_min_low, sigma_min_high = sigma
            # An eigenvalue below the rounding of the Gram matrix's own eigenvalues is noise.
            resolved = bottom > short * torch.finfo(self.members[0].work).eps * top
            kappa = np.where(resolved | np.isnan(top), np.maximum(sigma_max / sigma_min, 1), np.inf)
            low = np.maximum(sigma_max_low / sigma_min_high, 1)
            high = np.where(bottom_low <= 0, np.inf, sigma_max_high / sigma_min_low)
            status = np.where(high <= (1 + self.rtol) * low, int(Status.CONVERGED), int(Status.TOLERANCE_NOT_MET))
            status[np.isnan(top)] = int(Status.NON_FINITE)
            zero = trace == 0
            status[zero], kappa[zero], low[zero], high[zero] = int(Status.ZERO_MATRIX), np.inf, np.inf, np.inf
            sigma_max[zero], sigma_min[zero] = 0, 0
            stable_rank = np.where(zero, np.nan, trace / top)
        columns = [column.tolist() for column in (kappa, low, high, sigma_max, sigma_min, stable_rank)]
        columns.append([_NAMES[code] for code in status.tolist()])
        return [
            Record(step, place.watched.target.layer.name, place.watched.target.projection.label, place.head, 0, *row)
            for place, row in zip(self.places, zip(*columns, strict=True), strict=True)
        ]

    def wants_wide(self, raw: np.ndarray) -> list[bool]:
        """Per member: whether a float32 Gram matrix cannot bracket the kappa of one of its heads to ``rtol``.

        The bracket of kappa is 1 + delta (1 / lambda_min + 1 / lambda_max) wide, with delta the rounding bound of the
        float32 Gram matrix. Half of ``rtol`` is left for the proofs.
        """
        top, top_low, top_high, bottom, bottom_low, bottom_high, trace = raw
        single = torch.finfo(torch.float32)
        with np.errstate(all="ignore"):
            delta = 1.01 * self.terms * self.unit * trace
            fits = (bottom > 0) & (delta * (1 / bottom + 1 / top) <= self.rtol / 2)
            fits &= top_high * bottom_high <= (1 + self.rtol) ** 2 * top_low * bottom_low
            # The squares of the Gram matrix's elements have to stay in range, too.
            fits &= (delta > _torch.smallest_rounding(torch.float32)) & (trace < single.max**0.5)
        edges = np.cumsum([0, *(len(watched.heads) for watched in self.members)])
        return [not fits[start:stop].all() for start, stop in pairwise(edges.tolist())]


_NAMES = {int(status): status.name.lower() for status in Status}


def groups(watched: Iterable[Watched], rtol: float, backend: str = "auto") -> list[Group]:
    """Projections grouped by shape, dtype, work dtype and device, within the workspace cap."""
    found: dict[tuple, list[Watched]] = {}
    for each in watched:
        (_, short, long), dtype, device = each.kind
        found.setdefault((short, long, dtype, each.work, device, each.piece is not None), []).append(each)
    result = []
    for (short, _, _, work, _, _), members in found.items():
        most = max(1, _torch.CHUNK_BYTES // (short * short * work.itemsize))
        part: list[Watched] = []
        for each in members:
            if part and sum(len(other.heads) for other in part) + len(each.heads) > most:
                result.append(Group(part, rtol, backend))
                part = []
            part.append(each)
        result.append(Group(part, rtol, backend))
    return result


def spectrum_records(watched: Watched, number: int, step: int) -> list[Record]:
    """Every singular value of the first ``number`` heads measured, by the SVD in float64. Reads the device.

    Of sharded weights, the roots of the Gram matrices' eigenvalues.
    """
    if watched.piece is not None:
        [gram] = distributed.grams([watched.shard()])
        matrices = (gram if watched.select is None else gram.index_select(0, watched.select))[:number].cpu()
    else:
        matrices = watched.read()[:number].to("cpu", torch.float64)
    finite = matrices.isfinite().all(-1).all(-1)
    matrices = torch.where(finite[:, None, None], matrices, 0)
    if watched.piece is not None:
        values = torch.linalg.eigvalsh(matrices).flip(-1).clamp_min(0).sqrt()
    else:
        values = torch.linalg.svdvals(matrices)
    values[~finite] = math.nan
    layer, label = watched.target.layer.name, watched.target.projection.label
    records = []
    for head, sigma in zip(watched.heads, values.tolist(), strict=False):
        kappa = sigma[0] / sigma[-1] if sigma[-1] else math.inf
        status = (
            Status.NON_FINITE if math.isnan(sigma[0]) else Status.ZERO_MATRIX if sigma[0] == 0 else Status.CONVERGED
        )
        stable_rank = sum(each * each for each in sigma) / sigma[0] ** 2 if sigma[0] else math.nan
        records.append(
            Record(
                step,
                layer,
                label,
                head,
                kappa=kappa,
                low=kappa,
                high=kappa,
                sigma_max=sigma[0],
                sigma_min=sigma[-1],
                stable_rank=stable_rank,
                status=_NAMES[int(status)],
                spectrum=tuple(sigma),
            )
        )
    return records
