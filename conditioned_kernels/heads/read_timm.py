"""Readers of torch's own attention class and those of timm: from a module and one call to what the call computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..jacobian.heads import NoJacobian, Rotary
from ..jacobian.linear import normalized
from .reading import UNIT, Call, Reading, added, norm_of, number

if TYPE_CHECKING:
    from .mechanics import Mechanics


def torch_attention(module: Any, call: Call, row: Mechanics) -> Reading:
    """nn.MultiheadAttention; its masks are True where a key is left out."""
    query, key, value = (call[name] for name in ("query", "key", "value"))
    if query.is_nested or key.is_nested or value.is_nested:
        raise NoJacobian("nested tensors are not covered; pass padded ones")
    heads = module.num_heads
    alone = query.ndim == 2
    order = (lambda each: each[None]) if alone else (lambda each: each if module.batch_first else each.transpose(0, 1))
    same = key is query, value is key
    query, key, value = (order(each) for each in (query, key, value))
    mask, padding = call.get("attn_mask"), call.get("key_padding_mask")
    if mask is not None:
        mask = ~mask if mask.dtype == torch.bool else mask
        if mask.ndim == 3:
            mask = mask.unflatten(0, (-1, heads))
    if padding is not None:
        padding = padding[None] if alone else padding
        padding = (~padding if padding.dtype == torch.bool else padding)[:, None, None, :]
        mask = padding if mask is None else added(mask, padding)
    return Reading(query, None if same[0] else key, None if same[1] else value, mask=mask)


def vit(module: Any, call: Call, row: Mechanics) -> Reading:
    """ViT's attention; where its call has rotary angles, the first tokens have none."""
    x, mask = call["x"], call.get("attn_mask")
    if call.get("is_causal"):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None]
    return Reading(
        x,
        mask=mask,
        rope=None if call.get("rope") is None else _rope(module, call["rope"]),
        scale=number(module, row.scale),
        norm_q=norm_of(module, "q_norm"),
        norm_k=norm_of(module, "k_norm"),
    )


def _rope(module: Any, angles: Tensor) -> Rotary:
    """From sin and cos side by side, ([samples, [heads,]] tokens, 2 rotated); the prefix tokens are not turned."""
    sin, cos = angles[(None,) * (4 - angles.ndim)].chunk(2, -1)
    before = (0, 0, int(module.num_prefix_tokens), 0)
    cos, sin = F.pad(cos, before, value=1.0), F.pad(sin, before)
    return Rotary(cos, sin, interleaved=not getattr(module, "rotate_half", False))


def beit(module: Any, call: Call, row: Mechanics) -> Reading:
    """Biases of relative positions, its own and shared ones."""
    own = None if module.relative_position_bias_table is None else module._get_rel_pos_bias()
    return Reading(call["x"], mask=added(own, call.get("shared_rel_pos_bias")), scale=number(module, row.scale))


def pool(module: Any, call: Call, row: Mechanics) -> Reading:
    """Learned queries ask, all tokens answer."""
    x, position = call["x"], module.pos_embed
    return Reading(
        module.latent.expand(len(x), -1, -1),
        x if position is None else x + position.to(x.dtype),
        mask=call.get("attn_mask"),
        scale=number(module, row.scale),
        norm_q=norm_of(module, "q_norm"),
        norm_k=norm_of(module, "k_norm"),
    )


def class_token(module: Any, call: Call, row: Mechanics) -> Reading:
    """Class attention: the first token alone asks, all tokens answer."""
    return Reading(call["x"][:, :1], call["x"], scale=number(module, row.scale))


def window(module: Any, call: Call, row: Mechanics) -> Reading:
    """Swin's windows, which are its samples: the mask's first axis is the window inside the image."""
    bias = module._get_rel_pos_bias()
    return Reading(call["x"], mask=window_bias(bias, call.get("mask"), len(call["x"])), scale=number(module, row.scale))


def window_v2(module: Any, call: Call, row: Mechanics) -> Reading:
    """Swin V2: cosine attention with a scale per head."""
    bias = log_bias(module, module.cpb_mlp)
    mask = window_bias(bias, call.get("mask"), len(call["x"]))
    return Reading(call["x"], mask=mask, scale=log_scale(module), norm_q=UNIT, norm_k=UNIT)


