"""Tiny float32 models, at least one per row of the family table, with the heads their first layer has.

A case is an id, the attention class it covers, a builder of (model, args, kwargs) and the heads by role. A case
whose class the installed libraries lack is skipped and says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One tiny model of one family.

    Attributes
    ----------
    name : the case's id.
    covers : full name of the attention class whose row it covers.
    build : makes (model, args, kwargs), fresh and random, in float32.
    heads : number of heads by label ("q", "k.rope") of the first layer of that class.
    """

    name: str
    covers: str
    build: Callable[[], Built]
    heads: dict[str, int]

    @property
    def missing(self) -> str:
        """Why the case cannot run here; "" if it can."""
        module, _, cls = self.covers.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), cls, None)
        except ImportError as error:
            return f"{self.covers} cannot be imported ({error})"
        # A class that a library moved can still be imported from its old place.
        here = found is not None and found.__module__ == module
        return "" if here else f"{self.covers} is not in the installed version"


def qkv(q: int, kv: int = 0) -> dict[str, int]:
    return {"q": q, "k": kv or q, "v": kv or q}


def tokens(length: int = 6) -> torch.Tensor:
    return torch.arange(1, length + 1)[None] % 32


# --- torch ---------------------------------------------------------------------------------------------------------


class CallsAttention(nn.Module):
    """Self- or cross-attention by one ``nn.MultiheadAttention``, tokens first."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, batch_first=True, **kwargs)

    def forward(self, query: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        memory = query if memory is None else memory
        return self.attn(query, memory, memory)[0]


def torch_attention(memory_width: int = 16, **kwargs: Any) -> Built:
    return CallsAttention(**kwargs), (torch.randn(1, 5, 16), torch.randn(1, 7, memory_width)), {}


def torch_layer(cls: str, **kwargs: Any) -> Built:
    layer = getattr(nn, cls)(16, 4, 24, dropout=0.0, batch_first=True, **kwargs)
    inputs = (torch.randn(1, 5, 16),) * (2 if "Decoder" in cls else 1)
    return layer, inputs, {}


def torch_encoder() -> Built:
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3), (torch.randn(1, 5, 16),), {}


def torch_transformer() -> Built:
    model = nn.Transformer(16, 4, 1, 1, 24, dropout=0.0, batch_first=True)
    return model, (torch.randn(1, 5, 16), torch.randn(1, 6, 16)), {}


# --- timm ----------------------------------------------------------------------------------------------------------


def timm_model(file: str, cls: str, size: int, **kwargs: Any) -> Built:
    model = getattr(importlib.import_module(f"timm.models.{file}"), cls)(num_classes=0, **kwargs)
    return model, (torch.randn(1, 3, size, size),), {}


def timm_layer(file: str, cls: str, *args: Any, inputs: Callable[[], tuple] | None = None, **kwargs: Any) -> Built:
    layer = getattr(importlib.import_module(f"timm.{file}"), cls)(*args, **kwargs)
    return layer, inputs() if inputs else (torch.randn(1, 7, 16),), {}


def maxxvit(head_first: bool, conv: bool, block: str) -> Built:
    from timm.models import maxxvit

    transformer = maxxvit.MaxxVitTransformerCfg(
        dim_head=8, head_first=head_first, use_nchw_attn=conv, window_size=(2, 2), grid_size=(2, 2), rel_pos_type="bias"
    )
    config = maxxvit.MaxxVitCfg(
        embed_dim=(16,), depths=(1,), stem_width=8, block_type=(block,), transformer_cfg=transformer
    )
    return maxxvit.MaxxVit(config, img_size=16, num_classes=0), (torch.randn(1, 3, 16, 16),), {}


def levit(use_conv: bool) -> Built:
    return timm_model(
        "levit",
        "Levit",
        64,
        img_size=64,
        embed_dim=(16, 24),
        key_dim=4,
        depth=(1, 1),
        num_heads=(2, 3),
        attn_ratio=2.0,
        mlp_ratio=2.0,
        use_conv=use_conv,
    )


def mobilevit() -> Built:
    from timm.models.mobilevit import MobileVitBlock

    return (
        MobileVitBlock(16, transformer_dim=24, num_heads=3, patch_size=2, transformer_depth=1),
        (torch.randn(1, 16, 8, 8),),
        {},
    )


VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4}

# --- transformers --------------------------------------------------------------------------------------------------

BERT = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "max_position_embeddings": 40,
}
LLAMA = BERT | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PIXELS = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}


def hf(config: str, model: str, *, inputs: Callable[[], dict[str, Any]] | None = None, **kwargs: Any) -> Built:
    import transformers

    made = getattr(transformers, model)(getattr(transformers, config)(**kwargs))
    return made.float(), (), inputs() if inputs else {"input_ids": tokens()}


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, 3, 8, 8)}


def bert(**kwargs: Any) -> Built:
    return hf("BertConfig", "BertModel", **(BERT | kwargs))


def cross_attention(config: str, model: str, **kwargs: Any) -> Built:
    return hf(
        config,
        model,
        inputs=lambda: {"input_ids": tokens(), "encoder_hidden_states": torch.randn(1, 5, 16)},
        add_cross_attention=True,
        is_decoder=True,
        **kwargs,
    )


def encoder_decoder(config: str, model: str, **kwargs: Any) -> Built:
    return hf(config, model, inputs=lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(5)}, **kwargs)


def detr(model: str) -> Built:
    import transformers

    config = transformers.DetrConfig(
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_queries=5,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], out_features=["stage4"]
        ),
    )
    return getattr(transformers, model)(config), (), {"pixel_values": torch.randn(1, 3, 64, 64)}


def attention_map() -> Built:
    from transformers.models.detr.modeling_detr import DetrMHAttentionMap

    return DetrMHAttentionMap(16, 4), (torch.randn(1, 5, 16), torch.randn(1, 16, 3, 2)), {}


def deepseek(version: str, **kwargs: Any) -> Built:
    sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    groups = {"n_group": 1, "topk_group": 1}
    return hf(
        f"Deepseek{version}Config",
        f"Deepseek{version}Model",
        **(LLAMA | {"num_key_value_heads": 4} | sizes | experts | groups | kwargs),
    )


MLA = {"q.nope": 4, "q.rope": 4, "kv.latent": 1, "k.rope": 1, "k.nope": 4, "v": 4}


def falcon(**kwargs: Any) -> Built:
    return hf(
        "FalconConfig",
        "FalconModel",
        hidden_size=16,
        num_attention_heads=4,
        num_hidden_layers=1,
        vocab_size=32,
        **kwargs,
    )


def wav2vec2(prefix: str = "Wav2Vec2") -> Built:
    return hf(
        f"{prefix}Config",
        f"{prefix}Model",
        inputs=lambda: {"input_values": torch.randn(1, 80)},
        **(BERT | {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3)}),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )


def whisper() -> Built:
    return hf(
        "WhisperConfig",
        "WhisperModel",
        inputs=lambda: {"input_features": torch.randn(1, 8, 20), "decoder_input_ids": tokens(5)},
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        vocab_size=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def clip() -> Built:
    text = BERT | {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    return hf(
        "CLIPConfig",
        "CLIPModel",
        inputs=lambda: {"input_ids": tokens(), **pixels()},
        text_config=text,
        vision_config=PIXELS,
        projection_dim=8,
    )


def longformer(reach: str) -> Built:
    def inputs() -> dict[str, torch.Tensor]:
        given = {"input_ids": tokens(8)}
        if reach == "global":
            given["global_attention_mask"] = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 0]])
        return given

    return hf("LongformerConfig", "LongformerModel", inputs=inputs, **BERT, attention_window=[4, 4], pad_token_id=0)


TORCH = "torch.nn.modules.activation.MultiheadAttention"
HF = "transformers.models"


def _covers(model: str, cls: str) -> str:
    return f"{HF}.{model}.modeling_{model}.{cls}"


def _bert_like(model: str, prefix: str, cls: str = "", **kwargs: Any) -> Case:
    build = partial(hf, f"{prefix}Config", f"{prefix}Model", **(BERT | kwargs))
    return Case(model, _covers(model, cls or f"{prefix}SelfAttention"), build, qkv(4))


def _llama_like(model: str, prefix: str, name: str = "", kv: int = 2, **kwargs: Any) -> Case:
    build = partial(hf, f"{prefix}Config", f"{prefix}Model", **(LLAMA | {"num_key_value_heads": kv} | kwargs))
    return Case(name or model, _covers(model, f"{prefix}Attention"), build, qkv(4, kv))


def _vision(model: str, prefix: str, cls: str, **kwargs: Any) -> Case:
    build = partial(hf, f"{prefix}Config", f"{prefix}Model", inputs=pixels, **(PIXELS | kwargs))
    return Case(model, _covers(model, cls), build, qkv(4))


def _timm(name: str, file: str, cls: str, heads: dict[str, int], build: Callable[[], Built]) -> Case:
    return Case(name, f"timm.{file}.{cls}", build, heads)


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SWIN = {
    "img_size": 16,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": (2, 1),
    "num_heads": (2, 4),
    "window_size": 4,
}


def _tower(
    model: str,
    config: str,
    made: str,
    cls: str,
    inputs: Callable[[], dict[str, torch.Tensor]] = pixels,
    sizes: dict[str, Any] = PIXELS,
    name: str = "",
    **kwargs: Any,
) -> Case:
    """A part of a model, of classes that are not all at transformers' top."""

    def build() -> Built:
        where = f"transformers.models.{model}"
        configured = getattr(importlib.import_module(f"{where}.configuration_{model}"), config)(**(sizes | kwargs))
        return getattr(importlib.import_module(f"{where}.modeling_{model}"), made)(configured).float(), (), inputs()

    return Case(name or model, _covers(model, cls), build, qkv(4))


