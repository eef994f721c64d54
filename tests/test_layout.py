"""Storage forms: which rows of which weight are a head, on shapes where a wrong answer is quiet."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import conditioned_kernels as ck
from conditioned_kernels.heads import (
    FAMILIES,
    Blocked,
    Choose,
    Grouped,
    Interleaved,
    LayoutError,
    Sections,
    Separate,
    from_shard,
    shard_views,
    support_rows,
    support_table,
)
from conditioned_kernels.heads.layout import from_views
from conditioned_kernels.heads.mechanics import REFUSED
from conditioned_kernels.initialize.conditioned import identity_heads
from conditioned_kernels.initialize.target import resolve

from .models import deepseek, falcon, hf, torch_attention

transformers = pytest.importorskip("transformers")


def spectrum(heads: Tensor) -> Tensor:
    return torch.linalg.svdvals(heads.reshape(-1, *heads.shape[-2:]).double())


def heads_of(model: nn.Module, role: str, layer: int = 0) -> Tensor:
    found = ck.find_attention(model)
    found = type(found)((found.layers[layer],), (), ())
    return next(target.heads for target in resolve(found) if target.stream_role == role)


def is_one(values: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((values - 1).abs().max() < tolerance)


class Packed(nn.Module):
    """heads of head_dim rows on ``width`` features, one fused weight."""

    def __init__(self, width: int, heads: int, head_dim: int, kv_heads: int = 0, form: str = "blocked") -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.shards = heads, kv_heads or heads, head_dim, 2
        self.weight = nn.Parameter(torch.randn((heads + 2 * self.kv_heads) * head_dim, width))


def rows_of(module: nn.Module, layout: object) -> dict[str, list[list[int]]]:
    """Per role, per head, the numbers of the rows."""
    count = torch.arange(module.weight.shape[0])[:, None].expand(module.weight.shape).contiguous()
    return {
        each.role: each.view(count)[..., 0].reshape(-1, each.view(count).shape[-2]).tolist()
        for each in layout(module)  # type: ignore[operator]
    }


def test_rows_of_every_fused_form() -> None:
    module = Packed(4, heads=4, head_dim=2)
    assert rows_of(module, Blocked("weight", "heads"))["k"] == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert rows_of(module, Blocked("weight", head_dim="head_dim"))["v"][0] == [16, 17]
    assert rows_of(module, Interleaved("weight", "heads"))["k"] == [[2, 3], [8, 9], [14, 15], [20, 21]]
    sharded = rows_of(module, Interleaved("weight", "heads", "qvk", shards="shards"))
    assert sharded["q"] == [[0, 1], [2, 3], [12, 13], [14, 15]]
    assert sharded["v"] == [[4, 5], [6, 7], [16, 17], [18, 19]]
    assert sharded["k"] == [[8, 9], [10, 11], [20, 21], [22, 23]]
    grouped = Packed(4, heads=4, head_dim=2, kv_heads=2)
    assert rows_of(grouped, Grouped("weight", "heads", "kv_heads")) == {
        "q": [[0, 1], [2, 3], [8, 9], [10, 11]],
        "k": [[4, 5], [12, 13]],
        "v": [[6, 7], [14, 15]],
    }
    module.size = 5  # type: ignore[assignment]
    unequal = rows_of(
        module, Sections("weight", (("q", "", "head_dim"), ("k", "", "size"), ("v", "", "size")), "shards")
    )
    assert unequal == {
        "q": [[0, 1], [12, 13]],
        "k": [[2, 3, 4, 5, 6], [14, 15, 16, 17, 18]],
        "v": [[7, 8, 9, 10, 11], [19, 20, 21, 22, 23]],
    }


def test_numbers_that_do_not_fit_are_refused() -> None:
    module = Packed(4, heads=4, head_dim=2)
    module.five, module.zero, module.text = 5, 0, "4"  # type: ignore[assignment]
    for layout, message in (
        (Blocked("weight", "five"), "not a positive multiple"),
        (Blocked("weight", "zero"), "positive integer"),
        (Blocked("weight", "text"), "positive integer"),
        (Blocked("weight", "absent"), "no attribute 'absent'"),
        (Blocked("weight", "heads", head_dim="five"), "2 rows per head"),
        (Interleaved("weight", "heads", shards="five"), "heads per shard"),
        (Sections("weight", (("q", "", "five"),), "heads"), "expected five=5"),
        (Choose((("zero", Blocked("weight", "heads")),)), "none of the flags"),
    ):
        with pytest.raises(LayoutError, match=message):
            layout(module)


def test_b01_packed_and_separate_weights_get_the_same_spectrum() -> None:
    """B01: nothing takes a fan from the packed shape."""
    packed, separate = nn.MultiheadAttention(64, 4), nn.MultiheadAttention(64, 4, kdim=63)
    for model in (packed, separate):
        ck.conditioned_(model)
        for role in "qkv":
            assert is_one(spectrum(heads_of(model, role)))
    for kind in ("xavier", "kaiming"):
        packed, separate = nn.MultiheadAttention(64, 4), nn.MultiheadAttention(64, 4, kdim=64, vdim=63)
        ck.random_(packed, kind=kind)
        ck.random_(separate, kind=kind)
        std = [heads_of(model, "q").std() for model in (packed, separate)]
        assert abs(float(std[0] / std[1]) - 1) < 0.05


@pytest.mark.parametrize(("heads", "head_dim"), [(6, 16), (4, 16), (8, 24)])
def test_b02_every_block_is_orthonormal(heads: int, head_dim: int) -> None:
    """B02, B12: per head, also where the heads together have more rows than the width."""
    model = Packed(96, heads, head_dim)
    ck.conditioned_(model, layouts={Packed: Blocked("weight", "heads")})
    views = {each.role: each.view(model.weight.detach()) for each in Blocked("weight", "heads")(model)}
    for view in views.values():
        assert is_one(spectrum(view))
    assert torch.linalg.matrix_rank(views["v"].reshape(-1, 96)) == min(heads * head_dim, 96)


def test_b03_interleaved_heads_as_the_module_uses_them() -> None:
    """B03: one-hot states through GPT-NeoX's own reshape give the identity slice, and x Q^T per head."""
    model, _, _ = hf(
        "GPTNeoXConfig",
        "GPTNeoXModel",
        hidden_size=16,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=16,
        vocab_size=32,
    )
    ck.conditioned_(model)
    attention = model.layers[0].attention
    with torch.no_grad():
        attention.query_key_value.bias.zero_()
        fused = attention.query_key_value(torch.eye(16)).view(16, 4, 3 * 4)
    q, k, v = fused.chunk(3, dim=-1)
    assert torch.equal(v.flatten(1), torch.eye(16))
    for role, captured in (("q", q), ("k", k)):
        assert torch.allclose(captured, heads_of(model, role).permute(2, 0, 1), atol=1e-6)
    # Read as three blocks, the heads look perfectly conditioned all the same.
    as_blocks = attention.query_key_value.weight.detach().view(3, 4, 4, 16)[0]
    assert is_one(spectrum(as_blocks))


