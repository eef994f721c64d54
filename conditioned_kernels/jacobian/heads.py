"""The attention problem whose Jacobian is wanted, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from .. import _validate

Part = TypeVar("Part", "Rotary", "HeadNorm", "AttentionHeads")


class NoJacobian(ValueError):
    """The attention does something the closed form does not cover; the message says what, and what would help."""


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary positions: the first ``cos.shape[-1]`` coordinates of each query and key are rotated in pairs.

    Attributes
    ----------
    cos, sin : (..., tokens, rotated), one column per coordinate, so each angle is there twice.
    interleaved : pairs are (0, 1), (2, 3), ...; otherwise coordinate i goes with i + rotated / 2, as in Llama.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    TRAILING: ClassVar = {"cos": 2, "sin": 2}

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate (..., tokens, head_dim)."""
        size = self.cos.shape[-1]
        turned = x[..., :size]
        return torch.cat((turned * self.cos + self._quarter(turned) * self.sin, x[..., size:]), -1)

    def pull(self, x: Tensor) -> Tensor:
        """The transposed map; the inverse one where cos and sin carry no scale of their own."""
        size = self.cos.shape[-1]
        turned = x[..., :size]
        return torch.cat((turned * self.cos - self._quarter(turned * self.sin), x[..., size:]), -1)

    def _quarter(self, x: Tensor) -> Tensor:
        if self.interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """A norm over the coordinates of each query or key: ``gain * c / rho + bias``.

    ==========  ==================  ========================
    ``kind``    c                   rho
    ==========  ==================  ========================
    "rms"       x                   sqrt(mean(x^2) + eps)
    "layer"     x - mean(x)         sqrt(mean(c^2) + eps)
    "l2"        x                   sqrt(sum(x^2) + eps)
    ==========  ==================  ========================

    Attributes
    ----------
    kind : as above.
    gain, bias : (..., head_dim), or None for 1 and 0.
    eps : added to the square, as above.
    others, over : of an "rms" norm over the coordinates of all heads at once: (..., tokens), the sum of squares of the
        other heads' coordinates, which J holds fixed, and the number of coordinates that the mean is over.
    """

    kind: str
    gain: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    others: Tensor | None = None
    over: int | None = None

    TRAILING: ClassVar = {"gain": 1, "bias": 1, "others": 1}

    def __post_init__(self) -> None:
        _validate.choice(self.kind, "kind", ("rms", "layer", "l2"))
        if isinstance(self.eps, bool) or not isinstance(self.eps, float | int) or not 0 <= self.eps < math.inf:
            raise ValueError(f"eps must be a finite number of at least 0, got {self.eps!r}")
        if (self.others is None) != (self.over is None) or (self.over is not None and self.kind != "rms"):
            raise ValueError(f"others and over go together, and with kind 'rms' only, got kind {self.kind!r}")


