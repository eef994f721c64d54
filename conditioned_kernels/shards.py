"""A folder of safetensors shards, as transformers loads it, written so that a killed run can be continued."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from .checkpoint import Checkpoint, CheckpointError, Entry, Stored, write_safetensors

INDEX = "model.safetensors.index.json"
NOTES = ".conditioned_kernels.json"
"""In an unfinished folder: what is being written, and size and digest of every finished shard."""


def divide(entries: Mapping[str, Entry], size: int) -> dict[str, list[str]]:
    """Names of the tensors by file, in order, each file's tensors at most ``size`` bytes (one larger tensor alone)."""
    groups: list[list[str]] = []
    room = -1
    for name, entry in entries.items():
        if entry.nbytes > room:
            groups.append([])
            room = size
        groups[-1].append(name)
        room -= entry.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{at:05d}-of-{len(groups):05d}.safetensors": names for at, names in enumerate(groups, 1)}


def write_shards(
    folder: Path,
    entries: Mapping[str, Entry],
    tensor: Callable[[str], Tensor],
    *,
    size: int,
    job: str,
    force: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[str, ...]:
    """Write tensors to shards and the index that transformers reads; returns the files kept from an earlier run.

    A shard appears under its name when it is complete and on disk. Until the index is written, which is last, a hidden
    file notes the finished shards. A later call with the same job keeps those that still have their bytes, and writes
    the others again. At the end every shard is read back and compared.

    Parameters
    ----------
    folder : exists.
    entries, tensor : as in :func:`~conditioned_kernels.checkpoint.write_safetensors`.
    size : bytes of tensors per shard.
    job : everything that the values depend on; a folder of another job is refused.
    force : start over, and replace what is there.
    progress : called with the number of bytes written or kept, after each piece.

    Raises
    ------
    CheckpointError
        for a folder with other model files, a disk that is too small or fails, or a shard that reads back different.
    """
    files = divide(entries, size)
    key = hashlib.sha256(json.dumps([job, files, {k: str(v) for k, v in entries.items()}]).encode()).hexdigest()
    done = _continue(folder, files, key, force)
    kept = tuple(done)
    for name in kept:
        progress(sum(entries[each].nbytes for each in files[name]))
    left = sum(entries[each].nbytes for name in files if name not in done for each in files[name])
    if (free := shutil.disk_usage(folder).free) < left:
        raise CheckpointError(f"{folder} needs {left / 1e9:.2f} GB more, and its disk has {free / 1e9:.2f} GB free")
    for name, members in files.items():
        if name not in done:
            part = {each: entries[each] for each in members}
            done[name] = write_safetensors(folder / name, part, tensor, force=True, progress=progress)
            _write_json(folder / NOTES, {"job": key, "files": {file: asdict(stored) for file, stored in done.items()}})
    for name, stored in done.items():
        if name not in kept and not stored.matches(folder / name):
            raise CheckpointError(
                f"{folder / name} reads back different from what was written; its disk is not reliable"
            )
    with Checkpoint(folder) as back:
        if back.entries != dict(entries):
            raise CheckpointError(f"{folder} does not hold the tensors that were written; another process changed it")
    if len(files) > 1:
        weights = {each: name for name, members in files.items() for each in members}
        total = sum(entry.nbytes for entry in entries.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weights})
    (folder / NOTES).unlink(missing_ok=True)
    return kept


def _continue(folder: Path, files: Mapping[str, list[str]], key: str, force: bool) -> dict[str, Stored]:
    """The shards that an earlier run finished; removes all others."""
    notes = _notes(folder)
    others = [path for path in folder.glob("*.safetensors") if path.name not in notes.get("files", {})]
    if not force:
        if (folder / INDEX).exists() or (others and not notes):
            raise CheckpointError(f"{folder} has model files; pass --force (force=True) to replace them")
        if notes and notes["job"] != key:
            raise CheckpointError(
                f"{folder} holds the unfinished output of another command; finish it with that one, choose another "
                "folder, or pass --force (force=True) to start over"
            )
    done = {}
    if notes.get("job") == key and not force:
        for name, stored in notes["files"].items():
            if Stored(**stored).matches(folder / name):
                done[name] = Stored(**stored)
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        if path.name not in done:
            path.unlink(missing_ok=True)
    _write_json(folder / NOTES, {"job": key, "files": {name: asdict(stored) for name, stored in done.items()}})
    return done


def clear_unfinished(folder: Path) -> None:
    """Remove what a killed :func:`write_shards` left half written beside its finished shards."""
    for path in folder.glob(".*.partial") if (folder / NOTES).exists() else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _notes(folder: Path) -> dict:
    try:
        return json.loads((folder / NOTES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write_json(path: Path, value: object) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        unfinished.write_text(json.dumps(value, indent=1), encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def disk_speed(folder: Path, size: int) -> float:
    """Bytes per second at which the folder's disk takes a file of ``size`` bytes, flushed to it; it is removed."""
    path = folder / f".speed.{os.getpid()}.partial"
    piece = os.urandom(min(size, 16 << 20))
    try:
        start = time.perf_counter()
        with open(path, "xb") as file:
            for _ in range(0, size, len(piece)):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        return size / (time.perf_counter() - start)
    finally:
        path.unlink(missing_ok=True)
