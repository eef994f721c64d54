"""What an attention module really computes with its heads: biases, scale, mask, rotation, norms, soft cap.

A row says where a class keeps these things; a reader, one per way of calling attention, turns the row and one call into
an :class:`~conditioned_kernels.AttentionHeads`. Every row is proven in tests/test_mechanics.py against what the class
feeds to its output projection. A class without a row is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _validate
from ..distributed import is_sharded
from ..jacobian.heads import AttentionHeads, NoJacobian
from . import read_timm, read_transformers
from .discover import AttentionLayer
from .layout import HeadView, LayoutError, Projection
from .reading import Call, Reading, assembled, sampled
from .wrappers import is_adapted, quiet_parametrizations


@dataclass(frozen=True)
class Mechanics:
    """One attention class, or several that work alike.

    Attributes
    ----------
    classes : full names ``module.Class``.
    read : turns the module, its call and this row into a :class:`~.reading.Reading`.
    x, memory, mask, memory_mask, bias : names of arguments: the tokens, those of keys and values, the mask, the mask
        where there is memory, and what is added to the logits. "" for none.
    scale : attribute with the logits' scale; "" for 1 / sqrt(head_dim).
    rope : "" for none; all kinds of "halves" pair coordinate i with i + rotated / 2, all kinds of "pairs" 2i with
        2i + 1; the rest says how the call stores the angles.
    rope_switch : attribute that says whether this layer rotates.
    softcap, sink : attributes with the soft cap, and with the logits of the sink.
    norms : attributes with the norms of queries and keys.
    norm_first : the norms come before the rotation.
    parts : labels of the heads' own rows of queries, of keys and of values.
    fixed : labels of other projections, which the Jacobian holds fixed.
    biases : attributes with biases that are kept apart from the projection, with {role} in the name.
    image : the tokens are an image, features first.
    refused : (attribute path, reason): a true value there is not covered.
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
    rope_switch: str = ""
    softcap: str = ""
    sink: str = ""
    norms: tuple[str, str] = ("", "")
    norm_first: bool = True
    parts: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = (("q",), ("k",), ("v",))
    fixed: tuple[str, ...] = ()
    biases: str = ""
    image: bool = False
    refused: tuple[tuple[str, str], ...] = ()


