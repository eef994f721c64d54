"""Batched orthogonalization and semi-orthogonal random matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from . import _ops, _torch, _validate
from ._backend import BACKENDS, choose_backend
from ._status import Status, sentences
from .sampling import philox_normal, resolve_seed, stream_key

METHODS = ("polar", "qr")


@dataclass(frozen=True)
class Certificate:
    """What :func:`orthogonalize` measured on each matrix it returned.

    Attributes
    ----------
    residual : max |Q^H Q - I| over the elements, measured on the returned dtype; shape (...), on the device.
    status : int8 :class:`~conditioned_kernels.Status` codes, same shape.
    """

    residual: Tensor
    status: Tensor

    def failures(self) -> list[str]:
        """One sentence per matrix that is not orthonormal to the tolerance; reads the device."""
        return sentences(self.status)


# So that it can leave torch.vmap and torch.compile.
register_pytree_node(Certificate, lambda c: ([c.residual, c.status], None), lambda tensors, _: Certificate(*tensors))


def orthogonalize(
    weights: Tensor, *, method: str = "polar", backend: str = "auto", verify: bool = False, nonfinite: str = "raise"
) -> Tensor:
    """Orthogonal factor of every matrix of a batch; leading dimensions are batch, never flattened.

    For W = U S V^H with rows >= cols: ``polar`` gives U V^H, the nearest matrix with orthonormal columns (Algorithm 1
    of Conditioned Initialization for Attention, ICLR 2026); ``qr`` gives the Q of W = Q R with diag(R) > 0.
    A wide matrix is treated through its conjugate transpose and gets orthonormal rows.

    Parameters
    ----------
    weights : (..., rows, cols), float16, bfloat16, float32, float64, complex64 or complex128; any strides.
        Never written to.
    method : "polar" or "qr".
    backend : "auto", "torch", "triton" or "extension"; see :func:`explain_backend`.
    verify : raise if a returned matrix misses the tolerance, naming its batch index.
    nonfinite : "raise" on a NaN or infinite element, or "nan": that matrix comes back NaN, the others unharmed.

    Returns
    -------
    Contiguous tensor of the same shape, dtype and device. It has no gradient: the derivative of these
    factors is not defined where singular values coincide, which is where this function leads.

    Raises
    ------
    TypeError, ValueError
        for arguments outside the above, and for non-finite matrices unless ``nonfinite="nan"``.
    RuntimeError
        with ``verify=True``, and for a named backend that cannot be used.

    Notes
    -----
    *Accuracy.* Half types work in float32 and are cast once. max |Q^H Q - I|, as the working dtype measures it, is
    at most 8 eps of float32 (9.5e-7) or 64 eps of float64 (1.4e-14) for every full-rank matrix, whatever its
    condition number and scale; the measurement's own rounding adds up to 2 eps. Polar factors of float32 are
    within 1e-6 of the exact ones up to kappa 1e7. A rank-deficient matrix gives, with ``polar``, the partial
    isometry (0 for 0) and, with ``qr``, a completed orthonormal basis. :func:`certify` tells which.

    *Cost.* One Gram pass: 6 rows cols^2 flops with its certificate for rows >= cols. Matrices whose
    residual is refused are redone in float64, and by LAPACK if that is refused too.

    *Source.* CholeskyQR2: Yamamoto et al., ETNA 44 (2015). Polar factor by G^(-1/2): Higham, Functions of
    Matrices (2008), chapters 6 and 8.
    """
    return certify(weights, method=method, backend=backend, verify=verify, nonfinite=nonfinite)[0]


def certify(
    weights: Tensor, *, method: str = "polar", backend: str = "auto", verify: bool = False, nonfinite: str = "raise"
) -> tuple[Tensor, Certificate]:
    """:func:`orthogonalize`, together with its :class:`Certificate`. Same arguments and errors."""
    weights = _validate.matrices(weights, "weights").detach()
    _validate.choice(method, "method", METHODS)
    _validate.choice(nonfinite, "nonfinite", ("raise", "nan"))
    _validate.choice(backend, "backend", BACKENDS)
    q, residual, status = _orthogonal_factor(weights, method, backend, verify, nonfinite)
    return q, Certificate(residual, status)


def _run(weights: Tensor, method: str, backend: str, verify: bool, nonfinite: str) -> tuple[Tensor, Tensor, Tensor]:
    place = choose_backend(backend, weights.device, weights.dtype, min(weights.shape[-2:]))
    q = torch.empty(weights.shape, dtype=weights.dtype, device=place.device)
    batch = weights.shape[:-2]
    if weights.numel() == 0:
        residual = torch.zeros(batch, dtype=weights.dtype.to_real(), device=weights.device)
        return q.to(weights.device), residual, torch.zeros_like(residual, dtype=torch.int8)
    with torch.no_grad():
        matrices = _short_first(weights.to(place.device))
        residual, status = _ops.orthogonalize(place.name, matrices, method, _short_first(q))
    residual, status = residual.view(batch), status.view(batch)
    accepted = (Status.CONVERGED, Status.RANK_DEFICIENT, Status.ZERO_MATRIX, Status.TOLERANCE_NOT_MET)
    if nonfinite == "raise" and (broken := sentences(status, accepted)):
        raise ValueError(
            f"weights has non-finite input: {'; '.join(broken)}. Repair those matrices, or pass nonfinite='nan' to "
            "get NaN for them and the right result for the others"
        )
    if verify and (failed := sentences(status)):
        raise RuntimeError(f"orthogonalize missed its tolerance on {len(failed)} matrices: {'; '.join(failed[:8])}")
    return q.to(weights.device), residual.to(weights.device), status.to(weights.device)


def _fake(weights: Tensor, method: str, backend: str, verify: bool, nonfinite: str) -> tuple[Tensor, Tensor, Tensor]:
    batch = weights.shape[:-2]
    work = _torch.work_dtype(weights.dtype) if weights.numel() else weights.dtype
    return (
        torch.empty(weights.shape, dtype=weights.dtype, device=weights.device),
        torch.empty(batch, dtype=work.to_real(), device=weights.device),
        torch.empty(batch, dtype=torch.int8, device=weights.device),
    )


_orthogonal_factor = _ops.define(
    "orthogonal_factor(Tensor weights, str method, str backend, bool verify, str nonfinite) -> "
    "(Tensor q, Tensor residual, Tensor status)",
    _run,
    _fake,
)


def semi_orthogonal(
    shape: Sequence[int],
    *,
    seed: int = 0,
    key: str = "",
    role: str = "",
    first: int = 0,
    gain: float = 1.0,
    method: str = "polar",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """Random matrices with orthonormal rows (wide) or columns (tall), times ``gain``; leading dimensions are batch.

    Each matrix is ``gain`` times the orthogonal factor of a Gaussian matrix, so it is Haar distributed and all
    its singular values equal ``gain``. The Gaussian is element for element that of
    :mod:`conditioned_kernels.sampling`: it depends on (seed, key, role, index of the matrix in the batch) only,
    so the same call gives the same matrices on every device, to float32 rounding, and any part of a batch can
    be drawn alone (``first``). torch's global random state is neither read nor changed.

    Parameters
    ----------
    shape : (..., rows, cols).
    seed, key, role : integer and two names of the stream. Different names give independent matrices.
    first : the stream's index of the first matrix: ``first=2`` gives what a longer batch has from its third matrix on.
    gain : the singular value, a positive number.
    method : "polar" (Algorithm 1) or "qr".
    dtype : a real floating dtype; default torch.get_default_dtype().
    device : where the result lives; default torch.get_default_device().
    generator : if given, replaces ``seed`` by one 63-bit draw from it.
    backend : as in :func:`orthogonalize`.

    Returns
    -------
    Contiguous tensor of ``shape``.

    Raises
    ------
    TypeError, ValueError
        for arguments outside the above.

    Notes
    -----
    *Accuracy.* |sigma/gain - 1| below 1e-6 in float32 (before the cast to a half type).
    *Cost.* sampling plus that of :func:`orthogonalize`.
    """
    sizes = _validate.shape(shape, "shape")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else torch.device(device)
    out = torch.empty(sizes, dtype=dtype, device=device)
    return semi_orthogonal_(
        out, seed=seed, key=key, role=role, first=first, gain=gain, method=method, generator=generator, backend=backend
    )


def semi_orthogonal_(
    tensor: Tensor,
    *,
    seed: int = 0,
    key: str = "",
    role: str = "",
    first: int = 0,
    gain: float = 1.0,
    method: str = "polar",
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """In-place :func:`semi_orthogonal`: fills ``tensor`` (..., rows, cols), any strides, and returns it.

    Raises
    ------
    TypeError, ValueError
        as :func:`semi_orthogonal`; ValueError for a meta tensor or one whose elements share memory.
    RuntimeError
        for a tensor made under ``torch.inference_mode()``; and for a draw that is numerically singular, which has
        probability zero for practical purposes and leaves the contents of ``tensor`` undefined.
    """
    _validate.matrices(tensor, "tensor", allow_complex=False)
    _validate.writable(tensor, "tensor")
    gain = _validate.positive(gain, "gain")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ValueError(f"first must be an integer >= 0, the index of a matrix in the stream, got {first!r}")
    _validate.choice(method, "method", METHODS)
    place = choose_backend(backend, tensor.device, tensor.dtype, min(tensor.shape[-2:]))
    seed = resolve_seed(seed, generator)
    if tensor.numel() == 0:
        return tensor
    rows, cols = tensor.shape[-2:]
    if _ops.draws_in_place(place.name, min(rows, cols)):
        with torch.no_grad():
            _ops.semi_orthogonal_([tensor], [stream_key(seed, key, role)], [first], [gain], method, _redraw(method))
        return tensor
    work = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        samples = philox_normal(
            stream_key(seed, key, role),
            range(first, first + tensor.numel() // (rows * cols)),
            range(rows * cols),
            device=place.device,
            backend=place.name,
        )
        gaussian = samples.view(-1, rows, cols).to(work)
        # Each pass over the result costs as much as drawing a third of it, so it is made where it belongs if it can be.
        direct = tensor.dtype == work and tensor.device == place.device and tensor.is_contiguous()
        q = tensor.view(-1, rows, cols) if direct else torch.empty_like(gaussian)
        _, status = _ops.orthogonalize(place.name, _short_first(gaussian), method, _short_first(q))
        _refuse_singular(status)
        if gain != 1.0:
            q.mul_(gain)
        if not direct:
            tensor.copy_(q.view(tensor.shape))
    return tensor


def grouped(heads: Tensor) -> bool:
    """Whether heads of this device, dtype and size are drawn faster together than tensor by tensor."""
    short = min(heads.shape[-2:])
    return heads.numel() > 0 and _ops.draws_in_place(
        choose_backend("auto", heads.device, heads.dtype, short).name, short
    )


def semi_orthogonal_together_(
    tensors: list[Tensor], *, seed: int, names: list[tuple[str, str]], gains: list[float], method: str = "polar"
) -> None:
    """:func:`semi_orthogonal_` on several tensors of one device that are :func:`grouped`, with (key, role) ``names``.

    The values are those of the single calls, in one launch per kind of head.
    """
    keys = [stream_key(seed, key, role) for key, role in names]
    with torch.no_grad():
        _ops.semi_orthogonal_(tensors, keys, [0] * len(keys), gains, method, _redraw(method))


def identity_together_(tensors: list[Tensor], gains: list[float], *, block: bool) -> None:
    """Rectangular identities times ``gains`` in several tensors of one device that are :func:`grouped`."""
    with torch.no_grad():
        _ops.identity_(tensors, gains, block)


def warmup(tensors: list[Tensor], *, method: str = "polar") -> int:
    """Compile ahead what the Triton backend will launch for these weights; returns for how many kinds of heads.

    Call it before a training run's process group is busy: a compile takes seconds. Nothing is written.

    Parameters
    ----------
    tensors : views (*heads, rows, cols). Those the Triton backend would not serve are passed over.
    method : as in :func:`orthogonalize`.
    """
    _validate.choice(method, "method", METHODS)
    kinds = 0
    chosen = [tensor.detach() for tensor in tensors if grouped(tensor)]
    for device in dict.fromkeys(tensor.device for tensor in chosen):
        here = [tensor for tensor in chosen if tensor.device == device]
        with torch.no_grad():
            kinds += _ops.warmup(here, method, _redraw(method))
    return kinds


def _redraw(method: str) -> Callable[[int, int, tuple[int, int], torch.device], Tensor]:
    """How a head is drawn whose first pass is refused: its samples in memory, and the torch path's careful stages."""

    def draw(key: int, head: int, shape: tuple[int, int], device: torch.device) -> Tensor:
        rows, cols = shape
        samples = philox_normal(key, range(head, head + 1), range(rows * cols), device=device).view(1, rows, cols)
        wide = _short_first(samples)
        q, residual = torch.empty_like(wide), torch.full((1,), torch.inf, device=device)
        q, residual, status = _torch.careful(wide, q, residual, method)
        _refuse_singular(status)
        return (q if rows < cols else q.mT)[0]

    return draw


def _refuse_singular(status: Tensor) -> None:
    if failed := sentences(status):
        raise RuntimeError(
            f"semi_orthogonal drew a numerically singular matrix ({'; '.join(failed)}); use another seed"
        )


def _short_first(matrices: Tensor) -> Tensor:
    """(..., rows, cols) as (b, r, c) with r <= c, conjugate-transposed unless wide; a view where strides allow it."""
    wide = matrices.mH if matrices.shape[-2] >= matrices.shape[-1] else matrices
    return wide.reshape(math.prod(wide.shape[:-2]), *wide.shape[-2:])
