"""Mimetic initialization: the products against the exact truncated SVD of the same targets, and their statistics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conditioned_kernels as ck
from conditioned_kernels.heads import AttentionLayer, find_attention
from conditioned_kernels.initialize.mimetic import EXACT, balanced_factors
from conditioned_kernels.initialize.positions import sinusoids
from conditioned_kernels.sampling import philox_normal, stream_key

from . import tolerances
from .models import BERT, CASES, bert, torch_attention, torch_layer

FORMS = (
    "torch-mha",
    "torch-mha-separate",
    "timm-vit",
    "timm-vit-wide-heads",
    "timm-vit-head-over-width",
    "timm-rope-grouped",
    "timm-swin",
    "timm-coatnet",
    "timm-levit-down",
    "timm-xcit",
    "bert",
    "bert-cross",
    "gpt2",
    "gpt2-cross",
    "gpt_neox",
    "codegen",
    "falcon-multi-query",
    "falcon-groups",
    "t5",
    "llama",
    "qwen3",
    "qwen3_next",
    "longformer",
)
SEED = 5


def build(name: str) -> nn.Module:
    case = next(case for case in CASES if case.name == name)
    if case.missing:
        pytest.skip(case.missing)
    torch.manual_seed(0)
    return case.build()[0]


def heads(layer: AttentionLayer, label: str) -> Tensor:
    """(heads, rows, columns) in float64."""
    every = (*layer.projections, *([layer.output] if layer.output else ()))
    projection = next(each for each in every if each.label == label)
    view = projection.view(layer.weight(projection).detach())
    return view.reshape(-1, *view.shape[-2:]).double()


def name_of(layer: AttentionLayer, label: str) -> str:
    every = (*layer.projections, *([layer.output] if layer.output else ()))
    return layer.parameter_name(next(each for each in every if each.label == label))


def target(name: str, label: str, head: int, rows: int, cols: int, alpha: float, beta: float) -> Tensor:
    """alpha Z / sqrt(D) + beta I once more, from the definition of the sample stream."""
    key = stream_key(SEED, name, f"mimetic/{label}")
    z = philox_normal(key, range(head, head + 1), range(rows * cols)).view(rows, cols).double()
    return alpha * z / math.sqrt(max(rows, cols)) + beta * torch.eye(rows, cols, dtype=torch.float64)


def truncated(whole: Tensor, rank: int) -> Tensor:
    """The best approximation of that rank, by LAPACK in float64."""
    u, s, vh = torch.linalg.svd(whole, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def close(found: Tensor, wanted: Tensor, whole: Tensor, rank: int) -> bool:
    """Within rounding of the factors, which the distance to the next singular value magnifies."""
    s = torch.linalg.svdvals(whole)
    gap = float(s[rank - 1] - s[rank]) if rank < len(s) else float(s[0])
    allowed = 100 * tolerances.eps(torch.float32) * float(s[0]) * max(1.0, float(s[0]) / gap)
    return float((found - wanted).abs().max()) <= allowed


@pytest.mark.parametrize("name", FORMS)
def test_products_are_the_truncated_svd_of_their_targets(name: str) -> None:
    """Every storage form, grouped heads, memory of another width, and head_dim * heads other than the width."""
    model = build(name)
    qk, vo = (0.6, 0.8), (0.3, 0.5)
    report = ck.mimetic_(model, qk=qk, vo=vo, seed=SEED)
    assert {entry.role for entry in report.touched} == {"q", "k", "v", "o"}
    for layer in find_attention(model).layers:
        parts = ["", ".global"] if name == "longformer" else [""]
        for part in parts:
            q, k = heads(layer, f"q{part}"), heads(layer, f"k{part}")
            group, rows = len(q) // len(k), q.shape[1]
            for j, key in enumerate(k):
                mine = range(j * group, (j + 1) * group)
                whole = torch.cat(
                    [target(name_of(layer, f"q{part}"), f"q{part}", i, q.shape[2], k.shape[2], *qk) for i in mine]
                )
                found = torch.cat([q[i].mT @ key for i in mine])
                assert close(found, truncated(whole, rows), whole, min(rows, *whole.shape)), (layer.name, j)
                # Of all factors of this product, those of the smallest norm are as large as each other.
                stacked, one = (float(torch.linalg.vector_norm(x)) for x in (q[mine.start : mine.stop], key))
                assert stacked == pytest.approx(one, rel=1e-4)
        for part in parts:
            v, o = heads(layer, f"v{part}"), heads(layer, "o")
            group = len(o) // len(v)
            whole = target(name_of(layer, "o"), "o", 0, v.shape[2], o.shape[2], vo[0], -vo[1])
            found = torch.einsum("hri,hro->io", v.repeat_interleave(group, 0), o)
            rank = min(len(v) * v.shape[1], *whole.shape)
            assert close(found, truncated(whole, rank), whole, rank), layer.name
            assert float(v.norm()) == pytest.approx(float(o.norm()), rel=1e-4)
            assert (v.flatten(1).norm(dim=1) > 0.05).all(), "a dead head"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["timm-vit", "gpt2", "llama"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    model, reference = build(name).to(dtype), build(name).double()
    ck.mimetic_(model, seed=SEED)
    ck.mimetic_(reference, seed=SEED)
    for (_, one), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert one.dtype == dtype
        assert torch.allclose(one.double(), other, rtol=tolerances.eps(dtype), atol=2e-2 * tolerances.eps(dtype) ** 0.5)


def test_statistics_of_the_full_products() -> None:
    """Diagonals beta and -beta, the rest alpha / sqrt(D), within sampling error (one head, so nothing is truncated)."""
    width = 96
    model = nn.MultiheadAttention(width, 1)
    (alpha1, beta1), (alpha2, beta2) = qk, vo = (0.7, 0.5), (0.4, 0.3)
    ck.mimetic_(model, qk=qk, vo=vo)
    (layer,) = find_attention(model).layers
    products = {
        (alpha1, beta1): heads(layer, "q")[0].mT @ heads(layer, "k")[0],
        (alpha2, -beta2): heads(layer, "v")[0].mT @ heads(layer, "o")[0],
    }
    for (alpha, beta), product in products.items():
        diagonal = product.diagonal()
        rest = product[~torch.eye(width, dtype=torch.bool)]
        std = alpha / math.sqrt(width)
        assert float(diagonal.mean()) == pytest.approx(beta, abs=tolerances.sampling(std / math.sqrt(width)))
        assert float(rest.mean()) == pytest.approx(0, abs=tolerances.sampling(std / width))
        assert float(rest.std()) == pytest.approx(std, abs=tolerances.sampling(std / math.sqrt(2 * rest.numel())))
        assert float(diagonal.std()) == pytest.approx(std, abs=tolerances.sampling(std / math.sqrt(2 * width)))


def test_whole_value_output_product_of_many_heads() -> None:
    """The paper's setting, h d = D: W_V W_O is the target itself, diagonal and all."""
    model = build("timm-vit")
    ck.mimetic_(model, vo=(0.4, 0.4), seed=SEED)
    for block in model.blocks:
        value = block.attn.qkv.weight[32:].double()
        product = value.mT @ block.attn.proj.weight.mT.double()
        index = list(model.blocks).index(block)
        wanted = target(f"blocks.{index}.attn.proj.weight", "o", 0, 16, 16, 0.4, -0.4)
        assert torch.allclose(product, wanted, atol=1e-5)


