"""kappa of the attention Jacobian."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _validate
from .._status import Status, sentences
from ..condition import condition_number
from .dense import matrix
from .heads import AttentionHeads
from .lanczos import golub_kahan
from .linear import LinearHead, linearize

METHODS = ("auto", "exact", "lanczos")

EXACT_ROWS = 2048
"""Most rows of J for which "auto" is exact."""

DENSE_ROWS = 8192
"""Most rows of J for which "exact" is allowed: J J^T alone is 512 MiB there."""


@dataclass(frozen=True, eq=False)
class JacobianEstimate:
    """kappa(J) of each head, with intervals; float64 tensors of the batch shape on the problem's device.

    Attributes
    ----------
    kappa : sigma_max / sigma_min over the min(tokens * value_dim, parameters) singular values; inf where J is
        numerically rank deficient, NaN where a number of the head is not finite.
    low, high : bracket of kappa.
    effective : kappa over the singular values that are not numerically zero; kappa itself where J has full rank. NaN
        where method "lanczos" finds J rank deficient.
    sigma_max, sigma_min : best estimates, with brackets ``*_low`` and ``*_high``.
    status : int8 :class:`~conditioned_kernels.Status` codes.
    method : "exact" or "lanczos".
    """

    kappa: Tensor
    low: Tensor
    high: Tensor
    effective: Tensor
    sigma_max: Tensor
    sigma_max_low: Tensor
    sigma_max_high: Tensor
    sigma_min: Tensor
    sigma_min_low: Tensor
    sigma_min_high: Tensor
    status: Tensor
    method: str

    def failures(self) -> list[str]:
        """One sentence per head whose status is not "converged"; reads the device."""
        return sentences(self.status)


_STACK = tuple(name for name in JacobianEstimate.__annotations__ if name not in ("status", "method"))


def jacobian_condition(
    heads: AttentionHeads, *, method: str = "auto", rtol: float | None = None, max_steps: int = 300
) -> JacobianEstimate:
    """kappa(J) of every head of a batch, J = [dA/dW_Q, dA/dW_K, dA/dW_V].

    Parameters
    ----------
    heads : the problem, in any floating dtype; worked in float64.
    method : "exact", "lanczos", or "auto": exact up to 2048 rows of J.
    rtol : wanted ``high / low - 1``; 1e-3 for "exact" and 0.1 for "lanczos" unless given.
    max_steps : of the Lanczos process.
    """
    _validate.choice(method, "method", METHODS)
    if method == "auto":
        method = "exact" if heads.rows <= EXACT_ROWS else "lanczos"
    if method == "exact" and heads.rows > DENSE_ROWS:
        raise ValueError(
            f"method='exact' forms a matrix of tokens * value_dim rows, at most {DENSE_ROWS}, got {heads.rows}; use "
            "method='lanczos', or fewer tokens"
        )
    rtol = _validate.positive((1e-3 if method == "exact" else 0.1) if rtol is None else rtol, "rtol")
    shape, device = heads.shape, heads.x.device
    number = shape.numel()
    values = torch.full((number, len(_STACK)), torch.nan, dtype=torch.float64, device=device)
    status = torch.full((number,), int(Status.NON_FINITE), dtype=torch.int8, device=device)
    with torch.inference_mode(False), torch.no_grad():
        for index in torch.arange(number, device=device).split(_chunk(heads, method)):
            head = linearize(heads.select(index))
            finite = _finite(head)
            if not bool(finite.all()):
                index = index[finite]
                head = linearize(heads.select(index))
            if len(index):
                work = _exact if method == "exact" else _lanczos
                values[index], status[index] = work(head, rtol, max_steps, heads.cols)
    named = dict(zip(_STACK, values.view(*shape, len(_STACK)).unbind(-1), strict=True))
    return JacobianEstimate(**named, status=status.view(shape), method=method)


def _chunk(heads: AttentionHeads, method: str) -> int:
    """Heads worked on at once."""
    size = 8 * heads.rows**2 if method == "exact" else 8 * heads.rows * 800
    return max(1, (32 << 20) // size)


def _finite(head: LinearHead) -> Tensor:
    return torch.stack([each.isfinite().flatten(1).all(1) for each in (head.x, head.q, head.k, head.v, head.p)]).all(0)


def _exact(head: LinearHead, rtol: float, max_steps: int, cols: int) -> tuple[Tensor, Tensor]:
    head = head.compressed()
    rows = head.output.shape[-1] * head.output.shape[-2]
    b = len(head.output)
    out = torch.empty(b, len(_STACK), dtype=torch.float64, device=head.x.device)
    status = torch.empty(b, dtype=torch.int8, device=head.x.device)
    full = matrix(head)
    count = min(rows, cols)
    values = torch.linalg.svdvals(full)[:, :count]
    if values.shape[-1] < count:
        values = torch.nn.functional.pad(values, (0, count - values.shape[-1]))
    delta = max(rows, full.shape[-1]) * torch.finfo(torch.float64).eps * values[:, :1]
    kept = values > delta
    smallest = torch.where(kept, values, torch.inf).amin(-1)
    top, bottom, delta = values[:, 0], values[:, -1], delta[:, 0]
    deficient = ~kept.all(-1)
    kappa = torch.where(deficient, torch.inf, top / bottom)
    floor = (bottom - delta).clamp_min(0)
    out = torch.stack(
        (
            kappa,
            (top - delta) / (bottom + delta),
            torch.where(floor > 0, (top + delta) / floor, torch.inf),
            top / smallest,
            top,
            top - delta,
            top + delta,
            bottom,
            floor,
            bottom + delta,
        ),
        -1,
    )
    status = torch.where(deficient, int(Status.RANK_DEFICIENT), int(Status.CONVERGED)).to(torch.int8)
    return out, status


def _lanczos(head: LinearHead, rtol: float, max_steps: int, cols: int) -> tuple[Tensor, Tensor]:
    head = head.compressed()
    top, bottom, _ = golub_kahan(head, max_steps)
    context = condition_number(head.p @ head.values)
    floor = torch.where(context.rank_deficient, 0.0, context.sigma_min_low)
    if head.values.shape[-1] < head.values.shape[-2]:
        floor = torch.zeros_like(floor)
    ceiling = top * 1.05
    out = torch.stack(
        (
            top / bottom,
            top / bottom,
            torch.where(floor > 0, ceiling / floor, torch.inf),
            top / bottom,
            top,
            top,
            ceiling,
            bottom,
            floor,
            bottom,
        ),
        -1,
    )
    met = out[:, 2] <= out[:, 1] * (1 + rtol)
    return out, torch.where(met, int(Status.CONVERGED), int(Status.TOLERANCE_NOT_MET)).to(torch.int8)
