"""Writing new heads into a model: what may be written, what is written once, and how it is all taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import _validate, distributed
from ..heads.discover import Discovery, named_modules
from ..heads.layout import LayoutError
from ..heads.wrappers import is_adapted, parametrizations
from .scope import Scope, locate
from .target import WHOLE, Target, resolve

MARK = "_conditioned_kernels"
"""Attribute on a parameter this package has initialized; its value is the scheme's name."""


Blocks = list[tuple[range, Tensor]]
"""New values by chunk of heads: whole heads, or of a sharded weight what :meth:`Piece.select` kept of them."""


Choice = Callable[[nn.Module, Discovery], list[Target]]
"""Picks the targets of a scheme."""


def projections(model: nn.Module, found: Discovery) -> list[Target]:
    """Q, K and V of every layer."""
    return resolve(found)


def writable(model: nn.Module, scope: Scope, choose: Choice = projections) -> tuple[Discovery, list[Target]]:
    """The model's attention in ``scope``, and the targets chosen there, each of which may be written."""
    found = locate(model, scope)
    targets = choose(model, found)
    for target in targets:
        _check(target, scope)
    return found, targets


def _check(target: Target, scope: Scope) -> None:
    weight, name = target.weight, target.name
    _validate.floating(weight, name)
    if target.parametrized and distributed.is_sharded(weight):
        raise ValueError(f"{name} is sharded and parametrized; initialize before registering the parametrization")
    try:
        _validate.writable(target.heads if target.piece is None else distributed.local_part(weight), name)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from error
    if not target.parametrized and target.attribute not in {**target.owner._parameters, **target.owner._buffers}:
        raise ValueError(
            f"{name} is no parameter but recomputed in every forward, as the hooks of weight_norm do, so a value "
            "written into it would be lost; initialize before registering the hook"
        )
    kept = _kept(target)
    if not scope.include_frozen and (is_adapted(name) or (kept and not any(each.requires_grad for each in kept))):
        what = "the base of an adapter" if is_adapted(name) else "frozen (requires_grad=False)"
        raise ValueError(
            f"{name} is {what}; pass include_frozen=True to initialize it all the same, or leave its layer out with "
            "where="
        )
    if not scope.overwrite and any(
        getattr(each, "_is_hf_initialized", False) and not hasattr(each, MARK) for each in kept
    ):
        raise ValueError(
            f"{name} was loaded from a checkpoint (transformers marked it so), and initializing it would destroy "
            "trained weights; pass overwrite=True if that is what you want"
        )


def _kept(target: Target) -> list[nn.Parameter]:
    """The parameters behind a target: its weight, or what its parametrization recomputes that from."""
    if target.parametrized:
        return list(parametrizations(target.owner, target.attribute).parameters())
    return [target.weight] if isinstance(target.weight, nn.Parameter) else []


@dataclass(frozen=True)
class _Place:
    """Elements of a storage that something occupies: a strided view of it, and a name for messages."""

    name: str
    weight: tuple[nn.Module, str]
    storage: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        reach = sum((size - 1) * step for size, step in zip(self.sizes, self.strides, strict=True))
        return self.offset + reach + 1 if all(self.sizes) else self.offset


def untie(model: nn.Module, found: Discovery, targets: list[Target]) -> tuple[list[Target], list[tuple[str, str]]]:
    """Keep one of the targets that are the same heads in the same role, and refuse those that conflict in memory.

    What conflicts is another target, or a parameter that a scheme leaves alone; not one of a layer that ``where`` left
    out, since then the user has chosen between the two.
    """
    kept: dict[tuple, Target] = {}
    tied: list[tuple[str, str]] = []
    places: list[_Place] = []
    for target in targets:
        place = _heads_place(target)
        key = (target.parametrized, place.storage, place.sizes, place.strides, place.offset, target.stream_role)
        other = kept.setdefault(key, target)
        if other is not target:
            tied.append((f"{target.name} ({target.stream_role})", f"is tied to {other.name}, which is written once"))
        elif target.parametrized:
            # An assignment may write all of what the weight is made from.
            places += [_place(place.name, place.weight, each) for each in _kept(target)]
        else:
            places.append(place)
    left_out = {name for name, _ in found.skipped}
    places += _others(model, targets, left_out)
    for group in _overlapping(places):
        # A layout keeps the roles of one weight apart, so only several weights in one memory can conflict.
        if len({place.weight for place in group}) > 1:
            _check_disjoint(group)
    return list(kept.values()), tied


def _heads_place(target: Target) -> _Place:
    """Where the heads of a target are."""
    name, weight = f"{target.name} ({target.stream_role})", (target.owner, target.attribute)
    if target.piece is not None:
        # A rank may hold nothing of a weight, and all ranks must come to one result; so a shard goes by its parameter.
        if not distributed.is_sharded(target.weight):
            return _Place(name, weight, hash((id(target.weight), target.piece.rows.tobytes())), (1,), (1,), 0)
        return _place(name, weight, target.weight, target.projection.view)
    if not target.parametrized:
        return _place(name, weight, target.weight, target.projection.view)
    # The weight is fresh memory on each read; its parametrization's first tensor stands for it.
    heads = target.heads
    storage = _place(name, weight, _kept(target)[0]).storage
    return _Place(name, weight, storage, tuple(heads.shape), heads.stride(), int(heads.storage_offset()))


