"""The algorithms in plain torch: the CPU path, the fallback, and the readable statement.

Inside this file a batch is ``(b, r, c)`` with ``r <= c``: the short axis first, as one attention head
lies in an ``nn.Linear`` weight. Its Gram matrix is ``G = W W^H`` (r x r), and a tall input is a
transposed view. u is the unit roundoff of the dtype that does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ._status import Status

CHUNK_BYTES = 64 << 20
"""Workspace cap per batch chunk, in bytes of the working copy."""

LONG = 1 << 12
"""Columns of a plain product: with more, its rounding alone uses up the tolerance of an orthogonal factor."""

NEWTON_STEPS = 5
"""Coupled Newton-Schulz steps in the working precision; with the last one in fp64 they take
||I - r G / trace|| from 0.75 (Gaussian, r/c = 1/4) to 1e-11."""

SCOUTS = 8
"""Matrices of a large batch that :func:`spectrum` looks at first."""

GRAM_BLOCK = 64
"""Columns per partial product in :func:`gram_blocked`; sets its error bound."""

_WORK = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}
_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
"""The next working precision when a certificate fails."""


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that does the work for ``dtype``: float32 for the half types."""
    return _WORK[dtype]


@contextmanager
def full_precision() -> Iterator[None]:
    """fp32 matrix products in fp32, whatever the process-wide TF32 and bf16 switches say; restores them."""
    switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    changed = [switch for switch, value in zip(switches, before, strict=True) if value not in ("ieee", "none")]
    if not changed:
        yield
        return
    try:
        for switch in changed:
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            if switch in changed:
                switch.fp32_precision = value


def residual_tolerance(dtype: torch.dtype) -> float:
    """Largest |Q Q^H - I| element a result in ``dtype`` may have before its final cast, as the work dtype measures it.

    8 eps for float32, whose factors are finished in float64. 64 eps for float64, which has nothing to finish in:
    LAPACK's own Householder QR reaches 26 eps and its SVD 37 eps on Gaussian 4096 x 128.
    """
    work = _WORK[dtype]
    return (8 if work in _WIDE else 64) * torch.finfo(work).eps


def gram_plain(w: Tensor) -> Tensor:
    """W W^H in the work dtype; of many columns in blocks, whose products are added in fp64 so that the error stays."""
    work = _WORK[w.dtype]
    blocks = [w[..., start : start + LONG].to(work) for start in range(0, w.shape[-1], LONG)]
    if len(blocks) < 2:
        return w.to(work) @ w.to(work).mH
    total = torch.zeros(*w.shape[:-1], w.shape[-2], dtype=_WIDE.get(work, work), device=w.device)
    for block in blocks:
        total += block @ block.mH
    return total.to(work)


def product_plain(factor: Tensor, w: Tensor, out: Tensor) -> None:
    """out = F W, multiplied in the dtype of F; ``out`` may be ``w``."""
    if out is w or not out.dtype == w.dtype == factor.dtype:
        out.copy_(factor @ w.to(factor.dtype))
    else:
        torch.bmm(factor, w, out=out)


def orthogonality_residual(q: Tensor, gram: Callable[[Tensor], Tensor] = gram_plain) -> Tensor:
    """max |Q Q^H - I| of each (b, r, c) matrix, r <= c, as a real tensor (b,)."""
    product = gram(q)
    product.diagonal(dim1=-2, dim2=-1).sub_(1)
    return torch.linalg.vector_norm(product, torch.inf, dim=(-2, -1))


Extremes = Callable[[Tensor, Tensor, float], Tensor]


class SmallMatrix(NamedTuple):
    """The Gram matrix and the r x r stage, which are what backends differ in.

    factor : (gram, method) -> the F with F W orthonormal, NaN where it fails; see :func:`factor`.
    extremes : (gram, rounding, rtol) -> (6, b) float64 eigenvalue brackets; see :func:`extremes`. Their estimates need
        not be good where ``rounding`` puts ``rtol`` out of reach.
    follow : (gram, rounding, rtol, vectors or None) -> (the same brackets, vectors): the vectors of one call speed up
        the next, on a matrix that has changed little; None where the backend has no use for them.
    gram : w -> W W^H in w's work dtype, summed in any order.
    product : (factor, w, out): out = F W, multiplied in the dtype of F; ``out`` has the work dtype of w and may be w.
    gram_terms : (w, dtype) -> (W W^H, k) with products in ``dtype`` and the k of :func:`gram_rounding`; W W^H may be
        wider than that.
    """

    factor: Callable[[Tensor, str], Tensor]
    extremes: Extremes
    follow: Callable[[Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor | None]]
    gram: Callable[[Tensor], Tensor]
    product: Callable[[Tensor, Tensor, Tensor], None]
    gram_terms: Callable[[Tensor, torch.dtype], tuple[Tensor, int]]


