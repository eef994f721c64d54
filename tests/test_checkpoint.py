"""Tensor files: what is written reads back, and nothing is lost when something fails."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conditioned_kernels import checkpoint as files
from conditioned_kernels.checkpoint import Checkpoint, CheckpointError, Entry, write_safetensors

TENSORS = {
    "fp32": torch.randn(3, 4),
    "bf16": torch.randn(5).bfloat16(),
    "fp16 scalar": torch.tensor(1.5, dtype=torch.float16),
    "empty": torch.empty(0, 7),
    "int": torch.arange(6).view(2, 3),
    "bool": torch.tensor([True, False]),
    "strided": torch.randn(4, 6).t(),
    "name with \x1b[31m and 'quotes'\"": torch.zeros(1),
}


def write(path, tensors, **options):
    entries = {name: Entry(tuple(value.shape), value.dtype) for name, value in tensors.items()}
    write_safetensors(path, entries, tensors.__getitem__, **options)


def test_safetensors_reads_what_was_written(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, TENSORS)
    loaded = load_file(path)
    assert set(loaded) == set(TENSORS)
    for name, value in TENSORS.items():
        assert torch.equal(loaded[name], value), name
    with safe_open(path, "pt") as handle:
        assert handle.metadata() == {"format": "pt"}
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(
            lambda s: s != "__metadata__"
        ),
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3), st.sampled_from([torch.float32, torch.bfloat16, torch.int8])
        ),
        max_size=5,
    )
)
def test_any_names_shapes_and_dtypes(tmp_path_factory, plan):
    tensors = {
        name: torch.arange(1000)[: torch.Size(shape).numel()].view(shape).to(dtype)
        for name, (shape, dtype) in plan.items()
    }
    path = tmp_path_factory.mktemp("any") / "a.safetensors"
    write(path, tensors)
    with Checkpoint(path) as checkpoint:
        assert set(checkpoint.entries) == set(tensors)
        for name, value in tensors.items():
            assert checkpoint.entries[name] == Entry(tuple(value.shape), value.dtype)
            assert torch.equal(checkpoint.tensor(name), value)


def test_folder_of_shards_and_torch_files(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.entries) == ["a", "b"]
        assert torch.equal(checkpoint.tensor("b"), torch.zeros(3))
    for state in ({"a": torch.ones(2)}, {"state_dict": {"a": torch.ones(2)}}):
        torch.save(state, tmp_path / "a.pt")
        with Checkpoint(tmp_path / "a.pt") as checkpoint:
            assert torch.equal(checkpoint.tensor("a"), torch.ones(2))


def test_one_tensor_in_two_shards_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match="'a' is in two files"):
        Checkpoint(tmp_path)


def shards_with_index(folder, weight_map=None):
    for name in ("a", "b"):
        save_file({name: torch.ones(2)}, folder / f"model-{name}.safetensors")
    index = {
        "weight_map": {"a": "model-a.safetensors", "b": "model-b.safetensors"} if weight_map is None else weight_map
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_folder_is_read_as_transformers_reads_it(tmp_path):
    """The named files, and not an adapter, another format's copy or an optimizer that lies beside them."""
    torch.save({"p": torch.ones(2)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps(Exploit(tmp_path / "owned")))
    with Checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.entries) == ["p"]
    shards_with_index(tmp_path)
    save_file({"lora": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        with Checkpoint(source) as checkpoint:
            assert set(checkpoint.entries) == {"a", "b"} and torch.equal(checkpoint.tensor("b"), torch.ones(2))
    save_file({"whole": torch.ones(2)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.entries) == ["whole"]


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"a": "model-a.safetensors", "b": "model-c.safetensors"}, r"names model-c\.safetensors, which is missing"),
        ({"a": "../model-a.safetensors"}, "no shard beside it"),
        ({"a": "/etc/passwd"}, "no shard beside it"),
        ({"a": ["model-a.safetensors"]}, "no index of shards"),
        ([1], "no index of shards"),
    ],
)
def test_an_index_that_does_not_hold_is_refused(tmp_path, weight_map, says):
    shards_with_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint(tmp_path)


def test_a_cast_leaves_quantized_tensors_alone():
    """B26: bytes of float8 are no weights without their scale, which is another tensor."""
    assert Entry((2,), torch.float8_e4m3fn).cast(torch.bfloat16).dtype == torch.float8_e4m3fn
    assert Entry((2,), torch.float32).cast(torch.bfloat16).dtype == torch.bfloat16


