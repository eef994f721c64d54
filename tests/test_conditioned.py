"""conditioned_, random_ and verify on torch's own attention and on small hand-made modules.

The heads are read here by indexing the stored weights, with no layout of the package, and measured by the float64 SVD.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import conditioned_kernels as ck
from conditioned_kernels.initialize import apply, writing

from . import tolerances
from .matrices import svd

pytestmark = pytest.mark.usefixtures("each_backend")

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CONDITIONED = sys.modules["conditioned_kernels.initialize.conditioned"]
WIDTH, HEADS = 32, 4

Heads = dict[str, Tensor]
"""Per projection ("layer/role"), (heads, head_dim, in_features)."""


class Free(nn.Module):
    """Attention of any shape in (out, in) weights; its class is unknown to the package."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, rows: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, heads * rows)
        self.k_proj = nn.Linear(width, heads * rows)
        self.v_proj = nn.Linear(width, heads * rows)
        self.out_proj = nn.Linear(heads * rows, width)

    def views(self) -> Heads:
        return {role: getattr(self, f"{role}_proj").weight.unflatten(0, (self.heads, -1)) for role in ("q", "k", "v")}


class InputMajorAttention(nn.Module):
    """Never-initialized weights (heads, in, head_dim), and a gate that must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.full((2, HEADS, WIDTH, 8), math.nan))
        self.v = nn.Parameter(torch.full((HEADS, WIDTH, 8), math.nan))
        self.attention_gate = nn.Parameter(torch.ones(HEADS, WIDTH))

    def views(self) -> Heads:
        return {"q": self.qk[0].mT, "k": self.qk[1].mT, "v": self.v.mT}


LAYOUTS = {Free: Free.views, InputMajorAttention: InputMajorAttention.views}


def packed(**options: object) -> nn.Module:
    return nn.MultiheadAttention(WIDTH, HEADS, **options)


def separate() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, HEADS, kdim=WIDTH - 1, vdim=WIDTH + 16)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True), 3)


def seq2seq() -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, 1, 2, 16)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "packed": packed,
    "separate": separate,
    "encoder": encoder,
    "seq2seq": seq2seq,
    "free": Free,
    "free, over-complete": lambda: Free(16, 8, 4),
    "input-major": InputMajorAttention,
}
models = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
gains = pytest.mark.parametrize("gain", ["unit", "preserve", 0.5, 3])


def heads_of(model: nn.Module) -> Heads:
    """Every head of the models above, by plain indexing."""
    found: Heads = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            if module.in_proj_weight is not None:
                thirds: tuple[Tensor, ...] = module.in_proj_weight.detach().chunk(3)
            else:
                thirds = tuple(getattr(module, f"{role}_proj_weight").detach() for role in "qkv")
            found |= {
                f"{name}/{role}": third.reshape(module.num_heads, -1, third.shape[1])
                for role, third in zip("qkv", thirds, strict=True)
            }
        elif isinstance(module, Free | InputMajorAttention):
            found |= {f"{name}/{role}": view.detach() for role, view in module.views().items()}
    return found


def by_role(model: nn.Module, role: str) -> list[Tensor]:
    return [heads for name, heads in heads_of(model).items() if name.endswith(f"/{role}")]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model: nn.Module, before: dict[str, Tensor]) -> bool:
    after = model.state_dict()
    return all(torch.equal(after[name].nan_to_num(7.0), before[name].nan_to_num(7.0)) for name in before)


def sigma_tolerance(dtype: torch.dtype, heads: Tensor) -> float:
    short = min(heads.shape[-2:])
    return tolerances.sigma(dtype, short) + 2 * math.sqrt(short) * tolerances.eps(dtype)


def expected_gain(gain: object, before: Tensor) -> float:
    if gain != "preserve":
        return 1.0 if gain == "unit" else float(gain)
    return float(before.double().norm()) / math.sqrt(before.shape[0] * min(before.shape[-2:]))


# What it makes.


@models
@gains
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_every_singular_value_of_every_head_is_the_gain(
    build: Callable[[], nn.Module], gain: object, dtype: torch.dtype
) -> None:
    """Also B02, B12: every head, whether heads * head_dim is below, at or above the width."""
    model = build().to(dtype)
    if isinstance(model, InputMajorAttention) and gain == "preserve":
        model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    before = {name: heads.clone() for name, heads in heads_of(model).items()}
    report = ck.conditioned_(model, gain=gain, layouts=LAYOUTS)
    after = heads_of(model)
    assert len(report.touched) == len(after) > 0
    for name, heads in after.items():
        wanted = expected_gain(gain, before[name])
        assert heads.dtype == dtype
        assert float((svd(heads)[1] / wanted - 1).abs().max()) <= sigma_tolerance(dtype, heads)
        if gain == "preserve":
            norm = float(before[name].double().norm())
            assert float(heads.double().norm()) == pytest.approx(norm, rel=sigma_tolerance(dtype, heads))
    assert ck.verify(model, report, layouts=LAYOUTS)


@models
def test_the_values_are_those_of_the_documented_stream(build: Callable[[], nn.Module]) -> None:
    """W_Q and W_K of a parameter are semi_orthogonal(seed, its name, the role), whatever else the model holds."""
    model = build()
    report = ck.conditioned_(model, seed=9, layouts=LAYOUTS)
    entries = {f"{entry.layer}/{entry.role}": entry for entry in report.touched}
    for name, heads in heads_of(model).items():
        entry = entries[name]
        if entry.role == "v":
            continue
        expected = ck.semi_orthogonal(tuple(heads.shape), seed=9, key=entry.parameter, role=entry.role)
        assert torch.equal(heads, expected)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("gain", ["unit", 0.25])
@models
def test_a02_b12_the_block_identity_is_exact(build: Callable[[], nn.Module], gain: object, dtype: torch.dtype) -> None:
    """A02, B12: row i of the stacked weight is e_(i mod in_features), exact ones and zeros, and no dead head."""
    model = build().to(dtype)
    report = ck.conditioned_(model, gain={"v": gain}, layouts=LAYOUTS)
    ranks = [entry.stacked_rank for entry in report.touched if entry.role == "v"]
    for heads, rank in zip(by_role(model, "v"), ranks, strict=True):
        stacked = heads.reshape(-1, heads.shape[-1])
        rows = torch.arange(len(stacked))
        expected = torch.zeros_like(stacked)
        expected[rows, rows % stacked.shape[1]] = 1.0 if gain == "unit" else gain
        assert torch.equal(stacked, expected)
        assert rank == min(stacked.shape)


def test_the_four_values_of_v() -> None:
    for value in ("block", "repeat", "semi_orthogonal", "keep"):
        model = packed()
        before = model.in_proj_weight.detach().clone()
        report = ck.conditioned_(model, value=value)
        (v,) = by_role(model, "v")
        entry = {entry.role: entry for entry in report.touched}.get("v")
        if value == "keep":
            assert torch.equal(v.reshape(WIDTH, WIDTH), before[2 * WIDTH :])
            assert entry is None
            assert report.skipped == (("in_proj_weight (v)", "value='keep'"),)
            assert ck.verify(model, report)
            assert ck.verify(model, roles="qk")
            assert not ck.verify(model)
            continue
        assert ck.verify(model)
        if value == "repeat":
            assert torch.equal(v, torch.eye(8, WIDTH).expand(HEADS, 8, WIDTH))
        if value == "semi_orthogonal":
            assert torch.equal(v, ck.semi_orthogonal((HEADS, 8, WIDTH), key="in_proj_weight", role="v"))
        assert entry.stacked_rank == {"block": WIDTH, "repeat": 8, "semi_orthogonal": None}[value]


def test_heads_with_more_rows_than_columns() -> None:
    """The identity fills the first in_features rows; W_Q and W_K get orthonormal columns."""
    model = Free(width=4, heads=2, rows=6)
    ck.conditioned_(model, layouts=LAYOUTS)
    for heads in by_role(model, "v"):
        expected = torch.zeros(2, 6, 4)
        expected[:, :4] = torch.stack((torch.eye(4), torch.eye(4)[[2, 3, 0, 1]]))  # row 6 of the stack is e_2
        assert torch.equal(heads, expected)
    for heads in by_role(model, "q"):
        assert (heads.mT @ heads - torch.eye(4)).abs().max() <= tolerances.orthogonality(torch.float32)


def test_one_head_of_one_by_one() -> None:
    model = nn.MultiheadAttention(1, 1)
    report = ck.conditioned_(model)
    assert model.in_proj_weight.detach().abs().flatten().tolist() == pytest.approx([1, 1, 1])
    assert model.in_proj_weight[2].item() == 1
    assert [float(entry.estimate.kappa) for entry in report.touched] == [1, 1, 1]


def test_b01_packed_and_separate_weights_get_the_same_spectra() -> None:
    """B01: no formula may take a fan from the packed (3d, d) weight."""
    one, other = nn.MultiheadAttention(64, 4), nn.MultiheadAttention(64, 4, kdim=63)
    for model in (one, other):
        ck.conditioned_(model)
        for heads in heads_of(model).values():
            assert float((svd(heads)[1] - 1).abs().max()) <= sigma_tolerance(torch.float32, heads)
        ck.random_(model, kind="xavier")
        (q,) = by_role(model, "q")
        standard_error = math.sqrt(1 / 64 / (2 * q.numel()))
        assert abs(float(q.std()) - math.sqrt(2 / 128)) <= tolerances.sampling(standard_error)


@pytest.mark.parametrize(("width", "heads", "rows"), [(96, 6, 16), (96, 4, 16), (96, 8, 24)], ids=str)
def test_b02_every_head_block_and_not_the_stacked_matrix(width: int, heads: int, rows: int) -> None:
    """B02: the three shapes of the report, heads * head_dim equal to, below and above the width."""
    model = Free(width, heads, rows)
    ck.conditioned_(model, layouts=LAYOUTS)
    for found in heads_of(model).values():
        assert float((svd(found)[1] - 1).abs().max()) < 1e-5


def test_b03_the_model_itself_uses_what_was_written() -> None:
    """The forward probe on torch's own layers; and the value path of one layer on one-hot states, by hand."""
    model = packed(batch_first=True, bias=False)
    ck.conditioned_(model)
    with torch.no_grad():
        model.out_proj.weight.copy_(torch.eye(WIDTH))
        for i in range(WIDTH):
            state = torch.eye(WIDTH)[i].view(1, 1, WIDTH)
            assert torch.equal(model(state, state, state)[0], state)  # one token: softmax is 1, V is I
    layers = encoder()
    ck.conditioned_(layers)
    assert ck.probe(layers, torch.randn(1, 5, WIDTH))


