"""One training run as data: everything its numbers depend on, and a hash of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from .models import MODELS
from .schemes import SCHEMES
from .tasks import TASKS

VERSION = 1
"""Raised when the training loop changes so that older results must not be mixed with new ones."""


@dataclass(frozen=True)
class Cell:
    """One training run.

    Attributes
    ----------
    task, model, scheme : names in TASKS, MODELS and SCHEMES.
    rate : peak learning rate.
    seed : of the model's own initialization, of the scheme, of the split and of the order of the data.
    steps, batch : number of AdamW steps, and examples in each.
    every : steps between validations.
    trace : whether the attention Jacobian is measured at every validation.
    """

    task: str
    model: str
    scheme: str
    rate: float
    seed: int
    steps: int
    batch: int
    every: int
    trace: bool = False

    def config(self, device: str) -> str:
        """Hash of everything the numbers depend on; a changed definition of a task, model or scheme changes it."""
        scheme, task, model = SCHEMES[self.scheme], TASKS[self.task], MODELS[self.model]
        meaning = {
            "version": VERSION,
            "device": device,
            "cell": asdict(self),
            "scheme": (scheme.call, dict(scheme.options)),
            "task": (task.make.__name__, task.metric, dict(task.options)),
            "model": (model.make.__name__, dict(model.options)),
        }
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:16]

    def record(self) -> dict[str, Any]:
        """The cell as the beginning of its JSON line."""
        return asdict(self)
