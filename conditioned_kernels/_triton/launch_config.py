"""Tile sizes, warps and precision of every kernel: pure functions of (rows, cols, dtype, architecture).

This is the only file with tile numbers. Each row begins with the registers per thread of its heaviest kernel for
sm_90 (in the ``_MMA`` tables sm_80), as compiled by the triton that ``tests/compile/resources.json`` names; all figures
are there, and a test compares them. No row was timed yet. Triton is not imported here.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

MAX_ROWS = 128
"""Largest n of the Gram and apply kernels: one n x n tile in registers, and the factor in shared memory."""

SUM_ELEMENTS = 1024
"""Elements that a program of the summing kernels holds at once: 8 registers per thread."""

HIP = 0
"""Stands for any ROCm device where an architecture (compute capability x 10) is asked for."""

PROCESSORS = 132
"""Programs that fill a device once. A constant, so that results do not depend on which one runs: the H100's count,
between the A100's 108 and the B200's 148."""


class Launch(NamedTuple):
    """One row: tile, warps, pipeline stages, input precision of its products, and the figure that chose it."""

    block_rows: int
    block_cols: int
    warps: int
    stages: int
    precision: str
    why: str
    block_inner: int = 0

    def options(self, sampled: bool) -> dict[str, object]:
        """Triton's launch options. Kernels that draw samples must not fuse a multiply with an add."""
        # Said both ways, since Triton is about to change its default.
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": not sampled}


class _Row(NamedTuple):
    block_cols: int
    warps: int
    stages: int
    why: str
    block_inner: int = 0


_GRAM = {
    # (block_rows, precision, sampled); in memory first.
    (16, "tf32", False): _Row(128, 4, 3, "40 registers"),
    (32, "tf32", False): _Row(128, 4, 3, "56 registers"),
    (64, "tf32", False): _Row(64, 4, 3, "116 registers"),
    (128, "tf32", False): _Row(64, 8, 3, "155 registers"),
    (16, "tf32x3", False): _Row(128, 4, 3, "201 registers"),
    (32, "tf32x3", False): _Row(64, 4, 3, "168 registers"),
    (64, "tf32x3", False): _Row(32, 4, 3, "124 registers; 64 columns spill 56 B on sm_80"),
    (128, "tf32x3", False): _Row(32, 8, 3, "198 registers"),
    (16, "tf32", True): _Row(128, 4, 1, "94 registers"),
    (32, "tf32", True): _Row(128, 4, 1, "167 registers"),
    (64, "tf32", True): _Row(64, 4, 1, "215 registers"),
    (128, "tf32", True): _Row(64, 8, 1, "210 registers"),
    (16, "tf32x3", True): _Row(128, 4, 1, "251 registers"),
    (32, "tf32x3", True): _Row(64, 4, 1, "237 registers"),
    (64, "tf32x3", True): _Row(32, 4, 1, "228 registers; 64 columns spill 856 B"),
    (128, "tf32x3", True): _Row(16, 8, 1, "214 registers; 32 columns spill 56 B, 64 columns 720 B"),
}

_APPLY = {
    (16, "tf32", False): _Row(128, 4, 2, "130 registers"),
    (32, "tf32", False): _Row(128, 4, 2, "208 registers"),
    (64, "tf32", False): _Row(64, 4, 2, "130 registers"),
    (128, "tf32", False): _Row(64, 8, 2, "247 registers"),
    (16, "tf32x3", False): _Row(64, 4, 2, "127 registers; 128 columns spill 104 B on sm_100"),
    (32, "tf32x3", False): _Row(64, 4, 2, "239 registers"),
    (64, "tf32x3", False): _Row(32, 4, 2, "167 registers; 64 columns spill 248 B on sm_80"),
    (128, "tf32x3", False): _Row(128, 8, 2, "234 registers; 64 columns read the factor twice as often", 16),
    (16, "tf32", True): _Row(128, 4, 1, "152 registers"),
    (32, "tf32", True): _Row(64, 4, 1, "168 registers"),
    (64, "tf32", True): _Row(64, 4, 1, "216 registers"),
    (128, "tf32", True): _Row(64, 8, 1, "255 registers"),
    (16, "tf32x3", True): _Row(64, 4, 1, "128 registers; 128 columns spill 120 B on sm_80"),
    (32, "tf32x3", True): _Row(32, 4, 1, "201 registers"),
    (64, "tf32x3", True): _Row(64, 4, 1, "234 registers; a resident factor spills 70 to 390 B", 16),
    (128, "tf32x3", True): _Row(128, 8, 1, "232 registers; a resident factor spills 1.4 KB or more", 16),
}

_PRODUCT = {
    "tf32": _Row(32, 8, 3, "155 registers"),
    "tf32x3": _Row(32, 8, 3, "206 registers"),
    "ieee": _Row(16, 8, 2, "80 registers"),
}