def window_bias(bias: Tensor, mask: Tensor | None, windows: int) -> Tensor:
    """A bias of positions (heads, tokens, tokens), with the mask of each window inside the image."""
    return bias if mask is None else bias + mask.repeat(windows // len(mask), 1, 1)[:, None]


def log_scale(module: Any) -> Tensor:
    """Swin V2's scale of each head."""
    return module.logit_scale.double().clamp(max=math.log(100.0)).exp().flatten()


def log_bias(module: Any, mlp: Sequence[Any]) -> Tensor:
    """Swin V2's bias, of an MLP over log-spaced relative coordinates; (heads, tokens, tokens) in float64."""
    first, _, last = mlp
    table = module.relative_coords_table.double()
    hidden = F.relu(F.linear(table, first.weight.double(), first.bias.double()))
    by_pair = F.linear(hidden, last.weight.double()).flatten(0, -2)[module.relative_position_index.flatten()]
    tokens = math.isqrt(len(by_pair))
    return 16 * torch.sigmoid(by_pair.view(tokens, tokens, -1).permute(2, 0, 1))


def grid(module: Any, call: Call, row: Mechanics) -> Reading:
    """MaxViT's and CoAtNet's windows, as an image (samples, features, height, width) or with features last."""
    x = call["x"].flatten(2).mT if row.image else call["x"].flatten(1, -2)
    position = module.rel_pos
    if position is None:
        return Reading(x, mask=call.get("shared_rel_pos"), scale=number(module, row.scale))
    if any(isinstance(part, nn.Dropout) and part.p and part.training for part in position.modules()):
        raise NoJacobian("its position bias has dropout, so that every call has another; use evaluation mode")
    return Reading(x, mask=position.get_bias(), scale=number(module, row.scale))


def reduced(module: Any, call: Call, row: Mechanics) -> Reading:
    """PVT's and Twins' global attention: keys and values are of an image made smaller by a strided convolution."""
    x = call["x"]
    size = call.get("feat_size", call.get("size"))
    if module.sr is None:
        return Reading(x, scale=number(module, row.scale))

    def made(x: Tensor) -> Tensor:
        image = x.double().mT.unflatten(-1, tuple(size))
        if getattr(module, "pool", None) is not None:
            image = F.adaptive_avg_pool2d(image, module.pool.output_size)
        sr: nn.Conv2d = module.sr
        bias = None if sr.bias is None else sr.bias.double()
        memory = F.conv2d(image, sr.weight.double(), bias, sr.stride, sr.padding).flatten(2).mT
        norm = norm_of(module, "norm")
        memory = memory if norm is None else normalized(norm, memory)[0]
        return memory if getattr(module, "act", None) is None else F.gelu(memory)

    return Reading(x, made=made, scale=number(module, row.scale))


def patches(module: Any, call: Call, row: Mechanics) -> Reading:
    """Twins' local attention: square windows, which are its samples, the image filled up with zeros."""
    side, image = int(module.ws), call["x"].unflatten(1, tuple(call["size"]))
    image = F.pad(image, (0, 0, 0, -image.shape[2] % side, 0, -image.shape[1] % side))
    split = image.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)
    return Reading(split.flatten(3, 4).flatten(0, 2), scale=number(module, row.scale))


def channels(module: Any, call: Call, row: Mechanics) -> Reading:
    """DaViT's attention over channels."""
    reading = Reading(call["x"], channels=True, scale=number(module, row.scale))
    if not getattr(module, "dynamic_scale", False):
        return reading
    return replace(reading, then=lambda picked: replace(picked, scale=picked.x.shape[1] ** -0.5))


def cross_covariance(module: Any, call: Call, row: Mechanics) -> Reading:
    """XCiT: channels of unit length, and a scale per head."""
    scale = module.temperature.flatten()
    return Reading(call["x"], channels=True, scale=scale, norm_q=UNIT, norm_k=UNIT)
