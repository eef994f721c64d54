"""Every row of the family table: proved by the model's own forward, conditioned, measured, and mutated."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import conditioned_kernels as ck
from conditioned_kernels.heads import FAMILIES, Discovery, Projection
from conditioned_kernels.heads.layout import LATENT, HeadView, attribute
from conditioned_kernels.heads.probe import probe_layers
from conditioned_kernels.initialize.measure import sigma_tolerance
from conditioned_kernels.initialize.target import resolve

from .models import CASES, Case

HALF_AND_DOUBLE = (
    "torch-mha",
    "timm-vit",
    "timm-vit-head-over-width",
    "timm-levit-conv",
    "timm-xcit",
    "bert",
    "gpt2",
    "qwen3",
    "qwen3_next",
    "deepseek_v3",
    "codegen",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    if request.param.missing:
        pytest.skip(request.param.missing)
    torch.manual_seed(0)
    return request.param


def label(projection: Projection) -> str:
    return f"{projection.role}.{projection.part}" if projection.part else projection.role


def test_every_class_of_the_table_has_a_case() -> None:
    covered = {case.covers for case in CASES}
    for family in FAMILIES:
        uncovered = [name for name in family.classes if name not in covered]
        for name in uncovered:
            missing = Case("", name, lambda: (nn.Module(), (), {}), {}).missing
            assert missing, f"{name} is installed and has no case in tests/models.py"
        assert family.source
        assert covered & set(family.classes) or len(uncovered) == len(family.classes)
    assert len({case.name for case in CASES}) == len(CASES)
    assert covered <= {name for family in FAMILIES for name in family.classes}


@torch.no_grad()
def train_a_little(model: nn.Module) -> None:
    """Biases and norm gains as a trained model has them: not 0 and not 1."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1 if name.endswith("weight") else 0.3)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.add_(torch.rand_like(buffer))


