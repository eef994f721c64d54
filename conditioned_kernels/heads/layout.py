"""Where attention heads lie in stored weights: storage forms, as strided views that share the storage.

A view turns one stored weight into ``(*heads, head_dim, in_features)``: head i of the paper is the transpose of
``view(weight)[i]``. A layout turns one attention module into its projections, each a parameter name and a view.
Views are data, so the same view serves a module's parameter, a fresh tensor of the same shape, or a tensor
read from a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .. import _validate
from .wrappers import look_through


class LayoutError(ValueError):
    """A weight does not have the shape its layout says, or a layout does not describe its module."""


class View(Protocol):
    """Maps a stored weight to a view (*heads, head_dim, in_features) of it."""

    def __call__(self, weight: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class HeadView:
    """Split the output axis, then index the pieces.

    Attributes
    ----------
    split : sizes the output axis is split into, the last one a head's rows.
    index : applied to the split axes from the left.
    input_major : the weight is stored (in, out), as transformers' Conv1D does, and not (out, in).
    """

    split: tuple[int, ...]
    index: tuple[int | slice, ...] = ()
    input_major: bool = False

    def __call__(self, weight: Tensor) -> Tensor:
        matrix = as_matrix(weight)
        if self.input_major:
            matrix = matrix.mT
        if math.prod(self.split) != matrix.shape[0]:
            raise LayoutError(
                f"expected {' x '.join(map(str, self.split))} = {math.prod(self.split)} output rows, got a weight of "
                f"shape {tuple(weight.shape)} with {matrix.shape[0]}; the model's class has another layout than its "
                "family row says, so register one with register_layout"
            )
        return matrix.unflatten(0, self.split)[self.index]


@dataclass(frozen=True)
class StridedView:
    """A view given by numbers, as a user's layout function returns it: see :func:`from_views`."""

    shape: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def __call__(self, weight: Tensor) -> Tensor:
        if tuple(weight.shape) != self.shape or not weight.is_contiguous():
            raise LayoutError(f"expected a contiguous weight of shape {self.shape}, got {tuple(weight.shape)}")
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset)


@dataclass(frozen=True)
class Projection:
    """The heads of one role in one stored weight.

    Attributes
    ----------
    role : "q", "k" or "v"; "kv" for a low-rank factor that feeds both keys and values.
    parameter : name of the weight relative to the attention module, e.g. "q_proj.weight".
    view : maps the weight to (*heads, head_dim, in_features).
    part : tells apart several projections of one role in one module, e.g. "rope" and "nope"; :data:`LATENT` for a
        low-rank factor.
    """

    role: str
    parameter: str
    view: View
    part: str = ""

    @property
    def label(self) -> str:
        """The role with its part: "q", "k.rope". Part of the sample stream's key."""
        return f"{self.role}.{self.part}" if self.part else self.role


ROLES = ("q", "k", "v", "kv")

OUTPUT = "o"
"""The role of W_O, the matrix after the heads. Only schemes that ask for it see it."""

LATENT = "latent"
"""The part of a low-rank factor that other projections read; a norm follows it, so its scale has no effect."""

POSITION = "position"
"""The part of projections of relative positions, whose scores are added to those of the content."""


class Layout(Protocol):
    """Maps an attention module to its projections.

    Attributes
    ----------
    form : the storage form in words, for the support table.
    """

    @property
    def form(self) -> str: ...

    def __call__(self, module: nn.Module) -> tuple[Projection, ...]: ...


@dataclass(frozen=True)
class Blocked:
    """One weight, one contiguous block of rows per role in the order of ``roles``; each block holds its heads in order.

    ``heads``, ``kv_heads`` and ``head_dim`` are attribute paths on the module ("config.num_attention_heads").
    With grouped heads (``kv_heads``) K and V are conditioned per K/V head. ``name`` is a submodule with a
    ``weight``, or the weight itself. ``head_dim``, where given, is checked against the rows, and gives the number of
    heads where ``heads`` is "".
    """

    name: str
    heads: str = ""
    kv_heads: str = ""
    roles: str = "qkv"
    input_major: bool = False
    head_dim: str = ""
    part: str = ""

    @property
    def form(self) -> str:
        stored = "(in, out) " if self.input_major else ""
        blocks = " in blocks" if len(self.roles) > 1 else ""
        return f"{stored}{self.name} [{' '.join(_named(role, self.part) for role in self.roles)}]{blocks}"

    def __call__(self, module: nn.Module) -> tuple[Projection, ...]:
        parameter = weight_name(self.name)
        if self.heads:
            queries = count(module, self.heads)
        else:
            rows = head_rows(module, parameter, len(self.roles), input_major=self.input_major)
            queries = divide(rows, count(module, self.head_dim), f"output rows of {parameter}")
        shared = count(module, self.kv_heads) if self.kv_heads else queries
        counts = [queries if role == "q" else shared for role in self.roles]
        size = head_rows(module, parameter, sum(counts), self.head_dim, self.input_major)
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        return tuple(
            Projection(
                role, parameter, HeadView((sum(counts), size), (slice(start, stop),), self.input_major), self.part
            )
            for role, start, stop in zip(self.roles, starts, starts[1:], strict=False)
        )


