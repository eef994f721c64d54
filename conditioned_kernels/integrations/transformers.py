"""The monitor as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..monitor import ConditioningMonitor, Sink


class ConditioningCallback(TrainerCallback):
    """Runs a :class:`~conditioned_kernels.ConditioningMonitor` along with ``Trainer.train``.

    Parameters
    ----------
    sinks : written to by the main process alone.
    options : keyword arguments of the monitor.

    Attributes
    ----------
    monitor : of the current or last training run; None before the first.
    """

    def __init__(self, *, sinks: Sequence[Sink] = (), **options: Any) -> None:
        self.monitor: ConditioningMonitor | None = None
        self._sinks, self._options = tuple(sinks), options

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.monitor is not None:
            self.monitor.close(failed=True)  # of a run that failed; Trainer tells nobody
        sinks = self._sinks if state.is_world_process_zero else ()
        self.monitor = ConditioningMonitor(kwargs["model"], first_step=state.global_step, sinks=sinks, **self._options)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.step(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.monitor is not None:
            self.monitor.close()
