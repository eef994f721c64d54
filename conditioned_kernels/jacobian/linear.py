"""One attention head and its derivative, in closed form, matrix free.

With P the probabilities, t = P * cap'(.) * scale and A the output, a change dz of the scaled logits changes row n of
the output by ``sum_m t_nm dz_nm (v_m - A_n)``, and dz_nm = dq_n . k_m + q_n . dk_m. That, the product of dv with P, and
the norms and rotations between a weight and q or k, are the whole Jacobian; the functions here are those sums as
matrix products. No gradient is recorded and no attention kernel is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .heads import AttentionHeads, HeadNorm, Rotary, mapped

TangentMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LinearHead:
    """The derivative of a batch of heads at one point, all float64 with the same leading dimensions.

    Attributes
    ----------
    x, memory, values : (..., tokens, features): what W_Q, W_K and W_V multiply.
    q, k, v : (..., tokens, head_dim), after norms and rotation.
    p : (..., tokens, keys), the probabilities.
    t : p * scale * the soft cap's slope.
    output : p v.
    push_q, pull_q, push_k, pull_k : from a change of x W^T to one of q or k, and transposed; None for the identity.
    sink : (..., tokens), the probability that goes to no key; None for none.
    channels : attention over channels. The same sums with tokens and coordinates exchanged: q, k, v and output are
        (..., head_dim, tokens), p is (..., head_dim, head_dim), and a weight changes q by (x dW^T)^T.
    """

    x: Tensor
    memory: Tensor
    values: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    t: Tensor
    output: Tensor
    push_q: TangentMap | None
    pull_q: TangentMap | None
    push_k: TangentMap | None
    pull_k: TangentMap | None
    sink: Tensor | None = None
    channels: bool = False

    def turned(self, part: Tensor) -> Tensor:
        """From (tokens, coordinates) to the axes of q, k, v and output, or back."""
        return part.mT if self.channels else part

    def jvp(self, dw_q: Tensor, dw_k: Tensor, dw_v: Tensor) -> Tensor:
        """J [dw_q, dw_k, dw_v], (..., tokens, value_dim)."""
        dq = _through(self.push_q, self.turned(self.x @ dw_q.mT))
        dk = _through(self.push_k, self.turned(self.memory @ dw_k.mT))
        e = self.t * (dq @ self.k.mT + self.q @ dk.mT)
        da = e @ self.v - e.sum(-1, keepdim=True) * self.output + self.p @ self.turned(self.values @ dw_v.mT)
        return self.turned(da)

    def vjp(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """J^T u as (gw_q, gw_k, gw_v), each of its weight's shape; u is (..., tokens, value_dim)."""
        u = self.turned(u)
        e = self.t * (u @ self.v.mT - (u * self.output).sum(-1, keepdim=True))
        gq, gk = _through(self.pull_q, e @ self.k), _through(self.pull_k, e.mT @ self.q)
        gq, gk, gv = (self.turned(each) for each in (gq, gk, self.p.mT @ u))
        return gq.mT @ self.x, gk.mT @ self.memory, gv.mT @ self.values

    def compressed(self) -> LinearHead:
        """The same with as few rows and columns of J as tokens allow.

        *Columns.* J touches a weight only through X W^T. With X = L Q^T, Q orthonormal (X^T = Q L^T is a thin QR), W
        may be replaced by W Q, which is head_dim x min(tokens, in_features); the singular values stay.

        *Rows.* W_Q and W_K change an output only along differences of values, which span at most keys - 1 directions of
        value space (a sink counts as a key with value 0). Along the rest J is I (x) (P X) alone. In a basis of value
        space that starts with the differences, J is block diagonal, and this keeps the first block; the singular values
        of the others are those of :meth:`context`. So where :attr:`spare` is true, sigma_min(J) = sigma_min(P X)
        exactly, since the first block contains I (x) (P X) too. Over channels no direction is spare.
        """
        new, done = {}, {}
        for name in ("x", "memory", "values"):
            tokens = getattr(self, name)
            if tokens.shape[-2] < tokens.shape[-1]:
                if id(tokens) not in done:
                    done[id(tokens)] = torch.linalg.qr(tokens.mT, mode="r").R.mT
                new[name] = done[id(tokens)]
        if self.spare:
            others = self.v[..., 1:, :] if self.sink is None and self.v.shape[-2] > 1 else self.v
            basis = torch.linalg.qr((others - self.v[..., :1, :] if self.sink is None else others).mT).Q
            new |= {"v": self.v @ basis, "output": self.output @ basis}
        return replace(self, **new)

    def rotated(self) -> LinearHead:
        """The same J in a basis of value space along which values vary independently (their principal axes)."""
        if self.channels:
            return self
        axes = torch.linalg.svd(self.v - self.v.mean(-2, keepdim=True)).Vh.mT
        return replace(self, v=self.v @ axes, output=self.output @ axes)

    @property
    def spare(self) -> bool:
        """Whether value space has directions along which no two values differ."""
        return not self.channels and max(1, self.v.shape[-2] - (self.sink is None)) < self.v.shape[-1]

    @property
    def blocks(self) -> tuple[int, int]:
        """(coordinates, tokens): the shape of a row index."""
        coordinates, tokens = self.turned(self.output).shape[:-3:-1]
        return coordinates, tokens

    def context(self) -> Tensor:
        """P X, what W_V multiplies; J contains I (x) (P X), so sigma_min(J) >= sigma_min(P X) for a wide J."""
        return self.p @ self.values

    def gram_product(self, u: Tensor) -> Tensor:
        """J J^T u for u (b, rows), rows ordered as in :mod:`.dense`."""
        back = self.vjp(u.view(-1, *self.blocks).mT)
        return self.jvp(*back).mT.flatten(1)


