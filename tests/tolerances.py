"""Every tolerance of the test suite, derived from eps and the shape; no test has a number of its own."""

from __future__ import annotations

import torch

EPS64 = torch.finfo(torch.float64).eps
HALF = (torch.float16, torch.bfloat16)


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def work_eps(dtype: torch.dtype) -> float:
    """eps of the dtype that does the work: float32 for half types, the dtype itself otherwise."""
    return eps(torch.float32 if dtype in HALF else dtype)


def cast(dtype: torch.dtype) -> float:
    """Relative change by the one final cast: half types round once, by eps/2; the others do not."""
    return eps(dtype) / 2 if dtype in HALF else 0.0


def orthogonality(dtype: torch.dtype) -> float:
    """max |Q Q^H - I|: the promised multiple of eps, the certificate's own rounding of 2 eps, and the cast.

    The sum of |q_ik q_jk| over k is at most 1, so a relative change of both factors adds at most 2 cast + cast^2.
    """
    return (10 if work_eps(dtype) == eps(torch.float32) else 66) * work_eps(dtype) + 2 * cast(dtype) + cast(dtype) ** 2


def sigma(dtype: torch.dtype, short: int) -> float:
    """|sigma - 1| of a matrix whose residual is at most :func:`orthogonality`: ||E||_2 <= short * max |E|, halved."""
    return short * orthogonality(dtype) / 2


def polar(dtype: torch.dtype, kappa: float, short: int) -> float:
    """max |Q - U V^H|: as far off as the residual allows, plus the oracle's own error eps64 kappa."""
    return orthogonality(dtype) + 4 * EPS64 * kappa * short


def qr(dtype: torch.dtype, kappa: float, short: int) -> float:
    """max |Q - Q_exact| of QR: first-order perturbation, eps kappa times a factor of the triangular part."""
    return work_eps(dtype) * (8 + 8 * kappa * short) + cast(dtype)


def svd64(rows: int, cols: int) -> float:
    """|error| / sigma_max of singular values computed in float64 (LAPACK's bound with p(m, n) = max(m, n))."""
    return max(rows, cols, 1) * EPS64


def kappa64(rows: int, cols: int, kappa: float) -> float:
    """Relative error of kappa from the float64 SVD."""
    return svd64(rows, cols) * (kappa + 1)


def sampling(standard_error: float) -> float:
    """Five standard errors: the data are fixed by the seed, so this never fails by chance twice."""
    return 5 * standard_error
