"""The monitor as a callback of Lightning's Trainer."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:
    # The same library under its older name.
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]

from .callback import MonitorCallback


class ConditioningCallback(MonitorCallback, Callback):
    __doc__ = MonitorCallback.__doc__

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(pl_module, trainer.global_step, main=trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._step(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(failed=True)
