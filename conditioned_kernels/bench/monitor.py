"""What watching a training run costs per step: ConditioningMonitor beside linalg on the same weights, and the step."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..condition import condition_number
from ..monitor import ConditioningMonitor, Record
from .case import KAPPA, Case, Contestant, Errors, Skipped, Work
from .peers import missing
from .shapes import SHAPES
from .stack import layout, stack, views
from .tables import OURS, TORCH_BACKEND

LOSS = "loss - loss"
"""Zero for a finite loss, NaN for any other: a training step is no measurement and has no error."""
STEP = "a training step of GPT-2 small, 2x128 tokens"
RTOL = 1e-2


def monitor_contestants(layers_per_step: int | None, device: torch.device) -> tuple[Contestant | Skipped, ...]:
    """One step of the monitor, warm, against the singular values of what it looks at."""
    shape = SHAPES["gpt2"]
    model = stack(shape, shape.layers, device)
    weights = torch.cat([view for layer in model for view in views(layer).values()])
    exact = torch.linalg.cond(weights.cpu().double()).to(device)
    looked_at = weights if layers_per_step is None else weights[: layers_per_step * (shape.q + 2 * shape.kv)]
    layouts = {type(layer): layout for layer in model}
    watch = partial(ConditioningMonitor, model, layers_per_step=layers_per_step, layouts=layouts, rtol=RTOL, spectra=0)
    monitor, plain = watch(), watch(backend="torch")
    names = {name: at for at, name in enumerate(model_layers(monitor))}

    def off(record: Record) -> float:
        before = {"q": 0, "k": shape.q, "v": shape.q + shape.kv}[record.projection]
        kappa = float(exact[names[record.layer] * (shape.q + 2 * shape.kv) + before + record.head])
        return abs(record.kappa / kappa - 1) if record.low <= kappa <= record.high else math.inf

    def figures(watching: ConditioningMonitor) -> Callable[[object], Errors]:
        def error(_: object) -> Errors:
            records = [record for record in watching.flush() if record.head >= 0]
            return {KAPPA: max(map(off, records))} if records else {}

        return error

    def values(got: Tensor) -> Errors:
        return {KAPPA: float((got / exact[: len(got)] - 1).abs().max())}

    return (
        Contestant("ConditioningMonitor.step", monitor.step, figures(monitor)),
        Contestant(TORCH_BACKEND, plain.step, figures(plain)),
        Contestant(
            f"{OURS}, condition_number without the last step's vectors",
            lambda: condition_number(looked_at, rtol=RTOL).kappa,
            values,
        ),
        Contestant("linalg.cond", lambda: torch.linalg.cond(looked_at), values),
        training_step(device),
    )


def model_layers(monitor: ConditioningMonitor) -> Sequence[str]:
    """Names of the layers a monitor watches, in the model's order."""
    return list(dict.fromkeys(record.layer for record in monitor.flush() if record.head >= 0))


def training_step(device: torch.device) -> Contestant | Skipped:
    """Forward, backward and AdamW on 2 x 128 random tokens, of the model transformers has under that name."""
    if why := missing("transformers"):
        return Skipped(STEP, why)
    from transformers import GPT2Config, GPT2LMHeadModel

    gc.collect()
    model: Any = GPT2LMHeadModel(GPT2Config())
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 50257, (2, 128), device=device)

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    def finite(loss: Tensor) -> Errors:
        return {LOSS: float(loss - loss)}

    return Contestant(STEP, step, finite, {LOSS: 0.0}, "what is watched")


def cases(device: torch.device) -> list[Case]:
    """A step that looks at one layer, as one would leave it on, and one that looks at all."""
    shape = SHAPES["gpt2"]
    per_layer = (shape.q + 2 * shape.kv) * shape.head_dim * shape.width

    def case(name: str, what: str, layers: int | None, targets: dict[str, float]) -> Case:
        elements = per_layer * (shape.layers if layers is None else layers)
        make: Callable[[], tuple[Contestant | Skipped, ...]] = partial(monitor_contestants, layers, device)
        return Case(
            name,
            f"a step of the monitor on GPT-2 small, {what}, heads of {shape.width}x{shape.head_dim}, float32",
            make,
            {KAPPA: RTOL},
            targets if device.type == "cpu" else {},
            work=Work(4 * elements, 2 * elements * shape.head_dim, torch.float32),
            source=shape.source,
        )

    return [
        case("monitor layer", "one layer of 12 per step", 1, {"linalg.cond": 8, STEP: 200}),
        case("monitor all", "all 432 heads", None, {"linalg.cond": 8, STEP: 25}),
    ]
