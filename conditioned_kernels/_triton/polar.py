"""Polar factor of whole matrices, any size, by matrix products alone: Gram Newton-Schulz with a minimax schedule.

This file is the algorithm, in torch operations on one given ``product``; with :func:`torch_product` it is the readable
statement and the test's subject on a CPU, and with :func:`conditioned_kernels._triton.product.product` the GPU path.
Batches are (b, r, c), r <= c. Triton is not imported here.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..coefficients import POLAR_SCHEDULE

STEPS_PER_RESTART = 2
"""Quintics applied to one Gram matrix before it is formed anew. Its small eigenvalues carry an error of u lambda_max,
which each quintic multiplies by up to 4^2; two keep it below the rounding of the products. Two cost 3 r^2 c + 5 r^3
multiply-adds before symmetry, against 6 r^2 c + 2 r^3 for a restart after each."""

CUBIC_STEPS = 6
ROUNDS = 2
"""Runs of the schedule: one for kappa up to 1e3, a second reaches 1e6. What is left then goes to the SVD."""


class Product(Protocol):
    """alpha A B^T + beta D + gamma I, see :func:`torch_product`."""

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        d: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        gamma: float = 0.0,
        symmetric: bool = False,
    ) -> Tensor: ...


def torch_product(
    a: Tensor,
    b: Tensor,
    d: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 0.0,
    symmetric: bool = False,
) -> Tensor:
    """alpha A B^T + beta D + gamma I for batches (b, rows, inner) and (b, cols, inner); all of it if symmetric, too."""
    out = torch.bmm(a, b.mT).mul_(alpha) if d is None else torch.baddbmm(d, a, b.mT, beta=beta, alpha=alpha)
    if gamma:
        out.diagonal(dim1=-2, dim2=-1).add_(gamma)
    return out


def polar(w: Tensor, tolerance: float, product: Product = torch_product) -> tuple[Tensor, Tensor]:
    """U V^T of each W = U S V^T, with max |Q Q^T - I| as measured: (b, r, c) and (b,).

    Parameters
    ----------
    w : (b, r, c), r <= c, fp32 or fp64.
    tolerance : the iteration ends when every residual is at or below it, or when its steps are used up.
    product : how matrices are multiplied.

    Notes
    -----
    *Equation.* X <- X (a + b X^T X + c (X^T X)^2) over POLAR_SCHEDULE, written for G = X X^T as G <- P G P and
    F <- P F with P = a I + b G + c G^2, then X <- F X; and X <- (3 I - X X^T) X / 2 to the end.
    *Accuracy.* Residual 8 u of the products for kappa < 1e3, usually to 1e6; a singular matrix does not converge and
    its residual says so. Forward error about u kappa. *Cost.* 3 restarts and about 3 cubic steps of 3 r^2 c
    multiply-adds, a third of them half saved by symmetry, and 15 r^3, all of them half saved. One host
    read per cubic step.
    *Source.* Amsel et al., The Polar Express (2025); Higham, Functions of Matrices (2008), section 8.3.
    """
    x = _scaled(w)
    for _ in range(ROUNDS):
        # A second run begins where the first ended; either way the schedule's interval ends at 1.
        x = _schedule(x / _norm_bound(product(x, x, symmetric=True), product), product)
        for _ in range(CUBIC_STEPS):
            gram = product(x, x, symmetric=True)
            residual = _residual(gram)
            if bool((residual <= tolerance).all()):
                return x, residual
            step = gram.mul_(-0.5)
            step.diagonal(dim1=-2, dim2=-1).add_(1.5)
            x = product(step, x.mT)
    return x, _residual(product(x, x, symmetric=True))


def _schedule(x: Tensor, product: Product) -> Tensor:
    for start in range(0, len(POLAR_SCHEDULE), STEPS_PER_RESTART):
        gram = product(x, x, symmetric=True)
        factor = gram  # Replaced in the first step.
        steps = POLAR_SCHEDULE[start : start + STEPS_PER_RESTART]
        for index, (a, b, c) in enumerate(steps):
            # All of these are polynomials of one matrix, so they commute and every product is symmetric.
            p = product(gram, gram, gram, alpha=c, beta=b, gamma=a, symmetric=True)
            factor = product(p, factor, symmetric=True) if index else p
            if index + 1 < len(steps):
                gram = product(product(p, gram, symmetric=True), p, symmetric=True)
        x = product(factor, x.mT)
    return x


def _scaled(w: Tensor) -> Tensor:
    """Each matrix with its largest element in [1/2, 1), so that no square overflows; zero and non-finite ones stay."""
    largest = w.abs().amax((-2, -1), keepdim=True)
    ok = largest.isfinite() & (largest > 0)
    # Powers of two, so that scaling does not round; two steps, since 2^149 is no float32.
    exponent = torch.frexp(torch.where(ok, largest, 1))[1]
    one, half = torch.ones_like(largest), exponent // 2
    return w * torch.ldexp(one, -half) * torch.ldexp(one, half - exponent)


def _norm_bound(gram: Tensor, product: Product) -> Tensor:
    """(b, 1, 1): 1.001 ||G^2||_F^(1/4) >= sigma_max, at most r^(1/8) too large; 1 for zero and non-finite G."""
    square = torch.linalg.matrix_norm(product(gram, gram, symmetric=True)).pow(0.25).mul_(1.001)
    return torch.where(square.isfinite() & (square > 0), square, 1)[:, None, None]


def _residual(gram: Tensor) -> Tensor:
    error = gram.clone()
    error.diagonal(dim1=-2, dim2=-1).sub_(1)
    return error.abs().amax((-2, -1))
