"""The monitor's look at real batches: Jacobian figures, and that training is bit for bit what it is without it."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import conditioned_kernels as ck
from conditioned_kernels.heads.mechanics import attention_heads
from conditioned_kernels.integrations.files import read_records
from conditioned_kernels.monitor import JACOBIAN, ConditioningMonitor, KappaAbove, Record

from .models import hf

TOKENS = 5


def encoder(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def gpt2(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
    return hf("GPT2Config", "GPT2LMHeadModel", **shape | options)[0]


def llama() -> nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return hf("LlamaConfig", "LlamaForCausalLM", vocab_size=32, intermediate_size=24, **shape)[0]


def watch(model: nn.Module, **options: Any) -> ConditioningMonitor:
    return ConditioningMonitor(model, **{"activations_every": 1, "tokens": TOKENS, "spectra": 0} | options)


def jacobians(records: list[Record]) -> list[Record]:
    return [record for record in records if record.projection == JACOBIAN]


def batch(step: int, size: int = 2) -> Tensor:
    return torch.randn(size, 7, 16, generator=torch.Generator().manual_seed(step))


def tokens(step: int) -> Tensor:
    return torch.randint(1, 32, (2, 9), generator=torch.Generator().manual_seed(step))


def lm_loss(model: nn.Module, step: int) -> Tensor:
    return model(input_ids=tokens(step), labels=tokens(step)).loss


def encoder_loss(model: nn.Module, step: int) -> Tensor:
    return model(batch(step)).square().mean()


def train(
    model: nn.Module,
    loss: Callable[[nn.Module, int], Tensor],
    steps: int,
    monitor: ConditioningMonitor | None = None,
    *,
    accumulate: int = 1,
) -> list[Tensor]:
    """Losses of a short run whose dropout draws from the global stream."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            value = loss(model, step * accumulate + part)
            value.backward()
            losses.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
    return losses


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [gpt2, llama])
def test_rows_are_those_of_the_batch_and_of_the_weights_before_the_update(build: Callable[[], nn.Module]) -> None:
    """The figures of step t are of the forward pass that gave update t + 1."""
    model = build().eval()  # no dropout, so that a second pass repeats the first
    monitor = watch(model, samples=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected = {}
    for step in range(3):
        for layer in ck.find_attention(model).layers:

            def look(_: nn.Module, args: Any, kwargs: Any, layer: Any = layer, step: int = step) -> None:
                heads = attention_heads(layer, args, kwargs, samples=2, tokens=TOKENS)
                expected[step, layer.name] = ck.jacobian_condition(heads), ck.jacobian_bound(heads)

            handle = layer.module.register_forward_pre_hook(look, with_kwargs=True)
            with torch.no_grad():
                lm_loss(model, step)
            handle.remove()
        monitor._arm()  # the passes above used the hooks up
        lm_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
    rows = jacobians(monitor.flush())
    kv = expected[0, rows[0].layer][0].kappa.shape[-1]
    assert len(rows) == 3 * 2 * 2 * kv
    for row in rows:
        estimate, bound = expected[row.step, row.layer]
        at = (row.sample, row.head)
        assert row.kappa == float(estimate.kappa[at]) and row.low <= row.kappa <= row.high
        assert row.bound == pytest.approx(float(bound.bound.expand(estimate.kappa.shape)[at]), rel=1e-9)
        assert row.kappa_q == pytest.approx(float(bound.kappa_q.expand(estimate.kappa.shape)[at]), rel=1e-9)
        assert row.theorem == bound.theorem and row.status == ck.Status(int(estimate.status[at])).name.lower()


def test_activations_every_and_layers_per_step() -> None:
    model = encoder(3)
    monitor = watch(model, activations_every=4, layers_per_step=2, heads=(1,))
    armed = []
    for step in range(10):
        armed.append(hooks(model))
        encoder_loss(model, step).backward()
        assert hooks(model) == 0
        monitor.step()
    assert [number > 0 for number in armed] == [step % 4 == 0 for step in range(10)]
    rows = jacobians(monitor.flush())
    assert {(row.step, row.layer) for row in rows} == {
        (0, "layers.0.self_attn"),
        (0, "layers.1.self_attn"),
        (4, "layers.0.self_attn"),
        (4, "layers.1.self_attn"),
        (8, "layers.0.self_attn"),
        (8, "layers.1.self_attn"),
    }
    assert {row.head for row in rows} == {1}


# --- no effect -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "loss"),
    [
        (lambda: gpt2(attn_pdrop=0.1, resid_pdrop=0.1), lm_loss),
        (llama, lm_loss),
        (lambda: encoder(dropout=0.1), encoder_loss),
    ],
    ids=["gpt2", "llama", "encoder"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_f15_training_is_bit_identical(
    build: Callable[[], nn.Module], loss: Callable[[nn.Module, int], Tensor], accumulate: int
) -> None:
    """F15: weights, losses, random state and attention implementation with the monitor on are those without it."""
    ends = []
    for on in (False, True):
        model = build()
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
        monitor = watch(model, activations_every=2) if on else None
        torch.manual_seed(7)
        losses = train(model, loss, 6, monitor, accumulate=accumulate)
        ends.append((losses, model.state_dict(), torch.get_rng_state()))
        assert getattr(getattr(model, "config", None), "_attn_implementation", None) == implementation
    (losses, weights, state), (other_losses, other_weights, other_state) = ends
    assert all(map(torch.equal, losses, other_losses))
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert torch.equal(state, other_state)
    assert monitor is not None
    rows = jacobians(monitor.flush())
    assert {row.step for row in rows} == {0, 2, 4} and all(row.head >= 0 for row in rows)
    assert len({(row.step, row.layer, row.head, row.sample) for row in rows}) == len(rows)


def test_f08_nothing_is_kept_alive() -> None:
    """F08: no activation, graph or hook outlives its step; also in training mode without gradients."""
    model = encoder()
    monitor = watch(model, flush_every=5, capacity=50)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())  # some proxies warn when asked

    counts = []
    for part in range(4):
        for step in range(10):
            if part % 2:
                with torch.no_grad():
                    encoder_loss(model, step)
            else:
                encoder_loss(model, step).backward()
                model.zero_grad()
            monitor.step()
        monitor.flush()
        counts.append(tensors())
    assert counts[1] == counts[2] == counts[3]


def test_captured_tensors_are_detached_copies() -> None:
    model = encoder()
    monitor = watch(model)
    inputs = batch(0).requires_grad_()
    model(inputs)
    storages = {each.untyped_storage()._cdata for each in (inputs, *model.parameters())}
    for capture in monitor._captures:
        for value in vars(capture.captured).values():
            if isinstance(value, Tensor):
                assert not value.requires_grad and value.untyped_storage()._cdata not in storages


# --- checkpointing, compilation, other ways of calling ----------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layers, self.options = model.layers, options

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options)
        return x


