"""Gains calibrated on a batch: they minimize the exact kappa(J), and a failing call changes nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import conditioned_kernels as ck
from conditioned_kernels.heads.mechanics import attention_heads
from conditioned_kernels.initialize.gain_search import best_gains, geometric_mean
from conditioned_kernels.initialize.writing import MARK

from .models import CASES

D, HEADS, TOKENS = 12, 3, 6


class Stack(nn.Module):
    """Attention layers of torch's own class, each with a residual connection and dropout."""

    def __init__(self, layers: int = 2, fail_in: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(D, HEADS, dropout=0.5, batch_first=True) for _ in range(layers)
        )
        self.dropout, self.fail_in = nn.Dropout(0.5), fail_in

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == self.fail_in:
                raise RuntimeError("out of patience")
            x = x + self.dropout(layer(scale * x, scale * x, scale * x)[0])
        return x


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randn(2, TOKENS, D, generator=torch.Generator().manual_seed(1))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def problem_of(model: Stack, index: int, batch: torch.Tensor) -> ck.AttentionHeads:
    """What layer ``index`` solves when the model runs on ``batch`` in evaluation mode."""
    found: list[ck.AttentionHeads] = []
    layer = ck.find_attention(model).layers[index]
    hook = layer.module.register_forward_pre_hook(
        lambda _, args, kwargs: found.append(attention_heads(layer, args, kwargs)), with_kwargs=True
    )
    training = model.training
    with torch.no_grad():
        model.eval()(batch)
    hook.remove()
    model.train(training)
    return found[0]


def test_it_writes_the_gains_that_it_reports_and_kappa_is_theirs(batch):
    model = Stack()
    before, rng = state(model), torch.get_rng_state()
    report = ck.calibrate_gain(model, batch)
    assert torch.equal(torch.get_rng_state(), rng)
    assert model.training and all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert [entry.layer for entry in report.layers] == ["layers.0", "layers.1"]
    for index, entry in enumerate(report.layers):
        assert set(entry.gains) == {"q", "k"}
        old, new = before[f"layers.{index}.in_proj_weight"], model.layers[index].in_proj_weight.detach()
        torch.testing.assert_close(new[:D], old[:D] * entry.gains["q"])
        torch.testing.assert_close(new[D : 2 * D], old[D : 2 * D] * entry.gains["k"])
        assert torch.equal(new[2 * D :], old[2 * D :])
        # Measured on the model as it is now: the later layer was calibrated behind the calibrated earlier one.
        kappa = ck.jacobian_condition(problem_of(model, index, batch), method="exact").kappa
        torch.testing.assert_close(kappa, entry.after, rtol=1e-3, atol=0)
        assert geometric_mean(entry.after) < geometric_mean(entry.before)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"layers.0.in_proj_weight", "layers.1.in_proj_weight"}
    text = str(report)
    assert "layers.1: q" in text and "kappa(J)" in text
    assert report.rows()[0]["kappa_after"] == pytest.approx(geometric_mean(report.layers[0].after))


@pytest.mark.parametrize("seed", [2, 18, 153])
def test_no_point_of_a_fine_grid_is_much_better(batch, seed):
    """Seeds whose objective has a second valley, which a search along one direction at a time ends in."""
    torch.manual_seed(seed)
    problem = problem_of(Stack(), 0, batch)
    _, before, after, evaluations = best_gains(problem, "qk")
    assert evaluations < 140
    best = math.inf
    for q in range(-6, 9):
        for k in range(-6, 9):
            w_q, w_k, w_v = problem.weights
            scaled = problem.with_weights(w_q * 2 ** (q / 2), w_k * 2 ** (k / 2), w_v)
            best = min(best, geometric_mean(ck.jacobian_condition(scaled, method="exact").kappa))
    assert geometric_mean(after) <= 1.05 * best
    assert geometric_mean(after) <= geometric_mean(before)


