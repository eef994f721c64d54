"""Find every attention layer of a model, by class, and name what cannot be handled."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..distributed import whole_shapes
from .families import FAMILIES, NOT_ATTENTION, Family
from .layout import (
    AROUND,
    LATENT,
    OUTPUT,
    LayoutError,
    LayoutFunction,
    Output,
    Projection,
    attribute,
    from_views,
    weight_name,
)
from .wrappers import full_name, look_through, own_name, quiet_parametrizations, unwrap

Where = Callable[[str, nn.Module], bool]

_CLASS_HINT = re.compile(r"attention|attn|mha(?![a-z])|multihead", re.IGNORECASE)
_CHILD_HINTS = (
    {"q_proj", "k_proj", "v_proj"},
    {"query", "key", "value"},
    {"to_q", "to_k", "to_v"},
    {"wq", "wk", "wv"},
    {"qkv"},
    {"to_qkv"},
    {"Wqkv"},
    {"c_attn"},
    {"query_key_value"},
    {"qkv_proj"},
)

_ATTENDS = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "memory_efficient_attention",
    "attention_interface",
    "flex_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
}
"""Names in a method's code that say attention by themselves."""
_WEIGHTS = {
    "attn",
    "attn_weights",
    "attn_scores",
    "attn_probs",
    "attention_weights",
    "attention_scores",
    "attention_probs",
}
"""Names that do so beside a softmax."""

_REGISTERED: dict[type[nn.Module], LayoutFunction] = {}


LEFT_OUT_BY_WHERE = "left out by where"
"""Why a known layer is skipped."""


class NoAttentionFound(ValueError):
    """The model has no attention layer of a known class."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module.

    Attributes
    ----------
    name : in the user's model.
    module : the module itself, inside any wrapper.
    family : full name of the class whose layout it has.
    projections : its weights, by the user's names relative to the module.
    row : its row of the family table; None where the user gave the layout.
    output : W_O, viewed as (query heads, head_dim, out_features); None where there is none or it is not known.
    no_output : why not.
    around : the module around it, where "../" in a name leads.
    """

    name: str
    module: nn.Module
    family: str
    projections: tuple[Projection, ...]
    row: Family | None = None
    output: Projection | None = None
    no_output: str = ""
    around: nn.Module | None = None

    def parameter_name(self, projection: Projection) -> str:
        """The projection's weight, named from the root of the user's model."""
        name, _, path = self._start(projection)
        return f"{name}.{path}" if name else path

    def weight(self, projection: Projection) -> Tensor:
        """The projection's stored weight, as the module gives it."""
        _, module, path = self._start(projection)
        weight = attribute(module, path)
        if not isinstance(weight, Tensor):
            raise LayoutError(f"{self.parameter_name(projection)} must be a tensor, got {type(weight).__name__}")
        return weight

    def owner(self, projection: Projection) -> nn.Module:
        """The module that holds the projection's weight, inside any wrappers and adapters."""
        name, module, path = self._start(projection)
        owner = attribute(module, path.rpartition(".")[0])
        if not isinstance(owner, nn.Module):
            raise LayoutError(f"{name}.{path.rpartition('.')[0]} must be a module, got {type(owner).__name__}")
        return look_through(owner)[0]

    def _start(self, projection: Projection) -> tuple[str, nn.Module, str]:
        """(name, module, path) of what the projection's name starts from, and the rest of the name."""
        if self.around is None or not projection.parameter.startswith(AROUND):
            return self.name, self.module, projection.parameter
        return self.name.rpartition(".")[0], self.around, projection.parameter.removeprefix(AROUND)


@dataclass(frozen=True)
class Discovery:
    """Every attention layer found, and everything left out with its reason.

    Attributes
    ----------
    layers : in the order of the model's modules.
    skipped : (name, reason) of known layers left out, by ``where`` or because they cannot be read.
    unknown : (name, reason) of modules that look like attention but have no layout.
    """

    layers: tuple[AttentionLayer, ...]
    skipped: tuple[tuple[str, str], ...]
    unknown: tuple[tuple[str, str], ...]