def save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.clone.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(save_products)},
    ],
    ids=["reentrant", "non-reentrant", "selective"],
)
def test_f10_activation_checkpointing(options: dict[str, Any]) -> None:
    """F10: one record per layer, head and step, and the gradients of a run without the monitor."""
    grads = []
    for on in (False, True):
        torch.manual_seed(1)
        model = Checkpointed(encoder(dropout=0.1), **options)
        monitor = watch(model) if on else None
        for step in range(2):
            model(batch(step).requires_grad_()).square().mean().backward()
            if monitor is not None:
                monitor.step()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *grads))
    rows = jacobians(monitor.flush())  # type: ignore[union-attr]
    places = [(row.step, row.layer, row.head) for row in rows]
    assert len(places) == len(set(places)) == 2 * 2 * 2
    assert not monitor.silent  # type: ignore[union-attr]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_f11_compiled_models(fullgraph: bool) -> None:
    """F11: weights are measured before, during and after; activations are refused by name, or said to be missing."""
    model = encoder()
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match=r"torch\.compile.*OptimizedModule.*activations_every=0"):
        watch(compiled)
    first = ConditioningMonitor(compiled, spectra=0)
    encoder_loss(compiled, 0)
    second = ConditioningMonitor(model, spectra=0)
    for monitor in (first, second):
        monitor.step()
        assert {row.layer for row in monitor.flush()} == {"layers.0.self_attn", "layers.1.self_attn"}
    # Attached first, compiled then: the traced hook does nothing, and the self-check says so.
    model = encoder()
    early = watch(model)
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    outputs = compiled(batch(0))
    with pytest.warns(UserWarning, match=r"layers\.0\.self_attn.*layers\.1\.self_attn.*torch\.compile"):
        early.step()
    assert torch.equal(outputs, model(batch(0)))
    # The module's own .compile().
    model = encoder()
    model.layers[1].compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"inside layers\.1"):
        watch(model)
    assert ConditioningMonitor(model, spectra=0).flush()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_f12_the_fused_inference_path(mode: Callable[[], Any]) -> None:
    """F12: in torch's fused encoder layer no hook fires; a record and a warning say so, once."""
    model = encoder().eval()
    monitor = watch(model)
    with mode():
        model(batch(0))
    fused = not all(capture.fired for capture in monitor._captures)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor.step()
        monitor.step()
    rows = jacobians(monitor.flush())
    silent = [row for row in rows if row.head < 0]
    assert len(caught) == 1
    assert {row.layer for row in silent} == set(monitor.silent) == {"layers.0.self_attn", "layers.1.self_attn"}
    assert {row.step for row in silent} == ({0} if fused else {1})
    assert all(row.status == "no forward call seen" for row in silent)