class Exploit:
    """Runs a command when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_pickle_is_never_executed(tmp_path, save):
    save({"a": Exploit(tmp_path / "owned")}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="weights_only=True"):
        Checkpoint(tmp_path / "a.pt")
    assert not (tmp_path / "owned").exists()


def good_file(path):
    write(path, {"weight": torch.randn(64, 64), "bias": torch.randn(64)})
    return path.read_bytes()


@pytest.mark.parametrize(
    "damage",
    {
        "empty": lambda data: b"",
        "header length only": lambda data: data[:8],
        "truncated header": lambda data: data[:40],
        "truncated data": lambda data: data[:-5],
        "trailing data": lambda data: data + b"1234",
        "huge header": lambda data: (2**62).to_bytes(8, "little") + data[8:],
        "not json": lambda data: data[:8] + b"x" * (len(data) - 8),
        "negative offset": lambda data: data.replace(b'"data_offsets":[0', b'"data_offsets":[-'),
    }.items(),
    ids=lambda item: item[0],
)
def test_damaged_safetensors_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "a.safetensors"
    path.write_bytes(damage[1](good_file(path)))
    with pytest.raises(CheckpointError, match=r"a\.safetensors is no complete safetensors file"):
        Checkpoint(path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bytes_never_crash(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    content = bytearray(good_file(path))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, 200))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    try:
        with Checkpoint(path) as checkpoint:
            for name in checkpoint.entries:
                assert tuple(checkpoint.tensor(name).shape) == checkpoint.entries[name].shape
    except CheckpointError:
        pass


def test_missing_and_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        Checkpoint(tmp_path / "nothing.safetensors")
    with pytest.raises(CheckpointError, match=r"has no \.safetensors"):
        Checkpoint(tmp_path)


def test_an_existing_file_is_kept_without_force(tmp_path):
    path = tmp_path / "a.safetensors"
    before = good_file(path)
    with pytest.raises(CheckpointError, match="pass --force"):
        write(path, {"weight": torch.zeros(2)})
    assert path.read_bytes() == before
    write(path, {"weight": torch.zeros(2)}, force=True)
    assert torch.equal(load_file(path)["weight"], torch.zeros(2))


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    before = good_file(path)
    calls = []

    def full(write, name, entry, value, progress):
        write(b"half")
        calls.append(name)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_write_tensor", full)
    with pytest.raises(CheckpointError, match="the disk is full; nothing was changed"):
        write(path, {"a": torch.zeros(2), "b": torch.zeros(2)}, force=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_small_disk_is_refused_before_writing(tmp_path, monkeypatch):
    usage = files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CheckpointError, match="GB free"):
        write(tmp_path / "a.safetensors", {"a": torch.zeros(200)})
    assert not os.listdir(tmp_path)


def test_a_read_only_target(tmp_path, monkeypatch):
    def refuse(path, mode):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files, "open", refuse, raising=False)
    with pytest.raises(CheckpointError, match="Read-only file system; nothing was changed"):
        write(tmp_path / "a.safetensors", {"a": torch.zeros(1)})
    assert not os.listdir(tmp_path)


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        write(tmp_path / "file" / "a.safetensors", {"a": torch.zeros(1)})


def test_a_value_unlike_its_entry_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="was to be"):
        write_safetensors(tmp_path / "a.safetensors", {"a": Entry((2,), torch.float32)}, lambda name: torch.zeros(3))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_writer_never_shows_a_partial_file(tmp_path, sent):
    script = textwrap.dedent(
        """
        import sys, time, torch
        from conditioned_kernels.checkpoint import Entry, write_safetensors
        def tensor(name):
            print(name, flush=True)
            if name == "b":
                time.sleep(60)
            return torch.zeros(1000)
        write_safetensors(sys.argv[1], {n: Entry((1000,), torch.float32) for n in "abc"}, tensor)
        """
    )
    path = tmp_path / "a.safetensors"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout.readline() == b"a\n"
    assert process.stdout.readline() == b"b\n"
    time.sleep(0.1)
    process.send_signal(sent)
    process.wait(20)
    assert process.returncode != 0
    assert not path.exists()
    if sent == signal.SIGINT:
        assert not os.listdir(tmp_path)


def test_header_is_aligned_and_in_order(tmp_path):
    path = tmp_path / "a.safetensors"
    good_file(path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert list(json.loads(data[8 : 8 + length])) == ["__metadata__", "weight", "bias"]
