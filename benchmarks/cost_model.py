"""Predicted time of the Triton kernels against the floor of memory and tensor cores, without a GPU.

``python benchmarks/cost_model.py`` prints the table. The inputs are data sheets, the committed compile figures
(tests/compile/resources.json) and instruction counts of the compiled loops. Nothing here was measured: a prediction
that a measurement contradicts is replaced by the measurement.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

RESOURCES = Path(__file__).parents[1] / "tests" / "compile" / "resources.json"


class Chip(NamedTuple):
    """Data-sheet figures: capability, bytes/s, dense tf32 flop/s, processors, clock, shared bytes per processor."""

    capability: int
    bandwidth: float
    tf32: float
    processors: int
    clock: float
    shared: int


CHIPS = {
    "A100": Chip(80, 2.04e12, 156e12, 108, 1.41e9, 164 << 10),
    "H100": Chip(90, 3.35e12, 495e12, 132, 1.755e9, 228 << 10),
    "H200": Chip(90, 4.8e12, 495e12, 132, 1.755e9, 228 << 10),
    "B200": Chip(100, 7.7e12, 1100e12, 148, 1.85e9, 228 << 10),
}

BANDWIDTH_SHARE = 0.90
TENSOR_SHARE = 0.70
ISSUE_SHARE = 0.80
"""Shares of a peak that well-written kernels reach."""
LAUNCH = 4e-6
"""Seconds from one kernel to the next of a dependent chain."""
LANES = 128
"""Instructions that a processor issues per clock, times lanes of a warp."""

INSTRUCTIONS = {
    # Per element of W and pass: the loop of the compiled kernel (nvdisasm), 128 rows, over its 32 elements per thread.
    ("gram", False): {80: 15.4, 90: 5.7, 100: 5.7},
    ("apply", False): {80: 23.5, 90: 7.7, 100: 7.7},
    ("gram", True): {80: 62.2, 90: 60.1, 100: 60.1},
    ("apply", True): {80: 69.2, 90: 63.9, 100: 63.9},
}


class Case(NamedTuple):
    """What is done to how many heads."""

    name: str
    kind: str
    heads: int
    rows: int
    cols: int
    dtype: str


CASES = (
    Case("one head of a 7B Llama", "init", 1, 128, 4096, "bf16"),
    Case("Q and K of a 7B Llama", "init", 2048, 128, 4096, "bf16"),
    Case("Q and K of a 7B Llama", "init", 2048, 128, 4096, "fp32"),
    Case("Q, K and V of a 7B Llama", "gram", 3072, 128, 4096, "bf16"),
    Case("Q, K and V of a 7B Llama", "orthogonalize", 3072, 128, 4096, "bf16"),
    Case("Q and K of ViT-B", "init", 288, 64, 768, "fp32"),
    Case("Q, K and V of ViT-B", "gram", 432, 64, 768, "fp32"),
)
PASSES = {"init": (("gram", True), ("apply", True)), "gram": (("gram", False),)}
PASSES["orthogonalize"] = (("gram", False), ("apply", False))


def floor(case: Case, chip: Chip) -> float:
    """Seconds for the bytes that must move or the tf32 products that must be made, whichever is longer."""
    size = case.heads * case.rows * case.cols * (4 if case.dtype == "fp32" else 2)
    moves = {"init": 1, "gram": 1, "orthogonalize": 3}[case.kind]
    flops = 2 * case.heads * case.rows**2 * case.cols * len(PASSES[case.kind])
    return max(moves * size / chip.bandwidth, flops / chip.tf32)


def predicted(case: Case, chip: Chip, table: dict) -> tuple[float, str]:
    """Seconds without the small-matrix stage, and what binds the slowest pass."""
    total, slowest, reason = 0.0, 0.0, ""
    for kernel, sampled in PASSES[case.kind]:
        precision = "tf32" if case.dtype == "bf16" else "tf32x3"
        last = precision if kernel == "gram" and sampled else case.dtype
        name = f"{kernel}{'-sampled' if sampled else ''}/{case.rows}/{last}"
        certified = f"{name}/certified" in table
        row = table[f"{name}/certified" if certified else name][f"sm_{chip.capability}"]
        threads = 32 * row["warps"]
        blocks = min(65536 // (-(-row["registers"] // 8) * 8 * threads), chip.shared // (row["shared"] + 1024))
        blocks = max(1, min(blocks, 2048 // threads))
        # One program per head, split while heads are fewer than the device holds; samples are split in apply only.
        splits = 1 if kernel == "gram" and sampled else max(1, min(-(-264 // case.heads), case.cols // 256))
        programs = case.heads * splits
        busy = min(1.0, programs / (chip.processors * blocks))
        elements = case.heads * case.rows * case.cols
        size = elements * (4 if case.dtype == "fp32" else 2)
        moved = size * ((not sampled) + (kernel == "apply"))
        # Results are certified: the Gram matrix of what was stored costs as many products again.
        products = 2 * elements * case.rows * (3 if precision == "tf32x3" else 1) * (1 + certified)
        parts = {
            "memory": moved / (chip.bandwidth * BANDWIDTH_SHARE * min(1.0, 2 * busy)),
            "tensor cores": products / (chip.tf32 * TENSOR_SHARE * busy),
            "instructions": elements
            * INSTRUCTIONS[kernel, sampled][chip.capability]
            / (chip.processors * LANES * chip.clock * ISSUE_SHARE * busy),
        }
        # With one block per processor a loop's phases follow each other; two blocks overlap them.
        seconds = max(parts.values()) if blocks > 1 else max(parts.values()) + 0.5 * sorted(parts.values())[-2]
        total += seconds + LAUNCH
        if seconds > slowest:
            slowest, reason = seconds, max(parts, key=lambda name: parts[name])
    return total, reason


def main() -> None:
    table = json.loads(RESOURCES.read_text())
    print("Predictions, not measurements, with the certificate where it is fused; without the small-matrix stage.")
    print(
        f"{'case':26} {'what':14} {'shape':>16} {'dtype':5} {'chip':5} {'floor ms':>9} {'ms':>9} {'ratio':>6}  bound by"
    )
    for case in CASES:
        for name, chip in CHIPS.items():
            low = floor(case, chip)
            seconds, reason = predicted(case, chip, table)
            shape = f"{case.heads}x{case.cols}x{case.rows}"
            print(
                f"{case.name:26} {case.kind:14} {shape:>16} {case.dtype:5} {name:5} {1e3 * low:9.4f} "
                f"{1e3 * seconds:9.4f} {seconds / low:6.1f}  {reason}"
            )
    print(REASON)


REASON = """\
Why init is above twice its floor: exact samples cost 60 to 69 instructions each, 12 of them Philox and the rest
Box-Muller without fused multiply-add, and both passes draw them. Storing them in fp32 between the passes would
cost 8 bytes per element instead, about 0.9 us per 4096 x 128 head on an H200 against 1.4 us, and a workspace."""


if __name__ == "__main__":
    main()
