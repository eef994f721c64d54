"""Spectral conditioning: lambda I in the forward, attached, trained through, exported and removed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conditioned_kernels as ck
from conditioned_kernels.heads import find_attention
from conditioned_kernels.initialize.target import resolve

from .models import CASES, bert, torch_layer

FORMS = (
    "torch-mha",
    "torch-mha-separate",
    "timm-vit",
    "timm-swin",
    "timm-vit-head-over-width",
    "timm-coatnet",
    "timm-levit",
    "timm-xcit",
    "bert",
    "gpt2",
    "gpt2-cross",
    "gpt_neox",
    "codegen",
    "falcon-groups",
    "llama",
    "qwen3_next",
    "deepseek_v3",
)


def build(name: str) -> tuple[nn.Module, tuple, dict[str, Any]]:
    case = next(case for case in CASES if case.name == name)
    if case.missing:
        pytest.skip(case.missing)
    torch.manual_seed(0)
    model, args, kwargs = case.build()
    return model.eval(), args, kwargs


def output(model: nn.Module, args: tuple, kwargs: dict) -> Tensor:
    found = model(*args, **kwargs)
    return found if isinstance(found, Tensor) else found[0]


def identity(shape: torch.Size, lam: float, form: str) -> Tensor:
    """Element by element: row r of head h has lambda at column r, or at (h rows + r) mod columns."""
    *many, rows, cols = shape
    heads = torch.zeros(torch.Size(many).numel(), rows, cols)
    for h in range(heads.shape[0]):
        for r in range(min(rows, cols)):
            heads[h, r, (h * rows + r) % cols if form == "block" else r] = lam
    return heads.view(shape)


@pytest.mark.parametrize("form", ["block", "repeat"])
@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_every_storage_form_gets_its_identity_and_comes_back(name: str, form: str) -> None:
    model, args, kwargs = build(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    heads = {(t.name, t.stream_role): t.heads.clone() for t in resolve(find_attention(model))}
    plain = output(model, args, kwargs)

    report = ck.spectral_conditioning(model, lam=3.0, form=form)
    assert len(report.touched) == len(heads)
    for target in resolve(find_attention(model)):
        old = heads[target.name, target.stream_role]
        assert torch.equal(target.heads, old + identity(old.shape, 3.0, form))
    # What no role claims (gates, K/V beside it) is as it was.
    claimed = {name for name, _ in heads}
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items() if k in state and k not in claimed)
    conditioned = output(model, args, kwargs)
    assert not torch.equal(conditioned, plain)

    exported = ck.export_spectral_conditioning(model)
    fresh, *_ = build(name)
    assert set(exported) == set(fresh.state_dict())
    fresh.load_state_dict(exported)
    assert torch.equal(output(fresh, args, kwargs), conditioned)

    assert ck.remove_spectral_conditioning(model) == len(claimed)
    assert list(model.state_dict()) == list(state) or set(model.state_dict()) == set(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    assert torch.equal(output(model, args, kwargs), plain)


@pytest.mark.parametrize("form", ["block", "repeat"])
@pytest.mark.parametrize("name", ["timm-vit", "gpt2", "llama", "timm-vit-head-over-width"])
def test_the_bound_on_kappa(name: str, form: str) -> None:
    """lambda - ||W|| <= sigma_min and sigma_max <= lambda + ||W||, per head, against LAPACK in float64."""
    model, *_ = build(name)
    norms = {
        (t.name, t.stream_role): torch.linalg.matrix_norm(t.heads.double(), 2).flatten()
        for t in resolve(find_attention(model))
    }
    report = ck.spectral_conditioning(model, lam=10.0, form=form)
    for target, entry in zip(resolve(find_attention(model)), report.touched, strict=True):
        sigma = torch.linalg.svdvals(target.heads.double()).flatten(0, -2)
        norm = norms[target.name, target.stream_role]
        assert (sigma[:, -1] >= 10 - norm - 1e-5).all()
        assert (sigma[:, 0] <= 10 + norm + 1e-5).all()
        kappa = sigma[:, 0] / sigma[:, -1]
        assert (kappa <= (10 + norm) / (10 - norm) + 1e-5).all()
        assert torch.allclose(entry.estimate.kappa.double(), kappa, rtol=1e-3)
        assert (norm < 10).all()


def test_training_updates_only_the_original() -> None:
    """The same steps as with a constant added by hand; an optimizer made before attaching keeps its parameters."""
    model, x = torch_layer("TransformerEncoderLayer")[0], torch.randn(2, 5, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    original = model.self_attn.in_proj_weight
    start = original.detach().clone()
    twin = copy.deepcopy(model)
    constant = torch.cat([identity(torch.Size((4, 4, 16)), 2.0, "block").flatten(0, 1)] * 3)
    ck.spectral_conditioning(model, lam=2.0)
    assert original is model.self_attn.parametrizations.in_proj_weight.original
    stepped = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for net, steps in ((model, optimizer), (twin, stepped)):
            steps.zero_grad()
            if net is twin:
                with torch.no_grad():
                    twin.self_attn.in_proj_weight.add_(constant)
            net(x).square().sum().backward()
            if net is twin:
                with torch.no_grad():
                    twin.self_attn.in_proj_weight.sub_(constant)
            steps.step()
    assert not torch.allclose(original, start)
    assert torch.allclose(original, twin.self_attn.in_proj_weight, atol=1e-4)
    trained = original.detach().clone()
    ck.remove_spectral_conditioning(model)
    assert model.self_attn.in_proj_weight is original
    assert torch.equal(model.self_attn.in_proj_weight, trained)


def test_deepcopy_state_dict_and_compile() -> None:
    model, args, kwargs = bert()
    model.eval()
    ck.spectral_conditioning(model)
    wanted = output(model, args, kwargs)
    twin = copy.deepcopy(model)
    assert torch.equal(output(twin, args, kwargs), wanted)
    fresh, *_ = bert()
    ck.spectral_conditioning(fresh)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(output(fresh.eval(), args, kwargs), wanted)
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(output(compiled, args, kwargs), wanted, atol=1e-6)
    ck.remove_spectral_conditioning(twin)
    assert torch.equal(output(model, args, kwargs), wanted)
    # Names of a wrapped model stay the wrapper's.
    names = set(ck.export_spectral_conditioning(compiled))
    assert names == {f"_orig_mod.{name}" for name in bert()[0].state_dict()}


def test_baking_keeps_the_function() -> None:
    model, args, kwargs = bert()
    model.eval()
    parameters = dict(model.named_parameters())
    ck.spectral_conditioning(model, lam=4.0)
    wanted, exported = output(model, args, kwargs), ck.export_spectral_conditioning(model)
    assert ck.remove_spectral_conditioning(model, bake=True) == 6
    assert torch.equal(output(model, args, kwargs), wanted)
    assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert ck.remove_spectral_conditioning(model) == 0


def test_roles_and_where() -> None:
    model, *_ = bert()
    report = ck.spectral_conditioning(model, roles="qk", where=lambda name, _: "layer.1" in name)
    assert {(entry.role, entry.layer) for entry in report.touched} == {
        (role, "encoder.layer.1.attention.self") for role in "qk"
    }
    assert any("left out" in reason for _, reason in report.skipped)
    assert ck.remove_spectral_conditioning(model) == 2


def two_tied() -> nn.Module:
    model = nn.ModuleList([nn.MultiheadAttention(16, 4) for _ in range(2)])
    model[1].in_proj_weight = model[0].in_proj_weight
    return model


def spectral() -> nn.Module:
    model = torch_layer("TransformerEncoderLayer")[0]
    nn.utils.parametrizations.spectral_norm(model.self_attn, "in_proj_weight")
    return model


def frozen() -> nn.Module:
    return bert()[0].requires_grad_(False)


def loaded() -> nn.Module:
    model = bert()[0]
    model.encoder.layer[1].attention.self.key.weight._is_hf_initialized = True
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (two_tied, {}, r"1.in_proj_weight is tied to 0.in_proj_weight"),
        (spectral, {}, r"self_attn.in_proj_weight is parametrized already"),
        (frozen, {}, r"query.weight is frozen"),
        (loaded, {}, r"key.weight was loaded"),
        (lambda: nn.Linear(2, 2), {}, r"no attention layer"),
        (lambda: bert()[0], {"lam": 0.0}, r"lam must be a positive"),
        (lambda: bert()[0], {"roles": "qo"}, r"roles must be some of"),
        (lambda: bert()[0], {"form": "whole"}, r"form must be one of 'block', 'repeat'"),
    ],
    ids=["tied", "parametrized", "frozen", "loaded", "none", "lam", "roles", "form"],
)
def test_refused_and_nothing_attached(make: Any, options: dict[str, Any], message: str) -> None:
    model = make()
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        ck.spectral_conditioning(model, **options)
    assert list(model.state_dict()) == names


def test_a_failure_on_the_way_takes_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from conditioned_kernels.initialize import apply

    model, *_ = bert()
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("measured wrong")

    module = __import__("sys").modules["conditioned_kernels.initialize.spectral_conditioning"]
    monkeypatch.setattr(module, "measure", broken)
    assert apply.measure is not broken
    with pytest.raises(RuntimeError, match="measured wrong"):
        ck.spectral_conditioning(model)
    assert set(model.state_dict()) == set(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_initializing_what_is_attached_is_refused() -> None:
    """B27: a value written into a recomputed weight would be lost."""
    model, *_ = bert()
    ck.spectral_conditioning(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="parametrized and cannot be assigned"):
        ck.conditioned_(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="parametrized already"):
        ck.spectral_conditioning(model)


def test_c01_a_model_without_values_is_refused_by_name():
    """C01: nothing of W + lambda I could be measured."""
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(16, 4, 24)
    with pytest.raises(ValueError, match=r"self_attn\.in_proj_weight is on the meta device"):
        ck.spectral_conditioning(model)
    assert not hasattr(model.self_attn, "parametrizations")
