"""Matrices with known singular values, and one set of values under many strides."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
STRIDES = ("contiguous", "transposed", "sliced", "offset", "negative", "expanded")


def wide(dtype: torch.dtype) -> torch.dtype:
    """float64, or complex128 for complex types: the oracle's dtype."""
    return torch.complex128 if dtype.is_complex else torch.float64


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal matrices from a private generator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=wide(dtype)).to(dtype)


def from_spectrum(sigma: Tensor, rows: int, cols: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """(..., rows, cols) with the singular values ``sigma`` (..., min(rows, cols)), rounded once to ``dtype``."""
    short = min(rows, cols)
    batch = sigma.shape[:-1]
    left = torch.linalg.qr(gaussian(*batch, rows, short, seed=seed, dtype=wide(dtype)))[0]
    right = torch.linalg.qr(gaussian(*batch, cols, short, seed=seed + 1, dtype=wide(dtype)))[0]
    return ((left * sigma.double()[..., None, :]) @ right.mH).to(dtype)


def geometric(n: int, kappa: float) -> Tensor:
    """From 1 down to 1/kappa in equal ratios."""
    return torch.logspace(0, -torch.log10(torch.tensor(kappa)).item(), n, dtype=torch.float64)


def one_small(n: int, kappa: float) -> Tensor:
    """All 1 but the last."""
    return torch.cat((torch.ones(n - 1), torch.tensor([1 / kappa]))).double()


def one_large(n: int, kappa: float) -> Tensor:
    """All 1/kappa but the first."""
    return torch.cat((torch.ones(1), torch.full((n - 1,), 1 / kappa))).double()


def clustered(n: int, kappa: float) -> Tensor:
    """Two clusters of width 1e-6, at 1 and at 1/kappa."""
    spread = 1 + 1e-6 * torch.linspace(0, 1, n, dtype=torch.float64)
    return torch.where(torch.arange(n) < (n + 1) // 2, spread, spread / kappa)


SPECTRA = (geometric, one_small, one_large, clustered)


def restrided(values: Tensor, how: str) -> Tensor:
    """A tensor equal to ``values`` under other strides."""
    if how == "transposed":
        return values.mT.contiguous().mT
    if how == "sliced":
        return torch.stack((values, torch.full_like(values, torch.nan)), -1).flatten(-2)[..., ::2]
    if how == "offset":
        padded = torch.full((values.numel() + 3,), torch.nan, dtype=values.dtype)
        padded[3:] = values.reshape(-1)
        return padded[3:].view(values.shape)
    if how == "negative" and values.is_complex():
        return values.conj().resolve_conj().conj()  # a lazy conjugate, torch's nearest thing to a negative stride
    if how == "expanded" and values.ndim > 2 and values.shape[0] == 1:
        return values[0].expand(1, *values.shape[1:])
    return values


def svd(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle: thin SVD in float64."""
    return torch.linalg.svd(values.to(wide(values.dtype)), full_matrices=False)


def polar_oracle(values: Tensor) -> Tensor:
    """U V^H in float64."""
    u, _, vh = svd(values)
    return u @ vh


def qr_oracle(values: Tensor) -> Tensor:
    """Q of Householder QR with a positive diagonal of R, in float64; a wide matrix through its adjoint."""
    if values.shape[-2] < values.shape[-1]:
        return qr_oracle(values.mH).mH
    q, r = torch.linalg.qr(values.to(wide(values.dtype)))
    return q * r.diagonal(dim1=-2, dim2=-1).sgn()[..., None, :]


def residual(q: Tensor) -> float:
    """max |Q^H Q - I| over a batch in float64, along the short axis; 0 without elements."""
    q = q.to(wide(q.dtype))
    q = q if q.shape[-2] >= q.shape[-1] else q.mH
    gram = q.mH @ q - torch.eye(q.shape[-1], dtype=q.dtype)
    return float(gram.abs().max()) if gram.numel() else 0.0


def kappa(values: Tensor) -> Tensor:
    """sigma_max / sigma_min by the float64 SVD."""
    s = torch.linalg.svdvals(values.to(wide(values.dtype)))
    return s[..., 0] / s[..., -1]
