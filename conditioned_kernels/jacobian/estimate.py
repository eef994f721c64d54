"""kappa of the attention Jacobian."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _validate
from .._status import Status, sentences
from .ends import SMALL_ROWS, Ends, Size, bracket, by_svd, exact
from .heads import AttentionHeads, checked
from .linear import LinearHead, linearize

METHODS = ("auto", "exact", "lanczos")

EXACT_ROWS = 2048
"""Most rows of J, after its exact reduction, for which "auto" is exact."""

DENSE_ROWS = 8192
"""Most such rows for which "exact" is allowed: J J^T alone is 512 MiB there."""


@dataclass(frozen=True, eq=False)
class JacobianEstimate:
    """kappa(J) of each head, with intervals; float64 tensors of the batch shape on the problem's device.

    Attributes
    ----------
    kappa : sigma_max / sigma_min over the min(tokens * value_dim, parameters) singular values; inf where J is
        numerically rank deficient, NaN where a number of the head is not finite.
    low, high : bracket of kappa.
    effective : kappa over the singular values that are not numerically zero; kappa itself where J has full rank. NaN
        where method "lanczos" finds J rank deficient, and for a J of zeros.
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
    heads: AttentionHeads, *, method: str = "auto", rtol: float | None = None, max_steps: int = 100
) -> JacobianEstimate:
    """kappa(J) of every head of a batch, J = [dA/dW_Q, dA/dW_K, dA/dW_V], with a bracket.

    J has tokens * value_dim rows and one column per element of the head's W_Q, W_K and W_V (for grouped heads: of the
    query head's own W_Q and of its group's W_K and W_V). kappa is sigma_max / sigma_min over its min(rows, columns)
    singular values.

    Parameters
    ----------
    heads : the problem, in any floating dtype; worked in float64.
    method : "exact", "lanczos", or "auto": exact up to 2048 rows of J after its reduction (below).
    rtol : wanted ``high / low - 1``; 1e-3 for "exact" and 0.1 for "lanczos" unless given.
    max_steps : of each Krylov process of "lanczos".

    Returns
    -------
    JacobianEstimate of the batch shape. Status, in words by ``failures()``: converged; tolerance not met (the bracket
    holds all the same); rank deficient (sigma_min <= max(rows, columns) * 2.2e-16 * sigma_max: kappa = inf, and
    ``effective`` is kappa over the other singular values); non-finite (kappa = NaN, for that head alone): a number of
    the head, or the squared norm of its J in float64, is not finite.

    Raises
    ------
    ValueError
        for arguments outside the above, and for "exact" with more than 8192 rows after reduction.

    Notes
    -----
    *Reduction, exact.* J acts on a weight only through X W^T, so X^T may be replaced by the R of its QR factorization:
    min(tokens, in_features) columns per row of a weight. W_Q and W_K change outputs only along differences of values;
    along the other directions of value space, which exist when value_dim >= keys, J is I (x) (P X). They are split off,
    and sigma_min(J) = sigma_min(P X) there.
    *Exact.* Up to 128 reduced rows the SVD of J. Above, J J^T in closed form; sigma_max by Lanczos and sigma_min by
    Lanczos on the inverse, each evaluated by J itself, and each proven by a Cholesky factorization of the shifted
    matrix that exists only if no eigenvalue lies beyond; the SVD of J where this leaves more than ``rtol``. The value
    itself is good to about 2.2e-16 kappa, and 1e-8 in any case up to kappa = 1e5. Brackets cover the rounding of
    everything after the attention probabilities and values have been computed.
    *Lanczos.* sigma_max lies between the Ritz value and a bound that fails with probability 1e-9 over the start vector
    (Kuczynski and Wozniakowski 1992). sigma_min is exact where the reduction says so. Elsewhere it is bracketed by
    sigma_min(P X) and the Rayleigh quotient of a preconditioned Davidson vector: the value is usually good to 1e-3, but
    cannot be proven, and where it is not met, ``kappa`` is the bracket's lower end.
    *Cost.* reduced rows n = tokens * min(value_dim, keys - 1). Exact: about 2 n^3 / 3 to n^3 flops and 3 matrices of
    n^2 numbers per head. Lanczos: O(tokens keys head_dim + tokens^2 head_dim) per step and head, at
    most 32 MiB of bases.
    *Source.* Saratchandran and Lucey, ICLR 2026, section 3; the closed form and the reduction are this package's.
    """
    heads = checked(heads)
    _validate.choice(method, "method", METHODS)
    max_steps = _validate.count(max_steps, "max_steps")
    if method == "auto":
        method = "exact" if _rows(heads) <= EXACT_ROWS else "lanczos"
    if method == "exact" and _rows(heads) > DENSE_ROWS:
        raise ValueError(
            f"method='exact' forms a matrix of tokens * value_dim rows, at most {DENSE_ROWS}, got {_rows(heads)}; use "
            "method='lanczos', or fewer tokens"
        )
    rtol = _validate.positive((1e-3 if method == "exact" else 0.1) if rtol is None else rtol, "rtol")
    size = Size(heads.rows, heads.cols, heads.w_v.shape[-2] - heads.spread)
    shape, device = heads.shape, heads.x.device
    number = shape.numel()
    with torch.inference_mode(False), torch.no_grad():
        values = torch.full((number, len(_STACK)), torch.nan, dtype=torch.float64, device=device)
        status = torch.full((number,), int(Status.NON_FINITE), dtype=torch.int8, device=device)
        for index in torch.arange(number, device=device).split(_chunk(heads, method)) if number else ():
            head = linearize(heads.select(index))
            finite = _finite(head)
            if not bool(finite.all()):
                # LAPACK raises for a whole batch on one NaN.
                index = index[finite]
                if not len(index):
                    continue
                head = linearize(heads.select(index))
            head = head.compressed()
            ends = exact(head, size, rtol) if method == "exact" else bracket(head, size, rtol, max_steps)
            values[index], status[index] = _values(ends), ends.status
            coarse = index[ends.status != int(Status.CONVERGED)]
            if method == "exact" and _rows(heads) > SMALL_ROWS and len(coarse):
                for one in coarse.split(1):
                    ends = by_svd(linearize(heads.select(one)).compressed(), size, rtol)
                    values[one], status[one] = _values(ends), ends.status
    named = dict(zip(_STACK, values.view(*shape, len(_STACK)).unbind(-1), strict=True))
    return JacobianEstimate(**named, status=status.view(shape), method=method)


