"""Records to Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..monitor.records import Record, summarize


class WandbSink:
    """The scalars of :func:`~conditioned_kernels.monitor.summarize` under ``conditioning/``, on an axis of their own.

    Records arrive after the steps they belong to, while a run's own step only goes up, so ``conditioning/step`` is
    the axis.

    Parameters
    ----------
    run : what ``wandb.init`` returned, which stays yours to finish; None for the current run.
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            import wandb

            run = wandb.run
            if run is None:
                raise RuntimeError("there is no current run; call wandb.init first, or pass its result as run=")
        self._run = run
        run.define_metric("conditioning/step")
        run.define_metric("conditioning/*", step_metric="conditioning/step")

    def write(self, records: Sequence[Record]) -> None:
        for step, scalars in summarize(records):
            self._run.log(
                {"conditioning/step": step} | {f"conditioning/{tag}": value for tag, value in scalars.items()}
            )

    def close(self) -> None:
        """Nothing: the run is the caller's."""