def _through(change: TangentMap | None, value: Tensor) -> Tensor:
    return value if change is None else change(value)


def linearize(heads: AttentionHeads) -> LinearHead:
    """Evaluate ``heads`` in float64 and keep what its derivative needs."""
    heads = mapped(heads, lambda tensor, _: tensor if tensor.dtype == torch.bool else tensor.detach().double())
    x = heads.x
    memory = x if heads.memory is None else heads.memory
    values = memory if heads.values is None else heads.values
    q, push_q, pull_q = _side(heads, x, heads.w_q, heads.b_q, heads.norm_q, heads.rope)
    key_rope = heads.rope if heads.shared_keys is None else None
    k, push_k, pull_k = _side(heads, memory, heads.w_k, heads.b_k, heads.norm_k, key_rope)
    if heads.shared_keys is not None:
        k, push_k, pull_k = _beside(heads.shared_keys, k, push_k, pull_k)
    v, _, _ = _side(heads, values, heads.w_v, heads.b_v, None, None)
    scale = heads.w_q.shape[-2] ** -0.5 if heads.scale is None else heads.scale
    if isinstance(scale, Tensor):
        scale = scale[..., None, None]
    logits, slope = scale * (q @ k.mT), scale
    if heads.softcap is not None:
        bent = torch.tanh(logits / heads.softcap)
        logits, slope = heads.softcap * bent, scale * (1 - bent * bent)
    p, sink = probabilities(logits, heads.mask, heads.sink)
    maps = (push_q, pull_q, push_k, pull_k)
    return LinearHead(x, memory, values, q, k, v, p, p * slope, p @ v, *maps, sink, heads.channels)


def probabilities(logits: Tensor, mask: Tensor | None, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """softmax(logits + mask), a row without any key being 0, and what of each row goes to the sink."""
    if mask is not None:
        logits = torch.where(mask, logits, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if sink is not None:
        sink = sink[..., None, None]
        shape = torch.broadcast_shapes(logits.shape[:-1], sink.shape[:-1])
        whole = torch.cat((logits.expand(*shape, -1), sink.expand(*shape, 1)), -1).softmax(-1)
        return whole[..., :-1], whole[..., -1]
    if mask is None:
        return logits.softmax(-1), None
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0), None


def _side(
    heads: AttentionHeads,
    tokens: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: HeadNorm | None,
    rope: Rotary | None,
) -> tuple[Tensor, TangentMap | None, TangentMap | None]:
    """q, k or v, with the map of its tangents and the transposed map."""
    raw = tokens @ weight.mT
    if bias is not None:
        raw = raw + bias[..., None, :]
    if heads.channels:
        raw = raw.mT
    pushes: list[TangentMap] = []
    pulls: list[TangentMap] = []
    stages: list[Rotary | HeadNorm | None] = [norm, rope]
    for stage in stages if heads.norm_first else stages[::-1]:
        if stage is None:
            continue
        raw, push, pull = _rotation(stage, raw) if isinstance(stage, Rotary) else normalized(stage, raw)
        pushes.append(push)
        pulls.insert(0, pull)
    return raw, _chain(pushes), _chain(pulls)


def _chain(maps: list[TangentMap]) -> TangentMap | None:
    if not maps:
        return None

    def chained(value: Tensor) -> Tensor:
        for each in maps:
            value = each(value)
        return value

    return chained


def _rotation(rope: Rotary, raw: Tensor) -> tuple[Tensor, TangentMap, TangentMap]:
    return rope.rotate(raw), rope.rotate, rope.pull


def _beside(
    shared: Tensor, k: Tensor, push: TangentMap | None, pull: TangentMap | None
) -> tuple[Tensor, TangentMap, TangentMap]:
    """Keys with coordinates before them that no weight of the head moves."""
    size, shape = shared.shape[-1], torch.broadcast_shapes(shared.shape[:-1], k.shape[:-1])
    whole = torch.cat((shared.expand(*shape, size), k.expand(*shape, k.shape[-1])), -1)
    return (
        whole,
        lambda change: torch.nn.functional.pad(_through(push, change), (size, 0)),
        lambda change: _through(pull, change[..., size:]),
    )


def normalized(norm: HeadNorm, raw: Tensor) -> tuple[Tensor, TangentMap, TangentMap]:
    """y = gain c / rho, so dy = gain (dc - c (c . dc) / (count rho^2)) / rho; without gain the map is symmetric."""
    centered, count = norm.kind == "layer", 1 if norm.kind == "l2" else norm.over or raw.shape[-1]
    gain = 1.0 if norm.gain is None else norm.gain[..., None, :]

    def center(value: Tensor) -> Tensor:
        return value - value.mean(-1, keepdim=True) if centered else value

    c = center(raw)
    square = (c * c).sum(-1, keepdim=True)
    square = (square if norm.others is None else square + norm.others[..., None]) / count + norm.eps
    unit = square.rsqrt()

    def inner(change: Tensor) -> Tensor:
        change = center(change)
        return center(unit * (change - c * ((c * change).sum(-1, keepdim=True) / (count * square))))

    value = gain * (c * unit)
    if norm.bias is not None:
        value = value + norm.bias[..., None, :]
    return value, lambda change: gain * inner(change), lambda change: inner(gain * change)