REFUSED = {
    "timm.models.cait.TalkingHeadAttn": "it mixes the heads' logits and their probabilities, so no head has a J alone",
    "timm.models.levit.Attention": "batch norms between its weights and its heads",
    "timm.models.levit.AttentionDownsample": "batch norms between its weights and its heads",
    "transformers.models.longformer.modeling_longformer.LongformerSelfAttention": (
        "global tokens have a second set of weights, and local ones a softmax over both"
    ),
    "transformers.models.nystromformer.modeling_nystromformer.NystromformerSelfAttention": (
        "its landmarks go through an iterated inverse, and a convolution adds a second path from W_V to the output"
    ),
    "transformers.models.gemma3n.modeling_gemma3n.Gemma3nTextAttention": "it normalizes the values too",
    "transformers.models.gemma4.modeling_gemma4.Gemma4TextAttention": "it normalizes the values too",
    "transformers.models.roformer.modeling_roformer.RoFormerSelfAttention": (
        "its angles come in a form of their own, and may turn the values too"
    ),
    "transformers.models.detr.modeling_detr.DetrMHAttentionMap": "it has no values",
}
"""Classes that no row can describe, with the reason."""


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
        every token is seen by some query of the call, so that it avoids padding; in cross-attention that goes for the
        keys, and queries are the first. Attention over channels sums over the tokens of the window alone.
    heads : the first so many query heads, or their indices; None for all.

    Returns
    -------
    AttentionHeads of shape (samples, heads).

    Raises
    ------
    NoJacobian
        for a class without a row of mechanics, and for a call that does what is not covered (a filled cache of keys,
        weights behind an adapter or sharded inside the forward, flexible masks, bias_k, ...), named with its reason.
    TypeError, ValueError
        for ``samples``, ``tokens`` and ``heads`` that are no numbers of at least 1, or no indices of query heads; and
        for a call that the module itself would not take.

    Notes
    -----
    *Latent attention* (DeepSeek V2, V3): J is with respect to a head's own rows: of q_b_proj (or q_proj) and of
    kv_b_proj. These act on the normalized latents, which are the problem's tokens, as x is elsewhere; the rotary key
    that all heads share, and the maps to the latents, belong to no head and are held fixed.
    *Norms over all heads* (OLMo 2): the other heads' part of the norm is held fixed.
    """
    if not isinstance(layer, AttentionLayer):
        raise TypeError(f"layer must be an AttentionLayer of find_attention, got {type(layer).__name__}")
    samples = None if samples is None else _validate.count(samples, "samples")
    tokens = None if tokens is None else _validate.count(tokens, "tokens")
    module = layer.module
    row = _BY_CLASS.get(layer.family)
    name = f"{layer.name or type(module).__name__}: class {layer.family}"
    if layer.family in REFUSED:
        raise NoJacobian(f"{name} is not covered: {REFUSED[layer.family]}")
    if row is None:
        raise NoJacobian(
            f"{name} has no row of mechanics, so its scale, mask and positions are unknown; condition numbers of its "
            "weights work all the same, and conditioned_kernels.AttentionHeads takes the problem in numbers"
        )
    for path, reason in row.refused:
        value: Any = module
        for part in path.split("."):
            value = getattr(value, part, None)
        if value is not None and value is not False:
            raise NoJacobian(f"{name} with {path} is not covered: {reason}")
    try:
        with torch.no_grad(), quiet_parametrizations(module):
            bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
            call = {**bound.arguments, **bound.arguments.get("kwargs", {})}
            weights, biases = _weights(layer, row)
            if any(map(is_sharded, call.values())):
                raise NoJacobian("its call has DTensors, of which this rank holds a part")
            reading = row.read(module, call, row)
            return assembled(sampled(reading, samples, tokens), weights, biases, heads)
    except (LayoutError, NoJacobian) as error:
        raise NoJacobian(f"{name}: {error}") from error


# --- weights -------------------------------------------------------------------------------------------------------


def _weights(layer: AttentionLayer, row: Mechanics) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """(heads, head_dim, in_features) and (heads, head_dim) by role, one per query head or per K/V head."""
    by_label = {projection.label: projection for projection in layer.projections}
    for projection in layer.projections:
        if is_adapted(projection.parameter):
            raise NoJacobian(f"{projection.parameter} is behind an adapter, which changes the map; merge it first")
        if is_sharded(layer.weight(projection)):
            raise NoJacobian(
                f"{projection.parameter} is a DTensor in this call, as under tensor parallelism, and a head's J needs "
                "its whole weights; FSDP2 has them whole in the forward if fully_shard takes the attention layer, or a "
                "block around it, as one unit"
            )
    own = {label for part in row.parts for label in part}
    if not own <= set(by_label) <= own | set(row.fixed) or len(by_label) < len(layer.projections):
        raise NoJacobian(f"has projections {sorted(by_label)}, and only {sorted(own)} are covered")
    weights, biases = {}, {}
    for role, labels in zip("qkv", row.parts, strict=True):
        projections = [by_label[label] for label in labels]
        weights[role] = torch.cat([each.view(layer.weight(each)).flatten(0, -3) for each in projections], -2)
        given = [_bias(layer, each, row) for each in projections]
        whole = [each.flatten(0, -2) for each in given if each is not None]
        biases[role] = torch.cat(whole, -1) if whole else None
    return weights, biases


def _bias(layer: AttentionLayer, projection: Projection, row: Mechanics) -> Tensor | None:
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
        apart = getattr(layer.module, row.biases.format(role=projection.role), None) if row.biases else None
        return None if apart is None else apart.unflatten(0, (layer.module.num_heads, -1))
    input_major = isinstance(projection.view, HeadView) and projection.view.input_major
    return projection.view(bias[None] if input_major else bias[:, None])[..., 0]


def own_labels(family: str) -> frozenset[str]:
    """Labels of the projections that the Jacobian of a class's heads is with respect to."""
    row = _BY_CLASS.get(family)
    return frozenset("qkv") if row is None else frozenset(label for part in row.parts for label in part)


