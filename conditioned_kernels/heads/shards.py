"""Heads in one rank's shard of a fused weight under tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..distributed import Piece
from .layout import LayoutError, Projection, as_matrix, divide

ARRANGEMENTS = ("blocked", "per_head", "per_group", "per_shard")


def shard_views(
    shard: Tensor, *, heads: int, head_dim: int, tp_rank: int, tp_size: int, layout: str, kv_heads: int = 0
) -> dict[str, dict[int, Tensor]]:
    """The heads that one rank holds of a fused query/key/value weight, by role and by index in the whole model.

    A fused weight has ``(heads + 2 kv_heads) head_dim`` rows, and the tensor-parallel degree is part of its meaning:

    =============  ============================================  ===============================================
    ``layout``     rows of the whole weight, heads in order      rows of rank r
    =============  ============================================  ===============================================
    "blocked"      [Q | K | V]                                   the r-th of ``tp_size`` equal parts
    "per_head"     [q k v] for every head                        the r-th of ``tp_size`` equal parts
    "per_group"    [q.. k v] for every K/V head                  the r-th of ``tp_size`` equal parts
    "per_shard"    [Q_r | K_r | V_r] for every rank r            its own [Q_r | K_r | V_r]
    =============  ============================================  ===============================================

    With fewer K/V heads than ranks, "per_shard" gives K/V head j to rank ``j tp_size / kv_heads`` alone.

    Parameters
    ----------
    shard : (rows, in_features), the rank's own part.
    heads, kv_heads, head_dim : of the whole model; ``kv_heads`` 0 for as many as ``heads``.
    tp_rank, tp_size : the rank, and the number of ranks.
    layout : as above.

    Returns
    -------
    ``{"q": {head: view}, "k": ..., "v": ...}``, each view (head_dim, in_features) sharing memory with ``shard``; a role
    of which the rank holds no head is empty.

    Raises
    ------
    LayoutError
        for an unknown layout, numbers that do not fit, a shard of another shape, or a head cut by the end of a shard,
        which has to be gathered first.
    """
    matrix = as_matrix(shard)
    slots, start = _slots(matrix.shape[0], heads, head_dim, tp_rank, tp_size, layout, kv_heads)
    views: dict[str, dict[int, Tensor]] = {"q": {}, "k": {}, "v": {}}
    for slot, (role, head) in enumerate(slots):
        first = slot * head_dim - start
        if first + head_dim <= 0 or first >= matrix.shape[0]:
            continue
        if first < 0 or first + head_dim > matrix.shape[0]:
            raise LayoutError(
                f"head {head} of {role!r} is cut between ranks (tp_rank={tp_rank}, tp_size={tp_size}, "
                f"layout={layout!r}); from_shard can write a part of a head"
            )
        views[role][head] = matrix.narrow(0, first, head_dim)
    return views


def from_shard(
    parameter: str, *, heads: int, head_dim: int, tp_rank: int, tp_size: int, layout: str, kv_heads: int = 0
) -> tuple[Projection, ...]:
    """What a layout function returns for a module that has one rank's plain part of a fused query/key/value weight.

    Every rank then writes its part of the heads that the unsharded weight would get; a head cut between ranks is drawn
    by both. Nothing is communicated, so ``verify`` measures the heads that are here as a whole.

    Parameters
    ----------
    parameter : the weight's name relative to the module. Streams are keyed by its name in the model, so that has to be
        the same on all ranks.
    Others as :func:`shard_views`.

    Raises
    ------
    LayoutError
        as :func:`shard_views`, but not for cut heads; when the weight is used.
    """
    counts = {"q": heads, "k": kv_heads or heads, "v": kv_heads or heads}
    return tuple(
        Projection(role, parameter, ShardView(role, number, heads, head_dim, tp_rank, tp_size, layout, kv_heads))
        for role, number in counts.items()
    )


@dataclass(frozen=True)
class ShardView:
    """The heads of one role in one rank's part of a fused weight: only in parts, so a :class:`Piece` and no view."""

    role: str
    number: int
    heads: int
    head_dim: int
    tp_rank: int
    tp_size: int
    layout: str
    kv_heads: int

    def __call__(self, weight: Tensor) -> Tensor:
        raise LayoutError("a rank's plain part of a weight has no view of whole heads; gather the weight first")

    def piece(self, weight: Tensor) -> Piece:
        """Which rows of the role's heads are here, and where."""
        matrix = as_matrix(weight)
        rows, columns = matrix.shape
        if not weight.is_contiguous():
            raise LayoutError(f"a rank's part of a weight must be contiguous, got strides {weight.stride()}")
        slots, start = _slots(rows, self.heads, self.head_dim, self.tp_rank, self.tp_size, self.layout, self.kv_heads)
        place = np.full((self.number, self.head_dim), -1)
        for slot, (role, head) in enumerate(slots):
            if role == self.role:
                at = slot * self.head_dim - start + np.arange(self.head_dim)
                place[head] = np.where((at >= 0) & (at < rows), at * columns, -1)
        shape, flat = (self.number, self.head_dim, columns), place.reshape(-1)
        return Piece(shape, flat, np.arange(columns), np.zeros_like(flat))


