"""What a table of frequencies reaches on each task: a model below it has not learned to use attention.

Each baseline is one table, counted on training data: how often each class is the answer where a feature of the input
has each value. The answer is the most frequent class, or for a loss the frequencies with SMOOTHING added to each count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .tasks import IGNORED, TASKS, Task

EXAMPLES = 10_000
SMOOTHING = 0.1
FILE = "baselines.json"


def _nothing(inputs: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros_like(targets)


def _token(inputs: Tensor, targets: Tensor) -> Tensor:
    return inputs


def _outermost(inputs: Tensor, targets: Tensor) -> Tensor:
    return inputs[:, 1]


def _values_present(inputs: Tensor, targets: Tensor) -> Tensor:
    """How often each value is there, as one number; the same for every question of a sequence."""
    keys = TASKS["retrieval"].options["keys"]
    values = torch.where(inputs < keys * keys, inputs % keys, keys)
    counts = torch.nn.functional.one_hot(values, keys + 1)[..., :keys].sum(1)
    code = (counts * (keys + 1) ** torch.arange(keys)).sum(-1)
    return code[:, None].expand_as(targets)


Feature = Callable[[Tensor, Tensor], Tensor]
FEATURES: Mapping[str, Mapping[str, Feature]] = {
    "language": {"the byte before": _token},
    "listops": {"the outermost operation": _outermost},
    "retrieval": {"the values present, whichever is asked for": _values_present},
}
"""Beside the feature that every task has: none."""


def table(task: Task, feature: Feature) -> float:
    """The metric that a table over ``feature`` reaches on the validation set of seed 0."""
    data = task.data(0)
    training = data.sample(torch.Generator().manual_seed(40_000), EXAMPLES)
    (seen, answers), (asked, wanted) = (
        (feature(inputs, targets)[targets != IGNORED], targets[targets != IGNORED])
        for inputs, targets in (training, (data.inputs, data.targets))
    )
    counts = torch.full((int(max(seen.max(), asked.max())) + 1, task.classes), SMOOTHING, dtype=torch.float64)
    counts.index_put_((seen, answers), torch.ones(len(seen), dtype=torch.float64), accumulate=True)
    rows = counts[asked]
    if task.higher_is_better:
        return float((rows.argmax(-1) == wanted).double().mean())
    chosen = rows.gather(1, wanted[:, None]).squeeze(1) / rows.sum(-1)
    return float(-chosen.log().mean())


def write(folder: Path) -> str:
    """Measure every task's baselines into ``folder``; returns what was written."""
    found = {}
    for name, task in TASKS.items():
        features = {"the answers alone": _nothing, **FEATURES.get(name, {})}
        found[name] = {words: table(task, feature) for words, feature in features.items()}
    (folder / FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return f"{folder / FILE}: {len(found)} tasks"


def read(folder: Path) -> dict[str, dict[str, float]]:
    """By task and what is looked at, the metric; empty if never measured."""
    file = folder / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
