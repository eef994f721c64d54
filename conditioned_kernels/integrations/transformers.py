"""The monitor as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .callback import MonitorCallback


class ConditioningCallback(MonitorCallback, TrainerCallback):
    __doc__ = MonitorCallback.__doc__

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._begin(kwargs["model"], state.global_step, main=state.is_world_process_zero)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._step(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._end()
