"""The weights' figures of ConditioningMonitor against the SVD in float64, and its promises about time and memory."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import conditioned_kernels as ck
from conditioned_kernels.heads import Separate
from conditioned_kernels.initialize.target import resolve
from conditioned_kernels.monitor import ConditioningMonitor, KappaAbove, Record, summarize

from .models import CASES
from .tolerances import kappa64

RTOL = 1e-2
FAMILIES = (
    "torch-mha",  # packed in blocks
    "torch-mha-separate",
    "timm-vit",
    "timm-levit",  # per head, through batch norms' linear maps
    "timm-maxvit-conv",  # 1x1 convolution
    "modernbert",
    "gpt2",  # (in, out)
    "gpt_neox",  # interleaved
    "gpt_neo",
    "bloom",
    "falcon-groups",  # grouped, not contiguous
    "llama",  # K and V per K/V head
    "deepseek_v3",  # latent factors and parts
)
BY_NAME = {case.name: case for case in CASES}


class Attention(nn.Module):
    """Four heads of eight rows on 24 features, in separate weights."""

    def __init__(self, width: int = 24, heads: int = 4, head_dim: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, heads * head_dim, bias=False) for _ in range(3))
        self.out = nn.Linear(heads * head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


LAYOUTS = {Attention: Separate("heads")}


def stack(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention() for _ in range(depth)))


def watch(model: nn.Module, **options: Any) -> ConditioningMonitor:
    return ConditioningMonitor(model, **{"layouts": LAYOUTS, "rtol": RTOL, "spectra": 0} | options)


def exact(model: nn.Module) -> dict[tuple[str, str, int], Tensor]:
    """Singular values of every head in float64."""
    found = {}
    for target in resolve(ck.find_attention(model, layouts=LAYOUTS)):
        heads = target.heads.reshape(-1, *target.heads.shape[-2:]).double()
        for head, matrix in enumerate(heads):
            found[target.layer.name, target.projection.label, head] = torch.linalg.svdvals(matrix)
    return found


def weights(model: nn.Module, layer: int = 0, role: str = "q") -> Tensor:
    """(heads, head_dim, in_features) of a :func:`stack`."""
    return getattr(model[layer], f"{role}_proj").weight.detach().unflatten(0, (4, 8))


def place(record: Record) -> tuple[str, str, int]:
    return record.layer, record.projection, record.head


def agrees(record: Record, sigma: Tensor, rtol: float = RTOL) -> None:
    kappa = float(sigma[0] / sigma[-1])
    slack = 1 + kappa64(64, 64, kappa)
    assert record.status == "converged", record
    assert record.low <= kappa * slack and kappa <= record.high * slack, (record, kappa)
    assert record.high <= (1 + rtol) * record.low
    for value, true in (
        (record.kappa, kappa),
        (record.sigma_max, sigma[0]),
        (record.sigma_min, sigma[-1]),
        (record.stable_rank, (sigma**2).sum() / sigma[0] ** 2),
    ):
        assert abs(value / float(true) - 1) <= rtol, (record, value, true)


def perturb(model: nn.Module, step: int, size: float = 0.02) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                noise = torch.randn(parameter.shape, generator=generator) * size * parameter.std()
                parameter.add_(noise.to(parameter.dtype))


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_every_head_at_every_step(name: str, each_backend: str) -> None:
    case = BY_NAME[name]
    if case.missing:
        pytest.skip(case.missing)
    torch.manual_seed(0)
    model, _, _ = case.build()
    monitor = watch(model)
    truth = {0: exact(model)}
    for step in range(1, 5):
        perturb(model, step)
        monitor.step()
        truth[step] = exact(model)
    records = monitor.flush()
    assert {record.step for record in records} == set(truth)
    for step, heads in truth.items():
        mine = {place(record): record for record in records if record.step == step}
        assert set(mine) == set(heads)
        for key, sigma in heads.items():
            agrees(mine[key], sigma)
    assert not monitor.skipped


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, each_backend: str) -> None:
    model = stack().to(dtype)
    monitor = watch(model)
    monitor.step()
    truth = exact(model)
    for record in monitor.flush():
        agrees(record, truth[place(record)])


def matrix(sigma: Tensor, cols: int = 24, seed: int = 0) -> Tensor:
    """A matrix with these singular values, in float64."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(sigma)
    u = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(cols, rows, dtype=torch.float64, generator=generator))[0]
    return (u * sigma) @ v.mT


