"""How a computation on one matrix ended."""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor


class Status(IntEnum):
    """Outcome of one matrix of a batch; ``sentence`` says it in words."""

    CONVERGED = 0
    TOLERANCE_NOT_MET = 1
    RANK_DEFICIENT = 2
    ZERO_MATRIX = 3
    NON_FINITE = 4

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    Status.CONVERGED: "the result meets the tolerance",
    Status.TOLERANCE_NOT_MET: "the result does not meet the tolerance; its bracket or residual still holds",
    Status.RANK_DEFICIENT: "numerically rank deficient: sigma_min <= max(rows, cols) * 2.2e-16 * sigma_max",
    Status.ZERO_MATRIX: "every element of the matrix is zero",
    Status.NON_FINITE: "the matrix has a NaN or infinite element (non-finite input)",
}


def sentences(status: Tensor, accept: tuple[Status, ...] = (Status.CONVERGED,)) -> list[str]:
    """One line per matrix whose status is not in ``accept``, named by its batch index. Reads the device."""
    codes = status.detach().cpu()
    lines = []
    for index in (codes.reshape(-1) == codes.reshape(-1)).nonzero().flatten().tolist():
        code = Status(int(codes.reshape(-1)[index]))
        if code not in accept:
            lines.append(f"matrix {batch_index(index, tuple(codes.shape))}: {code.sentence}")
    return lines


def batch_index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...] | int:
    """The index of a matrix in its batch: an int for one batch axis, a tuple otherwise."""
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    index.reverse()
    return index[0] if len(index) == 1 else tuple(index)
