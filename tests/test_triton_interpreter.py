"""Runs tests/interpret in a process of its own, since Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

triton = pytest.importorskip("triton")

if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    # It calls int() on arrays of one element. Its compiler is not concerned.
    pytest.skip("the interpreter of triton 3.6 does not work with numpy 2.4", allow_module_level=True)


def test_kernels_in_the_interpreter() -> None:
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests / "interpret/triton_kernels.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=tests.parent, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
