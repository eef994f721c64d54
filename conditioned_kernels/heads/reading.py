"""What one call of an attention module computes, and the part of it that a Jacobian is taken of."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import _validate
from ..jacobian.heads import AttentionHeads, HeadNorm, NoJacobian, Rotary
from .layout import attribute
from .wrappers import full_name

Call = Mapping[str, Any]
"""The arguments of one call of a module's forward, by name."""


@dataclass(frozen=True)
class Reading:
    """What one call does, for all its samples, heads and tokens.

    Attributes
    ----------
    x, memory, values : (samples, tokens, features).
    mask : broadcastable to (samples, heads, tokens, keys), booleans that keep or numbers that are added.
    rope : cos and sin (samples or 1, heads or 1, tokens, rotated).
    scale, sink : numbers or (heads,).
    shared_keys : (samples, 1, tokens, shared).
    norm_q, norm_k : with gains (head_dim), (heads, head_dim), or (heads * head_dim) for a norm over all heads.
    made : the memory, from all tokens of the samples that were picked.
    then : what only the tokens that were picked have a part in.
    """

    x: Tensor
    memory: Tensor | None = None
    values: Tensor | None = None
    mask: Tensor | None = None
    rope: Rotary | None = None
    scale: float | Tensor | None = None
    softcap: float | None = None
    norm_q: HeadNorm | None = None
    norm_k: HeadNorm | None = None
    norm_first: bool = True
    sink: Tensor | None = None
    shared_keys: Tensor | None = None
    channels: bool = False
    made: Callable[[Tensor], Tensor] | None = None
    then: Callable[[Reading], Reading] | None = None


# --- for the readers -----------------------------------------------------------------------------------------------

_NORMS: dict[str, tuple[str, float, str]] = {
    "torch.nn.modules.normalization.LayerNorm": ("layer", 0.0, "eps"),
    "timm.layers.norm.LayerNorm": ("layer", 0.0, "eps"),
    "torch.nn.modules.normalization.RMSNorm": ("rms", 0.0, "eps"),
    "timm.layers.norm.RmsNorm": ("rms", 0.0, "eps"),
    "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm": ("rms", 0.0, "variance_epsilon"),
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeRMSNorm": ("rms", 0.0, "variance_epsilon"),
    "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextRMSNorm": ("rms", 1.0, "eps"),
    "transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm": ("rms", 1.0, "eps"),
    "transformers.models.olmo2.modeling_olmo2.Olmo2RMSNorm": ("rms", 0.0, "variance_epsilon"),
    "transformers.models.llama4.modeling_llama4.Llama4TextL2Norm": ("rms", 0.0, "eps"),
    "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2RMSNorm": ("rms", 0.0, "variance_epsilon"),
    "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3RMSNorm": ("rms", 0.0, "variance_epsilon"),
    "transformers.models.cohere.modeling_cohere.CohereLayerNorm": ("layer", 0.0, "variance_epsilon"),
    "transformers.models.nanochat.modeling_nanochat.NanoChatRMSNorm": ("rms", 0.0, "eps"),
    **{
        f"transformers.models.{model}.modeling_{model}.{prefix}RMSNorm": ("rms", 0.0, "variance_epsilon")
        for model, prefix in (
            ("apertus", "Apertus"),
            ("dots1", "Dots1"),
            ("exaone4", "Exaone4"),
            ("flex_olmo", "FlexOlmo"),
            ("glm4_moe", "Glm4Moe"),
            ("hunyuan_v1_dense", "HunYuanDenseV1"),
            ("hunyuan_v1_moe", "HunYuanMoEV1"),
            ("lfm2", "Lfm2"),
            ("minimax_m2", "MiniMaxM2"),
            ("olmo3", "Olmo3"),
            ("olmoe", "Olmoe"),
            ("qwen3_vl", "Qwen3VLText"),
            ("qwen3_vl_moe", "Qwen3VLMoeText"),
        )
    },
}
"""Norms: kind, what is added to the stored gain, and the attribute of eps."""

UNIT = HeadNorm("l2", eps=1e-24)
"""torch.nn.functional.normalize, which divides by max(norm, 1e-12)."""


def norm_of(module: nn.Module, path: str) -> HeadNorm | None:
    """The norm that ``module`` keeps at ``path``; None where there is none."""
    norm = getattr(module, path, None) if path else None
    if norm is None or isinstance(norm, nn.Identity):
        return None
    if full_name(type(norm)) not in _NORMS:
        raise NoJacobian(f"{path} is a {full_name(type(norm))}, which is not known")
    kind, offset, eps = _NORMS[full_name(type(norm))]
    gain, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    size = getattr(norm, eps)
    if size is None:
        size = torch.finfo(torch.float32).eps if gain is None else torch.finfo(gain.dtype).eps
    return HeadNorm(kind, None if gain is None else gain.double() + offset, bias, float(size))


def number(module: nn.Module, path: str) -> float | None:
    """The number at ``path``; None for no path."""
    value = attribute(module, path) if path else None
    if value is not None and not isinstance(value, float | int):
        raise NoJacobian(f"{path} is a {type(value).__name__}, expected a number")
    return None if value is None else float(value)