@pytest.mark.parametrize(("cols", "rank", "stack"), [(EXACT + 76, 32, 1), (EXACT + 76, 16, 2)])
def test_wide_matrices_by_block_krylov(cols: int, rank: int, stack: int) -> None:
    """The product's error exceeds the best one by less than 0.1 %, and no singular value is off by more than 2 %."""
    z = torch.randn(stack * cols, cols, generator=torch.Generator().manual_seed(1))
    whole = 0.7 * z / math.sqrt(cols) + 0.7 * torch.eye(cols).repeat(stack, 1)
    left, right = balanced_factors(whole, rank, key=7)
    sigma = torch.linalg.eigvalsh(whole.double().mT @ whole.double()).flip(0)
    best = float(sigma[rank:].sum().sqrt())
    error = float(torch.linalg.matrix_norm((whole - left @ right).double()))
    assert best * (1 - 1e-5) <= error <= best * 1.001
    found = torch.linalg.vector_norm(right, dim=1).square()
    assert torch.allclose(found.double(), sigma[:rank].sqrt(), rtol=0.02)
    assert torch.allclose(left.mT @ left, right @ right.mT, atol=1e-4), "the factors are not balanced"
    again = balanced_factors(whole, rank, key=7)
    assert all(torch.equal(a, b) for a, b in zip((left, right), again, strict=True))


def test_a_rank_above_the_short_side_is_spread_evenly() -> None:
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    left, right = balanced_factors(whole, 10)
    assert (left.shape, right.shape) == ((6, 10), (10, 4))
    assert torch.allclose(left @ right, whole, atol=1e-5)
    assert torch.allclose(left[:, 0], left[:, 4], atol=0)
    assert (left.norm(dim=0) > 0).all()


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_only_what_is_asked_for_changes() -> None:
    model, *_ = bert()
    before = state(model)
    weights = {
        role: {f"encoder.layer.{i}.attention.{name}.weight" for i in range(2) for name in names}
        for role, names in {"qk": ("self.query", "self.key"), "vo": ("self.value", "output.dense")}.items()
    }
    report = ck.mimetic_(model, vo=None)
    assert changed(model, before) == weights["qk"]
    assert {reason for _, reason in report.skipped} == {"vo=None"}
    model.load_state_dict(before)
    ck.mimetic_(model, qk=None)
    assert changed(model, before) == weights["vo"]
    model.load_state_dict(before)
    ck.mimetic_(model, where=lambda name, _: "layer.1" in name)
    assert changed(model, before) == {name for group in weights.values() for name in group if "layer.1" in name}