@pytest.mark.parametrize("smallest", [1e-2, 1e-3, 1e-4, 1e-5])
def test_f06_small_singular_values(smallest: float, each_backend: str) -> None:
    """F06: relative error below 1 % down to sigma_min / sigma_max = 1e-5 in float32."""
    model = stack(1)
    weights(model)[2] = matrix(torch.logspace(0, math.log10(smallest), 8, dtype=torch.float64)).float()
    monitor = watch(model)
    for _ in range(3):
        monitor.step()
    truth = exact(model)
    for record in monitor.flush():
        agrees(record, truth[place(record)])


def test_f06_beyond_the_precision_of_the_weights(each_backend: str) -> None:
    """F06: below that, kappa is at least 1 / eps and says that it is only bounded from below."""
    model = stack(1)
    weights(model)[2] = matrix(torch.logspace(0, -9, 8, dtype=torch.float64)).float()
    weights(model, role="k")[1, 3] = weights(model, role="k")[1, 4]
    monitor = watch(model)
    monitor.step()
    records = {place(record): record for record in monitor.flush() if record.step == 1}
    for key in (("0", "q", 2), ("0", "k", 1)):
        assert records[key].kappa >= 1e6 and records[key].low >= 1e5
        assert records[key].high == math.inf and records[key].status == "tolerance_not_met"
    agrees(records["0", "q", 1], exact(model)["0", "q", 1])


def test_a_head_that_turns_bad_between_flushes_is_bracketed_and_then_sharp(each_backend: str) -> None:
    model = stack(1)
    monitor = watch(model)
    weights(model)[2] = matrix(torch.logspace(0, -3.3, 8, dtype=torch.float64)).float()
    sigma = exact(model)["0", "q", 2]
    kappa = float(sigma[0] / sigma[-1])
    for status in ("tolerance_not_met", "converged"):
        monitor.step()
        record = next(each for each in monitor.flush() if each.step and place(each) == ("0", "q", 2))
        assert record.status == status
        assert record.low <= kappa <= record.high
    agrees(record, sigma)


@pytest.mark.parametrize("scale", [1e-18, 1e-4, 1e4, 1e15])
def test_f01_any_scale(scale: float, each_backend: str) -> None:
    """F01: no overflow or loss at scales whose squares float32 cannot hold."""
    model = stack(1)
    with torch.no_grad():
        model[0].q_proj.weight.mul_(scale)
    monitor = watch(model)
    monitor.step()
    truth = exact(model)
    for record in monitor.flush():
        agrees(record, truth[place(record)])


def test_f03_f04_flat_spectra_and_jumps(each_backend: str) -> None:
    """F03, F04: warm vectors orthogonal to the answer, and spectra without gaps, cost steps and no accuracy."""
    model = stack(1)
    ck.conditioned_(model, layouts=LAYOUTS)
    monitor = watch(model)
    for step in range(6):
        w = weights(model)
        w.zero_()
        sigma = torch.ones(8).index_fill_(0, torch.tensor([step % 8]), 10.0)
        w[:, torch.arange(8), torch.arange(8)] = sigma
        w[1] = matrix(torch.linspace(1, 0.9, 8, dtype=torch.float64), seed=step).float()
        truth = exact(model)
        monitor.step()
        for record in (each for each in monitor.flush() if each.step == step + 1):
            agrees(record, truth[place(record)])


def test_a06_the_same_numbers_every_time(each_backend: str) -> None:
    """A06: equal runs give equal records, whatever ran before."""
    runs = []
    for _ in range(2):
        model = stack()
        monitor = watch(model)
        for step in range(3):
            perturb(model, step)
            monitor.step()
        runs.append(monitor.flush())
    assert runs[0] == runs[1]


# --- what is measured when -------------------------------------------------------------------------------------------


