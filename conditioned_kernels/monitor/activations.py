"""One look at the real batch: forward pre-hooks that live until their layer's first call, and no longer.

A hook copies a few tokens and the heads' weights, out of sight of autograd, autocast and every dispatch mode, so that
outputs, gradients, random state and what activation checkpointing replays are bit for bit those of a run without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from .._status import Status
from ..heads.discover import AttentionLayer
from ..heads.wrappers import full_name
from .records import JACOBIAN, Record


@dataclass(frozen=True)
class Sampling:
    """What a hook keeps of a batch.

    Attributes
    ----------
    samples, tokens : at most this many sequences, and tokens of each.
    heads : indices of the heads; None for all.
    method : of ``jacobian_condition``.
    """

    samples: int
    tokens: int
    heads: tuple[int, ...] | None
    method: str

    def within(self, queries: int) -> Sampling:
        """The same for a layer with this many query heads."""
        return self if self.heads is None else replace(self, heads=tuple(head for head in self.heads if head < queries))


ESTIMATES = ("kappa", "low", "high", "effective", "sigma_max", "sigma_min")
FACTORS = ("kappa_x", "kappa_p", "kappa_lambda", "kappa_q", "kappa_k", "kappa_v")


@contextmanager
def uncast() -> Iterator[None]:
    """No autocast on any device that has it on."""
    with ExitStack() as stack:
        for device in ("cpu", torch.accelerator.current_accelerator(check_available=True)):
            if device is not None:
                stack.enter_context(torch.autocast(torch.device(device).type, enabled=False))
        yield


def inert(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """What a copied or pickled hook becomes."""


def _inert() -> Any:
    return inert


@dataclass(eq=False)
class Capture:
    """The hook of one layer for one step.

    Attributes
    ----------
    layer : the attention layer.
    training : the layer's mode when the hook was set; calls in the other mode (an evaluation in between) pass by.
    captured : what ``attention_heads`` made of the first call; None before it, or where ``reason`` says why not.
    """

    layer: AttentionLayer
    sampling: Sampling
    training: bool = field(init=False)
    captured: Any = None
    reason: str = ""
    handle: RemovableHandle = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.training = self.layer.module.training
        self.handle = self.layer.module.register_forward_pre_hook(self, with_kwargs=True)

    @property
    def fired(self) -> bool:
        return self.captured is not None or bool(self.reason)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # A traced hook would become part of the compiled model; the self-check reports that it did not fire.
        if torch.compiler.is_compiling() or self.fired or module.training != self.training:
            return
        self.handle.remove()
        from ..heads.mechanics import attention_heads

        try:
            # Selective checkpointing counts the operations it sees, so it must not see these.
            with _disable_current_modes(), torch.no_grad(), uncast():
                self.captured = attention_heads(
                    self.layer,
                    args,
                    kwargs,
                    samples=self.sampling.samples,
                    tokens=self.sampling.tokens,
                    heads=self.sampling.heads,
                )
        except Exception as error:  # training goes on whatever a batch or a class has in store
            self.reason = f"no attention Jacobian: {error}"

    def __deepcopy__(self, memo: dict) -> Any:
        return inert

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert, ()

    def records(self, step: int) -> list[Record]:
        """One row per sample and head with figures of their attention Jacobian, or one that says why there is none."""
        from ..jacobian import jacobian_bound, jacobian_condition

        if self.captured is None:
            return [Record(step, self.layer.name, JACOBIAN, -1, status=self.reason)]
        heads, self.captured = self.captured, None
        try:
            with torch.no_grad():
                estimate = jacobian_condition(heads, method=self.sampling.method)
                factors = jacobian_bound(heads)
        except Exception as error:
            return [Record(step, self.layer.name, JACOBIAN, -1, status=f"no attention Jacobian: {error}")]
        shape = estimate.kappa.shape
        numbers = self.sampling.heads or range(shape[-1])
        columns = {name: getattr(estimate, name) for name in ESTIMATES}
        columns |= {name: getattr(factors, name) for name in ("bound", *FACTORS)}
        values = {name: column.expand(shape).reshape(-1, shape[-1]).tolist() for name, column in columns.items()}
        status = estimate.status.reshape(-1, shape[-1]).tolist()
        return [
            Record(
                step,
                self.layer.name,
                JACOBIAN,
                head,
                sample,
                status=Status(status[sample][i]).name.lower(),
                theorem=factors.theorem,
                **{name: value[sample][i] for name, value in values.items()},
            )
            for sample in range(len(status))
            for i, head in enumerate(numbers)
        ]


def compiled_around(model: nn.Module, layers: Sequence[AttentionLayer]) -> str:
    """Name of the first compiled module that holds one of ``layers``; "" if there is none."""
    watched = {layer.module for layer in layers}
    for name, module in model.named_modules():
        compiled = full_name(type(module)) == "torch._dynamo.eval_frame.OptimizedModule" or module._compiled_call_impl
        if compiled and any(each in watched for each in module.modules()):
            return name or type(module).__name__
    return ""
