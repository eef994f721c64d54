"""Heads in one rank's shard of a fused weight under tensor parallelism."""

from __future__ import annotations

from torch import Tensor

from .layout import LayoutError, as_matrix, divide

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
        start, rows = 0, len(mine) * head_dim
    else:
        mine = _whole(layout, heads, kv_heads, group)
        rows = divide(len(mine) * head_dim, tp_size, "rows of the fused weight per rank")
        start = tp_rank * rows
    matrix = as_matrix(shard)
    if matrix.shape[0] != rows:
        raise LayoutError(
            f"shard must have {rows} rows for layout={layout!r}, heads={heads}, kv_heads={kv_heads}, "
            f"head_dim={head_dim}, tp_rank={tp_rank} of {tp_size}, got {matrix.shape[0]}; K/V heads repeated on "
            "several ranks are not known here, so give each rank's part as a layout of your own (register_layout)"
        )
    views: dict[str, dict[int, Tensor]] = {"q": {}, "k": {}, "v": {}}
    for slot, (role, head) in enumerate(mine):
        first = slot * head_dim - start
        if first + head_dim <= 0 or first >= rows:
            continue
        if first < 0 or first + head_dim > rows:
            raise LayoutError(
                f"head {head} of {role!r} is cut between ranks (tp_rank={tp_rank}, tp_size={tp_size}, "
                f"layout={layout!r}); gather the weight and initialize it whole"
            )
        views[role][head] = matrix.narrow(0, first, head_dim)
    return views


Slots = list[tuple[str, int]]
"""(role, head) in the order of the rows."""


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