@dataclass(frozen=True, eq=False)
class AttentionHeads:
    """One attention head, or a batch of them: ``A = softmax(cap(scale * q k^T) + mask) v``.

    With ``q = rope(norm(x W_q^T + b_q))``, ``k = rope(norm(m W_k^T + b_k))``, ``v = m W_v^T + b_v``, where m are the
    tokens ``memory``, or x itself, and cap(z) = softcap tanh(z / softcap), or z itself. Leading dimensions, written
    "...", are batch (samples, layers, heads) and broadcast against each other. Grouped K/V heads: give each query head
    the W_k and W_v of its group; the Jacobian is that of one query head.

    Attention over channels (XCiT, DaViT) is ``A^T = softmax(scale * q^T k) v^T``, a (head_dim, head_dim) softmax whose
    norms run over the tokens of one channel: ``channels=True``.

    Attributes
    ----------
    x : (..., tokens, in_features).
    w_q, w_k : (..., head_dim, in_features), rows as a head view gives them: the transpose of the paper's W_Q.
    w_v : (..., value_dim, in_features).
    memory : (..., keys, in_features), what keys and values are made of; None for x.
    values : (..., keys, in_features), what values are made of, where that is not what keys are made of.
    b_q, b_k, b_v : (..., head_dim), biases, or None.
    scale : of the logits, a number or a tensor of batch shape; None for 1 / sqrt(head_dim).
    mask : (..., tokens, keys): booleans, True where a query sees a key, or numbers that are added to the logits. A
        query that sees no key has output 0.
    rope : rotary positions of x, for queries and keys alike.
    norm_q, norm_k : norms of queries and keys.
    norm_first : the norms come before the rotation.
    softcap : of the logits, before the mask.
    sink : batch shape; a logit that takes its share of every query's probabilities and has no value (gpt-oss).
    shared_keys : (..., keys, shared), the first coordinates of every key, which no weight of the head makes (the rotary
        key of DeepSeek's latent attention). W_k makes the others, so w_q has ``shared`` rows more than w_k; rope turns
        queries only, and has turned the shared keys already.
    channels : attention over channels, as above; without memory, values, mask, rope, softcap, sink, shared keys and
        gains of norms.
    """

    x: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    memory: Tensor | None = None
    values: Tensor | None = None
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    scale: float | Tensor | None = None
    mask: Tensor | None = None
    rope: Rotary | None = None
    norm_q: HeadNorm | None = None
    norm_k: HeadNorm | None = None
    norm_first: bool = True
    softcap: float | None = None
    sink: Tensor | None = None
    shared_keys: Tensor | None = None
    channels: bool = False

    TRAILING: ClassVar = {
        "x": 2,
        "w_q": 2,
        "w_k": 2,
        "w_v": 2,
        "memory": 2,
        "values": 2,
        "b_q": 1,
        "b_k": 1,
        "b_v": 1,
        "scale": 0,
        "mask": 2,
        "sink": 0,
        "shared_keys": 2,
    }

    def __post_init__(self) -> None:
        _check(self)

    @property
    def shape(self) -> torch.Size:
        """The batch shape, everything broadcast."""
        return torch.broadcast_shapes(*(each.shape[: max(0, each.ndim - trailing)] for each, trailing in tensors(self)))

    @property
    def tokens(self) -> int:
        """Number of queries."""
        return self.x.shape[-2]

    @property
    def keys(self) -> int:
        """Number of keys and values."""
        return (self.x if self.memory is None else self.memory).shape[-2]

    @property
    def rows(self) -> int:
        """Rows of the Jacobian: tokens * value_dim."""
        return self.tokens * self.w_v.shape[-2]

    @property
    def spread(self) -> int:
        """Directions of value space along which W_Q and W_K can move an output, at most: differences of values."""
        size = self.w_v.shape[-2]
        return size if self.channels else min(size, max(1, self.keys - (self.sink is None)))

    @property
    def cols(self) -> int:
        """Columns of the Jacobian: the elements of W_Q, W_K and W_V."""
        return sum(weight.shape[-2] * weight.shape[-1] for weight in (self.w_q, self.w_k, self.w_v))

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """(w_q, w_k, w_v)."""
        return self.w_q, self.w_k, self.w_v

    def with_weights(self, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> AttentionHeads:
        """The same problem with other weights."""
        return replace(self, w_q=w_q, w_k=w_k, w_v=w_v)

    def with_tokens(self, x: Tensor) -> AttentionHeads:
        """The same problem with other tokens."""
        return replace(self, x=x)

    def select(self, index: Tensor) -> AttentionHeads:
        """The problems ``index`` of the flattened batch, as a batch (len(index),)."""
        shape = self.shape
        places = torch.unravel_index(index, shape) if shape else ()

        def pick(tensor: Tensor, trailing: int) -> Tensor:
            expanded = tensor.expand((*shape, *tensor.shape[tensor.ndim - trailing :]))
            return expanded[places] if places else expanded[None].expand(len(index), *expanded.shape)

        return mapped(self, pick)


def tensors(part: Rotary | HeadNorm | AttentionHeads) -> Iterator[tuple[Tensor, int]]:
    """Every tensor of ``part``, of the parts inside it too, with its number of trailing dimensions."""
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            yield value, part.TRAILING[field.name]
        elif isinstance(value, Rotary | HeadNorm):
            yield from tensors(value)


def mapped(part: Part, change: Callable[[Tensor, int], Tensor]) -> Part:
    """``part`` with every tensor, of the parts inside it too, replaced by ``change(tensor, trailing dimensions)``."""
    new: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            new[field.name] = change(value, part.TRAILING[field.name])
        elif isinstance(value, Rotary | HeadNorm):
            new[field.name] = mapped(value, change)  # type: ignore[type-var]
    return replace(part, **new)


def _check(heads: AttentionHeads) -> None:
    for name in ("x", "w_q", "w_k", "w_v", "memory", "values", "shared_keys"):
        value = getattr(heads, name)
        if value is not None:
            _validate.matrices(value, name, allow_complex=False)
    _check_types(heads)
    x, keys, values = heads.x, heads.memory, heads.values
    keys = x if keys is None else keys
    values = keys if values is None else values
    for name, weight, tokens in (("w_q", heads.w_q, x), ("w_k", heads.w_k, keys), ("w_v", heads.w_v, values)):
        if weight.shape[-1] != tokens.shape[-1]:
            raise ValueError(
                f"{name} must have {tokens.shape[-1]} columns, the in_features of its tokens, got shape "
                f"{tuple(weight.shape)}; give weights as (..., head_dim, in_features), as a head view does"
            )
    if not min(*x.shape[-2:], *keys.shape[-2:], *(weight.shape[-2] for weight in heads.weights)):
        raise ValueError(f"x, memory and the weights must not be empty, got x of shape {tuple(x.shape)}")
    shared = 0 if heads.shared_keys is None else heads.shared_keys.shape[-1]
    if heads.w_q.shape[-2] != heads.w_k.shape[-2] + shared:
        raise ValueError(
            f"w_q and w_k must have equal head_dim{f' but for {shared} shared keys' if shared else ''}, got "
            f"{heads.w_q.shape[-2]} and {heads.w_k.shape[-2]}"
        )
    for name, part in (("values", values), ("shared_keys", heads.shared_keys)):
        if part is not None and part.shape[-2] != keys.shape[-2]:
            raise ValueError(f"{name} must have as many tokens as memory, {keys.shape[-2]}, got {part.shape[-2]}")
    for name, rows in (("b_q", heads.w_q), ("b_k", heads.w_k), ("b_v", heads.w_v)):
        _check_vector(getattr(heads, name), name, rows.shape[-2])
    for name, norm, rows, tokens in (("norm_q", heads.norm_q, heads.w_q, x), ("norm_k", heads.norm_k, heads.w_k, keys)):
        if norm is not None:
            _check_vector(norm.gain, f"{name}.gain", rows.shape[-2])
            _check_vector(norm.bias, f"{name}.bias", rows.shape[-2])
            _check_vector(norm.others, f"{name}.others", tokens.shape[-2])
    if heads.mask is not None and not _fits(heads.mask, (x.shape[-2], keys.shape[-2])):
        raise ValueError(
            f"mask must broadcast to (..., {x.shape[-2]}, {keys.shape[-2]}), (tokens, keys), got shape "
            f"{tuple(heads.mask.shape)}"
        )
    if heads.softcap is not None:
        _validate.positive(heads.softcap, "softcap")
    if heads.rope is not None:
        _check_rope(heads)
    if heads.channels:
        _check_channels(heads)
    try:
        heads.shape  # noqa: B018
    except RuntimeError as error:
        raise ValueError(f"the leading dimensions of x, the weights and the rest must broadcast: {error}") from None


_PARTS = {"rope": Rotary, "norm_q": HeadNorm, "norm_k": HeadNorm, "channels": bool, "norm_first": bool}


def _check_types(heads: AttentionHeads) -> None:
    for name, kind in _PARTS.items():
        value = getattr(heads, name)
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    for name in ("b_q", "b_k", "b_v", "sink", "mask"):
        value = getattr(heads, name)
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}; use torch.as_tensor")
    scale = heads.scale
    if isinstance(scale, bool) or not isinstance(scale, float | int | Tensor | None):
        raise TypeError(f"scale must be a number or a tensor of batch shape, got {type(scale).__name__}")
    if isinstance(scale, float | int) and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if heads.mask is not None and heads.mask.dtype != torch.bool and not heads.mask.is_floating_point():
        raise TypeError(
            f"mask must be boolean, True where a query sees a key, or floating, which is added to the logits, got "
            f"{heads.mask.dtype}; pass mask.bool() for a mask of ones and zeros"
        )
    places = {tensor.device: None for tensor, _ in tensors(heads)}
    if len(places) > 1:
        raise ValueError(f"all tensors of a problem must be on one device, got {', '.join(map(str, places))}")
    for tensor, _ in tensors(heads):
        if tensor is not heads.mask and tensor is not heads.scale:
            _validate.floating(tensor, "every number of the problem")