def test_layout_is_proved_by_the_forward(case: Case) -> None:
    """B03: the acceptance test of every layout, with dense weights, trained biases and gains, then conditioned."""
    model, args, kwargs = case.build()
    found = ck.find_attention(model)
    assert not found.unknown
    layer = next(layer for layer in found.layers if layer.family == case.covers)
    heads = {
        label(each): math.prod(each.view(attribute(layer.module, each.parameter)).shape[:-2])
        for each in layer.projections
    }
    assert heads == case.heads
    train_a_little(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = ck.probe(model, *args, **kwargs)
    assert report.ok, str(report)
    assert len(report.rows) == sum(len(layer.projections) for layer in found.layers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert "forward" not in layer.module.__dict__
    ck.conditioned_(model)
    report = ck.probe(model, *args, **kwargs)
    assert report.ok, str(report)


def touched_elements(model: nn.Module, found: Discovery) -> dict[str, Tensor]:
    """Per weight, which elements the layout claims, by the name in the state_dict."""
    masks: dict[str, Tensor] = {}
    for target in resolve(found):
        mask = masks.setdefault(target.name, torch.zeros_like(target.weight, dtype=torch.bool))
        view = target.projection.view(mask)
        assert not view.any(), f"{target.name}: two roles claim one element"
        view.fill_(True)
    return masks


def check_conditioned(model: nn.Module, dtype: torch.dtype) -> None:
    found = ck.find_attention(model)
    masks = touched_elements(model, found)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = ck.conditioned_(model, seed=3)
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert set(after) == set(before)
    for name, tensor in after.items():
        if name in masks:
            assert torch.equal(tensor[~masks[name]], before[name][~masks[name]]), (
                f"{name}: rows beside the heads changed"
            )
            assert not torch.equal(tensor[masks[name]], before[name][masks[name]])
        else:
            assert torch.equal(tensor, before[name]), f"{name} changed"
    assert {entry.parameter for entry in report.touched} == set(masks)
    # Measured here by LAPACK in float64, independently of the report, after the cast.
    for target in resolve(found):
        heads = target.heads.reshape(-1, *target.heads.shape[-2:])
        sigma = torch.linalg.svdvals(heads.double())
        assert (sigma - 1).abs().max() <= sigma_tolerance(dtype), f"{target.name} ({target.stream_role})"
        if target.projection.role == "v":
            stacked = heads.reshape(-1, heads.shape[-1]).double()
            assert torch.linalg.matrix_rank(stacked) == min(stacked.shape)
    for entry in report.touched:
        assert entry.dtype == dtype
        assert (entry.estimate.sigma_max - 1).abs().max() <= sigma_tolerance(dtype)
        if entry.role == "v":
            assert entry.stacked_rank == min(entry.heads * entry.head_dim, entry.in_features)
    assert ck.verify(model, report).ok
    assert ck.verify(model).ok
    # The same seed gives the same bits, whatever the weights were before.
    again = ck.conditioned_(model, seed=3)
    assert len(again.touched) == len(report.touched)
    assert all(torch.equal(tensor, after[name]) for name, tensor in model.state_dict().items())
    # Layers of one shape differ.
    drawn = [target for target in resolve(found) if target.projection.role == "q"]
    for i, one in enumerate(drawn):
        for other in drawn[i + 1 :]:
            assert one.heads.shape != other.heads.shape or not torch.equal(one.heads, other.heads)


def test_heads_are_conditioned_and_nothing_else_changes(case: Case) -> None:
    check_conditioned(case.build()[0], torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", HALF_AND_DOUBLE)
def test_heads_are_conditioned_after_the_cast(name: str, dtype: torch.dtype) -> None:
    found = next(case for case in CASES if case.name == name)
    if found.missing:
        pytest.skip(found.missing)
    check_conditioned(found.build()[0].to(dtype), dtype)


def test_save_and_load_keep_the_condition(case: Case) -> None:
    model = case.build()[0]
    report = ck.conditioned_(model, gain=0.5)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    torch.manual_seed(1)
    fresh = case.build()[0]
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert ck.verify(fresh, report).ok
    assert ck.verify(fresh, gain=0.5).ok
    assert not ck.verify(fresh).ok


@dataclasses.dataclass(frozen=True)
class Mutated:
    """A layout's view of a weight that was changed first."""

    view: Callable[[Tensor], Tensor]
    change: Callable[[Tensor], Tensor]

    def __call__(self, weight: Tensor) -> Tensor:
        return self.view(self.change(weight))


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A layout's view with its stacked square matrix transposed."""

    view: Callable[[Tensor], Tensor]

    def __call__(self, weight: Tensor) -> Tensor:
        heads = self.view(weight)
        return heads.reshape(heads.shape[-1], heads.shape[-1]).mT.reshape(heads.shape)


def swap(module: nn.Module, projection: Projection) -> Projection | None:
    if projection.part == LATENT or projection.role == "q":
        return None
    return dataclasses.replace(projection, role={"k": "v", "v": "k"}[projection.role])


def shift(step: int, module: nn.Module, projection: Projection) -> Projection:
    input_major = isinstance(projection.view, HeadView) and projection.view.input_major
    return dataclasses.replace(
        projection, view=Mutated(projection.view, lambda weight: weight.roll(step, 1 if input_major else 0))
    )


def transpose(module: nn.Module, projection: Projection) -> Projection | None:
    shape = projection.view(attribute(module, projection.parameter)).shape
    if math.prod(shape[:-1]) != shape[-1]:
        return None
    return dataclasses.replace(projection, view=Transposed(projection.view))


CHANGES: dict[str, Callable[[nn.Module, Projection], Projection | None]] = {
    "swap of K and V": swap,
    "shift down": partial(shift, 1),
    "shift up": partial(shift, -1),
    "transpose": transpose,
}


def test_a_mutated_layout_fails_the_probe(case: Case) -> None:
    """B03, B07: condition numbers cannot see a wrong layout, the probe does, in every single projection."""
    model, args, kwargs = case.build()
    found = ck.find_attention(model)
    layers, kinds = [], []
    # One layer of each class and form; layers that differ in their weights alone have nothing to add.
    forms = {(type(layer.module), *(p.parameter for p in layer.projections)): layer for layer in found.layers}
    for layer in forms.values():
        mutated = [
            (kind, changed)
            for kind, change in CHANGES.items()
            for projection in layer.projections
            if (changed := change(layer.module, projection)) is not None
        ]
        kinds += [kind for kind, _ in mutated]
        layers.append(dataclasses.replace(layer, projections=tuple(changed for _, changed in mutated)))
    # One run judges them all, since every row is compared by itself.
    report = probe_layers(model, dataclasses.replace(found, layers=tuple(layers)), args, kwargs)
    assert len(report.rows) == len(kinds) > 0
    assert {"shift down", "shift up"} <= set(kinds)
    passed = [f"{kind}: {row}" for kind, row in zip(kinds, report.rows, strict=True) if row.ok]
    assert not passed


@pytest.mark.parametrize("name", ["bert-base", "swin-base"])
def test_full_size_default_configurations(name: str) -> None:
    """Built, conditioned, and run forward in training and evaluation mode; the other five run outside the suite."""
    inputs: dict[str, Tensor]
    if name == "bert-base":
        transformers = pytest.importorskip("transformers")
        model, inputs = transformers.BertModel(transformers.BertConfig()), {"input_ids": torch.arange(1, 9)[None]}
    else:
        timm = pytest.importorskip("timm")
        model, inputs = timm.create_model("swin_base_patch4_window7_224"), {"x": torch.randn(1, 3, 224, 224)}
    report = ck.conditioned_(model)
    assert not report.unknown
    assert len({entry.layer for entry in report.touched}) == {"bert-base": 12, "swin-base": 24}[name]
    assert all((entry.estimate.kappa - 1).max() < 1e-5 for entry in report.touched)
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            output = model(**inputs)
        assert (output if isinstance(output, Tensor) else output.last_hidden_state).isfinite().all()


def test_the_fast_path_reads_the_same_heads() -> None:
    """torch's fused encoder layer, which calls no submodule, agrees with the separate products."""
    model = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval()
    ck.conditioned_(model)
    states = torch.randn(2, 5, 16)
    with torch.no_grad():
        fast = model(states)
    assert torch.allclose(fast, model(states), atol=1e-5)
    assert ck.probe(model, states).ok
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        assert torch.equal(model(states), fast)
