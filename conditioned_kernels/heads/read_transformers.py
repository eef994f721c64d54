"""Readers of the attention classes of transformers: from a module and one call to what the call computes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..jacobian.heads import NoJacobian, Rotary, mapped
from ..jacobian.linear import normalized
from .read_timm import log_bias, log_scale, window_bias
from .reading import UNIT, Call, Reading, added, linear, norm_of, number

if TYPE_CHECKING:
    from .mechanics import Mechanics


def interface(module: Any, call: Call, row: Mechanics) -> Reading:
    """A class that goes through transformers' attention interface."""
    memory = call.get(row.memory) if row.memory else None
    _refuse_cache(module, call, memory is not None)
    mask = call.get(row.memory_mask if memory is not None and row.memory_mask else row.mask)
    reading = Reading(
        call[row.x],
        memory,
        mask=_mask(module, call, mask, memory),
        scale=number(module, row.scale),
        softcap=number(module, row.softcap) if row.softcap else None,
        rope=_rope(call, row.rope) if row.rope and getattr(module, row.rope_switch, True) else None,
        norm_q=norm_of(module, row.norms[0]),
        norm_k=norm_of(module, row.norms[1]),
        norm_first=row.norm_first,
        sink=getattr(module, row.sink) if row.sink else None,
    )
    bias = _position_bias(module, call, row, reading) if row.bias else None
    return reading if bias is None else replace(reading, mask=added(reading.mask, bias))


def _refuse_cache(module: Any, call: Call, cross: bool) -> None:
    cache = next(
        (call[name] for name in ("cache", "past_key_values", "layer_past") if call.get(name) is not None), None
    )
    if cache is None:
        return
    index = getattr(module, "layer_idx", getattr(module, "layer_id", None))
    cache = getattr(cache, "cross_attention_cache" if cross else "self_attention_cache", cache)
    if not callable(getattr(cache, "get_seq_length", None)) or int(cache.get_seq_length(index)):
        raise NoJacobian("its call reads keys and values from a cache, which no weight of this call made")


