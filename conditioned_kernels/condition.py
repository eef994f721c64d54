"""Condition numbers with a certified bracket."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from . import _ops, _torch, _validate
from ._backend import BACKENDS, choose_backend
from ._status import Status, sentences
from .orthogonalize import _short_first


@dataclass(frozen=True)
class ConditionEstimate:
    """kappa_2 = sigma_max / sigma_min of each matrix of a batch, with intervals that contain the true values.

    All are float64 tensors of the batch shape on the input's device, except ``status``.

    Attributes
    ----------
    kappa : best estimate; inf for a numerically singular matrix, NaN for a non-finite one.
    low, high : bracket of kappa: low <= kappa(W) <= high.
    sigma_max, sigma_min : best estimates, in the units of the weights.
    sigma_max_low, sigma_max_high, sigma_min_low, sigma_min_high : their brackets.
    status : int8 :class:`~conditioned_kernels.Status` codes.
    """

    kappa: Tensor
    low: Tensor
    high: Tensor
    sigma_max: Tensor
    sigma_max_low: Tensor
    sigma_max_high: Tensor
    sigma_min: Tensor
    sigma_min_low: Tensor
    sigma_min_high: Tensor
    status: Tensor

    @property
    def nonfinite(self) -> Tensor:
        """True where the matrix has a NaN or infinite element."""
        return self.status == Status.NON_FINITE

    @property
    def zero_matrix(self) -> Tensor:
        """True where every element is zero."""
        return self.status == Status.ZERO_MATRIX

    @property
    def rank_deficient(self) -> Tensor:
        """True where sigma_min <= max(rows, cols) * 2.2e-16 * sigma_max, the zero matrix included."""
        return (self.status == Status.RANK_DEFICIENT) | self.zero_matrix

    def failures(self) -> list[str]:
        """One sentence per matrix whose status is not "converged"; reads the device."""
        return sentences(self.status)


def condition_number(weights: Tensor, *, rtol: float = 1e-3, backend: str = "auto") -> ConditionEstimate:
    """kappa_2(W) = sigma_max / sigma_min of every matrix of a batch, as a certified bracket.

    With G the smaller Gram matrix of W, the eigenvalues of the computed G are those of the exact one
    within delta (Weyl's inequality and the rounding error of inner products), so::

        sqrt((lambda_max - delta) / (lambda_min + delta)) <= kappa <= sqrt((lambda_max + delta) / (lambda_min - delta))

    Matrices whose bracket is wider than ``1 + rtol`` are redone with G in float64, and those still wider by
    the SVD in float64, unless a vector x with a tiny ||W x|| / ||x|| proves them singular first. So kappa = 1e5 in
    float32 weights is bracketed as tightly as kappa = 2.

    Parameters
    ----------
    weights : (..., rows, cols), any real or complex floating dtype and strides; leading dimensions are batch.
    rtol : wanted ``high / low - 1``, a positive number.
    backend : "auto", "torch", "triton" or "extension"; see :func:`explain_backend`.

    Returns
    -------
    ConditionEstimate of shape (...). The weights are taken as stored: a float32 matrix that is singular but
    for rounding has a kappa near 1e7, and is reported so.

    Raises
    ------
    TypeError, ValueError
        for arguments outside the above. Non-finite, zero and singular matrices do not raise: they have a status.
    RuntimeError
        for a named backend that cannot be used.

    Notes
    -----
    *Accuracy.* The bracket contains the exact kappa of the stored matrix, and so ``kappa`` is good to the width of
    the bracket; on the torch backend it is good to about 1e-6 in float32 whatever ``rtol``. kappa is infinite where
    sigma_min <= max(rows, cols) * eps(float64) * sigma_max.
    *Cost.* For rows >= cols: 2 rows cols^2 flops and one read of W, plus an eigenvalue solve of size cols.
    *Source.* Higham, Accuracy and Stability of Numerical Algorithms (2002), section 3.1; Weyl's inequality.
    """
    weights = _validate.matrices(weights, "weights").detach()
    rtol = _validate.positive(rtol, "rtol")
    _validate.choice(backend, "backend", BACKENDS)
    values, status = _condition_number(weights, rtol, backend)
    return ConditionEstimate(*(*values.unbind(-1), status))


def _run(weights: Tensor, rtol: float, backend: str) -> tuple[Tensor, Tensor]:
    """All of the estimate's tensors but the status, stacked in the fields' order as (..., 9), and the status."""
    place = choose_backend(backend, weights.device, weights.dtype, min(weights.shape[-2:]))
    batch, device = weights.shape[:-2], weights.device
    if weights.numel() == 0:
        # Without elements there are no singular values; max over nothing / min over nothing is taken as 1.
        values = torch.ones(*batch, 9, dtype=torch.float64, device=device)
        return values, torch.zeros(batch, dtype=torch.int8, device=device)
    with torch.no_grad():
        matrices = _short_first(weights.to(place.device))
        values, status = _torch.spectrum(matrices, rtol, _ops.small_matrix(place.name, matrices))
        return _stacked(values, status).view(*batch, 9).to(device), status.view(batch).to(device)


def _stacked(values: Tensor, status: Tensor) -> Tensor:
    """kappa with its bracket in front of the six singular values, (b, 9)."""
    top, top_low, top_high, bottom, bottom_low, bottom_high = values.unbind(0)
    singular = (status == Status.RANK_DEFICIENT) | (status == Status.ZERO_MATRIX)
    kappa = torch.where(singular, torch.inf, top / bottom).clamp_min(1.0)
    low = torch.where(status == Status.ZERO_MATRIX, torch.inf, top_low / bottom_high).clamp_min(1.0)
    # A sigma_min that may be zero leaves kappa without an upper end; NaN stays NaN.
    high = torch.where(bottom_low <= 0, torch.inf, top_high / bottom_low)
    return torch.stack((kappa, low, high, *values.unbind(0)), -1)


def condition_of_gram(gram: Tensor, terms: int, *, rtol: float = 1e-3) -> ConditionEstimate:
    """:func:`condition_number` of matrices W whose Gram matrices W W^T were summed elsewhere.

    Parameters
    ----------
    gram : (b, r, r), float64, of wide or square W.
    terms : how often at most a product was rounded on its way into a sum.
    rtol : as in :func:`condition_number`.

    Notes
    -----
    *Accuracy.* There is no W to go back to, so beyond kappa of about 1e6 the bracket is wider than ``1 + rtol`` and
    the status says so; a sigma_min below 1e-8 sigma_max counts as zero.
    """
    with torch.no_grad():
        place = choose_backend("auto", gram.device, gram.dtype, gram.shape[-1])
        gram = gram.to(place.device)
        values, status = _torch.spectrum_of_gram(gram, terms, rtol, _ops.small_matrix(place.name, gram))
        return ConditionEstimate(*(*_stacked(values, status).unbind(-1), status))


def _fake(weights: Tensor, rtol: float, backend: str) -> tuple[Tensor, Tensor]:
    batch = weights.shape[:-2]
    values = torch.empty(*batch, 9, dtype=torch.float64, device=weights.device)
    return values, torch.empty(batch, dtype=torch.int8, device=weights.device)


_condition_number = _ops.define(
    "condition_number(Tensor weights, float rtol, str backend) -> (Tensor values, Tensor status)", _run, _fake
)

_FIELDS = tuple(field.name for field in fields(ConditionEstimate))
# So that it can leave torch.vmap and torch.compile.
register_pytree_node(
    ConditionEstimate,
    lambda estimate: ([getattr(estimate, name) for name in _FIELDS], None),
    lambda tensors, _: ConditionEstimate(*tensors),
)
