"""Sample stream version 1 in registers: the numbers of :mod:`conditioned_kernels.sampling`, bit for bit.

A kernel that calls these functions is compiled with ``enable_fp_fusion=False``: one fused multiply-add changes bits.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from ..coefficients import COS_QUARTER, LN2_HIGH, LN2_LOW, LOG1P, SIN_QUARTER, SQRT_HALF_BITS

_LOG1P: tl.constexpr = tl.constexpr(LOG1P)
_SIN: tl.constexpr = tl.constexpr(SIN_QUARTER)
_COS: tl.constexpr = tl.constexpr(COS_QUARTER)
_LN2_HIGH: tl.constexpr = tl.constexpr(LN2_HIGH)
_LN2_LOW: tl.constexpr = tl.constexpr(LN2_LOW)
_SQRT_HALF: tl.constexpr = tl.constexpr(SQRT_HALF_BITS)


@triton.jit
def philox4x32(block, head, key):
    """Four uint32 tiles: Philox4x32-10 at counter (block mod 2^32, block div 2^32, head, 0), ``block`` int64."""
    c0 = block.to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + head.to(tl.uint32)
    c3 = tl.zeros_like(c0)
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        # One wide multiply gives both halves of the 64-bit product.
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _horner(x, COEFFICIENTS: tl.constexpr, LENGTH: tl.constexpr):
    total = x * COEFFICIENTS[LENGTH - 1]
    for k in tl.static_range(LENGTH - 2):
        total = (total + COEFFICIENTS[LENGTH - 2 - k]) * x
    return total + COEFFICIENTS[0]


@triton.jit
def box_muller(radius_bits, angle_bits):
    """The pair (z0, z1) of float32 tiles; the order of operations is that of ``sampling._box_muller``."""
    # x + 1 wraps for the largest x only, and then stands for 2^32.
    u = (radius_bits + 1).to(tl.float32)
    u = tl.where(radius_bits == 0xFFFFFFFF, 4294967296.0, u) * 2.3283064365386963e-10
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    exponent = exponent.to(tl.float32)
    square = f * f
    log = _horner(f, _LOG1P, 8) * (f * square)
    log = log + exponent * _LN2_LOW
    log = log - square * 0.5
    log = log + f
    log = log + exponent * _LN2_HIGH
    radius = tl.sqrt_rn(log * -2.0)

    # The quarter counts modulo 4, so 2^32 wrapping to 0 is right; the rest fits a signed word.
    quarter = (angle_bits + 0x20000000) >> 30
    t = (angle_bits - (quarter << 30)).to(tl.int32, bitcast=True).to(tl.float32) * 9.313225746154785e-10
    square = t * t
    sine = _horner(square, _SIN, 4) * t * radius
    cosine = (_horner(square, _COS, 4) * square + 1.0) * radius
    odd = (quarter & 1) == 1
    # A sign bit flipped is a product with -1, in half the instructions.
    z0 = tl.where(odd, sine, cosine).to(tl.uint32, bitcast=True) ^ (((quarter + 1) & 2) << 30)
    z1 = tl.where(odd, cosine, sine).to(tl.uint32, bitcast=True) ^ ((quarter & 2) << 30)
    return z0.to(tl.float32, bitcast=True), z1.to(tl.float32, bitcast=True)


@triton.jit
def normal_tile(row, start, BLOCK_C: tl.constexpr, element_row, element_col, head, key, HAS_QUADS: tl.constexpr):
    """float32 tile of one head's samples at ``row`` and ``BLOCK_C`` columns from ``start``, a multiple of 4.

    The element is row element_row + column element_col. With ``HAS_QUADS`` (element_col = 1, element_row % 4 = 0)
    one Philox block gives four neighbors of the tile; otherwise each element computes its own and keeps a quarter.
    """
    BLOCK_R: tl.constexpr = row.shape[0]
    if HAS_QUADS:
        quad = start // 4 + tl.arange(0, BLOCK_C // 4)
        block = (row.to(tl.int64) * (element_row // 4))[:, None] + quad.to(tl.int64)[None, :]
        x0, x1, x2, x3 = philox4x32(block, head, key)
        z0, z1 = box_muller(x0, x1)
        z2, z3 = box_muller(x2, x3)
        tile = tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))
        tile = tl.reshape(tile, (BLOCK_R, BLOCK_C))
    else:
        col = start + tl.arange(0, BLOCK_C)
        element = row.to(tl.int64)[:, None] * element_row + col.to(tl.int64)[None, :] * element_col
        x0, x1, x2, x3 = philox4x32(element >> 2, head, key)
        second = (element & 2) == 2
        z0, z1 = box_muller(tl.where(second, x2, x0), tl.where(second, x3, x1))
        tile = tl.where((element & 1) == 1, z1, z0)
    return tile