def test_b04_falcon_layouts_are_chosen_by_flags() -> None:
    """B04: shapes for width 16 and 4 heads; the probe over all three is in test_families."""
    shapes = []
    for flags in ({"multi_query": False}, {"multi_query": True}, {"new_decoder_architecture": True, "num_kv_heads": 2}):
        model, args, kwargs = falcon(**flags)
        shapes.append(tuple(model.h[0].self_attention.query_key_value.weight.shape))
        ck.conditioned_(model)
        assert ck.probe(model, *args, **kwargs).ok
    assert shapes == [(48, 16), (24, 16), (32, 16)]


def test_b07_conv1d_heads_are_columns() -> None:
    """B07: (in, out) storage, also where the weight is square and a transpose has no shape signal."""
    model, _, _ = hf("GPT2Config", "GPT2Model", n_embd=16, n_head=4, n_layer=1, vocab_size=32, add_cross_attention=True)
    ck.conditioned_(model)
    fused = model.h[0].attn.c_attn.weight.detach()
    assert fused.shape == (16, 48)
    for block in fused.split(4, dim=1):
        assert is_one(torch.linalg.svdvals(block.double()))
    assert torch.equal(fused[:, 32:], torch.eye(16))
    square = model.h[0].crossattention.q_attn.weight.detach()
    assert square.shape == (16, 16)
    assert is_one(spectrum(torch.stack(square.split(4, dim=1))))
    # The rows are no heads: four of them are not orthonormal.
    assert not is_one(spectrum(torch.stack(square.split(4, dim=0))))


