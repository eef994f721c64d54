"""Models built without values: what was called on them happens when they get memory, and never silently not."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import conditioned_kernels as ck
from conditioned_kernels.initialize.materialize import blocks

transformers = pytest.importorskip("transformers")

IDS = torch.arange(6)[None]
CONFIGS = {
    "llama": {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
    },
    "gpt2": {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 16},
    "gpt_neox": {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 32},
    "bert": {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 32},
    "qwen3": {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 32,
    },
}
"""Rotary tables, Conv1D with a rule of its parent, partial rotary tables, position buffers, QK norms."""


def build(name: str, device: str = "cpu") -> nn.Module:
    config = transformers.AutoConfig.for_model(name, **CONFIGS[name], vocab_size=64, pad_token_id=0)
    config.num_hidden_layers = 2
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModel.from_config(config)


def attention(report: ck.InitReport) -> set[str]:
    return {entry.parameter for entry in report.touched}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_deferred_init_runs_when_the_model_gets_values(name: str) -> None:
    """C01, A26: the attention weights are those of the ordinary route, and the rest has its library's distribution."""
    usual = build(name).eval()
    wanted = ck.conditioned_(usual, seed=3)
    model = build(name, "meta").eval()
    deferred = ck.conditioned_(model, seed=3)
    assert not deferred.touched and len(deferred.deferred) == len(wanted.touched)
    assert "deferred" in str(deferred)
    assert all(weight.is_meta for weight in model.parameters())
    with pytest.raises(ValueError, match="deferred"):
        ck.verify(model, deferred)
    names = [key for key, _ in model.named_parameters()]
    before = torch.get_rng_state()
    report = ck.materialize_(model, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert [key for key, _ in model.named_parameters()] == names
    assert attention(report) == attention(wanted)
    assert ck.verify(model, report)
    theirs = usual.state_dict() | dict(usual.named_buffers())
    touched = set()
    for key, value in (model.state_dict() | dict(model.named_buffers())).items():
        if key in attention(report) and (name != "gpt2" or "c_attn" in key):
            assert torch.equal(value, theirs[key]), key
            touched.add(key)
        elif not value.dtype.is_floating_point or float(theirs[key].std()) == 0 or "inv_freq" in key:
            assert torch.equal(value, theirs[key]), key  # norms, biases, tables: no randomness in them
        else:
            assert 0.7 < float(value.std() / theirs[key].std()) < 1.4, key
    assert touched == attention(wanted)
    # With the random rest copied, the two are one model: tables and buffers included.
    model.load_state_dict(usual.state_dict())
    torch.testing.assert_close(model(IDS).last_hidden_state, usual(IDS).last_hidden_state, rtol=0, atol=0)


def test_the_values_do_not_depend_on_the_route() -> None:
    """The seed decides: twice the same, another seed another, and the global random state plays no part."""
    values = []
    for seed, state in ((0, 1), (0, 2), (1, 1)):
        model = build("llama", "meta")
        torch.manual_seed(state)
        ck.materialize_(model, "cpu", seed=seed)
        values.append(torch.cat([weight.flatten() for weight in model.parameters()]))
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_layers_are_drawn_apart() -> None:
    model = build("llama", "meta")
    ck.materialize_(model, "cpu")
    first, second = (layer.mlp.up_proj.weight for layer in model.layers)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("wrap", ["device", "accelerate", "functions"])
def test_ways_to_build_without_values(wrap: str) -> None:
    if wrap == "accelerate":
        accelerate = pytest.importorskip("accelerate")
        with accelerate.init_empty_weights():
            model = build("llama", "cpu")
    elif wrap == "device":
        model = build("llama", "meta")
    else:
        model = build("llama").to("meta")
    ck.conditioned_(model)
    with torch.device("meta"):  # C01: an ambient device must not leak in
        report = ck.materialize_(model, "cpu")
    assert ck.verify(model, report)
    usual = build("llama")
    model.load_state_dict(usual.state_dict())
    assert torch.equal(model(IDS).last_hidden_state, usual(IDS).last_hidden_state)


def test_torch_modules_by_their_own_rule() -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    ck.conditioned_(model, value="keep")
    report = ck.materialize_(model, "cpu")
    assert ck.verify(model, report)
    layer = model.layers[1].self_attn
    assert float(layer.in_proj_bias.abs().max()) == float(layer.out_proj.bias.abs().max()) == 0
    value = layer.in_proj_weight[32:]  # left as torch's rule made it
    assert 0 < float(value.abs().max()) <= (6 / (48 + 16)) ** 0.5
    assert model(torch.randn(1, 3, 16)).isfinite().all()


def test_timm_models_by_their_own_rule() -> None:
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=24, num_heads=3, num_classes=4)
    ck.conditioned_(model)
    report = ck.materialize_(model, "cpu")
    assert ck.verify(model, report)
    assert float(model.pos_embed.std()) == pytest.approx(0.02, rel=0.1)
    assert model(torch.randn(1, 3, 224, 224)).isfinite().all()


