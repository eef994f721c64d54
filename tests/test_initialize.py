"""initialize_: every scheme by its name, one report type, one set of rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conditioned_kernels as ck
from conditioned_kernels.initialize import SCHEMES, ProjectionReport
from conditioned_kernels.initialize.initialize import options_of
from conditioned_kernels.initialize.random import KINDS

from .models import CASES, bert

FAMILIES = ("timm-vit", "bert", "gpt2", "llama", "torch-mha-separate", "timm-xcit")
WRITES = dict.fromkeys(SCHEMES, "qkv") | {"default": "", "mimetic": "qkvo", "weight_selection": "qkvo"}


def build(name: str, seed: int = 0) -> nn.Module:
    case = next(case for case in CASES if case.name == name)
    if case.missing:
        pytest.skip(case.missing)
    torch.manual_seed(seed)
    return case.build()[0]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def options(scheme: str, family: str) -> dict[str, Any]:
    return {"teacher": build(family, 1)} if scheme == "weight_selection" else {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_on_every_kind_of_family(scheme: str, family: str) -> None:
    model = build(family)
    before = state(model)
    report = ck.initialize_(model, scheme, **options(scheme, family))
    assert isinstance(report, ck.InitReport)
    assert all(isinstance(entry, ProjectionReport) for entry in report.touched)
    assert {entry.role for entry in report.touched} == set(WRITES[scheme])
    assert all(entry.estimate.kappa.isfinite().all() for entry in report.touched if entry.role != "o")
    assert str(report)
    touched = {entry.parameter for entry in report.touched} | set(report.others)
    changed = {name for name, value in model.state_dict().items() if name in before and not value.equal(before[name])}
    assert changed <= touched
    if scheme in ("default", "spectral_conditioning"):
        assert not changed
    elif scheme != "weight_selection":
        assert changed == touched
    assert not report.unknown


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_name_is_its_function(scheme: str) -> None:
    one, other = build("bert"), build("bert")
    direct = {
        "conditioned": ck.conditioned_,
        "mimetic": ck.mimetic_,
        "weight_selection": ck.weight_selection_,
        "spectral_conditioning": ck.spectral_conditioning,
        "random": ck.random_,
    }.get(scheme)
    given = options(scheme, "bert")
    ck.initialize_(one, scheme, **given)
    if scheme in KINDS:
        ck.random_(other, kind=scheme)
    elif direct:
        direct(other, **given)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert list(one.state_dict()) == list(other.state_dict())


def test_conditioned_is_the_default_and_takes_its_options() -> None:
    one, other = build("bert"), build("bert")
    report = ck.initialize_(one, gain={"q": 0.5}, value="keep", seed=4)
    ck.conditioned_(other, gain={"q": 0.5}, value="keep", seed=4)
    assert report.scheme == "conditioned"
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_the_control_names_every_projection_it_left() -> None:
    model = build("bert")
    report = ck.initialize_(model, "default")
    assert not report.touched
    assert len(report.skipped) == 6
    with pytest.raises(ck.NoAttentionFound):
        ck.initialize_(nn.Linear(2, 2), "default")


@pytest.mark.parametrize(
    ("scheme", "given", "error", "message"),
    [
        ("best", {}, ValueError, r"scheme must be one of 'default', 'conditioned', 'mimetic', .*got 'best'"),
        ("mimetic", {"gain": 1.0}, TypeError, r"'mimetic' has no option 'gain'; it has 'qk', 'vo', 'positions'"),
        ("xavier", {"kind": "kaiming"}, TypeError, r"'xavier' has no option 'kind'; it has 'std', 'seed'"),
        ("default", {"value": 1, "gain": 2}, TypeError, r"has no option 'gain', 'value'"),
        ("weight_selection", {}, TypeError, r"teacher"),
        ("conditioned", {"value": "best"}, ValueError, r"value must be one of"),
        ("mimetic", {"vo": 3}, ValueError, r"vo must be None or"),
    ],
)
def test_errors_say_what_there_is(scheme: str, given: dict[str, Any], error: type[Exception], message: str) -> None:
    model = build("bert")
    before = state(model)
    with pytest.raises(error, match=message):
        ck.initialize_(model, scheme, **given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_set_of_rules(scheme: str, untouched_rng: None) -> None:
    """A failing call leaves the model bit-identical (frozen, loaded: D05, B25); torch's random state is not touched."""
    with torch.random.fork_rng():
        model, given = build("bert"), options(scheme, "bert")
    key = model.encoder.layer[1].attention.self.key.weight
    before = state(model)
    key.requires_grad_(False)
    with pytest.raises(ValueError, match=r"layer.1.attention.self.key.weight is frozen"):
        ck.initialize_(model, scheme, **given)
    key.requires_grad_(True)
    key._is_hf_initialized = True
    with pytest.raises(ValueError, match=r"layer.1.attention.self.key.weight was loaded"):
        ck.initialize_(model, scheme, **given)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ck.initialize_(model, scheme, overwrite=True, **given)


def test_options_are_those_of_the_functions() -> None:
    assert options_of("weight_selection")[0] == "teacher"
    assert "kind" in options_of("random")
    assert "kind" not in options_of("orthogonal")
    common = {"layouts", "strict", "include_frozen", "overwrite"}
    assert all(common <= set(options_of(scheme)) for scheme in SCHEMES)


def test_reports_of_schemes_that_write_more_can_be_read_like_any_other() -> None:
    model = bert()[0]
    report = ck.initialize_(model, "mimetic", positions="sinusoidal")
    rows = report.rows()
    assert {row["role"] for row in rows} == {"q", "k", "v", "o"}
    assert sum(row["role"] == "o" for row in rows) == 8
    text = str(report)
    assert "o: mimetic" in text
    assert "and other parameters: 1" in text
    assert "of 2 attention layers" in text
