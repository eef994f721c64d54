"""What watching every head costs: the monitor's step beside a training step of the same model, and beside torch's cond."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..heads import find_attention
from ..initialize.apply import resolve
from ..monitor import ConditioningMonitor, Record
from .case import KAPPA, Case, Contestant, Errors, Skipped
from .shapes import SHAPES
from .tables import OURS

RTOL = 1e-2
"""The monitor's default."""

TARGETS = {None: {"training step": 25.0, "linalg.cond": 8.0}, 1: {"training step": 200.0}}
"""By ``layers_per_step``: at most 4 % of a training step for all heads, 0.5 % for one layer's."""


def monitor_cases(device: torch.device) -> list[Case]:
    """All heads at every step, and the layers in turn."""
    shape = SHAPES["gpt2"]
    heads = shape.layers * (shape.q + 2 * shape.kv)
    what = {None: f"all {heads} heads", 1: f"one layer of {shape.layers} in turn"}
    return [
        Case(
            f"monitor {shape.name}, {what[layers]}",
            f"monitor step, {what[layers]} of {shape.width}x{shape.head_dim}, float32 ({shape.name}; training step of "
            "2 x 128 tokens, AdamW)",
            lambda layers=layers: contestants(layers, device),  # type: ignore[misc]
            {KAPPA: RTOL},
            TARGETS[layers],
            group="monitor",
            source=shape.source,
            device=device.type,
        )
        for layers in what
    ]


def contestants(layers_per_step: int | None, device: torch.device) -> tuple[Contestant | Skipped, ...]:
    """The monitor on both backends, cond of the same weights, and the training step they are measured against."""
    if find_spec("transformers") is None:
        return (Skipped("monitor.step", "transformers, whose GPT-2 is trained here, is not installed"),)
    model, train = training(device)
    weights = torch.cat([target.heads.flatten(0, -3) for target in resolve(find_attention(model))]).contiguous()

    def step(monitor: ConditioningMonitor) -> Callable[[], ConditioningMonitor]:
        def run() -> ConditioningMonitor:
            monitor.step()
            return monitor

        return run

    def watch(**options: Any) -> ConditioningMonitor:
        return ConditioningMonitor(model, rtol=RTOL, layers_per_step=layers_per_step, spectra=0, **options)

    found = [
        Contestant("monitor.step", step(watch()), errors(model)),
        Contestant(f"{OURS}, torch backend", step(watch(backend="torch")), errors(model)),
    ]
    if layers_per_step is None:
        exact = torch.linalg.cond(weights.double().cpu())
        found.append(
            Contestant(
                "linalg.cond",
                lambda: torch.linalg.cond(weights),
                lambda got: {KAPPA: float((got.double().cpu() / exact - 1).abs().max())},
            )
        )
    return (*found, Contestant("training step", train, lambda _: {}))


def errors(model: nn.Module) -> Callable[[ConditioningMonitor], Errors]:
    """Of the monitor's newest records, against float64."""

    def off(record: Record, kappa: dict[tuple[str, str], Tensor]) -> float:
        true = float(kappa[record.layer, record.projection][record.head])
        held = record.low <= true * (1 + 1e-12) and true * (1 - 1e-12) <= record.high
        return abs(record.kappa / true - 1) if held else float("inf")

    def of(monitor: ConditioningMonitor) -> Errors:
        kappa = {
            (target.layer.name, target.projection.label): torch.linalg.cond(target.heads.double().cpu())
            for target in resolve(find_attention(model))
        }
        newest = [record for record in monitor.flush() if record.step == monitor.current_step]
        return {KAPPA: max(off(record, kappa) for record in newest)}

    return of


def training(device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
    """GPT-2 small from its configuration, and one step of its training that leaves the weights as they are."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config()).to(device)
    # A rate of zero keeps the weights, so that every contestant measures the same; the work is the same.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    tokens = torch.arange(256, device=device).view(2, 128)

    def train() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, train
