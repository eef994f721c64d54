"""What the kernels do together: orthogonalize, draw semi-orthogonal heads in place, form certified Gram matrices.

The n x n stage and the path for what a certificate refuses come from outside, as functions: backends do not import
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import launch_config
from .apply import apply
from .gram import gram
from .heads import Heads, group, heads_of, launches, samples_of
from .polar import polar
from .product import product

MAX_ROWS = launch_config.MAX_ROWS
"""Largest r of the Gram and apply kernels; see launch_config.py."""

LARGE = 256
"""Above this many rows the factor of the Gram matrix is not worth its cost: the polar iteration takes over."""

Factor = Callable[[Tensor, str], Tensor]
"""(gram, method) -> F with F W orthonormal, NaN where it fails."""

Careful = Callable[[Tensor, Tensor, Tensor, str], tuple[Tensor, Tensor, Tensor]]
"""(w, first q, its residual, method) -> q, residual, status, in fp32."""


Redraw = Callable[[int, int, tuple[int, int], torch.device], Tensor]
"""(key, head, (rows, cols), device) -> the orthogonal factor of that head's samples, fp32, the careful way."""


def tolerance(dtype: torch.dtype) -> float:
    """Largest max |Q Q^T - I| accepted, as stored: 8 eps of fp32, and for a half type its own rounding of Q, 2 u."""
    work = 8 * torch.finfo(torch.float32).eps
    return work if dtype == torch.float32 else work + torch.finfo(dtype).eps


def orthogonalize(weights: Tensor, method: str, out: Tensor, factor: Factor, careful: Careful) -> tuple[Tensor, Tensor]:
    """Orthogonal factor of each matrix of ``weights`` into ``out``; (residual, status), each (b,).

    Parameters
    ----------
    weights, out : (b, r, c), r <= c, one dtype of fp16, bf16 and fp32, any strides.
    method : "polar" or "qr".
    factor, careful : the small-matrix stage, and the path for what the certificate refuses.

    Notes
    -----
    *Accuracy.* max |Q Q^T - I| <= :func:`tolerance` as stored. *Cost.* r <= 128: two reads and one write of W. Above:
    an fp32 copy of W and products of the whole matrix.
    """
    b, r, _ = weights.shape
    if r <= launch_config.MAX_ROWS:
        source, target = heads_of(weights), heads_of(out)
        ones = torch.ones(b, dtype=torch.float32, device=weights.device)
        parts = []
        for start, stop in launches(b, r):
            heads = source.part(start, stop)
            small = factor(gram(heads, out.dtype), method).contiguous()
            parts.append(apply(small, heads, target.part(start, stop), ones[start:stop], certify=True))
        residual = torch.cat(parts)
    else:
        work = weights.float()
        if method == "polar" and r > LARGE:
            q, residual = polar(work, 8 * torch.finfo(torch.float32).eps, product)
        else:
            q = product(factor(product(work, work, symmetric=True), method), work.mT)
            residual = _residual(product(q, q, symmetric=True))
        out.copy_(q)
        if out.dtype != torch.float32:
            residual = _residual(product(out, out, symmetric=True))
    status = torch.zeros(b, dtype=torch.int8, device=weights.device)
    index = (~(residual <= tolerance(out.dtype))).nonzero().flatten()
    if index.numel():
        # What was rounded to a half type is no first pass of a more exact one.
        first = residual[index] if out.dtype == torch.float32 else torch.full_like(residual[index], torch.inf)
        q, error, state = careful(weights[index].float(), out[index].float(), first, method)
        out[index] = q.to(out.dtype)
        stored = q if out.dtype == torch.float32 else q.to(out.dtype).float()
        residual[index] = error if out.dtype == torch.float32 else _residual(product(stored, stored, symmetric=True))
        status[index] = state
    return residual, status


