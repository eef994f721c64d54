"""J and J J^T of a batch of linearized heads, as matrices.

Row (a, n) of J is coordinate a of output n, in that order, so that the W_V part is I (x) (P X) as in the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import LinearHead


def matrix(head: LinearHead) -> Tensor:
    """J as (b, value_dim * tokens, columns), columns in the order of the flattened W_Q, W_K, W_V."""
    g = _logit_factor(head)
    x, context = head.x, head.context()
    by_q = (_query_factor(head, g)[..., None] * x[:, None, :, None, :]).flatten(-2)
    by_k = _key_factor(head, g).flatten(-2)
    b, size, tokens = g.shape[:3]
    by_v = torch.zeros(b, size, tokens, size, context.shape[-1], dtype=x.dtype, device=x.device)
    by_v.diagonal(dim1=1, dim2=3).copy_(context[..., None])
    return torch.cat((by_q, by_k, by_v.flatten(-2)), -1).flatten(1, 2)


def gram(head: LinearHead) -> Tensor:
    """J J^T as (b, rows, rows), rows = value_dim * tokens.

    Three products of rows^2: the W_Q part is (C C^T) times X X^T elementwise, where C is head_dim wide; the W_K part
    likewise with the roles of tokens and coordinates exchanged, and in full where norms or rotations come between.
    """
    g = _logit_factor(head)
    b, size, tokens = g.shape[:3]
    c = _query_factor(head, g).flatten(1, 2)
    out = c @ c.mT
    blocks = out.view(b, size, tokens, size, tokens)
    blocks *= (head.x @ head.x.mT)[:, None, :, None, :]
    if head.pull_k is None:
        gm = (g @ head.memory[:, None]).flatten(1, 2)
        part = gm @ gm.mT
        part.view(blocks.shape).mul_((head.q @ head.q.mT)[:, None, :, None, :])
        out += part
    else:
        by_k = _key_factor(head, g).flatten(-2).flatten(1, 2)
        out.baddbmm_(by_k, by_k.mT)
    context = head.context()
    blocks.diagonal(dim1=1, dim2=3).add_((context @ context.mT)[..., None])
    return out


def value_blocks(head: LinearHead) -> Tensor:
    """The diagonal blocks of J J^T, one per coordinate of value space: (b, value_dim, tokens, tokens).

    For a preconditioner: norms and rotations of keys are taken as the identity.
    """
    g = _logit_factor(head)
    c, gm, context = _query_factor(head, g), g @ head.memory[:, None], head.context()
    by_q = (c @ c.mT) * (head.x @ head.x.mT)[:, None]
    by_k = (gm @ gm.mT) * (head.q @ head.q.mT)[:, None]
    return by_q + by_k + (context @ context.mT)[:, None]


def _logit_factor(head: LinearHead) -> Tensor:
    """t_nm (v_ma - A_na) as (b, value_dim, tokens, keys): what logit (n, m) does to output (a, n)."""
    return head.t[:, None] * (head.v.mT[:, :, None, :] - head.output.mT[..., None])


def _query_factor(head: LinearHead, g: Tensor) -> Tensor:
    """(b, value_dim, tokens, head_dim): the change of output (a, n) with W_Q x_n."""
    factor = g @ head.k[:, None]
    # The maps have one state per token, which broadcasts over the coordinates once these lead.
    return factor if head.pull_q is None else head.pull_q(factor.transpose(0, 1)).transpose(0, 1)


def _key_factor(head: LinearHead, g: Tensor) -> Tensor:
    """(b, value_dim, tokens, head_dim, features): the change of output (a, n) with W_K."""
    if head.pull_k is None:
        return head.q[:, None, :, :, None] * (g @ head.memory[:, None])[..., None, :]
    factors = []
    for coordinate in g.unbind(1):
        # (tokens, b, keys, head_dim): the maps have one state per key. One coordinate at a time, to bound the memory.
        by_key = (coordinate[..., None] * head.q[:, :, None, :]).transpose(0, 1)
        factors.append(head.pull_k(by_key).transpose(0, 1).mT @ head.memory[:, None])
    return torch.stack(factors, 1)