# What it leaves alone.


@pytest.mark.parametrize(
    "build",
    [lambda: packed(bias=False), lambda: packed(add_bias_kv=True), separate, encoder, seq2seq],
    ids=["no bias", "bias_kv", "separate", "encoder", "seq2seq"],
)
def test_b17_only_q_k_and_v_weights_change(build: Callable[[], nn.Module]) -> None:
    model = build()
    before = state(model)
    report = ck.conditioned_(model)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {entry.parameter for entry in report.touched}
    assert all(name.endswith(("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")) for name in changed)


def test_b29_where_chooses_layers() -> None:
    model = seq2seq()
    before = state(model)
    report = ck.conditioned_(model, where=lambda name, module: "decoder" in name and "multihead_attn" in name)
    touched = {entry.layer for entry in report.touched}
    assert touched == {"decoder.layers.0.multihead_attn", "decoder.layers.1.multihead_attn"}
    for name, tensor in model.state_dict().items():
        is_touched = name.rpartition(".")[0] in touched and name.endswith("in_proj_weight")
        assert torch.equal(tensor, before[name]) != is_touched
    assert {name for name, _ in report.skipped} == {
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.1.self_attn",
    }
    assert {reason for _, reason in report.skipped} == {"left out by where"}


@pytest.mark.usefixtures("untouched_rng")
def test_a27_a32_parameters_stay_the_same_objects_and_the_global_state_too() -> None:
    """A27, A32: same Parameter, same storage, requires_grad and hooks kept, version counted, RNG untouched."""
    with torch.random.fork_rng():
        model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = dict(model.named_parameters())
    pointers = {name: p.data_ptr() for name, p in parameters.items()}
    versions = {name: p._version for name, p in parameters.items()}
    report = ck.conditioned_(model)
    for name, p in model.named_parameters():
        assert p is parameters[name]
        assert p.data_ptr() == pointers[name]
        assert p.requires_grad
        assert p.grad_fn is None
        assert (p._version > versions[name]) == (name in {entry.parameter for entry in report.touched})
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not ck.verify(model)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a32_any_ambient_mode(context: Callable[[], object]) -> None:
    expected, model = packed(), packed()
    ck.conditioned_(expected)
    with context():
        ck.conditioned_(model)
        assert ck.verify(model)
    assert torch.equal(model.in_proj_weight, expected.in_proj_weight)
    model(*[torch.ones(2, 1, WIDTH)] * 3)[0].sum().backward()
    assert model.in_proj_weight.grad is not None


