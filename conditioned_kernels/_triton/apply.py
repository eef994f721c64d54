"""Q = gain F W per head, W read from where it lies or drawn in registers, Q written into its place."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch_config
from .gram import gram as gram_of
from .gram import residual
from .heads import Heads, Samples, table
from .launch_config import Launch
from .sample import normal_tile


@triton.jit
def apply_kernel(
    factor_ptr,
    w_ptr,
    table_ptr,
    gain_ptr,
    out_ptr,
    part_ptr,
    rows,
    cols,
    stride_row,
    stride_col,
    out_stride_row,
    out_stride_col,
    span_cols,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    RESIDUAL_PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    OUT_ALIGNMENT: tl.constexpr,
    HAS_SAMPLES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Program (head, span): ``span_cols`` columns of gain F W, F (heads, rows, rows) fp32.

    With ``BLOCK_K`` = ``BLOCK_R`` the factor stays in shared memory. In three-product precision and 128 rows it does
    not fit there twice, so it comes ``BLOCK_K`` columns at a time, from the cache, and the tile is wider instead.
    ``HAS_RESIDUAL``: the Gram matrix of those columns as stored, after the cast, to ``part`` (heads, spans, n, n).
    """
    index = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    row = tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_R)
    square = (row < rows)[:, None] & (column < rows)[None, :]
    entry_ptr = table_ptr + 4 * index
    out_ptr += tl.multiple_of(tl.load(entry_ptr + 1), OUT_ALIGNMENT)
    if HAS_SAMPLES:
        key = tl.load(entry_ptr + 2)
        head = tl.load(entry_ptr + 3)
    else:
        w_ptr += tl.multiple_of(tl.load(entry_ptr), ALIGNMENT)
    factor_ptr += index * rows * rows
    if BLOCK_K == BLOCK_R:
        whole = tl.load(factor_ptr + row[:, None] * rows + column[None, :], mask=square, other=0.0)
    gain = tl.load(gain_ptr + index)
    if HAS_RESIDUAL:
        gram = tl.zeros((BLOCK_R, BLOCK_R), dtype=tl.float32)
    first = span * span_cols
    last = tl.minimum(first + span_cols, cols)
    for start in range(first, last, BLOCK_C):
        col = start + tl.arange(0, BLOCK_C)
        inside = (row < rows)[:, None] & (col < last)[None, :]
        q = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
        for first_k in range(0, BLOCK_R, BLOCK_K):
            k = first_k + tl.arange(0, BLOCK_K)
            some = (k < rows)[:, None] & (col < last)[None, :]
            if HAS_SAMPLES:
                tile = normal_tile(k, start, BLOCK_C, stride_row, stride_col, head, key, ALIGNMENT == 4)
                w = tl.where(some, tile, 0.0)
            else:
                offset = k.to(tl.int64)[:, None] * stride_row + col.to(tl.int64)[None, :] * stride_col
                w = tl.load(w_ptr + offset, mask=some, other=0.0).to(tl.float32)
            if BLOCK_K == BLOCK_R:
                factor = whole
            else:
                part = (row < rows)[:, None] & (k < rows)[None, :]
                factor = tl.load(factor_ptr + row[:, None] * rows + k[None, :], mask=part, other=0.0)
            q = tl.dot(factor, w, acc=q, input_precision=PRECISION)
        q = (q * gain).to(out_ptr.dtype.element_ty)
        offset = row.to(tl.int64)[:, None] * out_stride_row + col.to(tl.int64)[None, :] * out_stride_col
        tl.store(out_ptr + offset, q, mask=inside)
        if HAS_RESIDUAL:
            stored = q.to(tl.float32)
            gram = tl.dot(stored, tl.trans(stored), acc=gram, input_precision=RESIDUAL_PRECISION)
    if HAS_RESIDUAL:
        part_ptr += (index * tl.num_programs(1) + span) * rows * rows
        tl.store(part_ptr + row[:, None] * rows + column[None, :], gram, mask=square)


def apply(factor: Tensor, source: Heads | Samples, target: Heads, gains: Tensor, *, certify: bool = False) -> Tensor:
    """Write gain F W of every head to ``target``; with ``certify`` return max |Q Q^T / gain^2 - I| as stored, (heads,).

    Parameters
    ----------
    factor : (heads, rows, rows) fp32, contiguous.
    source : heads in memory, or the samples that the Gram matrices were made of; rows <= 128. May be ``target``.
    target : where the results go, fp16, bf16 or fp32, any strides.
    gains : (heads,) fp32, on the device.

    Notes
    -----
    *Accuracy.* tf32 products for bf16 results, whose rounding is 16 times coarser; tf32x3 (3 u) for fp16 and fp32.
    Each column depends on that column of W alone, so any split into launches gives the same bits.
    *Cost.* 2 rows^2 cols flops (twice that with the certificate), one write, and one read unless sampled.
    """
    sampled = isinstance(source, Samples)
    dtype, n = target.base.dtype, source.rows
    launch = launch_config.apply(n, dtype, launch_config.architecture(source.device), sampled=sampled)
    spans = launch_config.splits(source.cols, source.count, launch)
    span_cols = launch_config.split_columns(source.cols, spans, launch)
    spans = -(-source.cols // span_cols)
    fused = certify and launch_config.fused_certificate(launch)
    size = (source.count, spans, n, n) if fused else (1,)
    part = torch.empty(size, dtype=torch.float32, device=source.device)
    with launch_config.on(source.device):
        apply_kernel[(source.count, spans)](
            factor,
            part if isinstance(source, Samples) else source.base,
            table(source, target),
            gains,
            target.base,
            part,
            n,
            source.cols,
            *source.strides,
            *target.strides,
            span_cols,
            **apply_constants(launch, dtype, source.alignment, target.alignment, sampled, fused),
            **launch.options(sampled),
        )
    if not certify:
        return gains.new_empty(0)
    return residual(part if fused else gram_of(target, dtype).unsqueeze(1), gains)


def apply_constants(
    launch: Launch, dtype: torch.dtype, alignment: int, out_alignment: int, sampled: bool, fused: bool
) -> dict[str, object]:
    """Compile-time arguments of :func:`apply_kernel`."""
    return {
        "BLOCK_R": launch.block_rows,
        "BLOCK_C": launch.block_cols,
        "BLOCK_K": launch.block_inner or launch.block_rows,
        "PRECISION": launch.precision,
        # What is stored in a half type has exact tf32 products.
        "RESIDUAL_PRECISION": launch_config.gram_precision(dtype, launch.precision == "ieee"),
        "ALIGNMENT": alignment,
        "OUT_ALIGNMENT": out_alignment,
        "HAS_SAMPLES": sampled,
        "HAS_RESIDUAL": fused,
    }
