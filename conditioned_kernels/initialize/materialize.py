"""Models without values: a scheme is noted on a meta model, and runs when :func:`materialize_` gives it memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import distributed
from ..heads.discover import LEFT_OUT_BY_WHERE, Where, named_modules
from ..sampling import stream_key
from .init_report import InitReport

NOTE = "_conditioned_kernels_deferred"
"""Attribute on a module: the schemes to run once it has values, in order."""

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""What holds a model's blocks; each block is given memory and values as one."""

Rule = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Deferred:
    """A scheme that waits for values.

    Attributes
    ----------
    layers : names of the attention layers that it is for.
    skipped : (name, reason) of layers that it leaves out.
    run : runs it on the layers of a model that ``where`` keeps; with None, on those that it was called for.
    whole : it writes beside the attention layers too, so it runs once for all of them.
    """

    layers: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    run: Callable[[nn.Module, Where | None], InitReport]
    whole: bool = False


def defer(model: nn.Module, deferred: Deferred) -> None:
    """Note a scheme on a model without values. Its forward refuses to run with values until the scheme has."""
    notes = [*getattr(model, NOTE, ()), deferred]
    if len(notes) == 1:
        model.register_forward_pre_hook(_refuse_forward)
    setattr(model, NOTE, notes)


def materialize_(
    model: nn.Module, device: torch.device | str, *, init: Rule | None = None, seed: int = 0
) -> InitReport:
    """Give a model that was built on the meta device memory and values, block by block, in place.

    Every block (an entry of the model's lists of layers, and whatever is outside of them) is allocated and initialized
    by the model's own rule; then come, block by block, the schemes that were called on the meta model,
    :func:`conditioned_` for one. Sharded weights (DTensor) get this rank's part of what the unsharded call would give,
    without communication: a block is made whole, and its shards are kept.

    Parameters
    ----------
    model : with parameters and buffers on the meta device, all or some; the others keep their values. It may have been
        sharded since (``fully_shard``, ``parallelize_module``).
    device : where the values shall be; for sharded weights the mesh's.
    init : the model's own rule: called with every module, children first, with gradients off; it sets the values of
        the module's own parameters and buffers. By default that of the library: ``_init_weights`` in transformers, else
        ``reset_parameters``, else the root's ``init_weights``.
    seed : of torch's random state while a block's own rule runs, with the block's name. The state is restored.

    Returns
    -------
    InitReport of the schemes that ran; with nothing touched if there were none.

    Raises
    ------
    RuntimeError
        naming the module, for parameters and buffers that its rule leaves without values.
    What the schemes raise. The model is then partly materialized, and what was done is not undone.

    Notes
    -----
    *Memory.* The model's, or this rank's part of it, and one block: whole, with the new values of its attention beside
    it. *Cost.* every rank runs the own rule of the whole model. The values do not depend on the number of ranks; they
    are not those that the library would draw at once, since each block is seeded apart.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    device = torch.device(device)
    if device.type == "meta":
        raise ValueError("device must be one with memory, such as 'cpu' or 'cuda', got 'meta'")
    noted = [(module, forget(module)) for module in model.modules()]
    skipped = [entry for _, notes in noted for deferred in notes for entry in deferred.skipped]
    reports: list[InitReport] = []
    made: dict[Tensor, Tensor] = {}
    try:
        parts = blocks(model)
        for block in parts:
            fill(model, block, device, init=init, seed=seed, made=made)
        # Only now, since a model's own rule may be one for all of it, called last.
        for module, notes in noted:
            for deferred in notes:
                reports += run_deferred(module, deferred, parts)
    except BaseException:
        for module, notes in noted:
            for deferred in notes:
                defer(module, deferred)
        raise
    return joined(reports, skipped)


def forget(module: nn.Module) -> list[Deferred]:
    """Take off and return the schemes noted on a module."""
    notes = module.__dict__.pop(NOTE, [])
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _refuse_forward:
            del module._forward_pre_hooks[key]
    return notes


def joined(reports: list[InitReport], skipped: Iterable[tuple[str, str]] = ()) -> InitReport:
    """One report of several runs over different layers, whose own leaving out of the others is left out."""
    if not reports:
        return InitReport("materialized", 0, (), (), ())
    return replace(
        reports[0],
        scheme=" + ".join(dict.fromkeys(report.scheme for report in reports)),
        touched=tuple(entry for report in reports for entry in report.touched),
        skipped=tuple(
            dict.fromkeys(
                [*skipped, *(each for report in reports for each in report.skipped if each[1] != LEFT_OUT_BY_WHERE)]
            )
        ),
        unknown=tuple(dict.fromkeys(entry for report in reports for entry in report.unknown)),
        others=tuple(dict.fromkeys(entry for report in reports for entry in report.others)),
    )


@dataclass(frozen=True)
class Block:
    """Modules that get memory and values together, by their names in the model, children first."""

    name: str
    modules: tuple[tuple[str, nn.Module], ...]


def blocks(model: nn.Module) -> list[Block]:
    """The model's blocks, children first: entries of its outermost lists, and what lies outside of them."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module, inside: bool) -> Iterator[Block]:
        if module in seen:
            return
        if inside or not any(isinstance(each, LISTS) for each in module.modules()):
            members = [(path, each) for path, each in _children_first(name, module) if each not in seen]
            seen.update(each for _, each in members)
            yield Block(name, tuple(members))
            return
        for child, each in module.named_children():
            yield from walk(f"{name}.{child}" if name else child, each, isinstance(module, LISTS))
        seen.add(module)
        yield Block(name, ((name, module),))

    return list(walk("", model, False))


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child, each in module.named_children():
        yield from _children_first(f"{name}.{child}" if name else child, each)
    yield name, module


