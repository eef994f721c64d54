"""``init --scheme``: every initialization to files, as a whole, a block at a time, and from checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import conditioned_kernels as ck
from conditioned_kernels import cli
from conditioned_kernels.architectures import build
from conditioned_kernels.file_schemes import FILE_SCHEMES

pytest.importorskip("transformers")

BERT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
BERT |= {"max_position_embeddings": 16, "pad_token_id": 0}
WEIGHTS = {
    f"bert.encoder.layer.{i}.attention.{part}.weight"
    for i in range(2)
    for part in ("self.query", "self.key", "self.value", "output.dense")
}
"""W_O lies beside the attention module."""

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``init``; returns the exit code and what it says on both streams, in one line."""

    def call(*args: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["conditioned-kernels", "init", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, " ".join("".join(capsys.readouterr()).split())

    return call


@pytest.fixture
def bert(tmp_path: Path) -> tuple[str, ...]:
    """The arguments that name a small BERT."""
    (tmp_path / "bert.json").write_text(json.dumps(BERT))
    return ("transformers:bert", "--config", str(tmp_path / "bert.json"))


def built(bert: tuple[str, ...], seed: int = 0) -> nn.Module:
    return build(bert[0], config=bert[2], seed=seed)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: value for file in files for name, value in load_file(file).items()}


def attention(model: nn.Module, names: set[str] = WEIGHTS) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if name in names}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


CASES = [
    ("conditioned", ["--value", "semi_orthogonal", "--gain", "q=2,k=0.5"], {"value": "semi_orthogonal"}),
    ("mimetic", ["--qk", "0.5,0.6", "--vo", "0.2,0.3"], {"qk": (0.5, 0.6), "vo": (0.2, 0.3)}),
    ("trunc_normal", ["--std", "0.05"], {"std": 0.05}),
    ("xavier", [], {}),
    ("kaiming", [], {}),
    ("orthogonal", [], {}),
]
CASES[0][2]["gain"] = {"q": 2, "k": 0.5}


@pytest.mark.parametrize(("scheme", "args", "options"), CASES, ids=[case[0] for case in CASES])
def test_a_file_holds_what_the_function_makes(
    run: Run, bert: tuple[str, ...], tmp_path: Path, scheme: str, args: list[str], options: dict[str, object]
) -> None:
    """Whole, the attention alone, in shards, and from a checkpoint: always the same attention weights."""
    command = [*bert, "--scheme", scheme, "--seed", 3, *args]
    code, said = run(*command, "--out", tmp_path / "whole.safetensors")
    assert code == 0, said
    assert scheme.split("_")[0] in said
    model = built(bert, seed=3)
    ck.initialize_(model, scheme, seed=3, **options)
    whole = tensors(tmp_path / "whole.safetensors")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in whole.items())
    written = WEIGHTS if scheme == "mimetic" else {name for name in WEIGHTS if "output" not in name}
    wanted = attention(model, written)
    assert run(*command, "--out", tmp_path / "only.safetensors", "--attention-only")[0] == 0
    same(tensors(tmp_path / "only.safetensors"), wanted)
    assert run(*command, "--out", tmp_path / "shards", "--shard-size", "20KB")[0] == 0
    shards = tensors(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    same({name: shards[name] for name in written}, wanted)
    assert set(shards) == set(whole)
    save_file({name: value.clone() for name, value in built(bert).state_dict().items()}, tmp_path / "old.safetensors")
    code, said = run(tmp_path / "old.safetensors", "--like", *command, "--out", tmp_path / "new.safetensors")
    assert code == 0, said
    old, new = tensors(tmp_path / "old.safetensors"), tensors(tmp_path / "new.safetensors")
    same({name: new[name] for name in written}, wanted)
    assert {name for name in old if not torch.equal(old[name], new[name])} == written


def test_what_mimetic_leaves_alone_stays_as_it_was(run: Run, bert: tuple[str, ...], tmp_path: Path) -> None:
    old = built(bert, seed=4).state_dict()
    save_file({name: value.clone() for name, value in old.items()}, tmp_path / "old.safetensors")
    command = [tmp_path / "old.safetensors", "--like", *bert, "--scheme", "mimetic", "--vo", "none"]
    assert run(*command, "--out", tmp_path / "new.safetensors", "--attention-only")[0] == 0
    new = tensors(tmp_path / "new.safetensors")
    assert set(new) == WEIGHTS
    assert {name for name in new if not torch.equal(old[name], new[name])} == {
        name for name in WEIGHTS if "query" in name or "key" in name
    }


def test_the_default_is_the_models_own(run: Run, bert: tuple[str, ...], tmp_path: Path) -> None:
    assert run(*bert, "--scheme", "default", "--seed", 5, "--out", tmp_path / "a.safetensors")[0] == 0
    state = built(bert, seed=5).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in tensors(tmp_path / "a.safetensors").items())
    assert run(*bert, "--scheme", "default", "--out", tmp_path / "shards", "--shard-size", "20KB")[0] == 0
    query = tensors(tmp_path / "shards")["bert.encoder.layer.1.attention.self.query.weight"]
    assert float(query.std()) == pytest.approx(0.02, rel=0.15)