def semi_orthogonal_(
    tensors: Sequence[Tensor],
    keys: Sequence[int],
    firsts: Sequence[int],
    gains: Sequence[float],
    method: str,
    factor: Factor,
    redraw: Redraw,
) -> Tensor:
    """Fill tensors with gain times the orthogonal factors of their samples; max |Q Q^T / gain^2 - I| per head.

    Nothing is read but the small factors, and nothing is written before each of them is finite or replaced.

    Parameters
    ----------
    tensors : (*heads, rows, cols) each, fp16, bf16 or fp32, any strides, min(rows, cols) <= 128, on one device.
        Those of one shape, strides and dtype share a launch.
    keys : 64-bit Philox key of each.
    firsts : index in its key's stream of each tensor's first head; the others follow.
    gains : one per tensor.
    method : "polar" or "qr".
    factor : the small-matrix stage.
    redraw : makes a head whose certificate is refused, as happens to nearly square ones.

    Returns
    -------
    (all heads,) fp32, in the order of ``tensors``.

    Raises
    ------
    what ``redraw`` raises for a numerically singular sample.

    Notes
    -----
    *Accuracy.* that of :func:`orthogonalize`; the bits depend on (key, head) and the kind of device alone.
    *Cost.* 4 rows^2 cols flops per head and one write, 2 rows^2 cols more with the certificate. Two host reads.
    """
    work = []
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, tensor in enumerate(tensors):
        shapes.setdefault((tensor.shape[-2], tensor.shape[-1]), []).append(index)
    for (rows, cols), same in shapes.items():
        wide = [tensors[index] if rows < cols else tensors[index].mT for index in same]
        for target, members in group(wide):
            chosen = [same[member] for member in members]
            counts = [tensors[index].shape[:-2].numel() for index in chosen]
            starts = [firsts[index] for index in chosen]
            source = samples_of([keys[index] for index in chosen], starts, counts, rows, cols, target.device)
            owner = torch.tensor(chosen, device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
            for start, stop in launches(source.count, target.rows):
                part = source.part(start, stop)
                small = factor(gram(part, target.base.dtype), method).contiguous()
                work.append((part, target.part(start, stop), small, owner[start:stop]))

    def redrawn(index: int, head: int) -> Tensor:
        return redraw(keys[index], head, (tensors[index].shape[-2], tensors[index].shape[-1]), tensors[index].device)

    replaced: dict[tuple[int, int], Tensor] = {}
    for source, _, small, owner in work:
        for broken in (~small.isfinite().all(-1).all(-1)).cpu().nonzero().flatten().tolist():
            place = (int(owner[broken]), int(source.heads[broken]))
            replaced[place] = redrawn(*place)
    sizes = torch.tensor(gains, dtype=torch.float32, device="cpu")
    residuals = [torch.empty(tensor.shape[:-2].numel(), device=tensor.device) for tensor in tensors]
    for source, target, small, owner in work:
        certificate = apply(small, source, target, sizes[owner].to(target.device), certify=True)
        for index in dict.fromkeys(owner.tolist()):
            mine = owner == index
            place = (source.heads[mine] - firsts[index]).to(target.device)
            residuals[index][place] = certificate[mine.to(target.device)]
    for index, residual in enumerate(residuals):
        for head in (~(residual <= tolerance(tensors[index].dtype))).cpu().nonzero().flatten().tolist():
            drawn = (index, firsts[index] + head)
            q = replaced[drawn] if drawn in replaced else redrawn(*drawn)
            out = tensors[index][_unravel(head, tensors[index].shape[:-2])]
            out.copy_(q * gains[index])
            stored = out.float() if out.shape[-2] < out.shape[-1] else out.mT.float()
            residual[head] = _residual((stored @ stored.mT).div_(gains[index] ** 2)[None])[0]
    return torch.cat(residuals)


def _unravel(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    place: tuple[int, ...] = ()
    for size in reversed(sizes):
        index, last = divmod(index, size)
        place = (last, *place)
    return place


def gram_terms(weights: Tensor) -> tuple[Tensor, int]:
    """fp32 Gram matrices of (b, r, c), r <= 128, and how often at most a product is rounded on its way into the sum.

    Half types get the same products as fp32 here, since a chain of tf32 sums has a bound 20 times as wide.
    """
    heads = heads_of(weights)
    parts = [gram(heads.part(start, stop), torch.float32) for start, stop in launches(heads.count, heads.rows)]
    arch = launch_config.architecture(weights.device)
    launch = launch_config.gram(heads.rows, torch.float32, arch, sampled=False)
    return torch.cat(parts) if len(parts) > 1 else parts[0], launch_config.gram_terms(heads.cols, launch)


def warmup(tensors: Sequence[Tensor], method: str, factor: Factor, redraw: Redraw) -> int:
    """Compile what :func:`orthogonalize` and :func:`semi_orthogonal_` will launch for these tensors; how many kinds.

    The tensors are read, never written: results go to scratch heads of the same strides.
    """
    views = [tensor if tensor.shape[-2] < tensor.shape[-1] else tensor.mT for tensor in tensors]
    kinds = 0
    for heads, members in group(views):
        if heads.rows > launch_config.MAX_ROWS:
            continue
        view = views[members[0]]
        head = view[(slice(0, 1),) * (view.ndim - 2)].reshape(1, heads.rows, heads.cols)
        scratch = torch.empty_strided(head.shape, (1, *heads.strides), dtype=view.dtype, device=view.device)
        was = tensors[members[0]]
        back = scratch if was.shape[-2] < was.shape[-1] else scratch.mT
        semi_orthogonal_([back], [1], [0], [1.0], method, factor, redraw)
        one = heads.part(0, 1)
        small = factor(gram(one, view.dtype), method).contiguous()
        apply(small, one, heads_of(scratch), torch.ones(1, device=view.device), certify=True)
        kinds += 1
    return kinds


def self_test(device: torch.device) -> str:
    """Why the kernels are wrong on ``device``, or "" (field report E11: right on one architecture only)."""
    for dtype in (torch.float32, torch.bfloat16):
        w = torch.linspace(-1, 1, 20 * 40, device=device).sin_().view(1, 20, 40).to(dtype)
        exact = w.double() @ w.double().mT
        result = gram(heads_of(w), dtype, splits=1).double()
        if not bool((result - exact).abs().max() <= 1e-5 * exact.abs().max()):
            return f"its Gram kernel is wrong on {device} in {dtype}"
        out = torch.full_like(w, torch.nan)
        factor = exact.float().contiguous()
        apply(factor, heads_of(w), heads_of(out), torch.ones(1, device=device))
        exact = exact @ w.double()
        bound = 1e-5 if dtype == torch.float32 else 1e-2
        if not bool((out.double() - exact).abs().max() <= bound * exact.abs().max()):
            return f"its apply kernel is wrong on {device} in {dtype}"
    return ""


def _residual(gram_matrix: Tensor) -> Tensor:
    gram_matrix.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram_matrix.abs().amax((-2, -1))


__all__ = ["Heads", "gram_terms", "orthogonalize", "self_test", "semi_orthogonal_", "tolerance", "warmup"]
