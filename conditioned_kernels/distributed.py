"""Sharded weights: which part of the heads a rank holds, and what must be said between ranks to read them.

A weight is written without communication. Whatever a placement does, a rank holds whole lines of the weight along
every dimension, so its part of the stacked heads, rows (head, row) by columns, is a set of rows times a set of
columns: a :class:`Piece`. The rank draws every head that the rows touch, and keeps the piece.

Reading a head takes its Gram matrix, a sum over columns: every rank adds its own columns, after the heads whose rows
lie on several ranks have been completed. All ranks get the same sums.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import _torch

CHUNK_BYTES = 64 << 20
"""Heads drawn or multiplied at a time, in bytes of float32."""

BUCKET_BYTES = 32 << 20
"""Gram matrices summed over the ranks in one collective."""


def is_sharded(weight: object) -> bool:
    """Whether ``weight`` is a DTensor."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(weight, tensor.DTensor)


def local_part(weight: Tensor) -> Tensor:
    """What this rank holds of ``weight``: a DTensor's local tensor, any other tensor itself; shares memory."""
    return getattr(weight, "_local_tensor", weight).detach()


def is_meta(weight: Tensor) -> bool:
    """Whether ``weight`` has no values yet."""
    return local_part(weight).is_meta


def reshard(model: nn.Module) -> None:
    """Put FSDP2 modules whose forward left them gathered back to their shards, which hold the truth; no communication.

    A gathered copy is thrown away later, and may be rounded to the forward's dtype.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]
            module.reshard()


@contextmanager
def whole_shapes(module: nn.Module) -> Iterator[None]:
    """Replace DTensors by meta tensors of the whole weight's shape, so that a layout can take views of them."""
    replaced = [
        (owner._parameters, name, weight)
        for owner in module.modules()
        for name, weight in owner._parameters.items()
        if is_sharded(weight)
    ]
    try:
        for parameters, name, weight in replaced:
            whole = torch.empty(weight.shape, dtype=weight.dtype, device="meta")  # type: ignore[union-attr]
            parameters[name] = nn.Parameter(whole, requires_grad=False)
        yield
    finally:
        for parameters, name, weight in replaced:
            parameters[name] = weight


@dataclass(frozen=True)
class Piece:
    """A rank's part of the heads of one projection.

    Attributes
    ----------
    shape : (*heads, head_dim, in_features) of the whole projection.
    rows : (heads * head_dim,): where each row of the stacked heads begins in the rank's flat memory; -1 if it is
        not held.
    cols : (in_features,): how far each column is from there; -1 if it is not held.
    owners : (heads * head_dim,): a number per part of the rows that ranks hold as one.
    column_dims : dimensions of the weight along which the columns run.
    """

    shape: tuple[int, ...]
    rows: np.ndarray
    cols: np.ndarray
    owners: np.ndarray
    column_dims: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Heads of the whole projection."""
        return math.prod(self.shape[:-2])

    @property
    def held(self) -> np.ndarray:
        """(heads, head_dim) bool: the rows that are here; none where no column is."""
        return (self.rows.reshape(self.count, -1) >= 0) & bool((self.cols >= 0).any())

    @property
    def columns(self) -> int:
        """How many columns are here."""
        return int((self.cols >= 0).sum())

    @property
    def split(self) -> list[int]:
        """Heads whose rows lie in several parts; the same on every rank."""
        owners = self.owners.reshape(self.count, -1)
        return np.flatnonzero((owners != owners[:, :1]).any(-1)).tolist()

    def chunks(self) -> Iterator[range]:
        """Runs of neighboring heads of which a part is here, as large as the workspace; range(0) if there is none."""
        touched = np.flatnonzero(self.held.any(-1)).tolist()
        most = max(1, CHUNK_BYTES // (4 * math.prod(self.shape[-2:])))
        start = 0
        for at in range(1, len(touched) + 1):
            if at == len(touched) or touched[at] != touched[at - 1] + 1 or at - start == most:
                yield range(touched[start], touched[at - 1] + 1)
                start = at
        if not touched:
            yield range(0)

    def select(self, heads: Tensor, chunk: range) -> Tensor:
        """The held (rows, columns) of ``heads`` (len(chunk), head_dim, in_features)."""
        rows = _mask(self.held[chunk.start : chunk.stop].reshape(-1), heads.device)
        block = heads.reshape(-1, self.shape[-1])[rows]
        return block if self.columns == self.shape[-1] else block[:, _mask(self.cols >= 0, heads.device)]

    def write(self, local: Tensor, block: Tensor, chunk: range) -> None:
        """Put what :meth:`select` kept into the rank's memory."""
        for here, part in self._lines(local, chunk):
            here.copy_(block[part])

    def read(self, local: Tensor, chunk: range) -> Tensor:
        """The held (rows, columns) of the heads ``chunk`` in the rank's memory."""
        out = local.new_empty(int(self.held[chunk.start : chunk.stop].sum()), self.columns)
        for here, part in self._lines(local, chunk):
            out[part].copy_(here)
        return out

    def _lines(self, local: Tensor, chunk: range) -> Iterator[tuple[Tensor, tuple[slice, slice]]]:
        """Strided views that cover the piece, each with its place in the block of held rows and columns."""
        flat, size = local.view(-1), self.shape[-2]
        rows = self.rows[chunk.start * size : chunk.stop * size]
        cols = list(_runs(self.cols[self.cols >= 0]))
        for row, row_number, row_step, row_at in _runs(rows[rows >= 0]) if cols else ():
            for col, col_number, col_step, col_at in cols:
                start = int(flat.storage_offset()) + row + col
                place = flat.as_strided((row_number, col_number), (row_step, col_step), start)
                yield place, (slice(row_at, row_at + row_number), slice(col_at, col_at + col_number))