def _place(
    name: str, weight: tuple[nn.Module, str], tensor: Tensor, view: Callable[[Tensor], Tensor] = lambda whole: whole
) -> _Place:
    """Where ``view(tensor)`` is; a sharded tensor's memory is the tensor's own, the same on all ranks."""
    if distributed.is_sharded(tensor):
        seen, storage = view(torch.empty(tensor.shape, device="meta")), id(tensor)
    else:
        seen, storage = view(tensor.detach()), tensor.untyped_storage()._cdata
    return _Place(name, weight, storage, tuple(seen.shape), seen.stride(), int(seen.storage_offset()))


def _others(model: nn.Module, targets: list[Target], left_out: set[str]) -> Iterator[_Place]:
    """The parameters that no target is about, as places; but those of layers that are left out."""
    attention = [target for target in targets if target.projection.role != WHOLE]
    own = {(target.owner, target.attribute) for target in targets}
    for target in attention:
        if target.parametrized:
            inside = parametrizations(target.owner, target.attribute).modules()
            own |= {(module, name) for module in inside for name in module._parameters}
    storages = {_heads_place(target).storage for target in attention}
    for name, module in named_modules(model):
        if any(name == each or name.startswith(f"{each}.") for each in left_out):
            continue
        for attribute, parameter in module._parameters.items():
            if parameter is None or (module, attribute) in own or parameter.is_sparse:
                continue
            place = _place(f"{name}.{attribute}" if name else attribute, (module, attribute), parameter)
            if place.storage in storages:
                yield place


def _overlapping(places: list[_Place]) -> Iterator[list[_Place]]:
    """Places whose ranges of memory run into each other, in groups."""
    group: list[_Place] = []
    end = 0
    for place in sorted(places, key=lambda each: (each.storage, each.offset)):
        if group and (place.storage != group[0].storage or place.offset >= end):
            yield group
            group, end = [], 0
        group.append(place)
        end = max(end, place.end)
    if group:
        yield group


def _check_disjoint(group: list[_Place]) -> None:
    start = group[0].offset
    marks = torch.zeros(max(place.end for place in group) - start, dtype=torch.int32, device="cpu")
    for number, place in enumerate(group, 1):
        here = marks.as_strided(place.sizes, place.strides, place.offset - start)
        if taken := int(here.max()) if here.numel() else 0:
            raise ValueError(
                f"{place.name} shares its memory with {group[taken - 1].name}; tied weights cannot be given two "
                "values, so untie them, or leave one layer out with where="
            )
        here.fill_(number)


@contextmanager
def undone_on_error() -> Iterator[Callable[[Target], None]]:
    """Yields a function to call before a target is written: an error that leaves the block then puts back all of it."""
    undo: list[Callable[[], None]] = []
    try:
        yield lambda target: undo.append(_restorer(target))
    except BaseException:
        for restore in reversed(undo):
            restore()
        raise


@contextmanager
def writing(scheme: str) -> Iterator[Callable[[Target, Blocks], None]]:
    """Yields a function that writes new heads at once; they are marked as the scheme's at the end, and undone on error.

    A target is copied when it is written, so that no more is held than needed.
    """
    written: list[Target] = []
    with undone_on_error() as guard:

        def write_guarded(target: Target, blocks: Blocks) -> None:
            guard(target)
            write(target, blocks)
            written.append(target)

        yield write_guarded
        for target in written:
            of_transformers = any(
                cls.__module__.startswith("transformers.") for cls in type(target.layer.module).__mro__
            )
            for parameter in _kept(target):
                setattr(parameter, MARK, scheme)
                if of_transformers:
                    parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def _restorer(target: Target) -> Callable[[], None]:
    """A function that puts back every bit, and the parameters' attributes, that :func:`writing` may change."""
    held: list[tuple[dict, dict]] = []
    if target.parametrized:
        # The tensors themselves and no views, since an assignment may give them other memory, or put others in place.
        state = parametrizations(target.owner, target.attribute)
        places = [*state.parameters(), *state.buffers()]
        held = [(each, dict(each)) for module in state.modules() for each in (module._parameters, module._buffers)]
    else:
        places = [target.heads if target.piece is None else distributed.local_part(target.weight)]
    copies = [place.clone() for place in places]
    attributes = [(parameter, dict(parameter.__dict__)) for parameter in _kept(target)]

    def restore() -> None:
        for tensors, before in held:
            tensors.clear()
            tensors.update(before)
        for place, copy in zip(places, copies, strict=True):
            place.copy_(copy)
        for parameter, before in attributes:
            parameter.__dict__.clear()
            parameter.__dict__.update(before)

    return restore


def write(target: Target, blocks: Blocks) -> None:
    """Write new heads, and refuse a weight that does not hold them."""
    if target.piece is not None:
        for chunk, block in blocks:
            target.piece.write(distributed.local_part(target.weight), block, chunk)
        return
    [(_, values)] = blocks
    heads = values.view(target.shape)
    if not target.parametrized:
        target.heads.copy_(heads)
        return
    # A parametrized weight is recomputed on each read, so writing into it is lost: assign, read back and compare.
    whole = target.weight.detach().clone(memory_format=torch.contiguous_format)
    target.projection.view(whole).copy_(heads)
    try:
        setattr(target.owner, target.attribute, whole)
    except (NotImplementedError, RuntimeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{target.name} is parametrized and cannot be assigned ({error}); initialize before registering the "
            "parametrization, or give it a right_inverse"
        ) from error
    tolerance = 16 * torch.finfo(heads.dtype).eps * float(heads.abs().max())
    if not torch.allclose(target.heads, heads, rtol=0, atol=tolerance):
        raise ValueError(
            f"{target.name} is parametrized and does not hold the assigned value (off by "
            f"{float((target.heads - heads).abs().max()):.3g}); initialize before registering the parametrization"
        )
