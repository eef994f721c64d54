"""C = alpha A B^T + beta D + gamma I for batches of fp32 matrices of any size; one triangle where C is symmetric."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch_config
from .launch_config import Launch


@triton.jit
def product_kernel(
    a_ptr,
    b_ptr,
    d_ptr,
    out_ptr,
    rows,
    cols,
    inner,
    a_batch,
    a_row,
    a_inner,
    b_batch,
    b_row,
    b_inner,
    d_batch,
    d_row,
    d_col,
    out_batch,
    out_row,
    out_col,
    alpha,
    beta,
    gamma,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_SYMMETRIC: tl.constexpr,
    HAS_D: tl.constexpr,
):
    """Program (batch, block): one square block; with ``IS_SYMMETRIC`` one of the lower triangle, stored twice."""
    index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if IS_SYMMETRIC:
        # block = i (i + 1) / 2 + j with j <= i; the square root may be one off, so it is corrected.
        i = ((tl.sqrt(8.0 * block + 1.0) - 1.0) * 0.5).to(tl.int32)
        i = tl.where(i * (i + 1) // 2 > block, i - 1, i)
        i = tl.where((i + 1) * (i + 2) // 2 <= block, i + 1, i)
        j = block - i * (i + 1) // 2
    else:
        across = tl.cdiv(cols, BLOCK)
        i = block // across
        j = block % across
    row = i * BLOCK + tl.arange(0, BLOCK)
    col = j * BLOCK + tl.arange(0, BLOCK)
    a_ptr += index * a_batch
    b_ptr += index * b_batch
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = (k < inner)[None, :]
        a_offset = row.to(tl.int64)[:, None] * a_row + k.to(tl.int64)[None, :] * a_inner
        b_offset = col.to(tl.int64)[:, None] * b_row + k.to(tl.int64)[None, :] * b_inner
        a = tl.load(a_ptr + a_offset, mask=(row < rows)[:, None] & left, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + b_offset, mask=(col < cols)[:, None] & left, other=0.0).to(tl.float32)
        total = tl.dot(a, tl.trans(b), acc=total, input_precision=PRECISION)
    total = total * alpha
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    if IS_SYMMETRIC:
        inside = inside & (col[None, :] <= row[:, None])
    if HAS_D:
        offset = index * d_batch + row.to(tl.int64)[:, None] * d_row + col.to(tl.int64)[None, :] * d_col
        total += beta * tl.load(d_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    total += tl.where(row[:, None] == col[None, :], gamma, 0.0)
    out_ptr += index * out_batch
    offset = row.to(tl.int64)[:, None] * out_row + col.to(tl.int64)[None, :] * out_col
    tl.store(out_ptr + offset, total, mask=inside)
    if IS_SYMMETRIC:
        offset = col.to(tl.int64)[None, :] * out_row + row.to(tl.int64)[:, None] * out_col
        tl.store(out_ptr + offset, total, mask=inside & (col[None, :] < row[:, None]))


def product(
    a: Tensor,
    b: Tensor,
    d: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 0.0,
    symmetric: bool = False,
    precision: str = "",
) -> Tensor:
    """alpha A B^T + beta D + gamma I, batched, fp32.

    Parameters
    ----------
    a, b : (b, rows, inner) and (b, cols, inner); fp16, bf16 or fp32, any strides.
    d : (b, rows, cols), used where ``beta`` is not 0.
    symmetric : the caller knows that A B^T and D are symmetric: one triangle is computed and mirrored.
    precision : of the products, "tf32", "tf32x3" or "ieee"; default the best of the device's tensor cores.

    Notes
    -----
    *Accuracy.* "tf32x3": 3 u per product; fp32 sums. *Cost.* 2 rows cols inner flops, half of it if symmetric.
    """
    batch, rows, inner = a.shape
    cols = b.shape[1]
    launch = launch_config.product(rows, cols, precision, launch_config.architecture(a.device))
    out = torch.empty(batch, rows, cols, dtype=torch.float32, device=a.device)
    across, down = -(-cols // launch.block_rows), -(-rows // launch.block_rows)
    blocks = down * (down + 1) // 2 if symmetric else down * across
    some = out if d is None else d
    with launch_config.on(a.device):
        product_kernel[(batch, blocks)](
            a,
            b,
            some,
            out,
            rows,
            cols,
            inner,
            *a.stride(),
            *b.stride(),
            *some.stride(),
            *out.stride(),
            float(alpha),
            float(beta),
            float(gamma),
            **product_constants(launch, symmetric, d is not None and beta != 0),
            **launch.options(False),
        )
    return out


def product_constants(launch: Launch, symmetric: bool, has_d: bool) -> dict[str, object]:
    """Compile-time arguments of :func:`product_kernel`."""
    return {
        "BLOCK": launch.block_rows,
        "BLOCK_K": launch.block_cols,
        "PRECISION": launch.precision,
        "IS_SYMMETRIC": symmetric,
        "HAS_D": has_d,
    }