def test_b09_grouped_heads_are_conditioned_per_kv_head() -> None:
    """B09: two K/V heads for four query heads."""
    model, _, _ = hf("LlamaConfig", "LlamaModel", hidden_size=16, num_attention_heads=4, num_key_value_heads=2)
    report = ck.conditioned_(model, where=lambda name, _: name == "layers.0.self_attn")
    assert [(entry.role, entry.heads) for entry in report.touched] == [("q", 4), ("k", 2), ("v", 2)]
    attention = model.layers[0].self_attn
    assert torch.equal(attention.v_proj.weight.detach(), torch.eye(8, 16))
    assert is_one(spectrum(attention.k_proj.weight.detach().view(2, 4, 16)))


def test_b11_head_dim_is_the_modules_own() -> None:
    """B11: head_dim * heads != hidden for Qwen3, Gemma and T5."""
    common = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 32}
    qwen, _, _ = hf("Qwen3Config", "Qwen3Model", **common, num_key_value_heads=2, head_dim=8)
    gemma, _, _ = hf("GemmaConfig", "GemmaModel", **common, num_key_value_heads=1, head_dim=8)
    t5, _, _ = hf("T5Config", "T5EncoderModel", d_model=16, d_kv=8, num_heads=4, num_layers=1, vocab_size=32)
    for model, kv in ((qwen, 2), (gemma, 1), (t5, 4)):
        ck.conditioned_(model)
        assert heads_of(model, "q").shape == (4, 8, 16)
        assert heads_of(model, "k").shape == (kv, 8, 16)
        for role in "qkv":
            assert is_one(spectrum(heads_of(model, role)))


def test_b12_over_complete_values_wrap_around() -> None:
    """B12: V (32, 16) in 8 heads of 4: row i is e_(i mod 16), and no head is dead."""
    model = Packed(16, heads=8, head_dim=4)
    layouts = {Packed: Blocked("weight", "heads")}
    report = ck.conditioned_(model, layouts=layouts)
    value = model.weight.detach()[64:]
    assert torch.equal(value, torch.eye(16).repeat(2, 1))
    assert report.touched[-1].stacked_rank == 16
    assert ck.conditioned_(model, layouts=layouts, value="repeat").touched[-1].stacked_rank == 4


def test_a_head_with_more_rows_than_features() -> None:
    """Q and K get orthonormal columns, V its identity in the first rows and zeros below."""
    model = Packed(8, heads=2, head_dim=12)
    report = ck.conditioned_(model, layouts={Packed: Blocked("weight", "heads")})
    q, k, v = (each.view(model.weight.detach()) for each in Blocked("weight", "heads")(model))
    for view in (q, k):
        assert torch.allclose(view.mT @ view, torch.eye(8).expand(2, 8, 8), atol=1e-5)
    assert torch.equal(v[0], torch.eye(12, 8))
    # Head 1 starts at row 12 of the stack, which is coordinate 4.
    assert torch.equal(v[1, :8], torch.eye(8).roll(4, 1))
    assert not v[1, 8:].any()
    assert report.touched[-1].stacked_rank == 8
    assert ck.verify(model, report, layouts={Packed: Blocked("weight", "heads")}).ok


