"""Importing needs torch and numpy only, prints nothing, and leaves the process as it was. Each in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPTIONAL = (
    "triton",
    "transformers",
    "timm",
    "lightning",
    "typer",
    "rich",
    "safetensors",
    "matplotlib",
    "scipy",
    "tensorboard",
    "wandb",
)

BLOCK = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

sys.meta_path.insert(0, Blocker())
"""

USE = """
import torch
import conditioned_kernels as ck
model = torch.nn.MultiheadAttention(16, 4)
report = ck.conditioned_(model)
assert ck.verify(model, report)
assert float(ck.condition_number(torch.eye(4)).kappa) == 1
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::Warning:conditioned_kernels", "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def blocked() -> subprocess.CompletedProcess[str]:
    """Import and use the package with every optional library blocked; report what came along."""
    code = BLOCK + USE + "import json; print(json.dumps(sorted(sys.modules)))"
    return run(code, CUDA_VISIBLE_DEVICES="")


def test_e12_e13_works_with_torch_and_numpy_only(blocked: subprocess.CompletedProcess[str]) -> None:
    """E12, E13: no Triton, no GPU, no transformers, timm, typer, rich, safetensors or matplotlib."""
    assert blocked.returncode == 0, blocked.stderr
    modules = set(json.loads(blocked.stdout))
    assert "conditioned_kernels.initialize.conditioned" in modules
    assert not {name for name in modules if name.partition(".")[0] in OPTIONAL}


def test_e14_nothing_is_printed(blocked: subprocess.CompletedProcess[str]) -> None:
    """E14: silent at import and in use; and with every optional library present too."""
    assert blocked.stderr == ""
    present = run("import conditioned_kernels as ck, torch\nfor _ in range(100): ck.orthogonalize(torch.eye(4))")
    assert (present.stdout, present.stderr, present.returncode) == ("", "", 0)


def test_g11_import_order_does_not_matter_and_optional_libraries_are_not_pulled_in() -> None:
    code = (
        "import sys, conditioned_kernels, torch\n"
        f"pulled = {{name.partition('.')[0] for name in sys.modules}} & set({OPTIONAL!r})\n"
        "import json; print(json.dumps(sorted(pulled)))"
    )
    after = run(code)
    assert after.returncode == 0, after.stderr
    before = run(code.replace("conditioned_kernels, torch", "torch"))
    # Nothing that torch alone would not bring.
    assert set(json.loads(after.stdout)) <= set(json.loads(before.stdout))


def test_import_has_no_side_effects_on_torch() -> None:
    code = """
import torch
state = torch.get_rng_state()
before = (torch.get_num_threads(), torch.get_default_dtype(), torch.backends.mkldnn.matmul.fp32_precision,
          torch.is_grad_enabled(), torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
import conditioned_kernels
after = (torch.get_num_threads(), torch.get_default_dtype(), torch.backends.mkldnn.matmul.fp32_precision,
         torch.is_grad_enabled(), torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
raise SystemExit(0 if before == after and torch.equal(state, torch.get_rng_state()) else 3)
"""
    assert run(code).returncode == 0


def test_e15_an_unusable_triton_is_no_crash() -> None:
    """E15: a triton that raises anything at all when touched; the package imports and computes."""
    code = (
        """
import sys, types
import torch
class Broken(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError("0 active drivers ([]). There should only be one.")
sys.modules["triton"] = Broken("triton")
"""
        + USE
        + "print(ck.backends()['torch'])"
    )
    result = run(code, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("available")


def test_e13_every_core_module_imports_without_optional_libraries() -> None:
    code = (
        BLOCK
        + """
import importlib, json, pathlib, pkgutil
import conditioned_kernels as ck
failed = {}
for module in pkgutil.walk_packages(ck.__path__, "conditioned_kernels."):
    # The compiled library, where it lies in the package, looks like a module and is none.
    if module.name.rpartition(".")[2] in ("__main__", "_native") or "._triton" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed[module.name] = error.name
print(json.dumps(failed))
"""
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    # A command line may need its libraries, and a callback or view the library that it is for; nothing else may.
    needs = {f"conditioned_kernels.integrations.{name}" for name in ("lightning", "live", "transformers")}
    assert set(json.loads(result.stdout)) <= {"conditioned_kernels.cli", "conditioned_kernels.demo_run"} | needs


def test_g10_the_public_list_is_complete_and_sorted() -> None:
    import conditioned_kernels as ck

    assert ck.__all__ == sorted(ck.__all__)
    assert all(hasattr(ck, name) for name in ck.__all__)
    assert all(getattr(ck, name).__doc__ for name in ck.__all__ if callable(getattr(ck, name)))
