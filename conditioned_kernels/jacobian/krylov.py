"""The largest eigenvalue of a batch of symmetric positive semidefinite maps, by the Lanczos process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sampling import philox_normal, stream_key

FAILURE = 1e-9
"""Probability, over the start vector, that the upper end of a bracket by :func:`shortfall` is too low."""

_CHECK = 8
"""Steps between two looks at the Ritz value, which costs an eigenvalue solve of the tridiagonal matrix."""


@dataclass(frozen=True, eq=False)
class Ritz:
    """The outcome, one per map.

    Attributes
    ----------
    value : (b,), the largest Ritz value; the largest eigenvalue is at least that, up to rounding.
    vector : (b, n), its unit vector.
    steps : dimension of the Krylov space.
    complete : the Krylov space is invariant or all of R^n, so the value is not a bound but the eigenvalue.
    """

    value: Tensor
    vector: Tensor
    steps: int
    complete: Tensor


def shortfall(n: int, steps: int) -> float:
    """The e with (lambda_max - value) <= e lambda_max after ``steps``, except with probability :data:`FAILURE`.

    For a start uniform on the sphere, the probability of more than e is at most 1.648 sqrt(n) exp(-sqrt(e) (2 steps -
    1)), whatever the spectrum (Kuczynski and Wozniakowski, SIAM J. Matrix Anal. Appl. 13, 1992). The start
    here is a fixed pseudorandom Gaussian, independent of the map.
    """
    if steps >= n:
        return 0.0
    return min(1.0, (math.log(1.648 * math.sqrt(n) / FAILURE) / (2 * steps - 1)) ** 2)


def steps_for(n: int, allowed: float) -> int:
    """The fewest steps with ``shortfall(n, steps) <= allowed``."""
    return min(n, math.ceil((math.log(1.648 * math.sqrt(n) / FAILURE) / math.sqrt(allowed) + 1) / 2))


def gaussian(n: int, device: torch.device) -> Tensor:
    """The fixed start vector (1, n)."""
    return philox_normal(stream_key(0, "jacobian", "lanczos"), range(1), range(n), device=device).double().view(1, n)


def largest(
    product: Callable[[Tensor], Tensor], b: int, n: int, device: torch.device, *, steps: int, tolerance: float = 0.0
) -> Ritz:
    """Lanczos with full reorthogonalization from a fixed Gaussian start, in float64.

    Parameters
    ----------
    product : (b, n) -> (b, n), one map per row.
    steps : the most to take.
    tolerance : stop when every residual norm^2 is below ``tolerance * value^2``; the value then is that good if the gap
        to the next eigenvalue is of the value's size.
    """
    steps = min(steps, n)
    start = gaussian(n, device)
    q = (start / torch.linalg.vector_norm(start)).expand(b, n)
    basis = q.new_empty(b, steps, n)
    diagonal, off = q.new_zeros(b, steps), q.new_zeros(b, steps)
    taken = steps
    scale = q.new_zeros(b)
    for j in range(steps):
        basis[:, j] = q
        w = product(q)
        diagonal[:, j] = (w * q).sum(-1)
        # The two terms of the recurrence first; then one pass over the whole basis is enough.
        w = w - diagonal[:, j, None] * q
        if j:
            w = w - off[:, j - 1, None] * basis[:, j - 1]
        known = basis[:, : j + 1]
        w = torch.baddbmm(w[..., None], known.mT, known @ w[..., None], alpha=-1)[..., 0]
        off[:, j] = torch.linalg.vector_norm(w, dim=-1)
        scale = torch.maximum(scale, diagonal[:, j].abs() + off[:, j])
        # An invariant space has been found for this map: continue with zeros, which change nothing.
        dead = off[:, j] <= 1e-14 * scale
        off[:, j] = torch.where(dead, 0.0, off[:, j])
        q = torch.where(dead, 0.0, 1.0)[:, None] * w / torch.where(dead, 1.0, off[:, j])[:, None]
        if tolerance and (j + 1) % _CHECK == 0:
            value, vector = _ritz(diagonal[:, : j + 1], off[:, :j])
            small = (off[:, j] * vector[:, -1]).square() <= tolerance * value.square()
            if bool(small.all()):
                taken = j + 1
                break
    value, vector = _ritz(diagonal[:, :taken], off[:, : taken - 1])
    vector = (vector[:, None] @ basis[:, :taken])[:, 0]
    complete = (off[:, :taken] == 0).any(-1) | (taken >= n)
    return Ritz(value, vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True), taken, complete)


def smallest(
    product: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    steps: int,
    tolerance: float,
) -> Tensor:
    """A unit vector (b, n) whose Rayleigh quotient bounds the smallest eigenvalue of each map from above.

    Generalized Davidson: the residual of the best vector, preconditioned, joins the basis at each step. With the
    preconditioned map's condition number c it takes about sqrt(c) steps, with or without a small eigenvalue below.

    Parameters
    ----------
    product, precondition : (b, n) -> (b, n), the maps and approximate inverses.
    start : (b, n).
    steps : the most to take.
    tolerance : stop when the quotients of all maps fall by less than this, relatively, over eight steps.
    """
    b, n = start.shape
    steps = min(steps, n)
    basis, image = start.new_zeros(b, steps, n), start.new_zeros(b, steps, n)
    projected = start.new_zeros(b, steps, steps)
    before, vector, new = None, start, start
    for j in range(steps):
        known = basis[:, :j]
        for _ in range(2):
            new = new - (known.mT @ (known @ new[..., None]))[..., 0]
            new = torch.nn.functional.normalize(new, dim=-1, eps=1e-300)
        basis[:, j], image[:, j] = new, product(new)
        column = (basis[:, : j + 1] @ image[:, j, :, None])[..., 0]
        projected[:, : j + 1, j] = projected[:, j, : j + 1] = column
        values, vectors = torch.linalg.eigh(projected[:, : j + 1, : j + 1])
        value, weights = values[:, 0], vectors[:, None, :, 0]
        vector = (weights @ basis[:, : j + 1])[:, 0]
        new = precondition((weights @ image[:, : j + 1])[:, 0] - value[:, None] * vector)
        if j % _CHECK == _CHECK - 1:
            if before is not None and bool((before - value <= tolerance * before.abs()).all()):
                break
            before = value
    return vector


def _ritz(diagonal: Tensor, off: Tensor) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue of each tridiagonal matrix, and its vector."""
    matrix = torch.diag_embed(diagonal) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    values, vectors = torch.linalg.eigh(matrix)
    return values[:, -1], vectors[:, :, -1]
