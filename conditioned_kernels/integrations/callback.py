"""What the callbacks of all trainers share: a monitor that lives as long as a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..monitor import ConditioningMonitor, Sink


class MonitorCallback:
    """Runs a :class:`~conditioned_kernels.ConditioningMonitor` along with a trainer.

    Parameters
    ----------
    sinks : written to by the main process alone.
    options : keyword arguments of the monitor.

    Attributes
    ----------
    monitor : of the current or last run; None before the first.
    """

    def __init__(self, *, sinks: Sequence[Sink] = (), **options: Any) -> None:
        self.monitor: ConditioningMonitor | None = None
        self._sinks, self._options = tuple(sinks), options

    def _begin(self, model: nn.Module, step: int, *, main: bool) -> None:
        self._end(failed=True)  # a run that failed; not every trainer tells
        sinks = self._sinks if main else ()
        self.monitor = ConditioningMonitor(model, first_step=step, sinks=sinks, **self._options)

    def _step(self, step: int) -> None:
        # With accumulated gradients, a trainer may call without an optimizer step in between.
        if self.monitor is not None and step != self.monitor.current_step:
            self.monitor.step(step)

    def _end(self, *, failed: bool = False) -> None:
        if self.monitor is not None:
            self.monitor.close(failed=failed)