def test_every_and_layers_per_step() -> None:
    model = stack(5)
    monitor = watch(model, every=3, layers_per_step=2)
    for _ in range(21):
        monitor.step()
    seen = {}
    for record in monitor.flush():
        seen.setdefault(record.step, set()).add(record.layer)
    everything = {"0", "1", "2", "3", "4"}
    turns = [{"0", "1"}, {"2", "3"}, {"4"}]
    assert seen == {0: everything} | {3 * (i + 1): turns[i % 3] for i in range(7)}


def test_steps_that_jump_still_meet_every() -> None:
    monitor = watch(stack(1), every=4, first_step=10)
    for number in (11, 13, 15, 15, 17):
        monitor.step(number)
    assert sorted({record.step for record in monitor.flush()}) == [10, 13, 17]


def test_heads() -> None:
    model, _, _ = BY_NAME["llama"].build()
    monitor = watch(model, heads=(0, 3))
    truth = exact(model)
    records = monitor.flush()
    assert {(record.projection, record.head) for record in records} == {("q", 0), ("q", 3), ("k", 0), ("v", 0)}
    for record in records:
        agrees(record, truth[place(record)])


def test_flush_every_and_capacity() -> None:
    model = stack(1)
    monitor = watch(model, flush_every=4, capacity=30)
    for _ in range(3):
        monitor.step()
    assert not monitor.records
    monitor.step()
    assert len(monitor.records) == 30 and monitor.records[-1].step == 4
    assert monitor.flush() == []


def test_e21_one_batched_call_for_heads_of_one_shape(monkeypatch: pytest.MonkeyPatch, extension: str) -> None:
    """E21: one spectrum call for all layers' heads of a shape, and no copy of a weight."""
    if extension:
        pytest.skip(f"no extension: {extension}")
    from conditioned_kernels import _ops

    model = stack(6)
    monitor = watch(model)
    calls = []
    real = _ops.spectrum_bracket
    monkeypatch.setattr(_ops, "spectrum_bracket", lambda gram, *rest: calls.append(len(gram)) or real(gram, *rest))
    monitor.step()
    assert calls == [6 * 3 * 4]


def test_spectra_at_both_ends() -> None:
    model = stack(2)
    before = exact(model)
    with watch(model, spectra=2) as monitor:
        perturb(model, 1)
        monitor.step()
    after = exact(model)
    spectra = [record for record in monitor.records if record.spectrum]
    assert [(record.step, *place(record)) for record in spectra if record.projection == "q"] == [
        (step, layer, "q", head) for step in (0, 1) for layer in ("0", "1") for head in (0, 1)
    ]
    for record in spectra:
        sigma = (before if record.step == 0 else after)[place(record)]
        assert torch.allclose(torch.tensor(record.spectrum, dtype=torch.float64), sigma, rtol=1e-12)


# --- no synchronization ----------------------------------------------------------------------------------------------


class NoSync(TorchDispatchMode):
    """Fails on everything that makes the host wait for a device, or a shape depend on values."""

    FORBIDDEN = (
        "aten._local_scalar_dense",
        "aten.nonzero",
        "aten.masked_select",
        "aten.is_nonzero",
        "aten.equal",
        "aten._unique2",
        "aten.unique_dim",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rpartition(".")[0]
        self.seen.append(name)
        assert name not in self.FORBIDDEN, f"{name} on an ordinary step"
        index = args[1] if name in ("aten.index", "aten.index_put_", "aten.index_put") else ()
        assert not any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in index), "boolean index"
        assert name != "aten._to_copy" or (kwargs or {}).get("device") is None, "a copy to another device"
        return func(*args, **(kwargs or {}))


def test_f18_no_sync_on_ordinary_steps(each_backend: str) -> None:
    """F18, by the operations that reach the dispatcher; tests/test_gpu.py asks the CUDA driver."""
    model, _, _ = BY_NAME["gpt2"].build()
    monitor = watch(model, layers_per_step=1, heads=(0, 2))
    with NoSync() as mode:
        for _ in range(5):
            monitor.step()
    assert len(mode.seen) > 20
    assert {record.step for record in monitor.flush()} == set(range(6))


