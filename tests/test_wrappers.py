"""What stands around a user's weights: wrappers, adapters, parametrizations, quantized and sharded storage, ties."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel

import conditioned_kernels as ck
from conditioned_kernels.heads import LayoutError, Separate

from .models import hf


class Attention(nn.Module):
    """Four heads of four rows on sixteen features, in separate weights."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


LAYOUTS = {Attention: Separate("heads")}
NAMES = ["self_attn.in_proj_weight", "linear1.weight"]


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """The block must leave every bit of the state as it was."""
    before = state(model)
    yield
    after = state(model)
    assert set(after) == set(before)
    for name, tensor in before.items():
        assert torch.equal(*(each.contiguous().view(torch.uint8) for each in (after[name], tensor))), name


class FakeDDP(nn.parallel.DistributedDataParallel):
    """The class and the attribute of DDP without its process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return self.module(*args, **kwargs)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        FakeDDP,
        nn.DataParallel,
        lambda model: FakeDDP(compiled(model)),
        lambda model: compiled(FakeDDP(model)),
        lambda model: compiled(FakeDDP(compiled(model))),
    ],
    ids=["compile", "ddp", "dp", "ddp-of-compile", "compile-of-ddp", "three"],
)
def test_b24_names_are_the_users_own(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """B24: wrappers add no segment, and the weights are those of the bare model."""
    bare, model = encoder(), encoder()
    expected = ck.conditioned_(bare)
    report = ck.conditioned_(wrap(model))
    assert [entry.parameter for entry in report.touched] == [entry.parameter for entry in expected.touched]
    assert {entry.parameter for entry in report.touched} == {"self_attn.in_proj_weight"}
    assert torch.equal(model.self_attn.in_proj_weight, bare.self_attn.in_proj_weight)
    assert ck.verify(wrap(model), expected).ok
    if not isinstance(wrap(model), nn.DataParallel):
        wrapped = wrap(model)
        before = wrapped(torch.randn(2, 5, 16))
        assert ck.probe(wrapped, torch.randn(1, 5, 16)).ok
        assert wrapped(torch.randn(2, 5, 16)).shape == before.shape


def test_b24_only_classes_are_looked_through() -> None:
    """B24: a module really called ``_orig_mod_proj``, or ``module``, keeps its name."""
    model = nn.Module()
    model._orig_mod_proj = encoder()
    model.module = nn.Module()
    model.module._orig_mod = encoder()
    found = ck.find_attention(compiled(model))
    assert [layer.name for layer in found.layers] == ["_orig_mod_proj.self_attn", "module._orig_mod.self_attn"]


def test_b24_averages_and_fabrics_model_have_the_names_of_the_model() -> None:
    """B24: and so the same weights."""
    fabric = pytest.importorskip("lightning.fabric")
    expected = encoder()
    ck.conditioned_(expected)
    for wrap in (AveragedModel, fabric.Fabric(accelerator="cpu").setup):
        model = wrap(encoder())
        assert ck.conditioned_(model).touched[0].parameter == "self_attn.in_proj_weight"
        assert torch.equal(model.module.self_attn.in_proj_weight, expected.self_attn.in_proj_weight)


def test_c01_offloaded_weights_are_refused() -> None:
    """C01: on the meta device between forwards, with their values in hooks that bring the old ones back."""
    accelerate = pytest.importorskip("accelerate")
    model = Attention()
    accelerate.cpu_offload(model, execution_device="cpu")
    for call in (ck.conditioned_, ck.verify):
        with pytest.raises(ValueError, match=r"q_proj\.weight is offloaded.*remove_hook_from_submodules"):
            call(model, layouts=LAYOUTS)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert ck.verify(model, ck.conditioned_(model, layouts=LAYOUTS), layouts=LAYOUTS).ok


def test_b24_a_compiled_projection() -> None:
    """B24: one linear layer compiled on its own."""
    model = Attention()
    model.q_proj = compiled(model.q_proj)
    report = ck.conditioned_(model, layouts=LAYOUTS)
    assert report.touched[0].parameter == "q_proj.weight"
    assert ck.verify(model, report, layouts=LAYOUTS).ok
    assert ck.probe(model, torch.randn(1, 5, 16), layouts=LAYOUTS).ok


def test_b24_distributed_data_parallel_itself() -> None:
    """B24: the real wrapper, one process."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this torch has no distributed package")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(encoder())
        report = ck.conditioned_(model)
        assert {entry.parameter for entry in report.touched} == {"self_attn.in_proj_weight"}
        assert ck.verify(model, report).ok
    finally:
        distributed.destroy_process_group()


