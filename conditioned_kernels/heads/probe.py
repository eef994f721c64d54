"""The forward probe: proof that a layout reads the heads where the model itself uses them.

A wrong layout can have perfect condition numbers, so only the model's own forward can tell. The probe feeds
known states to every attention layer, records the operands of the batched matrix products inside it, which are
what the layer uses as q, k and v after its own reshapes, and compares each head with ``view(weight) @ state``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .discover import AttentionLayer, Where, find_attention
from .layout import LayoutFunction, Projection, attribute

ONE_HOT_LIMIT = 64
"""Up to this many input features every unit vector is fed; above, GAUSSIANS random vectors."""

GAUSSIANS = 16
TOLERANCE = 1e-3
"""Largest relative difference of a head's response, in float32; a wrong row gives about 1."""


@dataclass(frozen=True)
class ProbeRow:
    """One projection of one layer: what agreed.

    Attributes
    ----------
    layer, parameter, role : names; the role with its part.
    heads : number of heads in the layout.
    error : per head, the relative difference between the layout's response and the model's; inf if the model's
        forward used nothing of that shape.
    """

    layer: str
    parameter: str
    role: str
    heads: int
    error: tuple[float, ...]

    @property
    def ok(self) -> bool:
        """True if every head agrees."""
        return max(self.error, default=math.inf) <= TOLERANCE

    def __str__(self) -> str:
        wrong = [head for head, error in enumerate(self.error) if error > TOLERANCE]
        what = "agrees" if self.ok else f"DISAGREES in heads {wrong} (relative error {max(self.error):.2g})"
        return f"{self.parameter} ({self.role}, {self.heads} heads): {what}"


@dataclass(frozen=True)
class ProbeReport:
    """Outcome of :func:`probe`: one row per projection; true if all agree and at least one was probed."""

    rows: tuple[ProbeRow, ...]
    unknown: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        """True if every projection agrees."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return "\n".join([*map(str, self.rows), *(f"unknown {name}: {reason}" for name, reason in self.unknown)])


def probe(
    model: nn.Module,
    *args: Any,
    where: Where | None = None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None = None,
    batch_dim: int = 0,
    **kwargs: Any,
) -> ProbeReport:
    """Run ``model(*args, **kwargs)`` once and compare, per layer, role and head, its q, k, v with its layout's.

    q and k are compared up to a positive factor per vector (softmax scale, QK norm), v exactly, after the response
    to the zero state (the bias) is subtracted. Rotary embeddings are the identity at the first position, the only one
    compared. The model's weights, mode and random state are left as they were.

    Parameters
    ----------
    model : any module on the CPU or a GPU; float32 weights give the sharpest comparison.
    args, kwargs : an example input of the model; its first sample is repeated once per state.
    where, layouts : as for :func:`conditioned_kernels.find_attention`.
    batch_dim : the batch axis of the inputs.

    Returns
    -------
    ProbeReport.

    Raises
    ------
    LayoutError
        when a class does not have the weights its layout says; and whatever the model's forward raises.
    """
    found = find_attention(model, where=where, layouts=layouts)
    widest = max((_width(layer, each) for layer in found.layers for each in layer.projections), default=0)
    number = 1 + (widest if widest <= ONE_HOT_LIMIT else GAUSSIANS)
    rows: dict[str, list[ProbeRow]] = {}
    inputs, named = tree_map(_repeat(number, batch_dim), (args, kwargs))
    with ExitStack() as stack:
        for layer in found.layers:
            stack.enter_context(_instrumented(layer, number, rows))
        stack.enter_context(_plain_attention(model))
        model(*inputs, **named)
    missing = [layer for layer in found.layers if layer.name not in rows]
    for layer in missing:
        rows[layer.name] = [_row(layer, projection, None) for projection in layer.projections]
    return ProbeReport(tuple(row for layer in found.layers for row in rows[layer.name]), found.unknown)


@contextmanager
def _plain_attention(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, and attention as separate matrix products; everything restored afterwards."""
    training = [module for module in model.modules() if module.training]
    fast = torch.backends.mha.get_fastpath_enabled()
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(list(devices)):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module in training:
            module.training = True


@contextmanager
def _instrumented(layer: AttentionLayer, number: int, rows: dict[str, list[ProbeRow]]) -> Iterator[None]:
    """Feed states to the layer and to the modules that own its weights, and record its matrix products."""
    module = layer.module
    forward = module.forward
    widths = {(_owner(layer, projection), _width(layer, projection)) for projection in layer.projections}
    hooks = [
        owner.register_forward_pre_hook(_feeder(number, width), with_kwargs=True)
        for owner, width in widths
        if owner is not module
    ]
    feed_module = _feeder(number, *(width for _, width in widths))

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if layer.name in rows:  # A shared module runs several times; the first run is the proof.
            return forward(*args, **kwargs)
        args, kwargs = feed_module(module, args, kwargs)
        with _Products() as products:
            result = forward(*args, **kwargs)
        rows[layer.name] = [_row(layer, projection, (products.pairs, number)) for projection in layer.projections]
        return result

    module.forward = recorded
    try:
        yield
    finally:
        del module.forward
        for hook in hooks:
            hook.remove()