def coverage(family: str) -> str:
    """Whether the heads of a class have a Jacobian, in words."""
    if family in REFUSED:
        return f"no: {REFUSED[family]}"
    row = _BY_CLASS.get(family)
    if row is None:
        return "no: its mechanics are unknown"
    return f"yes, without {' or '.join(name for name, _ in row.refused)}" if row.refused else "yes"


# --- the table -----------------------------------------------------------------------------------------------------


def _hf(model: str, classes: str, **places: Any) -> Mechanics:
    where = f"transformers.models.{model}.modeling_{model}"
    return Mechanics(
        tuple(f"{where}.{name}" for name in classes.split()), places.pop("read", read_transformers.interface), **places
    )


def _each(names: str, **places: Any) -> Mechanics:
    """One row for classes of transformers that are alike; ``names`` are "model:Class", separated by spaces."""
    classes = (name.split(":") for name in names.split())
    full = tuple(f"transformers.models.{model}.modeling_{model}.{cls}" for model, cls in classes)
    return Mechanics(full, places.pop("read", read_transformers.interface), **places)


def _timm(classes: str, read: Callable[[nn.Module, Call, Mechanics], Reading], **places: Any) -> Mechanics:
    return Mechanics(tuple(f"timm.{name}" for name in classes.split()), read, **({"scale": "scale"} | places))


_CLIPPED = "clipped queries, keys and values do not follow their weights"
_ROTARY: dict[str, Any] = {"rope": "halves"}
_NORMED: dict[str, Any] = {"rope": "halves", "norms": ("q_norm", "k_norm")}
_CROSS: dict[str, Any] = {"memory": "key_value_states"}
_LATENT: dict[str, Any] = {
    "read": read_transformers.latent,
    "parts": (("q.rope", "q.nope"), ("k.nope",), ("v",)),
    "fixed": ("q.latent", "kv.latent", "k.rope"),
}