def noisy_pixels() -> dict[str, torch.Tensor]:
    """The order in which patches are masked, which would be random."""
    return pixels() | {"noise": torch.arange(4.0)[None]}


def patch_mask() -> dict[str, torch.Tensor]:
    return pixels() | {"patch_attention_mask": torch.ones(1, 2, 2, dtype=torch.bool)}


def flat_patches() -> dict[str, torch.Tensor]:
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    return {
        "pixel_values": torch.randn(1, 5, 48),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[2, 2]]),
    }


class Rotates(nn.Module):
    """An attention layer by itself, with the angles of a row of patches, the first of which does not turn."""

    def __init__(self, attn: nn.Module, name: str, angles: Any) -> None:
        super().__init__()
        self.attn, self.name, self.angles = attn, name, angles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x, attention_mask=None, **{self.name: self.angles})[0]


def pixtral() -> Built:
    """The whole tower packs its images into one row, which no proof by samples can tell apart."""
    from transformers.models.pixtral import modeling_pixtral as pixtral

    config = pixtral.PixtralVisionConfig(**PIXELS, attn_implementation="sdpa")
    angles = pixtral.PixtralVisionRotaryEmbedding(config)(
        torch.randn(4, 4), torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    )
    return Rotates(pixtral.PixtralAttention(config), "position_embeddings", angles), (torch.randn(2, 4, 16),), {}


