"""The optional extension; pyproject.toml has the rest. torch is never imported here."""

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

# By path, because importing the package imports torch, which an isolated build does not have.
BUILD = runpy.run_path(str(Path(__file__).parent / "conditioned_kernels" / "build.py"))


class BuildWithExtension(build_py):
    """The Python files, the C++ sources (so that the extension can be built later), and the extension if possible."""

    def run(self):
        super().run()
        package = Path("" if self.editable_mode else self.build_lib, "conditioned_kernels")
        if not self.editable_mode:
            shutil.copytree("csrc", package / "csrc", dirs_exist_ok=True)
        BUILD["optional_build"](package)


class WheelForEveryPython(bdist_wheel):
    """py3-none-any, or py3-none-<platform> with the extension in it: the library needs no particular Python."""

    def get_tag(self):
        if not list(Path(self.distribution.get_command_obj("build").build_lib).glob(f"*/{BUILD['LIBRARY']}")):
            return super().get_tag()
        self.root_is_pure = False
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithExtension, "bdist_wheel": WheelForEveryPython})
