"""The life of a transformers model around an initialization: init_weights, save, load, patched initializers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import conditioned_kernels as ck

transformers = pytest.importorskip("transformers")


def llama(cls: type | None = None) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=24,
        vocab_size=32,
    )
    torch.manual_seed(0)
    return (cls or transformers.LlamaModel)(config)


class OwnInit(transformers.LlamaModel):
    """A subclass whose _init_weights writes past every flag."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)


def test_d01_init_weights_keeps_ours() -> None:
    """D01, step 1: init_weights() after ours changes nothing."""
    model = llama()
    report = ck.conditioned_(model)
    model.init_weights()
    assert ck.verify(model, report).ok


def test_d01_applying_init_weights_directly() -> None:
    """D01, step 2: model.apply(model._init_weights) goes past the modules' flags; the parameters' flags hold, or
    verify tells."""
    model = llama()
    report = ck.conditioned_(model)
    before = model.layers[0].self_attn.q_proj.weight.detach().clone()
    model.apply(model._init_weights)
    kept = torch.equal(model.layers[0].self_attn.q_proj.weight, before)
    assert bool(ck.verify(model, report)) == kept


def test_d01_cleared_module_flags() -> None:
    """D01, step 3: with the flags of all modules cleared, init_weights() still spares our parameters."""
    model = llama()
    report = ck.conditioned_(model)
    for module in model.modules():
        if hasattr(module, "_is_hf_initialized"):
            del module._is_hf_initialized
    mlp = model.layers[0].mlp.up_proj.weight
    before = mlp.detach().clone()
    model.init_weights()
    assert not torch.equal(mlp, before)
    assert ck.verify(model, report).ok


def test_d01_touched_parameters_carry_the_flag() -> None:
    """D01, step 4: ours do, nothing else does, and only in a model of transformers."""
    model = llama()
    marked_before = {name for name, each in model.named_parameters() if getattr(each, "_is_hf_initialized", False)}
    report = ck.conditioned_(model)
    marked = {name for name, each in model.named_parameters() if getattr(each, "_is_hf_initialized", False)}
    assert marked - marked_before == {entry.parameter for entry in report.touched}
    plain = nn.MultiheadAttention(16, 4)
    ck.conditioned_(plain)
    assert not hasattr(plain.in_proj_weight, "_is_hf_initialized")


def test_d01_save_and_load_keep_ours(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """D01, step 5: a round trip through save_pretrained."""
    model = llama()
    report = ck.conditioned_(model)
    model.save_pretrained(tmp_path)
    again = transformers.LlamaModel.from_pretrained(tmp_path)
    assert ck.verify(again, report).ok
    assert torch.equal(again.layers[1].self_attn.k_proj.weight, model.layers[1].self_attn.k_proj.weight)


def test_d01_a_custom_init_that_overwrites_is_told() -> None:
    """D01: ``.data.normal_()`` in a subclass heeds no flag; verify names the parameters."""
    model = llama(OwnInit)
    report = ck.conditioned_(model)
    assert ck.verify(model, report).ok
    model.apply(model._init_weights)
    outcome = ck.verify(model, report)
    assert not outcome
    assert any("layers.0.self_attn.q_proj.weight" in failure for failure in outcome.failures)
    assert len(outcome.failures) == len(report.touched)


def test_d02_patched_initializers_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """D02: libraries turn torch.nn.init into no-ops and forget to turn it back."""
    expected = llama()
    ck.conditioned_(expected)
    model = llama()
    for name in ("orthogonal_", "eye_", "normal_", "trunc_normal_", "uniform_", "zeros_", "kaiming_uniform_"):
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)
    report = ck.conditioned_(model)
    assert ck.verify(model, report).ok
    for name, tensor in model.state_dict().items():
        if "self_attn" in name and "o_proj" not in name:
            assert torch.equal(tensor, expected.state_dict()[name])


def test_d05_a_loaded_model_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """D05: weights from a checkpoint are kept unless overwrite=True; a model built from a config is not one."""
    llama().save_pretrained(tmp_path)
    loaded = transformers.LlamaModel.from_pretrained(tmp_path)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.weight was loaded.*overwrite=True"):
        ck.conditioned_(loaded)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())
    report = ck.conditioned_(loaded, overwrite=True)
    assert ck.verify(loaded, report).ok
    # What this package wrote itself may be written again.
    assert ck.conditioned_(loaded, seed=1).touched