def test_b14_only_query_rows_of_a_gated_projection() -> None:
    """B14: per head [query, gate]; gate rows bit-identical; another row count is refused."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    config = transformers.Qwen3NextConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    attention = Qwen3NextAttention(config, 0)
    before = attention.q_proj.weight.detach().clone().view(4, 2, 8, 16)
    assert attention.q_proj.weight.shape == (64, 16)
    ck.conditioned_(attention)
    after = attention.q_proj.weight.detach().view(4, 2, 8, 16)
    assert torch.equal(after[:, 1], before[:, 1])
    assert is_one(spectrum(after[:, 0]))
    attention.q_proj = nn.Linear(16, 32, bias=False)
    with pytest.raises(LayoutError, match=r"q_proj\.weight.*4 rows per head, but head_dim is 8"):
        ck.conditioned_(attention)


def effective(attention: nn.Module) -> dict[str, Tensor]:
    """The maps (heads, rows, hidden) of MLA, its norms taken as the identity."""
    heads, nope, rope = attention.num_heads, attention.qk_nope_head_dim, attention.qk_rope_head_dim
    weights = {name: weight.detach().double() for name, weight in attention.named_parameters()}
    latent, shared = weights["kv_a_proj_with_mqa.weight"].split([attention.kv_lora_rank, rope])
    key, value = (
        (weights["kv_b_proj.weight"] @ latent)
        .view(heads, -1, attention.hidden_size)
        .split([nope, attention.v_head_dim], dim=1)
    )
    whole = weights["q_proj.weight"] if attention.q_lora_rank is None else None
    if whole is None:
        whole = weights["q_b_proj.weight"] @ weights["q_a_proj.weight"]
    query = whole.view(heads, nope + rope, -1)
    return {"q.nope": query[:, :nope], "q.rope": query[:, nope:], "k.nope": key, "k.rope": shared[None], "v": value}


@pytest.mark.parametrize(("version", "rank"), [("V2", None), ("V2", 12), ("V3", 12), ("V3", 16)])
def test_b15_every_effective_map_of_mla_has_kappa_one(version: str, rank: int | None) -> None:
    """B15: q_b (24, r) = 4 (4 + 2), kv_b (40, 8) = 4 (4 + 6); gains are those of the whole map."""
    sizes = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6, "kv_lora_rank": 8, "head_dim": 2}
    model, args, kwargs = deepseek(version, q_lora_rank=rank, num_hidden_layers=1, **sizes)
    attention = model.layers[0].self_attn
    assert attention.kv_b_proj.weight.shape == (40, 8)
    report = ck.conditioned_(model, gain={"q": 0.5, "k": 2.0, "v": 0.25})
    assert ck.probe(model, *args, **kwargs).ok
    assert ck.verify(model, report).ok
    for label, maps in effective(attention).items():
        sigma = torch.linalg.svdvals(maps)
        assert is_one(sigma / {"q": 0.5, "k": 2.0, "v": 0.25}[label[0]]), label
    labels = [entry.label for entry in report.touched]
    assert labels == (["q.latent"] if rank else []) + ["q.nope", "q.rope", "kv.latent", "k.rope", "k.nope", "v"]


def test_b15_a_rank_below_a_heads_rows_bounds_the_effective_rank() -> None:
    """B15: rank-many singular values equal the gain, the others are zero."""
    model, _, _ = deepseek("V3", q_lora_rank=3, num_hidden_layers=1)
    ck.conditioned_(model)
    sigma = torch.linalg.svdvals(effective(model.layers[0].self_attn)["q.nope"])
    assert is_one(sigma[:, :3])
    assert sigma[:, 3:].abs().max() < 1e-6


@pytest.mark.parametrize("options", [{"bias": False}, {"add_bias_kv": True}, {"bias": True}])
def test_b17_only_the_three_weights_change(options: dict[str, bool]) -> None:
    """B17: biases, bias_k, bias_v and out_proj stay; separate q_bias, v_bias and masks are in test_families."""
    model, _, _ = torch_attention(**options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ck.conditioned_(model)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"attn.in_proj_weight"}


@settings(max_examples=60, deadline=None)
@given(
    kv=st.integers(1, 6),
    group=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    size=st.integers(1, 4),
    layout=st.sampled_from(["blocked", "per_head", "per_group"]),
)
def test_b21_shards_hold_the_heads_of_the_whole_weight(
    kv: int, group: int, head_dim: int, size: int, layout: str
) -> None:
    """B21: cutting the whole weight and asking each rank gives the whole layout's heads, or a refusal."""
    group = 1 if layout == "per_head" else group
    module = Packed(3, kv * group, head_dim, kv)
    whole = {
        "blocked": Blocked("weight", "heads", "kv_heads"),
        "per_head": Interleaved("weight", "heads"),
        "per_group": Grouped("weight", "heads", "kv_heads"),
    }[layout](module)
    weight = module.weight.detach()
    expected = {each.role: each.view(weight).reshape(-1, head_dim, 3) for each in whole}
    numbers = {"heads": kv * group, "kv_heads": kv, "head_dim": head_dim, "tp_size": size, "layout": layout}
    slots = kv * (group + 2)
    if slots * head_dim % size:
        with pytest.raises(LayoutError, match="per rank"):
            shard_views(weight, tp_rank=0, **numbers)
        return
    shards = weight.chunk(size)
    if slots % size:
        with pytest.raises(LayoutError, match="cut between ranks"):
            for rank, shard in enumerate(shards):
                shard_views(shard, tp_rank=rank, **numbers)
        return
    seen = {"q": set(), "k": set(), "v": set()}
    for rank, shard in enumerate(shards):
        for role, views in shard_views(shard, tp_rank=rank, **numbers).items():
            for head, view in views.items():
                assert torch.equal(view, expected[role][head])
                assert view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
                assert head not in seen[role]
                seen[role].add(head)
    assert {role: len(found) for role, found in seen.items()} == {"q": kv * group, "k": kv, "v": kv}


