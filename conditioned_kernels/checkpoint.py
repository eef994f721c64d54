"""Tensor files: read one tensor at a time, write one tensor at a time.

Reading goes through safetensors, or through ``torch.load(weights_only=True)`` for torch's own files; never
through pickle. Writing streams in safetensors' format, which the library itself can only write whole: eight
bytes with the length of a JSON header, the header, then the tensors' bytes in its order.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_WRITE_CHUNK = 16 << 20

INDEX_SUFFIX = ".index.json"
"""Of the file beside shards that says which tensor is in which."""

_MODEL_FILES = tuple(
    f"{name}{suffix}" for name in ("model.safetensors", "pytorch_model.bin") for suffix in ("", INDEX_SUFFIX)
)
"""What transformers reads of a folder: the first that is there, whatever else lies beside it."""
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt")
"""What else is read: all files of the first kind that is there."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written."""


@dataclass(frozen=True)
class Entry:
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype | None) -> Entry:
        """The same tensor in ``dtype`` if it is a floating one, and no quantized one, which has its scale elsewhere."""
        floating = self.dtype.is_floating_point and self.dtype.itemsize > 1
        return Entry(self.shape, dtype) if dtype is not None and floating else self


@dataclass(frozen=True)
class Stored:
    """Size in bytes and SHA-256 of a written file."""

    size: int
    digest: str

    def matches(self, path: Path) -> bool:
        """Whether the file is still there with these bytes; it is read, a piece at a time."""
        return path.is_file() and path.stat().st_size == self.size and file_digest(path) == self.digest


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read a piece at a time."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_WRITE_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def unfinished_file(path: Path) -> Path:
    """Where a file is written before it appears under its name; of one process."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


class Checkpoint:
    """The tensors of a file or folder, read one at a time. Use as a context manager.

    Attributes
    ----------
    path : as given.
    entries : name to :class:`Entry`, in file order.
    config : the folder's or neighboring ``config.json``, or None.
    files : those that are read. Of a folder: model.safetensors, the shards that its index names, or the same of
        pytorch_model.bin, as transformers reads it; else all files of the first kind that is there.

    Raises
    ------
    CheckpointError
        for a missing, truncated, corrupt or unsupported file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entries: dict[str, Entry] = {}
        self._stack = ExitStack()
        self._load: dict[str, Callable[[], Tensor]] = {}
        folder = self.path if self.path.is_dir() else self.path.parent
        self.config = folder / "config.json" if (folder / "config.json").is_file() else None
        self.files: list[Path] = self._files()
        try:
            for file in self.files:
                self._open_safetensors(file) if file.suffix == ".safetensors" else self._open_torch(file)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._load.clear()
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """The tensor ``name``, read now."""
        try:
            return self._load[name]()
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"cannot read {name!r} from {self.path}: {error}") from error

    def _files(self) -> list[Path]:
        if not self.path.exists():
            raise CheckpointError(f"no such file or folder: {self.path}")
        named = [self.path / name for name in _MODEL_FILES] if self.path.is_dir() else [self.path]
        if found := next((path for path in named if path.is_file()), None):
            return _shards(found) if found.name.endswith(INDEX_SUFFIX) else [found]
        for pattern in _PATTERNS:
            if files := sorted(self.path.glob(pattern)):
                return files
        raise CheckpointError(f"{self.path} has no {', '.join(_PATTERNS).replace('*', '')} file")

    def _open_safetensors(self, file: Path) -> None:
        safe_open = _safe_open()
        try:
            handle = self._stack.enter_context(safe_open(file, framework="pt"))
            for name in handle.offset_keys() if hasattr(handle, "offset_keys") else handle.keys():
                part = handle.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise CheckpointError(f"{file}: {name!r} has the unsupported dtype {part.get_dtype()}")
                self._add(file, name, Entry(tuple(part.get_shape()), dtype), partial(handle.get_tensor, name))
        except CheckpointError:
            raise
        except Exception as error:  # safetensors raises its own class for every kind of damage
            raise CheckpointError(f"{file} is no complete safetensors file: {error}") from error

    def _open_torch(self, file: Path) -> None:
        try:
            # Files of torch before 1.6 are no zip files, and cannot be mapped.
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except Exception as error:  # torch raises many classes for damaged or pickled content
            # What follows the first sentence advises to load without weights_only.
            why = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
            raise CheckpointError(f"{file} cannot be loaded as plain tensors (weights_only=True): {why}") from error
        for nested in ("state_dict", "model"):
            if isinstance(loaded, Mapping) and isinstance(loaded.get(nested), Mapping):
                loaded = loaded[nested]
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"{file} holds a {type(loaded).__name__}, expected a state_dict")
        for name, value in loaded.items():
            if isinstance(value, Tensor):
                self._add(file, str(name), Entry(tuple(value.shape), value.dtype), partial(_given, value))

    def _add(self, file: Path, name: str, entry: Entry, load: Callable[[], Tensor]) -> None:
        if name in self.entries:
            raise CheckpointError(f"{file}: the tensor {name!r} is in two files of {self.path}")
        self.entries[name], self._load[name] = entry, load