def test_mimetic_writes_positions_of_a_whole_model(run: Run, bert: tuple[str, ...], tmp_path: Path) -> None:
    command = [*bert, "--scheme", "mimetic", "--positions", "sinusoidal"]
    assert run(*command, "--out", tmp_path / "a.safetensors")[0] == 0
    model = built(bert)
    ck.mimetic_(model, positions="sinusoidal")
    table = "bert.embeddings.position_embeddings.weight"
    assert torch.equal(tensors(tmp_path / "a.safetensors")[table], model.state_dict()[table])
    for args in (["--attention-only"], ["--shard-size", "20KB"]):
        code, said = run(*command, "--out", tmp_path / "b", *args)
        assert code == 2 and "a position table lies outside of attention, so the source must be" in said
    assert not (tmp_path / "b").exists()


def test_weights_selected_from_a_teacher(run: Run, bert: tuple[str, ...], tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    large.write_text(json.dumps(BERT | {"hidden_size": 64, "num_hidden_layers": 4}))
    assert run(bert[0], "--config", large, "--out", tmp_path / "teacher", "--scheme", "default")[0] == 0
    command = [*bert, "--scheme", "weight_selection", "--layers", "uniform", "--elements", "consecutive"]
    out = tmp_path / "a.safetensors"
    code, said = run(*command, "--teacher", tmp_path / "teacher", "--leave", "cls.", "--out", out)
    assert code == 0, said
    model = built(bert)
    ck.weight_selection_(model, tmp_path / "teacher", layers="uniform", elements="consecutive", leave=("cls.",))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in tensors(out).items())
    (tmp_path / "teacher" / "config.json").unlink()
    alone = ["--teacher", tmp_path / "teacher" / "model.safetensors", "--out", tmp_path / "b.safetensors"]
    code, said = run(*command, *alone)
    assert code == 2 and "like= or config=" in said
    assert run(*command, *alone, "--teacher-like", bert[0], "--teacher-config", large, "--leave", "cls.")[0] == 0
    same(tensors(tmp_path / "b.safetensors"), tensors(out))
    for more in (["--attention-only"], ["--shard-size", "20KB"]):
        code, said = run(*command, "--teacher", tmp_path / "teacher", "--out", tmp_path / "c", *more)
        assert code == 2 and "writes every parameter of a new model, so the source must be an architecture" in said
    code, said = run(out, "--like", *command, "--teacher", tmp_path / "teacher", "--out", tmp_path / "c")
    assert code == 2 and "the source must be an architecture" in said
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "shards"])
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--scheme", "spectral_conditioning"], f"expected one of {', '.join(FILE_SCHEMES)}, got"),
        (["--scheme", "mimetic", "--gain", "2"], "--gain is not an option of --scheme mimetic, which has --qk, --vo"),
        (["--scheme", "xavier", "--std", "2"], "--std is not an option of --scheme xavier, which has none of its own"),
        (["--teacher-like", "x"], "--teacher-like is not an option of --scheme conditioned"),
        (["--scheme", "mimetic", "--qk", "1"], "expected two numbers such as 0.7,0.7, or none, got '1'"),
        (["--scheme", "mimetic", "--vo", "0,0"], "vo must be None or (alpha, beta)"),
        (["--scheme", "trunc_normal", "--std", "1"], "std must be at most 0.3"),
        (["--value", "wrong"], "value must be one of"),
        (["--scheme", "weight_selection"], "needs the option 'teacher'"),
        (["--scheme", "weight_selection", "--teacher", "nowhere"], "no such file or folder: nowhere"),
    ],
)
def test_errors_are_one_sentence_and_leave_nothing(
    run: Run, tmp_path: Path, args: list[str], says: str, streamed: bool
) -> None:
    more = ["--shard-size", "1KB"] if streamed else []
    code, said = run("torch:encoder-1x16x2", "--out", tmp_path / "out", *args, *more)
    assert code == 2
    assert says in said or (streamed and "the source must be an architecture" in said)
    assert not list(tmp_path.iterdir())


def test_a_weight_outside_of_its_layers_block_is_refused(run: Run, tmp_path: Path) -> None:
    """W_O in a list of its own is in another block than its layer, so it has no values when the layer is drawn."""
    (tmp_path / "odd.py").write_text(ODD)
    source = f"python:{tmp_path / 'odd.py'}:build"
    command = [source, "--scheme", "mimetic", "--out", tmp_path / "out"]
    code, said = run(*command, "--shard-size", "1KB")
    assert code == 2 and "lies outside of its attention layer's block; write the model without --shard-size" in said
    assert not (tmp_path / "out").exists()
    assert run(*command)[0] == 0


ODD = """
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfAttention, BertSelfOutput

CONFIG = BertConfig(hidden_size=16, num_attention_heads=2, attn_implementation="eager")


def build():
    model = nn.Module()
    model.attention = nn.ModuleDict({"self": BertSelfAttention(CONFIG), "output": BertSelfOutput(CONFIG)})
    return model
"""
