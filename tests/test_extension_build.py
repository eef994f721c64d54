"""How the extension is built, packaged and left out. The compile itself is test_extension.py's fixture."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from conditioned_kernels import _extension, build

from .extension_build import CSRC, folder, ready

ROOT = Path(__file__).parent.parent
CHECKOUT = (ROOT / "setup.py").is_file()


def test_architectures_always_have_one_ptx() -> None:
    """Field report G08."""
    default = build.architectures(None)
    assert [re.findall(r"sm_(\d+)", flag)[0] for flag in default] == ["80", "90", "100"]
    for text in (None, "", "All", "8.0", "8.0;9.0+PTX", "9.0 10.0", "9.0a", "8.0,10.0"):
        assert sum("code=[sm" in flag and ",compute_" in flag for flag in build.architectures(text)) >= 1, text
    assert build.architectures("8.0") == ["-gencode=arch=compute_80,code=[sm_80,compute_80]"]
    assert build.architectures("8.0;10.0")[1].endswith("compute_100]")
    with pytest.raises(build.CannotBuild, match="Volta"):
        build.architectures("Volta")


def test_the_build_limits_its_jobs_and_names_every_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Field report G09: MAX_JOBS and CK_NO_CUDA; G10: nvcc only where it is."""
    monkeypatch.setenv("MAX_JOBS", "1")
    assert build._jobs() == 1
    monkeypatch.setenv("CK_NO_CUDA", "1")
    assert build.nvcc_compiler() is None
    torch_folder = build.torch_folder()
    compile_, link = build.commands(CSRC, torch_folder, tmp_path, None)
    assert not any("nvcc" in word or "cudart" in word for word in [*itertools.chain(*compile_), *link])
    samples = [command for command in compile_ if any("cpu_samples" in word for word in command)]
    assert samples and all("-ffp-contract=off" in command for command in samples)
    compile_, _ = build.commands(CSRC, torch_folder, tmp_path, "/usr/bin/nvcc")
    assert any("-Werror=all-warnings" in command and "--threads=1" in command for command in compile_)


HIDE_SITE = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; "
"""As an isolated build does: torch is on no path, and only sys.prefix leads to it."""


def run_optional_build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    code = f"{HIDE_SITE}import runpy, pathlib; build = runpy.run_path(r'{build.__file__}');"
    code += f"print(build['optional_build'](pathlib.Path(r'{tmp_path}')))"
    variables = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)


def test_without_compiler_or_torch_there_is_one_line_and_no_error(tmp_path: Path) -> None:
    """Field reports G01 and G10."""
    said = run_optional_build(tmp_path, PATH=str(tmp_path), CXX="")
    assert said.returncode == 0 and said.stdout == "None\n"
    assert said.stderr.count("\n") == 1 and "no C++ compiler" in said.stderr and "pure Python" in said.stderr
    said = run_optional_build(tmp_path, CK_NO_EXTENSION="1")
    assert said.returncode == 0 and said.stderr.count("\n") == 1 and "CK_NO_EXTENSION=1" in said.stderr
    said = run_optional_build(tmp_path, PATH=str(tmp_path), CXX="", CK_FORCE_EXTENSION="1")
    assert said.returncode != 0 and "no C++ compiler" in said.stderr


def test_a_compiler_s_refusal_is_told_in_its_words(tmp_path: Path) -> None:
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\necho 'ops.cpp:1: error: I do not like it' >&2\nexit 1\n")
    fake.chmod(0o755)
    said = run_optional_build(tmp_path, CXX=str(fake), CK_NO_CUDA="1")
    assert said.returncode == 0 and "I do not like it" in said.stderr


def test_torch_is_found_by_path_and_not_imported(tmp_path: Path) -> None:
    """Field reports G01 and G02."""
    code = f"{HIDE_SITE}import runpy; b = runpy.run_path(r'{build.__file__}'); print(b['torch_folder']()); "
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).samefile(Path(torch.__file__).parent)


@pytest.mark.skipif(not CHECKOUT, reason="an installed package has no setup.py")
def test_build_requirements_have_no_torch() -> None:
    """Field report G02."""
    text = (ROOT / "pyproject.toml").read_text()
    requires = re.search(r"\[build-system\]\s*requires = \[(.*?)\]", text, re.S)
    assert requires and "torch" not in requires.group(1)
    assert not re.search(r"^\s*(import|from) torch", (ROOT / "setup.py").read_text(), re.M)


@pytest.mark.skipif(not CHECKOUT, reason="an installed package has no setup.py")
def test_sdist_has_every_included_file_and_builds_a_pure_wheel(tmp_path: Path) -> None:
    """Field report G07."""
    pytest.importorskip("setuptools", minversion="77")
    script = (
        "import sys; from setuptools import build_meta as b;"
        "print(b.build_sdist(sys.argv[1]) if sys.argv[2] == 's' else b.build_wheel(sys.argv[1]))"
    )
    environment = {**os.environ, "CK_NO_EXTENSION": "1"}
    tree = tmp_path / "tree"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".git", "build", "*.egg-info", "_native.*", "__pycache__")
    )
    if not (tree / "README.md").is_file():
        (tree / "README.md").write_text("conditioned_kernels\n")

    def make(where: Path, kind: str) -> Path:
        command = [sys.executable, "-c", script, str(tmp_path), kind]
        done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return tmp_path / done.stdout.strip().splitlines()[-1]

    with tarfile.open(make(tree, "s")) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    sources = list((unpacked / "csrc").iterdir())
    assert {path.name for path in sources} == {path.name for path in CSRC.iterdir() if path.is_file()}
    for source in sources:
        for name in re.findall(r'#include "(.+?)"', source.read_text()):
            assert (unpacked / "csrc" / name).is_file(), (source.name, name)
    wheel = make(unpacked, "w")
    assert wheel.name.endswith("py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"conditioned_kernels/csrc/{path.name}" for path in sources} <= set(names)
    assert not any(name.endswith((".so", "_native.json")) for name in names)


def test_library_needs_neither_python_nor_cuda_nor_unstable_torch() -> None:
    """Field reports G04 and G05: only the C shims of torch, no interpreter, no CUDA runtime at load time."""
    if reason := ready():
        pytest.skip(reason)
    library = _extension.find() or folder() / build.LIBRARY
    if not shutil.which("nm") or not shutil.which("readelf"):
        pytest.skip("no binutils")
    names = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True).stdout
    symbols = [line.split()[-1] for line in names.splitlines()]
    assert not [s for s in symbols if s.startswith(("Py", "_Py", "cuda", "__cuda")) or "c10" in s or "_ZN2at" in s]
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    assert not re.search(r"NEEDED.*(libpython|libcuda|libc10|libtorch_cuda)", needed)
