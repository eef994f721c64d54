"""The forward probe: proof that a layout reads the heads where the model itself uses them.

A wrong layout can have perfect condition numbers, so only the model's own forward can tell. The probe feeds
known states to every attention layer, records the operands of the batched matrix products inside it, which are
what the layer uses as q, k and v after its own reshapes, and compares each head with ``view(weight) @ state``.

Which operand is q, k or v follows from the products alone: in softmax(Q K^T) V, Q is a left operand and K a
right one, both contracted over a head's rows, and V is contracted over tokens. All products are searched, since
landmarks, chunks and relative positions add some; a layout is never asked where to look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .discover import AttentionLayer, Discovery, Where, find_attention
from .layout import LATENT, POSITION, LayoutFunction, Projection

STATES = 19
"""Samples: the zero state, then random ones. A prime, so that few other axes of a model are multiples of it."""

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

    v is compared exactly (or up to a positive factor per row, which a batch norm gives it), q and k up to a positive
    factor per vector and per row (softmax scale, QK norm and its gains), with the biases of the layers taken as zero
    while it runs. Rotary embeddings are the identity at the
    first position, which is the one compared. Channel attention, which norms q and k over tokens, is compared per
    channel. The model's weights, mode and random state are left as they were.

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
    return probe_layers(model, find_attention(model, where=where, layouts=layouts), args, kwargs, batch_dim=batch_dim)


def probe_layers(
    model: nn.Module, found: Discovery, args: tuple, kwargs: Mapping[str, Any], *, batch_dim: int = 0
) -> ProbeReport:
    """:func:`probe` of the layers in ``found``, with their projections as given there."""
    rows: dict[str, list[ProbeRow]] = {}
    inputs, named = tree_map(_repeat(batch_dim), (args, dict(kwargs)))
    with _plain_attention(model), ExitStack() as stack:
        for layer in found.layers:
            stack.enter_context(_instrumented(layer, rows))
        model(*inputs, **named)
    for layer in found.layers:
        if layer.name not in rows:
            rows[layer.name] = [_row(layer, projection, _Seen()) for projection in layer.projections]
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
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            torch.random.fork_rng(list(devices)),
            # A compiled model runs as written, so that its products can be seen.
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module in training:
            module.training = True


@dataclass
class _Seen:
    """What one run of a layer used: operands of its batched products, and inputs of the modules that own weights."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)


