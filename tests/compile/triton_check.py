"""The kernels compiled for sm_80, sm_90 and sm_100, without a GPU. Run by tests/test_triton_compile.py.

The usual run compiles the variants of REPRESENTATIVE; with CK_COMPILE_ALL=1 all of them (five minutes on two cores).
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import triton

from conditioned_kernels._triton import launch_config

sys.path.insert(0, str(Path(__file__).parent))
from triton_variants import CAPABILITIES, RESOURCES, SHARED_LIMIT, STACK_LIMIT, build, resources, variants

TABLE = json.loads(RESOURCES.read_text())
ALL = [(variant, capability) for capability in CAPABILITIES for variant in variants(capability)]
REPRESENTATIVE = {
    80: r"(gram|apply)/128/fp32|gram-sampled/128/tf32x3|product/tf32x3/symmetric",
    90: r"(gram|apply)/128/(fp32|bf16/certified)|gram/128/bf16|(gram|apply)-sampled/128/(tf32x3|fp32|bf16/certified)"
    r"|product/tf32x3/symmetric|identity/bf16|sum|residual",
    100: r"apply/16/fp32/certified|apply-sampled/64/fp32/certified|gram/128/fp32",
}
CHOSEN = [
    (variant, capability)
    for variant, capability in ALL
    if os.environ.get("CK_COMPILE_ALL") == "1" or re.fullmatch(REPRESENTATIVE[capability], variant.name)
]
STRIDES = ("stride_row", "out_stride_row", "a_batch", "a_row", "b_batch", "b_row", "d_batch", "d_row", "out_batch")


def check(row: dict, capability: int, name: str) -> None:
    assert row["stack"] <= STACK_LIMIT, name
    assert row["shared"] <= SHARED_LIMIT[capability], name
    rows = int(re.findall(r"/(\d+)/", name)[0]) if re.search(r"/\d+/", name) else 128
    if re.match(r"gram|apply|product/tf32", name):
        wide = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability]
        assert row["tensor_core"] == (wide if rows >= 64 else "mma.sync"), name


def test_committed_table_has_every_variant_within_the_limits() -> None:
    assert {variant.name for variant, _ in ALL} == set(TABLE) - {"triton"}
    for variant, capability in ALL:
        check(TABLE[variant.name][f"sm_{capability}"], capability, variant.name)


@pytest.mark.parametrize(("variant", "capability"), CHOSEN, ids=[f"{v.name}-sm_{c}" for v, c in CHOSEN])
def test_resources(variant, capability) -> None:
    row = resources(variant, capability)
    check(row, capability, variant.name)
    if triton.__version__ == TABLE["triton"]:
        assert row == TABLE[variant.name][f"sm_{capability}"]


def heaviest(name: str, capability: int) -> int:
    """Registers of the certified kernel where there is one, else of the plain one."""
    row = TABLE.get(f"{name}/certified", TABLE[name])
    return row[f"sm_{capability}"]["registers"]


@pytest.mark.parametrize("capability", [80, 90])
def test_every_row_of_the_launch_table_begins_with_its_figure(capability: int) -> None:
    tables_90 = {"gram": launch_config._GRAM, "apply": launch_config._APPLY}
    tables_80 = {"gram": launch_config._GRAM_MMA, "apply": launch_config._APPLY_MMA}
    for kind, table in (tables_90 if capability == 90 else tables_80).items():
        for (rows, precision, sampled), row in table.items():
            if capability == 80 and row == tables_90[kind][rows, precision, sampled]:
                continue
            dtype = precision if kind == "gram" and sampled else "bf16" if precision == "tf32" else "fp32"
            name = f"{kind}{'-sampled' if sampled else ''}/{rows}/{dtype}"
            assert row.why.startswith(f"{heaviest(name, capability)} registers"), name


KERNELS = ("gram/128/bf16", "apply/128/bf16", "apply-sampled/128/bf16", "product/tf32", "identity/bf16", "sum")


@pytest.mark.parametrize("name", KERNELS)
def test_offsets_are_64_bit(name: str) -> None:
    (variant,) = [variant for variant in variants(90) if variant.name == name]
    text = build(variant, 90).asm["ttir"]
    (index,) = re.findall(r"(%\S+) = tt.get_program_id x : i32", text)
    # Named values are followed by locations; each use of the batch index and of a stride must widen it first.
    for value in (index, *(f"%{stride}" for stride in STRIDES if f"%{stride}:" in text)):
        uses = [line for line in text.splitlines() if re.search(rf"[ (,]{re.escape(value)}[ ,:)]", line)]
        uses = [line for line in uses if "tt.func" not in line and not line.strip().startswith(f"{value} =")]
        assert uses, value
        for line in uses:
            # A stride may be divided by four first, since samples come in fours.
            assert ("arith.extsi" in line and "to i64" in line) or "arith.divsi" in line, line


def test_heads_in_memory_are_copied_16_bytes_at_a_time() -> None:
    (variant,) = [variant for variant in variants(90) if variant.name == "gram/128/bf16"]
    assert re.search(r"cp\.async\.cg\.shared\.global \[.*?\], \[.*?\], 0x10", build(variant, 90).asm["ptx"])


def test_sampled_kernels_have_no_fused_multiply_add() -> None:
    (variant,) = [variant for variant in variants(90) if variant.name == "gram-sampled/16/tf32"]
    ptx = build(variant, 90).asm["ptx"]
    assert "fma.rn.f32" not in ptx
    assert "sqrt.rn.f32" in ptx
    assert "sqrt.approx" not in ptx


SPECIAL = (
    # Heads stored transposed, one row, and strides beyond 31 bits: other specializations of the same kernels.
    ("gram/128/bf16", {"stride_row": 1, "stride_col": "i32*16"}),
    ("apply/128/fp32", {"stride_row": 1, "stride_col": "i32*16", "out_stride_row": 1, "out_stride_col": "i32*16"}),
    ("gram/16/fp32/unaligned", {"rows": 1, "cols": "i32", "stride_row": "i64"}),
    ("apply/16/fp32", {"rows": 1, "cols": 1, "out_stride_row": 1}),
    ("product/tf32x3", {"rows": 1, "a_inner": "i64", "b_row": 1, "b_inner": "i32"}),
)


@pytest.mark.parametrize(("name", "arguments"), SPECIAL)
def test_specializations_compile_too(name: str, arguments: dict) -> None:
    (variant,) = [variant for variant in variants(90) if variant.name == name]
    row = resources(variant._replace(arguments=variant.arguments | arguments), 90)
    assert row["stack"] <= STACK_LIMIT
    assert row["shared"] <= SHARED_LIMIT[90]
