"""The one path every scheme takes: find the heads, check, compute everything, measure it, then write.

Nothing is written before everything is computed, and a write that fails is undone, so a failing call
leaves the model bit-identical.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import _validate, distributed
from ..condition import ConditionEstimate, condition_number, condition_of_gram
from ..heads.discover import AttentionLayer, Discovery, NoAttentionFound, Where, find_attention
from ..heads.layout import LayoutError, LayoutFunction, Projection
from ..heads.wrappers import is_adapted, parametrizations, quiet_parametrizations
from . import materialize
from .init_report import InitReport, ProjectionReport, stacked_rank

WHOLE = "*"
"""The role of a target that is a whole parameter outside the attention weights; written, not measured."""

MARK = "_conditioned_kernels"
"""Attribute on a parameter this package has initialized; its value is the scheme's name."""


@dataclass(frozen=True)
class Target:
    """One projection in one model, ready to be read and written.

    Attributes
    ----------
    layer : the attention layer.
    projection : which of its projections.
    owner : the module that holds the weight, and ``attribute`` its name there.
    name : the weight's name in the user's model.
    chunk : which heads, by flat index, a scheme shall draw now; of a sharded weight only those that a rank needs.
    """

    layer: AttentionLayer
    projection: Projection
    owner: nn.Module
    attribute: str
    name: str
    chunk: range = range(0)

    @property
    def weight(self) -> Tensor:
        """The stored weight; recomputed on each read where it is parametrized."""
        return getattr(self.owner, self.attribute)

    @property
    def parametrized(self) -> bool:
        """Whether the weight is recomputed by ``torch.nn.utils.parametrize``."""
        return parametrize.is_parametrized(self.owner, self.attribute)

    @property
    def heads(self) -> Tensor:
        """View (*heads, head_dim, in_features) of the weight, which must be here as a whole."""
        if self.piece is not None:
            raise ValueError(
                f"{self.name} is sharded, so its old values are not here as heads; use what does not need them, or "
                "initialize before sharding"
            )
        return self.projection.view(self.weight.detach())

    @functools.cached_property
    def piece(self) -> distributed.Piece | None:
        """The part of the heads that this rank holds of a sharded weight; None for a weight that is here."""
        weight = self.weight
        if own := getattr(self.projection.view, "piece", None):
            return own(weight)
        return distributed.piece_of(self.projection.view, weight, self.name) if distributed.is_sharded(weight) else None

    def part(self, chunk: range) -> Target:
        """The same target, of which a scheme shall draw the heads ``chunk``."""
        part = replace(self, chunk=chunk)
        part.__dict__["piece"] = self.piece
        return part

    @property
    def shape(self) -> tuple[int, ...]:
        """(*heads, head_dim, in_features) of the whole projection, sharded or not."""
        return self.piece.shape if self.piece is not None else tuple(self.heads.shape)

    @property
    def count(self) -> int:
        """Heads of the whole projection."""
        return math.prod(self.shape[:-2])

    @property
    def drawn_shape(self) -> tuple[int, int, int]:
        """(heads in ``chunk``, head_dim, in_features): what a scheme returns."""
        head_dim, in_features = self.shape[-2:]
        return len(self.chunk), head_dim, in_features

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored weight."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weight, or this rank's part of it, lies."""
        return distributed.local_part(self.weight).device

    @property
    def key(self) -> tuple[str, str]:
        """(name, role): unique in a model, and the names of the sample stream."""
        return self.name, self.stream_role

    @property
    def stream_role(self) -> str:
        """Role in the sample stream's key: the role, and the part where there is one."""
        return self.projection.label


@dataclass(frozen=True)
class Draw:
    """What a scheme makes of one target.

    Attributes
    ----------
    heads : new values of the heads ``target.chunk``, shape ``target.drawn_shape``, in any floating dtype; or of all
        heads, of which the chunk is kept; None leaves the projection alone. The values of a head must not depend on the
        chunk it is drawn in.
    made : in words, what they are, or why the projection was left alone.
    gain : the singular value asked for; NaN if the scheme has none.
    """

    heads: Tensor | None
    made: str
    gain: float = math.nan