def test_b21_each_ranks_own_block() -> None:
    """B21: per-shard-interleaved, the third meaning of the same packed shape."""
    shard = torch.arange(12.0)[:, None]
    views = shard_views(shard, heads=4, head_dim=2, tp_rank=1, tp_size=2, layout="per_shard")
    assert {role: {head: view[:, 0].tolist() for head, view in found.items()} for role, found in views.items()} == {
        "q": {2: [0, 1], 3: [2, 3]},
        "k": {2: [4, 5], 3: [6, 7]},
        "v": {2: [8, 9], 3: [10, 11]},
    }


def test_b22_ranks_without_kv_heads() -> None:
    """B22: 8 query heads, 2 K/V heads, 4 ranks: ranks 1 and 3 own no K or V; repeated heads are refused."""
    numbers = {"heads": 8, "kv_heads": 2, "head_dim": 2, "tp_size": 4, "layout": "per_shard"}
    for rank in range(4):
        rows = 8 if rank % 2 == 0 else 4
        views = shard_views(torch.randn(rows, 5), tp_rank=rank, **numbers)
        assert sorted(views["q"]) == [2 * rank, 2 * rank + 1]
        assert sorted(views["k"]) == sorted(views["v"]) == ([rank // 2] if rank % 2 == 0 else [])
    with pytest.raises(LayoutError, match="repeated on several ranks"):
        shard_views(torch.randn(8, 5), tp_rank=1, **numbers)
    # Blocked: the last of four ranks holds all of K and V, the others none of it.
    blocked = numbers | {"layout": "blocked"}
    assert not shard_views(torch.randn(6, 5), tp_rank=0, **blocked)["k"]
    assert sorted(shard_views(torch.randn(6, 5), tp_rank=3, **blocked)["v"]) == [0, 1]
    with pytest.raises(LayoutError, match="ranks per K/V head"):
        shard_views(torch.randn(6, 5), tp_rank=0, **(numbers | {"heads": 24, "kv_heads": 8, "tp_size": 12}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layout": "rows"}, "layout must be one of"),
        ({"tp_rank": 2}, r"tp_rank must be in \[0, tp_size\)"),
        ({"layout": "per_head", "kv_heads": 2}, "use 'per_group'"),
        ({"kv_heads": 3}, "heads per K/V head"),
    ],
)
def test_b21_unknown_combinations_are_refused(changed: dict, message: str) -> None:
    """B21: refused, never guessed."""
    numbers = {"heads": 4, "head_dim": 2, "tp_rank": 0, "tp_size": 2, "layout": "blocked"} | changed
    with pytest.raises(LayoutError, match=message):
        shard_views(torch.randn(12, 4), **numbers)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 3))


@pytest.mark.parametrize(
    ("views", "message"),
    [
        (lambda w: {"x": w}, "roles must be among"),
        (lambda w: {"q": w[0]}, "3 or more dimensions"),
        (lambda w: {"q": w.clone()}, "not a view of a parameter"),
        (lambda w: {"q": w, "k": w[:1]}, "overlaps"),
        (lambda w: {"q": w[:, :1].expand(4, 6, 3)}, "overlaps"),
        (lambda w: {"q": w[:2], "k": w[1:3]}, "overlaps"),
        (lambda w: {"q": [1, 2]}, "must be a tensor"),
    ],
)
def test_b19_a_users_views_are_checked(views, message: str) -> None:  # type: ignore[no-untyped-def]
    """B19: views must be of the parameters, disjoint, and of heads."""
    module = Views()
    with pytest.raises(LayoutError, match=message):
        from_views(module, views(module.weight))


def test_separate_weights_of_unequal_roles() -> None:
    module = nn.Module()
    module.q_proj, module.k_proj, module.v_proj = nn.Linear(8, 12), nn.Linear(8, 4), nn.Linear(8, 4)
    module.heads, module.kv_heads = 6, 2
    found = {each.role: each for each in Separate("heads", kv_heads="kv_heads")(module)}
    assert found["q"].view(module.q_proj.weight).shape == (6, 2, 8)
    assert found["k"].view(module.k_proj.weight).shape == (2, 2, 8)


