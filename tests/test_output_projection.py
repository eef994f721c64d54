"""W_O of every row of the family table, proved by the model's own forward: what its input reads, feature by feature."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import conditioned_kernels as ck
from conditioned_kernels.heads import FAMILIES, AttentionLayer, HeadView, Output
from conditioned_kernels.heads.layout import AROUND, LATENT
from conditioned_kernels.initialize.target import resolve

from .models import CASES, Case, bert

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default}


class InputOf(TorchDispatchMode):
    """What is multiplied with one weight, the first time, as (everything else, features)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.place, self.numel, self.found = weight.data_ptr(), weight.numel(), None

    def is_it(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.data_ptr() == self.place and value.numel() == self.numel

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.found is None and func in PRODUCTS and any(map(self.is_it, args)):
            value = next(x for x in args if isinstance(x, Tensor) and x.ndim > 1 and not self.is_it(x))
            self.found = (value.movedim(1, -1) if value.ndim > 2 else value).flatten(0, -2).clone()
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class Run:
    """The smallest module that holds heads and W_O, with what the model's own forward called it with."""

    module: nn.Module
    args: tuple
    kwargs: dict


@torch.no_grad()
def run_of(model: nn.Module, layer: AttentionLayer, args: tuple, kwargs: dict) -> Run:
    around = layer.output is not None and layer.output.parameter.startswith(AROUND)
    module = layer.around if around and layer.around is not None else layer.module
    seen: list[Run] = []
    with module.register_forward_pre_hook(lambda m, a, k: seen.append(Run(m, a, k)), with_kwargs=True):
        model(*args, **kwargs)
    return seen[0]


@torch.no_grad()
def read(run: Run, layer: AttentionLayer) -> Tensor:
    assert layer.output is not None
    with InputOf(layer.weight(layer.output)) as mode:
        run.module(*run.args, **run.kwargs)
    assert mode.found is not None, "the forward never multiplies by what the table calls W_O"
    return mode.found


@torch.no_grad()
def features_that_change(run: Run, layer: AttentionLayer, role: str, pick: Any, before: Tensor) -> set[int]:
    """Features of W_O's input that move when part of every projection of ``role`` moves."""
    moving = [each for each in layer.projections if each.role == role and each.part != LATENT]
    kept = [(layer.weight(each), layer.weight(each).clone()) for each in moving]
    for each in moving:
        heads = each.view(layer.weight(each))
        part = heads[pick(heads.shape)]
        part.add_(torch.randn(part.shape, generator=torch.Generator().manual_seed(2)))
    after = read(run, layer)
    for weight, old in kept:
        weight.copy_(old)
    moved = (after - before).abs().amax(0) > 1e-5 * before.abs().max()
    return set(moved.nonzero()[:, 0].tolist())


def one_head(number: int):
    def pick(shape: torch.Size):
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(number), shape[:-2]))

    return pick


def one_row(number: int):
    return lambda shape: (..., number, slice(None))