MECHANICS: tuple[Mechanics, ...] = (
    Mechanics(
        ("torch.nn.modules.activation.MultiheadAttention",),
        read_timm.torch_attention,
        refused=(("bias_k", "its extra key and value belong to no token"), ("add_zero_attn", "it adds a zero key")),
    ),
    _timm("layers.attention.Attention models.vision_transformer.Attention", read_timm.vit),
    _timm("layers.attention.AttentionRope", read_timm.vit),
    _timm("models.eva.EvaAttention", read_timm.vit, biases="{role}_bias"),
    _timm("models.beit.Attention", read_timm.beit, biases="{role}_bias"),
    _timm("models.davit.WindowAttention", read_timm.vit),
    _timm("models.davit.ChannelAttention", read_timm.channels),
    _timm("models.davit.ChannelAttentionV2", read_timm.channels, scale=""),
    _timm("models.xcit.XCA", read_timm.cross_covariance),
    _timm("models.cait.ClassAttn", read_timm.class_token),
    _timm("layers.attention_pool.AttentionPoolLatent", read_timm.pool),
    _timm("models.swin_transformer.WindowAttention", read_timm.window),
    _timm("models.swin_transformer_v2.WindowAttention", read_timm.window_v2, biases="{role}_bias"),
    _timm("models.maxxvit.Attention2d", read_timm.grid, image=True),
    _timm("models.maxxvit.AttentionCl", read_timm.grid),
    _timm("models.pvt_v2.Attention models.twins.GlobalSubSampleAttn", read_timm.reduced),
    _timm("models.twins.LocallyGroupedAttn", read_timm.patches),
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
    _each(
        "camembert:CamembertSelfAttention ernie:ErnieSelfAttention "
        "xlm_roberta_xl:XLMRobertaXLSelfAttention roberta_prelayernorm:RobertaPreLayerNormSelfAttention "
        "bert_generation:BertGenerationSelfAttention layoutlm:LayoutLMSelfAttention splinter:SplinterSelfAttention "
        "markuplm:MarkupLMSelfAttention"
    ),
    _each("rembert:RemBertSelfAttention megatron_bert:MegatronBertSelfAttention", scale=""),
    _each("esm:EsmSelfAttention", scale="", **_ROTARY),
    _each("camembert:CamembertCrossAttention ernie:ErnieCrossAttention", memory="encoder_hidden_states"),
    _each("eurobert:EuroBertAttention", **_ROTARY),
    _hf("modernbert", "ModernBertAttention", scale="", **_ROTARY),
    _hf(
        "deberta_v2",
        "DisentangledSelfAttention",
        read=read_transformers.deberta,
        refused=(("relative_attention", "its weights make queries and keys of positions too, which J would change"),),
    ),
    _hf("vit", "ViTAttention"),
    _hf("deit", "DeiTAttention"),
    _hf("dinov2", "Dinov2Attention"),
    _hf("clip", "CLIPAttention", scale="scale"),
    _hf("siglip", "SiglipAttention", scale="scale"),
    _each(
        "dinov2_with_registers:Dinov2WithRegistersAttention ijepa:IJepaAttention vit_mae:ViTMAEAttention "
        "vit_msn:ViTMSNAttention videomae:VideoMAESelfAttention yolos:YolosSelfAttention"
    ),
    _each(
        "idefics2:Idefics2VisionAttention idefics3:Idefics3VisionAttention siglip2:Siglip2Attention "
        "smolvlm:SmolVLMVisionAttention",
        scale="scale",
    ),
    _each("internvl:InternVLVisionAttention", scale="scale", norms=("q_norm", "k_norm")),
    _each("dinov3_vit:DINOv3ViTAttention pixtral:PixtralAttention", read=read_transformers.patches, **_ROTARY),
    _each(
        "llama4:Llama4VisionAttention",
        read=read_transformers.llama4_vision,
        scale="",
        rope="pairs, as complex numbers",
    ),
    _hf("beit", "BeitAttention"),
    _hf("swin", "SwinAttention", read=read_transformers.swin),
    _hf("swinv2", "Swinv2SelfAttention", read=read_transformers.swinv2),
    _hf("detr", "DetrSelfAttention DetrCrossAttention", read=read_transformers.detr, **_CROSS),
    _hf("wav2vec2", "Wav2Vec2Attention", **_CROSS),
    # transformers, encoder-decoders.
    _hf("t5", "T5Attention", mask="mask", bias="position_bias", **_CROSS),
    _hf("mt5", "MT5Attention", mask="mask", bias="position_bias", **_CROSS),
    _hf("bart", "BartAttention", **_CROSS),
    _each(
        "blenderbot:BlenderbotAttention m2m_100:M2M100Attention marian:MarianAttention mbart:MBartAttention "
        "pegasus:PegasusAttention hubert:HubertAttention unispeech:UniSpeechAttention",
        **_CROSS,
    ),
    _hf("whisper", "WhisperAttention", **_CROSS),
    # transformers, decoders.
    _hf("gpt2", "GPT2Attention", memory="encoder_hidden_states", memory_mask="encoder_attention_mask"),
    _hf("gpt_neox", "GPTNeoXAttention", **_ROTARY),
    _hf("bloom", "BloomAttention", read=read_transformers.bloom, scale="inv_norm_factor"),
    _hf("falcon", "FalconAttention", read=read_transformers.falcon, scale="inv_norm_factor", **_ROTARY),
    _hf(
        "mpt",
        "MptAttention",
        read=read_transformers.mpt,
        scale="softmax_scale",
        refused=(("clip_qkv", _CLIPPED),),
    ),
    _hf("codegen", "CodeGenAttention", rope="pairs, sin before cos"),
    _hf("gptj", "GPTJAttention", rope="pairs, sin before cos"),
    _hf("gpt_bigcode", "GPTBigCodeAttention"),
    _hf("gpt_neo", "GPTNeoSelfAttention", read=read_transformers.gpt_neo, scale=""),
    _hf("opt", "OPTAttention"),
    _hf("llama", "LlamaAttention", **_ROTARY),
    _hf(
        "llama4",
        "Llama4TextAttention",
        read=read_transformers.llama4,
        rope="pairs, as complex numbers",
        rope_switch="use_rope",
        norms=("qk_norm", "qk_norm"),
        norm_first=False,
    ),
    _hf("mistral", "MistralAttention", **_ROTARY),
    _hf("mixtral", "MixtralAttention", **_ROTARY),
    _hf("qwen2", "Qwen2Attention", **_ROTARY),
    _hf("qwen3", "Qwen3Attention", **_NORMED),
    _hf("qwen3_moe", "Qwen3MoeAttention", **_NORMED),
    _hf("qwen3_next", "Qwen3NextAttention", **_NORMED),
    _hf("olmo2", "Olmo2Attention", **_NORMED),
    _hf("gpt_oss", "GptOssAttention", sink="sinks", rope="halves, stored once"),
    _hf("gemma", "GemmaAttention", **_ROTARY),
    _hf("gemma2", "Gemma2Attention", softcap="attn_logit_softcapping", **_ROTARY),
    _hf("gemma3", "Gemma3Attention", **_NORMED),
    _hf("phi", "PhiAttention", rope="halves", norms=("q_layernorm", "k_layernorm")),
    _hf("phi3", "Phi3Attention", **_ROTARY),
    _hf("starcoder2", "Starcoder2Attention", **_ROTARY),
    _hf("cohere", "CohereAttention", rope="pairs", norms=("q_norm", "k_norm")),
    _hf("glm4", "Glm4Attention", rope="pairs, stored in halves"),
    _each(
        "arcee:ArceeAttention aria:AriaTextAttention bamba:BambaAttention cwm:CwmAttention emu3:Emu3Attention "
        "granite:GraniteAttention granitemoe:GraniteMoeAttention granitemoehybrid:GraniteMoeHybridAttention "
        "granitemoeshared:GraniteMoeSharedAttention hyperclovax:HyperCLOVAXAttention minimax:MiniMaxAttention "
        "ministral:MinistralAttention nemotron:NemotronAttention phimoe:PhimoeAttention qwen2_moe:Qwen2MoeAttention "
        "qwen2_vl:Qwen2VLAttention qwen2_5_vl:Qwen2_5_VLAttention seed_oss:SeedOssAttention "
        "solar_open:SolarOpenAttention",
        **_ROTARY,
    ),
    _each(
        "apertus:ApertusAttention dots1:Dots1Attention flex_olmo:FlexOlmoAttention glm4_moe:Glm4MoeAttention "
        "minimax_m2:MiniMaxM2Attention olmo3:Olmo3Attention qwen3_vl:Qwen3VLTextAttention "
        "qwen3_vl_moe:Qwen3VLMoeTextAttention",
        **_NORMED,
    ),
    _each("jamba:JambaAttention nemotron_h:NemotronHAttention"),
    _each("smollm3:SmolLM3Attention", rope_switch="use_rope", **_ROTARY),
    _each("cohere2:Cohere2Attention", rope="pairs", rope_switch="sliding_window"),
    _each("vaultgemma:VaultGemmaAttention", softcap="attn_logit_softcapping", **_ROTARY),
    _each(
        "ernie4_5:Ernie4_5Attention ernie4_5_moe:Ernie4_5_MoeAttention glm:GlmAttention helium:HeliumAttention",
        rope="pairs, stored in halves",
    ),
    _each("olmo:OlmoAttention", refused=(("config.clip_qkv", _CLIPPED),), **_ROTARY),
    _each("olmoe:OlmoeAttention", refused=(("config.clip_qkv", _CLIPPED),), **_NORMED),
    _each("exaone4:Exaone4Attention", read=read_transformers.exaone, **_NORMED),
    _each("falcon_h1:FalconH1Attention", read=read_transformers.falcon_h1, **_ROTARY),
    _each("stablelm:StableLmAttention", refused=(("qk_layernorm", "its norms are one per head"),), **_ROTARY),
    _each("lfm2:Lfm2Attention", rope="halves", norms=("q_layernorm", "k_layernorm")),
    _each(
        "hunyuan_v1_dense:HunYuanDenseV1Attention hunyuan_v1_moe:HunYuanMoEV1Attention",
        rope="halves",
        norms=("query_layernorm", "key_layernorm"),
        norm_first=False,
    ),
    _each("nanochat:NanoChatAttention", rope="halves, backwards", norms=("q_norm", "k_norm"), norm_first=False),
    _each("ministral3:Ministral3Attention", read=read_transformers.ministral3, **_ROTARY),
    _hf("deepseek_v2", "DeepseekV2Attention", rope="pairs, as complex numbers", **_LATENT),
    _hf("deepseek_v3", "DeepseekV3Attention", rope="pairs, stored in halves", **_LATENT),
)

_BY_CLASS = {name: row for row in MECHANICS for name in row.classes}