def added(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Two masks at once, each booleans that keep or numbers that are added."""
    if mask is None or other is None:
        return other if mask is None else mask
    if mask.dtype == torch.bool and other.dtype == torch.bool:
        return mask & other
    numbers, kept = (other, mask) if mask.dtype == torch.bool else (mask, other)
    return torch.where(kept, numbers, -torch.inf) if kept.dtype == torch.bool else numbers + kept


def linear(layer: Any, x: Tensor) -> Tensor:
    """What nn.Linear does, in float64 and without its hooks."""
    bias = layer.bias
    return torch.nn.functional.linear(x.double(), layer.weight.double(), None if bias is None else bias.double())


# --- sampling ------------------------------------------------------------------------------------------------------


def sampled(reading: Reading, samples: int | None, tokens: int | None) -> Reading:
    """The same for the first ``samples`` and a window of ``tokens``; see :func:`attention_heads`."""
    length = sys.maxsize if tokens is None else tokens
    mask, rope = reading.mask, reading.rope
    if mask is not None:
        mask = _narrow(mask[(None,) * (4 - mask.ndim)], 0, 0, samples)
    x = reading.x[:samples]
    memory, values = (None if part is None else part[:samples] for part in (reading.memory, reading.values))
    if reading.made is not None:
        memory = reading.made(x)
    seen = 0 if mask is None else _first_seen(mask, length)
    first = seen if memory is None else 0
    if rope is not None:
        cos, sin = (_narrow(_narrow(each, 0, 0, samples), -2, first, length) for each in (rope.cos, rope.sin))
        rope = replace(rope, cos=cos, sin=sin)
    if mask is not None:
        mask = _narrow(_narrow(mask, -2, first, length), -1, seen, length)
    memory, values = (None if part is None else part[:, seen : seen + length] for part in (memory, values))
    cut = replace(reading, x=x[:, first : first + length], memory=memory, values=values, mask=mask, rope=rope)
    return cut if reading.then is None else reading.then(cut)


def _narrow(tensor: Tensor, dim: int, start: int, length: int | None) -> Tensor:
    """A slice of an axis, unless it has size 1 and broadcasts."""
    size = tensor.shape[dim]
    return tensor if size == 1 or length is None else tensor.narrow(dim, start, min(length, size - start))


def _first_seen(mask: Tensor, length: int) -> int:
    """Where the first window of ``length`` keys starts all of which some query sees; 0 if there is none."""
    seen = mask if mask.dtype == torch.bool else mask > -1e4
    kept = seen.flatten(0, 1).any(-2).all(0)
    if kept.shape[0] <= length:
        return 0
    windows = kept.unfold(0, length, 1).all(-1).nonzero()
    return int(windows[0]) if len(windows) else 0


# --- the problem ---------------------------------------------------------------------------------------------------


def assembled(
    reading: Reading,
    weights: Mapping[str, Tensor],
    biases: Mapping[str, Tensor | None],
    heads: int | Sequence[int] | None,
) -> AttentionHeads:
    """The chosen heads' problem; it shares no memory with the call or the module."""
    count = len(weights["q"])
    index = _chosen(heads, count)

    def own(tensor: Tensor, dim: int = 0) -> Tensor:
        """The rows of the chosen query heads, from one row per head or per K/V head."""
        number = tensor.shape[dim]
        return tensor.detach().index_select(dim, (index // (count // number)).to(tensor.device))

    def norm(part: HeadNorm | None, role: str, tokens: Tensor) -> HeadNorm | None:
        if part is None:
            return None
        number, size = weights[role].shape[:2]
        if part.gain is not None and part.gain.ndim == 1 and part.gain.numel() == number * size > size:
            square = _raw(tokens, weights[role], biases[role]).square().sum(-1)
            others = own(square.sum(1, keepdim=True) - square, 1)
            return replace(part, gain=own(part.gain.view(number, size)), others=others, over=number * size)
        if part.gain is not None and part.gain.ndim == 2:
            return replace(part, gain=own(part.gain))
        return replace(part, gain=_copy(part.gain), bias=_copy(part.bias))

    mask, rope, scale, sink = reading.mask, reading.rope, reading.scale, reading.sink
    if mask is not None:
        mask = own(mask, 1) if mask.shape[1] > 1 else _copy(mask)
    if rope is not None:
        cos, sin = (own(each, 1) if each.shape[1] > 1 else each.detach().clone() for each in (rope.cos, rope.sin))
        rope = replace(rope, cos=cos, sin=sin)
    picked = {f"w_{role}": own(weight) for role, weight in weights.items()}
    picked |= {f"b_{role}": own(bias) for role, bias in biases.items() if bias is not None}
    return AttentionHeads(
        _tokens(reading.x),
        **picked,
        memory=_tokens(reading.memory),
        values=_tokens(reading.values),
        scale=own(scale) if isinstance(scale, Tensor) else scale,
        mask=mask,
        rope=rope,
        norm_q=norm(reading.norm_q, "q", reading.x),
        norm_k=norm(reading.norm_k, "k", reading.x if reading.memory is None else reading.memory),
        norm_first=reading.norm_first,
        softcap=reading.softcap,
        sink=None if sink is None else own(sink),
        shared_keys=_copy(reading.shared_keys),
        channels=reading.channels,
    )


def _chosen(heads: int | Sequence[int] | None, count: int) -> Tensor:
    if heads is None or isinstance(heads, int):
        return torch.arange(count if heads is None else min(count, _validate.count(heads, "heads")))
    try:
        index = [operator.index(head) for head in heads]
    except TypeError:
        raise TypeError(f"heads must be a number of heads or a sequence of their indices, got {heads!r}") from None
    if not index or min(index) < 0 or max(index) >= count:
        raise ValueError(f"heads must be indices of query heads, 0 to {count - 1}, at least one, got {index}")
    return torch.tensor(index)


def _raw(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(samples, heads, tokens, head_dim), before any norm."""
    raw = tokens[:, None].double() @ weight.double().mT
    return raw if bias is None else raw + bias[:, None].double()


def _tokens(x: Tensor | None) -> Any:
    return None if x is None else x[:, None].detach().clone()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
