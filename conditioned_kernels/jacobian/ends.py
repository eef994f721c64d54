"""Both ends of J's spectrum: exact by dense algebra, or bracketed by products with J alone.

Every function takes a batch of compressed heads and returns :class:`Ends`. What Gram matrices cannot resolve (they hold
sigma_min only to sqrt(eps) sigma_max) goes to the SVD of J; the choice is by the bracket that was reached.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._status import Status
from .dense import gram, matrix, value_blocks
from .krylov import gaussian, largest, shortfall, smallest, steps_for
from .linear import LinearHead

SMALL_ROWS = 128
"""Up to so many rows, the SVD of J is as fast as anything else, and the most accurate."""

_EPS = torch.finfo(torch.float64).eps
_TOP_STEPS, _BOTTOM_STEPS = 400, 200


@dataclass(frozen=True, eq=False)
class Size:
    """Of the whole Jacobian: rows and columns before any compression, and the spare directions of value space."""

    rows: int
    cols: int
    spare: int

    @property
    def count(self) -> int:
        """How many singular values it has."""
        return min(self.rows, self.cols)

    @property
    def noise(self) -> float:
        """What times sigma_max a computed singular value is noise at or below."""
        return max(self.rows, self.cols) * _EPS


@dataclass(eq=False)
class Ends:
    """Per head, float64 (b,): singular values, their brackets, and a status.

    Attributes
    ----------
    smallest : the smallest singular value that is not numerically zero; NaN where it was not looked for.
    """

    top: Tensor
    top_low: Tensor
    top_high: Tensor
    bottom: Tensor
    bottom_low: Tensor
    bottom_high: Tensor
    smallest: Tensor
    status: Tensor

    def met(self, rtol: float) -> Tensor:
        """Whether the bracket of kappa is within 1 + rtol."""
        return (self.bottom_low > 0) & (self.top_high * self.bottom_high <= (1 + rtol) * self.top_low * self.bottom_low)

    def judged(self, rtol: float) -> Ends:
        """Status set by the bracket, where it is not rank deficient."""
        met = torch.where(self.met(rtol), int(Status.CONVERGED), int(Status.TOLERANCE_NOT_MET)).to(torch.int8)
        self.status = torch.where(self.status == int(Status.RANK_DEFICIENT), self.status, met)
        return self


def exact(head: LinearHead, size: Size, rtol: float) -> Ends:
    """Dense: the SVD of a small J, otherwise products and factorizations of J J^T; where a status is not converged, the
    SVD of J (:func:`by_svd`) may still be finer."""
    rows = head.output.shape[-2] * head.output.shape[-1]
    small = rows <= SMALL_ROWS or size.rows > size.cols
    return by_svd(head, size, rtol) if small else _by_gram(head, size, rtol).judged(rtol)


def by_svd(head: LinearHead, size: Size, rtol: float) -> Ends:
    """All singular values: of the compressed J, and those of P X once more per spare direction of value space."""
    values = torch.linalg.svdvals(matrix(head))
    rows = head.output.shape[-2] * head.output.shape[-1]
    values = torch.nn.functional.pad(values, (0, rows - values.shape[-1]))
    if size.spare:
        context = torch.linalg.svdvals(head.context())
        context = torch.nn.functional.pad(context, (0, head.output.shape[-2] - context.shape[-1]))
        values = torch.cat((values, context.repeat(1, size.spare)), -1).sort(-1, descending=True).values
    values = values[:, : size.count]
    delta = size.noise * values[:, :1]
    kept = values > delta
    # A J of zeros has no such value.
    smallest = torch.where(kept, values, torch.inf).amin(-1).nan_to_num(posinf=torch.nan)
    top, bottom, delta = values[:, 0], values[:, -1], delta[:, 0]
    deficient = torch.where(kept.all(-1), int(Status.CONVERGED), int(Status.RANK_DEFICIENT)).to(torch.int8)
    low = (bottom - delta).clamp_min(0)
    return Ends(top, top - delta, top + delta, bottom, low, bottom + delta, smallest, deficient).judged(rtol)


def _by_gram(head: LinearHead, size: Size, rtol: float) -> Ends:
    product = gram(head)
    n = product.shape[-1]
    top = largest(head.gram_product, len(product), n, product.device, steps=_TOP_STEPS, tolerance=1e-12)
    # |computed J J^T - J J^T| <= terms u trace, and so are the errors of the Cholesky factors below, as n u trace.
    terms = 2 * (head.q.shape[-1] + head.x.shape[-1] + head.v.shape[-1] + head.p.shape[-1]) + n
    delta = terms * _EPS / 2 * product.diagonal(dim1=-2, dim2=-1).sum(-1)
    margin = rtol / 4
    ceiling = top.value * (1 + margin)
    proven = _positive(-product, ceiling)
    top_high = torch.where(proven, ceiling + delta, _top_eigenvalue(product, proven) + 2 * delta)
    if size.spare:
        bottom, low, high = _context_end(head)
    else:
        bottom, low, high = _lowest(head, product, delta, margin)
    return _ends(size, top.value, top.value * (1 - n * _EPS), top_high, bottom, low, high)


def _lowest(head: LinearHead, product: Tensor, delta: Tensor, margin: float) -> tuple[Tensor, Tensor, Tensor]:
    """sigma_min and its bracket, by Lanczos on the inverse and one factorization that proves it; low 0 if it cannot."""
    b, n = product.shape[:2]
    _, low, _ = _context_end(head)
    shift = (0.98 * low.square() - delta).clamp_min(0)
    factor, info = torch.linalg.cholesky_ex(_shifted(product, -shift))
    usable = info == 0
    factor = torch.where(usable[:, None, None], factor, torch.eye(n, dtype=factor.dtype, device=factor.device))

    def inverse(u: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(factor, u[..., None], upper=False)
        return torch.linalg.solve_triangular(factor.mT, half, upper=True)[..., 0]

    ritz = largest(inverse, b, n, product.device, steps=_BOTTOM_STEPS, tolerance=1e-10)
    # The quotient by J itself has none of the rounding of J J^T; by minimality it is an upper bound. What the vector
    # still has of the largest eigenvectors would count by their eigenvalues; one more step of the inverse removes it.
    value = _quotient(head, torch.nn.functional.normalize(inverse(ritz.vector), dim=-1))
    floor = value * (1 - margin)
    proven = usable & _positive(product, -floor)
    low = torch.maximum(torch.where(proven, floor - delta, 0.0).clamp_min(0).sqrt(), low)
    return value.sqrt(), torch.minimum(low, value.sqrt()), value.sqrt() * (1 + n * _EPS)


def bracket(head: LinearHead, size: Size, rtol: float, max_steps: int) -> Ends:
    """Matrix free: Lanczos for the top; P X, and Lanczos for the bottom where P X does not settle it."""
    rows = head.output.shape[-2] * head.output.shape[-1]
    b, device = len(head.output), head.output.device
    bottom, low, high = _context_end(head)
    # The bottom is exact where it can be proven, so nearly all of the tolerance may go to the top.
    steps = max(1, min(max_steps, steps_for(rows, 1 - (1 + 0.98 * rtol) ** -2)))
    top = largest(head.gram_product, b, rows, device, steps=steps)
    lost = shortfall(rows, top.steps)
    ceiling = torch.where(
        top.complete, top.value * (1 + rows * _EPS), top.value / (1 - lost) if lost < 1 else torch.inf
    )
    if size.rows > size.cols:
        bottom = high = _column_quotient(head, size, max_steps).sqrt()
        low = torch.zeros_like(high)
    elif not size.spare:
        value = _bottom_quotient(head, max_steps)
        bottom = high = value.sqrt()
        low = torch.minimum(low, high)
    return _ends(size, top.value, top.value, ceiling, bottom, low, high).judged(rtol)


def _bottom_quotient(head: LinearHead, max_steps: int) -> Tensor:
    """An upper bound of lambda_min, usually sharp: Davidson, preconditioned by the blocks of value coordinates."""
    head = head.rotated()
    b, (size, tokens) = len(head.output), head.blocks
    factor = _block_factors(head)

    def precondition(u: Tensor) -> Tensor:
        return torch.cholesky_solve(u.view(b, size, tokens, 1), factor).view(b, -1)

    start = precondition(gaussian(size * tokens, head.x.device).expand(b, -1))
    vector = smallest(head.gram_product, precondition, start, steps=max_steps, tolerance=1e-4)
    return _quotient(head, vector)


def _column_quotient(head: LinearHead, size: Size, max_steps: int) -> Tensor:
    """An upper bound of lambda_min(J^T J) for a J with more rows than columns, whose J J^T has null vectors at once.

    J is block diagonal, and the blocks of the spare directions of value space have the columns of P X. Where columns
    have been compressed away, they are zero.
    """
    b, device = len(head.output), head.x.device
    shapes = [part.shape[1:] for part in head.vjp(head.turned(head.output))]
    sizes = [shape.numel() for shape in shapes]
    if sum(sizes) + size.spare * head.values.shape[-1] < size.cols:
        return torch.zeros(b, dtype=head.p.dtype, device=device)

    def split(u: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, shape) for part, shape in zip(u.split(sizes, -1), shapes, strict=True)]

    def product(u: Tensor) -> Tensor:
        return torch.cat([part.flatten(1) for part in head.vjp(head.jvp(*split(u)))], -1)

    vector = smallest(product, lambda r: r, gaussian(sum(sizes), device).expand(b, -1), steps=max_steps, tolerance=1e-4)
    value = head.jvp(*split(vector)).square().sum((-2, -1)) / vector.square().sum(-1)
    if size.spare:
        context = torch.linalg.svdvals(head.context())
        value = torch.minimum(value, context[:, -1].square())
    return value


def _block_factors(head: LinearHead) -> Tensor:
    """Cholesky factors of the blocks, lifted by rounding so that a singular one has a factor too."""
    blocks = value_blocks(head)
    lift = blocks.diagonal(dim1=-2, dim2=-1).sum(-1).amax(-1)[:, None, None] * 1e-13
    blocks.diagonal(dim1=-2, dim2=-1).add_(lift)
    factor, info = torch.linalg.cholesky_ex(blocks)
    return torch.where(
        (info == 0)[..., None, None], factor, torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    )


def _context_end(head: LinearHead) -> tuple[Tensor, Tensor, Tensor]:
    """A lower bound of sigma_min(J), with a bracket of its own: that of its W_V part, or 0 where that is not wide.

    The W_V part is I (x) (P X), over channels P (x) X.
    """
    parts = (head.p, head.values) if head.channels else (head.context(),)
    bottom = low = high = head.p.new_ones(len(head.p))
    for part in parts:
        values = torch.linalg.svdvals(part)
        if part.shape[-1] < part.shape[-2]:
            values = torch.zeros_like(values)
        delta = max(part.shape[-2:]) * _EPS * values[:, 0]
        last = values[:, -1]
        bottom, low, high = bottom * last, low * (last - delta).clamp_min(0), high * (last + delta)
    return bottom, low, high


def _quotient(head: LinearHead, u: Tensor) -> Tensor:
    """|J^T u|^2 / |u|^2 for u (b, rows)."""
    parts = head.vjp(u.view(-1, *head.blocks).mT)
    return sum((part.square().sum((-2, -1)) for part in parts), torch.zeros(())) / u.square().sum(-1)


def _shifted(product: Tensor, shift: Tensor) -> Tensor:
    shifted = product.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
    return shifted


def _positive(product: Tensor, shift: Tensor) -> Tensor:
    """Whether product + shift I is positive definite, by its Cholesky factorization."""
    return torch.linalg.cholesky_ex(_shifted(product, shift)).info == 0


def _top_eigenvalue(product: Tensor, skip: Tensor) -> Tensor:
    """The largest eigenvalue of the matrices that are not skipped; 0 for the others."""
    high = torch.zeros(len(product), dtype=product.dtype, device=product.device)
    rest = (~skip).nonzero().flatten()
    if rest.numel():
        high[rest] = torch.linalg.eigvalsh(product[rest])[:, -1]
    return high


def _ends(
    size: Size, top: Tensor, top_low: Tensor, top_high: Tensor, bottom: Tensor, low: Tensor, high: Tensor
) -> Ends:
    """From eigenvalues of J J^T for the top and singular values of J for the bottom."""
    top, top_low, top_high = (each.clamp_min(0).sqrt() for each in (top, top_low, top_high))
    zero = bottom <= size.noise * top
    status = torch.where(zero, int(Status.RANK_DEFICIENT), int(Status.CONVERGED)).to(torch.int8)
    return Ends(top, top_low, top_high, bottom, low, high, torch.where(zero, torch.nan, bottom), status)