def _mask(module: Any, call: Call, mask: object, memory: Tensor | None) -> Tensor | None:
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
    if kind not in ("eager", "sdpa") and _packed(call, mask):
        raise NoJacobian("its call packs several sequences into one row, whose ends only the kernel is told")
    kept = None if mask is None else mask.bool()[:, None, None, :]
    window = getattr(module, "sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    if not window or getattr(module, "is_sliding", None) is False:
        window = None  # Qwen 2 MoE says 0 for none, EXAONE 4 keeps the size in layers that have no window.
    if kind == "eager" or tokens == 1 or (window is None and not causal):
        return kept
    position = torch.arange(keys, device=x.device)
    distance = position[:tokens, None] - position
    reach = keys if window is None else window
    seen = (distance < reach) & (distance >= 0 if causal else distance > -reach)
    return seen if kept is None else kept & seen


def _packed(call: Call, mask: Tensor | None) -> bool:
    """Whether a flash kernel is given the ends of sequences, or finds them where positions start anew."""
    positions = call.get("position_ids")
    if call.get("cu_seq_lens_q") is not None or mask is not None or not isinstance(positions, Tensor):
        return call.get("cu_seq_lens_q") is not None
    return bool((positions.diff() != 1).any())


def _position_bias(module: Any, call: Call, row: Mechanics, reading: Reading) -> Tensor | None:
    given = call.get(row.bias)
    if given is not None:
        return given
    if not getattr(module, "has_relative_attention_bias", False):
        return None
    keys = (reading.x if reading.memory is None else reading.memory).shape[1]
    return module.compute_bias(reading.x.shape[1], keys, device=reading.x.device)


def _rope(call: Call, kind: str) -> Rotary:
    """Each kind stores its angles in its own way; a :class:`Rotary` has one per coordinate."""
    given = call.get("position_embeddings")
    if isinstance(given, Tensor) and given.is_complex():
        given = given.real, given.imag
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise NoJacobian("its call has no position_embeddings (cos, sin)")
    cos, sin = given[::-1] if kind == "pairs, sin before cos" else given
    if kind == "pairs, stored in halves":
        cos, sin = (each[..., : each.shape[-1] // 2] for each in (cos, sin))
    if kind == "halves, backwards":
        sin = -sin
    if kind == "halves, stored once":
        cos, sin = (torch.cat((each, each), -1) for each in (cos, sin))
    elif kind not in ("halves", "halves, backwards", "pairs"):
        cos, sin = (each.repeat_interleave(2, -1) for each in (cos, sin))
    return Rotary(cos[:, None], sin[:, None], interleaved=kind.startswith("pairs"))


def llama4(module: Any, call: Call, row: Mechanics) -> Reading:
    """Its layers without rotation scale queries by their position, from ``floor_scale`` tokens on."""
    tokens, tuned = call[row.x].shape[1], getattr(module, "attn_temperature_tuning", False)
    if tuned and not module.use_rope and tokens >= module.floor_scale:
        raise NoJacobian(f"its queries are scaled by position from token {module.floor_scale} on")
    return interface(module, call, row)


def patches(module: Any, call: Call, row: Mechanics) -> Reading:
    """The angles are those of patches, the same in every sample; tokens before them do not turn."""
    cos, sin = (each.reshape(-1, each.shape[-1]) for each in call["position_embeddings"])
    before = (0, 0, call[row.x].shape[1] - len(cos), 0)
    angles = (torch.nn.functional.pad(each, before, value=still)[None] for each, still in ((cos, 1.0), (sin, 0.0)))
    return interface(module, {**call, "position_embeddings": tuple(angles)}, row)


def llama4_vision(module: Any, call: Call, row: Mechanics) -> Reading:
    """It takes a mask and leaves it out."""
    turns = call["freqs_ci"].reshape(1, call[row.x].shape[1], -1)
    return Reading(call[row.x], rope=_rope({"position_embeddings": turns}, row.rope))


def ministral3(module: Any, call: Call, row: Mechanics) -> Reading:
    """Queries are scaled by their position from ``original_max_position_embeddings`` tokens on."""
    rope, positions = module.config.rope_parameters, call.get("position_ids")
    start = rope.get("original_max_position_embeddings")
    last = call[row.x].shape[1] - 1 if positions is None else int(positions.max())
    if rope.get("llama_4_scaling_beta") and last >= start:
        raise NoJacobian(f"its queries are scaled by position from token {start} on")
    return interface(module, call, row)


def exaone(module: Any, call: Call, row: Mechanics) -> Reading:
    """Where some layers have a window, the others do not rotate."""
    rotates = module.sliding_window is None or module.is_sliding
    return interface(module, call, row if rotates else replace(row, rope=""))


def falcon_h1(module: Any, call: Call, row: Mechanics) -> Reading:
    """Keys have a multiplier, which is as good as one of the logits."""
    reading = interface(module, call, row)
    return replace(reading, scale=module.scaling * module.key_multiplier)


def bloom(module: Any, call: Call, row: Mechanics) -> Reading:
    """ALiBi, one number per head and key."""
    reading = interface(module, call, row)
    alibi = call["alibi"].reshape(len(reading.x), module.num_heads, 1, -1)
    return replace(reading, mask=added(reading.mask, alibi))


def falcon(module: Any, call: Call, row: Mechanics) -> Reading:
    """ALiBi, scaled with the logits, or rotation. With sdpa the mask has ALiBi in it already."""
    alibi = call.get("alibi")
    reading = interface(module, call, row if alibi is None else replace(row, rope=""))
    sdpa = getattr(module.config, "_attn_implementation", None) == "sdpa" and not call.get("output_attentions")
    if alibi is None or sdpa:
        return reading
    bias = alibi.reshape(len(reading.x), module.num_heads, 1, -1) * module.inv_norm_factor
    return replace(reading, mask=added(reading.mask, bias))


def mpt(module: Any, call: Call, row: Mechanics) -> Reading:
    """ALiBi of the longest sequence, of which the last keys are meant; its mask is True where a key is left out."""
    mask, bias = call.get("attention_mask"), call.get("position_bias")
    mask = None if mask is None else ~mask.bool()
    reading = interface(module, {**call, "attention_mask": mask}, row)
    tokens = call[row.x].shape[1]
    return reading if bias is None else replace(reading, mask=added(mask, bias[:, -tokens:, -tokens:]))


def gpt_neo(module: Any, call: Call, row: Mechanics) -> Reading:
    """No scale; a causal or local mask of its own beside the call's."""
    reading = interface(module, call, row)
    tokens = call[row.x].shape[1]
    own: Tensor = module.bias[..., :tokens, :tokens]
    return replace(reading, scale=1.0, mask=added(own.bool(), reading.mask))


def swin(module: Any, call: Call, row: Mechanics) -> Reading:
    """Windows, which are its samples, with a bias of positions inside."""
    bias = module.relative_position_bias()
    return Reading(call[row.x], mask=window_bias(bias, call.get(row.mask), len(call[row.x])), scale=module.scaling)


def swinv2(module: Any, call: Call, row: Mechanics) -> Reading:
    """Cosine attention with a scale per head; this library adds the mask of shifted windows twice."""
    mask = call.get(row.mask)
    bias = log_bias(module, module.continuous_position_bias_mlp)
    return Reading(
        call[row.x],
        mask=window_bias(bias, None if mask is None else 2 * mask, len(call[row.x])),
        scale=log_scale(module),
        norm_q=UNIT,
        norm_k=UNIT,
    )


def detr(module: Any, call: Call, row: Mechanics) -> Reading:
    """Positions are added to what queries and keys are made of, and not to what values are made of."""
    reading = interface(module, call, row)
    position = call.get("position_embeddings")
    x = reading.x if position is None else reading.x + position
    if reading.memory is None:
        return replace(reading, x=x, values=reading.x)
    keys = call.get("encoder_position_embeddings")
    memory = reading.memory if keys is None else reading.memory + keys
    return replace(reading, x=x, memory=memory, values=reading.memory)


def deberta(module: Any, call: Call, row: Mechanics) -> Reading:
    """Without relative positions, but with the scale that leaves room for them."""
    queries, tokens = call.get("query_states"), call[row.x]
    parts = 1 + sum(kind in module.pos_att_type for kind in ("c2p", "p2c"))
    scale = (parts * module.attention_head_size) ** -0.5
    mask = call["attention_mask"].bool()
    return Reading(tokens if queries is None else queries, None if queries is None else tokens, mask=mask, scale=scale)


def latent(module: Any, call: Call, row: Mechanics) -> Reading:
    """DeepSeek's latent attention. The heads' own rows act on latents, which are their tokens; the rotary key that all
    heads share is made by no head's rows."""
    kind = row.rope
    if kind == "pairs, stored in halves" and not getattr(module.config, "rope_interleave", True):
        kind = "halves"
    reading = interface(module, call, replace(row, rope=kind))

    def then(picked: Reading) -> Reading:
        made = linear(module.kv_a_proj_with_mqa, picked.x)
        keys, shared = made.split([module.kv_lora_rank, module.qk_rope_head_dim], -1)
        queries = picked.x
        if module.q_lora_rank is not None:
            queries = _normed(module, "q_a_layernorm", linear(module.q_a_proj, picked.x))
        rope: Any = picked.rope
        turned = mapped(rope, lambda angles, _: angles.double()).rotate(shared[:, None])
        return replace(picked, x=queries, memory=_normed(module, "kv_a_layernorm", keys), shared_keys=turned)

    return replace(reading, then=then)


def _normed(module: Any, path: str, x: Tensor) -> Tensor:
    norm = norm_of(module, path)
    return x if norm is None else normalized(norm, x)[0]