@dataclass(frozen=True)
class Separate:
    """One weight per role, each as :class:`Blocked` with that role alone."""

    heads: str = ""
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    kv_heads: str = ""
    head_dim: str = ""
    part: str = ""

    @property
    def form(self) -> str:
        named = (("q", self.q), ("k", self.k), ("v", self.v))
        return ", ".join(f"{name} [{_named(role, self.part)}]" for role, name in named if name)

    def __call__(self, module: nn.Module) -> tuple[Projection, ...]:
        named = (("q", self.q), ("k", self.k), ("v", self.v))
        return tuple(
            projection
            for role, name in named
            if name
            for projection in Blocked(name, self.heads, self.kv_heads, role, head_dim=self.head_dim, part=self.part)(
                module
            )
        )


@dataclass(frozen=True)
class Interleaved:
    """One weight, per head one block per role in the order of ``roles``: [q1 k1 v1 q2 k2 v2 ...].

    A "-" among the roles is a block that is left alone, such as a gate. ``shards``, an attribute path, groups heads:
    one block of several heads per role, for each of that many tensor-parallel shards.
    """

    name: str
    heads: str
    roles: str = "qkv"
    head_dim: str = ""
    shards: str = ""

    @property
    def form(self) -> str:
        return f"{self.name} [{' '.join(map(_named, self.roles))}] per {'shard' if self.shards else 'head'}"

    def __call__(self, module: nn.Module) -> tuple[Projection, ...]:
        parameter, heads, kinds = weight_name(self.name), count(module, self.heads), len(self.roles)
        size = head_rows(module, parameter, heads * kinds, self.head_dim)
        split: tuple[int, ...] = (heads, kinds, size)
        if self.shards:
            shards = count(module, self.shards)
            split = (shards, kinds, divide(heads, shards, f"heads per shard of {parameter}"), size)
        return tuple(
            Projection(role, parameter, HeadView(split, (slice(None), i)))
            for i, role in enumerate(self.roles)
            if role != "-"
        )


@dataclass(frozen=True)
class Sections:
    """One weight, per head one section per entry of ``sections``, of unequal sizes: (role, part, rows' path).

    ``heads`` is an attribute path, or "" for one head.
    """

    name: str
    sections: tuple[tuple[str, str, str], ...]
    heads: str = ""

    @property
    def form(self) -> str:
        sections = " ".join(_named(role, part) for role, part, _ in self.sections)
        return f"{self.name} [{sections}]{' per head' if self.heads else ''}"

    def __call__(self, module: nn.Module) -> tuple[Projection, ...]:
        parameter = weight_name(self.name)
        heads = count(module, self.heads) if self.heads else 1
        sizes = [count(module, path) for _, _, path in self.sections]
        rows = head_rows(module, parameter, heads)
        if rows != sum(sizes):
            wanted = " + ".join(f"{path}={size}" for (_, _, path), size in zip(self.sections, sizes, strict=True))
            raise LayoutError(
                f"{parameter!r} of {type(module).__name__} has {rows} rows per head, expected {wanted}; this variant "
                "of the class is not known, so register its layout"
            )
        starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        return tuple(
            Projection(role, parameter, HeadView((heads, rows), (slice(None), slice(start, stop))), part)
            for (role, part, _), start, stop in zip(self.sections, starts, starts[1:], strict=False)
        )


