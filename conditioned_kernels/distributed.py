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
    rows : int64 (heads * head_dim,): where each row of the stacked heads begins in the rank's flat memory; -1 if it is
        not held.
    cols : int64 (in_features,): how far each column is from there; -1 if it is not held.
    owners : int64 (heads * head_dim,): a number per part of the rows that ranks hold as one.
    column_dims : dimensions of the weight along which the columns run.
    """

    shape: tuple[int, ...]
    rows: Tensor
    cols: Tensor
    owners: Tensor
    column_dims: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Heads of the whole projection."""
        return math.prod(self.shape[:-2])

    def held(self) -> Tensor:
        """(heads, head_dim) bool: the rows that are here; none where no column is."""
        return self.rows.view(self.count, -1).ge(0) & self.cols.ge(0).any()

    def touched(self) -> tuple[int, ...]:
        """Heads of which a part is here."""
        return tuple(self.held().any(-1).nonzero().flatten().tolist())

    def split(self) -> Tensor:
        """Heads whose rows lie in several parts; the same on every rank."""
        owners = self.owners.view(self.count, -1)
        return (owners != owners[:, :1]).any(-1).nonzero().flatten()

    def chunks(self) -> Iterator[range]:
        """Runs of neighboring touched heads, none larger than the workspace; one empty run if nothing is here."""
        touched = self.touched()
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
        held = self.held()[chunk.start : chunk.stop].flatten().to(heads.device)
        return heads.reshape(-1, self.shape[-1])[held][:, self.cols.ge(0).to(heads.device)]

    def write(self, local: Tensor, block: Tensor, chunk: range) -> None:
        """Put what :meth:`select` kept into the rank's memory."""
        for here, part in self._lines(local, chunk):
            here.copy_(block[part])

    def read(self, local: Tensor, chunk: range) -> Tensor:
        """The held (rows, columns) of the heads ``chunk`` in the rank's memory."""
        rows = int(self.held()[chunk.start : chunk.stop].sum())
        out = local.new_empty(rows, int(self.cols.ge(0).sum()))
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


def _runs(positions: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(first, number, step, index of the first) of runs with one step, the commonest; overlaps with none."""
    if not len(positions):
        return
    steps = positions.diff()
    step = int(steps.mode().values) if len(steps) else 1
    ends = [*((steps != step).nonzero().flatten() + 1).tolist(), len(positions)]
    start = 0
    for end in ends:
        yield int(positions[start]), end - start, step, start
        start = end


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
    *row_axes, columns = (
        torch.arange(size, device="cpu") * stride for size, stride in zip(heads.shape, heads.stride(), strict=True)
    )
    rows = torch.zeros(1, dtype=torch.int64, device="cpu")
    for axis in row_axes:
        rows = (rows[:, None] + axis).flatten()
    origin = _unravel(torch.tensor([int(heads.storage_offset())], device="cpu"), weight.shape)
    along_rows, along_columns = _unravel(rows, weight.shape), _unravel(columns, weight.shape)
    here = {"rows": torch.zeros_like(rows), "columns": torch.zeros_like(columns)}
    owners, column_dims = torch.zeros_like(rows), list[int]()
    for dim, size in enumerate(weight.shape):
        moves = "columns" if along_columns[dim].any() else "rows"
        at = origin[dim] + {"rows": along_rows, "columns": along_columns}[moves][dim]
        if (moves == "columns" and along_rows[dim].any()) or int(at.max()) >= size:
            raise ValueError(
                f"{name}: rows and columns of a head both run along dimension {dim} of the weight, so its shards "
                "cannot be written apart; initialize before sharding"
            )
        place = torch.full((size,), -1, dtype=torch.int64, device="cpu")
        place[index[dim]] = torch.arange(len(index[dim]), device="cpu") * math.prod(local.shape[dim + 1 :])
        here[moves] = torch.where((here[moves] < 0) | (place[at] < 0), -1, here[moves] + place[at])
        if moves == "rows":
            owners = owners * (int(parts[dim].max()) + 1) + parts[dim][at]
        else:
            column_dims.append(dim)
    return Piece(tuple(heads.shape), here["rows"], here["columns"], owners, tuple(column_dims))


def _unravel(offsets: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Index along each dimension of a contiguous tensor's elements."""
    index = []
    for size in reversed(shape):
        index.append(offsets % size)
        offsets = offsets.div(size, rounding_mode="floor")
    return index[::-1]


def _held(weight: Any, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Per dimension: the whole weight's indices that this rank holds, and for every index the number of its part."""
    mesh, where = weight.device_mesh, weight.device_mesh.get_coordinate()
    index = [torch.arange(size if where is not None else 0, device="cpu") for size in weight.shape]
    parts = [[torch.arange(size, device="cpu")] for size in weight.shape]
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
    numbered = [torch.zeros(size, dtype=torch.int64, device="cpu") for size in weight.shape]
    for numbers, several in zip(numbered, parts, strict=True):
        for number, part in enumerate(several):
            numbers[part] = number
    return index, numbered


def _split(index: Tensor, number: int, lanes: int) -> list[Tensor]:
    """torch.chunk into exactly ``number`` parts; in each of ``lanes`` chunks apart, as a strided shard is made."""
    pieces = [_chunks(lane, number) for lane in _chunks(index, lanes)]
    return [torch.cat(lane) for lane in zip(*pieces, strict=True)]


def _chunks(index: Tensor, number: int) -> list[Tensor]:
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
    split = piece.split()
    if len(split):
        completed = _complete(piece, weight, split)
        if _first(weight, _axes(piece, weight, "replicas", "rows")):
            out[split.to(out.device)] = _torch.gram_blocked(completed)[0]
    if _first(weight, _axes(piece, weight, "replicas")):
        whole = torch.ones(piece.count, dtype=torch.bool, device="cpu").index_fill_(0, split, False)
        for chunk in piece.chunks():
            mine = torch.tensor(chunk, dtype=torch.int64, device="cpu")[whole[chunk.start : chunk.stop]]
            # Of what is read, the rows of whole heads.
            kept = whole[chunk.start : chunk.stop, None].expand(-1, rows)[piece.held()[chunk.start : chunk.stop]]
            block = piece.read(local, chunk)[kept.to(local.device)].to(out.device).double()
            heads = block.view(len(mine), rows, block.shape[-1])
            out[mine.to(out.device)] = _torch.gram_blocked(heads)[0]
    return out


def _complete(piece: Piece, weight: Any, heads: Tensor) -> Tensor:
    """The given heads with all their rows, in this rank's columns, in float64; ranks add their bytes to zeros."""
    local, rows, columns = local_part(weight), piece.shape[-2], int(piece.cols.ge(0).sum())
    buffer = torch.zeros(len(heads), rows, columns, dtype=local.dtype, device=weight.device_mesh.device_type)
    for number, head in enumerate(heads.tolist()):
        held = piece.held()[head].to(buffer.device)
        buffer[number][held] = piece.read(local, range(head, head + 1)).to(buffer.device)
    if buffer.numel():
        # Bytes, so that nothing is rounded and a NaN stays one. Ranks along these dimensions have the same columns.
        all_reduce(buffer.view(torch.uint8), weight.device_mesh, _axes(piece, weight, "rows"))
    return buffer.double()
