"""The mechanics table: each row gives exactly what its class feeds to its output projection."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conditioned_kernels as ck
from conditioned_kernels.heads import FAMILIES, MECHANICS, attention_heads
from conditioned_kernels.heads.mechanics import REFUSED
from conditioned_kernels.jacobian import AttentionHeads, NoJacobian, attention_output, jvp
from conditioned_kernels.jacobian.heads import mapped

from .models import BERT, CASES, LLAMA, Case, deepseek, falcon, hf
from .test_jacobian import jacobian

COVERED = {name for row in MECHANICS for name in row.classes}
OUTPUTS = ("o_proj", "Wo", "out_proj", "c_proj", "dense", "proj", "o", "out_lin", "projection_layer")
"""Output projections inside attention classes; the BERT kind has none and returns the heads."""

TOLERANCE = 3e-5
"""Relative, in float32 models; a mechanic that is ignored moves the output by far more."""


def randomized(model: nn.Module) -> nn.Module:
    """Every parameter Gaussian and large enough that probabilities, biases and gains matter."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    for module in model.modules():
        if getattr(module, "attn_logit_softcapping", None):
            module.attn_logit_softcapping = 1.0  # The usual 50 would hardly bend these logits.
        if type(module).__name__ in ("Attention", "EvaAttention"):
            module.gate, module.norm = None, nn.Identity()  # They come after the heads.
        if type(module).__name__ == "Qwen3NextAttention":
            with torch.no_grad():  # A gate of 1/2 for all.
                module.q_proj.weight.unflatten(0, (-1, 2, module.head_dim))[:, 1].zero_()
                module.o_proj.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    return model.eval()


class Done(Exception):
    """What comes after the layer does not matter."""


def run(model: nn.Module, args: tuple, kwargs: dict[str, Any], **options: Any) -> dict[str, tuple[Any, Tensor]]:
    """Per layer of a covered class: the problem read from its first call, and the heads the module went on with."""
    found: dict[str, tuple[Any, Tensor]] = {}
    hooks = []
    options = {"samples": None, "tokens": None, **options}
    for layer in ck.find_attention(model).layers:
        calls: list[Any] = []
        outputs: list[Tensor] = []

        def before(module, args, kwargs, layer=layer, calls=calls):
            try:
                calls.append(attention_heads(layer, args, kwargs, **options))
            except NoJacobian as error:
                calls.append(error)

        hooks.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
        module = layer.module
        after = next(
            (getattr(module, name) for name in OUTPUTS if isinstance(getattr(module, name, None), nn.Module)), None
        )
        if isinstance(module, nn.MultiheadAttention):
            # It reads its output projection's weight and never calls it.
            with torch.no_grad():
                nn.init.eye_(module.out_proj.weight)
                module.out_proj.bias.zero_() if module.out_proj.bias is not None else None
            after = None
        if after is not None:
            hooks.append(after.register_forward_pre_hook(lambda m, args, outputs=outputs: outputs.append(args[0])))
        else:
            hooks.append(
                module.register_forward_hook(
                    lambda m, args, out, outputs=outputs: outputs.append(out[0] if isinstance(out, tuple) else out)
                )
            )
        found[layer.name] = (calls, outputs)
    before_rng = torch.get_rng_state()
    with torch.no_grad(), contextlib.suppress(Done):
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    assert torch.equal(torch.get_rng_state(), before_rng) or model.training
    return {name: (calls[0], outputs[0]) for name, (calls, outputs) in found.items() if calls}


def joined(heads: AttentionHeads) -> Tensor:
    """(samples, tokens, heads * value_dim), as the output projection gets it."""
    return attention_output(heads).transpose(1, 2).flatten(2)


def error(heads: AttentionHeads, seen: Tensor, family: str = "") -> float:
    got = joined(heads)
    if family.endswith("Attention2d"):
        seen = seen.flatten(2).mT
    elif family.endswith("AttentionCl"):
        seen = seen.flatten(1, -2)
    elif family.endswith("LocallyGroupedAttn"):
        # Windows of two by two in an image of three by four, whose last row is filled up.
        got = got.unflatten(0, (1, 2, 2)).unflatten(3, (2, 2)).transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :3]
        got = got.flatten(1, 2)
    elif seen.shape[0] != got.shape[0]:
        seen = seen.transpose(0, 1)
    return float((got - seen.double()).norm() / seen.double().norm())


