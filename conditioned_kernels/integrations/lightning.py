"""The monitor as a callback of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:
    # The same library under its older name.
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]

from ..monitor import ConditioningMonitor, Sink


class ConditioningCallback(Callback):
    """Runs a :class:`~conditioned_kernels.ConditioningMonitor` along with ``Trainer.fit``.

    Parameters
    ----------
    sinks : written to by the main process alone.
    options : keyword arguments of the monitor.

    Attributes
    ----------
    monitor : of the current or last fit; None before the first.
    """

    def __init__(self, *, sinks: Sequence[Sink] = (), **options: Any) -> None:
        self.monitor: ConditioningMonitor | None = None
        self._sinks, self._options = tuple(sinks), options

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sinks = self._sinks if trainer.is_global_zero else ()
        self.monitor = ConditioningMonitor(pl_module, first_step=trainer.global_step, sinks=sinks, **self._options)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # With accumulated gradients most batches end without an optimizer step.
        if self.monitor is not None and trainer.global_step != self.monitor.current_step:
            self.monitor.step(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is not None:
            self.monitor.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.monitor is not None:
            self.monitor.close(failed=True)