def test_a32_writes_are_in_place() -> None:
    """A32: the same parameters, in the same memory, still in the optimizer, still trainable."""
    model = encoder()
    weight = model.self_attn.in_proj_weight
    place, version = weight.data_ptr(), weight._version
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ck.conditioned_(model)
    assert model.self_attn.in_proj_weight is weight
    assert (weight.data_ptr(), weight.requires_grad, weight.grad_fn) == (place, True, None)
    assert weight._version > version
    assert any(weight is each for each in optimizer.param_groups[0]["params"])


def test_a32_inference_tensors_are_refused_by_name() -> None:
    """A32: weights made under inference mode cannot be written; a call inside it on normal weights works."""
    with torch.inference_mode():
        model = encoder()
    with unchanged(model), pytest.raises(RuntimeError, match=r"self_attn\.in_proj_weight.*inference_mode"):
        ck.conditioned_(model)
    model = encoder()
    with torch.inference_mode():
        assert ck.conditioned_(model).touched
    assert ck.verify(model).ok


# --- adapters --------------------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """The shape of an adapter: the layer under ``base_layer``, and low-rank factors beside it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(16, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 16, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class LoraWithWeight(Lora):
    """Some adapters forward ``weight`` to the base."""

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight


@pytest.mark.parametrize("cls", [Lora, LoraWithWeight])
@pytest.mark.parametrize("nested", [False, True])
def test_b25_bases_of_adapters(cls: type[Lora], nested: bool) -> None:
    """B25: refused by default, base only with include_frozen, adapters bit-identical, names as the user sees them."""
    model = Attention()
    model.q_proj = cls(model.q_proj)
    model.v_proj = cls(model.v_proj)
    if nested:
        model.q_proj = Lora(model.q_proj)
    base = "base_layer.base_layer" if nested else "base_layer"
    with unchanged(model), pytest.raises(ValueError, match=rf"q_proj\.{base}\.weight.*adapter.*include_frozen"):
        ck.conditioned_(model, layouts=LAYOUTS)
    before = state(model)
    report = ck.conditioned_(model, layouts=LAYOUTS, include_frozen=True)
    names = [f"q_proj.{base}.weight", "k_proj.weight", "v_proj.base_layer.weight"]
    assert [entry.parameter for entry in report.touched] == names
    changed = {name for name, tensor in state(model).items() if not torch.equal(tensor, before[name])}
    assert changed == set(names)
    assert ck.verify(model, report, layouts=LAYOUTS).ok
    assert not model.v_proj.base_layer.weight.requires_grad


def test_b25_a_trainable_base_is_still_a_base() -> None:
    """B25: the adapters of a trained model depend on it, whatever its requires_grad."""
    model = Attention()
    model.q_proj = Lora(model.q_proj)
    model.requires_grad_(True)
    with unchanged(model), pytest.raises(ValueError, match=r"q_proj\.base_layer\.weight is the base of an adapter"):
        ck.conditioned_(model, layouts=LAYOUTS)


