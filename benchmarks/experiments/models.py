"""The models: timm's and transformers' own classes, made small."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .generated import LIST_VOCABULARY, PAD

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Model:
    """One model: how it is built, and how it turns inputs into logits.

    Attributes
    ----------
    title : in the tables.
    make : (**options) to a module, by its own initialization from torch's global random state.
    logits : (model, inputs, wanted) to logits (number of wanted targets, classes); ``wanted`` has the targets' shape.
    """

    title: str
    make: Callable[..., nn.Module]
    logits: Callable[[Any, Tensor, Tensor], Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int) -> nn.Module:
        """A fresh model; torch's global random state is left as it was."""
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return self.make(**self.options)


def _vit(**options: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(in_chans=1, num_classes=10, **options)


def _swin(**options: Any) -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(in_chans=1, num_classes=10, drop_path_rate=0.0, **options)


def _xcit(**options: Any) -> nn.Module:
    from timm.models.xcit import Xcit

    return Xcit(in_chans=1, num_classes=10, **options)


def _gpt(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **quiet, **options))


def _nystromformer(**options: Any) -> nn.Module:
    from transformers import NystromformerConfig, NystromformerForSequenceClassification

    config = NystromformerConfig(vocab_size=LIST_VOCABULARY, num_labels=10, pad_token_id=PAD, **NO_DROPOUT, **options)
    return NystromformerForSequenceClassification(config)


def _bert(**options: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**NO_DROPOUT, **options))


def _images(model: Any, images: Tensor, wanted: Tensor) -> Tensor:
    return model(images)[wanted]


def _tokens(model: Any, ids: Tensor, wanted: Tensor) -> Tensor:
    return model(input_ids=ids).logits[wanted]


def _masked(model: Any, ids: Tensor, wanted: Tensor) -> Tensor:
    # The vocabulary is large: the head runs on the masked words alone.
    return model.cls(model.bert(input_ids=ids).last_hidden_state[wanted])


MODELS: dict[str, Model] = {
    "vit-8": Model(
        "ViT, width 64, 3 layers, 4 heads",
        _vit,
        _images,
        {"img_size": 8, "patch_size": 2, "embed_dim": 64, "depth": 3, "num_heads": 4},
    ),
    "vit-smoke": Model(
        "ViT, width 16, 1 layer, 2 heads",
        _vit,
        _images,
        {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2},
    ),
    "vit-28": Model(
        "ViT, width 64, 4 layers, 4 heads",
        _vit,
        _images,
        {"img_size": 28, "patch_size": 7, "embed_dim": 64, "depth": 4, "num_heads": 4},
    ),
    "swin": Model(
        "Swin, widths 32 and 64, 2+2 layers",
        _swin,
        _images,
        {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)},
    ),
    "xcit": Model(
        "XCiT, width 64, 3+1 layers, 4 heads",
        _xcit,
        _images,
        {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4, "cls_attn_layers": 1},
    ),
    "gpt": Model(
        "GPT-2, width 64, 3 layers, 4 heads",
        _gpt,
        _tokens,
        {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4},
    ),
    "gpt-retrieval": Model(
        "GPT-2, width 64, 2 layers, 2 heads",
        _gpt,
        _tokens,
        {"vocab_size": 24, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2},
    ),
    "nystromformer": Model(
        "Nyströmformer, width 64, 2 layers, 2 heads, 16 landmarks",
        _nystromformer,
        # No mask: transformers 5.24 applies one of the wrong shape here. Padding is a token like others.
        _tokens,
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "max_position_embeddings": 64,
            "segment_means_seq_len": 64,
            "num_landmarks": 16,
            "conv_kernel_size": 33,
        },
    ),
    "bert-half": Model(
        "BERT, width 192, 3 layers, 6 heads (half of MiniLM-L6)",
        _bert,
        _masked,
        {
            "vocab_size": 30522,
            "hidden_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "intermediate_size": 768,
            "max_position_embeddings": 512,
        },
    ),
}
