"""Gains that minimize the exact condition number of the attention Jacobian on a batch of real data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import _validate
from ..heads.discover import AttentionLayer, Where
from ..heads.layout import LayoutFunction
from ..heads.mechanics import attention_heads, own_labels
from .gain_search import best_gains, geometric_mean
from .init_report import InitReport
from .measure import measure
from .scope import Scope, locate, weights_of
from .target import Target, resolve
from .writing import undone_on_error, untie, writable, writing


@dataclass(frozen=True, eq=False)
class LayerCalibration:
    """What was chosen for one layer.

    Attributes
    ----------
    layer : its name in the user's model.
    gains : factor by role, e.g. {"q": 1.9, "k": 2.1}.
    before, after : exact kappa(J), (samples, heads), on the calibration tokens.
    evaluations : how many candidate gains were tried.
    """

    layer: str
    gains: dict[str, float]
    before: Tensor
    after: Tensor
    evaluations: int


@dataclass(frozen=True)
class CalibrationReport:
    """What :func:`calibrate_gain` did.

    Attributes
    ----------
    layers : in the order of the forward.
    skipped : (name, reason) of layers left alone: left out by ``where``, of an unknown class, not called, or
        tied to a calibrated one.
    """

    layers: tuple[LayerCalibration, ...]
    skipped: tuple[tuple[str, str], ...]

    def rows(self) -> list[dict[str, Any]]:
        """One dict per layer: its gains, and the geometric means of kappa(J) before and after."""
        return [
            {"layer": entry.layer}
            | {f"gain_{role}": gain for role, gain in entry.gains.items()}
            | {"kappa_before": geometric_mean(entry.before), "kappa_after": geometric_mean(entry.after)}
            for entry in self.layers
        ]

    def __str__(self) -> str:
        lines = [f"calibrated gains of {len(self.layers)} attention layers"]
        for row, entry in zip(self.rows(), self.layers, strict=True):
            gains = ", ".join(f"{role} {gain:.4g}" for role, gain in entry.gains.items())
            lines.append(
                f"  {entry.layer}: {gains}; kappa(J) {row['kappa_before']:.5g} -> {row['kappa_after']:.5g} "
                f"(geometric mean of {entry.before.numel()})"
            )
        lines += [f"  skipped {name}: {reason}" for name, reason in self.skipped]
        return "\n".join(lines)


def calibrate_gain(
    model: nn.Module,
    batch: Any,
    *,
    roles: str = "qk",
    samples: int = 1,
    tokens: int = 16,
    heads: int | Sequence[int] | None = None,
    rtol: float = 1e-2,
    where: Where | None = None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None = None,
    strict: bool = False,
    include_frozen: bool = False,
    overwrite: bool = False,
) -> CalibrationReport:
    """Multiply W_Q and W_K (and W_V) of every layer by the gains that minimize its exact kappa(J) on ``batch``.

    One forward of ``model`` in evaluation mode. Each attention layer is calibrated when the forward reaches it, so a
    later layer sees its input as the calibrated earlier layers make it. If anything fails, the model is bit-identical
    to what it was.

    Parameters
    ----------
    model : weights as they are to be scaled, for instance just made by :func:`conditioned_`.
    batch : what the model's forward takes: a tensor, a tuple of arguments, or a dict of keyword arguments.
    roles : which gains may move: "qk", "qkv", or any of the three letters.
    samples, tokens, heads : the part of the batch and the heads that kappa(J) is measured on, as in
        :func:`conditioned_kernels.heads.attention_heads`.
    rtol : relative accuracy of the gains.
    where, layouts, strict, include_frozen, overwrite : as in :func:`conditioned_`; weights loaded from a checkpoint are
        refused unless ``overwrite``.

    Returns
    -------
    CalibrationReport: gains, and kappa(J) of every head before and after.

    Raises
    ------
    NoJacobian
        for a layer whose attention the closed form does not cover; leave it out with ``where``.
    Other errors as :func:`conditioned_`, and whatever the model's forward raises.

    Notes
    -----
    *Objective.* The mean over samples and heads of log kappa(J), with 1e16 for infinity; one gain per projection, since
    heads share a stored weight.
    *Search.* W_Q and W_K act on the probabilities through the product of their gains alone, but J weighs them
    separately: dA/dW_Q grows with W_K and dA/dW_K with W_Q. The objective has several minima, so a logarithmic grid
    comes first: common factors from 1/8 to 16 in steps of sqrt(2), each with W_Q and W_K moved apart by up to a factor
    8; then W_V by up to a factor 8. From the best point, golden section along each of these directions, twice. The
    result is the best value that was tried, and never worse than the start.
    *Cost.* one forward, and about 120 exact kappa(J) (140 with W_V) per layer, of samples * heads problems with
    tokens * head_dim rows.
    """
    if not roles or set(roles) - set("qkv") or len(set(roles)) < len(roles):
        raise ValueError(f"roles must be letters of 'qkv', each once, got {roles!r}")
    rtol = _validate.positive(rtol, "rtol")
    args, kwargs = _arguments(batch)
    with weights_of(model):
        found, targets = writable(model, Scope(where, layouts, strict, include_frozen, overwrite))
        if sharded := [target.name for target in targets if target.piece is not None]:
            raise ValueError(
                f"{sharded[0]} is sharded, and kappa(J) needs whole heads; calibrate before sharding, and pass the "
                "gains found there as numbers"
            )
        targets, tied = untie(model, found, targets)
        by_layer: dict[str, list[Target]] = {}
        for target in targets:
            if target.projection.role in tuple(roles) and _own(target):
                by_layer.setdefault(target.layer.name, []).append(target)
        done: dict[str, LayerCalibration] = {}
        with writing("calibrated") as write, _evaluating(model), ExitStack() as stack:

            def calibrate(layer: AttentionLayer, args: tuple, kwargs: dict[str, Any]) -> None:
                if layer.name in done:
                    return
                problem = attention_heads(layer, args, kwargs, samples=samples, tokens=tokens, heads=heads)
                gains, before, after, evaluations = best_gains(problem, roles, rtol)
                for target in by_layer[layer.name]:
                    scaled = target.heads.double() * gains[target.projection.role]
                    write(target, [(range(target.count), scaled.to(target.dtype))])
                done[layer.name] = LayerCalibration(layer.name, gains, before, after, evaluations)

            for layer in found.layers:
                if layer.name in by_layer:
                    stack.enter_context(_before(layer, calibrate))
            model(*args, **kwargs)
            if not done:
                raise RuntimeError(
                    "the model's forward on this batch called no attention layer, so nothing was calibrated"
                )
    missed = [(name, "not called by the forward") for name in by_layer if name not in done]
    return CalibrationReport(tuple(done.values()), (*found.skipped, *found.unknown, *tied, *missed))


def _own(target: Target) -> bool:
    """Whether the layer's Jacobian is with respect to these rows; a shared rotary key or a latent is held fixed."""
    return target.projection.label in own_labels(target.layer.family)