# Architectures without wgmma or tcgen05 keep operands in registers, which costs the widest tiles their place.
_GRAM_MMA = {**_GRAM, (128, "tf32x3", False): _Row(16, 8, 3, "253 registers; 32 columns spill 152 B")}
_APPLY_MMA = {
    **_APPLY,
    (128, "tf32x3", False): _Row(64, 8, 2, "219 registers; 128 columns spill 120 B", 16),
    (128, "tf32x3", True): _Row(64, 8, 1, "168 registers; 128 columns spill 160 B", 16),
}
_PRODUCT_MMA = {**_PRODUCT, "tf32x3": _Row(16, 8, 3, "253 registers; 32 columns spill 248 B")}
_ASYNC_MMA = (90, 100, 103)
_SMALL_SHARED = (86, 87, 89, 120, 121)
"""99 KiB of shared memory per block, where two stages beside a factor of 64 KiB need 112."""


def block_rows(rows: int) -> int:
    """The power of two that holds ``rows``, at least the 16 that a tensor core needs."""
    return max(16, 1 << (rows - 1).bit_length())


def gram_precision(dtype: torch.dtype, ieee: bool = False) -> str:
    """Products of a Gram matrix that serves a result in ``dtype``; tf32 holds every half type exactly."""
    return "ieee" if ieee else "tf32x3" if dtype == torch.float32 else "tf32"


def apply_precision(dtype: torch.dtype, ieee: bool = False) -> str:
    """Products of F W stored in ``dtype``; tf32 has fp16's 11 bits, which is too few to round once more."""
    return "ieee" if ieee else "tf32" if dtype == torch.bfloat16 else "tf32x3"


def gram(rows: int, dtype: torch.dtype, arch: int, *, sampled: bool) -> Launch:
    """Launch of ``gram_kernel``."""
    return _launch(_GRAM if arch in _ASYNC_MMA else _GRAM_MMA, rows, gram_precision(dtype, arch == HIP), sampled)


def apply(rows: int, dtype: torch.dtype, arch: int, *, sampled: bool) -> Launch:
    """Launch of ``apply_kernel``."""
    table = _APPLY if arch in _ASYNC_MMA else _APPLY_MMA
    launch = _launch(table, rows, apply_precision(dtype, arch == HIP), sampled)
    return launch._replace(stages=1) if arch in _SMALL_SHARED else launch


def _launch(table: dict[tuple[int, str, bool], _Row], rows: int, precision: str, sampled: bool) -> Launch:
    size = block_rows(rows)
    row = table[size, "tf32" if precision == "tf32" else "tf32x3", sampled]
    return Launch(size, row.block_cols, row.warps, row.stages, precision, row.why, row.block_inner)


def fused_certificate(launch: Launch) -> bool:
    """Whether ``apply_kernel`` can sum the Gram matrix of its result as well; else the result is read once more."""
    # 128 x 128 sums beside a 128 x 128 tile in three-product precision spill 650 B.
    return launch.block_rows < 128 or launch.precision == "tf32"


def product(rows: int, cols: int, precision: str, arch: int) -> Launch:
    """Launch of ``product_kernel``; ``precision`` "" is that of fp32 results."""
    precision = precision or gram_precision(torch.float32, arch == HIP)
    row = (_PRODUCT if arch in _ASYNC_MMA else _PRODUCT_MMA)[precision]
    size = 128 if min(rows, cols) > 64 and precision != "ieee" else 64
    return Launch(size, row.block_cols, row.warps, row.stages, precision, row.why)


def identity() -> Launch:
    """Launch of ``identity_kernel``."""
    return Launch(32, 128, 4, 1, "", "a write: 32 elements per thread")


def gram_terms(cols: int, launch: Launch) -> int:
    """k with |error of an element of G| <= k u sum |x||y|, for "tf32x3" and "ieee", however many splits there are.

    Three products are within 3 u of the exact one. A tensor core may round each addition of a block toward zero, 2 u;
    the sums of blocks, and of splits, are added in fp32, u each.
    """
    blocks = -(-cols // launch.block_cols)
    return 3 + 2 * min(cols, launch.block_cols) + 2 * blocks


def splits(cols: int, heads: int, launch: Launch) -> int:
    """Column ranges per head: enough to fill the device twice, and each at least four blocks long."""
    wanted = -(-2 * PROCESSORS // max(heads, 1))
    return max(1, min(wanted, cols // (4 * launch.block_cols)))


def split_columns(cols: int, parts: int, launch: Launch) -> int:
    """Columns per range, a multiple of the block."""
    return -(-cols // (parts * launch.block_cols)) * launch.block_cols


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one, which is where Triton launches, whatever device its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def architecture(device: torch.device) -> int:
    """Compute capability x 10 of ``device``; :data:`HIP` on ROCm. The interpreter on the CPU passes for sm_90."""
    if device.type != "cuda":
        return 90
    if torch.version.hip:
        return HIP
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