def _runs(positions: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """(first, number, step, index of the first) of the runs that have the commonest step."""
    if not len(positions):
        return
    steps = np.diff(positions)
    kinds, numbers = np.unique(steps, return_counts=True)
    step = int(kinds[numbers.argmax()]) if len(steps) else 1
    start = 0
    for end in [*(np.flatnonzero(steps != step) + 1).tolist(), len(positions)]:
        yield int(positions[start]), end - start, step, start
        start = end


def _mask(chosen: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(chosen)).to(device)


def piece_of(view: Callable[[Tensor], Tensor], weight: Any, name: str) -> Piece:
    """This rank's piece of the heads ``view(whole weight)`` of a DTensor.

    Raises
    ------
    ValueError
        for a placement that is no shard and no replica, a shard whose size is not what its placements say, a local
        tensor that is not contiguous, and a view that follows no dimension of the weight.
    """
    local = local_part(weight)
    index, parts = _held(weight, name)
    if local.numel() and (tuple(map(len, index)) != tuple(local.shape) or not local.is_contiguous()):
        raise ValueError(
            f"{name} has a local tensor of shape {tuple(local.shape)} and strides {local.stride()}, but its placements "
            f"{tuple(weight.placements)} say {tuple(map(len, index))}, contiguous; distribute it with torch's own "
            "distribute_tensor, fully_shard or parallelize_module"
        )
    heads = view(torch.empty(weight.shape, device="meta"))
    *row_axes, columns = (np.arange(size) * stride for size, stride in zip(heads.shape, heads.stride(), strict=True))
    rows = np.zeros(1, dtype=np.int64)
    for axis in row_axes:
        rows = (rows[:, None] + axis).reshape(-1)
    shape = tuple(weight.shape)
    origin = np.unravel_index(int(heads.storage_offset()), shape)
    along = {"rows": np.unravel_index(rows, shape), "columns": np.unravel_index(columns, shape)}
    here = {"rows": np.zeros_like(rows), "columns": np.zeros_like(columns)}
    owners, column_dims = np.zeros_like(rows), []
    for dim, size in enumerate(shape):
        moves = "columns" if along["columns"][dim].any() else "rows"
        at = origin[dim] + along[moves][dim]
        if (moves == "columns" and along["rows"][dim].any()) or at.max() >= size:
            raise ValueError(
                f"{name}: rows and columns of a head both run along dimension {dim} of the weight, so its shards "
                "cannot be written apart; initialize before sharding"
            )
        place = np.full(size, -1)
        place[index[dim]] = np.arange(len(index[dim])) * math.prod(local.shape[dim + 1 :])
        here[moves] = np.where((here[moves] < 0) | (place[at] < 0), -1, here[moves] + place[at])
        if moves == "rows":
            owners = owners * (int(parts[dim].max()) + 1) + parts[dim][at]
        else:
            column_dims.append(dim)
    return Piece(tuple(heads.shape), here["rows"], here["columns"], owners, tuple(column_dims))


def keep_part(weight: Any, whole: Tensor) -> None:
    """Write this rank's part of ``whole`` into its memory of the DTensor ``weight``."""
    index, _ = _held(weight, "the weight")
    for dim, kept in enumerate(index):
        if len(kept) < whole.shape[dim]:
            whole = whole.index_select(dim, torch.from_numpy(kept).to(whole.device))
    local_part(weight).copy_(whole.view(local_part(weight).shape))


def _held(weight: Any, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Per dimension: the whole weight's indices that this rank holds, and for every index the number of its part."""
    mesh, where = weight.device_mesh, weight.device_mesh.get_coordinate()
    index = [np.arange(size if where is not None else 0) for size in weight.shape]
    parts = [[np.arange(size)] for size in weight.shape]
    for axis, placement in enumerate(weight.placements):
        kind, ranks = type(placement).__name__, mesh.size(axis)
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise ValueError(
                f"{name} has the placement {placement} on mesh dimension {axis}, expected Shard or Replicate; "
                "redistribute it first"
            )
        dim, lanes = placement.dim % weight.ndim, int(getattr(placement, "split_factor", 1))
        if where is not None:
            index[dim] = _split(index[dim], ranks, lanes)[where[axis]]
        parts[dim] = [piece for part in parts[dim] for piece in _split(part, ranks, lanes)]
    numbered = [np.zeros(size, dtype=np.int64) for size in weight.shape]
    for numbers, several in zip(numbered, parts, strict=True):
        for number, part in enumerate(several):
            numbers[part] = number
    return index, numbered


def _split(index: np.ndarray, number: int, lanes: int) -> list[np.ndarray]:
    """torch.chunk into exactly ``number`` parts; in each of ``lanes`` chunks apart, as a strided shard is made."""
    pieces = [_chunks(lane, number) for lane in _chunks(index, lanes)]
    return [np.concatenate(lane) for lane in zip(*pieces, strict=True)]


def _chunks(index: np.ndarray, number: int) -> list[np.ndarray]:
    step = -(-len(index) // number) if len(index) else 1
    return [index[start * step : (start + 1) * step] for start in range(number)]


def check_agreement(weights: Sequence[tuple[str, Any]]) -> None:
    """Refuse, on every rank of the weights' meshes, to go on where the ranks are about to read different weights."""
    for mesh, names in _by_mesh(weights).items():
        text = "\0".join(f"{name} {tuple(weight.shape)} {weight.placements}" for name, weight in names)
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        low = torch.tensor([digest, -digest], device=mesh.device_type)
        all_reduce(low, mesh, range(mesh.ndim), "MIN")
        if int(low[0]) != -int(low[1]):
            raise ValueError(
                "the ranks of one mesh are about to read different weights, which would hang; call this on every rank "
                f"with the same model and arguments (this rank: {len(names)} weights, {names[0][0]} first)"
            )


def _by_mesh(weights: Sequence[tuple[str, Any]]) -> dict[Any, list[tuple[str, Any]]]:
    groups: dict[Any, list[tuple[str, Any]]] = {}
    for name, weight in weights:
        if weight.device_mesh.get_coordinate() is not None:
            groups.setdefault(weight.device_mesh, []).append((name, weight))
    return groups


def all_reduce(tensor: Tensor, mesh: Any, axes: Sequence[int], kind: str = "SUM") -> Tensor:
    """In-place reduction over some dimensions of a mesh, one after the other; the same bits on all of its ranks."""
    dist = torch.distributed
    for axis in axes:
        if mesh.size(axis) > 1:
            dist.all_reduce(tensor, getattr(dist.ReduceOp, kind), group=mesh.get_group(axis))
    return tensor


def _first(weight: Any, axes: Sequence[int]) -> bool:
    """Whether this rank is the first along these mesh dimensions, so that one of equal ranks does the counting."""
    where = weight.device_mesh.get_coordinate()
    return where is not None and all(where[axis] == 0 for axis in axes)


def _axes(piece: Piece, weight: Any, *kinds: str) -> list[int]:
    """The mesh dimensions that replicate the weight ("replicas") or divide its heads' "rows" or "columns"."""

    def kind(placement: Any) -> str:
        if type(placement).__name__ == "Replicate":
            return "replicas"
        return "columns" if placement.dim % weight.ndim in piece.column_dims else "rows"

    return [axis for axis, placement in enumerate(weight.placements) if kind(placement) in kinds]


def squared_norms(items: Sequence[tuple[Piece, Any]]) -> list[float]:
    """Squared Frobenius norm of each projection, the same on all ranks: one all-reduce per mesh dimension for all."""
    sums = []
    for piece, weight in items:
        total = torch.zeros((), dtype=torch.float64, device=weight.device_mesh.device_type)
        if _first(weight, _axes(piece, weight, "replicas")):
            for chunk in piece.chunks():
                total += piece.read(local_part(weight), chunk).double().square().sum().to(total.device)
        sums.append(total)
    for mesh, numbers in _numbers_by_mesh(items, range(len(items))).items():
        reduced = all_reduce(torch.stack([sums[number] for number in numbers]), mesh, range(mesh.ndim))
        for number, value in zip(numbers, reduced, strict=True):
            sums[number] = value
    return [float(total) for total in sums]


def _numbers_by_mesh(items: Sequence[tuple[Piece, Any]], numbers: Sequence[int]) -> dict[Any, list[int]]:
    groups = _by_mesh([(str(number), items[number][1]) for number in numbers])
    return {mesh: [int(number) for number, _ in group] for mesh, group in groups.items()}


def grams(items: Sequence[tuple[Piece, Any]]) -> list[Tensor]:
    """W W^T of every head of each projection, float64 (heads, head_dim, head_dim), the same bits on all ranks.

    A collective: every rank of the weights' meshes calls it with the same projections in the same order. Per
    projection one exchange of the heads whose rows lie on several ranks, where there are any; per
    :data:`BUCKET_BYTES` of Gram matrices one all-reduce along each mesh dimension. No weight is gathered.
    """
    made: list[Tensor] = []
    waiting: list[int] = []

    def flush() -> None:
        for mesh, numbers in _numbers_by_mesh(items, waiting).items():
            joined = all_reduce(torch.cat([made[number].flatten() for number in numbers]), mesh, range(mesh.ndim))
            for number, part in zip(numbers, joined.split([made[number].numel() for number in numbers]), strict=True):
                made[number] = part.view_as(made[number])
        waiting.clear()

    for piece, weight in items:
        made.append(_own_grams(piece, weight))
        waiting.append(len(made) - 1)
        if sum(made[number].numel() for number in waiting) * 8 >= BUCKET_BYTES:
            flush()
    flush()
    return made


def gram_terms(weight: Any, cols: int) -> int:
    """How often at most :func:`grams` rounds a product on its way into a sum over ``cols`` columns."""
    return min(cols, _torch.GRAM_BLOCK) + -(-cols // _torch.GRAM_BLOCK) + weight.device_mesh.size()


def _own_grams(piece: Piece, weight: Any) -> Tensor:
    """This rank's summand of :func:`grams`: its columns of the heads that are its to count."""
    local, rows = local_part(weight), piece.shape[-2]
    out = torch.zeros(piece.count, rows, rows, dtype=torch.float64, device=weight.device_mesh.device_type)
    whole = np.ones(piece.count, dtype=bool)
    if split := piece.split:
        whole[split] = False
        completed = _complete(piece, weight, split)
        if _first(weight, _axes(piece, weight, "replicas", "rows")):
            out[split] = _torch.gram_blocked(completed)[0]
    if _first(weight, _axes(piece, weight, "replicas")):
        for chunk in piece.chunks():
            mine = [head for head in chunk if whole[head]]
            # Of what is read, the rows of whole heads.
            held = piece.held[chunk.start : chunk.stop]
            kept = np.broadcast_to(whole[chunk.start : chunk.stop, None], held.shape)[held]
            block = piece.read(local, chunk)[_mask(kept, local.device)].to(out.device).double()
            if block.numel():
                out[mine] = _torch.gram_blocked(block.view(len(mine), rows, piece.columns))[0]
    return out


def _complete(piece: Piece, weight: Any, heads: list[int]) -> Tensor:
    """The given heads with all their rows, in this rank's columns, in float64; ranks add their bytes to zeros."""
    local, shape = local_part(weight), (len(heads), piece.shape[-2], piece.columns)
    buffer = torch.zeros(shape, dtype=local.dtype, device=weight.device_mesh.device_type)
    for number, head in enumerate(heads):
        held = _mask(piece.held[head], buffer.device)
        buffer[number][held] = piece.read(local, range(head, head + 1)).to(buffer.device)
    if buffer.numel():
        # Bytes, so that nothing is rounded and a NaN stays one. Ranks along these dimensions have the same columns.
        all_reduce(buffer.view(torch.uint8), weight.device_mesh, _axes(piece, weight, "rows"))
    return buffer.double()