def test_a32_inference_tensors_are_refused_by_name() -> None:
    with torch.inference_mode():
        model = encoder()
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn\.in_proj_weight was created under torch\.inference"):
        ck.conditioned_(model)


# What the weights depend on.


@pytest.mark.usefixtures("untouched_rng")
def test_a26_c01_the_same_weights_on_any_route() -> None:
    """A26, C01: built here or on meta and materialized, and called inside any ambient device or default dtype."""
    with torch.random.fork_rng():
        model = packed()
    ck.conditioned_(model, seed=4)
    with torch.device("meta"):
        other = packed()
    assert ck.conditioned_(other, seed=4).deferred
    other.to_empty(device="cpu")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            report = ck.conditioned_(other, seed=4)
            assert ck.verify(other, report)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(other.in_proj_weight, model.in_proj_weight)


def test_a27_seeds_and_generators() -> None:
    def weights(**options: object) -> Tensor:
        model = packed()
        ck.conditioned_(model, **options)
        return model.in_proj_weight.detach()

    assert torch.equal(weights(seed=1), weights(seed=1))
    assert not torch.equal(weights(seed=1)[:WIDTH], weights(seed=2)[:WIDTH])
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    first, again = (weights(generator=generator) for generator in generators)
    assert torch.equal(first, again)
    assert not torch.equal(weights(generator=generators[0])[:WIDTH], first[:WIDTH])
    model = packed()
    report = ck.conditioned_(model, generator=torch.Generator().manual_seed(3))
    assert torch.equal(weights(seed=report.seed), first)  # the report's seed repeats it