def mutations(heads: AttentionHeads) -> dict[str, AttentionHeads]:
    """The problem with one mechanic ignored, for each that it has."""
    changes: dict[str, dict[str, Any]] = {
        "scale": {"scale": 1.5 * (heads.w_q.shape[-2] ** -0.5 if heads.scale is None else heads.scale)},
        **{name: {name: None} for name in ("mask", "rope", "norm_q", "norm_k", "softcap", "sink", "values")},
        **{name: {name: None} for name in ("b_q", "b_v")},
    }
    if heads.mask is not None and bool((heads.mask == heads.mask.flatten()[0]).all()):
        del changes["mask"]  # It masks nothing.
    if heads.values is not None and torch.equal(heads.values, heads.x if heads.memory is None else heads.memory):
        del changes["values"]  # The same numbers once more.
    return {
        name: replace(heads, **change)
        for name, change in changes.items()
        if name == "scale" or getattr(heads, name) is not None
    }


REFUSED_BY_CONFIGURATION = {
    "torch-mha-bias-kv": "bias_k",
    "deberta_v2-shared": "relative_attention",
    "deberta_v2-positions": "relative_attention",
    "mpt": "clip_qkv",
    "olmoe-clipped": "config.clip_qkv",
    "stablelm-qk-norm": "qk_layernorm",
}
CHECKED = [case for case in CASES if case.covers in COVERED]


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)
def test_it_is_what_the_module_computes(case: Case):
    if case.missing:
        pytest.skip(case.missing)
    torch.manual_seed(0)
    model, args, kwargs = case.build()
    families = {layer.name: layer.family for layer in ck.find_attention(model).layers}
    got = run(randomized(model), args, kwargs)
    checked, seen_somewhere, all_mutations = 0, set(), set()
    for name, (heads, seen) in got.items():
        if isinstance(heads, NoJacobian):
            assert REFUSED_BY_CONFIGURATION.get(case.name, "is not covered") in str(heads)
            continue
        assert error(heads, seen, families[name]) < TOLERANCE, name
        for what, changed in mutations(heads).items():
            all_mutations.add(what)
            if error(changed, seen, families[name]) > 10 * TOLERANCE:
                seen_somewhere.add(what)
        checked += 1
    # Somewhere, since a layer whose keys or logits are far apart is deaf to the scale.
    assert seen_somewhere == all_mutations
    covered = [layer for layer in ck.find_attention(model).layers if layer.family in COVERED]
    assert checked == (0 if case.name in REFUSED_BY_CONFIGURATION else len(covered))


# --- variants that the tiny models above do not have ---------------------------------------------------------------

LONG = torch.arange(3, 27).view(2, 12) % 32
LEFT = torch.ones(2, 12, dtype=torch.long)
LEFT[1, :5] = 0
RIGHT = torch.ones(2, 12, dtype=torch.long)
RIGHT[1, 8:] = 0

Options = dict[str, Any]


def text(config: str, model: str, *, mask: Tensor | None = None, **options: Any):
    given = {"input_ids": LONG} if mask is None else {"input_ids": LONG, "attention_mask": mask}
    return hf(config, model, inputs=lambda: given, **options)


def given(build: Callable[[], Any], mask: Tensor):
    model, _, _ = build()
    return model, (), {"input_ids": LONG, "attention_mask": mask, "use_cache": False}


