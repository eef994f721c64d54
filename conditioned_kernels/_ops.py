"""The package's ops: the extension's five, and the two opaque ones that public functions call.

``gram``, ``product_``, ``gram_factor``, ``spectrum_bracket`` and ``philox_normal_`` are defined in csrc/ops.cpp; here
are their fake implementations, vmap rules and thin callers. ``orthogonal_factor`` and ``condition_number`` wrap the
whole data-dependent computation (its number of passes depends on the values), so that torch.compile, FakeTensor and
torch.vmap see one op with a known output shape.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _extension, _torch
from ._backend import extension_refusal

WIDE_ROWS = 64
"""Above this many rows a bracket's r x r stage works in float64."""

_NAMESPACE = "conditioned_kernels"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def define(schema: str, run: Callable, fake: Callable) -> Callable:
    """Register an op implemented in Python whose first argument is a batch (..., rows, cols); return its overload."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
    op = getattr(getattr(torch.ops, _NAMESPACE), name).default

    def over_batch(info: Any, in_dims: tuple, weights: Tensor, *rest: object) -> tuple:
        # Leading dimensions are batch already: vmap's becomes the first of them.
        out = op(weights.movedim(in_dims[0], 0), *rest)
        return out, (0,) * len(out)

    torch.library.register_vmap(f"{_NAMESPACE}::{name}", over_batch, lib=_library)
    return op


@functools.cache
def native() -> Any:
    """torch.ops.conditioned_kernels with the extension's ops; call it only where the extension is available."""
    if not _extension.load().available:
        raise RuntimeError(f"the extension is not available: {_extension.load().sentence}")
    for name, fake, vmap in (
        ("gram", _gram_fake, _gram_vmap),
        ("product_", _product_fake, None),
        ("gram_factor", _gram_factor_fake, _gram_factor_vmap),
        ("spectrum_bracket", _spectrum_bracket_fake, _spectrum_bracket_vmap),
        ("philox_normal_", _philox_normal_fake, None),
    ):
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
        if vmap is not None:
            torch.library.register_vmap(f"{_NAMESPACE}::{name}", vmap, lib=_library)
    return getattr(torch.ops, _NAMESPACE)


def gram(weights: Tensor, wide_products: bool = False, wide_gram: bool = False) -> Tensor:
    """W W^T of each (r, c) matrix of a batch on the CPU, exactly symmetric.

    Parameters
    ----------
    weights : (b, r, c), bfloat16, float32 or float64, any strides; fastest where rows or columns are contiguous.
    wide_products : multiply in float64, else in the work dtype of ``weights``.
    wide_gram : return float64, else the work dtype of ``weights``.

    Notes
    -----
    *Accuracy.* Each element has |error| <= :func:`gram_terms` u sum |x||y|. The result does not depend on the number of
    threads. *Cost.* r^2 c flops and one read, half of a general product; one thread per matrix.
    """
    return native().gram(weights, wide_products, wide_gram)


