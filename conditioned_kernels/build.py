"""Compile the optional extension: ``python -m conditioned_kernels.build``.

The compilers are called directly. torch is needed for its headers and its libraries' folder, found by path and
never imported, so ``setup.py`` uses this file as well. One library serves every torch from 2.10 on (the stable ABI)
and every Python. No GPU needs to be visible, and torch may be its CPU-only build.

Environment: ``CK_NO_EXTENSION=1`` skips the build, ``CK_FORCE_EXTENSION=1`` makes its failure an error,
``CK_NO_CUDA=1`` leaves out the CUDA code, ``CXX`` and ``CUDA_HOME`` choose the compilers, ``TORCH_CUDA_ARCH_LIST``
the GPU architectures and ``MAX_JOBS`` the number of compilers at once (default 2).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY = "_native.so"
RECORD = "_native.json"
"""What the library was built with and for, next to it: readable even where the library cannot be loaded."""

TORCH_TARGET = "0x020a000000000000"
"""Oldest torch the library runs under, 2.10, in the form TORCH_TARGET_VERSION has."""

DEFAULT_ARCHITECTURES = "8.0;9.0;10.0+PTX"

_HERE = Path(__file__).resolve().parent


class CannotBuild(Exception):
    """Why there is no extension, as one sentence for the user."""


def source_folder() -> Path:
    """csrc: inside an installed package, beside it in a checkout."""
    for folder in (_HERE / "csrc", _HERE.parent / "csrc"):
        if (folder / "ops.cpp").is_file():
            return folder
    raise CannotBuild(f"the C++ sources are missing: no csrc in {_HERE} or {_HERE.parent}")


def source_digest() -> str:
    """Identifies the sources, so that a library of other sources is not taken for this package's; "" without them."""
    try:
        files = sorted(source_folder().iterdir())
    except CannotBuild:
        return ""
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()[:16]


