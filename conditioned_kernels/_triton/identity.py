"""Rectangular identities, written into the value weights of all layers in one launch."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch_config
from .heads import group, table


@triton.jit
def identity_kernel(
    out_ptr,
    table_ptr,
    first_ptr,
    gain_ptr,
    rows,
    cols,
    stride_row,
    stride_col,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Program (head, row block, column block): gain where column = (first + row) mod cols, and zero elsewhere."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    out_ptr += tl.multiple_of(tl.load(table_ptr + 4 * index + 1), ALIGNMENT)
    first = tl.load(first_ptr + index)
    gain = tl.load(gain_ptr + index)
    # Rows from cols on would repeat a unit vector, so they are zero.
    one = (((first + row) % cols)[:, None] == col[None, :]) & (row < cols)[:, None]
    offset = row.to(tl.int64)[:, None] * stride_row + col.to(tl.int64)[None, :] * stride_col
    value = tl.where(one, gain, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset, value, mask=(row < rows)[:, None] & (col < cols)[None, :])


def identity(views: Sequence[Tensor], gains: Sequence[float], *, block: bool = True) -> None:
    """Make every head of every view ``gain`` times a rectangular identity, in place; one launch per kind of head.

    Parameters
    ----------
    views : (*heads, rows, cols) each, fp16, bf16 or fp32, any strides, on one device.
    gains : one per view.
    block : head h of a view begins at unit vector (h rows) mod cols; otherwise every head begins at the first.

    Notes
    -----
    *Accuracy.* exact. *Cost.* one write.
    """
    launch = launch_config.identity()
    for heads, members in group(views):
        counts = [views[i].shape[:-2].numel() for i in members]
        within = torch.cat([torch.arange(count, device="cpu") for count in counts])
        first = (within * heads.rows * block % heads.cols).to(heads.device, torch.int32)
        size = torch.tensor([gains[i] for i in members], dtype=torch.float32, device="cpu")
        size = size.repeat_interleave(torch.tensor(counts, device="cpu")).to(heads.device)
        grid = (heads.count, -(-heads.rows // launch.block_rows), -(-heads.cols // launch.block_cols))
        with launch_config.on(heads.device):
            identity_kernel[grid](
                heads.base,
                table(target=heads),
                first,
                size,
                heads.rows,
                heads.cols,
                *heads.strides,
                BLOCK_R=launch.block_rows,
                BLOCK_C=launch.block_cols,
                ALIGNMENT=heads.alignment,
                **launch.options(False),
            )