def test_values_depend_on_seed_and_name_alone(untouched_rng: None) -> None:
    """A27, B18: not on the order or number of layers, nor on what was there; torch's random state is not touched."""
    with torch.random.fork_rng():
        one, other = bert()[0], bert()[0]
    ck.mimetic_(one, seed=3)
    first = state(one)
    ck.mimetic_(one, seed=3)
    assert not changed(one, first)
    ck.mimetic_(other, seed=3, where=lambda name, _: "layer.1" in name)
    name = "encoder.layer.1.attention.output.dense.weight"
    assert torch.equal(other.state_dict()[name], first[name])
    assert not torch.equal(first[name], first[name.replace("layer.1", "layer.0")])
    ck.mimetic_(one, seed=4)
    assert len(changed(one, first)) == 8
    ck.mimetic_(one, generator=torch.Generator().manual_seed(0))
    drawn = state(one)
    ck.mimetic_(other, generator=torch.Generator().manual_seed(0))
    assert torch.equal(other.state_dict()[name], drawn[name])


# --- positions -----------------------------------------------------------------------------------------------------

TABLES = {
    "timm-vit": ["pos_embed"],
    "bert": ["embeddings.position_embeddings.weight"],
    "gpt2": ["wpe.weight"],
    "vit": ["embeddings.position_embeddings"],
    "bart": ["decoder.embed_positions.weight", "encoder.embed_positions.weight"],
}


@pytest.mark.parametrize("name", TABLES)
def test_sinusoidal_positions(name: str) -> None:
    """The formula, element by element, in the table that the forward adds."""
    model, tables = build(name), TABLES[name]
    before = state(model)
    report = ck.mimetic_(model, positions="sinusoidal")
    assert sorted(report.others) == tables
    assert {entry.role for entry in report.touched} == {"q", "k", "v", "o"}
    for path in tables:
        table = model.get_parameter(path).detach()
        table = table.reshape(-1, table.shape[-1])
        for p in range(min(12, len(table))):
            for c in range(table.shape[1]):
                angle = p / 10000 ** (2 * (c // 2) / table.shape[1])
                wanted = math.cos(angle) if c % 2 else math.sin(angle)
                assert float(table[p, c]) == pytest.approx(wanted, abs=1e-6)
    model.load_state_dict(before)
    ck.mimetic_(model, positions=tables[0])
    assert tables[0] in changed(model, before)
    assert not set(tables[1:]) & changed(model, before)
    model.load_state_dict(before)
    ck.mimetic_(model)
    assert not set(tables) & changed(model, before)


def test_sinusoids_of_an_odd_width() -> None:
    table = sinusoids(torch.empty(1, 3, 5))
    assert table.shape == (1, 3, 5)
    assert float(table[0, 2, 4]) == pytest.approx(math.sin(2 / 10000 ** (4 / 5)))


@pytest.mark.parametrize(
    ("make", "positions", "message"),
    [
        (lambda: build("llama"), "sinusoidal", r"LlamaModel has no learned table of absolute positions"),
        (lambda: build("t5"), "sinusoidal", r"T5Model has no learned table"),
        (lambda: bert()[0], "position_embeddings", r"BertModel has no parameter 'position_embeddings'"),
        (lambda: bert()[0], "embeddings.LayerNorm.weight", r"must be a table \(positions, width\)"),
    ],
    ids=["llama", "t5", "name", "shape"],
)
def test_models_without_such_a_table_are_refused(make: Any, positions: str, message: str) -> None:
    model = make()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        ck.mimetic_(model, positions=positions)
    assert not changed(model, before)


# --- refusals ------------------------------------------------------------------------------------------------------


def without_output() -> nn.Module:
    model = bert()[0]
    model.encoder.layer[1].attention.output.dense = nn.Linear(12, 16)
    return model


def alone() -> nn.Module:
    return bert()[0].encoder.layer[0].attention.self


def tied_keys() -> nn.Module:
    model = bert()[0]
    first, second = (layer.attention.self for layer in model.encoder.layer)
    second.key.weight = first.key.weight
    return model


def frozen_output() -> nn.Module:
    model = bert()[0]
    model.encoder.layer[1].attention.output.dense.weight.requires_grad_(False)
    return model


def loaded_output() -> nn.Module:
    model = bert()[0]
    model.encoder.layer[1].attention.output.dense.weight._is_hf_initialized = True
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: build("deepseek_v2"), {}, r"layers.0.self_attn .* has low-rank attention"),
        (
            without_output,
            {},
            r"W_O of encoder.layer.1.attention.self .* is not known: .*expected 4 x 4 = 16.* with 12; .*vo=None",
        ),
        (alone, {}, r"W_O of the model itself .* beside the module"),
        (tied_keys, {}, r"encoder.layer.1.attention.self.query.weight \(q\): its partner 'k' is tied"),
        (frozen_output, {}, r"encoder.layer.1.attention.output.dense.weight is frozen"),
        (loaded_output, {}, r"encoder.layer.1.attention.output.dense.weight was loaded"),
        (lambda: bert()[0], {"qk": (0, 0)}, r"qk must be None or \(alpha, beta\)"),
        (lambda: bert()[0], {"vo": (0.4, -0.4)}, r"vo must be None or"),
        (lambda: bert()[0], {"vo": (0.4,)}, r"vo must be None or"),
        (lambda: bert()[0], {"vo": 0.4}, r"vo must be None or"),
        (lambda: nn.Linear(2, 2), {}, r"no attention layer"),
    ],
    ids=["mla", "shape", "alone", "tied", "frozen", "loaded", "zero", "negative", "one", "number", "none"],
)
def test_refused_by_name_and_bit_identical(make: Any, options: dict[str, Any], message: str) -> None:
    model = make()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        ck.mimetic_(model, **options)
    assert not changed(model, before)