def test_the_support_table_has_a_row_per_class() -> None:
    rows = support_rows()
    assert len(rows) == sum(len(family.classes) for family in FAMILIES)
    assert all(row.form and row.output and row.jacobian and row.source and row.installed for row in rows)
    assert sum(row.jacobian.startswith("yes") for row in rows) == len(rows) - len(REFUSED)
    table = support_table(check_installed=False)
    assert table.count("\n") == len(rows) + 2
    assert {line.count(" | ") for line in table.splitlines()} == {6}
    assert "| transformers | `modeling_gpt_neox.GPTNeoXAttention` | query_key_value [Q K V] per head |" in table
    # A class at a library's former place is listed as missing there.
    moved = next(row for row in rows if row.module == "timm.models.vision_transformer")
    assert moved.installed == "yes" or moved.installed.startswith("no, ")
    assert math.prod(len(row.cls) for row in rows) > 0


@pytest.mark.parametrize(
    ("layout", "heads", "kv_heads", "size"),
    [
        ("blocked", 4, 4, 3),
        ("per_head", 4, 4, 4),
        ("per_group", 8, 2, 4),
        ("per_shard", 8, 4, 2),
        ("per_shard", 8, 2, 4),
    ],
)
def test_b21_b22_plain_parts_get_what_the_whole_weight_gets(layout: str, heads: int, kv_heads: int, size: int) -> None:
    """B21, B22: by rank, world and arrangement; heads cut between ranks, and ranks without K/V heads, included."""
    count = {"q": heads, "k": kv_heads, "v": kv_heads}
    numbers = {"heads": heads, "head_dim": 4, "kv_heads": kv_heads, "tp_size": size, "layout": layout}

    class Part(nn.Module):
        def __init__(self, rank: int, rows: int) -> None:
            super().__init__()
            self.weight, self.rank = nn.Parameter(torch.randn(rows, 24)), rank

    def local(module: nn.Module) -> tuple:
        return from_shard("weight", tp_rank=module.rank, **numbers)

    # The stream's key has the parameter's name, so the oracle draws by it directly.
    expected = {
        "q": ck.semi_orthogonal((heads, 4, 24), key="weight", role="q"),
        "k": ck.semi_orthogonal((kv_heads, 4, 24), key="weight", role="k"),
        "v": identity_heads(torch.empty(kv_heads, 4, 24)),
    }
    order = {
        "blocked": [(role, head) for role in "qkv" for head in range(count[role])],
        "per_head": [(role, head) for head in range(heads) for role in "qkv"],
        "per_group": [
            slot
            for group in range(kv_heads)
            for slot in (
                *(("q", group * heads // kv_heads + i) for i in range(heads // kv_heads)),
                ("k", group),
                ("v", group),
            )
        ],
    }
    seen = {role: set() for role in "qkv"}
    for rank in range(size):
        if layout == "per_shard":
            mine = [("q", rank * heads // size + i) for i in range(heads // size)]
            if kv_heads >= size:
                mine += [(role, rank * kv_heads // size + i) for role in "kv" for i in range(kv_heads // size)]
            elif rank % (size // kv_heads) == 0:
                mine += [(role, rank * kv_heads // size) for role in "kv"]
            rows = torch.cat([expected[role][head] for role, head in mine])
        else:
            stacked = torch.cat([expected[role][head] for role, head in order[layout]])
            rows = stacked.chunk(size)[rank]
        module = Part(rank, len(rows))
        report = ck.conditioned_(module, layouts={Part: local})
        assert torch.equal(module.weight, rows), (layout, rank)
        verdict = ck.verify(module, report, layouts={Part: local})
        assert verdict, str(verdict)
        for entry in verdict.measured:
            seen[entry.role] |= set(entry.measured)
        with pytest.raises(ValueError, match="gain='preserve' needs the norm of the whole"):
            ck.conditioned_(module, gain="preserve", layouts={Part: local})
        with torch.no_grad():
            module.weight.mul_(2)
        assert not ck.verify(module, report, layouts={Part: local})
    if layout != "blocked":  # whose three parts cut heads
        assert all(seen[role] == set(range(count[role])) for role in "qkv" if count[role] >= size or role == "q")