Scheme = Callable[[Target], Draw]


def apply_scheme(
    model: nn.Module,
    draw: Scheme,
    *,
    scheme: str,
    seed: int,
    where: Where | None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None,
    strict: bool,
    include_frozen: bool,
    overwrite: bool,
    prepare: Callable[[list[Target]], None] | None = None,
    choose: Callable[[Discovery], list[Target]] | None = None,
) -> InitReport:
    """Run ``draw`` on every projection of ``model`` and write the results. See ``conditioned_`` for the arguments.

    ``prepare`` sees all checked targets first, for what is faster done together. ``choose`` picks the targets of a
    scheme that writes more than Q, K and V.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")

    def again(model: nn.Module, where: Where) -> InitReport:
        return apply_scheme(
            model,
            draw,
            scheme=scheme,
            seed=seed,
            where=where,
            layouts=layouts,
            strict=strict,
            include_frozen=include_frozen,
            overwrite=overwrite,
            prepare=prepare,
            choose=choose,
        )

    with torch.inference_mode(False), torch.no_grad(), quiet_parametrizations(model):
        found = locate(model, where=where, layouts=layouts, strict=strict)
        targets = (choose or resolve)(found)
        for target in targets:
            _check(target, include_frozen=include_frozen, overwrite=overwrite)
        if waiting := [target for target in targets if distributed.is_meta(target.weight)]:
            return _defer(model, waiting, found, scheme, seed, again)
        targets, tied = _untie(targets)
        if prepare is not None:
            prepare(targets)
        skipped, writes, touched, others = [*found.skipped, *tied], [], [], []
        for target in targets:
            drawn, blocks, estimates = Draw(None, ""), [], []
            for chunk in target.piece.chunks() if target.piece else (range(target.count),):
                drawn, heads = _draw(target.part(chunk), draw)
                if drawn.heads is None:
                    break
                blocks.append((chunk, target.piece.select(heads, chunk) if target.piece else heads))
                if target.projection.role != WHOLE:
                    estimates.append(measure(target, heads, made=drawn.made, gain=drawn.gain, local=chunk))
            if drawn.heads is None:
                skipped.append((f"{target.name} ({target.projection.role})", drawn.made))
                continue
            writes.append((target, blocks))
            if estimates:
                touched.append(_joined(estimates))
            else:
                others.append(target.name)
        write_all(writes, scheme)
    materialize.forget(model)  # what was called before it had values has been called again
    return InitReport(scheme, seed, tuple(touched), tuple(skipped), found.unknown, tuple(others))


def _defer(
    model: nn.Module,
    waiting: list[Target],
    found: Discovery,
    scheme: str,
    seed: int,
    again: Callable[[nn.Module, Where], InitReport],
) -> InitReport:
    """Note the scheme on a model without values; see ``materialize_``."""
    layers = tuple(layer.name for layer in found.layers)
    materialize.defer(model, materialize.Deferred(layers, found.skipped, again))
    deferred = tuple(
        (f"{target.name} ({target.stream_role})", "is on the meta device; materialize_ initializes it")
        for target in waiting
    )
    return InitReport(scheme, seed, (), found.skipped, found.unknown, deferred=deferred)


def _draw(target: Target, draw: Scheme) -> tuple[Draw, Tensor]:
    """What a scheme draws for the target's chunk, (len(chunk), head_dim, in_features) in the weight's dtype."""
    drawn = draw(target)
    if drawn.heads is None:
        return drawn, torch.empty(0)
    heads = drawn.heads.reshape(-1, *target.shape[-2:])
    if len(heads) != len(target.chunk):
        heads = heads[target.chunk.start : target.chunk.stop]
    return drawn, heads.to(target.dtype)


def locate(
    model: nn.Module,
    *,
    where: Where | None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None,
    strict: bool,
) -> Discovery:
    """:func:`find_attention`, refusing a model without known attention and, if ``strict``, with unknown attention."""
    distributed.reshard(model)
    found = find_attention(model, where=where, layouts=layouts)
    unknown = "; ".join(f"{name or 'the model itself'}: {reason}" for name, reason in found.unknown)
    remedy = (
        "Tell where its heads are with layouts={Class: function} or register_layout(Class, function), where function "
        "returns {'q': view, 'k': view, 'v': view}, each a strided view (heads, head_dim, in_features) of a parameter"
    )
    if found.unknown and strict:
        raise NoAttentionFound(f"unknown attention: {unknown}. {remedy}; or pass strict=False to leave it alone")
    if not found.layers:
        reasons = (
            unknown
            or "; ".join(f"{name}: {reason}" for name, reason in found.skipped)
            or "no module looks like attention"
        )
        message = f"no attention layer to initialize in {type(model).__name__} ({reasons}). {remedy}"
        if strict:
            raise NoAttentionFound(message)
        warnings.warn(message, stacklevel=4)
    return found


def resolve(found: Discovery, *, outputs: bool = False) -> list[Target]:
    """The discovery's projections with the modules that own their weights; with ``outputs``, each layer's W_O too."""
    targets = []
    for layer in found.layers:
        for projection in (*layer.projections, *([layer.output] if outputs and layer.output else [])):
            name = projection.parameter.rpartition(".")[2]
            targets.append(Target(layer, projection, layer.owner(projection), name, layer.parameter_name(projection)))
    return targets


def sigma_tolerance(dtype: torch.dtype) -> float:
    """Largest |sigma / gain - 1| a conditioned head may have: 1e-5 in float32, 1e-11 in float64, eps in half types."""
    return {torch.float32: 1e-5, torch.float64: 1e-11}.get(dtype) or torch.finfo(dtype).eps


def measure(
    target: Target, heads: Tensor, *, made: str, gain: float, local: Sequence[int] | None = None
) -> ProjectionReport:
    """kappa and singular values of ``heads`` (*heads, head_dim, in_features) as stored, to half the tolerance.

    ``local`` says which of the projection's heads these are, where they may not be all.
    """
    flat = heads.reshape(-1, *heads.shape[-2:])
    rank = stacked_rank(flat)
    estimate = condition_number(flat, rtol=_rtol(heads.dtype))
    # A tensor from a file may have another dtype than the architecture it is of.
    entry = described(target, estimate, made=made, gain=gain, local=local, rank=rank)
    return entry if entry.dtype == heads.dtype else replace(entry, dtype=heads.dtype)


def measure_all(targets: list[Target], gains: list[float]) -> list[ProjectionReport]:
    """:func:`measure` of what the targets hold now.

    Of sharded targets every head is measured, the same on every rank. That is a collective: all ranks call it with the
    same targets in one order.
    """
    shards = [target for target in targets if distributed.is_sharded(target.weight)]
    distributed.check_agreement([(target.name, target.weight) for target in shards])
    grams = iter(distributed.grams([(target.piece, target.weight) for target in shards if target.piece is not None]))
    entries = []
    for target, gain in zip(targets, gains, strict=True):
        if target.piece is None:
            entries.append(measure(target, target.heads, made="", gain=gain))
        elif distributed.is_sharded(target.weight):
            terms = distributed.gram_terms(target.weight, target.shape[-1])
            estimate = condition_of_gram(next(grams), terms, rtol=_rtol(target.dtype))
            entries.append(described(target, estimate, made="", gain=gain))
        else:
            # A rank's plain part of a weight: the heads that are here as a whole.
            here = target.piece.held.all(-1).nonzero()[0].tolist()
            rows = [target.piece.read(target.weight.detach(), range(head, head + 1)) for head in here]
            heads = torch.stack(rows) if rows else target.weight.new_empty(0, *target.shape[-2:])
            entries.append(measure(target, heads, made="", gain=gain, local=here))
    return entries


def described(
    target: Target,
    estimate: ConditionEstimate,
    *,
    made: str,
    gain: float,
    local: Sequence[int] | None = None,
    rank: int | None = None,
) -> ProjectionReport:
    """A report's entry for an estimate of the target's heads, or of the heads ``local`` of it."""
    heads, (head_dim, in_features) = target.count, target.shape[-2:]
    return ProjectionReport(
        layer=target.layer.name,
        parameter=target.name,
        role=target.projection.role,
        part=target.projection.part,
        heads=heads,
        head_dim=head_dim,
        in_features=in_features,
        dtype=target.dtype,
        made=made,
        gain=gain,
        estimate=estimate,
        stacked_rank=rank,
        local=None if local is None or len(local) == heads else tuple(local),
    )


def _joined(entries: list[ProjectionReport]) -> ProjectionReport:
    """One entry for several chunks of one projection's heads."""
    if len(entries) == 1:
        return entries[0]
    parts = [entry.estimate for entry in entries]
    estimate = ConditionEstimate(
        **{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(ConditionEstimate)}
    )
    local = tuple(head for entry in entries for head in entry.local or ())
    return replace(
        entries[0], estimate=estimate, local=None if len(local) == entries[0].heads else local, stacked_rank=None
    )


