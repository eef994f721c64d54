"""Finds the compiled extension, or says why there is none. Loaded at first use, never at import."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

import torch


class Extension(NamedTuple):
    """What was found: whether the ops are registered, whether they have CUDA code, and one sentence about it."""

    available: bool
    cuda: bool
    sentence: str


@functools.cache
def load() -> Extension:
    """Load the library once per process; every kind of failure becomes a sentence."""
    if os.environ.get("CK_NO_EXTENSION") == "1":
        return Extension(False, False, "switched off by CK_NO_EXTENSION=1")
    library = find()
    if library is None:
        return Extension(
            False, False, "not built; python -m conditioned_kernels.build compiles it (needs a C++ compiler)"
        )
    record = _record(library)
    if "sources" in record and record["sources"] != _sources():
        why = f"{library} was built from other sources; python -m conditioned_kernels.build compiles it again"
        return Extension(False, False, why)
    try:
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        return Extension(False, False, f"{library} cannot be loaded: {_why(str(error.__cause__ or error), record)}")
    cuda = bool(record.get("cuda"))
    code = f"CPU and CUDA ({', '.join(_targets(record['cuda']))})" if cuda else "CPU"
    return Extension(True, cuda, f"available: {code} code, {_built(record)}; running torch {torch.__version__}")


def find() -> Path | None:
    """The library in the package folder, else in the user's cache folder."""
    from .build import LIBRARY, user_folder

    for folder in (Path(__file__).parent, user_folder()):
        if (folder / LIBRARY).is_file():
            return folder / LIBRARY
    return None


def _sources() -> str:
    from .build import source_digest

    return source_digest()


def _record(library: Path) -> dict:
    from .build import RECORD

    try:
        return json.loads((library.parent / RECORD).read_text())
    except (OSError, ValueError):
        return {}


def _built(record: dict) -> str:
    if not record:
        return "built by an unknown build"
    return f"built with torch {record.get('torch')} for torch >= {record.get('stable_abi')} on {record.get('machine')}"


def _targets(flags: list[str]) -> list[str]:
    return [target for flag in flags for target in re.findall(r"(?:sm|compute)_\w+", flag.partition("code=")[2])]


def _why(error: str, record: dict) -> str:
    """The cause of a loader's error in plain words, then what was built and what runs, then the remedy."""
    machine = platform.machine()
    if record.get("machine", machine) != machine:
        cause = f"wrong architecture (this machine is {machine})"
    elif "undefined symbol" in error or "symbol not found" in error.lower():
        cause = f"built for another torch ({error.rpartition('undefined symbol: ')[2].strip() or error} is missing)"
    elif "ELF" in error or "file too short" in error or "wrong" in error or "not a mach-o" in error.lower():
        cause = f"damaged, or for another machine ({error.rpartition(': ')[2]})"
    else:
        cause = error.splitlines()[0] if error else "unknown error"
    return (
        f"{cause}; {_built(record)}, running torch {torch.__version__}; "
        "python -m conditioned_kernels.build compiles it again"
    )
