"""G = W W^T per head, W read once from where it lies or drawn in registers; and the sums that finish it."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch_config
from .heads import Heads, Samples, table
from .launch_config import Launch
from .sample import normal_tile

ELEMENTS: tl.constexpr = tl.constexpr(launch_config.SUM_ELEMENTS)


@triton.jit
def gram_kernel(
    w_ptr,
    table_ptr,
    out_ptr,
    rows,
    cols,
    stride_row,
    stride_col,
    split_cols,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HAS_SAMPLES: tl.constexpr,
):
    """Program (head, split): the Gram matrix of ``split_cols`` columns, to ``out`` (heads, splits, rows, rows) fp32.

    With ``HAS_SAMPLES`` the strides are those of the element index and ``w_ptr`` is not read.
    """
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.arange(0, BLOCK_R)
    first = split * split_cols
    last = tl.minimum(first + split_cols, cols)
    entry_ptr = table_ptr + 4 * index
    if HAS_SAMPLES:
        key = tl.load(entry_ptr + 2)
        head = tl.load(entry_ptr + 3)
    else:
        w_ptr += tl.multiple_of(tl.load(entry_ptr), ALIGNMENT)
    gram = tl.zeros((BLOCK_R, BLOCK_R), dtype=tl.float32)
    for start in range(first, last, BLOCK_C):
        col = start + tl.arange(0, BLOCK_C)
        inside = (row < rows)[:, None] & (col < last)[None, :]
        if HAS_SAMPLES:
            tile = normal_tile(row, start, BLOCK_C, stride_row, stride_col, head, key, ALIGNMENT == 4)
            w = tl.where(inside, tile, 0.0)
        else:
            offset = row.to(tl.int64)[:, None] * stride_row + col.to(tl.int64)[None, :] * stride_col
            w = tl.load(w_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        gram = tl.dot(w, tl.trans(w), acc=gram, input_precision=PRECISION)
    # One triangle is stored, twice: the three products of tf32x3 do not give a symmetric sum by themselves.
    column = tl.arange(0, BLOCK_R)
    out_ptr += (index * tl.num_programs(1) + split) * rows * rows
    inside = (row < rows)[:, None]
    tl.store(out_ptr + row[:, None] * rows + column[None, :], gram, mask=inside & (column[None, :] <= row[:, None]))
    tl.store(out_ptr + column[None, :] * rows + row[:, None], gram, mask=inside & (column[None, :] < row[:, None]))


@triton.jit
def sum_kernel(part_ptr, out_ptr, size, splits):
    """Program (head, block): sum of (heads, splits, size) over the splits, in their order, so always the same."""
    index = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = element < size
    total = tl.zeros((ELEMENTS,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(part_ptr + (index * splits + split) * size + element, mask=inside, other=0.0)
    tl.store(out_ptr + index * size + element, total, mask=inside)


@triton.jit
def residual_kernel(part_ptr, gain_ptr, out_ptr, rows, splits):
    """Program head: max |G / gain^2 - I| over the sum of (heads, splits, rows, rows); infinity where it is NaN."""
    index = tl.program_id(0).to(tl.int64)
    size = rows * rows
    gain = tl.load(gain_ptr + index)
    worst = tl.zeros((ELEMENTS,), dtype=tl.float32)
    for start in range(0, size, ELEMENTS):
        element = start + tl.arange(0, ELEMENTS)
        inside = element < size
        total = tl.zeros((ELEMENTS,), dtype=tl.float32)
        for split in range(splits):
            total += tl.load(part_ptr + (index * splits + split) * size + element, mask=inside, other=0.0)
        error = tl.abs(total / (gain * gain) - tl.where(element // rows == element % rows, 1.0, 0.0))
        error = tl.where(error == error, error, float("inf"))
        worst = tl.maximum(worst, tl.where(inside, error, 0.0))
    tl.store(out_ptr + index, tl.max(worst, 0))


def gram(source: Heads | Samples, dtype: torch.dtype, *, splits: int | None = None) -> Tensor:
    """Gram matrix W W^T of every head: (heads, rows, rows) fp32, symmetric to the bit.

    Parameters
    ----------
    source : heads in memory (fp16, bf16 or fp32, any strides), or samples, which are never stored; rows <= 128.
    dtype : of the result that the matrix serves; it sets the accuracy class, :func:`launch_config.gram_precision`.
    splits : column ranges summed apart. Default: one for samples, whose bits must not depend on the batch, and as
        many as fill the device for heads in memory.

    Notes
    -----
    *Accuracy.* Products of half types are exact, those of fp32 are within 3 u; the sums are bounded in
    :func:`launch_config.gram_terms`. *Cost.* 2 rows^2 cols flops and one read of W per head; no read for samples.
    """
    sampled = isinstance(source, Samples)
    launch = launch_config.gram(source.rows, dtype, launch_config.architecture(source.device), sampled=sampled)
    if splits is None:
        splits = 1 if sampled else launch_config.splits(source.cols, source.count, launch)
    split_cols = launch_config.split_columns(source.cols, splits, launch)
    splits = -(-source.cols // split_cols)
    n = source.rows
    part = torch.empty(source.count, splits, n, n, dtype=torch.float32, device=source.device)
    with launch_config.on(source.device):
        gram_kernel[(source.count, splits)](
            part if isinstance(source, Samples) else source.base,
            table(source),
            part,
            n,
            source.cols,
            *source.strides,
            split_cols,
            **gram_constants(launch, source.alignment, sampled),
            **launch.options(sampled),
        )
    if splits == 1:
        return part[:, 0]
    out = torch.empty(source.count, n, n, dtype=torch.float32, device=source.device)
    with launch_config.on(source.device):
        sum_kernel[(source.count, -(-n * n // launch_config.SUM_ELEMENTS))](
            part, out, n * n, splits, enable_fp_fusion=True
        )
    return out


def residual(part: Tensor, gains: Tensor) -> Tensor:
    """max |G / gain^2 - I| of each head, (heads,) fp32, from partial Gram matrices (heads, splits, rows, rows)."""
    out = torch.empty(len(part), dtype=torch.float32, device=part.device)
    with launch_config.on(part.device):
        residual_kernel[(len(part),)](part, gains, out, part.shape[-1], part.shape[1], enable_fp_fusion=True)
    return out


def gram_constants(launch: Launch, alignment: int, sampled: bool) -> dict[str, object]:
    """Compile-time arguments of :func:`gram_kernel`."""
    return {
        "BLOCK_R": launch.block_rows,
        "BLOCK_C": launch.block_cols,
        "PRECISION": launch.precision,
        "ALIGNMENT": alignment,
        "HAS_SAMPLES": sampled,
    }
