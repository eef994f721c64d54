"""What every rank of test_sharded.py's groups runs. Each check raises where something is wrong."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import conditioned_kernels as ck
from conditioned_kernels.initialize.measure import measure_all
from conditioned_kernels.initialize.scope import Scope, locate
from conditioned_kernels.initialize.target import resolve


def llama(**more: int) -> nn.Module:
    return copy.deepcopy(_llama(**more))


@functools.cache
def _llama(**more: int) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 42, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32}
    config = transformers.LlamaConfig(**(sizes | {"intermediate_size": 24, "num_hidden_layers": 2} | more))
    return transformers.LlamaForCausalLM(config)


def narrow() -> nn.Module:
    """K and V of two rows in all, so that of four ranks two own nothing."""
    return llama(num_key_value_heads=1, head_dim=2, num_attention_heads=6)


@functools.cache
def _gpt2() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=24, n_head=3, n_layer=2, vocab_size=32, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


@functools.cache
def _neox() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=32, vocab_size=32
    )
    return transformers.GPTNeoXForCausalLM(config)


def gpt2() -> nn.Module:
    return copy.deepcopy(_gpt2())


def neox() -> nn.Module:
    return copy.deepcopy(_neox())


MODELS = {"llama": llama, "narrow": narrow, "gpt2": gpt2, "neox": neox}
"""Grouped heads, fewer K/V rows than ranks, Conv1D, and interleaved heads."""

PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
}
IDS = torch.arange(6)[None]


def placements(world: int) -> Iterator[tuple[str, DeviceMesh, list]]:
    """Every mesh and placement the world can have."""
    flat = init_device_mesh("cpu", (world,))
    for placement in (Shard(0), Shard(1), Replicate()):
        yield str(placement), flat, [placement]
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        for pair in (
            [Replicate(), Shard(0)],
            [Shard(1), Replicate()],
            [Shard(0), Shard(0)],
            [Shard(0), Shard(1)],
            [Shard(1), Shard(0)],
            [Shard(1), Shard(1)],
            [_StridedShard(0, split_factor=2), Shard(0)],
            [_StridedShard(1, split_factor=2), Shard(1)],
            [_StridedShard(0, split_factor=3), Shard(1)],
        ):
            yield str(pair), mesh, pair


def shard(model: nn.Module, mesh: DeviceMesh, where: list) -> nn.Module:
    """Distribute every matrix of the model's attention and its tied embedding."""
    made: dict[Tensor, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None and weight.ndim == 2 and any(part in path for part in ("att", "wte", "lm_head")):
                if weight not in made:
                    made[weight] = nn.Parameter(_distribute(weight.detach(), mesh, where), weight.requires_grad)
                module._parameters[name] = made[weight]
    return model


def _distribute(weight: Tensor, mesh: DeviceMesh, where: list) -> DTensor:
    if not any(isinstance(placement, _StridedShard) for placement in where):
        return distribute_tensor(weight, mesh, where, src_data_rank=None)  # every rank has it
    # torch makes strided shards only by sharding twice, so take each placement's own split.
    local = weight
    for axis, placement in enumerate(where):
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(local, mesh.size(axis), with_padding=False, contiguous=True)
            local = parts[mesh.get_local_rank(axis)]
    return DTensor.from_local(local.clone(), mesh, where, run_check=False, shape=weight.shape, stride=weight.stride())


def full(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def same(model: nn.Module, reference: nn.Module) -> None:
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert list(ours) == list(theirs)
    for name, weight in ours.items():
        whole = full(weight)
        assert torch.equal(whole, theirs[name]), f"{name}: off by {(whole - theirs[name]).abs().max()}"


def silent(call: Callable[[], ck.InitReport]) -> ck.InitReport:
    """The call's report; it must not communicate."""
    with CommDebugMode() as communication:
        report = call()
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    return report


def check_every_placement(folder: Path) -> None:
    """C02, C03, C05: for the same seed the full weights are those of the unsharded call, bit for bit, in silence."""
    for name, build in MODELS.items():
        reference = build()
        whole = ck.conditioned_(reference, seed=3)
        first, second = (dict(reference.named_parameters())[entry.parameter] for entry in whole.touched[:4:3])
        assert first.shape == second.shape and not torch.equal(first, second)
        for text, mesh, where in placements(dist.get_world_size()):
            model = shard(build(), mesh, where)
            before = {name: (weight, weight.requires_grad) for name, weight in model.named_parameters()}
            spots = {
                name: (weight.placements, weight._local_tensor.data_ptr())
                for name, weight in model.named_parameters()
                if isinstance(weight, DTensor)
            }
            report = silent(lambda model=model: ck.conditioned_(model, seed=3))
            for parameter, weight in model.named_parameters():
                assert before[parameter][0] is weight and before[parameter][1] == weight.requires_grad
                if isinstance(weight, DTensor):
                    assert spots[parameter] == (weight.placements, weight._local_tensor.data_ptr())
            try:
                same(model, reference)
            except AssertionError as error:
                raise AssertionError(f"{name} {text}: {error}") from error
            for ours, theirs in zip(report.touched, whole.touched, strict=True):
                assert (ours.parameter, ours.label, ours.heads) == (theirs.parameter, theirs.label, theirs.heads)
                chosen = torch.tensor(ours.measured, dtype=torch.int64)
                torch.testing.assert_close(ours.estimate.kappa, theirs.estimate.kappa[chosen], rtol=1e-12, atol=0)
            str(report)
            if name in ("llama", "gpt2"):
                verdict = ck.verify(model, report)
                assert verdict, f"{name} {text}: {verdict}"


def check_other_schemes(folder: Path) -> None:
    calls = [
        lambda model: ck.random_(model, kind="trunc_normal", seed=2),
        lambda model: ck.random_(model, kind="xavier", seed=2),
        lambda model: ck.random_(model, kind="orthogonal", seed=2),
        lambda model: ck.conditioned_(model, value="semi_orthogonal", gain=0.25),
        lambda model: ck.conditioned_(model, value="repeat"),
        lambda model: ck.conditioned_(model, value="keep"),
        lambda model: ck.mimetic_(model),
    ]
    for number, call in enumerate(calls):
        build = (llama, gpt2)[number % 2]
        reference = build()
        call(reference)
        for _, mesh, where in list(placements(dist.get_world_size()))[-2:]:
            model = shard(build(), mesh, where)
            silent(lambda model=model, call=call: call(model))
            same(model, reference)


def check_preserve(folder: Path) -> None:
    """The one exception: Frobenius norms of all weights in one all-reduce per mesh dimension."""
    reference = llama()
    whole = ck.conditioned_(reference, gain="preserve")
    for _, mesh, where in placements(dist.get_world_size()):
        model = shard(llama(), mesh, where)
        with CommDebugMode() as communication:
            report = ck.conditioned_(model, gain="preserve")
        sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
        assert communication.get_total_counts() == sum(size > 1 for size in sizes)
        for ours, theirs in zip(report.touched, whole.touched, strict=True):
            assert math.isclose(ours.gain, theirs.gain, rel_tol=1e-13)
        for (_, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            torch.testing.assert_close(full(ours), theirs, rtol=1e-6, atol=0)


def check_same_figures(folder: Path) -> None:
    """F22: singular values of any sharded weights, NaN and zero heads included, are those of the whole weights."""
    for build in (llama, neox):
        reference = build()
        targets = resolve(locate(reference, Scope()))
        with torch.no_grad():
            targets[0].heads[0, 0, 0] = math.nan
            targets[1].heads[0] = 0
            targets[2].heads[0] *= torch.logspace(0, -3, targets[2].shape[-2])[:, None]
        wanted = measure_all(targets, [math.nan] * len(targets))
        state = {name: weight.detach().clone() for name, weight in reference.named_parameters()}
        for text, mesh, where in placements(dist.get_world_size()):
            model = build()
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.copy_(state[name])
            found = resolve(locate(shard(model, mesh, where), Scope()))
            for ours, theirs in zip(measure_all(found, [math.nan] * len(found)), wanted, strict=True):
                a, b = ours.estimate, theirs.estimate
                assert torch.equal(a.nonfinite, b.nonfinite) and torch.equal(a.zero_matrix, b.zero_matrix), text
                for field in ("kappa", "sigma_max", "sigma_min"):
                    values = getattr(a, field), getattr(b, field)
                    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-9, equal_nan=True, msg=f"{text} {field}")
                everywhere = [torch.empty_like(a.kappa) for _ in range(dist.get_world_size())]
                dist.all_gather(everywhere, a.kappa)
                assert all(torch.equal(other.nan_to_num(-1), a.kappa.nan_to_num(-1)) for other in everywhere)


def check_wrong_scale(folder: Path) -> None:
    """C03: shards orthogonalized apart have kappa 1 and the wrong scale; every rank says so in the same words."""
    model = shard(llama(), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(1)])
    report = ck.conditioned_(model)
    weight = dict(model.named_parameters())[report.touched[1].parameter]
    with torch.no_grad():
        weight._local_tensor.mul_(2**0.5)
    verdict = ck.verify(model, report)
    assert len(verdict.failures) == 1 and "sigma_max 1.41421" in verdict.failures[0]
    said: list = [None] * dist.get_world_size()
    dist.all_gather_object(said, str(verdict))
    assert len(set(said)) == 1


def check_fsdp2(folder: Path) -> None:
    """C09: whether the weights are gathered at that moment or not; C05: with CPU offload."""
    reference = llama()
    ck.conditioned_(reference)
    wanted = reference(IDS).logits
    policies = [{}, {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}]
    policies += [{"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}]
    if dist.get_world_size() == 4:
        policies.append({"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))})
    for policy in policies:
        model = llama()
        for layer in model.model.layers:
            fully_shard(layer, **policy)
        fully_shard(model, **policy)
        model(IDS)  # with some modules' weights gathered when the init comes
        report = silent(lambda model=model: ck.conditioned_(model))
        same(model, reference)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert ck.verify(model, report)
        loss = model(IDS).logits
        torch.testing.assert_close(loss.float(), wanted, rtol=0, atol=1e-4 if "mp_policy" not in policy else 0.1)
        assert ck.verify(model, report)  # right after the forward, where some modules are gathered
        loss.float().square().mean().backward()
        assert ck.verify(model, report)
        optimizer.step()
        assert not ck.verify(model, report)


def check_tensor_parallel(folder: Path) -> None:
    """TP, and TP x FSDP with its strided shards, as torch's own functions make them."""
    world = dist.get_world_size()
    reference = llama(hidden_size=48, num_attention_heads=8, num_key_value_heads=4)
    ck.conditioned_(reference)
    wanted = reference(IDS).logits
    mesh = init_device_mesh("cpu", (world // 2, 2) if world % 2 == 0 else (1, world), mesh_dim_names=("dp", "tp"))
    model = llama(hidden_size=48, num_attention_heads=8, num_key_value_heads=4)
    if 4 % mesh["tp"].size():
        return  # torch's own forward needs whole heads per rank
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    kinds = {type(p).__name__ for weight in model.parameters() for p in weight.placements}
    assert "_StridedShard" in kinds or world < 4
    report = silent(lambda: ck.conditioned_(model))
    same(model, reference)
    assert ck.verify(model, report)
    torch.testing.assert_close(full(model(IDS).logits), wanted, rtol=0, atol=1e-4)


def check_pipeline(folder: Path) -> None:
    """C07, C11: each rank has its own layers, by their names in the whole model; one rank has none at all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    reference = llama(num_hidden_layers=4)
    ck.conditioned_(reference, seed=1)
    model = llama(num_hidden_layers=4)
    mine = {str(number) for number in range(4) if number % max(world - 1, 1) == rank and rank < max(world - 1, 1)}
    for number in range(4):
        if str(number) not in mine:
            model.model.layers[number] = nn.Identity()
    stage = DeviceMesh("cpu", [rank])
    shard(model, stage, [Shard(0)])
    if not mine:
        with pytest.raises(ck.NoAttentionFound):
            ck.verify(model)
        return
    report = silent(lambda: ck.conditioned_(model, seed=1))
    assert {entry.layer.split(".")[2] for entry in report.touched} == mine
    theirs = dict(reference.named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(full(weight), theirs[name])
    assert not torch.equal(
        theirs["model.layers.0.self_attn.q_proj.weight"], theirs["model.layers.2.self_attn.q_proj.weight"]
    )
    assert ck.verify(model, report)


def check_disagreement(folder: Path) -> None:
    """C11: ranks that are about to read different weights say so instead of hanging."""
    if dist.get_world_size() == 1:
        return
    model = shard(llama(), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    layer = f"layers.{min(dist.get_rank(), 1)}."
    with pytest.raises(ValueError, match="the ranks of one mesh are about to read different weights"):
        ck.verify(model, where=lambda name, _: layer in name)


def check_refusals(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = llama()
    projection = model.model.layers[1].self_attn.k_proj
    projection.weight = nn.Parameter(DTensor.from_local(projection.weight.detach(), mesh, [Partial()]))
    before = projection.weight._local_tensor.clone()
    with pytest.raises(ValueError, match=r"k_proj\.weight has the placement.*redistribute"):
        ck.conditioned_(model)
    assert torch.equal(projection.weight._local_tensor, before)
    model = llama(num_attention_heads=6, num_key_value_heads=6, head_dim=7 * 2, hidden_size=84)
    attention = model.model.layers[0].self_attn
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"q_proj\.weight is sharded; attach lambda I first"):
        ck.spectral_conditioning(model)
    attention.o_proj.weight = attention.v_proj.weight
    with pytest.raises(ValueError, match=r"shares its memory with"):
        ck.conditioned_(model)


def check_own_layout(folder: Path) -> None:
    """A user's layout function gives views of a weight that is only here in part, in three dimensions too."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.qkv = nn.Parameter(torch.randn(3, 12, 3, 5))

    def layout(module: nn.Module) -> dict[str, Tensor]:
        return dict(zip("qkv", module.qkv.transpose(1, 2).unflatten(2, (2, 6)).flatten(1, 2), strict=True))

    def simple(module: nn.Module) -> dict[str, Tensor]:
        return {role: part.transpose(0, 1) for role, part in zip("qkv", module.qkv, strict=True)}

    reference = Own()
    ck.conditioned_(reference, layouts={Own: simple}, gain=0.5)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dim in range(4):
        model = Own()
        model.qkv = nn.Parameter(distribute_tensor(model.qkv.detach(), mesh, [Shard(dim)], src_data_rank=None))
        report = silent(lambda model=model: ck.conditioned_(model, layouts={Own: simple}, gain=0.5))
        assert torch.equal(full(model.qkv), reference.qkv), dim
        assert len(report.touched) == 3


def check_ambient_device(folder: Path) -> None:
    """C01: an ambient device context must not leak in."""
    reference = llama()
    ck.conditioned_(reference)
    model = shard(llama(), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    with torch.device("meta"):
        report = ck.conditioned_(model)
        assert ck.verify(model, report)
    same(model, reference)


def check_materialize(folder: Path) -> None:
    """FSDP2's recipe, with and without TP: build on meta, shard, materialize; every weight is the unsharded one's."""
    world = dist.get_world_size()

    def build() -> nn.Module:
        with torch.device("meta"):
            return _llama.__wrapped__(hidden_size=48, num_attention_heads=8, num_key_value_heads=4)

    reference = build()
    ck.conditioned_(reference, seed=2)
    whole = ck.materialize_(reference, "cpu", seed=5)
    wanted = reference(IDS).logits
    for parallel in (False, True):
        model = build()
        deferred = ck.conditioned_(model, seed=2)
        assert deferred.deferred and not deferred.touched
        mesh = init_device_mesh("cpu", (world // 2, 2) if world % 2 == 0 else (world, 1), mesh_dim_names=("dp", "tp"))
        for layer in model.model.layers:
            if parallel:
                parallelize_module(layer, mesh["tp"], PLAN)
            fully_shard(layer, mesh=mesh["dp"] if parallel else None)
        fully_shard(model, mesh=mesh["dp"] if parallel else None)
        with torch.device("meta"):
            report = silent(lambda model=model: ck.materialize_(model, "cpu", seed=5))
        same(model, reference)
        assert [entry.parameter for entry in report.touched] == [entry.parameter for entry in whole.touched]
        assert ck.verify(model, report)
        torch.testing.assert_close(full(model(IDS).logits), wanted, rtol=0, atol=1e-4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        full(model(IDS).logits).square().mean().backward()
        optimizer.step()
        assert not ck.verify(model, report)


CHECKS = [
    check_every_placement,
    check_other_schemes,
    check_preserve,
    check_same_figures,
    check_wrong_scale,
    check_fsdp2,
    check_tensor_parallel,
    check_pipeline,
    check_disagreement,
    check_refusals,
    check_own_layout,
    check_ambient_device,
    check_materialize,
]


def run_checks(folder: Path) -> None:
    """All checks, each one's outcome in a file of its own."""
    import traceback

    for check in CHECKS:
        try:
            check(folder)
            outcome = ""
        except BaseException:
            outcome = traceback.format_exc()
        (folder / f"{check.__name__}-{dist.get_rank()}.txt").write_text(outcome)


def save_checkpoint(folder: Path) -> None:
    model = shard(llama(), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    ck.conditioned_(model, seed=9)
    dcp.save(model.state_dict(), checkpoint_id=folder.parent / "checkpoint")


def load_checkpoint(folder: Path) -> None:
    model = shard(llama(), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(1)])
    assert not ck.verify(model)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder.parent / "checkpoint")
    model.load_state_dict(state)
    assert ck.verify(model)
    reference = llama()
    ck.conditioned_(reference, seed=9)
    same(model, reference)


def lose_a_rank(folder: Path) -> None:
    """Rank 1 dies in the middle of its init."""
    import os

    from conditioned_kernels.initialize import writing

    model = shard(llama(), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    if dist.get_rank() == 1:
        writing.write = lambda *_: os._exit(7)  # type: ignore[assignment]
    report = ck.conditioned_(model)  # the others need nobody for this
    assert report.touched
    (folder / f"initialized-{dist.get_rank()}").touch()
    ck.verify(model, report)
