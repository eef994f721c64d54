"""Finding attention: by class, through containers, with a user's layouts, and never by guessing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import conditioned_kernels as ck
from conditioned_kernels.heads import Blocked, Interleaved, LayoutError, Separate, discover

from .models import hf


class FusedAttention(nn.Module):
    """As flash-attn's MHA: one ``Wqkv`` of [3, heads, head_dim] rows."""

    def __init__(self, width: int = 16, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.Wqkv = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        return self.out_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SeparateAttention(nn.Module):
    """As x-transformers' Attention: ``to_q``, ``to_k``, ``to_v`` without bias, a given head width."""

    def __init__(self, dim: int = 16, heads: int = 4, dim_head: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, heads * dim_head, bias=False) for _ in range(3))
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class InputMajorAttention(nn.Module):
    """W_Q, W_K, W_V as (heads, d, head_dim), never initialized."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("W_Q", "W_K", "W_V"):
            self.register_parameter(name, nn.Parameter(torch.empty(4, 16, 4)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bhte", x, w) for w in (self.W_Q, self.W_K, self.W_V))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def by_role(module: nn.Module) -> dict[str, Tensor]:
    return {"q": module.W_Q.mT, "k": module.W_K.mT, "v": module.W_V.mT}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "_REGISTERED", {})


def test_b08_a_model_without_attention_is_refused() -> None:
    """B08: nothing to do is an error, or with strict=False a warning."""
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ck.NoAttentionFound, match="no module looks like attention"):
        ck.conditioned_(model)
    with pytest.warns(UserWarning, match="no attention layer to initialize"):
        report = ck.conditioned_(model, strict=False)
    assert report.touched == ()


def test_b08_unknown_attention_is_refused_by_name() -> None:
    """B08: the message names the module, its class and the remedy; strict=False does the rest and lists it."""
    model = nn.Sequential(FusedAttention(), nn.MultiheadAttention(16, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ck.NoAttentionFound, match=r"0: class .*FusedAttention has no layout.*register_layout"):
        ck.conditioned_(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    report = ck.conditioned_(model, strict=False)
    assert [name for name, _ in report.unknown] == ["0"]
    assert {entry.parameter for entry in report.touched} == {"1.in_proj_weight"}
    assert torch.equal(model[0].Wqkv.weight, before["0.Wqkv.weight"])
    assert "unknown 0: " in str(report)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("cls", "layout"),
    [
        (FusedAttention, Blocked("Wqkv", "num_heads")),
        (SeparateAttention, Separate("heads", "to_q", "to_k", "to_v")),
        (InputMajorAttention, by_role),
    ],
)
def test_b19_a_users_class_is_taught_and_proved(cls: type[nn.Module], layout) -> None:  # type: ignore[no-untyped-def]
    """B19, D03: a storage form, or a function that returns views, for one call or for all; the probe proves it."""
    model = nn.Sequential(cls(), cls())
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    states = torch.randn(1, 5, 16)
    assert ck.probe(model, states, layouts={cls: layout}).ok
    report = ck.conditioned_(model, layouts={cls: layout})
    assert len(report.touched) == 6
    with pytest.raises(ck.NoAttentionFound):
        ck.verify(model)
    ck.register_layout(cls, layout)
    assert ck.verify(model, report).ok
    assert ck.probe(model, states).ok


@pytest.mark.usefixtures("registry")
def test_b19_a_users_wrong_layout_fails_the_probe() -> None:
    """B19: the probe says so for every head, although the condition numbers are perfect."""
    model = FusedAttention()
    wrong = {FusedAttention: Interleaved("Wqkv", "num_heads")}
    ck.conditioned_(model, layouts={FusedAttention: Blocked("Wqkv", "num_heads")})
    assert ck.verify(model, layouts=wrong, gain="any", roles="q")
    report = ck.probe(model, torch.randn(1, 5, 16), layouts=wrong)
    assert not report.ok
    assert "DISAGREES in heads [" in str(report)


def test_d03_uninitialized_input_major_weights() -> None:
    """D03: torch.empty weights (heads, d, head_dim) become orthonormal along the right axis."""
    model = InputMajorAttention()
    with torch.no_grad():
        model.W_Q.fill_(float("nan"))
    ck.conditioned_(model, layouts={InputMajorAttention: by_role})
    for weight in (model.W_Q, model.W_K, model.W_V):
        assert torch.allclose(weight.mT @ weight, torch.eye(4).expand(4, 4, 4), atol=1e-5)


@pytest.mark.usefixtures("registry")
def test_wrong_registrations_are_refused() -> None:
    with pytest.raises(TypeError, match=r"subclass of torch\.nn\.Module"):
        ck.register_layout("FusedAttention", by_role)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="layout must be callable"):
        ck.register_layout(FusedAttention, {"q": 1})  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"0: .*W_Q"):
        ck.find_attention(
            nn.Sequential(FusedAttention()),
            layouts={FusedAttention: lambda m: {"q": m.W_Q}}
            | {FusedAttention: Separate("num_heads", "W_Q", "W_K", "W_V")},
        )


class Renamed(nn.MultiheadAttention):
    """Adds nothing, so it keeps its base's layout."""


