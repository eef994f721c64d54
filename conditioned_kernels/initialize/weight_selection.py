"""Weight selection (Xu et al., ICLR 2024): a small model starts from chosen elements of a larger one of its family."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import _validate
from ..heads.discover import AttentionLayer, Discovery
from ..heads.layout import LATENT, OUTPUT, HeadView, LayoutFunction, Projection
from ..heads.wrappers import full_name
from ..sampling import resolve_seed
from .apply import Draw, Scheme
from .init_report import InitReport
from .positions import TABLES
from .scope import Scope
from .selection import ELEMENTS, LAYERS, Selection, aligned_prefix, layer_name, renamed, stack_sizes
from .target import Target, resolve
from .teacher import Teacher, open_teacher, whole_targets


@dataclass(frozen=True)
class Packed:
    """A parameter beside the attention weights of which one axis holds several blocks of one dimension.

    Attributes
    ----------
    suffix : end of the parameter's name.
    axis, blocks : which axis, and how many blocks.
    interleaved : element i of every block lies together, and not each block in one piece.
    owner : the class that has it so; "" for any.
    """

    suffix: str
    axis: int
    blocks: int
    interleaved: bool = False
    owner: str = ""


_OSS = "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts"
PACKED = (
    Packed("gate_up_proj", -1, 2, True, _OSS),
    Packed("gate_up_proj_bias", -1, 2, True, _OSS),
    Packed("experts.gate_up_proj", 1, 2),
    Packed("gate_up_proj.weight", 0, 2),
    Packed("mlp.Wi.weight", 0, 2),
    Packed("mlp.Wi.bias", 0, 2),
    Packed("downsample.reduction.weight", 1, 4),
    Packed("downsample.norm.weight", 0, 4),
    Packed("downsample.norm.bias", 0, 4),
)
"""Gate and up projections in one weight; the four pixels that Swin merges."""

_HEAD_NORMS = re.compile(r"timm\.(layers\.attention|models\.eva)\.")
BY_ROLE = (
    (re.compile(""), re.compile(r"q_(bias|norm|layernorm)\b"), "q"),
    (re.compile(""), re.compile(r"k_(bias|norm|layernorm)\b|bias_k$"), "k"),
    (re.compile(""), re.compile(r"v_bias$|bias_v$"), "v"),
    (_HEAD_NORMS, re.compile(r"(norm|gate)\."), OUTPUT),
)
"""(class, name inside the attention module, role): whose heads and rows the axes of such a parameter run over."""


def weight_selection_(
    model: nn.Module,
    teacher: nn.Module | Mapping[str, Tensor] | str | Path,
    *,
    layers: str = "first",
    elements: str = "uniform",
    leave: Sequence[str] = (),
    like: nn.Module | str | None = None,
    config: str | Path | None = None,
    seed: int = 0,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None = None,
    strict: bool = True,
    include_frozen: bool = False,
    overwrite: bool = False,
    generator: torch.Generator | None = None,
) -> InitReport:
    """Give ``model``, in place, chosen elements of the parameters of a larger ``teacher`` of the same family.

    Every parameter of the model and every running statistic takes the elements of its namesake at the chosen indices
    of every axis: W_student = W_teacher[rows][:, columns] (Xu et al., "Initializing Models with Larger Ones", ICLR
    2024). One choice is made for all axes that mean one dimension, so that it commutes with the model's structure: the
    residual stream; the hidden units of the MLP; heads, and the rows inside a head, alike for W_Q, W_K, their biases
    and norms, and for W_V and the inputs of W_O.

    Parameters
    ----------
    model : the student, of any supported attention class; no dimension may be larger than the teacher's.
    teacher : a module; or a state dict, a safetensors or torch file, or a folder of them, whose architecture is
        ``like`` (a module, on the meta device if you wish, or a name such as "transformers:bert") with ``config``, or
        the ``config.json`` beside the file. Names may differ by a beginning such as "bert.".
    layers : layer i of a stack of n takes the teacher's, of N: "first" i (the paper's default), "uniform" i N // n.
    elements : index i of n, of the teacher's N: "uniform" i N // n (the paper's default), "consecutive" i, "random" a
        sorted random subset, the same wherever N and n are.
    leave : beginnings of names to leave as they are, such as a new classifier's: ``("head.",)``.
    seed, generator : of "random".
    layouts, strict, include_frozen, overwrite : as for :func:`conditioned_`; frozen and loaded parameters outside
        attention count too.

    Returns
    -------
    InitReport; Q, K, V and W_O measured per head (roles "q", "k", "v", "o"), the rest named in ``others``.

    Raises
    ------
    ValueError
        besides the errors of :func:`conditioned_`: for a name the teacher lacks, another family, more layers, heads or
        width than the teacher's, heads whose grouping does not fit, packed parameters of unknown structure, and rows
        beside the heads (gates) where sizes differ. The model is then bit-identical.

    Notes
    -----
    *Grouped heads.* K/V heads are chosen first, then query heads within each group. *Vocabularies and positions* take
    the first rows. *Scales* are the model's own: a student whose heads have fewer rows divides by another sqrt(d). Rows
    of rotary heads keep their pairs and frequencies if "uniform" divides the rows evenly and the halves are paired (the
    Llama way); keep the head size where you can. Axes outside attention are told apart by their two sizes alone.
    *Cost.* one read of the teacher, tensor by tensor, and a second copy of the student.
    """
    _validate.choice(layers, "layers", LAYERS)
    _validate.choice(elements, "elements", ELEMENTS)
    if isinstance(leave, str) or not all(isinstance(each, str) for each in leave):
        raise TypeError(f"leave must be a sequence of names' beginnings, such as ('head.',), got {leave!r}")
    seed = resolve_seed(seed, generator)
    plan: dict[tuple[str, str], tuple[str, Callable[[], Tensor]]] = {}
    opened: list[Teacher] = []

    @contextmanager
    def source() -> Iterator[None]:
        with open_teacher(teacher, like=like, config=config, layouts=layouts) as found:
            opened[:] = [found]
            yield

    def choose(model: nn.Module, found: Discovery) -> list[Target]:
        return _Choice(model, found, opened[0], Selection(elements, seed), layers, tuple(leave)).targets(plan)

    def draw(target: Target) -> Draw:
        name, values = plan[target.name, target.stream_role]
        return Draw(values(), f"{elements} elements of {name}")

    name = f"weight selection, {layers} layers, {elements} elements"
    scope = Scope(None, layouts, strict, include_frozen, overwrite)
    return Scheme(name, seed, draw, choose=choose, source=source, whole=True).apply(model, scope)


@dataclass(frozen=True)
class _Heads:
    """Which heads and rows of the teacher's layer the student's takes, by label of the projection."""

    ours: AttentionLayer
    theirs: AttentionLayer
    heads: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]
    sizes: Mapping[str, tuple[tuple[int, int], tuple[int, int]]]

    def partner(self, projection: Projection) -> Projection:
        """The teacher's projection of the same label."""
        return next(each for each in _all(self.theirs) if each.label == projection.label)