def test_b18_cloned_layers_become_different_and_order_does_not_matter() -> None:
    """B18: nn.TransformerEncoder copies one layer; and a deeper model starts with the same layers (C07)."""
    model = encoder()
    assert torch.equal(model.layers[0].self_attn.in_proj_weight, model.layers[1].self_attn.in_proj_weight)
    ck.conditioned_(model)
    everything = torch.cat([torch.cat((q, k)) for q, k in zip(by_role(model, "q"), by_role(model, "k"), strict=True)])
    flat = everything.flatten(1) / math.sqrt(8)
    cosine = flat @ flat.mT - torch.eye(len(flat))
    assert float(cosine.abs().max()) < 6 / math.sqrt(8 * WIDTH)  # Q and K of every head and layer independent
    partial = encoder()
    ck.conditioned_(partial, where=lambda name, module: name.startswith("layers.2"))
    assert torch.equal(partial.layers[2].self_attn.in_proj_weight, model.layers[2].self_attn.in_proj_weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_hold_the_float32_weights_rounded_once(dtype: torch.dtype) -> None:
    model, reference = encoder().to(dtype), encoder()
    ck.conditioned_(model)
    ck.conditioned_(reference)
    for name, heads in heads_of(model).items():
        expected = heads_of(reference)[name]
        if dtype == torch.float64:
            assert (heads - expected).abs().max() <= tolerances.polar(torch.float32, 10, 8)
        else:
            assert torch.equal(heads, expected.to(dtype))


def test_d02_nn_init_patched_to_no_ops_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, model = packed(), packed()
    ck.conditioned_(expected)
    for name in [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]:
        monkeypatch.setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
    ck.conditioned_(model)
    assert torch.equal(model.in_proj_weight, expected.in_proj_weight)


# Layouts a user gives.


def test_b19_d03_any_class_through_layouts() -> None:
    """B19, D03: strided views of never-initialized (heads, in, head_dim) weights; the gate stays."""
    model = nn.Sequential(InputMajorAttention(), Free())
    with pytest.raises(ck.NoAttentionFound, match=r"InputMajorAttention has no layout.*layouts=\{Class: function\}"):
        ck.conditioned_(model)
    report = ck.conditioned_(model, layouts=LAYOUTS)
    assert {entry.parameter for entry in report.touched} == {
        "0.qk",
        "0.v",
        "1.q_proj.weight",
        "1.k_proj.weight",
        "1.v_proj.weight",
    }
    q = model[0].qk[0].detach()  # (heads, in, head_dim): the columns are orthonormal
    assert (q.mT @ q - torch.eye(8)).abs().max() <= tolerances.orthogonality(torch.float32)
    assert (model[0].attention_gate == 1).all()


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (lambda m: {"q": m.q_proj.weight}, "3 or more dimensions"),
        (lambda m: {"q": m.q_proj.weight.unflatten(0, (4, 8)).clone()}, "not a view of a parameter"),
        (lambda m: {"x": m.q_proj.weight.unflatten(0, (4, 8))}, "roles must be among"),
        (lambda m: dict.fromkeys("qk", m.q_proj.weight.unflatten(0, (4, 8))), "overlaps itself or another role"),
        (lambda m: {"q": m.q_proj.weight[None].expand(2, 32, 32)}, "overlaps itself or another role"),
        (lambda m: {"q": torch.zeros(4, 8, 32)}, "not a view of a parameter"),
        (lambda m: {"q": 3}, "must be a tensor"),
    ],
    ids=["matrix", "copy", "role", "twice", "expanded", "stranger", "no tensor"],
)
def test_b19_a_layout_that_does_not_hold_is_refused(layout: Callable, words: str) -> None:
    model = Free()
    before = state(model)
    with pytest.raises(ck.LayoutError, match=words):
        ck.conditioned_(model, layouts={Free: layout})
    assert same(model, before)