def user_folder() -> Path:
    """Where the library goes if the package folder is read-only: one folder per machine type and package version."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    match = re.search(r'"(.+)"', (_HERE / "_version.py").read_text())
    return Path(base) / "conditioned_kernels" / f"{match.group(1) if match else 'unknown'}-{platform.machine()}"


def torch_folder() -> Path:
    """The installed torch package, without importing it."""
    # In pip's isolated build sys.path is the build environment's; sys.prefix is that of the real one.
    scheme = sysconfig.get_paths(vars={"base": sys.prefix, "platbase": sys.prefix})
    for folder in dict.fromkeys((scheme["purelib"], scheme["platlib"], *sys.path)):
        torch = Path(folder) / "torch"
        if (torch / "include" / "torch" / "csrc" / "stable" / "library.h").is_file():
            return torch
    raise CannotBuild(f"no torch >= 2.10 with C++ headers in {scheme['purelib']}")


def architectures(requested: str | None) -> list[str]:
    """nvcc flags for a TORCH_CUDA_ARCH_LIST such as "8.0;9.0+PTX"; there is always one PTX for newer GPUs.

    Raises
    ------
    CannotBuild
        for an entry that is no compute capability.
    """
    text = requested.strip() if requested else ""
    if text.lower() in ("", "all", "common"):
        text = DEFAULT_ARCHITECTURES
    entries = [entry for entry in re.split(r"[;,\s]+", text) if entry]
    for entry in entries:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", entry):
            raise CannotBuild(
                f"TORCH_CUDA_ARCH_LIST has {entry!r}; expected capabilities such as '8.0;9.0+PTX', or 'All'"
            )
    if not any(entry.endswith("+PTX") for entry in entries):
        newest = max((entry for entry in entries), key=lambda entry: [int(x) for x in re.findall(r"\d+", entry)])
        entries[entries.index(newest)] = newest + "+PTX"
    flags = []
    for entry in entries:
        number = entry.removesuffix("+PTX").replace(".", "")
        codes = f"sm_{number},compute_{number}" if entry.endswith("+PTX") else f"sm_{number}"
        flags.append(f"-gencode=arch=compute_{number},code=[{codes}]")
    return flags


def cxx_compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise CannotBuild("no C++ compiler found (c++, g++, clang++ or $CXX)")


def nvcc_compiler() -> str | None:
    """nvcc, or None where the CUDA code is to be left out."""
    if os.environ.get("CK_NO_CUDA") == "1":
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which(str(Path(home) / "bin" / "nvcc") if home else "nvcc") or shutil.which("nvcc")


CXX_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
NVCC_FLAGS = ("-std=c++17", "-O3", "-Werror=all-warnings", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC")

INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"baseline": (), "avx2": ("-mavx2", "-mfma")},
    "AMD64": {"baseline": (), "avx2": ("-mavx2", "-mfma")},
}
"""Per machine: the CPU code is compiled once for each row, and ops.cpp takes the best the processor has."""

CPU_SOURCES = {"matrices": "-ffp-contract=fast", "samples": "-ffp-contract=off"}


def commands(csrc: Path, torch: Path, work: Path, nvcc: str | None) -> tuple[list[list[str]], list[str]]:
    """The compile commands, which may run at once, and then the link command."""
    cxx = cxx_compiler().split()
    variants = INSTRUCTION_SETS.get(platform.machine(), {"baseline": ()})
    have = [f"-DCK_HAS_{name.upper()}" for name in variants if name != "baseline"] + (["-DCK_HAS_CUDA"] if nvcc else [])
    compile_: list[list[str]] = []
    objects = []

    def add(compiler: list[str], source: str, stem: str, flags: Iterable[str]) -> None:
        objects.append(str(work / f"{stem}.o"))
        compile_.append([*compiler, *flags, "-c", str(csrc / source), "-o", objects[-1]])

    if nvcc:
        targets = architectures(os.environ.get("TORCH_CUDA_ARCH_LIST"))
        add([nvcc], "kernels.cu", "kernels", [*NVCC_FLAGS, f"--threads={_jobs()}", *targets])
    target = f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"
    add(cxx, "ops.cpp", "ops", [*CXX_FLAGS, *have, target, f"-I{torch / 'include'}"])
    for name, contract in CPU_SOURCES.items():
        for isa, flags in variants.items():
            names = (f"-DCK_ISA={name}_{isa}_code", f"-DCK_TABLE={name}_{isa}")
            add(cxx, f"cpu_{name}.cpp", f"{name}_{isa}", [*CXX_FLAGS, *have, *names, contract, *flags])
    # nvcc links its runtime statically: no CUDA library is needed at load time, so CPU-only torch loads it too.
    linker = [nvcc] if nvcc else cxx
    return compile_, [*linker, "-shared", *objects, "-o", str(work / LIBRARY), f"-L{torch / 'lib'}", "-ltorch_cpu"]


def build(folder: Path, *, cuda: bool = True) -> Path:
    """Compile into ``folder`` and return the library's path; with CUDA code if ``cuda`` and nvcc is found.

    Raises
    ------
    CannotBuild
        with the reason, which for a compiler's refusal holds its first error.
    """
    if sys.platform == "win32":
        raise CannotBuild("the extension is built on Linux and macOS only")
    csrc, torch, nvcc = source_folder(), torch_folder(), nvcc_compiler() if cuda else None
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        compile_, link = commands(csrc, torch, work, nvcc)
        with ThreadPoolExecutor(_jobs()) as pool:
            list(pool.map(_run, compile_))
        _run(link)
        record = {
            "torch": _torch_version(torch),
            "stable_abi": "2.10",
            "machine": platform.machine(),
            "sources": source_digest(),
            "cuda": architectures(os.environ.get("TORCH_CUDA_ARCH_LIST")) if nvcc else [],
        }
        folder.mkdir(parents=True, exist_ok=True)
        # Into place by rename, so that a process never sees half a file.
        for name, text in ((RECORD, json.dumps(record, indent=1).encode()), (LIBRARY, (work / LIBRARY).read_bytes())):
            part = folder / f".{name}.{os.getpid()}"
            part.write_bytes(text)
            part.replace(folder / name)
    return folder / LIBRARY


def optional_build(folder: Path, *, cuda: bool = True) -> Path | None:
    """:func:`build` as an installation wants it: without a compiler or torch, one line on stderr and no error."""
    if os.environ.get("CK_NO_EXTENSION") == "1":
        print("conditioned_kernels: pure Python, because CK_NO_EXTENSION=1", file=sys.stderr)
        return None
    try:
        return build(folder, cuda=cuda)
    except CannotBuild as reason:
        if os.environ.get("CK_FORCE_EXTENSION") == "1":
            raise
        print(
            f"conditioned_kernels: pure Python, because {reason}. "
            "Later, python -m conditioned_kernels.build adds the extension",
            file=sys.stderr,
        )
        return None


def _jobs() -> int:
    return max(1, int(os.environ.get("MAX_JOBS") or min(2, os.cpu_count() or 1)))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).splitlines()
        telling = ("error:", "error :", "cannot find", "undefined reference", "fatal")
        first = next((line for line in lines if any(word in line for word in telling)), " ".join(lines) or "no output")
        raise CannotBuild(f"{Path(command[0]).name} failed: {first.strip()}")


def _torch_version(torch: Path) -> str:
    match = re.search(r"__version__ = ['\"](.+?)['\"]", (torch / "version.py").read_text())
    return match.group(1) if match else "unknown"


def default_folder() -> Path:
    """Where the library goes: the package folder, or the user's if that is read-only."""
    return _HERE if os.access(_HERE, os.W_OK) else user_folder()


def main() -> int:
    try:
        library = build(default_folder())
    except CannotBuild as reason:
        print(f"conditioned_kernels.build: {reason}", file=sys.stderr)
        return 1
    print(f"built {library}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
