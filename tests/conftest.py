"""Settings every test shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples on every run, so that a failure is never a matter of luck; more with --hypothesis-profile=thorough.
settings.register_profile("suite", max_examples=60, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile("suite")


@pytest.fixture
def untouched_rng() -> Iterator[None]:
    """The test must leave torch's global random state as it found it."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)