WINDOWED = LLAMA | {"sliding_window": 3, "head_dim": 4}
VARIANTS = {
    "mistral, window": partial(text, "MistralConfig", "MistralModel", **WINDOWED),
    "mistral, window, left padding": partial(text, "MistralConfig", "MistralModel", mask=LEFT, **WINDOWED),
    "mistral, window, eager": partial(text, "MistralConfig", "MistralModel", attn_implementation="eager", **WINDOWED),
    "qwen2, window": partial(
        text, "Qwen2Config", "Qwen2Model", use_sliding_window=True, max_window_layers=0, **WINDOWED
    ),
    "gemma2, scale": partial(text, "Gemma2Config", "Gemma2Model", query_pre_attn_scalar=9, **WINDOWED),
    "gemma3, window": partial(text, "Gemma3TextConfig", "Gemma3TextModel", query_pre_attn_scalar=9, **WINDOWED),
    "phi3, window": partial(text, "Phi3Config", "Phi3Model", **LLAMA, sliding_window=3),
    "llama, left padding": partial(text, "LlamaConfig", "LlamaModel", mask=LEFT, **LLAMA),
    "llama, left padding, eager": partial(
        text, "LlamaConfig", "LlamaModel", mask=LEFT, attn_implementation="eager", **LLAMA
    ),
    "llama, biases": partial(text, "LlamaConfig", "LlamaModel", attention_bias=True, **LLAMA),
    "llama, scaled rope": partial(
        text,
        "LlamaConfig",
        "LlamaModel",
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0},
        **LLAMA,
    ),
    "bert, right padding": partial(text, "BertConfig", "BertModel", mask=RIGHT, **BERT),
    "bert, right padding, eager": partial(
        text, "BertConfig", "BertModel", mask=RIGHT, attn_implementation="eager", **BERT
    ),
    "bert, decoder": partial(text, "BertConfig", "BertModel", is_decoder=True, **BERT),
    "distilbert, padding": partial(
        text, "DistilBertConfig", "DistilBertModel", mask=RIGHT, dim=16, n_heads=4, n_layers=2, hidden_dim=24,
        vocab_size=32, max_position_embeddings=40,
    ),
    "gpt2, scale by layer": partial(
        text, "GPT2Config", "GPT2Model", mask=RIGHT, n_embd=16, n_head=4, n_layer=2, vocab_size=32, n_positions=40,
        scale_attn_by_inverse_layer_idx=True, bos_token_id=1, eos_token_id=2,
    ),
    "gpt2, no scale": partial(
        text, "GPT2Config", "GPT2Model", n_embd=16, n_head=4, n_layer=1, vocab_size=32, n_positions=40,
        scale_attn_weights=False, bos_token_id=1, eos_token_id=2,
    ),
    "neox, quarter rotary": partial(
        text, "GPTNeoXConfig", "GPTNeoXModel", **(BERT | {"hidden_size": 32}), bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
    ),
    "modernbert, window": partial(
        text, "ModernBertConfig", "ModernBertModel", mask=RIGHT, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2, local_attention=4, global_attn_every_n_layers=2, **BERT,
    ),
    "mpt, left padding": partial(
        text, "MptConfig", "MptModel", mask=LEFT, d_model=16, n_heads=4, n_layers=2, vocab_size=32, max_seq_len=40,
    ),
    "bloom, left padding": partial(
        text, "BloomConfig", "BloomModel", mask=LEFT, hidden_size=16, n_head=4, n_layer=2, vocab_size=32,
        bos_token_id=1, eos_token_id=2,
    ),
    "falcon, alibi, left padding": partial(given, partial(falcon, multi_query=False, alibi=True), LEFT),
    "falcon, alibi, eager": partial(
        given, partial(falcon, multi_query=False, alibi=True, attn_implementation="eager"), LEFT
    ),
    "gpt_neo, padding": partial(
        text, "GPTNeoConfig", "GPTNeoModel", mask=RIGHT, hidden_size=16, num_heads=4, num_layers=2, window_size=4,
        attention_types=[[["global", "local"], 1]], vocab_size=32, max_position_embeddings=16, bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt_oss, sliding, left padding": partial(
        text, "GptOssConfig", "GptOssModel", mask=LEFT, sliding_window=3, head_dim=8, num_local_experts=2,
        num_experts_per_tok=1, **LLAMA,
    ),
    "olmo2, left padding": partial(text, "Olmo2Config", "Olmo2Model", mask=LEFT, **LLAMA),
    "llama4, some layers without rotation": partial(
        text, "Llama4TextConfig", "Llama4TextModel", mask=LEFT, head_dim=4, intermediate_size_mlp=24,
        num_local_experts=2, no_rope_layers=[1, 0], attn_temperature_tuning=True, **LLAMA,
    ),
    "deepseek_v2, query latent": partial(given, partial(deepseek, "V2", q_lora_rank=10), RIGHT),
    "deepseek_v3, halves, biases": partial(
        given, partial(deepseek, "V3", q_lora_rank=None, rope_interleave=False, attention_bias=True), LEFT
    ),
    "phi, qk norm": partial(text, "PhiConfig", "PhiModel", qk_layernorm=True, **LLAMA),
    "cohere, qk norm": partial(text, "CohereConfig", "CohereModel", use_qk_norm=True, **LLAMA),
    "opt, padding": partial(
        text, "OPTConfig", "OPTModel", mask=LEFT, hidden_size=16, num_attention_heads=4, num_hidden_layers=1,
        ffn_dim=24, vocab_size=32, max_position_embeddings=40, word_embed_proj_dim=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_call_and_the_configuration(name: str):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, args, kwargs = VARIANTS[name]()
    kept = kwargs.get("attention_mask", torch.ones(2, 12)).bool()
    for layer, (heads, seen) in run(randomized(model), args, kwargs).items():
        # What a padded query sees is the library's choice, and no one's output.
        got, seen = joined(heads)[kept], seen.double()[kept]
        assert float((got - seen).norm() / seen.norm()) < TOLERANCE, layer
        for what, changed in mutations(heads).items():
            moved = joined(changed)[kept]
            assert float((moved - seen).norm() / seen.norm()) > 10 * TOLERANCE, f"{layer}: ignoring {what} goes unseen"
        if "window" in name:
            causal = replace(heads, mask=torch.ones(12, 12, dtype=torch.bool).tril())
            assert float((joined(causal)[kept] - seen).norm() / seen.norm()) > 10 * TOLERANCE or (
                name[:6] in ("gemma3", "modern")  # Their layers alternate, and ModernBERT's see both sides.
            )


def test_masks_of_a_flash_kernel_mean_the_same():
    """Two dimensions or none, with the window in the module: read as the masks that sdpa gets for the same batch."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, _, kwargs = text("MistralConfig", "MistralModel", mask=LEFT, **WINDOWED)
    layer = ck.find_attention(randomized(model)).layers[0]
    calls: list[Any] = []
    hook = layer.module.register_forward_pre_hook(lambda m, args, kw: calls.append((args, kw)), with_kwargs=True)
    with torch.no_grad():
        model(**kwargs, use_cache=False)
    hook.remove()
    args, call = calls[0]
    expected = attention_output(attention_heads(layer, args, call, samples=None, tokens=None))
    layer.module.config._attn_implementation = "flash_attention_2"
    flash = attention_heads(layer, args, {**call, "attention_mask": LEFT}, samples=None, tokens=None)
    for sample, kept in enumerate(LEFT.bool()):
        got, wanted = attention_output(flash)[sample, :, kept], expected[sample, :, kept]
        torch.testing.assert_close(got, wanted)
    for packed in ({"position_ids": torch.arange(12)[None] % 7}, {"cu_seq_lens_q": torch.tensor([0, 7, 12])}):
        with pytest.raises(NoJacobian, match="packs several sequences into one row"):
            attention_heads(layer, args, {**call, "attention_mask": None, **packed})
    whole = attention_heads(layer, args, {**call, "attention_mask": None}, samples=1, tokens=None)
    torch.testing.assert_close(attention_output(whole), expected[:1])


def test_the_masks_of_torchs_own_class():
    torch.manual_seed(0)
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 5, 16)
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    numbers = torch.randn(6, 6)
    calls: list[tuple[bool, tuple, dict[str, Any]]] = [
        (True, (x, x, x), {}),
        (True, (x, x, x), {"attn_mask": causal}),
        (True, (x, x, x), {"attn_mask": causal, "is_causal": True, "need_weights": False}),
        (
            True,
            (x, x, x),
            {"attn_mask": numbers, "key_padding_mask": torch.zeros(2, 6).masked_fill(padding, -torch.inf)},
        ),
        (True, (x, x, x), {"attn_mask": causal, "key_padding_mask": padding}),
        (True, (x, x, x), {"attn_mask": torch.randn(8, 6, 6)}),
        (True, (x, memory, memory), {}),
        (True, (x, memory, memory + 1), {"key_padding_mask": padding[:, :5]}),
        (False, (x.transpose(0, 1),) * 3, {"key_padding_mask": padding}),
        (True, (x[0], x[0], x[0]), {"attn_mask": causal}),
    ]
    for batch_first, args, kwargs in calls:
        module = randomized(nn.MultiheadAttention(16, 4, batch_first=batch_first))
        for heads, seen in run(module, args, kwargs).values():
            seen = seen[None] if seen.ndim == 2 else seen if batch_first else seen.transpose(0, 1)
            assert error(heads, seen) < TOLERANCE, kwargs
            for what, changed in mutations(heads).items():
                assert error(changed, seen) > 10 * TOLERANCE, (what, kwargs)


def test_the_first_tokens_of_a_causal_model_are_a_problem_of_their_own():
    """A causal prefix sees nothing outside, so the sampled problem must give the module's own first outputs."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    for name in ("llama, biases", "mistral, window", "gpt2, scale by layer", "cohere, qk norm", "gemma2, scale"):
        model, args, kwargs = VARIANTS[name]()
        kwargs.pop("attention_mask", None)
        picked = run(randomized(model), args, kwargs, samples=1, tokens=5, heads=[3, 1])
        for heads, seen in picked.values():
            assert heads.shape == (1, 2) and heads.tokens == 5
            whole = seen[:1, :5].unflatten(-1, (4, -1)).transpose(1, 2)[:, [3, 1]].double()
            torch.testing.assert_close(attention_output(heads), whole, rtol=1e-4, atol=1e-4)
        first = run(model, args, kwargs, samples=1, tokens=5, heads=2)
        assert all(heads.shape == (1, 2) for heads, _ in first.values())


def test_the_window_of_tokens_avoids_padding():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, args, kwargs = text("LlamaConfig", "LlamaModel", mask=LEFT, **LLAMA)
    hidden: list[Tensor] = []
    randomized(model).layers[0].self_attn.register_forward_pre_hook(
        lambda m, a, kw: hidden.append(kw["hidden_states"]), with_kwargs=True
    )
    heads, _ = run(model, args, kwargs, samples=2, tokens=6)["layers.0.self_attn"]
    torch.testing.assert_close(heads.x[:, 0], hidden[0][:, 5:11])
    assert heads.mask is None or bool((heads.mask[..., 0, 0] >= 0).all())


def test_in_cross_attention_the_window_of_keys_avoids_padding():
    torch.manual_seed(0)
    module = randomized(nn.MultiheadAttention(16, 4, batch_first=True))
    layer = ck.find_attention(module).layers[0]
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 9, 16)
    padding = torch.arange(9).expand(2, 9) < torch.tensor([[4], [2]])
    heads = attention_heads(layer, (x, memory, memory), {"key_padding_mask": padding}, samples=2, tokens=3)
    assert torch.equal(heads.memory[:, 0], memory[:, 4:7]) and torch.equal(heads.x[:, 0], x[:, :3])
    assert bool(heads.mask.all()) and bool(ck.jacobian_condition(heads).effective.isfinite().all())
    longer = attention_heads(layer, (x, memory, memory), {"key_padding_mask": padding}, tokens=50)
    assert (longer.tokens, longer.keys) == (6, 9)


