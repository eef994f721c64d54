"""The training loop, the same for every task, model and scheme."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from conditioned_kernels.demo import measure_model

from .cell import Cell
from .models import MODELS, Model
from .schemes import initialize
from .tasks import IGNORED, TASKS, Data
from .trace import trace

WARMUP = 0.1
WEIGHT_DECAY = 0.05
CLIP = 1.0
EVALUATION_BATCH = 256
CALIBRATION_BATCH = 4


def run_cell(cell: Cell, device: str) -> dict[str, Any]:
    """Train one cell.

    Returns
    -------
    The cell's fields and: ``config`` (hash), ``final`` (last validation metric, None if training diverged), ``curve``
    (rows of step, accuracy, loss on the validation set), ``train`` (rows of step, mean training loss since the row
    before), ``kappa`` (of W_Q, W_K and W_V, at start and end: median and maximum over heads), ``jacobian`` (rows, if
    ``cell.trace``), ``diverged``, ``seconds``,
    ``processor_seconds``, ``torch`` (its version).
    """
    task, model_kind = TASKS[cell.task], MODELS[cell.model]
    start, processor = time.perf_counter(), time.process_time()
    data = task.data(cell.seed)
    model = model_kind.build(cell.seed)
    initialize(cell.scheme, model, cell.seed, data.sample(_generator(30_000 + cell.seed), CALIBRATION_BATCH)[0])
    model.to(device)
    kappa = {"start": weight_kappas(model)}
    optimizer, schedule = _optimizer(model, cell)
    batches = _generator(20_000 + cell.seed)
    column = 1 if task.metric == "accuracy" else 2
    curve: list[tuple[int, float, float]] = []
    losses: list[tuple[int, float]] = []
    jacobian: list[dict[str, Any]] = []
    recent: list[float] = []
    diverged = False
    if cell.trace:
        jacobian.append(trace(model_kind, model, data, device, 0))
    for step in range(1, cell.steps + 1):
        inputs, targets = data.sample(batches, cell.batch)
        model.train()
        loss = _loss(model_kind, model, inputs.to(device), targets.to(device))
        recent.append(loss.item())
        diverged = not math.isfinite(recent[-1])
        if diverged:
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        if step % cell.every == 0 or step == cell.steps:
            curve.append((step, *evaluate(model_kind, model, data, device)))
            losses.append((step, sum(recent) / len(recent)))
            recent.clear()
            if cell.trace:
                jacobian.append(trace(model_kind, model, data, device, step))
    diverged = diverged or not all(math.isfinite(value) for value in curve[-1][1:])
    if not diverged:
        kappa["end"] = weight_kappas(model)
    return cell.record() | {
        "config": cell.config(device),
        "final": None if diverged else curve[-1][column],
        "curve": curve,
        "train": losses,
        "kappa": kappa,
        "jacobian": jacobian,
        "diverged": diverged,
        "seconds": round(time.perf_counter() - start, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
        "torch": torch.__version__,
    }


@torch.no_grad()
def evaluate(kind: Model, model: nn.Module, data: Data, device: str) -> tuple[float, float]:
    """(accuracy, cross-entropy in nats) over all targets of the validation set."""
    model.eval()
    right, loss, number = 0, 0.0, 0
    batches = zip(data.inputs.split(EVALUATION_BATCH), data.targets.split(EVALUATION_BATCH), strict=True)
    for inputs, targets in batches:
        wanted = targets != IGNORED
        logits = kind.logits(model, inputs.to(device), wanted.to(device)).float().cpu()
        answers = targets[wanted]
        right += int((logits.argmax(-1) == answers).sum())
        loss += float(nn.functional.cross_entropy(logits, answers, reduction="sum"))
        number += len(answers)
    return right / number, loss / number


def weight_kappas(model: nn.Module) -> dict[str, dict[str, float]]:
    """Per role: median and largest kappa, and median sigma_max, over all heads of the model."""
    measured: dict[str, list[Tensor]] = {}
    for entry in measure_model(model):
        pair = torch.stack([entry.estimate.kappa, entry.estimate.sigma_max]).double().cpu()
        measured.setdefault(entry.role, []).append(pair)
    out = {}
    for role, pairs in measured.items():
        kappa, sigma = torch.cat(pairs, -1)
        out[role] = {"median": float(kappa.median()), "max": float(kappa.max()), "sigma_max": float(sigma.median())}
    return out


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _loss(kind: Model, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    wanted = targets != IGNORED
    return nn.functional.cross_entropy(kind.logits(model, inputs, wanted), targets[wanted])


def _optimizer(model: nn.Module, cell: Cell) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW (no weight decay on vectors) with a linear warm-up and a cosine decay to zero."""
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.ndim >= 2].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": WEIGHT_DECAY},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=cell.rate,
        fused=True,
    )
    warmup = max(1, round(WARMUP * cell.steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (cell.steps - warmup)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
