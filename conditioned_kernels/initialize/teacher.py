"""The larger model that weights are selected from: a module, or tensors with their architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import architectures
from ..checkpoint import Checkpoint
from ..heads.discover import AttentionLayer, find_attention, named_modules
from ..heads.layout import LayoutFunction, Projection
from ..heads.wrappers import quiet_parametrizations, unwrap
from .selection import aligned_prefix, renamed
from .target import WHOLE, Target

STATISTICS = ("running_mean", "running_var")
"""Buffers that are learned, as opposed to those that follow from a model's shape."""


@dataclass(frozen=True)
class Whole:
    """A parameter as it is stored."""

    def __call__(self, weight: Tensor) -> Tensor:
        return weight


def whole_targets(model: nn.Module) -> list[Target]:
    """Every parameter and running statistic of ``model``, parametrized ones as their modules give them."""
    root = AttentionLayer("", unwrap(model), "", ())
    found = []
    for name, module in named_modules(model):
        if ".parametrizations." in f".{name}.":
            continue
        attributes = [key for key, value in module._parameters.items() if value is not None]
        if parametrize.is_parametrized(module):
            attributes += list(module.get_submodule("parametrizations")._modules)
        attributes += [key for key in STATISTICS if module._buffers.get(key) is not None]
        for attribute in attributes:
            path = f"{name}.{attribute}" if name else attribute
            found.append(Target(root, Projection(WHOLE, path, Whole()), module, attribute, path))
    return found


@dataclass(frozen=True)
class Teacher:
    """Attributes
    ----------
    shapes : of every parameter and running statistic, by the teacher's names.
    layers : its attention layers by name.
    read : one of its tensors.
    """

    shapes: Mapping[str, torch.Size]
    layers: Mapping[str, AttentionLayer]
    read: Callable[[str], Tensor]


@contextmanager
def open_teacher(
    teacher: nn.Module | Mapping[str, Tensor] | str | Path,
    *,
    like: nn.Module | str | None,
    config: str | Path | None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None,
) -> Iterator[Teacher]:
    """A teacher ready to be read one tensor at a time. See :func:`weight_selection_` for the arguments."""
    if isinstance(teacher, nn.Module):
        with quiet_parametrizations(teacher):
            targets = {target.name: target for target in whole_targets(teacher)}
            yield _described(teacher, targets, layouts, lambda name: targets[name].weight.detach())
    elif isinstance(teacher, Mapping):
        if like is None:
            raise TypeError(
                "teacher is a state dict, which does not say how many heads it has: give its architecture as like=, a "
                'module (the meta device will do) or a name such as "transformers:bert" with config='
            )
        known = like if isinstance(like, nn.Module) else architectures.build(like, config=config, device="meta")
        with _tensors(known, dict(teacher), layouts, lambda name: teacher[name]) as opened:
            yield opened
    elif isinstance(teacher, str | Path):
        with Checkpoint(teacher) as file:
            model = like if isinstance(like, nn.Module) else architectures.of_checkpoint(like, config, file.config)
            if model is None:
                raise ValueError(
                    f"{teacher} does not say what model it is of, and no config.json lies beside it; give its "
                    "architecture as like= or config="
                )
            with _tensors(model, file.entries, layouts, file.tensor) as opened:
                yield opened
    else:
        raise TypeError(
            f"teacher must be a torch.nn.Module, a state dict, or a file or folder, got {type(teacher).__name__}"
        )


@contextmanager
def _tensors(
    model: nn.Module,
    stored: Mapping[str, object],
    layouts: Mapping[type[nn.Module], LayoutFunction] | None,
    read: Callable[[str], Tensor],
) -> Iterator[Teacher]:
    """The architecture ``model`` with values from ``stored``, whose names may differ by a beginning."""
    targets = {target.name: target for target in whole_targets(model)}
    change = aligned_prefix(targets, stored)
    names: dict[int | str, str] = {}
    for name, target in targets.items():
        if renamed(name, change) in stored:
            # A file keeps tied weights once, under any of their names.
            names.setdefault(_identity(target), renamed(name, change))
    present = {name: target for name, target in targets.items() if _identity(target) in names}

    def load(name: str) -> Tensor:
        place = names[_identity(targets[name])]
        value = read(place)
        if value.shape != targets[name].weight.shape:
            raise ValueError(
                f"{place!r} of the teacher has shape {tuple(value.shape)}, and {tuple(targets[name].weight.shape)} in "
                "its architecture; give the right one as like= or config="
            )
        return value

    yield _described(model, present, layouts, load)


def _identity(target: Target) -> int | str:
    """The same for tied weights."""
    return target.name if target.parametrized else id(target.weight)


def _described(
    model: nn.Module,
    targets: Mapping[str, Target],
    layouts: Mapping[type[nn.Module], LayoutFunction] | None,
    read: Callable[[str], Tensor],
) -> Teacher:
    layers = {layer.name: layer for layer in find_attention(model, layouts=layouts).layers}
    return Teacher({name: target.weight.shape for name, target in targets.items()}, layers, read)