class _Products(TorchDispatchMode):
    """Records the two operands of every batched matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            self.pairs.append((args[0], args[1]))
        elif func is torch.ops.aten.baddbmm.default:
            self.pairs.append((args[1], args[2]))
        return func(*args, **(kwargs or {}))


def states(number: int, width: int, like: Tensor) -> Tensor:
    """(number, width): the zero vector, then unit vectors if they fit, else fixed Gaussian vectors."""
    table = torch.zeros(number, width, dtype=like.dtype, device=like.device)
    if width < number:
        index = torch.arange(1, number, device=like.device)
        table[index, (index - 1) % width] = 1
    else:
        table[1:] = torch.randn(number - 1, width, generator=torch.Generator().manual_seed(0)).to(table)
    return table


def _feeder(number: int, *widths: int) -> Callable[[nn.Module, tuple, dict], tuple[tuple, dict]]:
    """A pre-hook that replaces hidden states: token t of sample s gets state (s + t) mod number."""

    def replace(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
            return value
        channel = -1 if value.shape[-1] in widths else 1 if value.ndim == 4 and value.shape[1] in widths else None
        batch = next((d for d, size in enumerate(value.shape) if size and size % number == 0), None)
        if channel is None or batch is None or batch == channel % value.ndim:
            return value
        moved = value.movedim((batch, channel), (0, -1))
        lead = moved.shape[:-1]
        sample = torch.arange(lead[0], device=value.device) // (lead[0] // number)
        token = torch.arange(math.prod(lead[1:]), device=value.device)
        table = states(number, moved.shape[-1], value)
        fed = table[(sample[:, None] + token) % number].reshape(moved.shape)
        return fed.movedim((0, -1), (batch, channel))

    def feed(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return tuple(replace(value) for value in args), {
            name: value if "mask" in name or "bias" in name else replace(value) for name, value in kwargs.items()
        }

    return feed


def _repeat(number: int, batch_dim: int) -> Callable[[Any], Any]:
    def repeat(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim <= batch_dim:
            return value
        return value.narrow(batch_dim, 0, 1).repeat_interleave(number, batch_dim)

    return repeat


def _row(
    layer: AttentionLayer, projection: Projection, seen: tuple[list[tuple[Tensor, Tensor]], int] | None
) -> ProbeRow:
    heads = projection.view(_weight(layer, projection).detach())
    heads = heads.reshape(-1, *heads.shape[-2:]).float()
    error = [math.inf] * heads.shape[0]
    if seen is not None:
        pairs, number = seen
        wanted = torch.einsum("hdi,si->shd", heads, states(number, heads.shape[-1], heads))
        for found in _responses(pairs, projection.role, number, heads.shape[0], heads.shape[1]):
            difference = _compare(found, wanted, exact=projection.role == "v")
            error = min(error, difference, key=max)
    label = f"{projection.role}.{projection.part}" if projection.part else projection.role
    return ProbeRow(layer.name, layer.parameter_name(projection), label, heads.shape[0], tuple(error))


def _responses(pairs: list[tuple[Tensor, Tensor]], role: str, number: int, heads: int, rows: int) -> Iterator[Tensor]:
    """Candidates (number, heads, rows) for the response of ``role`` at the first token, bias subtracted.

    q is a left operand and k a right operand, both contracted over the head's rows; v is a right operand
    contracted over tokens.
    """
    for left, right in pairs:
        operand = {"q": left, "k": right.mT, "v": right}[role]
        if operand.shape[0] % number or operand.shape[-1] < rows:
            continue
        samples = operand[:, 0].reshape(number, -1, operand.shape[-1])
        windows = operand.shape[0] // number
        if windows % heads == 0:
            repeats = windows // heads
            # Windows of one image come before its heads; K/V heads shared by a group come once per query head.
            for shaped in (
                samples.reshape(number, repeats, heads, -1)[:, 0],
                samples.reshape(number, heads, repeats, -1)[:, :, 0],
            ):
                yield (shaped - shaped[:1])[..., :rows].float()
                if shaped.shape[-1] > rows:
                    yield (shaped - shaped[:1])[..., -rows:].float()


def _compare(found: Tensor, wanted: Tensor, *, exact: bool) -> list[float]:
    """Relative difference per head; unless ``exact``, each vector up to a positive factor."""
    if not exact:
        found, wanted = (torch.nn.functional.normalize(x, dim=-1, eps=1e-20) for x in (found, wanted))
    difference = torch.linalg.vector_norm(found - wanted, dim=(0, 2))
    scale = torch.linalg.vector_norm(wanted, dim=(0, 2))
    return (difference / scale.clamp_min(1e-20)).nan_to_num(math.inf).tolist()


def _weight(layer: AttentionLayer, projection: Projection) -> Tensor:
    weight = attribute(layer.module, projection.parameter)
    if not isinstance(weight, Tensor):
        raise TypeError(f"{layer.parameter_name(projection)} must be a tensor, got {type(weight).__name__}")
    return weight


def _width(layer: AttentionLayer, projection: Projection) -> int:
    return projection.view(_weight(layer, projection)).shape[-1]


def _owner(layer: AttentionLayer, projection: Projection) -> nn.Module:
    path = projection.parameter.rpartition(".")[0]
    owner = attribute(layer.module, path) if path else layer.module
    if not isinstance(owner, nn.Module):
        raise TypeError(f"{layer.name}.{path} must be a module, got {type(owner).__name__}")
    return owner