def run_deferred(module: nn.Module, deferred: Deferred, parts: list[Block]) -> list[InitReport]:
    """Run a scheme noted on a module, on the attention layers of one block after the other where it can."""
    if deferred.whole:
        return [deferred.run(module, None)]
    named = list(named_modules(module))
    reports = []
    for block in parts:
        members = {each for _, each in block.modules}
        if wanted := {name for name, each in named if each in members} & set(deferred.layers):
            reports.append(deferred.run(module, _named(wanted)))
    return reports


def _named(wanted: set[str]) -> Where:
    return lambda name, _: name in wanted


def fill(
    model: nn.Module,
    block: Block,
    device: torch.device,
    *,
    init: Rule | None,
    seed: int,
    made: dict[Tensor, Tensor],
) -> None:
    """Memory and own values for the block's tensors on the meta device; ``made`` maps them to the new ones."""
    fresh = [
        (name, module, kind, key, tensor)
        for name, module in block.modules
        for kind in _tensors(module)
        for key, tensor in kind.items()
        if tensor is not None and distributed.is_meta(tensor)
    ]
    if not fresh:
        return
    wholes: list[tuple[Tensor, Tensor]] = []
    empty: list[tuple[str, nn.Module, str, Tensor]] = []
    for name, module, kind, key, tensor in fresh:
        if tensor in made:
            kind[key] = made[tensor]
            continue
        kind[key] = made[tensor] = _like(tensor, torch.empty_like(tensor, device=device))
        whole = made[tensor]
        if distributed.is_sharded(tensor):
            whole = _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
            wholes.append((made[tensor], whole))
            kind[key] = whole
        _poison(whole)
        empty.append((name, module, key, whole))
    owners = {name for name, *_ in fresh}
    with torch.no_grad(), torch.device(device), torch.random.fork_rng(_generators(device)):
        torch.manual_seed(stream_key(seed, block.name, "own initialization"))
        for name, module in block.modules:
            rule = init or _rule(model, name, module)
            if rule is not None:
                rule(module)
            elif name in owners:
                raise RuntimeError(_no_rule(name, module))
    for name, module, key, whole in empty:
        if _poisoned(whole):
            raise RuntimeError(f"{_no_rule(name, module)} (without values: {key!r})")
    shards = {whole: shard for shard, whole in wholes}
    for _, _, kind, key, _ in fresh:
        whole = kind[key]
        if whole in shards:
            distributed.keep_part(shards[whole], whole.detach())
            kind[key] = shards[whole]


def _tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own parameters and buffers, as it keeps them."""
    return module._parameters, module._buffers


def _like(old: Tensor, new: Tensor) -> Tensor:
    """``new`` as a parameter where ``old`` is one."""
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def _poison(tensor: Tensor) -> None:
    """Fill with what no initialization leaves, so that forgotten tensors are found."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.detach().fill_(math.nan)
    elif tensor.dtype != torch.bool:
        tensor.detach().fill_(torch.iinfo(tensor.dtype).max)


def _poisoned(tensor: Tensor) -> bool:
    if not tensor.numel() or tensor.dtype == torch.bool:
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        # In parts, since the answer for an embedding of a billion elements is as large as itself.
        return any(bool(part.isnan().any()) for part in tensor.detach().view(-1).split(1 << 22))
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())


def _rule(model: nn.Module, name: str, module: nn.Module) -> Callable[[nn.Module], object] | None:
    """How the model itself initializes the module's own tensors."""
    around = [model.get_submodule(name.rsplit(".", cut)[0]) if cut else module for cut in range(name.count(".") + 1)]
    for each in (*around, model):
        if callable(rule := getattr(each, "_init_weights", None)) and hasattr(each, "config"):
            return rule
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(rule := getattr(module, method, None)):
            return lambda _: rule()
    own: Any = getattr(module, "init_weights", None)
    if callable(own) and not any(distributed.is_sharded(each) or each.is_meta for each in module.parameters()):
        return lambda _: own()
    return None


def _no_rule(name: str, module: nn.Module) -> str:
    tensors = ", ".join(
        key for key, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    )
    return (
        f"{name or 'the model itself'} ({type(module).__name__}) has tensors on the meta device ({tensors}) and no "
        "method that gives them values (reset_parameters); pass init=, a function that initializes one module"
    )


def _generators(device: torch.device) -> list[torch.device]:
    return [] if device.type == "cpu" else [device]


def _refuse_forward(module: nn.Module, args: object) -> None:
    if not any(distributed.is_meta(parameter) for parameter in module.parameters()):
        raise RuntimeError(
            "an initialization was called on this model while it was on the meta device, and has not run since: call "
            "conditioned_kernels.materialize_(model, device), which leaves tensors that have values as they are"
        )
