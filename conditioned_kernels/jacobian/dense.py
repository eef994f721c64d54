"""J and J J^T of a batch of linearized heads, as matrices.

Row (a, n) of J is coordinate a of output n, in that order, so that the W_V part is I (x) (P X) as in the paper. Over
channels it is P (x) X, and a W_Q part has one block per coordinate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import LinearHead


def matrix(head: LinearHead) -> Tensor:
    """J as (b, value_dim * tokens, columns), columns in the order of the flattened W_Q, W_K, W_V."""
    g = _logit_factor(head)
    by_q, by_k, x = _query_factor(head, g), _key_factor(head, g), head.x
    if head.channels:
        by_q = torch.diag_embed((by_q @ x[:, None]).permute(0, 2, 3, 1)).permute(0, 3, 1, 4, 2)
        by_v = head.p[:, :, None, :, None] * head.values[:, None, :, None, :]
    else:
        by_q = by_q[..., None] * x[:, None, :, None, :]
        context = head.context()
        by_v = context.new_zeros(*g.shape[:3], g.shape[1], context.shape[-1])
        by_v.diagonal(dim1=1, dim2=3).copy_(context[..., None])
    return torch.cat([part.flatten(-2) for part in (by_q, by_k, by_v)], -1).flatten(1, 2)


def gram(head: LinearHead) -> Tensor:
    """J J^T as (b, rows, rows), rows = value_dim * tokens.

    Three products of rows^2: the W_Q part is (C C^T) times X X^T elementwise, where C is head_dim wide; the W_K part
    likewise with the roles of tokens and coordinates exchanged, and in full where norms or rotations come between. Over
    channels the W_Q part is block diagonal and the W_V part (P P^T) (x) (X X^T).
    """
    g = _logit_factor(head)
    b, size, tokens = g.shape[:3]
    if head.channels:
        by_k = _key_factor(head, g).flatten(-2).flatten(1, 2)
        out = by_k @ by_k.mT
        blocks = out.view(b, size, tokens, size, tokens)
        by_q = _query_factor(head, g) @ head.x[:, None]
        blocks.diagonal(dim1=1, dim2=3).add_((by_q @ by_q.mT).permute(0, 2, 3, 1))
        blocks += (head.p @ head.p.mT)[:, :, None, :, None] * (head.values @ head.values.mT)[:, None, :, None, :]
        return out
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
    if head.channels:
        by_q, sizes = _query_factor(head, g) @ head.x[:, None], _met(head).square().sum(-1)
        by_v = head.p.square().sum(-1)[:, :, None, None] * (head.values @ head.values.mT)[:, None]
        return by_q @ by_q.mT + (g * sizes[:, :, None]) @ g.mT + by_v
    c, gm, context = _query_factor(head, g), g @ head.memory[:, None], head.context()
    by_q = (c @ c.mT) * (head.x @ head.x.mT)[:, None]
    by_k = (gm @ gm.mT) * (head.q @ head.q.mT)[:, None]
    return by_q + by_k + (context @ context.mT)[:, None]


def _logit_factor(head: LinearHead) -> Tensor:
    """t_nm (v_ma - A_na) as (b, value_dim, tokens, keys): what logit (n, m) does to output (a, n).

    Over channels t_ac (v_cn - A_an) as (b, head_dim, tokens, head_dim): what logit (a, c) does to it.
    """
    if head.channels:
        return head.t[:, :, None, :] * (head.v.mT[:, None] - head.output[..., None])
    return head.t[:, None] * (head.v.mT[:, :, None, :] - head.output.mT[..., None])


def _query_factor(head: LinearHead, g: Tensor) -> Tensor:
    """(b, value_dim, tokens, head_dim): the change of output (a, n) with W_Q x_n.

    Over channels (b, head_dim, tokens, tokens): its change with row a of W_Q X^T.
    """
    factor = g @ head.k[:, None]
    if head.pull_q is None:
        return factor
    # The maps have one state per row of q, which broadcasts over the axes before.
    across, back = ((2, 0, 1, 3), (1, 2, 0, 3)) if head.channels else ((1, 0, 2, 3), (1, 0, 2, 3))
    return head.pull_q(factor.permute(across)).permute(back)


def _key_factor(head: LinearHead, g: Tensor) -> Tensor:
    """(b, value_dim, tokens, head_dim, features): the change of output (a, n) with W_K."""
    if head.channels:
        return g[..., None] * _met(head)[:, :, None]
    if head.pull_k is None:
        return head.q[:, None, :, :, None] * (g @ head.memory[:, None])[..., None, :]
    factors = []
    for coordinate in g.unbind(1):
        # (tokens, b, keys, head_dim): the maps have one state per key. One coordinate at a time, to bound the memory.
        by_key = (coordinate[..., None] * head.q[:, :, None, :]).transpose(0, 1)
        factors.append(head.pull_k(by_key).transpose(0, 1).mT @ head.memory[:, None])
    return torch.stack(factors, 1)


def _met(head: LinearHead) -> Tensor:
    """Over channels (b, head_dim, head_dim, features): the change of logit (a, c) / t with row c of W_K."""
    # (head_dim, b, head_dim, tokens): the maps have one state per k.
    met = head.q.transpose(0, 1)[:, :, None].expand(-1, -1, head.k.shape[-2], -1)
    return (met if head.pull_k is None else head.pull_k(met)).transpose(0, 1) @ head.memory[:, None]
