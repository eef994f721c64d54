"""Every kernel variant this package launches, and what compiling it for a chip gives. Needs no GPU.

``python tests/compile/triton_variants.py`` prints the table; ``--write`` makes resources.json from it. Triton must not
be in interpreter mode.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from conditioned_kernels._triton import apply, gram, identity, launch_config, product

RESOURCES = Path(__file__).with_name("resources.json")
CAPABILITIES = (80, 90, 100)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that one block may use: CUDA C++ Programming Guide, table of compute capabilities."""
STACK_LIMIT = 64
ROWS = (16, 32, 64, 128)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Variant(NamedTuple):
    """A kernel with its arguments' types; an int is a value Triton specializes on, "i32*16" a multiple of 16."""

    name: str
    kernel: object
    arguments: dict[str, object]
    constants: dict[str, object]
    options: dict[str, object]


def variants(capability: int) -> Iterator[Variant]:
    """What is launched for contiguous heads (stride of columns 1) of every size and dtype, and for unaligned ones."""
    for rows in ROWS:
        for name, dtype in DTYPES.items():
            launch = launch_config.gram(rows, dtype, capability, sampled=False)
            yield _gram(f"gram/{rows}/{name}", name, launch, 16, False)
            if rows in (16, 128):
                yield _gram(f"gram/{rows}/{name}/unaligned", name, launch, 1, False)
            launch = launch_config.apply(rows, dtype, capability, sampled=False)
            for certify in (False, True)[: 1 + launch_config.fused_certificate(launch)]:
                mark = "/certified" if certify else ""
                yield _apply(f"apply/{rows}/{name}{mark}", name, name, launch, dtype, 16, False, certify)
            launch = launch_config.apply(rows, dtype, capability, sampled=True)
            for certify in (False, True)[: 1 + launch_config.fused_certificate(launch)]:
                mark = "/certified" if certify else ""
                yield _apply(f"apply-sampled/{rows}/{name}{mark}", "fp32", name, launch, dtype, 4, True, certify)
        for name in ("fp32", "bf16"):
            launch = launch_config.gram(rows, DTYPES[name], capability, sampled=True)
            yield _gram(f"gram-sampled/{rows}/{launch.precision}", "fp32", launch, 4, True)
            if rows == 128:
                yield _gram(f"gram-sampled/{rows}/{launch.precision}/singly", "fp32", launch, 1, True)
    for precision in ("tf32", "tf32x3", "ieee"):
        for symmetric in (True, False):
            launch = launch_config.product(1024, 1024, precision, capability)
            yield _product(f"product/{precision}{'/symmetric' if symmetric else ''}", launch, symmetric)
    launch = launch_config.identity()
    for name in DTYPES:
        arguments = {"out_ptr": f"*{name}", "table_ptr": "*i64", "first_ptr": "*i32", "gain_ptr": "*fp32"}
        arguments |= {"rows": "i32*16", "cols": "i32*16", "stride_row": "i32*16", "stride_col": 1}
        constants = {"BLOCK_R": launch.block_rows, "BLOCK_C": launch.block_cols, "ALIGNMENT": 16}
        yield Variant(f"identity/{name}", identity.identity_kernel, arguments, constants, launch.options(False))
    arguments = {"part_ptr": "*fp32", "out_ptr": "*fp32", "size": "i32*16", "splits": "i32"}
    yield Variant("sum", gram.sum_kernel, arguments, {}, {"enable_fp_fusion": True})
    arguments = {"part_ptr": "*fp32", "gain_ptr": "*fp32", "out_ptr": "*fp32", "rows": "i32*16", "splits": "i32"}
    yield Variant("residual", gram.residual_kernel, arguments, {}, {"enable_fp_fusion": True})


def _gram(name: str, dtype: str, launch: launch_config.Launch, alignment: int, sampled: bool) -> Variant:
    size = "i32*16" if alignment > 1 else "i32"
    arguments = {"w_ptr": f"*{dtype}", "table_ptr": "*i64", "out_ptr": "*fp32", "rows": "i32*16", "cols": size}
    arguments |= {"stride_row": size, "stride_col": 1, "split_cols": "i32*16"}
    constants = gram.gram_constants(launch, alignment, sampled)
    return Variant(name, gram.gram_kernel, arguments, constants, launch.options(sampled))