Slots = list[tuple[str, int]]
"""(role, head) in the order of the rows."""


def _slots(
    rows: int, heads: int, head_dim: int, tp_rank: int, tp_size: int, layout: str, kv_heads: int
) -> tuple[Slots, int]:
    """The heads in the order of the rows that a rank's part is cut from, and its first row among them."""
    kv_heads = kv_heads or heads
    if layout not in ARRANGEMENTS:
        raise LayoutError(f"layout must be one of {', '.join(map(repr, ARRANGEMENTS))}, got {layout!r}")
    if tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise LayoutError(f"tp_rank must be in [0, tp_size), got tp_rank={tp_rank}, tp_size={tp_size}")
    if layout == "per_head" and kv_heads != heads:
        raise LayoutError(f"layout='per_head' needs kv_heads == heads, got {kv_heads} and {heads}; use 'per_group'")
    group = divide(heads, kv_heads, "heads per K/V head")
    if layout == "per_shard":
        mine = _own_block(heads, kv_heads, tp_rank, tp_size)
        start, expected = 0, len(mine) * head_dim
    else:
        mine = _whole(layout, heads, kv_heads, group)
        expected = divide(len(mine) * head_dim, tp_size, "rows of the fused weight per rank")
        start = tp_rank * expected
    if rows != expected:
        raise LayoutError(
            f"shard must have {expected} rows for layout={layout!r}, heads={heads}, kv_heads={kv_heads}, "
            f"head_dim={head_dim}, tp_rank={tp_rank} of {tp_size}, got {rows}; K/V heads repeated on "
            "several ranks are not known here, so give each rank's part as a layout of your own (register_layout)"
        )
    return mine, start


def _whole(layout: str, heads: int, kv_heads: int, group: int) -> Slots:
    if layout == "blocked":
        return [("q", i) for i in range(heads)] + [(role, j) for role in "kv" for j in range(kv_heads)]
    return [
        slot for j in range(kv_heads) for slot in (*(("q", j * group + i) for i in range(group)), ("k", j), ("v", j))
    ]


def _own_block(heads: int, kv_heads: int, rank: int, size: int) -> Slots:
    queries = divide(heads, size, "query heads per rank")
    if kv_heads >= size:
        shared = divide(kv_heads, size, "K/V heads per rank")
        mine = list(range(rank * shared, (rank + 1) * shared))
    else:
        ranks = divide(size, kv_heads, "ranks per K/V head")
        mine = [rank // ranks] if rank % ranks == 0 else []
    return [("q", rank * queries + i) for i in range(queries)] + [(role, j) for role in "kv" for j in mine]
