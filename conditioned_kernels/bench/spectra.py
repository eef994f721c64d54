"""Matrices with a known spectrum, as heads (tall: rows x cols)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gaussian(heads: int, rows: int, cols: int, device: torch.device) -> Tensor:
    """Independent normal elements: what every random initialization starts from."""
    return _normal(heads, rows, cols).to(device)


def clustered(heads: int, rows: int, cols: int, device: torch.device) -> Tensor:
    """Singular values evenly spaced in [0.9, 1], as close to conditioned as training leaves them."""
    return _with_values(heads, rows, cols, torch.linspace(0.9, 1, cols), device)


def ill_conditioned(heads: int, rows: int, cols: int, device: torch.device) -> Tensor:
    """Singular values in geometric progression from 1 to 1e-3: kappa is 1e3."""
    return _with_values(heads, rows, cols, torch.logspace(0, -3, cols), device)


def rank_deficient(heads: int, rows: int, cols: int, device: torch.device) -> Tensor:
    """Gaussian with the last column equal to the first: kappa is infinite."""
    weights = gaussian(heads, rows, cols, device)
    weights[..., -1] = weights[..., 0]
    return weights


SPECTRA: dict[str, Callable[[int, int, int, torch.device], Tensor]] = {
    "gaussian": gaussian,
    "clustered": clustered,
    "kappa 1e3": ill_conditioned,
    "rank deficient": rank_deficient,
}


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _with_values(heads: int, rows: int, cols: int, values: Tensor, device: torch.device) -> Tensor:
    """Three matrices with these singular values, repeated over the heads: making each would outlast the measuring."""
    made = min(heads, 3)
    left, right = (torch.linalg.qr(_normal(made, n, cols).double())[0] for n in (rows, cols))
    weights = (left * values.double()) @ right.mT
    return weights.float()[torch.arange(heads) % made].contiguous().to(device)
