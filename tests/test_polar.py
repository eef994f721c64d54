"""The polar iteration in plain torch against the SVD in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conditioned_kernels._triton.polar import CUBIC_STEPS, polar, torch_product
from conditioned_kernels.coefficients import POLAR_INTERVAL, POLAR_SCHEDULE

TOLERANCE = 8 * torch.finfo(torch.float32).eps


def with_kappa(rows: int, cols: int, kappa: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix (1, rows, cols) with log-spaced singular values, and its polar factor, fp64."""
    generator = torch.Generator().manual_seed(rows + cols)
    u = torch.linalg.qr(torch.randn(1, rows, rows, dtype=torch.float64, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(1, cols, rows, dtype=torch.float64, generator=generator))[0]
    values = torch.tensor(np.geomspace(1, 1 / kappa, rows))
    return (u * values) @ v.mT, u @ v.mT


def test_schedule_keeps_its_bound() -> None:
    x = np.geomspace(*POLAR_INTERVAL, 200_001)
    for a, b, c in POLAR_SCHEDULE:
        x = x * (a + x**2 * (b + c * x**2))
    assert np.abs(x - 1).max() < 9.2e-4
    assert np.abs(x - 1).max() > 9.1e-4  # equioscillation: the bound is attained


def test_each_quintic_is_the_minimax_of_its_interval() -> None:
    low, high = POLAR_INTERVAL
    for a, b, c in POLAR_SCHEDULE:
        x = np.linspace(low, high, 400_001)
        error = x * (a + x**2 * (b + c * x**2)) - 1
        peak = np.abs(error).max()
        ends = [error[0], *error[1:-1][np.diff(np.sign(np.diff(error))) != 0], error[-1]]
        # Chebyshev: four alternating extrema of equal size, for three coefficients.
        assert len(ends) == 4
        assert np.allclose(np.abs(ends), peak, rtol=1e-6)
        assert np.all(np.diff(np.sign(ends)) != 0)
        low, high = 1 - peak, 1 + peak


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 9), (2, 64, 64), (1, 300, 500)])
def test_gaussian_matrices_reach_the_tolerance(shape: tuple[int, int, int]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    q, residual = polar(w, TOLERANCE)
    u, _, v = torch.linalg.svd(w.double(), full_matrices=False)
    assert residual.amax() <= TOLERANCE
    assert (q - u @ v).abs().amax() < 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("kappa", [1.0, 1e2, 1e3, 1e5])
def test_forward_error_is_about_u_kappa(kappa: float, scale: float) -> None:
    w, exact = with_kappa(64, 100, kappa)
    q, residual = polar((w * scale).float(), TOLERANCE)
    assert residual.item() <= TOLERANCE
    assert (q - exact).abs().amax() <= 1e-6 + 2.0**-24 * kappa


def test_fp64_works_in_fp64() -> None:
    w, exact = with_kappa(32, 40, 1e3)
    q, residual = polar(w, 8 * 2.0**-52)
    assert residual.item() <= 8 * 2.0**-52
    assert (q - exact).abs().amax() < 1e-12


def test_singular_and_non_finite_matrices_are_told_by_their_residual() -> None:
    w = torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(2))
    w[1] = 0
    w[2, 5] = w[2, 4]
    w[3, 0, 0] = torch.inf
    alone, _ = polar(w[:1], TOLERANCE)
    q, residual = polar(w, TOLERANCE)
    good = residual <= TOLERANCE
    assert good.tolist() == [True, False, False, False]
    # More cubic steps than it needs move a converged matrix by rounding only.
    assert (q[0] - alone[0]).abs().amax() < 1e-6
    assert torch.equal(q[1], torch.zeros(6, 9))


def test_products_claimed_symmetric_are_symmetric() -> None:
    claimed: list[float] = []

    def watched(a, b, d=None, *, alpha=1.0, beta=0.0, gamma=0.0, symmetric=False):
        result = torch_product(a, b, d, alpha=alpha, beta=beta, gamma=gamma)
        if symmetric:
            claimed.append(float((result - result.mT).abs().amax() / result.abs().amax()))
        return result

    polar(with_kappa(24, 30, 50.0)[0], 1e-14, watched)
    assert len(claimed) > CUBIC_STEPS
    assert max(claimed) < 1e-12