def test_f18_one_transfer_per_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = watch(stack())
    for _ in range(10):
        monitor.step()
    moved = []
    real = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: moved.append(self.shape) or real(self))
    assert len(monitor.flush()) == 11 * 3 * 12
    assert len(moved) == 1


def test_f08_memory_is_flat() -> None:
    """F08: 2,000 steps keep no more tensors and no more bytes than 50 do."""
    model = stack(1)
    monitor = watch(model, capacity=500, flush_every=20)

    def tensors() -> tuple[int, int]:
        gc.collect()
        found = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.layout is torch.strided]
        return len(found), sum(each.untyped_storage().nbytes() for each in found)

    sizes, objects = [], []
    for _ in range(4):
        for _ in range(500):
            monitor.step()
        sizes.append((tensors(), len(monitor.records)))
        objects.append(len(gc.get_objects()))
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3]
    assert max(objects) < objects[0] + 500  # fewer than the steps


# --- survival --------------------------------------------------------------------------------------------------------


def test_f19_a19_non_finite_heads(each_backend: str) -> None:
    """F19, A19: NaN and inf are that head's alone, counted, and gone once the weights are well again."""
    model = stack(2)
    monitor = watch(model)
    good = weights(model).clone()
    weights(model)[1, 2, 3] = math.nan
    weights(model, 1, "v")[0, 0, 0] = math.inf
    weights(model, 1, "k")[3] = 0
    for _ in range(2):
        monitor.step()
        records = {place(record): record for record in monitor.flush() if record.step}
        bad = {key: record for key, record in records.items() if record.status != "converged"}
        assert {key: record.status for key, record in bad.items()} == {
            ("0", "q", 1): "non_finite",
            ("1", "v", 0): "non_finite",
            ("1", "k", 3): "zero_matrix",
        }
        assert math.isnan(bad["0", "q", 1].kappa) and math.isnan(bad["1", "v", 0].sigma_max)
        assert bad["1", "k", 3].kappa == math.inf and bad["1", "k", 3].sigma_max == 0
        [(_, scalars)] = summarize(records.values())
        assert scalars["nonfinite_heads"] == 3
        assert all(math.isfinite(value) for value in scalars.values())
        assert scalars["log10_kappa_max/q/0"] == 16
    weights(model).copy_(good)
    weights(model, 1, "v")[0, 0, 0] = 0.1
    weights(model, 1, "k")[3] = good[0]
    truth = exact(model)
    monitor.step()
    for record in (each for each in monitor.flush() if each.step == 3):
        agrees(record, truth[place(record)])


def test_parameters_that_are_replaced(each_backend: str) -> None:
    """Other Parameter objects, dtypes, storages and modules are followed."""
    model = stack(2)
    monitor = watch(model)

    def check() -> None:
        monitor.step()
        monitor.step()
        truth = exact(model)
        fresh = [record for record in monitor.flush() if record.step == monitor.current_step]
        assert {place(record) for record in fresh} == set(truth)
        for record in fresh:
            agrees(record, truth[place(record)])

    model[0].q_proj.weight = nn.Parameter(torch.randn(32, 24))
    check()
    model[0].q_proj.weight.data = torch.randn(32, 24)
    check()
    model.load_state_dict(stack(2).state_dict(), assign=True)
    check()
    model.double()
    check()
    model.float()
    check()
    model[1] = Attention()
    monitor.flush()
    check()
    model[1] = Attention(16, 2, 4)
    monitor.flush()
    check()


def test_weights_that_cannot_be_read_are_skipped_with_the_reason() -> None:
    """B26, F21: bytes are never weights; other layers are measured all the same."""
    model = stack(3)
    model[0].q_proj.weight = nn.Parameter(torch.zeros(32, 24, dtype=torch.int8), requires_grad=False)
    model[1].k_proj.weight = nn.Parameter(torch.empty(32, 24, device="meta"))
    extra = nn.ModuleDict({"conv": nn.Conv1d(3, 4, 5), "lstm": nn.LSTM(4, 4), "embedding": nn.Embedding(5000, 64)})
    model.append(extra)
    monitor = watch(model)
    seen = {(record.layer, record.projection) for record in monitor.flush()}
    assert seen == {("1", "q"), ("1", "v"), ("2", "q"), ("2", "k"), ("2", "v")}
    assert "int8" in monitor.skipped["0"] and "meta" in monitor.skipped["1.k_proj.weight (k)"]
    assert len(monitor.skipped) == 2
    with pytest.raises(ck.NoAttentionFound, match="no attention weight to measure in ModuleDict"):
        watch(extra)


