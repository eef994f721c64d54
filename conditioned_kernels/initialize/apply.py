"""The one path every scheme takes: find the heads, check, compute everything, measure it, then write.

Nothing is written before everything is computed, and a write that fails is undone, so a failing call
leaves the model bit-identical.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import _validate
from ..condition import condition_number
from ..heads.discover import AttentionLayer, Discovery, NoAttentionFound, Where, find_attention
from ..heads.layout import LayoutError, LayoutFunction, Projection
from ..heads.wrappers import is_adapted, parametrizations, quiet_parametrizations
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
    """

    layer: AttentionLayer
    projection: Projection
    owner: nn.Module
    attribute: str
    name: str

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
        """View (*heads, head_dim, in_features) of the weight."""
        return self.projection.view(self.weight.detach())

    @property
    def stream_role(self) -> str:
        """Role in the sample stream's key: the role, and the part where there is one."""
        return self.projection.label


@dataclass(frozen=True)
class Draw:
    """What a scheme makes of one target.

    Attributes
    ----------
    heads : new values, shape of ``target.heads``, in any floating dtype; None leaves the projection alone.
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
    with torch.inference_mode(False), torch.no_grad(), quiet_parametrizations(model):
        found = locate(model, where=where, layouts=layouts, strict=strict)
        targets = (choose or resolve)(found)
        for target in targets:
            _check(target, include_frozen=include_frozen, overwrite=overwrite)
        targets, tied = _untie(targets)
        if prepare is not None:
            prepare(targets)
        skipped, writes, touched, others = [*found.skipped, *tied], [], [], []
        for target in targets:
            drawn = draw(target)
            if drawn.heads is None:
                skipped.append((f"{target.name} ({target.projection.role})", drawn.made))
                continue
            heads = drawn.heads.to(target.weight.dtype)
            writes.append((target, heads))
            if target.projection.role == WHOLE:
                others.append(target.name)
            else:
                touched.append(measure(target, heads, made=drawn.made, gain=drawn.gain))
        write_all(writes, scheme)
    return InitReport(scheme, seed, tuple(touched), tuple(skipped), found.unknown, tuple(others))


def locate(
    model: nn.Module,
    *,
    where: Where | None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None,
    strict: bool,
) -> Discovery:
    """:func:`find_attention`, refusing a model without known attention and, if ``strict``, with unknown attention."""
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


def measure(target: Target, heads: Tensor, *, made: str, gain: float) -> ProjectionReport:
    """kappa and singular values of ``heads`` (*heads, head_dim, in_features) as stored, to half the tolerance."""
    flat = heads.reshape(-1, *heads.shape[-2:])
    return ProjectionReport(
        layer=target.layer.name,
        parameter=target.name,
        role=target.projection.role,
        part=target.projection.part,
        heads=flat.shape[0],
        head_dim=flat.shape[1],
        in_features=flat.shape[2],
        dtype=heads.dtype,
        made=made,
        gain=gain,
        estimate=condition_number(flat, rtol=min(1e-3, sigma_tolerance(heads.dtype) / 2)),
        stacked_rank=stacked_rank(flat),
    )


def _check(target: Target, *, include_frozen: bool, overwrite: bool) -> None:
    weight, name = target.weight, target.name
    if any(cls.__name__ == "DTensor" for cls in type(weight).__mro__):
        raise ValueError(f"{name} is a DTensor; sharded weights are not supported yet, so initialize before sharding")
    _validate.floating(weight, name)
    _validate.not_meta(weight, name)
    try:
        _validate.writable(target.heads, name)
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


def write_all(writes: list[tuple[Target, Tensor]], scheme: str) -> None:
    """Write every target's new heads, and undo all of it if anything fails on the way."""
    undo: list[Callable[[], None]] = []
    written: list[Target] = []
    try:
        while writes:
            target, heads = writes.pop(0)
            undo.append(_restorer(target))
            _write(target, heads)
            written.append(target)
            del heads
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
    places = [target.heads]
    if target.parametrized:
        # The tensors themselves and no views, since an assignment may give them other memory.
        state = parametrizations(target.owner, target.attribute)
        places = [*state.parameters(), *state.buffers()]
    copies = [place.clone() for place in places]

    def restore() -> None:
        for place, copy in zip(places, copies, strict=True):
            place.copy_(copy)

    return restore


def _write(target: Target, heads: Tensor) -> None:
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