class Forwards(nn.Module):
    """An adapter that keeps a copy per task under another name and forwards attributes to the active one."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.modules_to_save = nn.ModuleDict({"default": layer})

    @property
    def weight(self) -> Tensor:
        return self.modules_to_save["default"].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


def test_b25_forwarded_weights_have_their_own_name() -> None:
    """B25: found by identity, since no table can hold every adapter."""
    model = Attention()
    model.q_proj = Forwards(model.q_proj)
    report = ck.conditioned_(model, layouts=LAYOUTS)
    assert report.touched[0].parameter == "q_proj.modules_to_save.default.weight"
    assert {entry.parameter for entry in report.touched} <= set(model.state_dict())
    assert ck.verify(model, report, layouts=LAYOUTS).ok


def test_frozen_weights_need_include_frozen() -> None:
    model = Attention()
    model.k_proj.requires_grad_(False)
    with unchanged(model), pytest.raises(ValueError, match=r"k_proj\.weight is frozen.*include_frozen=True"):
        ck.conditioned_(model, layouts=LAYOUTS)
    assert ck.conditioned_(model, layouts=LAYOUTS, include_frozen=True).touched


# --- quantized and sharded storage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stored",
    [
        torch.zeros(128, 1, dtype=torch.uint8),
        torch.zeros(16, 16, dtype=torch.int8),
        torch.zeros(16, 16).to(torch.float8_e4m3fn),
    ],
    ids=["uint8", "int8", "float8"],
)
def test_b26_quantized_storage_is_refused_by_name_and_dtype(stored: Tensor) -> None:
    """B26: bytes are no weights, whatever their shape, for init, verify and probe."""
    model = nn.Sequential(Attention())
    model[0].k_proj.weight = nn.Parameter(stored, requires_grad=False)
    dtype = str(stored.dtype).removeprefix("torch.")
    for call in (ck.conditioned_, ck.verify, ck.find_attention):
        with unchanged(model), pytest.raises(TypeError, match=rf"0: k_proj\.weight must have one of.*got {dtype}"):
            call(model, layouts=LAYOUTS)
    with pytest.raises(TypeError, match=f"got {dtype}"):
        ck.find_attention(model, layouts={Attention: lambda module: {"k": module.k_proj.weight[None]}})


def test_b26_dynamically_quantized_layers_are_refused_by_name() -> None:
    """B26: their weight is a method."""
    model = Attention()
    model.k_proj.__dict__["weight"] = model.k_proj._parameters.pop("weight").detach
    with pytest.raises(TypeError, match=r"'k_proj\.weight' of Attention is a method.*before quantizing"):
        ck.conditioned_(model, layouts=LAYOUTS)


@pytest.mark.parametrize("size", [256, 0])
def test_c08_flat_parameters_are_refused_with_the_remedy(size: int) -> None:
    """C08: FSDP1 keeps a 1-D piece where a matrix is expected."""
    model = Attention()
    model.q_proj.weight = nn.Parameter(torch.zeros(size))
    with pytest.raises(LayoutError, match=r"q_proj\.weight.*summon_full_params.*before it is wrapped"):
        ck.conditioned_(model, layouts=LAYOUTS)


@pytest.mark.parametrize("shape", [(0,), (0, 16)])
def test_c10_zero_sized_placeholders_are_refused(shape: tuple[int, ...]) -> None:
    """C10: an empty tensor is no harmless no-op where the module has output features; nothing is written."""
    model = Attention()
    model.v_proj.weight = nn.Parameter(torch.empty(shape))
    model.v_proj.weight.ds_shape = (16, 16)  # type: ignore[attr-defined]
    assert model.v_proj.out_features == 16
    with unchanged(model), pytest.raises(LayoutError, match=r"v_proj\.weight.*\(16, 16\).*GatheredParameters"):
        ck.conditioned_(model, layouts=LAYOUTS)


# --- parametrizations ------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """Has an inverse."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


