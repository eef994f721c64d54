"""The two ends of J's spectrum from products with J and J^T alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ..sampling import philox_normal, stream_key
from .linear import LinearHead


def golub_kahan(head: LinearHead, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Golub-Kahan-Lanczos with full reorthogonalization on J^T, from a fixed Gaussian start.

    Returns the Ritz values' ends and the residual norm of the smallest: (sigma_max, sigma_min, residual), each (b,).
    """
    shape = head.output.shape
    n = shape[-1] * shape[-2]
    steps = min(steps, n)
    key = stream_key(0, "jacobian", "lanczos")
    start = philox_normal(key, range(1), range(n), device=head.x.device).double()
    u = (start / torch.linalg.vector_norm(start)).view(1, n).expand(shape[0], n)
    left = u.new_zeros(shape[0], steps, n)
    bidiagonal = u.new_zeros(shape[0], steps, steps)
    right: Tensor | None = None
    beta = u.new_zeros(shape[0])
    previous: Tensor | None = None
    tiny = torch.finfo(torch.float64).tiny
    for j in range(steps):
        left[:, j] = u
        w = _vjp(head, u)
        if previous is not None:
            w = w - beta[:, None] * previous
        if right is None:
            right = w.new_zeros(shape[0], steps, w.shape[-1])
        for _ in range(2):
            w = w - (right[:, :j].mT @ (right[:, :j] @ w[..., None]))[..., 0]
        alpha = torch.linalg.vector_norm(w, dim=-1)
        w = w / alpha.clamp_min(tiny)[:, None]
        right[:, j], previous = w, w
        bidiagonal[:, j, j] = alpha
        u = _jvp(head, w) - alpha[:, None] * u
        for _ in range(2):
            u = u - (left[:, : j + 1].mT @ (left[:, : j + 1] @ u[..., None]))[..., 0]
        beta = torch.linalg.vector_norm(u, dim=-1)
        u = u / beta.clamp_min(tiny)[:, None]
        if j + 1 < steps:
            bidiagonal[:, j + 1, j] = beta
    if steps == n:
        beta = torch.zeros_like(beta)
    vectors, values, _ = torch.linalg.svd(bidiagonal)
    # J J^T (left^T y) - theta^2 (left^T y) = alpha_last beta_last y_last u_next
    residual = (bidiagonal[:, -1, -1] * beta * vectors[:, -1, -1]).abs()
    return values[:, 0], values[:, -1], residual


def _vjp(head: LinearHead, u: Tensor) -> Tensor:
    return torch.cat([each.flatten(1) for each in head.vjp(u.view(head.output.shape))], -1)


def _jvp(head: LinearHead, w: Tensor) -> Tensor:
    sizes = [(head.q.shape[-1], head.x.shape[-1]), (head.k.shape[-1], head.memory.shape[-1])]
    sizes.append((head.v.shape[-1], head.values.shape[-1]))
    parts = w.split([rows * cols for rows, cols in sizes], -1)
    return head.jvp(*(part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True))).flatten(1)