def _rtol(dtype: torch.dtype) -> float:
    return min(1e-3, sigma_tolerance(dtype) / 2)


def _check(target: Target, *, include_frozen: bool, overwrite: bool) -> None:
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
    if not include_frozen and (is_adapted(name) or (not target.parametrized and frozen)):
        what = "the base of an adapter" if is_adapted(name) else "frozen (requires_grad=False)"
        raise ValueError(
            f"{name} is {what}; pass include_frozen=True to initialize it all the same, or leave its layer out with "
            "where="
        )
    if getattr(weight, "_is_hf_initialized", False) and not hasattr(weight, MARK) and not overwrite:
        raise ValueError(
            f"{name} was loaded from a checkpoint (transformers marked it so), and initializing it would destroy "
            "trained weights; pass overwrite=True if that is what you want"
        )


def _untie(targets: list[Target]) -> tuple[list[Target], list[tuple[str, str]]]:
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


Blocks = list[tuple[range, Tensor]]
"""New values by chunk of heads: whole heads, or of a sharded weight what :meth:`Piece.select` kept of them."""


def as_blocks(target: Target, heads: Tensor) -> Blocks:
    """New values of all heads of a weight that is here as a whole."""
    return [(range(target.count), heads)]


def write_all(writes: list[tuple[Target, Blocks]], scheme: str) -> None:
    """Write every target's new heads, and undo all of it if anything fails on the way."""
    undo: list[Callable[[], None]] = []
    written: list[Target] = []
    try:
        while writes:
            target, blocks = writes.pop(0)
            undo.append(_restorer(target))
            _write(target, blocks)
            written.append(target)
            del blocks
    except BaseException:
        for restore in reversed(undo):
            restore()
        raise
    for target in written:
        weight = target.weight
        if isinstance(weight, nn.Parameter):
            setattr(weight, MARK, scheme)
            if any(cls.__module__.startswith("transformers.") for cls in type(target.layer.module).__mro__):
                weight._is_hf_initialized = True  # type: ignore[attr-defined]


def _restorer(target: Target) -> Callable[[], None]:
    """A function that puts back every bit that :func:`_write` may change."""
    places = [target.heads if target.piece is None else distributed.local_part(target.weight)]
    if target.parametrized:
        # The tensors themselves and no views, since an assignment may give them other memory.
        state = parametrizations(target.owner, target.attribute)
        places = [*state.parameters(), *state.buffers()]
    copies = [place.clone() for place in places]

    def restore() -> None:
        for place, copy in zip(places, copies, strict=True):
            place.copy_(copy)

    return restore


def _write(target: Target, blocks: Blocks) -> None:
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


@contextmanager
def named_errors(target: Target) -> Iterator[None]:
    """Prefix the parameter's name to errors of the numerical functions."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise type(error)(f"{target.name} ({target.projection.role}): {error}") from error