def test_tied_weights_stay_tied() -> None:
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model("gpt2", **CONFIGS["gpt2"], vocab_size=64)
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    ck.conditioned_(model)
    ck.materialize_(model, "cpu")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not model.lm_head.weight.is_meta


def test_the_forward_refuses_while_an_init_is_due() -> None:
    """C01: to_empty gives memory without values, and the noted init would be lost silently."""
    model = build("llama", "meta")
    ck.conditioned_(model)
    model(IDS.to("meta"))  # shapes only
    model = copy.deepcopy(model)
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"materialize_\(model, device\)"):
        model(IDS)
    model.init_weights()
    untouched = model.layers[0].mlp.up_proj.weight.clone()
    report = ck.materialize_(model, "cpu")
    assert ck.verify(model, report)
    assert torch.equal(model.layers[0].mlp.up_proj.weight, untouched)
    model(IDS)


def test_calling_it_again_with_values_settles_it() -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 4)).to("meta")
    ck.conditioned_(model)
    model.to_empty(device="cpu")
    assert ck.verify(model, ck.conditioned_(model))
    assert not ck.materialize_(model, "cpu").touched


def test_any_scheme_and_options() -> None:
    usual = build("llama")
    ck.random_(usual, kind="xavier", seed=4, where=lambda name, _: ".1." in name)
    model = build("llama", "meta")
    ck.random_(model, kind="xavier", seed=4, where=lambda name, _: ".1." in name)
    report = ck.materialize_(model, "cpu")
    assert [name for name, _ in report.skipped] == ["layers.0.self_attn"]
    assert torch.equal(model.layers[1].self_attn.k_proj.weight, usual.layers[1].self_attn.k_proj.weight)
    assert not torch.equal(model.layers[0].self_attn.k_proj.weight, usual.layers[0].self_attn.k_proj.weight)
    model = build("llama", "meta")
    ck.conditioned_(model, gain="preserve")
    report = ck.materialize_(model, "cpu")
    std = usual.config.initializer_range
    assert all(entry.gain == pytest.approx(std * 48**0.5, rel=0.2) for entry in report.touched)
    assert ck.verify(model, report)


class NoRule(nn.Module):
    """Has a tensor that nothing initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4)
        self.scale = nn.Parameter(torch.ones(3))


def test_a_module_without_a_rule_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(NoRule())
    ck.conditioned_(model)
    with pytest.raises(RuntimeError, match=r"0 \(NoRule\).*scale.*reset_parameters.*init="):
        ck.materialize_(model, "cpu")

    def init(module: nn.Module) -> None:
        if isinstance(module, NoRule):
            module.scale.fill_(2)
        elif hasattr(module, "_reset_parameters"):
            module._reset_parameters()
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    with torch.device("meta"):
        model = nn.Sequential(NoRule())
    ck.conditioned_(model)
    report = ck.materialize_(model, "cpu", init=init)
    assert ck.verify(model, report) and model[0].scale.tolist() == [2, 2, 2]


def test_a_rule_that_forgets_a_tensor_is_named() -> None:
    class Forgetful(nn.Linear):
        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight.zero_()

    with torch.device("meta"):
        model = nn.ModuleList([nn.MultiheadAttention(16, 4), Forgetful(4, 4)])
    with pytest.raises(RuntimeError, match=r"1 \(Forgetful\).*'bias'"):
        ck.materialize_(model, "cpu")


def test_arguments() -> None:
    with pytest.raises(TypeError, match="model must be"):
        ck.materialize_(3, "cpu")
    with pytest.raises(ValueError, match="device must be one with memory"):
        ck.materialize_(nn.Linear(2, 2), "meta")


def test_blocks_cover_every_module_once() -> None:
    for name in CONFIGS:
        model = build(name, "meta")
        members = [module for block in blocks(model) for _, module in block.modules]
        assert len(members) == len(set(members)) and set(members) == set(model.modules())
        assert any(block.name.endswith((".0", ".1")) for block in blocks(model))


def test_memory_stays_near_the_models() -> None:
    """One block beside the model: a whole second copy would show."""
    script = """
        import torch, transformers
        from conditioned_kernels.bench.machine import resident
        import conditioned_kernels as ck
        config = transformers.LlamaConfig(hidden_size=1024, intermediate_size=1024, num_hidden_layers=16,
            num_attention_heads=16, num_key_value_heads=16, vocab_size=64)
        with torch.device("meta"):
            model = transformers.LlamaModel(config)
        ck.conditioned_(model)
        torch.set_num_threads(1)
        before = resident("VmHWM")
        report = ck.materialize_(model, "cpu")
        size = sum(weight.numel() * 4 for weight in model.parameters())
        assert ck.verify(model, report)
        print((resident("VmHWM") - before) / size)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert 0.9 < float(done.stdout) < 1.5, done.stdout