@pytest.mark.parametrize("name", ["timm-xcit", "timm-davit-channel-v2", "deepseek_v3", "gpt_oss", "olmo2", "timm-eva"])
def test_a_window_of_tokens_and_some_heads_have_a_jacobian(name: str):
    """Fewer tokens than the call's: the problem on those alone, whose kappa autograd has too."""
    case = next(each for each in CASES if each.name == name)
    if case.missing:
        pytest.skip(case.missing)
    torch.manual_seed(0)
    model, args, kwargs = case.build()
    (heads, _), *_ = (
        found
        for layer, found in run(randomized(model), args, kwargs, samples=1, tokens=3, heads=[1, 0]).items()
        if not isinstance(found[0], NoJacobian)
    )
    assert heads.tokens == 3 and heads.shape == (1, 2)
    estimate = ck.jacobian_condition(heads)
    for place in range(2):
        one = mapped(
            heads.select(torch.tensor([place])),
            lambda part, _: part[0].double() if part.is_floating_point() else part[0],
        )
        values = torch.linalg.svdvals(jacobian(one))
        deficient = estimate.status[0, place] == ck.Status.RANK_DEFICIENT
        kappa = estimate.effective if deficient else estimate.kappa
        values = values[values > 1e-12 * values[0]] if deficient else values
        assert float(kappa[0, place]) == pytest.approx(float(values[0] / values[-1]), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": [-1]}, ValueError, r"heads must be indices of query heads, 0 to 3, at least one, got \[-1\]"),
        ({"heads": [1, 4]}, ValueError, "0 to 3"),
        ({"heads": []}, ValueError, "at least one"),
        ({"heads": 0}, ValueError, "heads must be an integer of at least 1, got 0"),
        ({"heads": True}, ValueError, "heads must be an integer"),
        ({"heads": [1.5]}, TypeError, "a number of heads or a sequence of their indices"),
        ({"samples": 0}, ValueError, "samples must be an integer of at least 1, got 0"),
        ({"samples": -1}, ValueError, "samples must be"),
        ({"tokens": 0}, ValueError, "tokens must be"),
        ({"tokens": 2.5}, ValueError, "tokens must be"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type, message: str):
    x = torch.randn(2, 5, 16)
    layer = ck.find_attention(nn.MultiheadAttention(16, 4, batch_first=True)).layers[0]
    with pytest.raises(error, match=message):
        attention_heads(layer, (x, x, x), {}, **options)
    everything = attention_heads(layer, (x, x, x), {}, samples=9, tokens=99, heads=99)
    assert everything.shape == (2, 4) and everything.tokens == 5
    with pytest.raises(TypeError, match="layer must be an AttentionLayer of find_attention, got str"):
        attention_heads("attn", (x, x, x), {})


def test_sampling_changes_nothing_and_shares_nothing(untouched_rng):
    """F15: the model's own attention implementation, output and random state are as without it."""
    pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, args, kwargs = VARIANTS["llama, biases"]()
    randomized(model).train()
    with torch.no_grad():
        plain = model(*args, **kwargs)[0]
    layer = ck.find_attention(model).layers[1]
    found: list[AttentionHeads] = []

    def look(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        found.append(attention_heads(layer, args, kwargs))
        kwargs["hidden_states"].add_(0.0)

    hook = layer.module.register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        watched = model(*args, **kwargs)[0]
    hook.remove()
    assert torch.equal(plain, watched)
    assert model.config._attn_implementation == "sdpa"
    before = attention_output(found[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(attention_output(found[0]), before)
    assert not any(each.requires_grad for each in found[0].weights)


SINGLE = ("olmo2", "llama4", "deepseek_v2", "deepseek_v3")
"""Whose norms work in float32 even in a double model, so that differences are of longer steps."""

ALIKE = ("timm-xcit", "timm-davit-channel", "timm-swin-v2", "timm-pvt-v2", "swinv2", "detr-cross")
DERIVED = (
    "llama, biases",
    "gpt2, scale by layer",
    "mistral, window",
    "gpt_oss, sliding, left padding",
    "olmo2, left padding",
    "llama4, some layers without rotation",
    "deepseek_v2, query latent",
    "deepseek_v3, halves, biases",
)


@pytest.mark.parametrize("name", DERIVED + ALIKE)
def test_products_are_the_derivative_of_the_model_itself(name: str):
    """F16: no derivative of a fused kernel is asked for; central differences of what the module fed on are it.

    One head's own rows move, as the Jacobian says; norms over all heads then have the others held fixed.
    """
    pytest.importorskip("transformers")
    case = next((each for each in CASES if each.name == name), None)
    if case is not None and case.missing:
        pytest.skip(case.missing)
    torch.manual_seed(0)
    model, args, kwargs = VARIANTS[name]() if case is None else case.build()
    model = randomized(model).double()
    args = tuple(arg.double() for arg in args)
    kwargs = {key: value.double() if key == "pixel_values" else value for key, value in kwargs.items()}
    family = next(
        layer.family for layer in ck.find_attention(model).layers if case is None or layer.family == case.covers
    )
    place = next(i for i, layer in enumerate(ck.find_attention(model).layers) if layer.family == family)
    layer = ck.find_attention(model).layers[place]
    if name.startswith(("gpt_oss", *SINGLE)):
        layer.module.register_forward_hook(done)  # Their experts take no float64.
    head = 1
    heads, _ = run(model, args, kwargs, heads=[head])[layer.name]
    generator = torch.Generator().manual_seed(3)
    parts = next(row.parts for row in MECHANICS if family in row.classes)
    by_label = {projection.label: projection for projection in layer.projections}
    changes, moves = [], {}
    for labels in parts:
        for label in labels:
            rows = by_label[label].view(layer.weight(by_label[label])).flatten(0, -3)
            count = heads_of(layer)
            change = torch.randn(rows.shape[1:], dtype=torch.float64, generator=generator)
            moves[label] = (head * len(rows) // count, change)
        changes.append(torch.cat([moves[label][1] for label in labels]))
    got = jvp(heads, *changes)[:, 0]

    def output(step: float) -> Tensor:
        moved = copy.deepcopy(model)
        there = ck.find_attention(moved).layers[place]
        with torch.no_grad():
            for projection in there.projections:
                if projection.label in moves:
                    row, change = moves[projection.label]
                    rows = projection.view(there.weight(projection).detach())
                    index = torch.arange(rows.shape[:-2].numel()).view(rows.shape[:-2])
                    rows[index == row] += step * change
        _, seen = run(moved, args, kwargs)[there.name]
        return seen.unflatten(-1, (heads_of(layer), -1))[..., head, :]

    single = name.startswith(SINGLE)
    step = 1e-3 if single else 1e-5
    expected = (output(step) - output(-step)) / (2 * step)
    # transformers' rotary angles are float32 even in a double model, but the same on both sides.
    kept = kwargs.get("attention_mask", torch.ones(got.shape[:2])).bool()
    assert float((got - expected)[kept].norm() / got[kept].norm()) < (1e-3 if single else 1e-6)


def done(*args: Any) -> None:
    raise Done


def heads_of(layer: Any) -> int:
    """Query heads."""
    return max(
        projection.view(layer.weight(projection)).shape[:-2].numel()
        for projection in layer.projections
        if projection.role == "q"
    )


# --- refusals ------------------------------------------------------------------------------------------------------


def test_every_class_has_a_row_or_a_reason():
    names = {name for family in FAMILIES for name in family.classes}
    assert COVERED | set(REFUSED) == names and not COVERED & set(REFUSED)
    for case in CASES:
        if case.covers not in REFUSED or case.missing:
            continue
        model, _, _ = case.build()
        layer = next(each for each in ck.find_attention(model).layers if each.family == case.covers)
        with pytest.raises(
            NoJacobian, match=f"{case.covers.rpartition('.')[2]} is not covered: {REFUSED[case.covers]}"
        ):
            attention_heads(layer, (torch.zeros(1, 4, 16),), {})


def test_what_a_covered_class_does_otherwise_is_refused():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, _, _ = VARIANTS["llama, biases"]()
    layer = ck.find_attention(model).layers[0]
    x = torch.randn(1, 4, 16)
    rope = (torch.ones(1, 4, 4), torch.zeros(1, 4, 4))
    cache = transformers.DynamicCache()
    fresh = attention_heads(layer, (x,), {"position_embeddings": rope, "cache": cache})
    assert fresh.shape == (1, 4)
    cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), 0)
    for call, message in (
        ({"position_embeddings": rope, "cache": cache}, "from a cache"),
        ({}, "no position_embeddings"),
        ({"position_embeddings": rope, "attention_mask": "block"}, "its mask is a str"),
        ({"position_embeddings": rope, "attention_mask": torch.ones(1, 4, 4)}, "3 dimensions"),
    ):
        with pytest.raises(NoJacobian, match=f"layers.0.self_attn: class .*LlamaAttention: .*{message}"):
            attention_heads(layer, (x,), call)

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.base_layer(x)

    model.layers[0].self_attn.q_proj = Adapter(model.layers[0].self_attn.q_proj)
    with pytest.raises(NoJacobian, match="behind an adapter"):
        attention_heads(ck.find_attention(model).layers[0], (x,), {"position_embeddings": rope})

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4, 4, 16))

    mine = ck.find_attention(Mine(), layouts={Mine: lambda module: dict(zip("qkv", module.w, strict=True))}).layers[0]
    with pytest.raises(NoJacobian, match="Mine has no row of mechanics"):
        attention_heads(mine, (x,), {})
    zero = nn.MultiheadAttention(16, 4, add_zero_attn=True, batch_first=True)
    with pytest.raises(NoJacobian, match="add_zero_attn"):
        attention_heads(ck.find_attention(zero).layers[0], (x, x, x), {})
