"""Normal samples that depend on (seed, name, role, head, element) and on nothing else.

Stream version 1
----------------
*Key.* The 64-bit Philox key is the first eight bytes (little endian) of
``SHA-256("conditioned_kernels/1" NUL seed NUL name NUL role)``, all in UTF-8 and the seed in decimal.

*Counter.* Element ``e`` (row-major index inside a head of ``rows x cols``) of head ``h`` is output
``e % 4`` of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
at counter ``(b mod 2^32, b div 2^32, h, 0)`` with ``b = e div 4``.

*Normals.* The four 32-bit outputs ``x0..x3`` give two Box-Muller pairs, ``(x0, x1)`` and ``(x2, x3)``::

    u = (x0 + 1) * 2^-32  rounded once to float32                (0, 1]
    r = sqrt(-2 log u)                                           log from LOG1P
    q = (x1 + 2^29) div 2^30,  t = (x1 - q * 2^30) * 2^-30       nearest quarter turn and the rest
    z0, z1 = r cos(pi/2 (q + t)), r sin(pi/2 (q + t))            from SIN_QUARTER, COS_QUARTER

Every operation is a float32 multiply, add or correctly rounded square root in the order written in
:func:`_box_muller`, with no fused multiply-add, so every implementation agrees to the last bit.

*Accuracy.* log within 2 ulp, sine and cosine within 2 ulp, so a sample is within about 5 ulp of
the exact transform of its (u, q, t). *Reach.* ``|z| <= sqrt(64 ln 2) = 6.66``; a normal exceeds that once
in 3.6e10 draws. *Cost.* about 40 integer and 40 float32 operations per sample; no memory is read.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from . import _ops
from ._backend import choose_backend, extension_refusal
from .coefficients import COS_QUARTER, LN2_HIGH, LN2_LOW, LOG1P, SIN_QUARTER, SQRT_HALF_BITS

STREAM_VERSION = 1

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_BLOCK = 1 << 17
"""Counters per block: measured fastest of 2^14 to 2^18 on two cores, and it caps the workspace at 20 MiB."""


def stream_key(seed: int, name: str, role: str = "") -> int:
    """64-bit Philox key of one projection; see the module docstring for the equation."""
    text = "\0".join((f"conditioned_kernels/{STREAM_VERSION}", str(int(seed)), name, role))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")


def resolve_seed(seed: int, generator: torch.Generator | None) -> int:
    """``seed``, or one 63-bit draw from ``generator`` if there is one."""
    if generator is None:
        return seed
    return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words.

    Parameters
    ----------
    counter : four int64 tensors of one shape, values in [0, 2^32).
    key : the 64-bit key; its low word is the first key word.

    Returns
    -------
    Four int64 tensors with the 32-bit outputs.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, key >> 32 & _MASK
    for _ in range(_ROUNDS):
        # int64 multiplication wraps modulo 2^64, so both 32-bit halves of the product are right.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = _high(p1).bitwise_xor_(c1).bitwise_xor_(k0), _high(p0).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = p1.bitwise_and_(_MASK), p0.bitwise_and_(_MASK)
        k0, k1 = k0 + _WEYL[0] & _MASK, k1 + _WEYL[1] & _MASK
    return c0, c1, c2, c3


def philox_normal(
    key: int, heads: range, elements: range, *, device: torch.device | str = "cpu", backend: str = "auto"
) -> Tensor:
    """Standard normal samples of stream version 1.

    Parameters
    ----------
    key : from :func:`stream_key`.
    heads : which heads; step 1.
    elements : which row-major elements of each head; step 1. Any part of a head gives the same
        numbers as that part of the whole, which is what lets a rank sample only its own slice.
    device : where the samples are made. The values do not depend on it.
    backend : "auto", "torch", "triton" or "extension". Nor on this: all agree to the last bit.

    Returns
    -------
    float32 tensor of shape ``(len(heads), len(elements))``, contiguous.
    """
    if heads.step != 1 or elements.step != 1 or heads.start < 0 or elements.start < 0:
        raise ValueError(f"heads and elements must be ranges from 0 with step 1, got {heads} and {elements}")
    place = choose_backend(backend, torch.device(device))
    # The Triton kernels draw what they use; samples that are stored come from the extension where there is one.
    stored = place.name == "triton" and not extension_refusal(place.device, torch.float32, 1)
    if place.name == "extension" or stored:
        samples = torch.empty(len(heads), len(elements), dtype=torch.float32, device=place.device)
        _ops.philox_normal_(samples, key, heads.start, elements.start)
        return samples.to(device)
    first, last = elements.start // 4, -(-elements.stop // 4)
    per_head = max(last - first, 0)
    total = per_head * len(heads)
    out = torch.empty(total, 4, dtype=torch.float32, device=device)
    for start in range(0, total, _BLOCK):
        flat = torch.arange(start, min(start + _BLOCK, total), dtype=torch.int64, device=device)
        head = flat.div(per_head, rounding_mode="floor")
        block = flat.sub_(head * per_head).add_(first)
        words = philox4x32((block & _MASK, block >> 32, head.add_(heads.start), torch.zeros_like(block)), key)
        target = out[start : start + _BLOCK]
        _box_muller(words[0], words[1], target[:, 0:2])
        _box_muller(words[2], words[3], target[:, 2:4])
    samples = out.view(len(heads), per_head * 4)
    skip = elements.start - 4 * first
    return samples[:, skip : skip + len(elements)].contiguous()


def _high(product: Tensor) -> Tensor:
    return (product >> 32).bitwise_and_(_MASK)


def _horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        total.add_(coefficient).mul_(x)
    return total.add_(coefficients[0])


def _box_muller(radius_bits: Tensor, angle_bits: Tensor, out: Tensor) -> None:
    """Write the pair (z0, z1) of stream version 1 to the two columns of ``out``."""
    # The product with 2^-32 is exact, so the one rounding is the conversion to float32.
    bits = (radius_bits + 1).to(torch.float32).mul_(2.0**-32).view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32).sub_(1.0)
    exponent = exponent.to(torch.float32)
    square = f * f
    log = _horner(f, LOG1P).mul_(f * square)
    log.add_(exponent * LN2_LOW).sub_(square.mul_(0.5)).add_(f).add_(exponent.mul_(LN2_HIGH))
    # torch's float32 sqrt is MKL's on x86, which misses the correctly rounded value by an ulp for 15% of arguments.
    # float64's, rounded once more, is right: no float32 has its root within 2^-51 of a rounding boundary.
    radius = log.mul_(-2.0).double().sqrt_().float()

    quarter = (angle_bits + (1 << 29)) >> 30
    t = (angle_bits - (quarter << 30)).to(torch.float32).mul_(2.0**-30)
    square = t * t
    sine = _horner(square, SIN_QUARTER).mul_(t).mul_(radius)
    cosine = _horner(square, COS_QUARTER).mul_(square).add_(1.0).mul_(radius)
    # Rotation by q quarter turns: (c, s), (-s, c), (-c, -s), (s, -c).
    odd = (quarter & 1).to(torch.bool)
    torch.where(odd, sine, cosine, out=out[:, 0])
    torch.where(odd, cosine, sine, out=out[:, 1])
    out[:, 0].mul_(1.0 - (quarter + 1 & 2).to(torch.float32))
    out[:, 1].mul_(1.0 - (quarter & 2).to(torch.float32))