class _Choice:
    """The indices for one model and one teacher."""

    def __init__(
        self,
        model: nn.Module,
        found: Discovery,
        source: Teacher,
        select: Selection,
        layers: str,
        leave: tuple[str, ...],
    ) -> None:
        self.found, self.source, self.select, self.layers = found, source, select, layers
        everything = {target.name: target for target in whole_targets(model)}
        self.change = aligned_prefix(everything, source.shapes)
        self.ours = stack_sizes(renamed(name, self.change) for name in everything)
        self.theirs = stack_sizes(source.shapes)
        self.wanted = {name: target for name, target in everything.items() if not name.startswith(leave)}
        missing = [name for name in self.wanted if self.partner(name) not in source.shapes]
        if missing:
            raise ValueError(
                f"the teacher has no counterpart of {len(missing)} of the student's {len(everything)} parameters: "
                f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}; give a teacher of the same family, or "
                "name what shall stay as it is by its beginning, as in leave=('head.',)"
            )
        self.layer_of = {layer.name: self._layer(layer) for layer in found.layers}
        tables = [
            (target.weight.shape, source.shapes[self.partner(name)])
            for name, target in self.wanted.items()
            if isinstance(target.owner, nn.Embedding) and self._scope(name) is None
        ]
        self.prefixes = {(theirs[0], ours[0]) for ours, theirs in tables}
        self.widths = {(theirs[1], ours[1]) for ours, theirs in tables}

    def partner(self, name: str) -> str:
        """The teacher's name for the student's."""
        return layer_name(renamed(name, self.change), self.ours, self.theirs, self.layers)

    def targets(self, plan: dict[tuple[str, str], tuple[str, Callable[[], Tensor]]]) -> list[Target]:
        """Every target of the model, with the function that makes its values put into ``plan``."""
        chosen = []
        whole = dict(self.wanted)
        weights: dict[str, list[Target]] = {}
        for target in resolve(self.found, outputs=True):
            if target.name in whole:
                weights.setdefault(target.name, []).append(target)
        for name, group in weights.items():
            if not self._covered(name, group):
                continue
            del whole[name]
            for target in group:
                make = partial(self._head_values, target, self.layer_of[target.layer.name])
                plan[name, target.stream_role] = self.partner(name), make
                chosen.append(target)
        for name, target in whole.items():
            plan[name, target.stream_role] = self.partner(name), partial(self._values, name, self._axes(target))
            chosen.append(target)
        return chosen

    def _layer(self, layer: AttentionLayer) -> _Heads:
        name = self.partner(layer.name)
        theirs = self.source.layers.get(name)
        if theirs is None or theirs.family != layer.family:
            raise ValueError(
                f"{layer.name or 'the model'} is {layer.family}, and {name or 'the model'} of the teacher is "
                f"{theirs.family if theirs else 'no known attention'}; the teacher must be of the same family"
            )
        shapes, others = _shapes(layer), _shapes(theirs)
        if set(shapes) != set(others):
            raise ValueError(
                f"{layer.name or 'the model'} has the projections {sorted(shapes)} and the teacher's {name} has "
                f"{sorted(others)}; the teacher must be of the same family"
            )
        where = layer.name or "the model"
        query = next(label for label in shapes if label.startswith("q") and label != f"q.{LATENT}")
        shared = next((label for label in ("v", "k") if label in shapes), query)
        many, few = ((others[label][0], shapes[label][0]) for label in (query, shared))
        base = self.select(*few, f"{where}, K/V heads")
        group = self.select(many[0] // few[0], many[1] // few[1], f"{where}, query heads per K/V head")
        queries = (base[:, None] * (many[0] // few[0]) + group).flatten()
        heads, rows, sizes = {}, {}, {}
        for label, ours in shapes.items():
            pair = others[label][0], ours[0]
            is_query = label.startswith("q") or label == OUTPUT
            heads[label] = (
                queries if is_query and pair == many else base if pair == few else self.select(*pair, f"{where}, heads")
            )
            rows[label] = self.select(others[label][1], ours[1], f"{where}, rows of a head ({label})")
            sizes[label] = pair, (others[label][1], ours[1])
        return _Heads(layer, theirs, heads, rows, sizes)

    def _covered(self, name: str, group: list[Target]) -> bool:
        """Whether heads are all there is in a weight; if not, it can be taken whole or not at all."""
        shape, other = group[0].weight.shape, self.source.shapes[self.partner(name)]
        cover = torch.zeros(shape, dtype=torch.bool, device="cpu")
        for target in group:
            target.projection.view(cover).fill_(True)
        if not cover.all() and shape != other:
            raise ValueError(
                f"{name} has rows beside its heads (a gate), and shape {tuple(other)} in the teacher but "
                f"{tuple(shape)} here; which of those rows belong together is not known, so leave it out with leave="
            )
        return bool(cover.all())

    def _head_values(self, target: Target, layer: _Heads) -> Tensor:
        label, projection = target.stream_role, layer.partner(target.projection)
        heads = projection.view(self.source.read(layer.theirs.parameter_name(projection)))
        heads = heads.reshape(-1, *heads.shape[-2:])
        shape = target.projection.view(torch.empty(target.weight.shape, device="meta")).shape
        columns = self.select(heads.shape[2], shape[-1], f"{target.name}, columns")
        device = heads.device
        heads = heads[layer.heads[label].to(device)][:, layer.rows[label].to(device)][:, :, columns.to(device)]
        return heads.reshape(shape).to(target.weight.device)

    def _values(self, name: str, axes: list[Tensor]) -> Tensor:
        values = self.source.read(self.partner(name))
        for axis, index in enumerate(axes):
            if len(index) != values.shape[axis] or not torch.equal(index, torch.arange(len(index), device="cpu")):
                values = values.index_select(axis, index.to(values.device))
        return values.to(self.wanted[name].weight.device)

    def _axes(self, target: Target) -> list[Tensor]:
        """The teacher's indices along every axis of a parameter outside the attention weights."""
        name, ours, theirs = target.name, target.weight.shape, self.source.shapes[self.partner(target.name)]
        if len(ours) != len(theirs):
            raise ValueError(
                f"{name} has shape {tuple(ours)}, and {tuple(theirs)} in the teacher; give one of the same family"
            )
        return [self._axis(target, axis, sizes) for axis, sizes in enumerate(zip(theirs, ours, strict=True))]

    def _axis(self, target: Target, axis: int, sizes: tuple[int, int]) -> Tensor:
        name, what = target.name, f"{target.name}, axis {axis}"
        scope = self._scope(name)
        if scope is not None:
            index = self._projected(target, scope) if target.weight.ndim == 1 else None
            index = _in_attention(name, scope, sizes) if index is None else index
            if index is not None:
                return index
        if (packed := _packed(target, axis)) is not None:
            return self._blocks(name, packed, *sizes)
        table = any(f".{name}".endswith(f".{end}") for end in TABLES) and axis == target.weight.ndim - 2
        if table or (axis == 0 and scope is None and self._is_vocabulary(target, *sizes)):
            return Selection("consecutive", 0)(*sizes, what)
        self._refuse_hidden_blocks(target, axis, *sizes)
        return self.select(*sizes, what)

    def _scope(self, name: str) -> _Heads | None:
        """The attention layer a parameter is inside of."""
        for layer, heads in self.layer_of.items():
            if not layer or name.startswith(f"{layer}."):
                return heads
        return None

    def _projected(self, target: Target, scope: _Heads) -> Tensor | None:
        """Rows of a bias or a norm that follows a projection, as the rows of its weight; None for other vectors."""
        name, (here,), (there,) = target.name, target.weight.shape, self.source.shapes[self.partner(target.name)]
        inside = name.removeprefix(f"{scope.ours.name}.") if scope.ours.name else name
        followed = [each for each in scope.ours.projections if _follows(inside, each.parameter)]
        if not followed:
            return None
        index = torch.arange(here, device="cpu") if here == there else torch.full((here,), -1, device="cpu")
        for each in followed:
            other = scope.partner(each)
            if not isinstance(each.view, HeadView) or not isinstance(other.view, HeadView):
                raise ValueError(
                    f"{name} follows {each.parameter}, whose layout is given by views; leave it out with leave=, or "
                    "register a layout that returns projections"
                )
            mine, given = (
                view(ids[None] if view.input_major else ids[:, None])
                for view, ids in ((each.view, index), (other.view, torch.arange(there, device="cpu")))
            )
            chosen = given.reshape(-1, given.shape[-2])[scope.heads[each.label]][:, scope.rows[each.label]]
            mine.copy_(chosen.reshape(mine.shape))
        if int(index.min()) < 0:
            raise ValueError(f"{name} has rows beside the heads, whose counterparts are not known; use leave=")
        return index

    def _is_vocabulary(self, target: Target, there: int, here: int) -> bool:
        if (there, here) not in self.prefixes or there == here:
            return False
        if isinstance(target.owner, nn.Embedding):
            return True
        if (there, here) in self.widths:
            raise ValueError(
                f"{target.name}: {there} -> {here} is the size of a vocabulary and of the width too, so its first axis "
                "may be either; leave it out with leave=, or use another vocabulary"
            )
        return True

    def _blocks(self, name: str, packed: Packed, there: int, here: int) -> Tensor:
        if there % packed.blocks or here % packed.blocks:
            raise ValueError(f"{name} must hold {packed.blocks} equal blocks, got {there} in the teacher and {here}")
        one = self.select(there // packed.blocks, here // packed.blocks, f"{name}, axis {packed.axis}")
        block = torch.arange(packed.blocks, device="cpu")
        if packed.interleaved:
            return (one[:, None] * packed.blocks + block).flatten()
        return (block[:, None] * (there // packed.blocks) + one).flatten()

    def _refuse_hidden_blocks(self, target: Target, axis: int, there: int, here: int) -> None:
        """Two matrices in one weight that no row of PACKED names, as its neighbors' inputs of half the size tell."""
        name = target.name
        around = name.rpartition(".")[0].rpartition(".")[0]
        if axis != 0 or there == here or not around or target.weight.ndim != 2:
            return
        near = {
            each.weight.shape[1]
            for other, each in self.wanted.items()
            if other != name and other.startswith(f"{around}.") and each.weight.ndim == 2
        }
        if here not in near and 2 * max(near, default=0) == here:
            raise ValueError(
                f"{name} looks like two matrices in one (its neighbors read {here // 2} of its {here} outputs), and "
                "how they are packed is not known; leave it out with leave="
            )


def _all(layer: AttentionLayer) -> tuple[Projection, ...]:
    return (*layer.projections, *([layer.output] if layer.output else ()))


def _shapes(layer: AttentionLayer) -> dict[str, tuple[int, int]]:
    """(heads, rows of a head) by label."""
    found = {}
    for projection in _all(layer):
        *heads, rows, _ = projection.view(torch.empty(layer.weight(projection).shape, device="meta")).shape
        found[projection.label] = (torch.Size(heads).numel(), rows)
    return found


def _follows(name: str, weight: str) -> bool:
    """Whether a parameter is the bias of a projection's weight, or of the norm beside it."""
    owner = weight.rpartition(".")[0]
    beside = owner.rpartition(".")[0] or owner
    return name == weight.replace("weight", "bias") or (bool(beside) and name.startswith(f"{beside}."))


def _in_attention(name: str, scope: _Heads, pair: tuple[int, int]) -> Tensor | None:
    """Indices along an axis that runs over heads, rows of a head, or both."""
    inside = name.removeprefix(f"{scope.ours.name}.") if scope.ours.name else name
    role = next((r for cls, pattern, r in BY_ROLE if cls.match(scope.ours.family) and pattern.match(inside)), "")
    if role in scope.sizes:
        (many, few), (tall, short) = scope.sizes[role]
        if pair == (many * tall, few * short):
            return (scope.heads[role][:, None] * tall + scope.rows[role]).flatten()
    for label in dict.fromkeys((role, "q", "k")):
        if label in scope.sizes:
            for size, index in zip(scope.sizes[label], (scope.heads[label], scope.rows[label]), strict=True):
                if pair == size:
                    return index
    return None


def _packed(target: Target, axis: int) -> Packed | None:
    owner, dims = full_name(type(target.owner)), target.weight.ndim
    for row in PACKED:
        named = f".{target.name}".endswith(f".{row.suffix}") and row.owner in ("", owner)
        if named and row.axis % dims == axis:
            return row
        if named:
            return None
    return None