@dataclass(frozen=True)
class Grouped:
    """One weight, per K/V head its query heads, then its key, then its value: [q.. k v, q.. k v, ...]."""

    name: str
    heads: str
    kv_heads: str

    @property
    def form(self) -> str:
        return f"{self.name} [Q.. K V] per K/V head"

    def __call__(self, module: nn.Module) -> tuple[Projection, ...]:
        parameter, groups = weight_name(self.name), count(module, self.kv_heads)
        queries = divide(count(module, self.heads), groups, self.heads)
        split = (groups, queries + 2, head_rows(module, parameter, groups * (queries + 2)))
        return (
            Projection("q", parameter, HeadView(split, (slice(None), slice(queries)))),
            Projection("k", parameter, HeadView(split, (slice(None), queries))),
            Projection("v", parameter, HeadView(split, (slice(None), queries + 1))),
        )


@dataclass(frozen=True)
class Joined:
    """Several layouts in one module, such as a query weight beside a packed key/value weight."""

    layouts: tuple[Layout, ...]

    @property
    def form(self) -> str:
        return ", ".join(layout.form for layout in self.layouts)

    def __call__(self, module: nn.Module) -> tuple[Projection, ...]:
        return tuple(projection for layout in self.layouts for projection in layout(module))


@dataclass(frozen=True)
class IfPresent:
    """A layout of a weight that only some variants of the class have."""

    name: str
    layout: Layout

    @property
    def form(self) -> str:
        return f"{self.layout.form} where present"

    def __call__(self, module: nn.Module) -> tuple[Projection, ...]:
        return self.layout(module) if getattr(module, self.name, None) is not None else ()


@dataclass(frozen=True)
class Choose:
    """Takes the first layout whose attribute path is true on the module; the last one needs none ("")."""

    options: tuple[tuple[str, Layout], ...]

    @property
    def form(self) -> str:
        return " or ".join(layout.form for _, layout in self.options)

    def __call__(self, module: nn.Module) -> tuple[Projection, ...]:
        for flag, layout in self.options:
            if not flag or attribute(module, flag):
                return layout(module)
        raise LayoutError(f"{type(module).__name__} has none of the flags {[flag for flag, _ in self.options]} set")


AROUND = "../"
"""Start of a path that begins at the module around the attention module."""


@dataclass(frozen=True)
class Output:
    """Where an attention class keeps W_O, the matrix that mixes the outputs of its heads.

    Attributes
    ----------
    path : of the weight or the module that holds it, relative to the attention module; "../output.dense" starts at the
        module around it. "" for none.
    input_major : stored (in, out), as transformers' Conv1D does.
    reason : why there is none.
    """

    path: str = ""
    input_major: bool = False
    reason: str = ""

    @property
    def form(self) -> str:
        """In words, for the support table."""
        return f"{'(in, out) ' * self.input_major}{self.path}" if self.path else f"none: {self.reason}"

    def view(self, heads: int, head_dim: int) -> HeadView:
        """The view (heads, head_dim, out_features): entry [h, r, c] is how output c reads row r of query head h."""
        return HeadView((heads, head_dim), (), not self.input_major)


def from_views(module: nn.Module, views: Mapping[str, Tensor]) -> tuple[Projection, ...]:
    """Projections from a user's ``{"q": view, "k": view, "v": view}``, each (*heads, head_dim, in_features).

    "o", where given, is W_O as (heads, head_dim, out_features), query heads in order.

    Raises
    ------
    LayoutError
        if a view is not a view of one of the module's parameters, does not have at least three dimensions,
        has elements that share memory, or overlaps another view.
    """
    projections, seen = [], dict[str, Tensor]()
    for role, view in views.items():
        if role not in (*ROLES, OUTPUT):
            raise LayoutError(f"a layout's roles must be among {(*ROLES, OUTPUT)}, got {role!r}")
        if not isinstance(view, Tensor) or view.ndim < 3:
            raise LayoutError(
                f"the layout's {role!r} must be a tensor (*heads, head_dim, in_features), 3 or more dimensions, got "
                f"{tuple(view.shape) if isinstance(view, Tensor) else type(view).__name__}"
            )
        found = next(((name, p) for name, p in module.named_parameters() if _is_inside(view, p)), None)
        if found is None:
            raise LayoutError(
                f"the layout's {role!r} is not a view of a parameter of {type(module).__name__}: it must share "
                "storage, so use view, unflatten, transpose and indexing, and no reshape, contiguous or to that copies"
            )
        name, parameter = found
        _validate.floating(parameter, name)
        offset = int(view.storage_offset() - parameter.storage_offset())
        strided = StridedView(tuple(parameter.shape), tuple(view.shape), tuple(view.stride()), offset)
        projections.append(Projection(role, name, strided))
        taken = seen.setdefault(name, torch.zeros(parameter.shape, dtype=torch.bool, device="cpu"))
        cover = strided(taken)
        if _validate.overlaps_itself(cover) or cover.any():
            raise LayoutError(f"the layout's {role!r} overlaps itself or another role inside {name!r}")
        cover.fill_(True)
    return tuple(projections)