def register_layout(cls: type[nn.Module], layout: LayoutFunction) -> None:
    """Teach every later call where ``cls`` keeps its heads.

    Parameters
    ----------
    cls : the attention class. Subclasses are covered while they keep its ``forward``.
    layout : takes the module, returns ``{"q": view, "k": view, "v": view}``, strided views
        (*heads, head_dim, in_features) of its parameters; or a tuple of
        :class:`~conditioned_kernels.heads.Projection`. See ``conditioned-kernels probe`` to prove it right.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"cls must be a subclass of torch.nn.Module, got {cls!r}")
    if not callable(layout):
        raise TypeError(f"layout must be callable with a module, got {type(layout).__name__}")
    _REGISTERED[cls] = layout


def find_attention(
    model: nn.Module,
    *,
    where: Where | None = None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None = None,
    lenient: bool = False,
) -> Discovery:
    """Every attention layer of ``model``.

    Parameters
    ----------
    model : any module; compile, DDP, FSDP and checkpoint wrappers are looked through, and so are adapters (LoRA) around
        a projection.
    where : keeps the layers for which ``where(name, module)`` is true.
    layouts : layout functions by class, for this call only; they go before registered ones and the family table.
    lenient : put a layer that cannot be read among ``skipped`` instead of raising.

    Raises
    ------
    LayoutError
        when a known class does not have the weights its layout says, with the module's name; a flat or empty
        placeholder of a sharded weight too.
    TypeError
        for quantized or integer storage where a weight is expected.
    """
    table = {**_REGISTERED, **(layouts or {})}
    layers: list[AttentionLayer] = []
    skipped: list[tuple[str, str]] = []
    suspects: list[tuple[str, str]] = []
    inside: tuple[str, ...] = ()
    passed: dict[str, nn.Module] = {}
    for name, module in named_modules(model):
        passed[name] = module
        if any(name == done or name.startswith(f"{done}." if done else "") for done in inside):
            continue
        family, row, layout, reason = _match(module, table)
        if layout is None:
            if reason or _looks_like_attention(module):
                suspects.append((name, reason or f"class {full_name(type(module))} has no layout"))
            continue
        inside += (name,)
        if where is not None and not where(name, module):
            skipped.append((name, LEFT_OUT_BY_WHERE))
            continue
        try:
            with quiet_parametrizations(module), whole_shapes(module):
                found = layout(module)
                projections = found if isinstance(found, tuple) else from_views(module, found)
                projections = tuple(replace(each, parameter=own_name(module, each.parameter)) for each in projections)
        except (LayoutError, TypeError) as error:
            if lenient:
                skipped.append((name, str(error)))
                continue
            raise type(error)(f"{name or type(module).__name__}: {error}") from error
        given = next((each for each in projections if each.role == OUTPUT), None)
        projections = tuple(each for each in projections if each.role != OUTPUT)
        around = passed[name.rpartition(".")[0]] if name else None
        layer = AttentionLayer(name, module, family, projections, row, given, around=around)
        layers.append(layer if given else _with_output(layer))
    unknown = [
        (name, reason)
        for name, reason in suspects
        # A block that merely contains a known layer is explained by it.
        if not any(done.startswith(f"{name}." if name else "") for done in inside)
        # Of nested unknown modules, the innermost is the one to register.
        and not any(other != name and other.startswith(f"{name}." if name else "") for other, _ in suspects)
    ]
    return Discovery(tuple(layers), tuple(skipped), tuple(unknown))


def _with_output(layer: AttentionLayer) -> AttentionLayer:
    """The layer with its W_O, or with the reason why there is none; never an error, since most uses do not need it."""
    row = layer.row.output if layer.row else Output(reason='its layout gives no view of it by the role "o"')
    if not row.path:
        return replace(layer, no_output=row.reason)
    up = row.path.startswith(AROUND)
    if up and layer.around is None:
        return replace(layer, no_output=f"it is kept beside the module, in {row.path!r}, and there is no module around")
    start = layer.around if up and layer.around is not None else layer.module
    try:
        with quiet_parametrizations(start):
            found = own_name(start, weight_name(row.path.removeprefix(AROUND)))
            query, value = (_first_shape(layer, role) for role in "qv")
            output = Projection(OUTPUT, f"{AROUND * up}{found}", row.view(math.prod(query[:-2]), value[-2]))
            layer = replace(layer, output=output)
            _shape(layer, output)
    except (LayoutError, AttributeError, TypeError) as error:
        return replace(layer, output=None, no_output=f"{row.path!r}: {error}")
    return layer


def _first_shape(layer: AttentionLayer, role: str) -> torch.Size:
    """(*heads, head_dim, in_features) of the layer's first projection of ``role`` that is no low-rank factor."""
    for projection in layer.projections:
        if projection.role == role and projection.part != LATENT:
            return _shape(layer, projection)
    raise LayoutError(f"no projection with role {role!r}")


def _shape(layer: AttentionLayer, projection: Projection) -> torch.Size:
    """Shape of the projection's view, without touching values, which may be sharded or absent."""
    return projection.view(torch.empty(layer.weight(projection).shape, device="meta")).shape


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules()``, each module once, without the wrappers and their name segments."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        module = unwrap(module)
        if module in seen:
            return
        seen.add(module)
        yield prefix, module
        for name, child in module._modules.items():
            if child is not None:
                yield from walk(child, f"{prefix}.{name}" if prefix else name)

    return walk(model, "")


def _match(
    module: nn.Module, table: Mapping[type[nn.Module], LayoutFunction]
) -> tuple[str, Family | None, LayoutFunction | None, str]:
    """(family, row, layout, reason); a subclass counts as its base while it keeps the base's forward."""
    cls = type(module)
    for base in cls.__mro__:
        layout = table.get(base)
        row = None if layout else _BY_CLASS.get(full_name(base))
        if layout is None and row is None:
            continue
        if getattr(cls, "forward", None) is not getattr(base, "forward", None):
            reason = f"class {full_name(cls)} overrides the forward of {full_name(base)}, so its layout is unknown"
            return "", None, None, reason
        return full_name(base), row, layout or (row.layout if row else None), ""
    return "", None, None, ""


def _looks_like_attention(module: nn.Module) -> bool:
    cls: type = type(module)
    if any(full_name(base) in NOT_ATTENTION for base in cls.__mro__):
        return False
    children = set(module._modules) | set(module._parameters)
    hinted = bool(_CLASS_HINT.search(cls.__name__)) or any(hint <= children for hint in _CHILD_HINTS)
    return (hinted or _attends(cls)) and any(parameter.ndim >= 2 for parameter in module.parameters())


@functools.cache
def _attends(cls: type) -> bool:
    """Whether the code of the class computes attention itself, whatever it is called."""
    if cls.__module__.startswith("torch."):
        return False
    methods = (inspect.unwrap(method) for base in cls.__mro__ for method in vars(base).values() if callable(method))
    codes = (method.__code__ for method in methods if inspect.isfunction(method) and method.__name__ != "__init__")
    names = {name for code in codes for name in (*code.co_names, *code.co_varnames)}
    return bool(names & _ATTENDS) or ("softmax" in names and bool(names & _WEIGHTS))


_BY_CLASS: dict[str, Family] = {name: family for family in FAMILIES for name in family.classes}
