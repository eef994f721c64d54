"""nvcc compiles the kernels for every target without a GPU: no warnings, no spills, shared memory within the chip's."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from extension_build import CSRC, folder

from conditioned_kernels import _backend, build

ARCHITECTURES = ("80", "90", "100")
SHARED_LIMIT = {"80": 163 << 10, "90": 227 << 10, "100": 227 << 10}
"""Bytes one block may ask for: CUDA C++ Programming Guide, technical specifications per compute capability."""
REGISTERS = 65536
THREADS = {"factor": 256, "spectrum": 128, "sample": 256}
KERNELS = (*((name, kind) for name in ("factor", "spectrum") for kind in ("float", "double")), ("sample", ""))


def ptxas(architecture: str) -> str:
    """What ``ptxas -v`` says, kept per state of the sources."""
    kept = folder() / f"ptxas-{architecture}.txt"
    if not kept.exists():
        nvcc = build.nvcc_compiler()
        assert nvcc
        command = [
            nvcc,
            *build.NVCC_FLAGS,
            "-Xptxas=-v",
            f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
        ]
        command += ["-c", str(CSRC / "kernels.cu"), "-o", str(folder() / f"kernels-{architecture}.o")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"FAILED\n{done.stderr}"
        kept.write_text(done.stdout + done.stderr)
    return kept.read_text()


def parse(text: str) -> dict[tuple[str, str], dict[str, int]]:
    """(kernel, type) -> registers, stack, spill_stores, spill_loads, static shared memory, all of ptxas -v."""
    rows = {}
    for block in text.split("Compiling entry function")[1:]:
        entry = re.search(r"(factor|spectrum|sample)_kernel(?:I([fd])E)?", block)
        assert entry
        numbers = {
            "registers": r"Used (\d+) registers",
            "stack": r"(\d+) bytes stack frame",
            "spill_stores": r"(\d+) bytes spill stores",
            "spill_loads": r"(\d+) bytes spill loads",
            "static": r"(\d+) bytes smem",
        }
        found = {name: re.search(pattern, block) for name, pattern in numbers.items()}
        kind = {"f": "float", "d": "double", None: ""}[entry.group(2)]
        rows[entry.group(1), kind] = {name: int(match.group(1)) if match else 0 for name, match in found.items()}
    return rows


@pytest.fixture(scope="module")
def table() -> dict[str, dict[tuple[str, str], dict[str, int]]]:
    if build.nvcc_compiler() is None:
        pytest.skip("no nvcc")
    with ThreadPoolExecutor(2) as pool:
        texts = dict(zip(ARCHITECTURES, pool.map(ptxas, ARCHITECTURES), strict=True))
    for architecture, text in texts.items():
        assert not text.startswith("FAILED"), f"sm_{architecture}: {text}"
    return {architecture: parse(text) for architecture, text in texts.items()}


def test_no_kernel_spills_and_every_block_fits(table, capsys: pytest.CaptureFixture) -> None:
    lines = ["sm   kernel           registers  stack  spills  static shared"]
    for architecture, rows in table.items():
        assert set(rows) == set(KERNELS)
        for (name, kind), row in rows.items():
            spills = row["spill_stores"] + row["spill_loads"]
            numbers = f"{row['registers']:9} {row['stack']:6} {spills:7} {row['static']:6}"
            lines.append(f"{architecture:4} {name + ' ' + kind:16} {numbers}")
            assert spills == 0, (architecture, name, kind)
            assert row["registers"] * THREADS[name] <= REGISTERS
            assert row["static"] <= 1024
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_shared_memory_of_every_head_width(capsys: pytest.CaptureFixture) -> None:
    import torch

    lines = ["rows  bytes of the factor kernel (float32, float64) and the largest chip limit passed"]
    for rows in (32, 48, 64, 80, 96, 112, 128):
        single = _backend.shared_memory(rows, torch.float32)
        double = _backend.shared_memory(rows, torch.float64)
        fits = [f"sm_{a}: {'f32' * (single <= limit)} {'f64' * (double <= limit)}" for a, limit in SHARED_LIMIT.items()]
        lines.append(f"{rows:4}  {single:7} {double:7}  {'; '.join(fits)}")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert _backend.shared_memory(128, torch.float32) <= SHARED_LIMIT["90"]
    assert _backend.shared_memory(112, torch.float32) <= SHARED_LIMIT["80"]
    assert _backend.shared_memory(96, torch.float64) <= SHARED_LIMIT["90"]
    assert _backend.shared_memory(80, torch.float64) <= SHARED_LIMIT["80"]