class OneWay(nn.Module):
    """Has none."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


def test_b27_parametrized_weights_are_assigned_and_read_back() -> None:
    """B27: an in-place write would be lost."""
    model = Attention()
    parametrize.register_parametrization(model.q_proj, "weight", Doubled())
    weight_norm(model.k_proj)
    report = ck.conditioned_(model, layouts=LAYOUTS)
    assert [entry.parameter for entry in report.touched] == ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    assert ck.verify(model, report, layouts=LAYOUTS).ok
    assert torch.equal(model.q_proj.parametrizations.weight.original * 2, model.q_proj.weight)
    assert ck.probe(model, torch.randn(1, 5, 16), layouts=LAYOUTS).ok


def test_b27_fused_parametrized_weight() -> None:
    """B27: three roles in one parametrized weight, each written without losing the others."""
    model = encoder()
    parametrize.register_parametrization(model.self_attn, "in_proj_weight", Doubled())
    row = ck.find_attention(encoder()).layers[0].row
    assert row is not None
    layouts = {type(model.self_attn): row.layout}
    report = ck.conditioned_(model, layouts=layouts)
    assert ck.verify(model, report, layouts=layouts).ok
    assert torch.equal(model.self_attn.in_proj_weight[32:], torch.eye(16))


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda layer: parametrize.register_parametrization(layer, "weight", OneWay()), "cannot be assigned"),
        (spectral_norm, "does not hold the assigned value"),
        # Its right_inverse gives itself a new buffer on the way.
        (orthogonal, "does not hold the assigned value"),
    ],
    ids=["no-inverse", "spectral-norm", "orthogonal"],
)
def test_b27_what_cannot_be_assigned_is_refused_and_rolled_back(register, message: str) -> None:  # type: ignore[no-untyped-def]
    """B27: also the weights written before it, and the parametrization's own state, in training mode."""
    model = Attention()
    model.v_proj.weight = nn.Parameter(torch.randn(16, 16))
    register(model.v_proj)
    model.train()
    with unchanged(model), pytest.raises(ValueError, match=rf"v_proj\.weight is parametrized and {message}"):
        # A semi-orthogonal head alone would survive spectral_norm, four stacked ones do not.
        ck.conditioned_(model, layouts=LAYOUTS, value="semi_orthogonal")
    assert all(module.training for module in model.modules())


def test_b27_reading_changes_no_state() -> None:
    """B27: spectral_norm iterates on each read in training mode; finding, verifying and failing must not."""
    model = Attention()
    spectral_norm(model.q_proj)
    model.train()
    with unchanged(model):
        ck.find_attention(model, layouts=LAYOUTS)
        ck.verify(model, layouts=LAYOUTS)
        ck.probe(model, torch.randn(1, 5, 16), layouts=LAYOUTS)
    assert all(module.training for module in model.modules())


def test_b27_an_orthogonal_parametrization_is_assigned() -> None:
    """B27: a whole orthogonal matrix has orthonormal heads, and four identity blocks are one."""
    model = Attention()
    orthogonal(model.v_proj)
    report = ck.conditioned_(model, layouts=LAYOUTS)
    assert ck.verify(model, report, layouts=LAYOUTS).ok
    assert torch.allclose(model.v_proj.weight, torch.eye(16), atol=1e-6)


def test_b25_d05_parametrized_weights_are_guarded_by_what_they_are_made_from() -> None:
    """B25, D05: the weight itself is recomputed and carries neither requires_grad nor transformers' mark."""
    model = Attention()
    parametrize.register_parametrization(model.q_proj, "weight", Doubled())
    original = model.q_proj.parametrizations.weight.original
    original.requires_grad_(False)
    with unchanged(model), pytest.raises(ValueError, match=r"q_proj\.weight is frozen"):
        ck.conditioned_(model, layouts=LAYOUTS)
    original.requires_grad_(True)
    original._is_hf_initialized = True
    with unchanged(model), pytest.raises(ValueError, match=r"q_proj\.weight was loaded from a checkpoint"):
        ck.conditioned_(model, layouts=LAYOUTS)
    ck.conditioned_(model, layouts=LAYOUTS, overwrite=True)
    assert ck.conditioned_(model, layouts=LAYOUTS, seed=1).touched, "ours by now"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
def test_b27_hooks_that_recompute_a_weight_are_refused(norm: Callable[[nn.Module], nn.Module]) -> None:
    """B27: the older norms recompute ``weight`` in a forward hook, so that it is no parameter."""
    model = Attention()
    norm(model.q_proj)
    with unchanged(model), pytest.raises(ValueError, match=r"q_proj\.weight is no parameter"):
        ck.conditioned_(model, layouts=LAYOUTS)


# --- ties ------------------------------------------------------------------------------------------------------------


def two() -> nn.ModuleDict:
    return nn.ModuleDict({"a": Attention(), "b": Attention()})


def test_tied_weights_of_one_role_are_written_once() -> None:
    model = two()
    model["b"].q_proj.weight = model["a"].q_proj.weight
    report = ck.conditioned_(model, layouts=LAYOUTS)
    assert ("b.q_proj.weight (q)", "is tied to a.q_proj.weight, which is written once") in report.skipped
    assert len(report.touched) == 5
    assert ck.verify(model, layouts=LAYOUTS).ok
    alone = nn.ModuleDict({"a": Attention()})
    ck.conditioned_(alone, layouts=LAYOUTS)
    assert torch.equal(alone["a"].q_proj.weight, model["b"].q_proj.weight)


