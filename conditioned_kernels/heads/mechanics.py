"""What an attention module really computes with its heads: biases, scale, mask, rotation, norms, soft cap.

A row says where a class keeps these things; a reader, one per way of calling attention, turns the row and one call into
an :class:`~conditioned_kernels.AttentionHeads`. Every row is proven in tests/test_mechanics.py against what the class
feeds to its output projection. A class without a row is refused by name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..jacobian.heads import AttentionHeads, HeadNorm, NoJacobian, Rotary
from .discover import AttentionLayer
from .layout import HeadView, LayoutError, Projection, attribute
from .wrappers import full_name, is_adapted, quiet_parametrizations

Call = Mapping[str, Any]
"""The arguments of one call of a module's forward, by name."""


@dataclass(frozen=True)
class Mechanics:
    """One attention class, or several that work alike.

    Attributes
    ----------
    classes : full names ``module.Class``.
    read : turns the module, its call and this row into a :class:`Reading`.
    x, memory, mask, memory_mask, bias : names of arguments: the tokens, those of keys and values, the mask, the mask
        where there is memory, and what is added to the logits. "" for none.
    scale : attribute with the logits' scale; "" for 1 / sqrt(head_dim).
    rope : "" for none; "halves" pairs coordinate i with i + rotated / 2, "pairs" and "pairs, stored in halves" pair
        2i with 2i + 1.
    softcap : attribute with the soft cap.
    norms : attributes with the norms of queries and keys.
    refused : (attribute, reason): a true value there is not covered.
    """

    classes: tuple[str, ...]
    read: Callable[[nn.Module, Call, Mechanics], Reading]
    x: str = "hidden_states"
    memory: str = ""
    mask: str = "attention_mask"
    memory_mask: str = ""
    bias: str = ""
    scale: str = "scaling"
    rope: str = ""
    softcap: str = ""
    norms: tuple[str, str] = ("", "")
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Reading:
    """What one call does, for all its samples, heads and tokens.

    Attributes
    ----------
    x, memory, values : (samples, tokens, features).
    mask : broadcastable to (samples, heads, tokens, keys), booleans that keep or numbers that are added.
    rope : cos and sin (samples or 1, tokens, rotated).
    scale, softcap : numbers; scale may be (heads,).
    norm_q, norm_k : with gains (head_dim) or (heads, head_dim).
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


def attention_heads(
    layer: AttentionLayer,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    samples: int | None = 1,
    tokens: int | None = 32,
    heads: int | Sequence[int] | None = None,
) -> AttentionHeads:
    """The problem that ``layer.module(*args, **kwargs)`` solves, for its Jacobian.

    Nothing is computed but slices: the module is not called, torch's random state not touched, and the result shares no
    memory with the call. Dropout is left out.

    Parameters
    ----------
    layer : from :func:`conditioned_kernels.find_attention`.
    args, kwargs : of the call, as a forward pre-hook registered ``with_kwargs=True`` sees them.
    samples : how many, from the first; None for all.
    tokens : length of the window of tokens; None for all. The problem is attention restricted to these tokens, with
        their own positions and mask: a query sees no key outside. In self-attention the window is the first in which
        every token is seen by some query of the call, so that it avoids padding; in cross-attention queries and keys
        are the first ``tokens`` of each.
    heads : the first so many query heads, or their indices; None for all.

    Returns
    -------
    AttentionHeads of shape (samples, heads).

    Raises
    ------
    NoJacobian
        for a class without a row of mechanics, and for a call that does what is not covered (a filled cache of keys,
        weights behind an adapter, flexible masks, bias_k, ...), named with its reason.
    """
    module = layer.module
    row = _BY_CLASS.get(layer.family)
    name = f"{layer.name or type(module).__name__}: class {layer.family}"
    if row is None:
        raise NoJacobian(
            f"{name} has no row of mechanics, so its scale, mask and positions are unknown; condition numbers of its "
            "weights work all the same, and conditioned_kernels.AttentionHeads takes the problem in numbers"
        )
    for path, reason in row.refused:
        if getattr(module, path, None) is not None and getattr(module, path) is not False:
            raise NoJacobian(f"{name} with {path} is not covered: {reason}")
    try:
        with torch.no_grad(), quiet_parametrizations(module):
            bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
            call = {**bound.arguments, **bound.arguments.get("kwargs", {})}
            weights, biases = _weights(layer)
            reading = row.read(module, call, row)
            return _assemble(_sampled(reading, samples, tokens), weights, biases, heads)
    except (LayoutError, NoJacobian) as error:
        raise NoJacobian(f"{name}: {error}") from error


# --- weights -------------------------------------------------------------------------------------------------------


def _weights(layer: AttentionLayer) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """(heads, head_dim, in_features) and (heads, head_dim) by role, one per query head or per K/V head."""
    by_label = {projection.label: projection for projection in layer.projections}
    if set(by_label) != {"q", "k", "v"} or len(layer.projections) != 3:
        raise NoJacobian(f"has projections {sorted(by_label)}, and only one each of q, k and v is covered")
    weights, biases = {}, {}
    for role, projection in by_label.items():
        if is_adapted(projection.parameter):
            raise NoJacobian(f"{projection.parameter} is behind an adapter, which changes the map; merge it first")
        weights[role] = projection.view(layer.weight(projection)).flatten(0, -3)
        bias = _bias(layer, projection)
        biases[role] = None if bias is None else bias.flatten(0, -2)
    return weights, biases


def _bias(layer: AttentionLayer, projection: Projection) -> Tensor | None:
    owner, attribute_name = layer.owner(projection), projection.parameter.rpartition(".")[2]
    if owner is layer.module:
        # nn.MultiheadAttention: one bias for three weights.
        whole = getattr(owner, "in_proj_bias", None)
        if whole is None:
            return None
        rows = whole.unflatten(0, (3, -1))["qkv".index(projection.role)]
        return rows.unflatten(0, (layer.module.num_heads, -1))
    bias = getattr(owner, attribute_name.replace("weight", "bias"), None)
    if bias is None:
        return None
    input_major = isinstance(projection.view, HeadView) and projection.view.input_major
    return projection.view(bias[None] if input_major else bias[:, None])[..., 0]


# --- readers -------------------------------------------------------------------------------------------------------


def _transformers(module: nn.Module, call: Call, row: Mechanics) -> Reading:
    """A class of transformers that goes through its attention interface."""
    memory = call.get(row.memory) if row.memory else None
    _refuse_cache(module, call, memory is not None)
    mask = call.get(row.memory_mask if memory is not None and row.memory_mask else row.mask)
    reading = Reading(
        call[row.x],
        memory,
        mask=_transformers_mask(module, call, mask, memory),
        scale=_number(module, row.scale),
        softcap=_number(module, row.softcap) if row.softcap else None,
        rope=_rope(call, row.rope) if row.rope else None,
        norm_q=_norm(module, row.norms[0]),
        norm_k=_norm(module, row.norms[1]),
    )
    bias = _position_bias(module, call, row, reading) if row.bias else None
    return reading if bias is None else replace(reading, mask=_added(reading.mask, bias))


def _refuse_cache(module: nn.Module, call: Call, cross: bool) -> None:
    cache = next(
        (call[name] for name in ("cache", "past_key_values", "layer_past") if call.get(name) is not None), None
    )
    if cache is None:
        return
    index = getattr(module, "layer_idx", None)
    cache = getattr(cache, "cross_attention_cache" if cross else "self_attention_cache", cache)
    if not callable(getattr(cache, "get_seq_length", None)) or int(cache.get_seq_length(index)):
        raise NoJacobian("its call reads keys and values from a cache, which no weight of this call made")


def _transformers_mask(module: nn.Module, call: Call, mask: object, memory: Tensor | None) -> Tensor | None:
    """The mask as the attention interface takes it: None may mean causal or a window, 2-D is padding."""
    kind = getattr(getattr(module, "config", None), "_attn_implementation", None) or "eager"
    causal = call.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    x = call["hidden_states"]
    tokens, keys = x.shape[1], (x if memory is None else memory).shape[1]
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return mask[..., :keys]
    if mask is not None and not isinstance(mask, Tensor):
        raise NoJacobian(f"its mask is a {type(mask).__name__}; use attention implementation 'sdpa' or 'eager'")
    if mask is not None and mask.ndim != 2:
        raise NoJacobian(f"its mask has {mask.ndim} dimensions, and 2 or 4 are covered")
    kept = None if mask is None else mask.bool()[:, None, None, :]
    window = getattr(module, "sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    if kind == "eager" or tokens == 1 or (window is None and not causal):
        return kept
    position = torch.arange(keys, device=x.device)
    distance = position[:tokens, None] - position
    reach = keys if window is None else window
    seen = (distance < reach) & (distance >= 0 if causal else distance > -reach)
    return seen if kept is None else kept & seen


def _position_bias(module: nn.Module, call: Call, row: Mechanics, reading: Reading) -> Tensor | None:
    given = call.get(row.bias)
    if given is not None:
        return given
    if not getattr(module, "has_relative_attention_bias", False):
        return None
    keys = (reading.x if reading.memory is None else reading.memory).shape[1]
    return module.compute_bias(reading.x.shape[1], keys, device=reading.x.device)  # type: ignore[operator]


def _rope(call: Call, kind: str) -> Rotary:
    given = call.get("position_embeddings")
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise NoJacobian("its call has no position_embeddings (cos, sin)")
    cos, sin = given
    if kind == "pairs, stored in halves":
        cos, sin = (each[..., : each.shape[-1] // 2].repeat_interleave(2, -1) for each in (cos, sin))
    return Rotary(cos, sin, interleaved=kind != "halves")


_NORMS: dict[str, tuple[str, float, str]] = {
    "torch.nn.modules.normalization.LayerNorm": ("layer", 0.0, "eps"),
    "timm.layers.norm.LayerNorm": ("layer", 0.0, "eps"),
    "torch.nn.modules.normalization.RMSNorm": ("rms", 0.0, "eps"),
    "timm.layers.norm.RmsNorm": ("rms", 0.0, "eps"),
    "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm": ("rms", 0.0, "variance_epsilon"),
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeRMSNorm": ("rms", 0.0, "variance_epsilon"),
    "transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm": ("rms", 1.0, "eps"),
    "transformers.models.cohere.modeling_cohere.CohereLayerNorm": ("layer", 0.0, "variance_epsilon"),
}
"""Norms of queries and keys: kind, what is added to the stored gain, and the attribute of eps."""


def _norm(module: nn.Module, path: str) -> HeadNorm | None:
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


def _torch_attention(module: nn.Module, call: Call, row: Mechanics) -> Reading:
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
        mask = padding if mask is None else _added(mask, padding)
    return Reading(query, None if same[0] else key, None if same[1] else value, mask=mask)


def _timm(module: nn.Module, call: Call, row: Mechanics) -> Reading:
    """timm's ViT attention."""
    x, mask = call["x"], call.get("attn_mask")
    if call.get("is_causal"):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None]
    return Reading(
        x, mask=mask, scale=_number(module, row.scale), norm_q=_norm(module, "q_norm"), norm_k=_norm(module, "k_norm")
    )


