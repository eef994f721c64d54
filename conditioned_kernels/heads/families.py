"""The model families: one row per attention class. A new family is one row here and one case in tests/models.py.

A row names the class by its full path (never by shape), its layout, and where its source splits the heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import Blocked, Choose, Grouped, Interleaved, Joined, Layout, Separate


@dataclass(frozen=True)
class Family:
    """One attention class.

    Attributes
    ----------
    classes : full names ``module.Class``; several when a library moved or copied the class.
    layout : its storage form.
    source : where the class splits its heads.
    rule : what is conditioned, where the paper is silent; empty when Algorithm 1 says it.
    """

    classes: tuple[str, ...]
    layout: Layout
    source: str
    rule: str = ""


_HF = "transformers.models."
_HEADS = "config.num_attention_heads"
_KV_HEADS = "config.num_key_value_heads"
_PER_KV = "K and V per K/V head"

FAMILIES: tuple[Family, ...] = (
    Family(
        ("torch.nn.modules.activation.MultiheadAttention",),
        Choose(
            (
                ("_qkv_same_embed_dim", Blocked("in_proj_weight", "num_heads")),
                ("", Separate("num_heads", "q_proj_weight", "k_proj_weight", "v_proj_weight")),
            )
        ),
        "torch/nn/functional.py, multi_head_attention_forward; torch/nn/modules/activation.py, MultiheadAttention",
        "bias_k and bias_v (add_bias_kv) untouched",
    ),
    Family(
        ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention"),
        Blocked("qkv", "num_heads"),
        "timm/layers/attention.py, Attention.forward",
    ),
    Family(
        ("timm.models.swin_transformer.WindowAttention",),
        Blocked("qkv", "num_heads"),
        "timm/models/swin_transformer.py, WindowAttention.forward",
        "relative position bias table untouched",
    ),
    Family(
        (_HF + "bert.modeling_bert.BertSelfAttention", _HF + "bert.modeling_bert.BertCrossAttention"),
        Separate("num_attention_heads", "query", "key", "value"),
        "transformers/models/bert/modeling_bert.py, BertSelfAttention.forward",
    ),
    Family(
        (_HF + "vit.modeling_vit.ViTAttention",),
        Separate(_HEADS),
        "transformers/models/vit/modeling_vit.py, ViTAttention.forward",
    ),
    Family(
        (_HF + "gpt2.modeling_gpt2.GPT2Attention",),
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
        "transformers/models/gpt2/modeling_gpt2.py, GPT2Attention.forward",
        "Conv1D stores (in, out), so heads are column blocks",
    ),
    Family(
        (_HF + "gpt_neox.modeling_gpt_neox.GPTNeoXAttention",),
        Interleaved("query_key_value", _HEADS, head_dim="head_size"),
        "transformers/models/gpt_neox/modeling_gpt_neox.py, GPTNeoXAttention.forward",
    ),
    Family(
        (_HF + "t5.modeling_t5.T5Attention",),
        Separate("n_heads", "q", "k", "v", head_dim="key_value_proj_dim"),
        "transformers/models/t5/modeling_t5.py, T5Attention.forward",
        "relative attention bias untouched; the missing 1/sqrt(d) is left as the model has it",
    ),
    Family(
        (_HF + "llama.modeling_llama.LlamaAttention",),
        Separate(_HEADS, kv_heads=_KV_HEADS, head_dim="head_dim"),
        "transformers/models/llama/modeling_llama.py, LlamaAttention.forward",
        _PER_KV,
    ),
    Family(
        (_HF + "qwen3.modeling_qwen3.Qwen3Attention",),
        Separate(_HEADS, kv_heads=_KV_HEADS, head_dim="head_dim"),
        "transformers/models/qwen3/modeling_qwen3.py, Qwen3Attention.forward",
        f"{_PER_KV}; the gains of q_norm and k_norm untouched",
    ),
    Family(
        (_HF + "falcon.modeling_falcon.FalconAttention",),
        Choose(
            (
                ("new_decoder_architecture", Grouped("query_key_value", "num_heads", "num_kv_heads")),
                ("multi_query", Blocked("query_key_value", "num_heads", "num_kv_heads")),
                ("", Interleaved("query_key_value", "num_heads")),
            )
        ),
        "transformers/models/falcon/modeling_falcon.py, FalconAttention._split_heads",
        _PER_KV,
    ),
)