# Models it refuses.


def test_b08_nothing_to_do_is_said() -> None:
    """B08: no attention, or only unknown classes, raises and says how to go on; strict=False warns and reports."""
    plain, unknown = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(Free())
    with pytest.raises(ck.NoAttentionFound, match="no attention layer to initialize in Sequential"):
        ck.conditioned_(plain)
    with pytest.raises(ck.NoAttentionFound, match=r"unknown attention: 0: .*Free has no layout"):
        ck.conditioned_(unknown)
    before = state(unknown)
    with pytest.warns(UserWarning, match="no attention layer"):
        report = ck.conditioned_(unknown, strict=False)
    assert same(unknown, before)
    assert report.touched == ()
    assert [name for name, _ in report.unknown] == ["0"]
    assert "unknown 0: class tests.test_conditioned.Free has no layout" in str(report)
    mixed = nn.Sequential(Free(), packed())
    report = ck.conditioned_(mixed, strict=False)
    assert {entry.layer for entry in report.touched} == {"1"}
    assert [name for name, _ in report.unknown] == ["0"]


def test_a_subclass_with_its_own_forward_is_unknown() -> None:
    class Other(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Same(nn.MultiheadAttention):
        pass

    with pytest.raises(ck.NoAttentionFound, match="overrides the forward"):
        ck.conditioned_(Other(8, 2))
    assert ck.conditioned_(Same(8, 2)).touched


def replaced(tensor: Tensor, *, requires_grad: bool = False) -> nn.Module:
    """A module whose q_proj.weight is ``tensor``."""
    model = Free()
    model.q_proj.weight = nn.Parameter(tensor, requires_grad=requires_grad)
    return model


def linear_layout(module: Free) -> tuple[ck.heads.Projection, ...]:
    view = ck.heads.HeadView((HEADS, 8))
    return tuple(ck.heads.Projection(role, f"{role}_proj.weight", view) for role in "qkv")


@pytest.mark.parametrize(
    ("tensor", "error", "words"),
    [
        (torch.zeros(32, 32, dtype=torch.uint8), TypeError, r"q_proj\.weight must have one of the dtypes.*uint8"),
        (torch.zeros(32, 32, dtype=torch.int8), TypeError, r"q_proj\.weight must.*got int8"),
        (torch.zeros(32, 32).to(torch.float8_e5m2), TypeError, r"q_proj\.weight must.*float8_e5m2"),
        (torch.zeros(32, 32, dtype=torch.complex64), TypeError, r"q_proj\.weight must.*complex64"),
        (torch.zeros(1024), ck.LayoutError, r"shape \(1024,\)"),
        (torch.zeros(0), ck.LayoutError, r"shape \(0,\)"),
        (torch.zeros(24, 32), ck.LayoutError, "expected 4 x 8 = 32 output rows"),
        (torch.zeros(1, 32).expand(32, 32), ValueError, r"q_proj\.weight has elements that share memory"),
        (torch.zeros(32, 32), ValueError, r"q_proj\.weight is frozen.*include_frozen=True"),
    ],
    ids=["uint8", "int8", "float8", "complex", "flat", "placeholder", "rows", "expanded", "frozen"],
)
def test_b25_b26_c08_c10_weights_that_cannot_be_written(tensor: Tensor, error: type[Exception], words: str) -> None:
    """B25, B26, C08, C10: quantized, flat, empty placeholder, wrong shape, overlapping, frozen: named and refused."""
    model = replaced(tensor)
    before = state(model)
    with pytest.raises(error, match=words):
        ck.conditioned_(model, layouts={Free: linear_layout})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_c10_a_placeholder_in_multihead_attention_is_no_harmless_no_op() -> None:
    model = packed()
    model.in_proj_weight = nn.Parameter(torch.empty(0))
    with pytest.raises(ck.LayoutError, match=r"in_proj_weight.*GatheredParameters"):
        ck.conditioned_(model)


def test_b25_frozen_weights_on_request() -> None:
    model = packed().requires_grad_(False)
    assert ck.conditioned_(model, include_frozen=True).touched
    assert not model.in_proj_weight.requires_grad
    assert ck.verify(model)


def test_tied_weights_cannot_have_two_values_and_shared_modules_are_visited_once() -> None:
    tied = Free()
    tied.k_proj.weight = tied.q_proj.weight
    before = state(tied)
    with pytest.raises(ValueError, match=r"shares its memory with.*untie them"):
        ck.conditioned_(tied, layouts={Free: linear_layout})
    assert same(tied, before)
    layer = packed()
    report = ck.conditioned_(nn.ModuleList([layer, layer]))
    assert {entry.layer for entry in report.touched} == {"0"}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"gain": 0}, ValueError, r"gain\['q'\] must be a positive finite number, got 0"),
        ({"gain": -2.0}, ValueError, "must be a positive finite number"),
        ({"gain": math.inf}, ValueError, "must be a positive finite number"),
        ({"gain": "half"}, ValueError, "must be one of 'unit', 'preserve', 'calibrated', got 'half'"),
        ({"gain": {"o": 1.0}}, ValueError, r"gain may name the roles 'q', 'k' and 'v', got \['o'\]"),
        ({"gain": {"k": math.nan}}, ValueError, r"gain\['k'\] must be"),
        ({"value": "identity"}, ValueError, "value must be one of 'block', 'repeat', 'semi_orthogonal', 'keep'"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options: dict[str, object], error: type[Exception], words: str) -> None:
    model = packed()
    before = state(model)
    with pytest.raises(error, match=words):
        ck.conditioned_(model, **options)
    assert same(model, before)