@contextmanager
def _instrumented(layer: AttentionLayer, rows: dict[str, list[ProbeRow]]) -> Iterator[None]:
    """Feed states to the layer and to the modules that own its weights, and record its matrix products."""
    module, seen = layer.module, _Seen()
    forward = module.forward
    owners: dict[nn.Module, tuple[bool, set[int]]] = {}
    for projection in layer.projections:
        is_convolution = layer.weight(projection).ndim > 2
        owners.setdefault(layer.owner(projection), (is_convolution, set()))[1].add(_width(layer, projection))

    def record(owner: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.inputs += [value for value in args if isinstance(value, Tensor)]

    hooks = []
    for owner, (is_convolution, widths) in owners.items():
        if owner is not module:
            hooks.append(owner.register_forward_pre_hook(record, with_kwargs=True))
            hooks.append(owner.register_forward_pre_hook(_feeder(is_convolution, widths), with_kwargs=True))
    feed_module = _feeder(
        any(is_convolution for is_convolution, _ in owners.values()),
        {width for _, widths in owners.values() for width in widths},
    )

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if layer.name in rows:  # A shared module runs several times; the first run is the proof.
            return forward(*args, **kwargs)
        args, kwargs = feed_module(module, args, kwargs)
        with _Products(seen.pairs):
            result = forward(*args, **kwargs)
        rows[layer.name] = [_row(layer, projection, seen) for projection in layer.projections]
        return result

    # A norm after a bias mixes the two, so that no subtraction could take the bias out again.
    biases = [
        (parameter, parameter.data)
        for name, parameter in module.named_parameters()
        if parameter.ndim == 1 and "bias" in name.rpartition(".")[2]
    ]
    module.forward = recorded
    try:
        for parameter, data in biases:
            parameter.data = torch.zeros_like(data)
        yield
    finally:
        del module.forward
        for parameter, data in biases:
            parameter.data = data
        for hook in hooks:
            hook.remove()


class _Products(TorchDispatchMode):
    """Records the two operands of every batched matrix product."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.pairs = pairs

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            self.pairs.append((args[0], args[1]))
        elif func is torch.ops.aten.baddbmm.default:
            self.pairs.append((args[1], args[2]))
        return func(*args, **(kwargs or {}))


def states(width: int, like: Tensor) -> Tensor:
    """(STATES, width): the zero vector, then fixed Gaussian vectors."""
    table = torch.zeros(STATES, width, dtype=like.dtype, device=like.device)
    table[1:] = torch.randn(STATES - 1, width, generator=torch.Generator().manual_seed(0)).to(table)
    return table


def _feeder(is_convolution: bool, widths: set[int]) -> Callable[[nn.Module, tuple, dict], tuple[tuple, dict]]:
    """A pre-hook that replaces hidden states: token t of sample s gets state (s + t) mod STATES.

    An input without a batch axis, such as relative positions shared by all samples, is fed as one sample.
    """

    def replace(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
            return value
        order = (1 - value.ndim, -1) if is_convolution and value.ndim > 2 else (-1, 1 - value.ndim)
        channel = next(
            (axis for axis in order if value.shape[axis] in widths and (axis == -1 or value.ndim == 4)), None
        )
        if channel is None:
            return value
        axes = [axis for axis in range(value.ndim) if axis != channel % value.ndim]
        batch = next((axis for axis in axes if value.shape[axis] and value.shape[axis] % STATES == 0), None)
        moved = value.movedim(channel, -1) if batch is None else value.movedim((batch, channel), (0, -1))
        lead = (1, *moved.shape[:-1]) if batch is None else moved.shape[:-1]
        sample = torch.arange(lead[0], device=value.device) // max(lead[0] // STATES, 1)
        token = torch.arange(math.prod(lead[1:]), device=value.device)
        fed = states(moved.shape[-1], value)[(sample[:, None] + token) % STATES].reshape(moved.shape)
        return fed.movedim(-1, channel) if batch is None else fed.movedim((0, -1), (batch, channel))

    def feed(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return tuple(replace(value) for value in args), {
            name: value if "mask" in name or "bias" in name else replace(value) for name, value in kwargs.items()
        }

    return feed


def _repeat(batch_dim: int) -> Callable[[Any], Any]:
    def repeat(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim <= batch_dim:
            return value
        return value.narrow(batch_dim, 0, 1).repeat_interleave(STATES, batch_dim)

    return repeat


def _row(layer: AttentionLayer, projection: Projection, seen: _Seen) -> ProbeRow:
    heads = projection.view(layer.weight(projection).detach())
    heads = heads.reshape(-1, *heads.shape[-2:]).float()
    wanted = torch.einsum("hri,si->shr", heads, states(heads.shape[-1], heads))
    row = layer.row
    channel = row is not None and row.channel
    permuted = row is not None and bool(row.permuted) and projection.part == row.permuted
    readings = [
        reading
        for operand in _operands(seen, projection, channel)
        for reading in _per_head(operand, heads.shape[0], heads.shape[1])
    ]
    error = [math.inf] * heads.shape[0]
    for compare in _comparisons(projection, channel):
        for reading in readings:
            error = min(error, compare(*(x.sort(-1).values if permuted else x for x in (reading, wanted))), key=max)
            if max(error) <= TOLERANCE:
                break
        else:
            continue
        break
    return ProbeRow(layer.name, layer.parameter_name(projection), projection.label, heads.shape[0], tuple(error))


def _operands(seen: _Seen, projection: Projection, channel: bool) -> Iterator[Tensor]:
    """Every operand (batch, tokens, rows) that ``projection`` may be by its role."""
    role, part = projection.role, projection.part
    if part == LATENT:
        # The output of a low-rank factor is no operand of attention, but the input of the next factor.
        yield from (value.flatten(1, -2) for value in seen.inputs if value.ndim > 2)
        return
    for left, right in seen.pairs:
        if channel:
            yield {"q": left.mT, "k": right, "v": right.mT}[role]
        elif role == "v":
            # P V, or its transpose V^T P^T.
            yield right
            yield left.mT
        else:
            yield left if role == "q" else right.mT
            if part == POSITION:
                # Scores of relative positions are also made as K Q^T and transposed later.
                yield right.mT if role == "q" else left


def _per_head(operand: Tensor, heads: int, rows: int) -> Iterator[Tensor]:
    """Readings (samples, heads, tokens, rows) of an operand whose batch axis has samples, heads and repeats."""
    batch, tokens, width = operand.shape
    if batch % (STATES * heads) or width < rows:
        return
    repeats = batch // (STATES * heads)
    # Windows of one image come before its heads; chunks, and K/V heads shared by a group, after.
    readings = [operand.reshape(STATES, repeats, heads, tokens, width)[:, 0]]
    if repeats > 1:
        readings.append(operand.reshape(STATES, heads, repeats, tokens, width)[:, :, 0])
    for reading in readings:
        yield reading[..., :rows].float()
        if width > rows:
            yield reading[..., -rows:].float()


Comparison = Callable[[Tensor, Tensor], list[float]]
"""(reading (samples, heads, tokens, rows), wanted (states, heads, rows)) to the relative difference per head."""

Form = Callable[[Tensor], Tensor]
"""Brings (states, heads, tokens, rows) to a normal form, so that allowed differences vanish."""


def _comparisons(projection: Projection, channel: bool) -> tuple[Comparison, ...]:
    """What a reading may be, the likeliest first."""
    if projection.role == "v":
        exact = tuple(partial(place, _same, _same) for place in (_first_token, _along_tokens, _any_token))
        return *exact, partial(_first_token, _rows, _rows), partial(_first_token, _vectors, _vectors)
    if channel:
        return (_per_channel,)
    return (
        partial(_first_token, _vectors, _vectors),
        partial(_first_token, _equilibrated, _equilibrated),
        partial(_first_token, _equilibrated, _centered),
        partial(_along_tokens, _vectors, _vectors),
    )


def _same(x: Tensor) -> Tensor:
    return x


def _vectors(x: Tensor) -> Tensor:
    """Each vector up to a positive factor: a softmax scale, an RMS norm without gains."""
    return _unit(x, -1)


def _rows(x: Tensor) -> Tensor:
    """Each row of the weight up to a positive factor: a batch norm in evaluation mode."""
    return _unit(x, 0)


def _equilibrated(x: Tensor) -> Tensor:
    """Each vector and each row up to positive factors: an RMS norm with gains. Unique by Sinkhorn's theorem."""
    for _ in range(20):
        x = _unit(_unit(x, -1), 0)
    return x


def _centered(x: Tensor) -> Tensor:
    """What a layer norm makes of each vector, in the form of :func:`_equilibrated`."""
    return _equilibrated(x - x.mean(-1, keepdim=True))


def _unit(x: Tensor, dim: int) -> Tensor:
    return torch.nn.functional.normalize(x, dim=dim, eps=1e-20)


def _first_token(found: Form, wanted: Form, reading: Tensor, response: Tensor) -> list[float]:
    """State s is the first token of sample s."""
    return _any_token(found, wanted, reading[:, :, :1], response)


def _any_token(found: Form, wanted: Form, reading: Tensor, response: Tensor) -> list[float]:
    """State s is the same token of every sample s; which one is searched, since padding may come before it."""
    return _relative(found(reading - reading[:1]), wanted(response[:, :, None]), (0, 3))


def _along_tokens(found: Form, wanted: Form, reading: Tensor, response: Tensor) -> list[float]:
    """State s is token s of every sample, where all samples share what is fed."""
    if reading.shape[2] < STATES:
        return [math.inf] * reading.shape[1]
    return _first_token(found, wanted, reading[0, :, :STATES].transpose(0, 1)[:, :, None], response)


def _per_channel(reading: Tensor, wanted: Tensor) -> list[float]:
    """Norms over tokens: per sample and channel, the responses to its tokens' states up to a factor and the bias."""
    index = torch.arange(STATES)[:, None] + torch.arange(reading.shape[2])
    expected = wanted[index % STATES].transpose(1, 2)
    found, expected = (_unit(x - x.mean(2, keepdim=True), 2) for x in (reading, expected))
    return _relative(found[:, :, None], expected[:, :, None], (0, 3, 4))


def _relative(found: Tensor, wanted: Tensor, axes: tuple[int, ...]) -> list[float]:
    """Per head, at the best token, the norm of the difference over ``axes`` relative to that of ``wanted``."""
    difference = torch.linalg.vector_norm(found - wanted, dim=axes)
    difference = (difference / torch.linalg.vector_norm(wanted, dim=axes).clamp_min(1e-20)).nan_to_num(math.inf)
    return difference[:, difference.amax(0).argmin()].tolist()


def _width(layer: AttentionLayer, projection: Projection) -> int:
    return projection.view(layer.weight(projection)).shape[-1]