def orthogonalize(weights: Tensor, method: str, out: Tensor, small: SmallMatrix) -> tuple[Tensor, Tensor]:
    """Write the orthogonal factor of each matrix of ``weights`` to ``out``; return (residual, status), each (b,).

    ``weights`` and ``out`` are (b, r, c) of one dtype, r <= c; ``out`` may be any strided view.
    """
    b, r, c = weights.shape
    work = _WORK[weights.dtype]
    residual = torch.zeros(b, dtype=work.to_real(), device=weights.device)
    status = torch.zeros(b, dtype=torch.int8, device=weights.device)
    step = max(1, CHUNK_BYTES // (r * c * work.itemsize))
    # A product with out= ignores the lazy conjugate that a tall complex matrix has here; copy_ honors it.
    direct = out.dtype == work and not out.is_conj()
    with full_precision():
        for start in range(0, b, step):
            part = slice(start, start + step)
            q = out[part] if direct else torch.empty(out[part].shape, dtype=work, device=out.device)
            residual[part], status[part] = _orthogonalize_chunk(weights[part], method, q, small)
            if not direct:
                # The certificate belongs to what the caller gets, so it is measured after the cast.
                residual[part] = orthogonality_residual(out[part].copy_(q), small.gram)
    return residual, status


def _orthogonalize_chunk(w: Tensor, method: str, q: Tensor, small: SmallMatrix) -> tuple[Tensor, Tensor]:
    """One Gram pass for all; what its certificate refuses goes, as a smaller batch, to the careful path."""
    small.product(small.factor(small.gram(w), method), w, q)
    residual = orthogonality_residual(q, small.gram)
    status = torch.zeros(w.shape[0], dtype=torch.int8, device=w.device)
    index = (~(residual <= residual_tolerance(w.dtype))).nonzero().flatten()
    if index.numel():
        some = _chosen(q, index)
        _, residual[index], status[index] = careful(_chosen(w, index), some, residual[index], method, small)
        if some is not q:
            q[index] = some
    return residual, status


def careful(
    w: Tensor, q: Tensor, residual: Tensor, method: str, small: SmallMatrix | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Second Cholesky pass, then the Gram route in fp64, then Householder QR or the SVD in fp64, written to ``q``.

    A second pass on the first Q completes QR (CholeskyQR2, stable while the first residual is below
    1/2), since R factors compose. It does not give the polar factor of ``w``, whose error would stay
    eps kappa^2, so "polar" goes straight to fp64. fp64 takes the place of shifted CholeskyQR3: it
    reaches kappa 1e7 in one pass, which is all that float32 input can hold.
    """
    small = small or SMALL_MATRIX
    work = _WORK[w.dtype]
    wide = _WIDE.get(work, work)

    def second(_: Tensor, q: Tensor, residual: Tensor) -> Tensor:
        factor = small.factor(small.gram(q), "qr")
        small.product(torch.where((residual < 0.5)[:, None, None], factor, torch.nan), q, q)
        return torch.zeros_like(residual, dtype=torch.int8)

    def in_double(w: Tensor, q: Tensor, residual: Tensor) -> Tensor:
        gram = small.gram_terms(w, wide)[0]
        # LAPACK's eigensolver raises for the whole batch on one NaN, so those are factored as zeros and refused.
        gram = torch.where(gram.isfinite().all(-1).all(-1)[:, None, None], gram, 0)
        small.product(_inverse_sqrt_eigh(gram) if method == "polar" else small.factor(gram, method), w, q)
        return torch.zeros_like(residual, dtype=torch.int8)

    def lapack(w: Tensor, q: Tensor, _: Tensor) -> Tensor:
        result, state = _LAPACK[method](_scaled(w.to(wide)))
        q.copy_(result)
        return state

    stages = [*([second] if method == "qr" else []), *([in_double] if wide != work else []), lapack]
    status = torch.full((w.shape[0],), int(Status.TOLERANCE_NOT_MET), dtype=torch.int8, device=w.device)
    for stage in stages:
        index = (status == Status.TOLERANCE_NOT_MET).nonzero().flatten()
        if not index.numel():
            break
        some = _chosen(q, index)
        state = stage(_chosen(w, index), some, residual[index])
        if some is not q:
            q[index] = some
        residual[index] = orthogonality_residual(some, small.gram)
        open_ = (state == Status.CONVERGED) & ~(residual[index] <= residual_tolerance(w.dtype))
        status[index] = torch.where(open_, int(Status.TOLERANCE_NOT_MET), state)
    return q, residual, status


def _inverse_sqrt_newton(gram: Tensor) -> Tensor:
    """G^(-1/2) by the coupled Newton-Schulz iteration (Higham, Functions of Matrices, eq. 6.35).

    Scaled by trace/r, it converges while lambda_max < 3 trace/r, which holds for every matrix whose
    kappa is small enough for a single pass; elsewhere it diverges and the certificate refuses.
    In fp32 it stops at about 2e-6 for r = 64, so a last uncoupled step in fp64 squares that error.
    """
    r = gram.shape[-1]
    mean = gram.diagonal(dim1=-2, dim2=-1).sum(-1).div(r)[:, None, None]
    y = gram / mean
    exact = y.to(_WIDE.get(gram.dtype, gram.dtype))
    identity = torch.eye(r, dtype=gram.dtype, device=gram.device).expand_as(gram)
    z = torch.baddbmm(identity, identity, y, beta=1.5, alpha=-0.5)
    y = y @ z
    for step in range(1, NEWTON_STEPS):
        update = torch.baddbmm(identity, z, y, beta=1.5, alpha=-0.5)
        z = update @ z
        if step + 1 < NEWTON_STEPS:
            y = y @ update
    z = z.to(exact.dtype)
    z = torch.baddbmm(z, z @ exact @ z, z, beta=1.5, alpha=-0.5).to(gram.dtype)
    return z.mul_(mean.rsqrt())


def _inverse_cholesky(gram: Tensor) -> Tensor:
    """L^-1 with G = L L^H, so that L^-1 W is the Q of Householder QR of W^H with a positive diagonal of R."""
    lower, info = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    return torch.where((info == 0)[:, None, None], inverse, torch.nan)


def _inverse_sqrt_eigh(gram: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    return (vectors * values.clamp_min(0).rsqrt()[..., None, :]) @ vectors.mH


def factor(gram: Tensor, method: str) -> Tensor:
    """G^(-1/2) for "polar", L^-1 for "qr", both (b, r, r)."""
    return _FACTORS[method](gram)


_FACTORS: dict[str, Callable[[Tensor], Tensor]] = {"polar": _inverse_sqrt_newton, "qr": _inverse_cholesky}


def _scaled(w: Tensor) -> Tensor:
    """Each matrix times the power of two that brings its largest element to [1/2, 1); zero and non-finite stay."""
    largest = w.abs().amax((-2, -1))
    exponent = torch.frexp(torch.where(largest.isfinite(), largest, 1))[1]
    # Two steps, because 2^1074 (the smallest fp64 denormal) is no float64 itself.
    half, one = exponent // 2, torch.ones_like(largest)
    return w * torch.ldexp(one, -half)[:, None, None] * torch.ldexp(one, half - exponent)[:, None, None]


def _lapack_status(w: Tensor, deficient: Tensor) -> Tensor:
    status = torch.zeros(w.shape[0], dtype=torch.int8, device=w.device)
    status[deficient] = int(Status.RANK_DEFICIENT)
    status[(w == 0).all(-1).all(-1)] = int(Status.ZERO_MATRIX)
    return status


def _polar_svd(w: Tensor) -> tuple[Tensor, Tensor]:
    """U V^H over the non-zero singular values: the partial isometry, 0 for the zero matrix."""
    finite = w.isfinite().all(-1).all(-1)
    u, s, vh = torch.linalg.svd(torch.where(finite[:, None, None], w, 0), full_matrices=False)
    keep = s > rank_threshold(w.shape[-1], s)
    status = _lapack_status(w, ~keep.all(-1))
    return _blank(finite, _polished((u * keep[:, None, :]) @ vh), status)


def _householder(w: Tensor) -> tuple[Tensor, Tensor]:
    """Householder QR of W^H with the sign fix; a rank-deficient matrix gets a completed orthonormal basis."""
    finite = w.isfinite().all(-1).all(-1)
    q, r = torch.linalg.qr(torch.where(finite[:, None, None], w, 0).mH)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    phase = torch.where(diagonal == 0, 1, diagonal.sgn())
    values = torch.linalg.svdvals(r)
    status = _lapack_status(w, (values <= rank_threshold(w.shape[-1], values)).any(-1))
    return _blank(finite, _polished((q * phase[:, None, :]).mH), status)


def _polished(q: Tensor) -> Tensor:
    """One Newton-Schulz step: LAPACK's residual grows with the size, past 8 eps in fp64 from about 20 rows on."""
    return torch.baddbmm(q, q @ q.mH, q, beta=1.5, alpha=-0.5)


def _blank(finite: Tensor, q: Tensor, status: Tensor) -> tuple[Tensor, Tensor]:
    status[~finite] = int(Status.NON_FINITE)
    return torch.where(finite[:, None, None], q, torch.nan), status


_LAPACK = {"polar": _polar_svd, "qr": _householder}


def rank_threshold(cols: int, singular_values: Tensor) -> Tensor:
    """max(rows, cols) * eps * sigma_max, (b, 1): at or below it a computed singular value is noise."""
    return cols * torch.finfo(singular_values.dtype).eps * singular_values[:, :1]


def gram_terms(w: Tensor, work: torch.dtype) -> tuple[Tensor, int]:
    """:func:`gram_blocked` in ``work``."""
    return gram_blocked(w.to(work))


def gram_blocked(w: Tensor) -> tuple[Tensor, int]:
    """W W^H, summed over column blocks, and the number of terms for :func:`gram_rounding`."""
    gram = w[:, :, :GRAM_BLOCK] @ w[:, :, :GRAM_BLOCK].mH
    for start in range(GRAM_BLOCK, w.shape[-1], GRAM_BLOCK):
        block = w[:, :, start : start + GRAM_BLOCK]
        gram.baddbmm_(block, block.mH)
    return gram, min(w.shape[-1], GRAM_BLOCK) + -(-w.shape[-1] // GRAM_BLOCK)


def gram_rounding(gram: Tensor, terms: int) -> Tensor:
    """delta with |lambda_i(computed G) - lambda_i(W W^H)| <= delta, where a product is rounded at most ``terms`` times.

    Or, which is all that is used, where an element has |error| <= terms u sum |x||y| with the u of ``gram``. An inner
    product summed so has that, whatever its length (Higham, Accuracy and Stability, sections 3.1 and 4.2); and
    || |W||W|^H ||_2 <= trace G. Complex products have twice the terms and a factor sqrt(2).
    """
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).real
    return 1.01 * terms * _unit(gram) * trace


def _unit(gram: Tensor) -> float:
    return torch.finfo(gram.dtype).eps / 2 * (3 if gram.is_complex() else 1)


def spectrum(weights: Tensor, rtol: float, small: SmallMatrix) -> tuple[Tensor, Tensor]:
    """Extreme singular values of each (b, r, c) matrix, r <= c, with certified intervals.

    Returns (values, status): values is float64 (6, b), sigma_max, its low, its high, sigma_min, its low,
    its high. Three levels, each for what the one before left open: the Gram matrix in the working precision, the Gram
    matrix in fp64, the SVD in fp64. Open means wider than 1 + rtol, and not proved singular by a null vector.
    """
    b, r, c = weights.shape
    values = torch.zeros(6, b, dtype=torch.float64, device=weights.device)
    status = torch.full((b,), int(Status.TOLERANCE_NOT_MET), dtype=torch.int8, device=weights.device)
    work = _WORK[weights.dtype]
    step = max(1, CHUNK_BYTES // max(1, r * c * work.itemsize))
    # A Gram matrix sums at least 8 terms, so its bracket is at least 8 u trace / lambda_min >= 8 u r wide.
    start_wide = rtol < 4 * torch.finfo(work).eps * r
    start = 0
    with full_precision():
        while start < b:
            # The first few tell whether it is worth the while to try the working precision on the others.
            part = slice(start, start + (min(step, SCOUTS) if start == 0 and b >= 4 * SCOUTS else step))
            values[:, part], status[part], share = _spectrum_chunk(weights[part], rtol, small, start_wide)
            start, start_wide = part.stop, start_wide or share > 0.5
    return values, status


def _spectrum_chunk(w: Tensor, rtol: float, small: SmallMatrix, start_wide: bool) -> tuple[Tensor, Tensor, float]:
    """:func:`spectrum` of one chunk, and the share of it that the first level left open."""
    work = _WORK[w.dtype]
    wide = _WIDE.get(work, work)
    levels: list[Callable[[Tensor], Tensor]] = [
        lambda w: _extremes_of(*small.gram_terms(w, work), work, rtol, small.extremes),
        lambda w: _extremes_or_null(w, *small.gram_terms(w, wide), rtol, small.extremes),
        lambda w: _extremes_svd(w.to(wide)),
    ]
    if wide == work or start_wide:
        levels.pop(0)
    left = []
    values = torch.empty(6, w.shape[0], dtype=torch.float64, device=w.device)
    status = torch.full((w.shape[0],), int(Status.TOLERANCE_NOT_MET), dtype=torch.int8, device=w.device)
    open_ = torch.arange(w.shape[0], device=w.device)
    for level in levels:
        found = level(_chosen(w, open_))
        top, top_low, top_high, _, low, high = found
        # NaN (overflow, underflow, non-finite input) compares False and so goes to the next level.
        met = (top_high * high <= (1 + rtol) * (top_low * low)) & (low > 0)
        singular = (low <= 0) & (_is_singular(top, high, w.shape[-1]) | (level is levels[-1]))
        values[:, open_] = found
        status[open_[met]] = int(Status.CONVERGED)
        status[open_[singular]] = int(Status.RANK_DEFICIENT)
        open_ = open_[~(met | singular)]
        left.append(open_.numel() / w.shape[0])
        if not open_.numel():
            break
    suspects = ((status != Status.CONVERGED) & ~(values[0] > 0)).nonzero().flatten()
    if suspects.numel():
        some = w[suspects]
        status[suspects[(some == 0).all(-1).all(-1)]] = int(Status.ZERO_MATRIX)
        nonfinite = suspects[~some.isfinite().all(-1).all(-1)]
        status[nonfinite] = int(Status.NON_FINITE)
        values[:, nonfinite] = torch.nan
    return values, status, left[0]


def _chosen(batch: Tensor, index: Tensor) -> Tensor:
    """The matrices at ascending ``index``; no copy where that is all of them."""
    return batch if index.numel() == batch.shape[0] else batch[index]


def _extremes_of(gram: Tensor, terms: int, products: torch.dtype, rtol: float, solve: Extremes) -> Tensor:
    rounding = gram_rounding(gram, terms).double()
    usable = rounding.isfinite() & (rounding > smallest_rounding(products))
    values = solve(gram, rounding, rtol)
    return torch.where(usable, values.clamp_min(0).sqrt_(), torch.nan)


def _extremes_or_null(w: Tensor, gram: Tensor, terms: int, rtol: float, solve: Extremes) -> Tensor:
    """:func:`_extremes_of`, with a null vector for what may be singular; ``gram`` and its products are fp64."""
    values = _extremes_of(gram, terms, gram.dtype, rtol, solve)
    index = (values[4] <= 0).nonzero().flatten()
    if index.numel():
        w, gram = _chosen(w, index), _chosen(gram, index)
        # ``solve`` may have stopped where rtol was out of reach, before sigma_max was good.
        found = _extremes_of(gram, terms, gram.dtype, rtol, extremes)
        least, high = _null_vector(w, gram, terms)
        singular = _is_singular(found[0], high, w.shape[-1])
        found[3:] = torch.where(singular, torch.stack((least, torch.zeros_like(least), high)), found[3:])
        values[:, index] = found
    return values


def _is_singular(sigma_max: Tensor, high: Tensor, cols: int) -> Tensor:
    """Whether a sigma_min of at most ``high`` is zero as far as float64 can tell: :func:`rank_threshold`, for a value
    that may be off by as much."""
    return high <= 2 * rank_threshold(cols, sigma_max[:, None])[:, 0]


def _null_vector(w: Tensor, gram: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """||W^H x|| / ||x||, as computed and as a bound of sigma_min, for an x that is a null vector of W if it has any.

    x comes from inverse iteration with G + mu I: no accuracy of it enters the bound.
    """
    b, r, c = w.shape
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).real
    # Large enough that the factorization succeeds whatever G and it itself lost to rounding.
    shift = 2 * (gram_rounding(gram, terms) + (r + 1) * _unit(gram) * trace)
    lower = torch.linalg.cholesky_ex(gram + torch.diag_embed(shift[:, None].expand(b, r)).to(gram.dtype))[0]
    x = torch.arange(r, device=w.device).square().cos().to(gram.dtype).expand(b, r)[..., None]
    for _ in range(2):
        x = torch.cholesky_solve(x, lower)
        x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True)
    square = torch.zeros(b, dtype=trace.dtype, device=w.device)
    for start in range(0, c, GRAM_BLOCK):  # no copy of all of W in fp64
        product = x.mH @ w[:, :, start : start + GRAM_BLOCK].to(gram.dtype)
        square += torch.linalg.vector_norm(product, dim=(-2, -1)).square()
    least = square.sqrt().double()
    # Each of the c sums over r has |error| <= (r + 2) u sum |x||w|, with x's own length among it.
    return least, 1.01 * (least + (r + 2) * _unit(gram) * trace.sqrt())


def spectrum_of_gram(gram: Tensor, terms: int, rtol: float, small: SmallMatrix) -> tuple[Tensor, Tensor]:
    """:func:`spectrum` of matrices of which only the Gram matrices are here, float64; the one level there is."""
    values = _extremes_of(
        gram, terms, gram.dtype, rtol, lambda gram, rounding, rtol: small.follow(gram, rounding, rtol, None)[0]
    )
    _, max_low, max_high, _, min_low, min_high = values
    status = torch.full(gram.shape[:1], int(Status.TOLERANCE_NOT_MET), dtype=torch.int8, device=gram.device)
    status[(max_high * min_high <= (1 + rtol) * (max_low * min_low)) & (min_low > 0)] = int(Status.CONVERGED)
    status[min_low <= 0] = int(Status.RANK_DEFICIENT)
    nonfinite = ~gram.isfinite().all(-1).all(-1)
    status[nonfinite] = int(Status.NON_FINITE)
    values[:, nonfinite] = torch.nan
    zero = (gram == 0).all(-1).all(-1)
    status[zero] = int(Status.ZERO_MATRIX)
    values[:, zero] = 0
    return values, status


def extremes(gram: Tensor, rounding: Tensor, rtol: float) -> Tensor:
    """(6, b) float64: lambda_max, its low, its high, lambda_min, its low, its high, of the exact Gram matrices.

    ``rounding`` (b,) bounds the distance of ``gram``'s eigenvalues from theirs; where it is not finite, neither is the
    matrix, and the values mean nothing. LAPACK's are good to about r u ||G||.
    """
    # LAPACK's eigensolver raises for the whole batch on one NaN.
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    gram = torch.where(rounding.isfinite()[:, None, None], gram, identity)
    delta = rounding + (_unit(gram) * gram.shape[-1] * torch.linalg.matrix_norm(gram)).double()
    values = torch.linalg.eigvalsh(gram).double()
    low, high = values[:, 0], values[:, -1]
    return torch.stack((high, high - delta, high + delta, low, low - delta, low + delta))


def follow(gram: Tensor, rounding: Tensor, rtol: float, vectors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """:func:`extremes`, which starts from nothing."""
    return extremes(gram, rounding, rtol), None


SMALL_MATRIX = SmallMatrix(factor, extremes, follow, gram_plain, product_plain, gram_terms)


def smallest_rounding(dtype: torch.dtype) -> float:
    """Below this :func:`gram_rounding` says nothing of a Gram matrix whose products were formed in ``dtype``."""
    # Products below the normal range are lost, at most tiny each; far below this delta they do not matter.
    return torch.finfo(dtype).tiny * 2.0**40


def _extremes_svd(w: Tensor) -> Tensor:
    largest = w.abs().amax((-2, -1))
    finite = largest.isfinite()
    scaled = torch.where(finite[:, None, None], _scaled(w), 0)
    values = torch.linalg.svdvals(scaled)
    delta = rank_threshold(w.shape[-1], values)[:, 0]
    high, low = values[:, 0], values[:, -1]
    spectrum = torch.stack((high, high - delta, high + delta, low, low - delta, low + delta)).clamp_min_(0)
    exponent = torch.frexp(torch.where(finite, largest, 1))[1]
    half, one = exponent // 2, torch.ones_like(largest)
    return spectrum * torch.ldexp(one, half) * torch.ldexp(one, exponent - half)