def llama4_vision() -> Built:
    from transformers.models.llama4 import modeling_llama4 as llama4

    config = llama4.Llama4VisionConfig(**(PIXELS | {"hidden_size": 32}), attn_implementation="sdpa")
    angles = llama4.Llama4VisionRotaryEmbedding(config).freqs_ci.flip(0)
    return Rotates(llama4.Llama4VisionAttention(config), "freqs_ci", angles), (torch.randn(2, 5, 32),), {}


SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def _text(model: str, prefix: str, cls: str = "", name: str = "", kv: int = 2, **kwargs: Any) -> Case:
    """A decoder whose configuration is Llama's, of classes that are not all at transformers' top."""

    def build() -> Built:
        where = f"transformers.models.{model}"
        config = getattr(importlib.import_module(f"{where}.configuration_{model}"), f"{prefix}Config")
        made = getattr(importlib.import_module(f"{where}.modeling_{model}"), f"{prefix}Model")
        sizes = LLAMA | {"num_key_value_heads": kv, "head_dim": 4} | kwargs
        return made(config(**sizes)).float(), (), {"input_ids": tokens(), "use_cache": False}

    return Case(name or model, _covers(model, cls or f"{prefix}Attention"), build, qkv(4, kv))


EXPERTS = MOE | {
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 8,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0]}}
HALF_ROPE = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "head_dim": 8}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