def _timm_window(module: nn.Module, call: Call, row: Mechanics) -> Reading:
    """Swin's windows, which are its samples: the mask's first axis is the window inside the image."""
    x, mask = call["x"], call.get("mask")
    bias = module._get_rel_pos_bias()  # type: ignore[operator]
    if mask is not None:
        bias = bias + mask.repeat(len(x) // len(mask), 1, 1)[:, None]
    return Reading(x, mask=bias, scale=_number(module, row.scale))


def _timm_class(module: nn.Module, call: Call, row: Mechanics) -> Reading:
    """Class attention: the first token alone asks, all tokens answer."""
    return Reading(call["x"][:, :1], call["x"], scale=_number(module, row.scale))


def _number(module: nn.Module, path: str) -> float | None:
    value = attribute(module, path) if path else None
    if value is not None and not isinstance(value, float | int):
        raise NoJacobian(f"{path} is a {type(value).__name__}, expected a number")
    return None if value is None else float(value)


def _added(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Two masks at once, each booleans that keep or numbers that are added."""
    if mask is None or other is None:
        return other if mask is None else mask
    if mask.dtype == torch.bool and other.dtype == torch.bool:
        return mask & other
    numbers, kept = (other, mask) if mask.dtype == torch.bool else (mask, other)
    return torch.where(kept, numbers, -torch.inf) if kept.dtype == torch.bool else numbers + kept


# --- sampling ------------------------------------------------------------------------------------------------------


def _sampled(reading: Reading, samples: int | None, tokens: int | None) -> Reading:
    length = sys.maxsize if tokens is None else tokens
    mask = reading.mask
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        mask = _narrow(mask, 0, 0, samples)
    memory, values = reading.memory, reading.values
    alone = memory is None and values is None
    first = _first_seen(mask, length) if alone and mask is not None else 0
    rope = reading.rope
    if rope is not None:
        cos, sin = (_narrow(_narrow(each, 0, 0, samples), -2, first, length) for each in (rope.cos, rope.sin))
        rope = replace(rope, cos=cos, sin=sin)
    if mask is not None:
        mask = _narrow(_narrow(mask, -2, first, length), -1, first, length)

    def cut(part: Tensor | None) -> Tensor | None:
        return None if part is None else part[:samples, first : first + length]

    x = reading.x[:samples, first : first + length]
    return replace(reading, x=x, memory=cut(memory), values=cut(values), mask=mask, rope=rope)


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


def _assemble(
    reading: Reading,
    weights: dict[str, Tensor],
    biases: dict[str, Tensor | None],
    heads: int | Sequence[int] | None,
) -> AttentionHeads:
    number = len(weights["q"])
    index = torch.arange(number) if heads is None or isinstance(heads, int) else torch.as_tensor(heads)
    index = index[:heads] if isinstance(heads, int) else index

    def own(tensor: Tensor, count: int) -> Tensor:
        """The rows of the chosen query heads, from one row per head or per K/V head."""
        return tensor[(index // (number // count)).to(tensor.device)]

    def norm(part: HeadNorm | None, count: int) -> HeadNorm | None:
        if part is None or part.gain is None or part.gain.ndim == 1:
            return None if part is None else replace(part, gain=_copy(part.gain), bias=_copy(part.bias))
        return replace(part, gain=own(part.gain, count))

    picked = {role: own(weight, len(weight)).detach() for role, weight in weights.items()}
    added = {role: None if bias is None else own(bias, len(bias)).detach() for role, bias in biases.items()}
    mask, rope, scale = reading.mask, reading.rope, reading.scale
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, index.to(mask.device)]
    if rope is not None:
        rope = replace(rope, cos=rope.cos[:, None].clone(), sin=rope.sin[:, None].clone())
    return AttentionHeads(
        _tokens(reading.x),
        picked["q"],
        picked["k"],
        picked["v"],
        memory=_tokens(reading.memory),
        values=_tokens(reading.values),
        b_q=added["q"],
        b_k=added["k"],
        b_v=added["v"],
        scale=scale,
        mask=_copy(mask),
        rope=rope,
        norm_q=norm(reading.norm_q, number),
        norm_k=norm(reading.norm_k, len(weights["k"])),
        softcap=reading.softcap,
    )


def _tokens(x: Tensor | None) -> Any:
    return None if x is None else x[:, None].detach().clone()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


# --- the table -----------------------------------------------------------------------------------------------------


def _hf(model: str, classes: str, **places: Any) -> Mechanics:
    where = f"transformers.models.{model}.modeling_{model}"
    return Mechanics(tuple(f"{where}.{name}" for name in classes.split()), _transformers, **places)


_ROTARY: dict[str, Any] = {"rope": "halves"}
_NORMED: dict[str, Any] = {"rope": "halves", "norms": ("q_norm", "k_norm")}
_CROSS: dict[str, Any] = {"memory": "key_value_states"}

MECHANICS: tuple[Mechanics, ...] = (
    Mechanics(
        ("torch.nn.modules.activation.MultiheadAttention",),
        _torch_attention,
        refused=(("bias_k", "its extra key and value belong to no token"), ("add_zero_attn", "it adds a zero key")),
    ),
    Mechanics(("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention"), _timm, scale="scale"),
    Mechanics(("timm.models.davit.WindowAttention",), _timm, scale="scale"),
    Mechanics(("timm.models.cait.ClassAttn",), _timm_class, scale="scale"),
    Mechanics(("timm.models.swin_transformer.WindowAttention",), _timm_window, scale="scale"),
    # transformers, encoders.
    _hf("bert", "BertSelfAttention"),
    _hf("bert", "BertCrossAttention", memory="encoder_hidden_states"),
    _hf("roberta", "RobertaSelfAttention"),
    _hf("roberta", "RobertaCrossAttention", memory="encoder_hidden_states"),
    _hf("xlm_roberta", "XLMRobertaSelfAttention"),
    _hf("xlm_roberta", "XLMRobertaCrossAttention", memory="encoder_hidden_states"),
    _hf("electra", "ElectraSelfAttention"),
    _hf("electra", "ElectraCrossAttention", memory="encoder_hidden_states"),
    _hf("albert", "AlbertAttention"),
    _hf("distilbert", "DistilBertSelfAttention"),
    _hf("mpnet", "MPNetSelfAttention", bias="position_bias", scale=""),
    _hf("modernbert", "ModernBertAttention", scale="", **_ROTARY),
    _hf("vit", "ViTAttention"),
    _hf("deit", "DeiTAttention"),
    _hf("dinov2", "Dinov2Attention"),
    _hf("clip", "CLIPAttention", scale="scale"),
    _hf("siglip", "SiglipAttention", scale="scale"),
    _hf("wav2vec2", "Wav2Vec2Attention", **_CROSS),
    # transformers, encoder-decoders.
    _hf("t5", "T5Attention", mask="mask", bias="position_bias", **_CROSS),
    _hf("mt5", "MT5Attention", mask="mask", bias="position_bias", **_CROSS),
    _hf("bart", "BartAttention", **_CROSS),
    _hf("whisper", "WhisperAttention", **_CROSS),
    # transformers, decoders.
    _hf("gpt2", "GPT2Attention", memory="encoder_hidden_states", memory_mask="encoder_attention_mask"),
    _hf("gpt_neox", "GPTNeoXAttention", **_ROTARY),
    _hf("opt", "OPTAttention"),
    _hf("llama", "LlamaAttention", **_ROTARY),
    _hf("mistral", "MistralAttention", **_ROTARY),
    _hf("mixtral", "MixtralAttention", **_ROTARY),
    _hf("qwen2", "Qwen2Attention", **_ROTARY),
    _hf("qwen3", "Qwen3Attention", **_NORMED),
    _hf("qwen3_moe", "Qwen3MoeAttention", **_NORMED),
    _hf("gemma", "GemmaAttention", **_ROTARY),
    _hf("gemma2", "Gemma2Attention", softcap="attn_logit_softcapping", **_ROTARY),
    _hf("gemma3", "Gemma3Attention", **_NORMED),
    _hf("phi", "PhiAttention", rope="halves", norms=("q_layernorm", "k_layernorm")),
    _hf("phi3", "Phi3Attention", **_ROTARY),
    _hf("starcoder2", "Starcoder2Attention", **_ROTARY),
    _hf("cohere", "CohereAttention", rope="pairs", norms=("q_norm", "k_norm")),
    _hf("glm4", "Glm4Attention", rope="pairs, stored in halves"),
)

_BY_CLASS = {name: row for row in MECHANICS for name in row.classes}
