"""What the two ranks of test_monitor_sharded.py's group run. Each check raises where something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import conditioned_kernels as ck
from conditioned_kernels.monitor import JACOBIAN, Record

from .sharded_checks import IDS, MODELS, PLAN, placements, shard
from .test_monitor import agrees, exact, place


def watch(model: nn.Module, **options: object) -> ck.ConditioningMonitor:
    return ck.ConditioningMonitor(model, rtol=1e-2, **options)


def on_all_ranks(records: list[Record]) -> None:
    """Every rank has the same records, bit for bit."""
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, repr(records))
    assert len(set(gathered)) == 1


def check_placements(folder: Path) -> None:
    """F22: the figures of the unsharded model, on every rank, for every placement."""
    for name in ("llama", "narrow"):
        build = MODELS[name]
        truth = exact(build())
        for text, mesh, where in placements(dist.get_world_size()):
            with watch(shard(build(), mesh, where), layers_per_step=1) as monitor:
                for _ in range(2):  # both layers
                    monitor.step()
                records = monitor.flush()
            assert not monitor.skipped, (name, text, monitor.skipped)
            assert {place(record) for record in records if record.step} == set(truth)
            for record in records:
                agrees(record, truth[place(record)])
            for record in (each for each in monitor.records if each.spectrum):
                spectrum = torch.tensor(record.spectrum, dtype=torch.float64)
                assert torch.allclose(spectrum, truth[place(record)], rtol=1e-6)
            on_all_ranks(list(monitor.records))


def check_fsdp2(folder: Path) -> None:
    """C09, F22: with weights gathered after the forward pass, after backward and before the step, one kappa."""
    model, plain = MODELS["llama"](), MODELS["llama"]()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.model.layers:
        fully_shard(block, reshard_after_forward=False, mp_policy=half)
    fully_shard(model, reshard_after_forward=False, mp_policy=half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    truth = exact(plain)
    with watch(model) as monitor:
        loss = model(input_ids=IDS, labels=IDS).loss
        assert not isinstance(model.model.layers[0].self_attn.q_proj.weight, DTensor)
        monitor.step()
        loss.backward()
        monitor.step()
        optimizer.zero_grad()
        monitor.step()
        records = monitor.flush()
        assert {record.step for record in records} == {0, 1, 2, 3}
        for record in records:
            agrees(record, truth[place(record)])
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        monitor.step()
        whole = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
        plain.load_state_dict(whole)
        truth = exact(plain)
        for record in monitor.flush():
            agrees(record, truth[place(record)])
    on_all_ranks(list(monitor.records))


def check_training_is_the_same(folder: Path) -> None:
    ends = []
    for on in (False, True):
        model = MODELS["gpt2"]()
        torch.manual_seed(0)  # for dropout; building the model draws, too
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        monitor = watch(model, activations_every=1, tokens=4) if on else None
        for _ in range(3):
            model(input_ids=IDS, labels=IDS).loss.backward()
            if monitor is not None:
                monitor.step()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([weight.to_local() for weight in model.parameters()])
    assert all(map(torch.equal, *ends))


def check_jacobians(folder: Path) -> None:
    """B23, F22: FSDP2 has a layer's weights whole in its forward, and so its Jacobian; tensor parallelism has not."""
    build = MODELS["llama"]

    def jacobians(model: nn.Module) -> list[Record]:
        with watch(model, activations_every=1, tokens=4, spectra=0) as monitor:
            model(input_ids=IDS, labels=IDS).loss.backward()
            monitor.step()
            return [record for record in monitor.flush() if record.projection == JACOBIAN]

    expected = jacobians(build())
    assert len(expected) == 12 and all(record.kappa > 1 for record in expected)
    by_block, by_root, by_attention, split = (build() for _ in range(4))
    for layer in by_block.model.layers:
        fully_shard(layer)
    for layer in by_attention.model.layers:
        fully_shard(layer.self_attn)
    for model in (by_block, by_root, by_attention):
        fully_shard(model)
        got = jacobians(model)
        assert [place(record) for record in got] == [place(record) for record in expected]
        for one, other in zip(got, expected, strict=True):
            assert one.kappa == pytest.approx(other.kappa, rel=1e-6) and one.status == other.status
            assert one.bound == pytest.approx(other.bound, rel=1e-6)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in split.model.layers:
        parallelize_module(layer, mesh, PLAN)
    refused = jacobians(split)
    assert len(refused) == 2 and all(record.head == -1 for record in refused)
    assert all("q_proj.weight is a DTensor in this call" in record.status for record in refused)
    one_by_one = build()
    for layer in one_by_one.model.layers:
        fully_shard(layer.self_attn.q_proj)
        fully_shard(layer)
    assert all("is a DTensor in this call" in record.status for record in jacobians(one_by_one))


def check_disagreement(folder: Path) -> None:
    """C11: ranks with other arguments are told so, and nothing hangs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _, _, where = next(placements(dist.get_world_size()))
    model = shard(MODELS["llama"](), mesh, where)
    with pytest.raises(ValueError, match="read different weights"):
        watch(model, every=1 + dist.get_rank())


def check_pipeline(folder: Path) -> None:
    """C11: a stage without attention idles, whatever the other does."""
    model = MODELS["llama"]() if dist.get_rank() == 0 else nn.Linear(4, 4)
    with watch(model, strict=False) as monitor:
        for _ in range(3):
            monitor.step()
        assert bool(monitor.flush()) == (dist.get_rank() == 0)
    if dist.get_rank():
        with pytest.raises(ck.NoAttentionFound):
            watch(model)


def check_failure(folder: Path) -> None:
    """C11: a rank whose training fails closes its monitor without waiting for the others."""
    _, mesh, where = next(placements(dist.get_world_size()))
    monitor = watch(shard(MODELS["llama"](), mesh, where))
    if dist.get_rank() == 0:
        with pytest.raises(ZeroDivisionError), monitor:
            raise ZeroDivisionError
        assert monitor.records and not any(record.spectrum and record.step for record in monitor.records)
    dist.barrier()
    monitor.close(failed=True)


CHECKS = [
    check_placements,
    check_fsdp2,
    check_training_is_the_same,
    check_disagreement,
    check_pipeline,
    check_failure,
]


def run_checks(folder: Path) -> None:
    for check in CHECKS:
        check(folder)
        dist.barrier()
        (folder / f"{check.__name__}-{dist.get_rank()}").touch()