def _check_vector(vector: Tensor | None, name: str, size: int) -> None:
    if vector is not None and vector.shape[-1:] != (size,):
        raise ValueError(f"{name} must be (..., {size}), got shape {tuple(vector.shape)}")


def _check_channels(heads: AttentionHeads) -> None:
    absent = ("memory", "values", "mask", "rope", "softcap", "sink", "shared_keys")
    given = [name for name in absent if getattr(heads, name) is not None]
    norms = [norm for norm in (heads.norm_q, heads.norm_k) if norm is not None]
    given += ["gains of norms" for norm in norms if any(each is not None for each, _ in tensors(norm))]
    if given:
        raise NoJacobian(f"attention over channels is not covered with {', '.join(given)}")
    if heads.w_q.shape[-2] != heads.w_v.shape[-2]:
        raise ValueError(
            f"attention over channels needs w_q, w_k and w_v with equally many rows, got {heads.w_q.shape[-2]} and "
            f"{heads.w_v.shape[-2]}"
        )


def _check_rope(heads: AttentionHeads) -> None:
    rope = heads.rope
    if rope is None:
        return
    if heads.memory is not None and heads.shared_keys is None:
        raise NoJacobian(
            "rope with memory is not covered: keys would need angles of their own; leave memory out, or rotate before"
        )
    rotated = rope.cos.shape[-1]
    if rope.sin.shape != rope.cos.shape or rotated % 2 or rotated > heads.w_q.shape[-2]:
        raise ValueError(
            f"rope.cos and rope.sin must have one shape (..., tokens, rotated), rotated even and at most head_dim "
            f"{heads.w_q.shape[-2]}, got {tuple(rope.cos.shape)} and {tuple(rope.sin.shape)}"
        )
    if rope.cos.shape[-2] not in (1, heads.tokens):
        raise ValueError(f"rope must have {heads.tokens} tokens, as x has, got {rope.cos.shape[-2]}")


def _fits(mask: Tensor, shape: tuple[int, int]) -> bool:
    sizes = (1, 1, *mask.shape)[-2:]
    return all(size in (1, wanted) for size, wanted in zip(sizes, shape, strict=True))


def checked(heads: object) -> AttentionHeads:
    """``heads``, if it is a problem."""
    if not isinstance(heads, AttentionHeads):
        raise TypeError(f"heads must be an AttentionHeads, got {type(heads).__name__}")
    return heads