def test_calibrating_twice_changes_little(batch):
    model = Stack(1)
    first = ck.calibrate_gain(model, batch).layers[0]
    second = ck.calibrate_gain(model, batch).layers[0]
    assert geometric_mean(second.before) == pytest.approx(geometric_mean(first.after), rel=1e-3)
    assert geometric_mean(second.after) <= geometric_mean(second.before)


@pytest.mark.parametrize("roles", ["q", "k", "v", "qkv"])
def test_only_the_roles_asked_for_move(batch, roles):
    model = Stack(1)
    before = model.layers[0].in_proj_weight.detach().clone()
    entry = ck.calibrate_gain(model, batch, roles=roles).layers[0]
    assert set(entry.gains) == set(roles)
    after = model.layers[0].in_proj_weight.detach()
    for slot, role in enumerate("qkv"):
        rows = slice(slot * D, (slot + 1) * D)
        torch.testing.assert_close(after[rows], before[rows] * entry.gains.get(role, 1.0))


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_a_batch_is_what_the_forward_takes(batch, form):
    given = {"tensor": batch, "tuple": (batch, 1.0), "dict": {"x": batch, "scale": 1.0}}[form]
    torch.manual_seed(0)
    first, second = Stack(1), Stack(1)
    second.load_state_dict(first.state_dict())
    expected = ck.calibrate_gain(first, batch).layers[0].gains
    assert ck.calibrate_gain(second, given).layers[0].gains == expected


def test_where_leaves_other_layers_alone(batch):
    """B29."""
    model = Stack()
    before = state(model)
    report = ck.calibrate_gain(model, batch, where=lambda name, _: name.endswith("1"))
    assert [entry.layer for entry in report.layers] == ["layers.1"]
    assert ("layers.0", "left out by where") in report.skipped
    assert torch.equal(model.layers[0].in_proj_weight, before["layers.0.in_proj_weight"])


def test_conditioned_with_calibrated_gain(batch):
    model, plain = Stack(), Stack()
    plain.load_state_dict(model.state_dict())
    rng = torch.get_rng_state()
    report = ck.conditioned_(model, seed=3, gain="calibrated", calibration=batch)
    assert torch.equal(torch.get_rng_state(), rng)
    ck.conditioned_(plain, seed=3)
    assert report.calibration is not None
    for entry in report.calibration.layers:
        name = f"{entry.layer}.in_proj_weight"
        for slot, role in enumerate("qkv"):
            rows = slice(slot * D, (slot + 1) * D)
            expected = plain.get_parameter(name)[rows] * entry.gains.get(role, 1.0)
            torch.testing.assert_close(model.get_parameter(name)[rows], expected)
    assert ck.verify(model, report)
    gains = {entry.role: entry.gain for entry in report.touched if entry.layer == "layers.0"}
    assert gains == {**report.calibration.layers[0].gains, "v": 1.0}
    mixed = ck.conditioned_(model, seed=3, gain={"q": "calibrated", "k": 0.5, "v": "preserve"}, calibration=batch)
    assert set(mixed.calibration.layers[0].gains) == {"q"}
    assert {entry.gain for entry in mixed.touched if entry.role == "k"} == {0.5}


@pytest.mark.parametrize("call", ["calibrate_gain", "conditioned_"])
@pytest.mark.parametrize("fault", ["forward", "batch", "nan", "write"])
def test_a_failing_call_leaves_the_model_bit_identical(batch, call, fault, monkeypatch):
    model = Stack(fail_in=1 if fault == "forward" else None)
    if fault == "nan":
        batch = batch.clone()
        batch[0, 0, 0] = torch.nan
    given = {"batch": "no batch"}.get(fault, batch)
    if fault == "write":
        from conditioned_kernels.initialize import writing

        write, calls = writing.write, []

        def broken(target, blocks):
            calls.append(target.name)
            write(target, blocks)
            if len(calls) == (3 if call == "calibrate_gain" else 9):  # the first of the second layer's gains
                raise OSError("disk of the future is full")

        monkeypatch.setattr(writing, "write", broken)
    model.layers[0].eval()
    before, modes = state(model), [module.training for module in model.modules()]
    attributes = {name: dict(parameter.__dict__) for name, parameter in model.named_parameters()}
    rng = torch.get_rng_state()
    with pytest.raises((RuntimeError, TypeError, ValueError, OSError)):
        if call == "calibrate_gain":
            ck.calibrate_gain(model, given)
        else:
            ck.conditioned_(model, gain="calibrated", calibration=given)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng)
    assert {name: dict(parameter.__dict__) for name, parameter in model.named_parameters()} == attributes
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(hasattr(parameter, MARK) for parameter in model.parameters())