def share(first: nn.Module, second: nn.Module) -> None:
    second.weight = first.weight


def overlap(first: nn.Module, second: nn.Module) -> None:
    memory = torch.randn(20, 16)
    first.weight, second.weight = nn.Parameter(memory[:16]), nn.Parameter(memory[4:])


def parametrized_share(first: nn.Module, second: nn.Module) -> None:
    for module in (first, second):
        parametrize.register_parametrization(module, "weight", Doubled())
    second.parametrizations.weight.original = first.parametrizations.weight.original


def mixed_share(first: nn.Module, second: nn.Module) -> None:
    second.weight = first.weight
    parametrize.register_parametrization(first, "weight", Doubled())


@pytest.mark.parametrize("tie", [share, overlap, parametrized_share, mixed_share])
def test_conflicting_ties_are_refused(tie: Callable[[nn.Module, nn.Module], None]) -> None:
    """Q of one layer and K of another in one memory, also shifted, parametrized, or one of them parametrized."""
    model = two()
    tie(model["a"].q_proj, model["b"].k_proj)
    with unchanged(model), pytest.raises(ValueError, match=r"[ab]\.[qk]_proj\.weight \([qk]\) shares its memory with"):
        ck.conditioned_(model, layouts=LAYOUTS)
    assert ck.conditioned_(model, layouts=LAYOUTS, where=lambda name, _: name == "a").touched


@pytest.mark.parametrize("tie", [share, overlap, parametrized_share, mixed_share])
def test_b17_ties_with_what_is_left_alone_are_refused(tie: Callable[[nn.Module, nn.Module], None]) -> None:
    """B17: an output projection, MLP or embedding in the memory of a W_V would not stay as it is."""
    model = two()
    model["mlp"] = nn.Linear(16, 16, bias=False)
    tie(model["a"].v_proj, model["mlp"])
    with unchanged(model), pytest.raises(ValueError, match=r"shares its memory with"):
        ck.conditioned_(model, layouts=LAYOUTS)
    assert ck.conditioned_(model, layouts=LAYOUTS, where=lambda name, _: name == "b").touched


def test_parametrized_ties_of_one_role_are_written_once() -> None:
    model = two()
    parametrized_share(model["a"].k_proj, model["b"].k_proj)
    report = ck.conditioned_(model, layouts=LAYOUTS)
    assert [name for name, _ in report.skipped] == ["b.k_proj.weight (k)"]
    assert ck.verify(model, layouts=LAYOUTS).ok


def test_weights_beside_each_other_in_one_memory_are_no_tie() -> None:
    model = two()
    model["mlp"] = nn.Linear(16, 16, bias=False)
    memory = torch.randn(7, 16, 16)
    linears = [layer for each in (model["a"], model["b"]) for layer in (each.q_proj, each.k_proj, each.v_proj)]
    linears.append(model["mlp"])
    for layer, part in zip(linears, memory, strict=True):
        layer.weight = nn.Parameter(part)
    assert len(ck.conditioned_(model, layouts=LAYOUTS).touched) == 6
    assert ck.verify(model, layouts=LAYOUTS).ok


def test_a_failure_at_the_last_weight_undoes_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from conditioned_kernels.initialize import writing

    model = two()
    write, calls = writing.write, []

    def failing(target: writing.Target, blocks: writing.Blocks) -> None:
        calls.append(target.name)
        if len(calls) == 6:
            target.heads[0].copy_(blocks[0][1][0])
            raise KeyboardInterrupt
        write(target, blocks)

    monkeypatch.setattr(writing, "write", failing)
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        ck.conditioned_(model, layouts=LAYOUTS)
    assert len(calls) == 6


def test_albert_shares_one_module() -> None:
    model, _, _ = hf(
        "AlbertConfig",
        "AlbertModel",
        hidden_size=16,
        embedding_size=8,
        num_attention_heads=4,
        num_hidden_layers=3,
        intermediate_size=24,
        vocab_size=32,
    )
    assert len(ck.conditioned_(model).touched) == 3
