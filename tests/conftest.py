"""Settings every test shares."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from conditioned_kernels import _extension

from .extension_build import ready

# The same examples on every run, so that a failure is never a matter of luck; more with --hypothesis-profile=thorough.
settings.register_profile("suite", max_examples=60, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile("suite")

# So that tests can import benchmarks/; behind everything installed, which is what is tested.
sys.path.append(str(Path(__file__).resolve().parent.parent))

# A shell starts background jobs with SIGINT ignored, which the programs that tests interrupt would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Matrices here are small, and two threads that wait for each other on a busy machine are far slower than one.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def extension() -> str:
    """Build the extension once if it is not installed; "" or the reason why there is none."""
    return ready()


@pytest.fixture(scope="session", autouse=True)
def _prefer_extension(extension: str) -> None:
    """Every test takes the backend that "auto" takes for a user who has built the extension."""


@pytest.fixture(scope="module", params=["torch", "extension"])
def each_backend(request: pytest.FixtureRequest, extension: str) -> Iterator[str]:
    """Run the module's tests once on each backend that can run here."""
    if request.param == "extension":
        if extension:
            pytest.skip(f"no extension: {extension}")
        yield request.param
        return
    with pytest.MonkeyPatch.context() as patch:
        off = _extension.Extension(False, False, "switched off by this test")
        patch.setattr(_extension, "load", lambda: off)
        yield request.param


@pytest.fixture
def untouched_rng() -> Iterator[None]:
    """The test must leave torch's global random state as it found it."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=0, help="what torch's, numpy's and python's generators start every test from"
    )


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Every test draws the same numbers on every run, alone or in the suite; --seed tries others."""
    seed = request.config.getoption("--seed")
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
