"""What the README says is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import conditioned_kernels as ck

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


def test_python_examples_run(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)  # an example writes a file

    class MyAttention(nn.Module):
        """Any class of a user's."""

    names = {"MyAttention": MyAttention, "example_input": torch.zeros(1, 4, dtype=torch.long)}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(block, names)


class Packed(nn.Module):
    """Shaped like flash-attention's MHA."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.Wqkv = 4, nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.Wqkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Apart(nn.Module):
    """Shaped like x-transformers' Attention."""

    def __init__(self):
        super().__init__()
        self.heads = 4
        self.to_q, self.to_k, self.to_v = (nn.Linear(16, 32, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(("cls", "example"), [(Packed, "packed"), (Apart, "separate")])
def test_registration_examples_agree_with_the_forward(cls, example):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        if f"def {example}(" in block:
            exec(block, names)
    layouts = {cls: names[example]}
    model = cls()
    assert ck.probe(model, torch.randn(1, 3, 16), layouts=layouts).ok
    assert len(ck.conditioned_(model, layouts=layouts).touched) == 3
    assert ck.probe(model, torch.randn(1, 3, 16), layouts=layouts).ok


def test_command_line_examples_name_commands_that_exist():
    from conditioned_kernels import cli

    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    named = set(re.findall(r"^conditioned-kernels (\w+)", README, re.MULTILINE))
    assert named
    assert named <= commands
