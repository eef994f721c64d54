"""The extension for tests: the installed one, or csrc compiled once into a cache folder; and the sanitizer builds."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from conditioned_kernels import _extension, build

CSRC = build.source_folder()
TEST_SOURCES = Path(__file__).parent / "csrc"


def folder() -> Path:
    """A folder per state of the sources, so that an old build is never tested."""
    digest = hashlib.sha256()
    for path in sorted([*CSRC.iterdir(), *TEST_SOURCES.iterdir(), Path(build.__file__)]):
        digest.update(path.read_bytes())
    place = Path(tempfile.gettempdir()) / f"conditioned_kernels-tests-{os.getuid()}-{digest.hexdigest()[:16]}"
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def compile_test(source: str, name: str, *flags: str) -> Path:
    """tests/csrc/<source> as a program or library; raises with the compiler's words."""
    target = folder() / name
    if not target.exists():
        part = target.with_name(f".{name}.{os.getpid()}")
        command = [*build.cxx_compiler().split(), "-O1", "-g", "-Wno-psabi", *flags, f"-I{CSRC}"]
        done = subprocess.run(
            [*command, str(TEST_SOURCES / source), "-o", str(part), "-pthread"], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        part.replace(target)
    return target


def ready() -> str:
    """Make the extension available to this process; "" or the reason why it is not."""
    if _extension.load().available:
        return ""
    if os.environ.get("CK_NO_EXTENSION") == "1":
        return "switched off by CK_NO_EXTENSION=1"
    place = folder()
    if not (place / build.LIBRARY).exists():
        try:
            build.build(place, cuda=False)
        except build.CannotBuild as reason:
            return str(reason)
    _extension.load.cache_clear()
    original = _extension.find
    _extension.find = lambda: place / build.LIBRARY
    try:
        found = _extension.load()
    finally:
        _extension.find = original
    return "" if found.available else found.sentence
