"""The output of a head, and products with its Jacobian."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import _validate
from .heads import AttentionHeads, checked
from .linear import linearize


@contextmanager
def _plain() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def attention_output(heads: AttentionHeads) -> Tensor:
    """A(X), (..., tokens, value_dim) in float64, recomputed from the problem's own numbers."""
    with _plain():
        head = linearize(checked(heads))
        return head.turned(head.output)


def attention_probabilities(heads: AttentionHeads) -> Tensor:
    """P = softmax of the logits, (..., tokens, keys) in float64; no attention kernel is asked for it.

    Over channels (..., head_dim, head_dim). With a sink the rows sum to less than 1.
    """
    with _plain():
        return linearize(checked(heads)).p


def jvp(heads: AttentionHeads, dw_q: Tensor, dw_k: Tensor, dw_v: Tensor) -> Tensor:
    """dA = J [dW_Q, dW_K, dW_V], in closed form.

    Parameters
    ----------
    heads : the problem.
    dw_q, dw_k, dw_v : changes of the weights, (..., head_dim, in_features) as they are stored in ``heads``.

    Returns
    -------
    (..., tokens, value_dim), float64.

    *Cost.* O(tokens keys head_dim + tokens in_features head_dim) flops and memory for a few (tokens, keys) matrices
    per head; J is not formed, no gradient recorded, and no fused attention asked for derivatives it does not have.
    """
    changes = (dw_q, dw_k, dw_v)
    for name, change, weight in zip(("dw_q", "dw_k", "dw_v"), changes, checked(heads).weights, strict=True):
        _shaped(heads, change, name, (weight.shape[-2], weight.shape[-1]))
    with _plain():
        return linearize(heads).jvp(*(change.detach().double() for change in changes))


def vjp(heads: AttentionHeads, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """J^T u as (gW_Q, gW_K, gW_V), each (..., head_dim, in_features) in float64; see :func:`jvp`.

    Parameters
    ----------
    u : (..., tokens, value_dim), a weight on each output.
    """
    _shaped(checked(heads), u, "u", (heads.tokens, heads.w_v.shape[-2]))
    with _plain():
        return linearize(heads).vjp(u.detach().double())


def _shaped(heads: AttentionHeads, tensor: Tensor, name: str, shape: tuple[int, int]) -> None:
    _validate.matrices(tensor, name, allow_complex=False)
    try:
        torch.broadcast_shapes(tensor.shape[:-2], heads.shape)
    except RuntimeError:
        fits = False
    else:
        fits = tuple(tensor.shape[-2:]) == shape
    if not fits:
        raise ValueError(
            f"{name} must have shape (..., {shape[0]}, {shape[1]}), its leading dimensions broadcasting with the "
            f"problem's {tuple(heads.shape)}, got {tuple(tensor.shape)}"
        )