CASES: tuple[Case, ...] = (
    Case("torch-mha", TORCH, torch_attention, qkv(4)),
    Case("torch-mha-no-bias", TORCH, partial(torch_attention, bias=False), qkv(4)),
    Case("torch-mha-bias-kv", TORCH, partial(torch_attention, add_bias_kv=True), qkv(4)),
    Case("torch-mha-separate", TORCH, partial(torch_attention, 12, kdim=12, vdim=12), qkv(4)),
    Case("torch-encoder-layer", TORCH, partial(torch_layer, "TransformerEncoderLayer"), qkv(4)),
    Case("torch-decoder-layer", TORCH, partial(torch_layer, "TransformerDecoderLayer"), qkv(4)),
    Case("torch-encoder", TORCH, torch_encoder, qkv(4)),
    Case("torch-transformer", TORCH, torch_transformer, qkv(4)),
    # timm
    _timm(
        "timm-vit",
        "layers.attention",
        "Attention",
        qkv(4),
        partial(timm_model, "vision_transformer", "VisionTransformer", 8, **VIT),
    ),
    _timm(
        "timm-vit-qk-norm",
        "layers.attention",
        "Attention",
        qkv(4),
        partial(timm_model, "vision_transformer", "VisionTransformer", 8, **VIT, qk_norm=True),
    ),
    _timm(
        "timm-vit-wide-heads",
        "layers.attention",
        "Attention",
        qkv(4),
        partial(timm_layer, "layers.attention", "Attention", 16, 4, attn_head_dim=12, qkv_bias=True, gated=True),
    ),
    _timm(
        "timm-vit-head-over-width",
        "layers.attention",
        "Attention",
        qkv(2),
        partial(timm_layer, "layers.attention", "Attention", 16, 2, attn_head_dim=20),
    ),
    _timm(
        "timm-deit",
        "layers.attention",
        "Attention",
        qkv(4),
        partial(timm_model, "deit", "VisionTransformerDistilled", 8, **VIT),
    ),
    _timm("timm-mobilevit", "layers.attention", "Attention", qkv(3), mobilevit),
    _timm(
        "timm-rope",
        "layers.attention",
        "AttentionRope",
        qkv(4),
        partial(timm_layer, "layers.attention", "AttentionRope", 16, 4),
    ),
    _timm(
        "timm-rope-grouped",
        "layers.attention",
        "AttentionRope",
        qkv(4, 2),
        partial(timm_layer, "layers.attention", "AttentionRope", 16, 4, num_kv_heads=2, qkv_fused=False),
    ),
    _timm(
        "timm-attention-pool",
        "layers.attention_pool",
        "AttentionPoolLatent",
        qkv(4),
        partial(timm_layer, "layers.attention_pool", "AttentionPoolLatent", 16, num_heads=4, mlp_ratio=1.0),
    ),
    _timm(
        "timm-swin",
        "models.swin_transformer",
        "WindowAttention",
        qkv(2),
        partial(timm_model, "swin_transformer", "SwinTransformer", 16, **SWIN),
    ),
    _timm(
        "timm-swin-v2",
        "models.swin_transformer_v2",
        "WindowAttention",
        qkv(2),
        partial(timm_model, "swin_transformer_v2", "SwinTransformerV2", 16, **SWIN),
    ),
    _timm(
        "timm-xcit",
        "models.xcit",
        "XCA",
        qkv(4),
        partial(
            timm_model,
            "xcit",
            "Xcit",
            32,
            img_size=32,
            patch_size=8,
            embed_dim=16,
            depth=1,
            num_heads=4,
            cls_attn_layers=1,
        ),
    ),
    _timm(
        "timm-cait-class",
        "models.cait",
        "ClassAttn",
        qkv(4),
        partial(timm_model, "cait", "Cait", 8, **VIT),
    ),
    _timm("timm-cait", "models.cait", "TalkingHeadAttn", qkv(4), partial(timm_model, "cait", "Cait", 8, **VIT)),
    _timm(
        "timm-davit-window",
        "models.davit",
        "WindowAttention",
        qkv(2),
        partial(timm_model, "davit", "DaVit", 32, depths=(1, 1), embed_dims=(16, 24), num_heads=(2, 3), window_size=4),
    ),
    _timm(
        "timm-davit-channel",
        "models.davit",
        "ChannelAttention",
        qkv(2),
        partial(timm_model, "davit", "DaVit", 32, depths=(1, 1), embed_dims=(16, 24), num_heads=(2, 3), window_size=4),
    ),
    _timm(
        "timm-davit-channel-v2",
        "models.davit",
        "ChannelAttentionV2",
        qkv(2),
        partial(
            timm_model,
            "davit",
            "DaVit",
            32,
            depths=(1, 1),
            embed_dims=(16, 24),
            num_heads=(2, 3),
            window_size=4,
            channel_attn_v2=True,
        ),
    ),
    _timm("timm-eva", "models.eva", "EvaAttention", qkv(4), partial(timm_model, "eva", "Eva", 8, **VIT)),
    _timm(
        "timm-eva-separate",
        "models.eva",
        "EvaAttention",
        qkv(4),
        partial(timm_model, "eva", "Eva", 8, **VIT, qkv_fused=False, use_rot_pos_emb=True, scale_attn_inner=True),
    ),
    _timm("timm-beit", "models.beit", "Attention", qkv(4), partial(timm_model, "beit", "Beit", 8, **VIT)),
    _timm("timm-coatnet", "models.maxxvit", "Attention2d", qkv(2), partial(maxxvit, True, True, "T")),
    _timm("timm-maxvit-conv", "models.maxxvit", "Attention2d", qkv(2), partial(maxxvit, False, True, "M")),
    _timm("timm-maxvit", "models.maxxvit", "AttentionCl", qkv(2), partial(maxxvit, True, False, "M")),
    _timm("timm-maxvit-heads-last", "models.maxxvit", "AttentionCl", qkv(2), partial(maxxvit, False, False, "M")),
    _timm(
        "timm-pvt-v2",
        "models.pvt_v2",
        "Attention",
        qkv(2),
        partial(
            timm_model,
            "pvt_v2",
            "PyramidVisionTransformerV2",
            32,
            depths=(1, 1, 1, 1),
            embed_dims=(16, 16, 24, 24),
            num_heads=(2, 2, 3, 3),
            mlp_ratios=(1, 1, 1, 1),
            sr_ratios=(4, 2, 1, 1),
        ),
    ),
    _timm(
        "timm-pvt-v2-linear",
        "models.pvt_v2",
        "Attention",
        qkv(4),
        partial(
            timm_layer,
            "models.pvt_v2",
            "Attention",
            16,
            4,
            linear_attn=True,
            inputs=lambda: (torch.randn(1, 12, 16), (3, 4)),
        ),
    ),
    _timm(
        "timm-twins-local",
        "models.twins",
        "LocallyGroupedAttn",
        qkv(4),
        partial(
            timm_layer,
            "models.twins",
            "LocallyGroupedAttn",
            16,
            4,
            ws=2,
            inputs=lambda: (torch.randn(1, 12, 16), (3, 4)),
        ),
    ),
    _timm(
        "timm-twins-global",
        "models.twins",
        "GlobalSubSampleAttn",
        qkv(4),
        partial(
            timm_layer,
            "models.twins",
            "GlobalSubSampleAttn",
            16,
            4,
            sr_ratio=2,
            inputs=lambda: (torch.randn(1, 24, 16), (4, 6)),
        ),
    ),
    _timm("timm-levit", "models.levit", "Attention", qkv(2), partial(levit, False)),
    _timm("timm-levit-down", "models.levit", "AttentionDownsample", qkv(4), partial(levit, False)),
    _timm("timm-levit-conv", "models.levit", "Attention", qkv(2), partial(levit, True)),
    # transformers, encoders
    _bert_like("bert", "Bert"),
    *(
        Case(
            f"{model}-cross",
            _covers(model, f"{prefix}CrossAttention"),
            partial(cross_attention, f"{prefix}Config", f"{prefix}Model", **BERT),
            qkv(4),
        )
        for model, prefix in (
            ("bert", "Bert"),
            ("roberta", "Roberta"),
            ("xlm_roberta", "XLMRoberta"),
            ("electra", "Electra"),
            ("camembert", "Camembert"),
            ("ernie", "Ernie"),
        )
    ),
    _bert_like("camembert", "Camembert"),
    _bert_like("ernie", "Ernie"),
    _bert_like("xlm_roberta_xl", "XLMRobertaXL"),
    _bert_like("roberta_prelayernorm", "RobertaPreLayerNorm"),
    Case(
        "bert_generation",
        _covers("bert_generation", "BertGenerationSelfAttention"),
        partial(hf, "BertGenerationConfig", "BertGenerationEncoder", **BERT),
        qkv(4),
    ),
    _bert_like("layoutlm", "LayoutLM"),
    _bert_like("splinter", "Splinter"),
    _bert_like(
        "markuplm",
        "MarkupLM",
        max_depth=2,
        xpath_unit_hidden_size=4,
        max_xpath_tag_unit_embeddings=8,
        max_xpath_subs_unit_embeddings=8,
        tag_pad_id=0,
        subs_pad_id=0,
    ),
    _bert_like("esm", "Esm", pad_token_id=0, mask_token_id=3, position_embedding_type="rotary"),
    _bert_like("rembert", "RemBert", input_embedding_size=8),
    _bert_like("megatron_bert", "MegatronBert"),
    _bert_like("roformer", "RoFormer"),
    _text("eurobert", "EuroBert"),
    _bert_like("roberta", "Roberta"),
    _bert_like("xlm_roberta", "XLMRoberta"),
    _bert_like("electra", "Electra", embedding_size=8),
    _bert_like("albert", "Albert", "AlbertAttention", embedding_size=8),
    Case(
        "distilbert",
        _covers("distilbert", "DistilBertSelfAttention"),
        partial(hf, "DistilBertConfig", "DistilBertModel", dim=16, n_heads=4, n_layers=2, hidden_dim=24, vocab_size=32),
        qkv(4),
    ),
    _bert_like("mpnet", "MPNet"),
    Case(
        "nystromformer",
        _covers("nystromformer", "NystromformerSelfAttention"),
        partial(
            hf,
            "NystromformerConfig",
            "NystromformerModel",
            inputs=lambda: {"input_ids": tokens(8)},
            **BERT,
            segment_means_seq_len=8,
            num_landmarks=4,
            conv_kernel_size=3,
        ),
        qkv(4),
    ),
    Case(
        "longformer",
        _covers("longformer", "LongformerSelfAttention"),
        partial(longformer, "global"),
        qkv(4) | {f"{role}.global": 4 for role in "qkv"},
    ),
    _bert_like("deberta_v2", "DebertaV2", "DisentangledSelfAttention"),
    Case(
        "deberta_v2-shared",
        _covers("deberta_v2", "DisentangledSelfAttention"),
        partial(
            hf,
            "DebertaV2Config",
            "DebertaV2Model",
            **BERT,
            relative_attention=True,
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=12,
        ),
        qkv(4),
    ),
    Case(
        "deberta_v2-positions",
        _covers("deberta_v2", "DisentangledSelfAttention"),
        partial(
            hf,
            "DebertaV2Config",
            "DebertaV2Model",
            **BERT,
            relative_attention=True,
            share_att_key=False,
            pos_att_type=["p2c", "c2p"],
            position_buckets=12,
        ),
        qkv(4) | {"k.position": 4, "q.position": 4},
    ),
    _bert_like(
        "modernbert",
        "ModernBert",
        "ModernBertAttention",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    # transformers, vision, audio, detection
    _vision("vit", "ViT", "ViTAttention"),
    _vision("deit", "DeiT", "DeiTAttention"),
    _vision("dinov2", "Dinov2", "Dinov2Attention"),
    _vision("beit", "Beit", "BeitAttention", use_relative_position_bias=True),
    Case(
        "swin",
        _covers("swin", "SwinAttention"),
        partial(
            hf,
            "SwinConfig",
            "SwinModel",
            inputs=lambda: {"pixel_values": torch.randn(1, 3, 16, 16)},
            image_size=16,
            patch_size=2,
            embed_dim=16,
            depths=[2, 1],
            num_heads=[2, 4],
            window_size=4,
        ),
        qkv(2),
    ),
    Case(
        "swinv2",
        _covers("swinv2", "Swinv2SelfAttention"),
        partial(
            hf,
            "Swinv2Config",
            "Swinv2Model",
            inputs=lambda: {"pixel_values": torch.randn(1, 3, 16, 16)},
            image_size=16,
            patch_size=2,
            embed_dim=16,
            depths=[2, 1],
            num_heads=[2, 4],
            window_size=4,
        ),
        qkv(2),
    ),
    _tower(
        "dinov2_with_registers", "Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", "Dinov2WithRegistersAttention"
    ),
    _tower("dinov3_vit", "DINOv3ViTConfig", "DINOv3ViTModel", "DINOv3ViTAttention", num_register_tokens=1),
    _tower("ijepa", "IJepaConfig", "IJepaModel", "IJepaAttention"),
    _tower("vit_mae", "ViTMAEConfig", "ViTMAEModel", "ViTMAEAttention", noisy_pixels, mask_ratio=0.0),
    _tower("vit_msn", "ViTMSNConfig", "ViTMSNModel", "ViTMSNAttention"),
    _tower("yolos", "YolosConfig", "YolosModel", "YolosSelfAttention", image_size=[8, 8], num_detection_tokens=2),
    _tower(
        "videomae",
        "VideoMAEConfig",
        "VideoMAEModel",
        "VideoMAESelfAttention",
        lambda: {"pixel_values": torch.randn(1, 2, 3, 8, 8)},
        num_frames=2,
    ),
    _tower(
        "internvl",
        "InternVLVisionConfig",
        "InternVLVisionModel",
        "InternVLVisionAttention",
        image_size=[8, 8],
        patch_size=[4, 4],
    ),
    Case("pixtral", _covers("pixtral", "PixtralAttention"), pixtral, qkv(4)),
    Case("llama4-vision", _covers("llama4", "Llama4VisionAttention"), llama4_vision, qkv(4)),
    _tower("idefics2", "Idefics2VisionConfig", "Idefics2VisionTransformer", "Idefics2VisionAttention", patch_mask),
    _tower("idefics3", "Idefics3VisionConfig", "Idefics3VisionTransformer", "Idefics3VisionAttention", patch_mask),
    _tower("smolvlm", "SmolVLMVisionConfig", "SmolVLMVisionTransformer", "SmolVLMVisionAttention", patch_mask),
    _tower("siglip2", "Siglip2VisionConfig", "Siglip2VisionModel", "Siglip2Attention", flat_patches, num_patches=4),
    *(
        Case(model, _covers(model, f"{prefix}Attention"), partial(wav2vec2, prefix), qkv(4))
        for model, prefix in (("hubert", "Hubert"), ("unispeech", "UniSpeech"))
    ),
    Case("clip", _covers("clip", "CLIPAttention"), clip, qkv(4)),
    Case(
        "siglip",
        _covers("siglip", "SiglipAttention"),
        partial(hf, "SiglipVisionConfig", "SiglipVisionModel", inputs=pixels, **PIXELS),
        qkv(4),
    ),
    Case("detr", _covers("detr", "DetrSelfAttention"), partial(detr, "DetrModel"), qkv(4)),
    Case("detr-cross", _covers("detr", "DetrCrossAttention"), partial(detr, "DetrModel"), qkv(4)),
    Case("detr-map", _covers("detr", "DetrMHAttentionMap"), attention_map, {"q": 4, "k": 4}),
    Case("wav2vec2", _covers("wav2vec2", "Wav2Vec2Attention"), wav2vec2, qkv(4)),
    Case("whisper", _covers("whisper", "WhisperAttention"), whisper, qkv(4)),
    # transformers, encoder-decoders
    *(
        Case(
            model,
            _covers(model, f"{prefix}Attention"),
            partial(
                encoder_decoder,
                f"{prefix}Config",
                f"{prefix}Model",
                d_model=16,
                d_kv=8,
                d_ff=24,
                num_layers=1,
                num_heads=4,
                vocab_size=32,
                decoder_start_token_id=0,
            ),
            qkv(4),
        )
        for model, prefix in (("t5", "T5"), ("mt5", "MT5"))
    ),
    *(
        Case(
            model,
            _covers(model, f"{prefix}Attention"),
            partial(encoder_decoder, f"{prefix}Config", f"{prefix}Model", **SEQ2SEQ),
            qkv(4),
        )
        for model, prefix in (
            ("bart", "Bart"),
            ("blenderbot", "Blenderbot"),
            ("m2m_100", "M2M100"),
            ("marian", "Marian"),
            ("mbart", "MBart"),
            ("pegasus", "Pegasus"),
        )
    ),
    # transformers, decoders with one fused weight
    Case(
        "gpt2",
        _covers("gpt2", "GPT2Attention"),
        partial(hf, "GPT2Config", "GPT2Model", n_embd=16, n_head=4, n_layer=2, vocab_size=32),
        qkv(4),
    ),
    Case(
        "gpt2-cross",
        _covers("gpt2", "GPT2Attention"),
        partial(cross_attention, "GPT2Config", "GPT2Model", n_embd=16, n_head=4, n_layer=1, vocab_size=32),
        qkv(4),
    ),
    _bert_like("gpt_neox", "GPTNeoX", "GPTNeoXAttention"),
    Case(
        "bloom",
        _covers("bloom", "BloomAttention"),
        partial(hf, "BloomConfig", "BloomModel", hidden_size=16, n_head=4, n_layer=2, vocab_size=32),
        qkv(4),
    ),
    Case("falcon-heads", _covers("falcon", "FalconAttention"), partial(falcon, multi_query=False, alibi=True), qkv(4)),
    Case("falcon-multi-query", _covers("falcon", "FalconAttention"), partial(falcon, multi_query=True), qkv(4, 1)),
    Case(
        "falcon-groups",
        _covers("falcon", "FalconAttention"),
        partial(falcon, new_decoder_architecture=True, num_kv_heads=2),
        qkv(4, 2),
    ),
    Case(
        "mpt",
        _covers("mpt", "MptAttention"),
        partial(
            hf,
            "MptConfig",
            "MptModel",
            d_model=16,
            n_heads=4,
            n_layers=2,
            vocab_size=32,
            max_seq_len=16,
            attn_config={"clip_qkv": 8.0},
        ),
        qkv(4),
    ),
    Case(
        "codegen",
        _covers("codegen", "CodeGenAttention"),
        partial(
            hf,
            "CodeGenConfig",
            "CodeGenModel",
            n_embd=32,
            n_head=8,
            n_layer=1,
            rotary_dim=2,
            vocab_size=32,
            n_ctx=16,
            n_positions=16,
        ),
        qkv(8),
    ),
    *(
        Case(
            f"gpt_bigcode{name}",
            _covers("gpt_bigcode", "GPTBigCodeAttention"),
            partial(
                hf,
                "GPTBigCodeConfig",
                "GPTBigCodeModel",
                n_embd=16,
                n_head=4,
                n_layer=1,
                vocab_size=32,
                multi_query=multi,
            ),
            qkv(4, 1 if multi else 4),
        )
        for name, multi in (("", False), ("-multi-query", True))
    ),
    _llama_like("phi3", "Phi3"),
    # transformers, decoders with separate weights
    Case(
        "gpt_neo",
        _covers("gpt_neo", "GPTNeoSelfAttention"),
        partial(
            hf,
            "GPTNeoConfig",
            "GPTNeoModel",
            hidden_size=16,
            num_heads=4,
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            window_size=4,
            vocab_size=32,
            max_position_embeddings=16,
        ),
        qkv(4),
    ),
    Case(
        "gptj",
        _covers("gptj", "GPTJAttention"),
        partial(
            hf, "GPTJConfig", "GPTJModel", n_embd=16, n_head=4, n_layer=1, rotary_dim=2, vocab_size=32, n_positions=16
        ),
        qkv(4),
    ),
    Case(
        "opt",
        _covers("opt", "OPTAttention"),
        partial(
            hf,
            "OPTConfig",
            "OPTModel",
            hidden_size=16,
            num_attention_heads=4,
            num_hidden_layers=2,
            ffn_dim=24,
            vocab_size=32,
            max_position_embeddings=16,
            word_embed_proj_dim=16,
            pad_token_id=0,
        ),
        qkv(4),
    ),
    _llama_like("llama", "Llama"),
    Case(
        "llama4",
        _covers("llama4", "Llama4TextAttention"),
        partial(
            hf,
            "Llama4TextConfig",
            "Llama4TextModel",
            **LLAMA,
            head_dim=4,
            intermediate_size_mlp=24,
            num_local_experts=2,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 0],
        ),
        qkv(4, 2),
    ),
    _llama_like("mistral", "Mistral"),
    _llama_like("mixtral", "Mixtral", num_local_experts=2),
    _llama_like("qwen2", "Qwen2"),
    _llama_like("qwen3", "Qwen3", head_dim=8),
    _llama_like("qwen3_moe", "Qwen3Moe", head_dim=4, **MOE),
    Case(
        "qwen3_next",
        _covers("qwen3_next", "Qwen3NextAttention"),
        partial(
            hf,
            "Qwen3NextConfig",
            "Qwen3NextModel",
            **(LLAMA | MOE | {"head_dim": 8}),
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=4,
            linear_value_head_dim=4,
            shared_expert_intermediate_size=8,
        ),
        qkv(4, 2),
    ),
    _llama_like("gemma", "Gemma", head_dim=8, kv=1),
    _llama_like("gemma2", "Gemma2", head_dim=8),
    Case(
        "gemma3",
        _covers("gemma3", "Gemma3Attention"),
        partial(hf, "Gemma3TextConfig", "Gemma3TextModel", **(LLAMA | {"head_dim": 8})),
        qkv(4, 2),
    ),
    _llama_like("phi", "Phi", partial_rotary_factor=0.5),
    _llama_like("phi", "Phi", name="phi-qk-norm", qk_layernorm=True),
    _llama_like("cohere", "Cohere"),
    _llama_like("cohere", "Cohere", name="cohere-qk-norm", use_qk_norm=True),
    _llama_like("olmo2", "Olmo2"),
    _llama_like("gpt_oss", "GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1),
    _llama_like("starcoder2", "Starcoder2"),
    _llama_like("glm4", "Glm4", head_dim=4),
    _text("apertus", "Apertus"),
    _text("arcee", "Arcee"),
    _text("aria", "AriaText", moe_num_experts=2, moe_topk=1),
    _text("bamba", "Bamba", attn_layer_indices=[1], **MAMBA),
    _text("cohere2", "Cohere2", layer_types=["sliding_attention", "full_attention"]),
    _text("cwm", "Cwm"),
    _text("dots1", "Dots1", n_shared_experts=1, first_k_dense_replace=1, **EXPERTS),
    _text("emu3", "Emu3Text", "Emu3Attention"),
    _text("ernie4_5", "Ernie4_5"),
    _text("ernie4_5_moe", "Ernie4_5_Moe", **EXPERTS),
    _text("exaone4", "Exaone4", sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    _text("falcon_h1", "FalconH1", key_multiplier=0.5, mamba_d_ssm=32, **MAMBA),
    _text("flex_olmo", "FlexOlmo", **EXPERTS),
    _text(
        "gemma3n",
        "Gemma3nText",
        layer_types=["full_attention", "full_attention"],
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=32,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0, 0.0],
    ),
    _text(
        "gemma4",
        "Gemma4Text",
        layer_types=["sliding_attention", "full_attention"],
        global_head_dim=8,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=32,
    ),
    _text("glm", "Glm"),
    _text("glm4_moe", "Glm4Moe", use_qk_norm=True, **(EXPERTS | HALF_ROPE)),
    _text("granite", "Granite", attention_multiplier=0.3),
    _text("granitemoe", "GraniteMoe", **EXPERTS),
    _text(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        layer_types=["attention", "attention"],
        position_embedding_type="rope",
        shared_intermediate_size=8,
        **(EXPERTS | MAMBA),
    ),
    _text("granitemoeshared", "GraniteMoeShared", shared_intermediate_size=8, **EXPERTS),
    _text("helium", "Helium"),
    _text("hunyuan_v1_dense", "HunYuanDenseV1"),
    _text("hunyuan_v1_moe", "HunYuanMoEV1", moe_topk=2, **EXPERTS),
    _text("hyperclovax", "HyperCLOVAX"),
    _text(
        "jamba", "Jamba", attn_layer_offset=0, attn_layer_period=2, mamba_d_state=4, use_mamba_kernels=False, **EXPERTS
    ),
    _text("lfm2", "Lfm2", layer_types=["conv", "full_attention"]),
    _text("minimax", "MiniMax", layer_types=["full_attention", "full_attention"], **EXPERTS),
    _text("minimax_m2", "MiniMaxM2", **EXPERTS),
    _text("ministral", "Ministral"),
    _text("ministral3", "Ministral3"),
    _text("nanochat", "NanoChat"),
    _text("nemotron", "Nemotron", **HALF_ROPE),
    _text(
        "nemotron_h",
        "NemotronH",
        layers_block_type=["mamba", "attention"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=4,
        n_groups=1,
        chunk_size=8,
    ),
    _text("olmo", "Olmo"),
    _text("olmo3", "Olmo3"),
    _text("olmoe", "Olmoe", **EXPERTS),
    _text("olmoe", "Olmoe", name="olmoe-clipped", clip_qkv=8.0, **EXPERTS),
    _text("phimoe", "Phimoe", **EXPERTS),
    _text("qwen2_moe", "Qwen2Moe", **EXPERTS),
    _text("qwen2_vl", "Qwen2VLText", "Qwen2VLAttention", **MROPE),
    _text("qwen2_5_vl", "Qwen2_5_VLText", "Qwen2_5_VLAttention", **MROPE),
    _text("qwen3_vl", "Qwen3VLText", **MROPE),
    _text("qwen3_vl_moe", "Qwen3VLMoeText", **(EXPERTS | MROPE)),
    _text("seed_oss", "SeedOss"),
    _text("smollm3", "SmolLM3", no_rope_layers=[1, 0]),
    _text("solar_open", "SolarOpen", **EXPERTS),
    _text("stablelm", "StableLm", rope_parameters=ROPE | {"partial_rotary_factor": 0.5}),
    _text("stablelm", "StableLm", name="stablelm-qk-norm", qk_layernorm=True),
    _text("vaultgemma", "VaultGemma"),
    Case("deepseek_v2", _covers("deepseek_v2", "DeepseekV2Attention"), partial(deepseek, "V2", q_lora_rank=None), MLA),
    Case(
        "deepseek_v3",
        _covers("deepseek_v3", "DeepseekV3Attention"),
        partial(deepseek, "V3", q_lora_rank=10),
        MLA | {"q.latent": 1},
    ),
)
