"""Many heads, one launch: where each head lies or how it is drawn, for all heads of one shape, dtype and device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WORKSPACE_BYTES = 256 << 20
"""Cap on the n x n matrices of one launch: 2,000 heads of 128 rows. More heads go in several launches."""


@dataclass(frozen=True)
class Heads:
    """Equal heads anywhere in one device's memory.

    Attributes
    ----------
    base : a tensor of the heads' dtype and device; offsets count its elements, from its first one.
    offsets : int64, host, (heads,): where head i begins. Another allocation is just a large offset.
    rows, cols : shape of a head.
    strides : of its rows and columns, in elements.
    """

    base: Tensor
    offsets: Tensor
    rows: int
    cols: int
    strides: tuple[int, int]

    @property
    def count(self) -> int:
        return len(self.offsets)

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def alignment(self) -> int:
        """16 where every head and every contiguous line of it begins at a multiple of 16 elements: loads are wide."""
        pitch = self.strides[0] if self.strides[1] == 1 else self.strides[1]
        aligned = pitch % 16 == 0 and not bool((self.offsets % 16).any()) and self.base.data_ptr() % 16 == 0
        return 16 if 1 in self.strides and aligned else 1

    def part(self, start: int, stop: int) -> Heads:
        return replace(self, offsets=self.offsets[start:stop])


@dataclass(frozen=True)
class Samples:
    """Equal heads of stream version 1, drawn inside the kernels and never stored.

    Attributes
    ----------
    keys : int64, host, (heads,): the bits of each head's Philox key.
    heads : int64, host, (heads,): its index in that key's stream.
    rows, cols : shape, rows <= cols.
    strides : of the element index over rows and columns: (cols, 1), or (1, rows) for the transpose of a tall head.
    device : where they are drawn.
    """

    keys: Tensor
    heads: Tensor
    rows: int
    cols: int
    strides: tuple[int, int]
    device: torch.device

    @property
    def count(self) -> int:
        return len(self.keys)

    @property
    def alignment(self) -> int:
        """4 where four neighbors in a row share a Philox block, else 1."""
        return 4 if self.strides[1] == 1 and self.strides[0] % 4 == 0 else 1

    def part(self, start: int, stop: int) -> Samples:
        return replace(self, keys=self.keys[start:stop], heads=self.heads[start:stop])


def heads_of(batch: Tensor) -> Heads:
    """The heads of one strided batch (..., rows, cols); nothing is copied."""
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(batch.shape[:-2], batch.stride()[:-2], strict=True):
        offsets = offsets[..., None] + torch.arange(size, device="cpu") * stride
    rows, cols = batch.shape[-2:]
    return Heads(batch, offsets.flatten(), rows, cols, (batch.stride(-2), batch.stride(-1)))


def samples_of(
    keys: Sequence[int], firsts: Sequence[int], counts: Sequence[int], rows: int, cols: int, device: torch.device
) -> Samples:
    """counts[i] heads of each key from firsts[i] on, (rows, cols) as drawn; a tall or square one as its transpose."""
    signed = [key - (1 << 64) if key >= 1 << 63 else key for key in keys]
    repeats = torch.tensor(counts, dtype=torch.int64, device="cpu")
    all_keys = torch.tensor(signed, dtype=torch.int64, device="cpu").repeat_interleave(repeats)
    heads = torch.cat(
        [torch.arange(first, first + count, device="cpu") for first, count in zip(firsts, counts, strict=True)]
    )
    if rows < cols:
        return Samples(all_keys, heads, rows, cols, (cols, 1), device)
    return Samples(all_keys, heads, cols, rows, (1, cols), device)


def group(batches: Sequence[Tensor]) -> list[tuple[Heads, list[int]]]:
    """Merge batches that one launch can serve; with each group come the indices of its batches, in order.

    48 layers of 12 heads are one group. The distance between two allocations is a whole number of elements,
    since allocators align further than any dtype.
    """
    found: dict[tuple, list[int]] = {}
    for index, batch in enumerate(batches):
        key = (batch.shape[-2:], batch.stride()[-2:], batch.dtype, batch.device)
        found.setdefault(key, []).append(index)
    groups = []
    for members in found.values():
        base = batches[members[0]]
        parts = [heads_of(batches[index]) for index in members]
        shifts = [(part.base.data_ptr() - base.data_ptr()) // base.element_size() for part in parts]
        offsets = torch.cat([part.offsets + shift for part, shift in zip(parts, shifts, strict=True)])
        groups.append((replace(parts[0], offsets=offsets), members))
    return groups


def launches(count: int, rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of heads whose Gram matrix, factor and partial sums fit the workspace cap; usually one."""
    step = max(1, WORKSPACE_BYTES // (2 * rows * rows * 4))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def table(source: Heads | Samples | None = None, target: Heads | None = None) -> Tensor:
    """(heads, 4) int64 on the device: input offset, output offset, Philox key, head index; 0 where there is none."""
    some = source if source is not None else target
    if some is None:
        raise ValueError("table needs a source or a target")
    rows = torch.zeros(some.count, 4, dtype=torch.int64, device="cpu")
    if isinstance(source, Heads):
        rows[:, 0] = source.offsets
    elif source is not None:
        rows[:, 2], rows[:, 3] = source.keys, source.heads
    if target is not None:
        rows[:, 1] = target.offsets
    if some.device.type == "cuda":
        rows = rows.pin_memory()  # so that the copy does not wait for the device
    return rows.to(some.device, non_blocking=True)
