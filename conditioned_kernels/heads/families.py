"""The model families: one row per attention class. A new family is one row here and one case in tests/models.py.

A row names the class by its full path (never by shape), its layout, and where its source splits the heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import (
    POSITION,
    Blocked,
    Choose,
    Grouped,
    IfPresent,
    Interleaved,
    Joined,
    Layout,
    Output,
    Sections,
    Separate,
)


@dataclass(frozen=True)
class Family:
    """One attention class.

    Attributes
    ----------
    classes : full names ``module.Class``; several when a library moved or copied the class.
    layout : its storage form.
    output : where it keeps W_O.
    source : where the class splits its heads.
    rule : what is conditioned, where the paper is silent; empty when Algorithm 1 says it.
    channel : the class attends over channels and not over tokens: softmax(K^T Q) is head_dim x head_dim.
    permuted : the part whose channels the class reorders before its first position is rotated.
    """

    classes: tuple[str, ...]
    layout: Layout
    output: Output
    source: str
    rule: str = ""
    channel: bool = False
    permuted: str = ""


_PER_KV = "K and V per K/V head"
_QK_NORM = "weights conditioned, gains of the QK norm untouched"
_TABLE = "relative position bias untouched"
_CHANNEL = "per head of channels, roles by use in softmax(Q^T K) V^T"

_BESIDE = Output("../output.dense")
_CONV1D = Output("c_proj", input_major=True)

_HEADS = "config.num_attention_heads"
_KV_HEADS = "config.num_key_value_heads"
_BY_CONFIG = Separate(_HEADS, kv_heads=_KV_HEADS, head_dim="head_dim")
_BERT = Separate("num_attention_heads", "query", "key", "value")
_BART = Separate("num_heads", head_dim="head_dim")
_BY_HEAD_DIM = Separate(head_dim="head_dim")
_QKV = Blocked("qkv", "num_heads")
_Q_KV = Joined((Blocked("q", "num_heads", roles="q"), Blocked("kv", "num_heads", roles="kv")))
_T5 = Separate("n_heads", "q", "k", "v", head_dim="key_value_proj_dim")
_FUSED_OR_NOT = Choose((("qkv", Blocked("qkv", "num_heads", head_dim="head_dim")), ("", _BY_HEAD_DIM)))
_NOPE_ROPE = (("q", "nope", "qk_nope_head_dim"), ("q", "rope", "qk_rope_head_dim"))
_MLA = Joined(
    (
        Choose(
            (
                (
                    "q_a_proj",
                    Joined(
                        (
                            Sections("q_a_proj", (("q", "latent", "q_lora_rank"),)),
                            Sections("q_b_proj", _NOPE_ROPE, "num_heads"),
                        )
                    ),
                ),
                ("", Sections("q_proj", _NOPE_ROPE, "num_heads")),
            )
        ),
        Sections("kv_a_proj_with_mqa", (("kv", "latent", "kv_lora_rank"), ("k", "rope", "qk_rope_head_dim"))),
        Sections("kv_b_proj", (("k", "nope", "qk_nope_head_dim"), ("v", "", "v_head_dim")), "num_heads"),
    )
)
_MLA_RULE = (
    "q_a and the latent rows of kv_a semi-orthogonal as one matrix; q_b and the keys of kv_b per head, rotary and "
    "other rows apart; the shared rotary key as one head; values of kv_b a block identity over the latent. With each "
    "rank at most hidden_size and at least a head's rows, every head's effective map (norms as identity) has kappa 1"
)


def _hf(
    model: str,
    classes: str,
    layout: Layout,
    rule: str = "",
    *,
    output: Output | str = "o_proj",
    method: str = "forward",
    **flags: object,
) -> Family:
    """A row of transformers; ``classes`` separated by spaces."""
    where = f"transformers.models.{model}.modeling_{model}"
    names = classes.split()
    source = f"{where.replace('.', '/')}.py, {', '.join(f'{name}.{method}' for name in names)}"
    return Family(tuple(f"{where}.{name}" for name in names), layout, _output(output), source, rule, **flags)  # type: ignore[arg-type]


def _each(names: str, layout: Layout, rule: str = "", **places: object) -> tuple[Family, ...]:
    """Rows of transformers' classes that are alike; ``names`` are "model:Class", separated by spaces."""
    return tuple(_hf(*name.split(":"), layout, rule, **places) for name in names.split())  # type: ignore[arg-type, call-arg]