def _arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise TypeError(
        f"batch must be what the model's forward takes, as a tensor, a tuple or a dict, got {type(batch).__name__}"
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and torch's random state put back afterwards."""
    training = [module for module in model.modules() if module.training]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    try:
        model.eval()
        with torch.random.fork_rng(list(devices)), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _before(layer: AttentionLayer, call: Callable[[AttentionLayer, tuple, dict[str, Any]], None]) -> Iterator[None]:
    hook = layer.module.register_forward_pre_hook(lambda _, args, kwargs: call(layer, args, kwargs), with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def conditioned_then_calibrated(
    model: nn.Module, scope: Scope, condition: Callable[[], InitReport], calibrate: Callable[[], CalibrationReport]
) -> InitReport:
    """Both as one step: if either fails, the model is as it was. The report is measured after both."""
    with weights_of(model):
        targets = {target.key: target for target in resolve(locate(model, scope))}
        with undone_on_error() as guard:
            for target in targets.values():
                guard(target)
            made = condition()
            calibration = calibrate()
        gains = {entry.layer: entry.gains for entry in calibration.layers}
        touched = []
        for entry in made.touched:
            target = targets[entry.parameter, entry.label]
            factor = gains.get(entry.layer, {}).get(entry.role, 1.0) if _own(target) else 1.0
            touched.append(measure(target, target.heads, made=entry.made, gain=entry.gain * factor))
    return replace(made, touched=tuple(touched), calibration=calibration)
