"""Figures on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .weights import COLUMNS, Group


class Ring:
    """A buffer per device, allocated once, filled by steps and emptied in one transfer."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}
        self._used: dict[torch.device, int] = {}
        self._entries: list[tuple[int, Group, int]] = []

    def allocate(self, rows: dict[torch.device, int]) -> None:
        """Room for this many heads' figures per device; what is there must have been taken out."""
        for device, number in rows.items():
            if device not in self._buffers or self._buffers[device].shape[1] < number:
                self._buffers[device] = torch.zeros(COLUMNS, number, dtype=torch.float64, device=device)
            self._used[device] = 0

    def write(self, step: int, group: Group, values: Tensor) -> None:
        """Keep (COLUMNS, heads) figures of ``group``."""
        start = self._used[group.device]
        self._used[group.device] = start + values.shape[1]
        self._buffers[group.device][:, start : start + values.shape[1]] = values
        self._entries.append((step, group, start))

    def drain(self) -> Iterator[tuple[int, Group, np.ndarray]]:
        """(step, group, figures on the host), oldest first; one transfer per device."""
        host = {device: self._buffers[device][:, :used].cpu().numpy() for device, used in self._used.items() if used}
        entries, self._entries = self._entries, []
        self._used = dict.fromkeys(self._used, 0)
        for step, group, start in entries:
            yield step, group, host[group.device][:, start : start + group.rows]