def _shards(index: Path) -> list[Path]:
    """The files that an index names, each once."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [index.parent / name for name in dict.fromkeys(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of shards: {type(error).__name__}: {error}") from error
    for file in files:
        if file.parent != index.parent or file.suffix == ".json":
            raise CheckpointError(f"{index} names {str(file)!r}, which is no shard beside it")
        if not file.is_file():
            raise CheckpointError(f"{index} names {file.name}, which is missing; copy or download it again")
    return files


def write_safetensors(
    path: str | Path,
    entries: Mapping[str, Entry],
    tensor: Callable[[str], Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Stored:
    """Write a safetensors file tensor by tensor, atomically.

    The file appears under its name only when it is complete and on disk; an error or Ctrl-C before that leaves
    what was there, and nothing else.

    Parameters
    ----------
    path : the file; its folder must exist.
    entries : what will be written, in order.
    tensor : called once per name, in order; must return what ``entries`` promised.
    metadata : strings for the header.
    force : replace an existing file.
    progress : called with the number of bytes written, after each piece.

    Returns
    -------
    Size and digest of what was written.

    Raises
    ------
    CheckpointError
        if the file exists and ``force`` is false, or the disk is too small, full or read-only.
    """
    path = Path(path)
    if path.exists() and not force:
        raise CheckpointError(f"{path} exists; pass --force (force=True) to replace it")
    header = _header(entries, {"format": "pt", **(metadata or {})})
    size = 8 + len(header) + sum(entry.nbytes for entry in entries.values())
    unfinished = unfinished_file(path)
    try:
        if (free := shutil.disk_usage(path.parent).free) < size:
            raise CheckpointError(f"{path} needs {size / 1e9:.2f} GB, and its disk has {free / 1e9:.2f} GB free")
        digest = hashlib.sha256()
        with open(unfinished, "xb") as file:

            def write(piece: bytes | memoryview) -> None:
                digest.update(piece)
                file.write(piece)

            write(len(header).to_bytes(8, "little") + header)
            for name, entry in entries.items():
                _write_tensor(write, name, entry, tensor(name), progress)
            file.flush()
            os.fsync(file.fileno())
        if path.exists() and not force:
            raise CheckpointError(f"{path} was created in the meantime; pass --force (force=True) to replace it")
        os.replace(unfinished, path)
        return Stored(size, digest.hexdigest())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {reason(error)}; nothing was changed") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def reason(error: OSError) -> str:
    """Why a file could not be written, in words."""
    return "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, entry in entries.items():
        if entry.dtype not in _NAMES:
            raise CheckpointError(f"{name!r} has dtype {entry.dtype}, which safetensors does not store")
        end = offset + entry.nbytes
        header[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    return text + b" " * (-len(text) % 8)


def _write_tensor(
    write: Callable[[memoryview], None], name: str, entry: Entry, value: Tensor, progress: Callable[[int], None]
) -> None:
    if tuple(value.shape) != entry.shape or value.dtype != entry.dtype:
        raise CheckpointError(
            f"{name!r} was to be {entry.dtype} {entry.shape}, got {value.dtype} {tuple(value.shape)}; "
            "the file is not written"
        )
    if not value.numel():
        return
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for piece in _pieces(data):
        write(piece)
        progress(len(piece))


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _WRITE_CHUNK):
        yield data[start : start + _WRITE_CHUNK]


def _given(value: Tensor) -> Tensor:
    return value


def _safe_open() -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError("safetensors is not installed: pip install 'conditioned_kernels[cli]'") from error
    return safe_open