def gram_terms(rows: int, cols: int, products: torch.dtype, result: torch.dtype) -> int:
    """The k for which |error| <= k u sum |x||y| in an element of :func:`gram`, with u the unit roundoff of ``result``.

    Runs of products are summed in ``products``, and those sums in float64; the sizes are in csrc/gram.h.
    """
    fine = rows > 128 and (products, result) == (torch.float32, torch.float64)
    terms = min(cols, 16) if fine else min(cols, 32) + 4
    # What is lost in float64 is below one term of float32.
    terms += -(-cols // 128) if products == torch.float64 else 2
    return terms * max(1, round(_unit(products) / _unit(result)))


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def product_(out: Tensor, factor: Tensor, weights: Tensor) -> None:
    """out = F W of each matrix of a batch on the CPU.

    Parameters
    ----------
    out : (b, r, c), any strides, no wider than ``factor`` and no narrower than ``weights``, which it may be.
    factor : (b, r, r), contiguous, float32 or float64: what is multiplied and summed in.
    weights : (b, r, c), bfloat16, float32 or float64, any strides.

    Notes
    -----
    *Accuracy.* Each element has |error| <= r u sum |f||w|, and the rounding to ``out``. *Cost.* 2 r^2 c flops; one
    thread per matrix.
    """
    native().product_(out, factor, weights)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # no dispatcher kernel of this op does it


def gram_factor(gram: Tensor, method: str) -> tuple[Tensor, Tensor, Tensor]:
    """Factor of each Gram matrix: G^(-1/2) for "polar", L^-1 with G = L L^T for "qr".

    Parameters
    ----------
    gram : (b, n, n), float32 or float64, any strides; the upper triangle counts.
    method : "polar" or "qr".

    Returns
    -------
    factor : (b, n, n), NaN where G is not numerically positive definite.
    residual : (b,), max |F G F^T - I| as measured.
    status : (b,), int8; converged means residual <= 8 eps.

    Notes
    -----
    *Accuracy.* The residual is about u kappa(W), with u the unit roundoff of the dtype, for "polar" up to kappa(W) = 5
    or so, beyond which its iteration loses digits and the residual says so.
    *Cost.* 2 n^3 flops for "qr", about 25 n^3 for "polar" at kappa(G) = 3.
    """
    return native().gram_factor(gram, method)


def spectrum_bracket(
    gram: Tensor, error: Tensor, rtol: float, max_steps: int, start: Tensor | None = None, *, give_up: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Certified extreme eigenvalues of each Gram matrix.

    Parameters
    ----------
    gram : (b, n, n), float32 or float64, any strides; the upper triangle counts.
    error : (b,), float64: |lambda_i(gram) - lambda_i(exact Gram)| <= error.
    rtol : wanted ``high / low - 1`` of kappa = sqrt(lambda_max / lambda_min).
    max_steps : Lanczos steps at most, in [1, n]; n makes the eigenvalues exact to rounding.
    start : (b, 2, n), the vectors of an earlier call, as a warm start.
    give_up : stop as soon as ``error`` alone puts ``rtol`` out of reach, with estimates as good as they are then.

    Returns
    -------
    bounds : (b, 6), float64: lambda_max, its low, its high, lambda_min, its low, its high.
    vectors : (b, 2, n), unit Ritz vectors of both ends.
    steps : (b,), int32, Lanczos steps taken.
    status : (b,), int8.

    Notes
    -----
    *Accuracy.* The brackets hold whatever the status. *Cost.* k (2 n^2 + 4 k n) flops for k steps and 2 n^3 / 3 for
    the two proofs; k is about 24 for a Gaussian 768 x 64 matrix at rtol 1e-3, and 4 from a warm start.
    """
    return native().spectrum_bracket(gram, error, rtol, max_steps, start, give_up)


def philox_normal_(out: Tensor, key: int, head: int, element: int) -> None:
    """Fill ``out`` (heads, elements), float32, with stream version 1 from (head, element) on."""
    native().philox_normal_(out, key - (1 << 64) if key >= 1 << 63 else key, head, element)


def _factor(gram: Tensor, method: str) -> Tensor:
    return gram_factor(gram, method)[0]


def _extremes(gram: Tensor, rounding: Tensor, rtol: float) -> Tensor:
    return spectrum_bracket(gram, rounding, rtol, gram.shape[-1], give_up=True)[0].T


def _follow(gram: Tensor, rounding: Tensor, rtol: float, vectors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    bounds, vectors, _, _ = spectrum_bracket(gram, rounding, rtol, gram.shape[-1], vectors)
    return bounds.T, vectors


def _gram(weights: Tensor) -> Tensor:
    # On a GPU the library's product is as fast as it gets.
    if weights.device.type != "cpu":
        return _torch.gram_plain(weights)
    return gram(weights.float() if weights.dtype == torch.float16 else weights)


def _product(factor: Tensor, weights: Tensor, out: Tensor) -> None:
    # The library's product is as good as ours where it needs no copy.
    if weights.device.type != "cpu" or (out is not weights and out.dtype == factor.dtype == weights.dtype):
        _torch.product_plain(factor, weights, out)
        return
    product_(out, factor, weights.float() if weights.dtype == torch.float16 else weights)


def _gram_terms(weights: Tensor, work: torch.dtype) -> tuple[Tensor, int]:
    if weights.device.type != "cpu":
        return _torch.gram_terms(weights, work)
    _, rows, cols = weights.shape
    # What float32 loses in the r x r stage goes with r, too, and costs next to nothing to keep where r is large.
    wide = rows > WIDE_ROWS or work == torch.float64
    if weights.dtype == torch.float16:
        weights = weights.float()
    products = gram(weights, work == torch.float64, wide)
    return products, gram_terms(rows, cols, work, products.dtype)


_TORCH = _torch.SMALL_MATRIX
_EXTENSION = _torch.SmallMatrix(_factor, _extremes, _follow, _gram, _product, _gram_terms)


def small_matrix(backend: str, matrices: Tensor) -> _torch.SmallMatrix:
    """The r x r stage, and the Gram matrices it works on, for (b, r, c) ``matrices`` and a backend chosen for them."""
    if backend != "triton":
        return _EXTENSION if backend == "extension" else _TORCH
    short = matrices.shape[-2]
    # Triton has no n x n stage of its own: that is the extension's where it is built, else torch's.
    stage = _TORCH if extension_refusal(matrices.device, matrices.dtype, short) else _EXTENSION
    if short > _triton_route().MAX_ROWS:
        return stage

    def gram_terms(weights: Tensor, work: torch.dtype) -> tuple[Tensor, int]:
        # The second level is in fp64, for which there are no kernels.
        return _torch.gram_terms(weights, work) if work == torch.float64 else _triton_route().gram_terms(weights)

    return stage._replace(gram_terms=gram_terms)


def orthogonalize(backend: str, weights: Tensor, method: str, out: Tensor) -> tuple[Tensor, Tensor]:
    """(residual, status) of each (b, r, c) matrix, r <= c, with its orthogonal factor in ``out``."""
    small = small_matrix(backend, weights)
    if backend != "triton":
        return _torch.orthogonalize(weights, method, out, small)
    with _torch.full_precision():
        return _triton_route().orthogonalize(weights, method, out, small.factor, _torch.careful)


def semi_orthogonal_(
    tensors: list[Tensor],
    keys: list[int],
    firsts: list[int],
    gains: list[float],
    method: str,
    redraw: Callable[..., Tensor],
) -> Tensor:
    """Draw semi-orthogonal heads straight into ``tensors``, for the "triton" backend and at most 128 rows."""
    first = tensors[0] if tensors[0].shape[-2] < tensors[0].shape[-1] else tensors[0].mT
    with _torch.full_precision():
        small = small_matrix("triton", first)
        return _triton_route().semi_orthogonal_(tensors, keys, firsts, gains, method, small.factor, redraw)


def identity_(tensors: list[Tensor], gains: list[float], block: bool) -> None:
    """Rectangular identities into ``tensors``, for the "triton" backend."""
    importlib.import_module("._triton.identity", __package__).identity(tensors, gains, block=block)


def warmup(tensors: list[Tensor], method: str, redraw: Callable[..., Tensor]) -> int:
    """Compile what the "triton" backend launches for ``tensors``."""
    first = tensors[0] if tensors[0].shape[-2] < tensors[0].shape[-1] else tensors[0].mT
    return _triton_route().warmup(tensors, method, small_matrix("triton", first).factor, redraw)


def draws_in_place(backend: str, short: int) -> bool:
    """Whether :func:`semi_orthogonal_` serves matrices with this smaller side."""
    return backend == "triton" and short <= _triton_route().MAX_ROWS


@functools.cache
def _triton_route() -> Any:
    return importlib.import_module("._triton.route", __package__)


def _gram_fake(weights: Tensor, wide_products: bool = False, wide_gram: bool = False) -> Tensor:
    b, r, _ = weights.shape
    dtype = torch.float64 if wide_gram else _torch.work_dtype(weights.dtype)
    return weights.new_empty(b, r, r, dtype=dtype)


def _product_fake(out: Tensor, factor: Tensor, weights: Tensor) -> None:
    return None


def _gram_factor_fake(gram: Tensor, method: str) -> tuple[Tensor, Tensor, Tensor]:
    b, n, _ = gram.shape
    return gram.new_empty(b, n, n), gram.new_empty(b), gram.new_empty(b, dtype=torch.int8)


def _spectrum_bracket_fake(
    gram: Tensor, error: Tensor, rtol: float, max_steps: int, start: Tensor | None = None, give_up: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, n, _ = gram.shape
    return (
        gram.new_empty(b, 6, dtype=torch.float64),
        gram.new_empty(b, 2, n),
        gram.new_empty(b, dtype=torch.int32),
        gram.new_empty(b, dtype=torch.int8),
    )


def _philox_normal_fake(out: Tensor, key: int, head: int, element: int) -> None:
    return None


def _front(tensor: Tensor, in_dim: int | None, size: int) -> Tensor:
    """(size, b, ...) -> (size * b, ...), whether or not the tensor is mapped over."""
    moved = tensor.expand(size, *tensor.shape) if in_dim is None else tensor.movedim(in_dim, 0)
    return moved.flatten(0, 1).contiguous()


def _unfold(out: tuple[Tensor, ...], size: int) -> tuple:
    return tuple(t.unflatten(0, (size, t.shape[0] // size)) for t in out), (0,) * len(out)


def _gram_vmap(info: Any, in_dims: tuple, weights: Tensor, *rest: bool) -> tuple[Tensor, int]:
    size = info.batch_size
    (gram,), _ = _unfold((native().gram(_front(weights, in_dims[0], size), *rest),), size)
    return gram, 0


def _gram_factor_vmap(info: Any, in_dims: tuple, gram: Tensor, method: str) -> tuple:
    size = info.batch_size
    return _unfold(native().gram_factor(_front(gram, in_dims[0], size), method), size)


def _spectrum_bracket_vmap(
    info: Any,
    in_dims: tuple,
    gram: Tensor,
    error: Tensor,
    rtol: float,
    max_steps: int,
    start: Tensor | None = None,
    give_up: bool = False,
) -> tuple:
    size = info.batch_size
    start = None if start is None else _front(start, in_dims[4], size)
    gram, error = _front(gram, in_dims[0], size), _front(error, in_dims[1], size)
    return _unfold(native().spectrum_bracket(gram, error, rtol, max_steps, start, give_up), size)