ACROSS_HEADS = (
    {"timm-eva-separate": "norm"}
    | dict.fromkeys(("olmo2", "olmo3", "olmoe", "olmoe-clipped", "flex_olmo", "minimax_m2"), "q_norm")
    | dict.fromkeys(("gemma3n", "gemma4"), "v_norm")
)
"""Norms that mix the heads, or the rows of values; taken out, so that the rest shows."""
MIXED_QUERIES = ("timm-cait", "nystromformer")
"""Where all heads' scores meet: talking heads, and a pseudoinverse scaled by their common maximum. Values do not."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_forward_reads_heads_where_the_table_says(case: Case) -> None:
    """Each query head owns head_dim features in order, and row r of every value head is feature r of its heads."""
    if case.missing:
        pytest.skip(case.missing)
    torch.manual_seed(0)
    model, *inputs = case.build()
    model.eval()
    if hasattr(model, "config"):
        model.config.use_cache = False  # A cache would grow from run to run.
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        layer = next(each for each in ck.find_attention(model).layers if each.family == case.covers)
        if layer.output is None:
            assert case.name == "detr-map"
            assert layer.no_output == "no V"
            return
        view = layer.output.view(layer.weight(layer.output))
        heads, rows, _ = view.shape
        if case.name in ACROSS_HEADS:
            setattr(layer.module, ACROSS_HEADS[case.name], nn.Identity())
        run = run_of(model, layer, *inputs)
        before = read(run, layer)
        assert before.shape[1] == heads * rows
        role = "v" if case.name in MIXED_QUERIES else "q"
        for head in range(heads):
            moved = features_that_change(run, layer, role, one_head(head), before)
            assert moved == set(range(head * rows, (head + 1) * rows)), f"head {head}"
        if layer.row is not None and layer.row.channel:
            return  # Channel attention mixes the rows of a head, so its features are known by head only.
        for row in range(rows):
            moved = features_that_change(run, layer, "v", one_row(row), before)
            assert moved == set(range(row, heads * rows, rows)), f"row {row}"
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.mark.parametrize("name", ["bert", "gpt2", "timm-coatnet", "llama", "torch-mha-separate", "t5"])
def test_the_view_is_the_matrix_after_the_heads(name: str) -> None:
    """For every storage form (out, in), (in, out) and 1x1 convolution: output = sum over heads of features @ view."""
    case = next(case for case in CASES if case.name == name)
    if case.missing:
        pytest.skip(case.missing)
    torch.manual_seed(0)
    model, *_ = case.build()
    layer = next(each for each in ck.find_attention(model).layers if each.family == case.covers)
    view, owner = layer.output.view(layer.weight(layer.output)), layer.owner(layer.output)
    heads, rows, _ = view.shape
    features = torch.randn(2, heads, rows)
    with torch.no_grad():
        flat = features.flatten(1)
        if layer.weight(layer.output).ndim == 4:
            found = nn.functional.conv2d(flat[..., None, None], owner.weight)[..., 0, 0]
        else:
            found = owner(flat) - (0 if owner.bias is None else owner.bias)
        assert torch.allclose(found, torch.einsum("nhr,hro->no", features, view), atol=1e-5)
    assert view.untyped_storage().data_ptr() == layer.weight(layer.output).untyped_storage().data_ptr()


def test_every_row_names_an_output_or_a_reason() -> None:
    for family in FAMILIES:
        assert isinstance(family.output, Output)
        assert bool(family.output.path) != bool(family.output.reason), family.classes


def test_conditioned_verify_and_probe_never_see_it() -> None:
    model, args, kwargs = bert()
    found = ck.find_attention(model)
    assert all(layer.output is not None for layer in found.layers)
    assert {target.projection.role for target in resolve(found)} == {"q", "k", "v"}
    assert {target.projection.role for target in resolve(found, outputs=True)} == {"q", "k", "v", "o"}
    before = {name: value.clone() for name, value in model.state_dict().items() if "attention.output" in name}
    report = ck.conditioned_(model)
    assert {entry.role for entry in report.touched} == {"q", "k", "v"}
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert len(ck.verify(model, report).measured) == len(report.touched)
    assert {row.role for row in ck.probe(model, *args, **kwargs).rows} == {"q", "k", "v"}


def test_a_module_without_its_surroundings_says_so() -> None:
    model, *_ = bert()
    alone = model.encoder.layer[0].attention.self
    (layer,) = ck.find_attention(alone).layers
    assert layer.output is None
    assert "beside the module" in layer.no_output
    (layer,) = ck.find_attention(model.encoder.layer[0].attention).layers
    assert layer.parameter_name(layer.output) == "output.dense.weight"
    assert layer.output.parameter == f"{AROUND}output.dense.weight"


def test_an_output_of_another_shape_is_no_output() -> None:
    """A variant of a class that changes W_O keeps Q, K, V and loses only the schemes that need it."""
    model, *_ = bert()
    attention = model.encoder.layer[0].attention
    attention.output.dense = nn.Linear(12, 16)
    layer = ck.find_attention(model).layers[0]
    assert layer.output is None
    assert "expected 4 x 4 = 16" in layer.no_output
    assert ck.conditioned_(model).touched
    del attention.output.dense
    assert "dense" in ck.find_attention(model).layers[0].no_output


def test_wrappers_adapters_and_parametrizations_around_it() -> None:
    """B24, B25, B27: the name is the user's, and looking changes no state."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, *_ = bert()
    model.encoder.layer[0] = checkpoint_wrapper(model.encoder.layer[0])
    inner = model.encoder.layer[1].attention
    nn.utils.parametrizations.spectral_norm(inner.output.dense)
    model.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = [layer.parameter_name(layer.output) for layer in ck.find_attention(torch.compile(model)).layers]
    assert names == [f"encoder.layer.{i}.attention.output.dense.weight" for i in range(2)]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer, self.lora = base, nn.Linear(16, 2)

    inner.output.dense = Adapted(nn.Linear(16, 16))
    layer = ck.find_attention(model).layers[1]
    assert layer.parameter_name(layer.output) == "encoder.layer.1.attention.output.dense.base_layer.weight"


def test_a_layout_of_ones_own_may_name_it() -> None:
    """B19: role "o" of a user's layout, as (query heads, head_dim, out_features)."""

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def layout(module: Mine) -> dict[str, Tensor]:
        views = dict(zip("qkv", module.qkv.weight.unflatten(0, (3, 4, 4)), strict=True))
        return views | {"o": module.out.weight.mT.unflatten(0, (4, 4))}

    model = nn.Sequential(Mine())
    (layer,) = ck.find_attention(model, layouts={Mine: layout}).layers
    assert [each.role for each in layer.projections] == ["q", "k", "v"]
    assert layer.parameter_name(layer.output) == "0.out.weight"
    assert layer.output.view(model[0].out.weight).shape == (4, 4, 16)
    assert len(ck.conditioned_(model, layouts={Mine: layout}).touched) == 3
    assert {entry.role for entry in ck.mimetic_(model, layouts={Mine: layout}).touched} == {"q", "k", "v", "o"}


def test_the_view_is_data() -> None:
    view = Output("o_proj").view(4, 2)
    assert view == HeadView((4, 2), (), True)
    assert view(torch.empty(5, 8)).shape == (4, 2, 5)
    assert Output("c_proj", input_major=True).view(4, 2)(torch.empty(8, 5)).shape == (4, 2, 5)
    assert dataclasses.is_dataclass(view)
    assert math.prod(view(torch.empty(5, 8)).shape) == 40
