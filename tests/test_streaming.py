"""A model written block by block to shards: transformers loads it, a killed run continues, little memory is used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import conditioned_kernels as ck
from conditioned_kernels import shards, sources
from conditioned_kernels.architectures import build
from conditioned_kernels.checkpoint import Checkpoint, CheckpointError, Entry
from conditioned_kernels.file_schemes import InitOptions
from conditioned_kernels.sources import init_file

transformers = pytest.importorskip("transformers")

CONFIG = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"num_hidden_layers": 3, "vocab_size": 128, "pad_token_id": 0}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


def write(out: Path, config: Path, **more: object) -> sources.Written:
    options = {"options": InitOptions(), "config": config, "dtype": torch.bfloat16, "shard_size": 60_000} | more
    return init_file("transformers:llama", out, **options)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def test_transformers_loads_the_shards(tmp_path: Path, config: Path) -> None:
    out = tmp_path / "llama"
    written = write(out, config)
    files = sorted(path.name for path in out.iterdir())
    number = len([name for name in files if name.endswith(".safetensors")])
    assert number > 4 and f"model-00001-of-{number:05d}.safetensors" in files
    assert {"config.json", shards.INDEX} <= set(files) and not any(name.startswith(".") for name in files)
    assert max(sum(v.nbytes for v in load_file(path).values()) for path in out.glob("*.safetensors")) <= 60_000
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert ck.verify(model, written.report)
    usual = build("transformers:llama", config=config).bfloat16()
    ck.conditioned_(usual)
    theirs = usual.state_dict()
    attention = {entry.parameter for entry in written.report.touched}
    assert len(attention) == 9 and written.nbytes == sum(value.nbytes for value in theirs.values())
    for name, value in model.state_dict().items():
        if name in attention or "norm" in name:
            assert torch.equal(value, theirs[name]), name
        else:  # the library's rule, drawn block by block
            assert 0.8 < float(value.float().std() / theirs[name].float().std()) < 1.25, name
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)


def test_an_unfinished_folder_is_not_continued_from_another_state_of_the_source(tmp_path: Path, config: Path) -> None:
    """Its shards hold what the checkpoint was when they were written."""
    source, out = tmp_path / "source", tmp_path / "out"
    write(source, config)

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    def again(**more: object) -> sources.Written:
        return init_file(str(source), out, options=InitOptions(), shard_size=60_000, **more)

    with pytest.raises(KeyboardInterrupt):
        again(progress=stop)
    os.utime(next(source.glob("*-00001-of-*")), (1, 1))
    with pytest.raises(CheckpointError, match="unfinished output of another command"):
        again()
    assert not again(force=True).kept


def test_attention_only(tmp_path: Path, config: Path) -> None:
    written = write(tmp_path / "a", config, attention_only=True)
    stored = tensors(tmp_path / "a")
    assert set(stored) == {entry.parameter for entry in written.report.touched}
    usual = build("transformers:llama", config=config).bfloat16()
    ck.conditioned_(usual)
    assert all(torch.equal(value, usual.state_dict()[name]) for name, value in stored.items())


def test_the_bytes_do_not_depend_on_the_shards(tmp_path: Path, config: Path) -> None:
    write(tmp_path / "many", config, shard_size=60_000)
    write(tmp_path / "one", config, shard_size=10**9)
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    many, one = tensors(tmp_path / "many"), tensors(tmp_path / "one")
    assert many.keys() == one.keys() and all(torch.equal(many[name], one[name]) for name in one)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    config = tmp_path / "gpt2.json"
    config.write_text(json.dumps({"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, "n_positions": 16}))
    written = init_file("transformers:gpt2", tmp_path / "out", options=InitOptions(), config=config, shard_size=30_000)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert ck.verify(model, written.report)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert sum("wte" in name or "lm_head" in name for name in tensors(tmp_path / "out")) == 1
    # The rule of the parent: output projections are scaled by 1 / sqrt(2 layers).
    block = model.transformer.h[1]
    assert float(block.mlp.c_proj.weight.std() / block.mlp.c_fc.weight.std()) == pytest.approx(0.5, rel=0.15)


def test_a_checkpoint_is_rewritten_in_shards(tmp_path: Path, config: Path) -> None:
    write(tmp_path / "first", config)
    again = init_file(str(tmp_path / "first"), tmp_path / "again", options=InitOptions(seed=5), shard_size=50_000)
    first, second = tensors(tmp_path / "first"), tensors(tmp_path / "again")
    drawn = {entry.parameter for entry in again.report.touched if entry.role != "v"}
    assert {name for name in first if not torch.equal(first[name], second[name])} == drawn
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again") is not None


def interrupted_after(number: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[str]:
    """Make the writer fail after so many shards; returns the names it goes through."""
    real, calls = shards.write_safetensors, []

    def failing(path: Path, *args: object, **more: object) -> object:
        calls.append(Path(path).name)
        if len(calls) > number:
            raise error
        return real(path, *args, **more)

    monkeypatch.setattr(shards, "write_safetensors", failing)
    return calls


def test_a_stopped_run_continues(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "whole", config)
    wanted = tensors(tmp_path / "whole")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupted_after(4, patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            write(out, config)
    finished = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(finished) == 4 and not (out / shards.INDEX).exists()
    damaged = out / finished[1]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)  # the size is right, the bytes are not
    (out / finished[2]).unlink()
    (out / f".{finished[3]}.123.partial").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="another command"):
        write(out, config, options=InitOptions(seed=1))
    with monkeypatch.context() as patch:
        calls = interrupted_after(10**6, patch, KeyboardInterrupt())
        written = write(out, config)
    assert set(written.kept) == {finished[0], finished[3]}
    assert not set(calls) & set(written.kept) and finished[1] in calls and finished[2] in calls
    stored = tensors(out)
    assert stored.keys() == wanted.keys() and all(torch.equal(stored[name], wanted[name]) for name in wanted)
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    with pytest.raises(CheckpointError, match="--force"):
        write(out, config)
    assert not write(out, config, options=InitOptions(seed=1), force=True).kept


def test_a_killed_process_continues(tmp_path: Path) -> None:
    """SIGKILL, which no code of ours sees."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG | {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "conditioned_kernels", "init", "transformers:llama", "--config", str(config)]
    command += ["--out", str(out), "--shard-size", "2MB", "--attention-only"]
    environment = os.environ | {"PYTHONPATH": str(Path(ck.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while len(list(out.glob("*.safetensors"))) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "shards of an earlier run" in done.stdout and "GB/s" in done.stdout and "the disk alone" in done.stdout
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert sum(after[name] == stamp for name, stamp in before.items()) >= len(before) - 1
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    with Checkpoint(out) as checkpoint:
        assert len(checkpoint.entries) == 24


def test_what_reads_back_different_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shards.write_safetensors

    def unreliable(path: Path, *args: object, **more: object) -> object:
        stored = real(path, *args, **more)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return stored

    monkeypatch.setattr(shards, "write_safetensors", unreliable)
    entries = {"a": Entry((4,), torch.float32)}
    with pytest.raises(CheckpointError, match="reads back different"):
        shards.write_shards(tmp_path, entries, lambda _: torch.ones(4), size=100, job="")
    assert not (tmp_path / shards.INDEX).exists()


def test_other_files_are_not_replaced(tmp_path: Path, config: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="has model files; pass --force"):
        write(tmp_path / "out", config)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"mine"
    with pytest.raises(CheckpointError, match="--out must be a folder"):
        write(tmp_path / "a.safetensors", config)
    with pytest.raises(CheckpointError, match="positive number"):
        write(tmp_path / "b", config, shard_size=0)


def test_a_disk_that_is_too_small_is_seen_before_anything_is_drawn(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match="GB more, and its disk has"):
        write(tmp_path / "out", config)


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("300", 300), ("2B", 2)])
def test_sizes(text: str, size: int) -> None:
    from conditioned_kernels.cli import _parse_size

    assert _parse_size(text) == size
    for wrong in ("", "GB", "-1GB", "1 apple", "0"):
        with pytest.raises(ValueError, match="expected a size"):
            _parse_size(wrong)


def test_shards_are_filled_in_order() -> None:
    entries = {name: Entry((size,), torch.int8) for name, size in (("a", 3), ("b", 3), ("c", 9), ("d", 1), ("e", 6))}
    files = shards.divide(entries, 7)
    assert list(files.values()) == [["a", "b"], ["c"], ["d", "e"]]
    assert next(iter(files)) == "model-00001-of-00003.safetensors"
