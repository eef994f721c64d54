"""Records to TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..monitor.records import Record, summarize


class TensorBoardSink:
    """Scalars per layer and projection, and a histogram of log10 kappa over all heads of a projection.

    Tags are ``conditioning/log10_kappa_max/q/LAYER`` and so on, see :func:`~conditioned_kernels.monitor.summarize`.

    Parameters
    ----------
    target : a folder, or a ``SummaryWriter`` that stays yours to close.
    """

    def __init__(self, target: str | Path | Any) -> None:
        self._own = isinstance(target, str | Path)
        self._writer: Any = target
        if self._own:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(target))

    def write(self, records: Sequence[Record]) -> None:
        for step, scalars in summarize(records):
            for tag, value in scalars.items():
                self._writer.add_scalar(f"conditioning/{tag}", value, step)
        logs: dict[tuple[int, str], list[float]] = {}
        for record in records:
            if record.head >= 0 and not record.spectrum:
                logs.setdefault((record.step, record.projection), []).append(record.log10_kappa)
        for (step, projection), values in logs.items():
            self._writer.add_histogram(f"conditioning/log10_kappa/{projection}", np.array(values), step)
        self._writer.flush()

    def close(self) -> None:
        if self._own:
            self._writer.close()