def test_f14_forward_called_directly() -> None:
    """F14: a call past ``__call__`` is reported by the layer's name."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn.forward(x, x, x)[0]

    model = Direct()
    monitor = watch(model)
    model(batch(0))
    with pytest.warns(UserWarning, match=r"no forward call reached 'attn' in step 1.*\.forward\(\)"):
        monitor.step()
    assert monitor.silent == {"attn": 0}
    assert hooks(model) == 1  # armed again for the next step
    monitor.close()
    assert hooks(model) == 0


# --- survival --------------------------------------------------------------------------------------------------------


def test_an_evaluation_in_between_is_not_what_is_measured() -> None:
    model = encoder()
    monitor = watch(model)
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 7, 16))
    model.train()
    assert not any(capture.fired for capture in monitor._captures)
    encoder_loss(model, 0)
    assert all(capture.fired for capture in monitor._captures)
    with torch.no_grad():
        model.eval()(batch(1))
    monitor.step()
    assert all(math.isfinite(row.kappa_x) for row in jacobians(monitor.flush()))


def test_autocast() -> None:
    """AMP: training under autocast is bit-identical, and there are figures."""
    ends = []
    for on in (False, True):
        model = encoder()
        monitor = watch(model) if on else None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = train(model, encoder_loss, 3, monitor)
        ends.append((losses, model.state_dict()))
    assert all(map(torch.equal, ends[0][0], ends[1][0]))
    assert all(torch.equal(ends[0][1][name], ends[1][1][name]) for name in ends[0][1])
    rows = jacobians(monitor.flush())  # type: ignore[union-attr]
    assert len(rows) == 3 * 2 * 2 and all(row.head >= 0 for row in rows)


def test_f19_non_finite_activations_and_weights() -> None:
    """F19: NaN in the batch or in the weights gives NaN rows, and training goes on."""
    model = encoder()
    monitor = watch(model)
    model(batch(0) * math.nan)
    monitor.step()
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight[3] = math.inf
    model(batch(1))
    monitor.step()
    rows = jacobians(monitor.flush())
    assert {row.status for row in rows if row.step == 0} == {"non_finite"}
    second = {(row.layer, row.head): row.status for row in rows if row.step == 1}
    assert second.pop(("layers.1.self_attn", 0)) == "non_finite"
    assert set(second.values()) == {"converged"}


def test_classes_without_a_closed_form_say_so_and_keep_their_weights_figures() -> None:
    """A class of the user's own: one row with the reason, every time."""

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)

    model = nn.Sequential(Mine())
    layout = lambda module: {role: getattr(module, role).weight.unflatten(0, (2, 8)) for role in "qkv"}  # noqa: E731
    monitor = watch(model, layouts={Mine: layout})
    for step in range(2):
        model(batch(step))
        monitor.step()
    records = monitor.flush()
    rows = jacobians(records)
    assert [(row.layer, row.head) for row in rows] == [("0", -1), ("0", -1)]
    assert "no row of mechanics" in rows[0].status
    assert len(records) - len(rows) == 3 * 6