def _apply(
    name: str,
    w: str,
    out: str,
    launch: launch_config.Launch,
    dtype: torch.dtype,
    alignment: int,
    sampled: bool,
    certify: bool,
) -> Variant:
    arguments = {"factor_ptr": "*fp32", "w_ptr": f"*{w}", "table_ptr": "*i64", "gain_ptr": "*fp32"}
    arguments |= {"out_ptr": f"*{out}", "part_ptr": "*fp32", "rows": "i32*16", "cols": "i32*16"}
    arguments |= {"stride_row": "i32*16", "stride_col": 1, "out_stride_row": "i32*16", "out_stride_col": 1}
    arguments |= {"span_cols": "i32*16"}
    constants = apply.apply_constants(launch, dtype, alignment, 16, sampled, certify)
    return Variant(name, apply.apply_kernel, arguments, constants, launch.options(sampled))


def _product(name: str, launch: launch_config.Launch, symmetric: bool) -> Variant:
    arguments = dict.fromkeys(("a_ptr", "b_ptr", "d_ptr", "out_ptr"), "*fp32")
    arguments |= dict.fromkeys(("rows", "cols", "inner"), "i32*16")
    for tensor, last in (("a", "inner"), ("b", "inner"), ("d", "col"), ("out", "col")):
        arguments |= {f"{tensor}_batch": "i32*16", f"{tensor}_row": "i32*16", f"{tensor}_{last}": 1}
    arguments |= dict.fromkeys(("alpha", "beta", "gamma"), "fp32")
    constants = product.product_constants(launch, symmetric, True)
    return Variant(name, product.product_kernel, arguments, constants, launch.options(False))


def build(variant: Variant, capability: int) -> triton.compiler.CompiledKernel:
    """Compile for ``sm_<capability>``."""
    signature, constants, attributes = {}, dict(variant.constants), {}
    for index, name in enumerate(variant.kernel.arg_names):
        kind = variant.arguments.get(name, "constexpr")
        if isinstance(kind, int):
            constants[name] = kind
            kind = "constexpr"
        signature[name], _, divisor = kind.partition("*16")
        if divisor or kind.endswith("*16") or kind.startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.options)


def resources(variant: Variant, capability: int) -> dict[str, object]:
    """Registers and stack bytes per thread, shared bytes per block, and the tensor-core instruction if there is one."""
    compiled = build(variant, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"(REG|STACK):(\d+)", text.stdout))
    ptx = compiled.asm["ptx"]
    found = [word for word in ("tcgen05.mma", "wgmma.mma_async", "mma.sync") if word in ptx]
    return {
        "registers": int(usage["REG"]),
        "stack": int(usage["STACK"]),
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "tensor_core": found[0] if found else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write resources.json")
    parser.add_argument("--only", default="", help="regular expression on the names")
    parser.add_argument("--capability", type=int, action="append", help="default: all three")
    arguments = parser.parse_args()
    fresh: dict[str, dict[str, object]] = {}
    for capability in arguments.capability or CAPABILITIES:
        for variant in variants(capability):
            if not re.search(arguments.only, variant.name):
                continue
            start = time.perf_counter()
            row = resources(variant, capability)
            fresh.setdefault(variant.name, {})[f"sm_{capability}"] = row
            print(f"{variant.name:38} sm_{capability:<4} {row} {time.perf_counter() - start:.1f} s", flush=True)
    if arguments.write:
        table = json.loads(RESOURCES.read_text()) if RESOURCES.exists() else {}
        table["triton"] = triton.__version__
        for name, row in fresh.items():
            table[name] = dict(sorted((table.get(name, {}) | row).items(), key=lambda item: int(item[0][3:])))
        lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in table.items()]
        RESOURCES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