def test_meta_model_gets_the_same_weights_once_it_has_memory() -> None:
    model, deferred = bert()[0], bert()[0].to("meta")
    written = {entry.parameter for entry in ck.mimetic_(model, seed=3).touched}
    ck.mimetic_(deferred, seed=3)
    ck.materialize_(deferred, "cpu")
    values = deferred.state_dict()
    assert written and all(torch.equal(values[name], model.state_dict()[name]) for name in written)


def test_what_was_refused_can_be_left_out_or_allowed() -> None:
    assert len(ck.mimetic_(without_output(), vo=None).touched) == 4
    assert len(ck.mimetic_(alone(), vo=None).touched) == 2
    assert len(ck.mimetic_(frozen_output(), include_frozen=True).touched) == 8
    assert len(ck.mimetic_(loaded_output(), overwrite=True).touched) == 8
    assert {entry.role for entry in ck.mimetic_(build("detr-map")).touched} == {"q", "k"}


def test_projections_of_relative_positions_are_left_alone() -> None:
    model = build("deberta_v2-positions")
    before = state(model)
    report = ck.mimetic_(model)
    assert not any("pos_" in name for name in changed(model, before))
    assert sum("relative positions" in reason for _, reason in report.skipped) == 4


def test_a_write_that_fails_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from conditioned_kernels.initialize import writing

    model, *_ = bert()
    before = state(model)
    write, calls = writing.write, []

    def failing(target: Any, *rest: Any) -> None:
        calls.append(target.name)
        write(target, *rest)
        if len(calls) == 7:
            raise RuntimeError("disk on fire")

    monkeypatch.setattr(writing, "write", failing)
    with pytest.raises(RuntimeError, match="disk on fire"):
        ck.mimetic_(model)
    assert any("output.dense" in name for name in calls)
    assert not changed(model, before)


def test_life_cycle_of_w_o() -> None:
    """D01: transformers leaves W_O and positions alone once they are written, and verify knows the report's model."""
    model, *_ = bert()
    report = ck.mimetic_(model, positions="sinusoidal")
    before = state(model)
    model.init_weights()
    model.apply(model._init_weights)
    written = {entry.parameter for entry in report.touched} | set(report.others)
    assert len(written) == 9
    assert not written & changed(model, before)
    # Mimetic heads do not have kappa 1, which is what verify tells, of every projection of the report.
    qkvo = ck.mimetic_(bert()[0])
    checked = ck.verify(model, qkvo)
    assert len(checked.measured) == len(qkvo.touched) == 8
    assert not checked.ok


def test_cross_attention_over_a_memory_of_another_width() -> None:
    model, *_ = torch_attention(12, kdim=12, vdim=12)
    ck.mimetic_(model, qk=(0.0, 0.5), vo=(0.0, 0.5))
    (layer,) = find_attention(model).layers
    product = torch.einsum("hri,hro->io", heads(layer, "v"), heads(layer, "o"))
    assert torch.allclose(product, -0.5 * torch.eye(12, 16, dtype=torch.float64), atol=1e-5)


def test_training_mode_forward_is_finite() -> None:
    model = torch_layer("TransformerEncoderLayer")[0]
    ck.mimetic_(model)
    loss = model(torch.randn(2, 5, 16)).square().mean()
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert BERT["hidden_size"] == 16