def test_a_model_with_nothing_left_to_measure_is_waited_for() -> None:
    """Weights that are packed, moved away or removed in mid-run are no reason to end it."""
    model = stack(2)
    monitor = watch(model)
    monitor.flush()
    good = copy.deepcopy(model.state_dict())
    model.to("meta")
    with pytest.warns(UserWarning, match="step 1: no attention weight to measure .*meta.*; the monitor waits"):
        monitor.step()
    monitor.step()
    assert monitor.flush() == [] and "meta" in monitor.skipped["0.k_proj.weight (k)"]
    model.load_state_dict(good, assign=True)
    monitor.flush()
    monitor.step()
    truth = exact(model)
    fresh = monitor.flush()
    assert {place(record) for record in fresh} == set(truth) and not monitor.skipped
    for record in fresh:
        agrees(record, truth[place(record)])
    del model[:]
    with pytest.warns(UserWarning, match="step 3: no attention weight to measure"):
        monitor.flush()
    monitor.step()
    monitor.close()


def test_f21_a_head_too_large_for_every_step_is_left_out() -> None:
    model = nn.Sequential(Attention(), Attention(1100, 1, 1100))
    monitor = watch(model)
    assert {record.layer for record in monitor.flush()} == {"0"}
    assert "1100" in monitor.skipped["1.q_proj.weight (q)"]


def test_b27_parametrized_weights_are_read_without_a_trace() -> None:
    """B27: the value in use is measured, and spectral_norm's own power iteration does not move."""
    model = stack(1)
    torch.nn.utils.parametrizations.spectral_norm(model[0].q_proj)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monitor = watch(model)
    monitor.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    with torch.no_grad():
        model.eval()
        truth = exact(model)
        model.train()
    for record in monitor.flush():
        agrees(record, truth[place(record)])


def test_b24_b25_wrappers_and_adapters() -> None:
    """B24, B25: the user's names through compile and DataParallel; an adapter's base layer."""
    model = stack(2)

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer, self.lora_A = base, nn.Linear(24, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x)

    model[1].q_proj = Lora(model[1].q_proj)
    for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        records = watch(wrapped).flush()
        assert {record.layer for record in records} == {"0", "1"} and len(records) == 24


def test_amp_and_surrounding_modes_change_nothing() -> None:
    """Inside autocast, inference mode and another default dtype and device, the same figures."""
    model = stack()
    plain, odd = watch(model), watch(model)
    plain.step()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        odd.step()
    assert plain.flush() == odd.flush()
    plain.step()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            odd.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert plain.flush() == odd.flush()


def test_closed_monitors_and_wrong_arguments() -> None:
    model = stack(1)
    monitor = watch(model)
    monitor.close()
    monitor.close()
    with pytest.raises(RuntimeError, match="closed"):
        monitor.step()
    for wrong in (
        {"every": 0},
        {"activations_every": -1},
        {"layers_per_step": 0},
        {"heads": (-1,)},
        {"rtol": 0},
        {"flush_every": True},
        {"jacobian": "fast"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            watch(model, **wrong)
    with pytest.raises(TypeError, match="model"):
        ConditioningMonitor([1])  # type: ignore[arg-type]
    for wrong, words in (
        ({"heads": 3}, "heads must be a sequence"),
        ({"sinks": "run.jsonl"}, "sinks must be .* 'r' has no write"),
        ({"alerts": KappaAbove}, "alerts must be"),
    ):
        with pytest.raises(TypeError, match=words):
            watch(model, **wrong)
    assert {record.head for record in watch(model, heads=(1, 0, 1)).flush()} == {0, 1}
    assert len(watch(model, heads=(1, 1)).flush()) == len(watch(model, heads=(1,)).flush())
    with pytest.raises(ck.NoAttentionFound, match=r"heads=\(9,\)"):
        watch(model, heads=(9,))