@pytest.mark.parametrize("function", [ck.conditioned_, ck.random_, ck.verify])
def test_something_that_is_no_module_is_refused(function: Callable) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got Tensor"):
        function(torch.eye(3))


def test_a20_preserve_needs_a_norm_and_names_the_head() -> None:
    model = packed()
    with torch.no_grad():
        model.in_proj_weight[WIDTH + 9, 5] = math.inf  # K, head 1
    before = state(model)
    with pytest.raises(ValueError, match=r"in_proj_weight \(k\): .*non-finite input in heads \[1\]"):
        ck.conditioned_(model, gain="preserve")
    assert same(model, before)
    ck.conditioned_(model)  # a given gain needs no old values
    assert ck.verify(model)
    with torch.no_grad():
        model.in_proj_weight.zero_()
    with pytest.raises(ValueError, match=r"in_proj_weight \(q\).*all zeros"):
        ck.conditioned_(model, gain="preserve")


# Atomicity.


class Injected(Exception):
    pass


@pytest.mark.parametrize("error", [Injected, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(
    ("place", "call"),
    [
        ((CONDITIONED, "semi_orthogonal"), 3),
        ((CONDITIONED, "identity_heads"), 2),
        ((apply, "measure"), 5),
        ((writing, "write"), 1),
        ((writing, "write"), 5),
        ((writing, "write"), 9),
    ],
    ids=["sampling", "identity", "measuring", "first write", "middle write", "last write"],
)
def test_a_failure_leaves_the_model_bit_identical(
    place: tuple[object, str], call: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also Ctrl-C, also half-way through one write."""
    model = encoder()
    before = state(model)
    original = getattr(*place)
    calls = 0

    def failing(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            if place[1] == "write":
                target, [(_, heads)] = args
                target.heads[: HEADS // 2].copy_(heads[: HEADS // 2])  # half written when it happens
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(*place, failing)
    with pytest.raises(error):
        ck.conditioned_(model)
    assert calls >= call
    assert same(model, before)
    assert not any(hasattr(p, writing.MARK) for p in model.parameters())
    monkeypatch.undo()
    assert ck.verify(model, ck.conditioned_(model))


def test_a_refused_layer_late_in_the_model_stops_before_the_first_write() -> None:
    model = encoder()
    model.layers[2].self_attn.in_proj_weight.requires_grad_(False)
    before = state(model)
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn\.in_proj_weight is frozen"):
        ck.conditioned_(model)
    assert same(model, before)


class NoInverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Lossy(NoInverse):
    def right_inverse(self, x: Tensor) -> Tensor:
        return x


class Exact(NoInverse):
    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


def test_b27_parametrized_weights_are_assigned_and_read_back() -> None:
    """B27: a write into the recomputed weight is lost; without a right inverse that holds, refuse and undo."""
    for cls, words in ((NoInverse, "cannot be assigned"), (Lossy, "does not hold the assigned value")):
        model = encoder()
        parametrize.register_parametrization(model.layers[1].self_attn, "in_proj_weight", cls())
        before = state(model)
        with pytest.raises(ValueError, match=rf"layers\.1\.self_attn\.in_proj_weight is parametrized and {words}"):
            ck.conditioned_(model)
        assert same(model, before)  # layer 0, written before the refusal, too
    model = encoder()
    parametrize.register_parametrization(model.layers[1].self_attn, "in_proj_weight", Exact())
    assert ck.verify(model, ck.conditioned_(model))
    weight = model.layers[1].self_attn.in_proj_weight.detach()[:WIDTH].view(HEADS, 8, WIDTH)
    assert float((svd(weight)[1] - 1).abs().max()) <= sigma_tolerance(torch.float32, weight)


# The report.


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_the_report_is_what_the_model_holds(dtype: torch.dtype) -> None:
    model = encoder().to(dtype)
    report = ck.conditioned_(model, seed=3, gain={"q": 0.5, "k": "unit", "v": 2.0})
    entries = {f"{entry.layer}/{entry.role}": entry for entry in report.touched}
    assert list(entries) == list(heads_of(model))
    for name, heads in heads_of(model).items():
        entry, s = entries[name], svd(heads)[1]
        assert (entry.heads, entry.head_dim, entry.in_features, entry.dtype) == (HEADS, 8, WIDTH, dtype)
        assert entry.gain == {"q": 0.5, "k": 1.0, "v": 2.0}[entry.role]
        assert entry.made == ("identity, block" if entry.role == "v" else "semi-orthogonal")
        assert (entry.estimate.low <= s[:, 0] / s[:, -1]).all()
        assert (s[:, 0] / s[:, -1] <= entry.estimate.high).all()
        assert torch.allclose(entry.estimate.sigma_max, s[:, 0], rtol=1e-5)
    assert (report.scheme, report.seed, report.skipped, report.unknown) == ("conditioned", 3, (), ())
    rows = report.rows()
    assert len(rows) == 3 * 3 * HEADS
    assert set(rows[0]) == {"layer", "parameter", "role", "head", "sigma_max", "sigma_min", "kappa", "low", "high"}
    assert [row["head"] for row in rows[:5]] == [0, 1, 2, 3, 0]
    assert "36 head matrices in 9 projections of 3 attention layers" in str(report)
    kappa = max(row["kappa"] for row in rows) - 1
    assert kappa < (tolerances.eps(dtype) if dtype in tolerances.HALF else 2 * tolerances.sigma(dtype, 8))


# verify.


def test_verify_names_what_no_longer_holds() -> None:
    model = encoder()
    report = ck.conditioned_(model)
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight[WIDTH + 17, 3] += 0.1  # K, head 2
    outcome = ck.verify(model, report)
    assert not outcome
    assert len(outcome.failures) == 1
    assert outcome.failures[0].startswith("layers.1.self_attn.in_proj_weight (k): head 2 has sigma_max")
    assert "8 of 9 projections hold" in str(outcome)


def test_c03_verify_sees_a_wrong_scale_that_kappa_does_not() -> None:
    """C03: two column shards done separately have kappa 1 and sigma sqrt(2)."""
    model = packed()
    report = ck.conditioned_(model)
    with torch.no_grad():
        model.in_proj_weight[:WIDTH] *= math.sqrt(2)
    assert not ck.verify(model, report)
    assert not ck.verify(model)
    assert ck.verify(model, gain="any")
    with torch.no_grad():
        model.in_proj_weight.mul_(3)
        model.in_proj_weight[:WIDTH] /= math.sqrt(2)
    assert ck.verify(model, gain=3.0)
    assert not ck.verify(model, gain=2.9999)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_verify_fails_on_broken_weights(value: float) -> None:
    model = packed()
    ck.conditioned_(model)
    with torch.no_grad():
        model.in_proj_weight[:8] = value
    for gain in ("unit", "any"):
        assert any("(q): head 0" in failure for failure in ck.verify(model, gain=gain).failures)


@pytest.mark.parametrize(("made", "now"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_verify_asks_no_more_than_the_dtype_that_the_weights_were_made_in(made: torch.dtype, now: torch.dtype) -> None:
    """Cast up after the call, as master weights are; a head that is off by more still fails."""
    model = nn.TransformerEncoderLayer(64, 4, 8, batch_first=True).to(made)
    report = ck.conditioned_(model, gain=0.3)
    model.to(now)
    assert ck.verify(model, report).ok
    assert not ck.verify(model, gain=0.3).ok, "without the report its dtype is not known"
    with torch.no_grad():
        model.self_attn.in_proj_weight[:16] *= 1 + 2 * (torch.finfo(made).eps if made == torch.bfloat16 else 1e-5)
    assert len(ck.verify(model, report).failures) == 1


def test_verify_refuses_the_report_of_another_model() -> None:
    report = ck.conditioned_(encoder())
    with pytest.raises(ValueError, match=r"report is of another model: it has layers\.0\.self_attn\.in_proj_weight"):
        ck.verify(packed(), report)
    for options, words in (({"gain": "all"}, "gain must be one of"), ({"gain": -1.0}, "gain must be a positive")):
        with pytest.raises(ValueError, match=words):
            ck.verify(packed(), **options)


def test_verify_only_reads() -> None:
    model = encoder()
    before = state(model)
    versions = [p._version for p in model.parameters()]
    assert not ck.verify(model)
    assert same(model, before)
    assert [p._version for p in model.parameters()] == versions


# The random baselines.


@pytest.mark.parametrize(
    ("kind", "std"),
    [
        ("trunc_normal", 0.02),
        ("xavier", math.sqrt(2 / (2 * 256))),
        ("kaiming", math.sqrt(2 / 256)),
    ],
)
def test_random_kinds_have_their_standard_deviation(kind: str, std: float) -> None:
    model = nn.MultiheadAttention(256, 4)
    report = ck.random_(model, kind=kind, seed=2)
    for heads in heads_of(model).values():
        normal = heads.double() / std
        assert abs(float(normal.std()) - 1) <= tolerances.sampling(math.sqrt(0.5 / heads.numel()))
        assert abs(float(normal.mean())) <= tolerances.sampling(math.sqrt(1 / heads.numel()))
        assert abs(float((normal**4).mean()) - 3) <= tolerances.sampling(math.sqrt(96 / heads.numel()))
    flat = torch.stack([heads.flatten() for heads in heads_of(model).values()])
    assert float((torch.corrcoef(flat) - torch.eye(3)).abs().max()) <= tolerances.sampling(1 / 256)
    assert report.scheme == f"random, {kind}"
    assert all(math.isnan(entry.gain) for entry in report.touched)
    assert not ck.verify(model)


def test_random_orthogonal_is_per_head_and_for_v_too() -> None:
    model = packed()
    report = ck.random_(model, kind="orthogonal")
    for heads in heads_of(model).values():
        assert float((svd(heads)[1] - 1).abs().max()) <= sigma_tolerance(torch.float32, heads)
    assert ck.verify(model, report)
    other = packed()
    ck.conditioned_(other)
    assert not torch.equal(other.in_proj_weight[:WIDTH], model.in_proj_weight[:WIDTH])  # a baseline of its own


@pytest.mark.usefixtures("untouched_rng")
@pytest.mark.parametrize("kind", ["trunc_normal", "xavier", "kaiming", "orthogonal"])
def test_random_is_reproducible_and_takes_the_same_care(kind: str) -> None:
    with torch.random.fork_rng():
        model = encoder()
    other = copy.deepcopy(model)
    before = state(model)
    ck.random_(model, kind=kind, seed=6)
    ck.random_(other, kind=kind, seed=6)
    assert same(other, state(model))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"layers.{i}.self_attn.in_proj_weight" for i in range(3)}
    ck.random_(other, kind=kind, seed=7)
    assert not same(other, state(model))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "normal"}, "kind must be one of 'trunc_normal'"),
        ({"std": 0.0}, "std must be a positive"),
        ({"std": 0.31}, r"std must be at most 0\.3"),
    ],
    ids=str,
)
def test_random_arguments_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ck.random_(packed(), **options)


def test_registered_layouts_serve_every_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    discover = sys.modules["conditioned_kernels.heads.discover"]
    monkeypatch.setattr(discover, "_REGISTERED", {})
    ck.register_layout(Free, Free.views)
    model = Free()
    assert ck.verify(model, ck.conditioned_(model))
    for cls, layout in ((3, Free.views), (int, Free.views), (Free, "views")):
        with pytest.raises(TypeError, match=r"must be"):
            ck.register_layout(cls, layout)


def test_verify_sees_one_singular_value_that_is_slightly_off() -> None:
    """A head is judged by the far ends of its brackets, which must be tighter than what is being looked for."""
    model = nn.MultiheadAttention(256, 4)
    ck.conditioned_(model)
    assert ck.verify(model).ok
    with torch.no_grad():
        head = model.in_proj_weight[64:128]  # head 1 of W_Q
        u, s, vh = torch.linalg.svd(head.double(), full_matrices=False)
        s[7] *= 1.0003
        head.copy_((u * s) @ vh)
    report = ck.verify(model)
    assert not report.ok
    assert "head 1 has" in report.failures[0]
    assert len(report.failures) == 1
