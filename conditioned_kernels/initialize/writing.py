"""Writing new heads into a model: what may be written, what is written once, and how it is all taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .. import _validate, distributed
from ..heads.discover import Discovery
from ..heads.layout import LayoutError
from ..heads.wrappers import is_adapted, parametrizations
from .scope import Scope, locate
from .target import Target, resolve

MARK = "_conditioned_kernels"
"""Attribute on a parameter this package has initialized; its value is the scheme's name."""


Blocks = list[tuple[range, Tensor]]
"""New values by chunk of heads: whole heads, or of a sharded weight what :meth:`Piece.select` kept of them."""


def writable(
    model: nn.Module, scope: Scope, choose: Callable[[Discovery], list[Target]] = resolve
) -> tuple[Discovery, list[Target]]:
    """The model's attention in ``scope``, and the targets chosen there, each of which may be written."""
    found = locate(model, scope)
    targets = choose(found)
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
    frozen = isinstance(weight, nn.Parameter) and not weight.requires_grad
    if not scope.include_frozen and (is_adapted(name) or (not target.parametrized and frozen)):
        what = "the base of an adapter" if is_adapted(name) else "frozen (requires_grad=False)"
        raise ValueError(
            f"{name} is {what}; pass include_frozen=True to initialize it all the same, or leave its layer out with "
            "where="
        )
    if getattr(weight, "_is_hf_initialized", False) and not hasattr(weight, MARK) and not scope.overwrite:
        raise ValueError(
            f"{name} was loaded from a checkpoint (transformers marked it so), and initializing it would destroy "
            "trained weights; pass overwrite=True if that is what you want"
        )


def untie(targets: list[Target]) -> tuple[list[Target], list[tuple[str, str]]]:
    """Keep one of the targets that are the same heads in the same role, and refuse those that conflict in memory."""
    kept: dict[tuple, Target] = {}
    tied: list[tuple[str, str]] = []
    groups: dict[int, list[tuple[Target, tuple]]] = {}
    for target in targets:
        storage, region = _region(target)
        other = kept.setdefault((storage, region, target.stream_role), target)
        if other is not target:
            tied.append((f"{target.name} ({target.stream_role})", f"is tied to {other.name}, which is written once"))
            continue
        groups.setdefault(storage, []).append((target, region))
    for group in groups.values():
        # A layout keeps the roles of one weight apart, so only several weights in one memory can conflict.
        if len({(target.owner, target.attribute) for target, _ in group}) > 1:
            _check_disjoint(group)
    return list(kept.values()), tied


def _region(target: Target) -> tuple[int, tuple]:
    """The storage behind a target, and which of its elements, as (parametrized, sizes, strides, offset)."""
    if target.piece is not None:
        # A rank may hold nothing of a weight, and all ranks must come to one result; so a shard goes by its parameter.
        if not distributed.is_sharded(target.weight):
            return hash((id(target.weight), target.piece.rows.tobytes())), (False, (1,), (1,), 0)
        heads = target.projection.view(torch.empty(target.weight.shape, device="meta"))
        return id(target.weight), (False, tuple(heads.shape), heads.stride(), int(heads.storage_offset()))
    heads = target.heads
    region = (target.parametrized, tuple(heads.shape), heads.stride(), int(heads.storage_offset()))
    if not target.parametrized:
        return heads.untyped_storage()._cdata, region
    # The weight is fresh memory on each read; its parametrization's first tensor stands for it.
    original = next(iter(parametrizations(target.owner, target.attribute).parameters()))
    return original.untyped_storage()._cdata, region


def _check_disjoint(group: list[tuple[Target, tuple]]) -> None:
    marks = torch.zeros(
        max(
            offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) + 1
            for _, (_, sizes, strides, offset) in group
        ),
        dtype=torch.int32,
        device="cpu",
    )
    for number, (target, (parametrized, sizes, strides, offset)) in enumerate(group, 1):
        place = marks.as_strided(sizes, strides, offset)
        taken = int(place.max())
        mixed = next((other for other, (its, *_) in group if its != parametrized), None)
        if taken or mixed is not None:
            other = mixed if mixed is not None else group[taken - 1][0]
            raise ValueError(
                f"{target.name} ({target.stream_role}) shares its memory with {other.name} ({other.stream_role}); tied "
                "weights cannot be given two values, so untie them, or leave one layer out with where="
            )
        place.fill_(number)


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
            weight = target.weight
            if isinstance(weight, nn.Parameter):
                setattr(weight, MARK, scheme)
                if any(cls.__module__.startswith("transformers.") for cls in type(target.layer.module).__mro__):
                    weight._is_hf_initialized = True  # type: ignore[attr-defined]


def _restorer(target: Target) -> Callable[[], None]:
    """A function that puts back every bit, and the weight's attributes, that :func:`writing` may change."""
    weight = target.weight
    places = [target.heads if target.piece is None else distributed.local_part(weight)]
    if target.parametrized:
        # The tensors themselves and no views, since an assignment may give them other memory.
        state = parametrizations(target.owner, target.attribute)
        places = [*state.parameters(), *state.buffers()]
    copies = [place.clone() for place in places]
    attributes = dict(weight.__dict__)

    def restore() -> None:
        for place, copy in zip(places, copies, strict=True):
            place.copy_(copy)
        weight.__dict__.clear()
        weight.__dict__.update(attributes)

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