def test_copies_of_an_armed_model_have_inert_hooks() -> None:
    model = encoder()
    monitor = watch(model)
    twin, stored = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in (twin, stored):
        each(batch(0))
        assert torch.equal(each(batch(1)), copy.deepcopy(each)(batch(1)))
    assert not any(capture.fired for capture in monitor._captures)
    model(batch(0))
    monitor.step()
    assert all(row.head >= 0 for row in jacobians(monitor.flush()))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_of_a_monitor_watch_their_own_model(duplicate: Callable[[Any], Any]) -> None:
    class Keep:
        def __init__(self) -> None:
            self.records: list[Record] = []

        def write(self, records: Any) -> None:
            self.records += records

        def close(self) -> None:
            pass

        def __reduce__(self) -> Any:
            raise TypeError("a sink is never copied")

    model = encoder()
    sink = Keep()
    monitor = watch(model, sinks=[sink])
    encoder_loss(model, 0)
    monitor.step()
    twin = duplicate(monitor)
    assert sink.records and repr([*twin.records]) == repr([*monitor.records]) == repr(sink.records)
    assert twin.current_step == 1
    with torch.no_grad():
        twin._model.layers[0].self_attn.in_proj_weight.mul_(3)
    for each in (monitor, twin):
        encoder_loss(each._model, 1)
        each.step()
    mine, other = monitor.flush(), twin.flush()
    pairs = [(a, b) for a, b in zip(mine, other, strict=True) if a.layer == "layers.0.self_attn" and a.head >= 0]
    assert pairs and all(
        b.sigma_max == pytest.approx(3 * a.sigma_max, rel=1e-5) for a, b in pairs if a.projection != JACOBIAN
    )
    assert sink.records[-len(mine) :] == mine


def test_the_monitor_is_a_context_and_leaves_no_hooks_when_training_fails() -> None:
    model = encoder()
    with pytest.raises(ZeroDivisionError), watch(model, spectra=1) as monitor:
        assert hooks(model) == 2
        encoder_loss(model, 0)
        monitor.step()
        raise ZeroDivisionError
    assert hooks(model) == 0
    assert any(record.spectrum for record in monitor.records)


def test_what_training_failed_with_is_what_is_raised() -> None:
    """An alert that stops the run does not hide the error, or Ctrl-C, that has stopped it already."""

    def stop(message: str, record: Record) -> None:
        raise ValueError(message)

    alert = KappaAbove(1.0, callback=stop)
    said = pytest.warns(UserWarning, match="closing the ConditioningMonitor failed: ValueError: step 0")
    with said, pytest.raises(KeyboardInterrupt), watch(encoder(), alerts=[alert]):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="step 0"), watch(encoder(), alerts=[KappaAbove(1.0, callback=stop)]):
        pass


def test_a_run_that_is_interrupted_keeps_what_was_seen(tmp_path: Path) -> None:
    """Records up to the last step are in the file without close, as a Trainer tells its callbacks of no error."""
    script = """
import os, signal, torch
import conditioned_kernels as ck
from conditioned_kernels.integrations.files import JsonlSink
model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
monitor = ck.ConditioningMonitor(model, activations_every=1, sinks=[JsonlSink("run.jsonl")])
model(torch.randn(2, 4, 16))
monitor.step()
if os.fork() == 0:
    raise SystemExit
os.wait()
os.kill(os.getpid(), signal.SIGINT)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(ck.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stderr.strip().endswith("KeyboardInterrupt"), done.stderr
    records = read_records(tmp_path / "run.jsonl")
    assert {(record.step, record.projection) for record in records if not record.spectrum} == {
        *((step, role) for step in (0, 1) for role in "qkv"),
        (0, JACOBIAN),
    }
    assert len({(each.step, each.projection, each.head, each.spectrum) for each in records}) == len(records)