def _output(given: Output | str) -> Output:
    return given if isinstance(given, Output) else Output(given)


def _timm(
    file: str,
    name: str,
    layout: Layout,
    rule: str = "",
    *,
    output: Output | str = "proj",
    moved: str = "",
    **flags: object,
) -> Family:
    """A row of timm; ``moved`` is the class's full name in other versions."""
    classes = (f"timm.{file}.{name}", moved) if moved else (f"timm.{file}.{name}",)
    source = f"timm/{file.replace('.', '/')}.py, {name}.forward"
    return Family(classes, layout, _output(output), source, rule, **flags)  # type: ignore[arg-type]


FAMILIES: tuple[Family, ...] = (
    Family(
        ("torch.nn.modules.activation.MultiheadAttention",),
        Choose(
            (
                ("_qkv_same_embed_dim", Blocked("in_proj_weight", "num_heads")),
                ("", Separate("num_heads", "q_proj_weight", "k_proj_weight", "v_proj_weight")),
            )
        ),
        Output("out_proj"),
        "torch/nn/functional.py, multi_head_attention_forward; torch/nn/modules/activation.py, MultiheadAttention",
        "bias_k and bias_v (add_bias_kv) untouched",
    ),
    # timm: ViT, DeiT, MobileViT and most others share one class.
    _timm(
        "layers.attention",
        "Attention",
        Blocked("qkv", "num_heads", head_dim="head_dim"),
        f"{_QK_NORM}; gate untouched",
        moved="timm.models.vision_transformer.Attention",
    ),
    _timm(
        "layers.attention",
        "AttentionRope",
        Choose(
            (
                ("qkv", Blocked("qkv", "num_heads", head_dim="head_dim")),
                ("", Separate("num_heads", kv_heads="num_kv_heads", head_dim="head_dim")),
            )
        ),
        _PER_KV,
    ),
    _timm("layers.attention_pool", "AttentionPoolLatent", _Q_KV, "Q maps the learned latent, which is untouched"),
    _timm("models.swin_transformer", "WindowAttention", _QKV, _TABLE),
    _timm("models.swin_transformer_v2", "WindowAttention", _QKV, "logit_scale, cpb_mlp and separate biases untouched"),
    _timm("models.xcit", "XCA", _QKV, f"{_CHANNEL}; temperature untouched", channel=True),
    _timm("models.cait", "ClassAttn", Separate("num_heads", "q", "k", "v"), "class attention of CaiT and XCiT"),
    _timm("models.cait", "TalkingHeadAttn", _QKV, "proj_l and proj_w, which mix heads, untouched"),
    _timm("models.davit", "WindowAttention", _QKV),
    _timm(
        "models.davit",
        "ChannelAttention",
        # softmax(k^T v) q^T: what is named q is averaged, so it is the paper's V.
        Blocked("qkv", "num_heads", roles="vqk"),
        f"{_CHANNEL}: the rows named k, v, q are Q, K, V",
        channel=True,
    ),
    _timm("models.davit", "ChannelAttentionV2", Blocked("qkv", "groups", head_dim="head_dim"), _CHANNEL, channel=True),
    _timm("models.eva", "EvaAttention", _FUSED_OR_NOT, "separate q_bias and v_bias, gate untouched"),
    _timm("models.beit", "Attention", _QKV, f"separate q_bias and v_bias untouched; {_TABLE}"),
    _timm(
        "models.maxxvit",
        "Attention2d",
        Choose(
            (
                ("head_first", Interleaved("qkv", "num_heads", head_dim="dim_head")),
                ("", Blocked("qkv", "num_heads", head_dim="dim_head")),
            )
        ),
        f"1x1 convolution; {_TABLE}",
    ),
    _timm(
        "models.maxxvit",
        "AttentionCl",
        Choose(
            (
                ("head_first", Interleaved("qkv", "num_heads", head_dim="dim_head")),
                ("", Blocked("qkv", "num_heads", head_dim="dim_head")),
            )
        ),
        _TABLE,
    ),
    _timm("models.pvt_v2", "Attention", _Q_KV, "spatial reduction untouched"),
    _timm("models.twins", "LocallyGroupedAttn", _QKV),
    _timm("models.twins", "GlobalSubSampleAttn", _Q_KV, "spatial reduction untouched"),
    _timm(
        "models.levit",
        "Attention",
        Sections("qkv.linear", (("q", "", "key_dim"), ("k", "", "key_dim"), ("v", "", "val_dim")), "num_heads"),
        "the linear maps, before the batch norms, which are untouched",
        output="proj.ln.linear",
    ),
    _timm(
        "models.levit",
        "AttentionDownsample",
        Joined(
            (
                Blocked("q.ln.linear", "num_heads", roles="q", head_dim="key_dim"),
                Sections("kv.linear", (("k", "", "key_dim"), ("v", "", "val_dim")), "num_heads"),
            )
        ),
        "the linear maps, before the batch norms, which are untouched",
        output="proj.ln.linear",
    ),
    # transformers, encoders.
    _hf("bert", "BertSelfAttention BertCrossAttention", _BERT, output=_BESIDE),
    _hf("roberta", "RobertaSelfAttention RobertaCrossAttention", _BERT, output=_BESIDE),
    _hf("xlm_roberta", "XLMRobertaSelfAttention XLMRobertaCrossAttention", _BERT, output=_BESIDE),
    _hf("electra", "ElectraSelfAttention ElectraCrossAttention", _BERT, output=_BESIDE),
    _hf("albert", "AlbertAttention", _BERT, "layers share one module, written once", output="dense"),
    _hf("distilbert", "DistilBertSelfAttention", Separate("n_heads", "q_lin", "k_lin", "v_lin"), output="out_lin"),
    _hf("mpnet", "MPNetSelfAttention", Separate("num_attention_heads", "q", "k", "v"), _TABLE, output="o"),
    _hf("nystromformer", "NystromformerSelfAttention", _BERT, "convolution over the values untouched", output=_BESIDE),
    _hf(
        "longformer",
        "LongformerSelfAttention",
        Joined(
            (
                Separate("num_heads", "query", "key", "value", head_dim="head_dim"),
                Separate("num_heads", "query_global", "key_global", "value_global", head_dim="head_dim", part="global"),
            )
        ),
        "the projections of global attention are heads of their own",
        output=_BESIDE,
    ),
    _hf(
        "deberta_v2",
        "DisentangledSelfAttention",
        Joined(
            (
                Separate("num_attention_heads", "query_proj", "key_proj", "value_proj"),
                IfPresent("pos_key_proj", Blocked("pos_key_proj", "num_attention_heads", roles="k", part=POSITION)),
                IfPresent("pos_query_proj", Blocked("pos_query_proj", "num_attention_heads", roles="q", part=POSITION)),
            )
        ),
        "projections of relative positions are Q and K heads of their own; with share_att_key the same as content's",
        output=_BESIDE,
    ),
    *_each(
        "camembert:CamembertSelfAttention camembert:CamembertCrossAttention ernie:ErnieSelfAttention "
        "ernie:ErnieCrossAttention xlm_roberta_xl:XLMRobertaXLSelfAttention "
        "roberta_prelayernorm:RobertaPreLayerNormSelfAttention bert_generation:BertGenerationSelfAttention "
        "layoutlm:LayoutLMSelfAttention splinter:SplinterSelfAttention markuplm:MarkupLMSelfAttention "
        "esm:EsmSelfAttention rembert:RemBertSelfAttention megatron_bert:MegatronBertSelfAttention "
        "roformer:RoFormerSelfAttention",
        _BERT,
        output=_BESIDE,
    ),
    *_each("eurobert:EuroBertAttention", _BY_CONFIG, _PER_KV),
    _hf("modernbert", "ModernBertAttention", Blocked("Wqkv", head_dim="head_dim"), output="Wo"),
    # transformers, vision, audio, detection.
    _hf("vit", "ViTAttention", Separate(_HEADS)),
    _hf("deit", "DeiTAttention", Separate(_HEADS, head_dim="head_dim")),
    _hf("dinov2", "Dinov2Attention", Separate(_HEADS, head_dim="head_dim")),
    _hf("beit", "BeitAttention", Separate(_HEADS, head_dim="head_dim"), _TABLE),
    _hf("swin", "SwinAttention", Separate("num_attention_heads", head_dim="head_dim"), _TABLE),
    _hf("swinv2", "Swinv2SelfAttention", _BERT, "logit_scale and continuous position bias untouched", output=_BESIDE),
    *_each(
        "dinov2_with_registers:Dinov2WithRegistersAttention dinov3_vit:DINOv3ViTAttention ijepa:IJepaAttention "
        "llama4:Llama4VisionAttention pixtral:PixtralAttention vit_mae:ViTMAEAttention vit_msn:ViTMSNAttention",
        _BY_HEAD_DIM,
    ),
    *_each("videomae:VideoMAESelfAttention yolos:YolosSelfAttention", _BERT, output=_BESIDE),
    _hf("internvl", "InternVLVisionAttention", _BY_HEAD_DIM, _QK_NORM, output="projection_layer"),
    *_each(
        "idefics2:Idefics2VisionAttention idefics3:Idefics3VisionAttention siglip2:Siglip2Attention "
        "smolvlm:SmolVLMVisionAttention",
        _BART,
        output="out_proj",
    ),
    _hf("clip", "CLIPAttention", _BART, output="out_proj"),
    _hf("siglip", "SiglipAttention", _BART, "the pooling head is nn.MultiheadAttention", output="out_proj"),
    _hf("detr", "DetrSelfAttention DetrCrossAttention", _BY_HEAD_DIM, "positions are added before Q and K"),
    _hf(
        "detr",
        "DetrMHAttentionMap",
        Separate(v="", head_dim="head_dim"),
        "has no V",
        output=Output(reason="no V"),
    ),
    _hf("wav2vec2", "Wav2Vec2Attention", _BART, output="out_proj"),
    *_each("hubert:HubertAttention unispeech:UniSpeechAttention", _BART, output="out_proj"),
    _hf("whisper", "WhisperAttention", _BART, output="out_proj"),
    # transformers, encoder-decoders.
    _hf("t5", "T5Attention", _T5, f"{_TABLE}; the missing 1/sqrt(d) is left as the model has it", output="o"),
    _hf("mt5", "MT5Attention", _T5, f"{_TABLE}; the missing 1/sqrt(d) is left as the model has it", output="o"),
    _hf("bart", "BartAttention", _BART, output="out_proj"),
    *_each(
        "blenderbot:BlenderbotAttention m2m_100:M2M100Attention marian:MarianAttention mbart:MBartAttention "
        "pegasus:PegasusAttention",
        _BART,
        output="out_proj",
    ),
    # transformers, decoders with one fused weight.
    _hf(
        "gpt2",
        "GPT2Attention",
        Choose(
            (
                (
                    "is_cross_attention",
                    Joined(
                        (
                            Blocked("q_attn", "num_heads", roles="q", input_major=True),
                            Blocked("c_attn", "num_heads", roles="kv", input_major=True),
                        )
                    ),
                ),
                ("", Blocked("c_attn", "num_heads", input_major=True)),
            )
        ),
        "Conv1D stores (in, out), so heads are column blocks",
        output=_CONV1D,
    ),
    _hf("gpt_neox", "GPTNeoXAttention", Interleaved("query_key_value", _HEADS, head_dim="head_size"), output="dense"),
    _hf(
        "bloom",
        "BloomAttention",
        Interleaved("query_key_value", "num_heads", head_dim="head_dim"),
        method="_reshape",
        output="dense",
    ),
    _hf(
        "falcon",
        "FalconAttention",
        Choose(
            (
                ("new_decoder_architecture", Grouped("query_key_value", "num_heads", "num_kv_heads")),
                ("multi_query", Blocked("query_key_value", "num_heads", "num_kv_heads")),
                ("", Interleaved("query_key_value", "num_heads")),
            )
        ),
        _PER_KV,
        method="_split_heads",
        output="dense",
    ),
    _hf(
        "mpt",
        "MptAttention",
        Blocked("Wqkv", "n_heads", head_dim="head_dim"),
        "clip_qkv is left as the model has it",
        output="out_proj",
    ),
    _hf(
        "codegen",
        "CodeGenAttention",
        Interleaved("qkv_proj", "num_attention_heads", "qvk", head_dim="head_dim", shards="mp_num"),
        "per tensor-parallel block Q, V, K",
        output="out_proj",
    ),
    _hf(
        "gpt_bigcode",
        "GPTBigCodeAttention",
        Choose(
            (
                ("multi_query", Blocked("c_attn", "num_heads", "kv_heads", head_dim="head_dim")),
                ("", Interleaved("c_attn", "num_heads", head_dim="head_dim")),
            )
        ),
        f"{_PER_KV}; cross-attention refused",
        output="c_proj",
    ),
    _hf("phi3", "Phi3Attention", Blocked("qkv_proj", _HEADS, _KV_HEADS, head_dim="head_dim"), _PER_KV),
    # transformers, decoders with separate weights.
    _hf("gpt_neo", "GPTNeoSelfAttention", Separate("num_heads", head_dim="head_dim"), output="out_proj"),
    _hf("gptj", "GPTJAttention", Separate("num_attention_heads", head_dim="head_dim"), output="out_proj"),
    _hf("opt", "OPTAttention", _BART, output="out_proj"),
    _hf("llama", "LlamaAttention", _BY_CONFIG, _PER_KV),
    _hf("llama4", "Llama4TextAttention", _BY_CONFIG, _PER_KV),
    _hf("mistral", "MistralAttention", _BY_CONFIG, _PER_KV),
    _hf("mixtral", "MixtralAttention", _BY_CONFIG, _PER_KV),
    _hf("qwen2", "Qwen2Attention", _BY_CONFIG, _PER_KV),
    _hf("qwen3", "Qwen3Attention", _BY_CONFIG, f"{_PER_KV}; {_QK_NORM}"),
    _hf("qwen3_moe", "Qwen3MoeAttention", _BY_CONFIG, f"{_PER_KV}; {_QK_NORM}"),
    _hf(
        "qwen3_next",
        "Qwen3NextAttention",
        Joined(
            (
                Interleaved("q_proj", _HEADS, "q-", head_dim="head_dim"),
                Blocked("k_proj", _KV_HEADS, roles="k", head_dim="head_dim"),
                Blocked("v_proj", _KV_HEADS, roles="v", head_dim="head_dim"),
            )
        ),
        f"query rows of q_proj only, gate rows untouched; {_PER_KV}; {_QK_NORM}; gated delta net layers left alone",
    ),
    _hf("gemma", "GemmaAttention", _BY_CONFIG, _PER_KV),
    _hf("gemma2", "Gemma2Attention", _BY_CONFIG, _PER_KV),
    _hf("gemma3", "Gemma3Attention", _BY_CONFIG, f"{_PER_KV}; {_QK_NORM}"),
    _hf("phi", "PhiAttention", _BY_CONFIG, f"{_PER_KV}; {_QK_NORM}", output="dense"),
    _hf("cohere", "CohereAttention", _BY_CONFIG, f"{_PER_KV}; {_QK_NORM}"),
    _hf("olmo2", "Olmo2Attention", _BY_CONFIG, f"{_PER_KV}; {_QK_NORM}"),
    _hf("gpt_oss", "GptOssAttention", _BY_CONFIG, f"{_PER_KV}; sinks untouched"),
    _hf("starcoder2", "Starcoder2Attention", _BY_CONFIG, _PER_KV),
    _hf("glm4", "Glm4Attention", _BY_CONFIG, _PER_KV),
    *_each(
        "arcee:ArceeAttention aria:AriaTextAttention bamba:BambaAttention cohere2:Cohere2Attention cwm:CwmAttention "
        "emu3:Emu3Attention ernie4_5:Ernie4_5Attention ernie4_5_moe:Ernie4_5_MoeAttention "
        "falcon_h1:FalconH1Attention glm:GlmAttention granite:GraniteAttention granitemoe:GraniteMoeAttention "
        "granitemoehybrid:GraniteMoeHybridAttention granitemoeshared:GraniteMoeSharedAttention helium:HeliumAttention "
        "hyperclovax:HyperCLOVAXAttention jamba:JambaAttention minimax:MiniMaxAttention ministral:MinistralAttention "
        "ministral3:Ministral3Attention nemotron:NemotronAttention nemotron_h:NemotronHAttention olmo:OlmoAttention "
        "phimoe:PhimoeAttention qwen2_moe:Qwen2MoeAttention qwen2_vl:Qwen2VLAttention "
        "qwen2_5_vl:Qwen2_5_VLAttention seed_oss:SeedOssAttention smollm3:SmolLM3Attention "
        "solar_open:SolarOpenAttention vaultgemma:VaultGemmaAttention",
        _BY_CONFIG,
        _PER_KV,
    ),
    *_each(
        "apertus:ApertusAttention dots1:Dots1Attention exaone4:Exaone4Attention flex_olmo:FlexOlmoAttention "
        "glm4_moe:Glm4MoeAttention hunyuan_v1_dense:HunYuanDenseV1Attention hunyuan_v1_moe:HunYuanMoEV1Attention "
        "minimax_m2:MiniMaxM2Attention olmo3:Olmo3Attention olmoe:OlmoeAttention qwen3_vl:Qwen3VLTextAttention "
        "qwen3_vl_moe:Qwen3VLMoeTextAttention stablelm:StableLmAttention nanochat:NanoChatAttention",
        _BY_CONFIG,
        f"{_PER_KV}; {_QK_NORM}",
    ),
    *_each(
        "gemma3n:Gemma3nTextAttention gemma4:Gemma4TextAttention",
        Joined(
            (
                Blocked("q_proj", head_dim="head_dim", roles="q"),
                IfPresent("k_proj", Blocked("k_proj", head_dim="head_dim", roles="k")),
                IfPresent("v_proj", Blocked("v_proj", head_dim="head_dim", roles="v")),
            )
        ),
        f"{_PER_KV}; {_QK_NORM}; a layer may use the keys and values of an earlier one",
    ),
    *_each("lfm2:Lfm2Attention", _BY_CONFIG, f"{_PER_KV}; {_QK_NORM}", output="out_proj"),
    _hf("deepseek_v2", "DeepseekV2Attention", _MLA, _MLA_RULE),
    _hf("deepseek_v3", "DeepseekV3Attention", _MLA, _MLA_RULE, permuted="rope"),
)

NOT_ATTENTION = {
    "transformers.models.wav2vec2.modeling_wav2vec2.Wav2Vec2AttnAdapterLayer": "a bottleneck after the layer",
    "timm.layers.split_attn.SplitAttn": "a softmax over branches",
    "timm.layers.selective_kernel.SelectiveKernelAttn": "a softmax over branches",
    "timm.layers.global_context.GlobalContext": "a gate per channel",
    "timm.layers.cbam.ChannelAttn": "a gate per channel",
    "timm.layers.cbam.SpatialAttn": "a gate per position",
}
"""Classes with attention in their name and no queries and keys; left alone without a word."""