def _rows(heads: AttentionHeads) -> int:
    """Rows of J without the directions of value space along which values cannot differ."""
    return heads.tokens * heads.spread


def _chunk(heads: AttentionHeads, method: str) -> int:
    """Heads worked on at once, so that the bases of Lanczos, or J, stay below 32 MiB."""
    rows = _rows(heads)
    if method == "lanczos":
        return max(1, (32 << 20) // (8 * rows * 200))
    return max(1, (32 << 20) // (8 * rows * 3 * rows))


def _finite(head: LinearHead) -> Tensor:
    parts = (head.x, head.memory, head.values, head.q, head.k, head.v, head.p, head.t)
    finite = torch.stack([part.isfinite().flatten(1).all(1) for part in parts]).all(0)
    # At least the largest entry of J, squared: what overflows there is nothing that LAPACK takes.
    x, memory, values, q, k, v, _, t = (part.abs().flatten(1).amax(1) for part in parts)
    entry = t * v * torch.maximum(k * x, q * memory) * head.p.shape[-1] * head.q.shape[-1] + values
    return finite & (entry.square() * head.output[0].numel() * head.x.shape[-1]).isfinite()


def _values(ends: Ends) -> Tensor:
    """The numbers of an estimate in the order of its fields."""
    deficient = ends.status == int(Status.RANK_DEFICIENT)
    high = torch.where((ends.bottom_low > 0) & ~deficient, ends.top_high / ends.bottom_low, torch.inf)
    return torch.stack(
        (
            torch.where(deficient, torch.inf, ends.top / ends.bottom).clamp_min(1.0),
            # 0 / 0 for a J of zeros, of which nothing is known.
            (ends.top_low / ends.bottom_high).nan_to_num(1.0, posinf=torch.inf).clamp_min(1.0),
            high,
            (ends.top / ends.smallest).clamp_min(1.0),
            ends.top,
            ends.top_low,
            ends.top_high,
            ends.bottom,
            ends.bottom_low,
            ends.bottom_high,
        ),
        -1,
    )
