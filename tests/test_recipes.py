"""The README's recipes for sharded and huge models, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import conditioned_kernels as ck

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"```python (torchrun|script)\n(.*?)```", README, re.DOTALL)
START = {
    "script": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
}
LIMIT = 150
"""Seconds after which a recipe counts as hung."""


def test_there_is_one_of_each_kind() -> None:
    assert [kind for kind, _ in RECIPES] == ["torchrun", "torchrun", "script", "script"]
    for word in ("fully_shard", "parallelize_module", "init_empty_weights", "lightning"):
        assert any(word in text for _, text in RECIPES)


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_recipe_runs(number: int, tmp_path: Path) -> None:
    kind, text = RECIPES[number]
    for library in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE):
        pytest.importorskip(library)
    script = tmp_path / "train.py"
    script.write_text(text)
    more = ["--master-port", "0", "--standalone"] if kind == "torchrun" else []
    environment = os.environ | {"PYTHONPATH": str(Path(ck.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*START[kind], *more, str(script)],
        cwd=tmp_path,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