class Changed(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return super().forward(*args, **kwargs)


def test_a_subclass_counts_while_it_keeps_the_forward() -> None:
    assert ck.find_attention(Renamed(16, 4)).layers[0].family.endswith("activation.MultiheadAttention")
    found = ck.find_attention(Changed(16, 4))
    assert not found.layers
    assert "overrides the forward" in found.unknown[0][1]
    # A user who knows it is the same says so.
    row = ck.find_attention(Renamed(16, 4)).layers[0].row
    assert row is not None
    assert ck.conditioned_(Changed(16, 4), layouts={Changed: row.layout}).touched


def test_b18_cloned_layers_start_different() -> None:
    """B18: the layers of nn.TransformerEncoder are copies, and their Q, K, V are not; one seed gives all."""
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 3)
    first = [each.self_attn.in_proj_weight.detach() for each in model.layers]
    assert torch.equal(first[0], first[1])
    ck.conditioned_(model)
    weights = [each.self_attn.in_proj_weight.detach().clone() for each in model.layers]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(weights[i][:16], weights[j][:16])
        assert not torch.equal(weights[i][16:32], weights[j][16:32])
    ck.conditioned_(model)
    assert all(torch.equal(each.self_attn.in_proj_weight, old) for each, old in zip(model.layers, weights, strict=True))


def test_b29_where_chooses_layers() -> None:
    """B29: the decoder only; cross-attention only; the others bit-identical and listed."""
    model = nn.Transformer(16, 4, 1, 2, 24, batch_first=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = ck.conditioned_(model, where=lambda name, _: "decoder" in name)
    assert {entry.layer.split(".")[0] for entry in report.touched} == {"decoder"}
    assert [name for name, reason in report.skipped if reason == "left out by where"] == ["encoder.layers.0.self_attn"]
    assert torch.equal(
        model.encoder.layers[0].self_attn.in_proj_weight, before["encoder.layers.0.self_attn.in_proj_weight"]
    )
    report = ck.conditioned_(model, where=lambda name, _: name.endswith("multihead_attn"))
    assert {entry.layer for entry in report.touched} == {f"decoder.layers.{i}.multihead_attn" for i in range(2)}
    bert, _, _ = hf(
        "BertConfig",
        "BertModel",
        hidden_size=16,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=32,
        is_decoder=True,
        add_cross_attention=True,
    )
    report = ck.conditioned_(bert, where=lambda _, module: "Cross" in type(module).__name__)
    assert {entry.layer for entry in report.touched} == {f"encoder.layer.{i}.crossattention.self" for i in range(2)}


def test_where_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ck.NoAttentionFound, match="left out by where"):
        ck.conditioned_(nn.MultiheadAttention(16, 4), where=lambda *_: False)


def test_modules_used_twice_are_visited_once() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    found = ck.find_attention(nn.ModuleDict({"a": layer, "b": layer}))
    assert [each.name for each in found.layers] == ["a.self_attn"]


class Mixer(nn.Module):
    """Attention by code alone: neither its name nor its children's say so."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.maps(x).unflatten(-1, (3, 4, 4)).transpose(1, 3).unbind(2)
        return self.mixed(q, k, v).transpose(1, 2).flatten(2)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


class SoftmaxMixer(Mixer):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attn = q @ k.mT
        return attn.softmax(-1) @ v


class Router(nn.Module):
    """A softmax over experts, with a mask of attention at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.gate(x).softmax(-1)


@pytest.mark.parametrize(("cls", "unknown"), [(Mixer, True), (SoftmaxMixer, True), (Router, False)])
def test_b08_attention_is_recognized_by_its_code(cls: type[nn.Module], unknown: bool) -> None:
    """B08: beside a known layer it would be left out without a word (timm's ParallelScalingBlock, GPSA, SHMA)."""
    model = nn.ModuleList([nn.MultiheadAttention(16, 4), cls()])
    found = ck.find_attention(model)
    assert [name for name, _ in found.unknown] == ["1"] * unknown
    assert [layer.name for layer in found.layers] == ["0"]


def test_names_alone_do_not_make_attention() -> None:
    """A gate or an adapter with "Attn" in its class is no unknown attention, so it does not stop the rest."""
    wav2vec2 = pytest.importorskip("transformers.models.wav2vec2.modeling_wav2vec2")
    config = wav2vec2.Wav2Vec2Config(hidden_size=16, adapter_attn_dim=4)
    model = nn.ModuleDict({"adapter": wav2vec2.Wav2Vec2AttnAdapterLayer(config), "attn": nn.MultiheadAttention(16, 4)})
    found = ck.find_attention(model)
    assert [layer.name for layer in found.layers] == ["attn"]
    assert not found.unknown
