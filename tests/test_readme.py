"""What the README says is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_opens_with_the_two_commands():
    block = re.search(r"```\n(.*?)```", README, re.DOTALL)[1]
    assert block == 'pip install ".[demo]" && conditioned-kernels demo\npip install ".[test]" && pytest\n'


def test_generated_parts_are_up_to_date():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.readme", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_examples_run():
    pytest.importorskip("transformers")

    class MyAttention(nn.Module):
        """Any class of a user's."""

    names = {"MyAttention": MyAttention, "example_input": torch.zeros(1, 4, dtype=torch.long)}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(block, names)


def test_command_line_examples_name_commands_that_exist():
    from conditioned_kernels import cli

    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    named = set(re.findall(r"^conditioned-kernels (\w+)", README, re.MULTILINE))
    assert named
    assert named <= commands