def _is_inside(view: Tensor, parameter: Tensor) -> bool:
    """Whether ``view`` lies inside ``parameter``; several parameters may share one storage."""
    if view.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
        return False
    first = int(view.storage_offset() - parameter.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return first >= 0 and first + reach < max(parameter.numel(), 1)


def as_matrix(weight: Tensor) -> Tensor:
    """(out, in) view of a linear weight or of a 1x1 convolution's (out, in, 1, ...)."""
    if weight.ndim > 2 and math.prod(weight.shape[2:]) == 1:
        weight = weight.flatten(1)
    if weight.ndim != 2:
        raise LayoutError(f"expected a matrix (out, in) or a 1x1 convolution's weight, got shape {tuple(weight.shape)}")
    return weight


def attribute(module: object, path: str) -> object:
    """``module.a.b`` for the path "a.b", looking through wrappers and adapters where ``a`` itself has no ``b``."""
    value = module
    for name in filter(None, path.split(".")):
        if isinstance(value, nn.Module) and not hasattr(value, name):
            value, _ = look_through(value)
        if not hasattr(value, name):
            raise LayoutError(f"{type(module).__name__} has no attribute {path!r}, which its family row reads")
        value = getattr(value, name)
    return value


def count(module: nn.Module, path: str) -> int:
    value = attribute(module, path)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(f"{type(module).__name__}.{path} must be a positive integer, got {value!r}")
    return value


def weight_name(name: str) -> str:
    return name if name.rpartition(".")[2].endswith("weight") else f"{name}.weight"


def head_rows(module: nn.Module, parameter: str, heads: int, head_dim: str = "", input_major: bool = False) -> int:
    """Rows of one head: the weight's output rows / heads, checked against the module's own head_dim if given."""
    weight = attribute(module, parameter)
    if callable(weight) and not isinstance(weight, Tensor):
        raise TypeError(
            f"{parameter!r} of {type(module).__name__} is a method, as quantized layers have it, and no floating "
            "weight; initialize before quantizing"
        )
    if not isinstance(weight, Tensor):
        raise LayoutError(f"{parameter!r} of {type(module).__name__} must be a weight, got {type(weight).__name__}")
    # Before any shape: quantized storage has a shape of its own, and a placeholder has none.
    _validate.floating(weight, parameter)
    if weight.ndim < 2 or weight.numel() == 0:
        full = getattr(weight, "ds_shape", None)
        raise LayoutError(
            f"{parameter!r} of {type(module).__name__} must be a weight matrix, got shape {tuple(weight.shape)}"
            f"{f' for a weight of shape {tuple(full)}' if full is not None else ''}; a flat or empty placeholder of a "
            "sharded model must be gathered first (FSDP1: FullyShardedDataParallel.summon_full_params; ZeRO-3: "
            "deepspeed.zero.GatheredParameters), or the model initialized before it is wrapped"
        )
    rows = divide(weight.shape[1] if input_major else weight.shape[0], heads, f"output rows of {parameter}")
    if head_dim and rows != count(module, head_dim):
        raise LayoutError(
            f"{parameter!r} of {type(module).__name__} has {rows} rows per head, but {head_dim} is "
            f"{count(module, head_dim)}; this variant of the class is not known, so register its layout"
        )
    return rows


def divide(total: int, parts: int, what: str) -> int:
    if total % parts or not total:
        raise LayoutError(f"{what}: {total} is not a positive multiple of {parts}, so the heads have no equal size")
    return total // parts


def _named(role: str, part: str = "") -> str:
    """Q or K.rope, or gate for a block that is left alone."""
    return "gate" if role == "-" else f"{role.upper()}.{part}" if part else role.upper()


LayoutFunction = Callable[[nn.Module], "Mapping[str, Tensor] | tuple[Projection, ...]"]
"""What a user registers: returns views by role, or projections."""