def test_a_model_in_half_precision_and_transformers_families(batch):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, max_position_embeddings=40, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaModel(config).bfloat16()
    ids = torch.arange(1, 9)[None] % 32
    report = ck.conditioned_(model, gain="calibrated", calibration={"input_ids": ids})
    assert ck.verify(model, report)
    for entry in report.calibration.layers:
        assert geometric_mean(entry.after) <= geometric_mean(entry.before)


def test_a_layer_that_is_not_covered_is_named_and_nothing_is_written(batch):
    model = Stack()
    model.layers[1] = nn.MultiheadAttention(D, HEADS, add_bias_kv=True, batch_first=True)
    before = state(model)
    with pytest.raises(ck.NoJacobian, match=r"layers\.1.*bias_k"):
        ck.calibrate_gain(model, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(ck.calibrate_gain(model, batch, where=lambda name, _: name == "layers.0").layers) == 1


def test_sharded_weights_are_refused(batch, monkeypatch):
    from conditioned_kernels.initialize.target import Target

    monkeypatch.setattr(Target, "piece", property(lambda target: "a part of it"))
    with pytest.raises(ValueError, match=r"layers\.0\.in_proj_weight is sharded"):
        ck.calibrate_gain(Stack(), batch)


def test_wrong_arguments_are_named(batch):
    model = Stack(1)
    with pytest.raises(TypeError, match="model must be"):
        ck.calibrate_gain("model", batch)
    with pytest.raises(TypeError, match="batch must be"):
        ck.calibrate_gain(model, 3)
    with pytest.raises(ValueError, match="roles must be"):
        ck.calibrate_gain(model, batch, roles="qx")
    with pytest.raises(ValueError, match="rtol must be"):
        ck.calibrate_gain(model, batch, rtol=-1)
    with pytest.raises(ValueError, match="pass calibration="):
        ck.conditioned_(model, gain="calibrated")
    frozen = copy.deepcopy(model)
    frozen.layers[0].in_proj_weight.requires_grad_(False)
    with pytest.raises(ValueError, match="include_frozen"):
        ck.calibrate_gain(frozen, batch)

    class Idle(Stack):
        def forward(self, x):
            return x

    with pytest.raises(RuntimeError, match="called no attention layer"):
        ck.calibrate_gain(Idle(1), batch)


@pytest.mark.parametrize("name", ["deepseek_v3", "timm-xcit"])
def test_only_a_heads_own_rows_are_scaled(name: str):
    """Latents and the rotary key that heads share stay; channels of unit length have no gain that could help."""
    case = next(each for each in CASES if each.name == name)
    if case.missing:
        pytest.skip(case.missing)
    torch.manual_seed(0)
    model, args, kwargs = case.build()
    layer = next(each for each in ck.find_attention(model).layers if each.family == case.covers)
    before = {each.label: each.view(layer.weight(each)).clone() for each in layer.projections}
    options = {"roles": "k", "tokens": 3, "heads": 1, "where": lambda path, _: path == layer.name, "overwrite": True}
    report = ck.calibrate_gain(model, kwargs or args, **options)
    (entry,) = report.layers
    for each in layer.projections:
        gain = entry.gains["k"] if each.label in ("k.nope", "k") else 1.0
        torch.testing.assert_close(each.view(layer.weight(each)), gain * before[each.label])
    again = ck.calibrate_gain(model, kwargs or args, **options)
    torch.testing.assert_close(again.layers[0].before, entry.after, rtol=1e-3, atol=0)
