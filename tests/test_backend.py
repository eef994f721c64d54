"""Which implementation runs: a pure choice, explained, and never a silent fallback."""

from __future__ import annotations

import io
import itertools
import re
import sys
import tokenize
from pathlib import Path

import pytest
import torch

import conditioned_kernels as ck
from conditioned_kernels import _backend

from .matrices import gaussian

PACKAGE = Path(ck.__file__).parent


def test_torch_is_available_and_everything_else_says_why_or_why_not() -> None:
    available = ck.backends()
    assert available["torch"].startswith("available")
    assert all(isinstance(reason, str) and len(reason) > 10 for reason in available.values())
    assert set(available) == set(_backend.BACKENDS) - {"auto"}


def test_the_choice_is_explained() -> None:
    x = gaussian(4, 8)
    for requested in ("auto", "torch"):
        chosen = ck.explain_backend(x, requested)
        assert chosen.name in ck.backends()
        assert chosen.device == x.device
        assert len(chosen.reason) > 10
    assert ck.explain_backend(x, "torch").name == "torch"


@pytest.mark.parametrize("name", ["", "Torch", "cuda", None, 3])
def test_an_unknown_backend_is_refused_by_name(name: object) -> None:
    with pytest.raises(ValueError, match=rf"backend must be one of 'auto', .*'torch', got {re.escape(repr(name))}"):
        ck.explain_backend(gaussian(2, 2), name)


def test_a25_mps_computes_on_the_cpu_and_says_so() -> None:
    """MPS has no QR and its eigensolver hangs on some sizes, so it must not be used because the tensor is there."""
    chosen = _backend.choose_backend("auto", torch.device("mps"))
    assert chosen.device == torch.device("cpu")
    assert chosen.name in ck.backends()
    assert "mps" in chosen.reason


def test_a25_a_result_returns_to_the_device_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every public function goes through choose_backend and puts its result back."""
    asked = []

    def spy(requested: str, device: torch.device, *shape: object) -> _backend.Backend:
        asked.append((requested, device))
        return original(requested, device, *shape)

    original = _backend.choose_backend
    for name in ("orthogonalize", "condition"):
        monkeypatch.setattr(sys.modules[f"conditioned_kernels.{name}"], "choose_backend", spy)
    x = gaussian(2, 4, 8)
    assert ck.orthogonalize(x, backend="torch").device == x.device
    assert ck.condition_number(x, backend="torch").kappa.device == x.device
    ck.semi_orthogonal((2, 4, 8), backend="torch")
    assert asked == [("torch", x.device)] * 3


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def names(path: Path) -> list[str]:
    """Every identifier of a source file, comments and strings left out."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [token.string for token in tokens if token.type == tokenize.NAME]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_e17_no_compile_decorator_no_asserts_no_environment_in_the_path(path: Path) -> None:
    """E17: no torch.compile in library code. Also no assert for a user's error, and no environment variable."""
    used = names(path)
    assert "assert" not in used
    assert ("torch", "compile") not in itertools.pairwise(used)
    if path.parent == PACKAGE and path.name not in ("cli.py", "__main__.py", "_extension.py", "build.py"):
        assert not {"environ", "getenv"} & set(used)


def test_e17_nothing_is_compiled_and_the_limits_are_the_callers() -> None:
    import torch._dynamo as dynamo

    limits = (dynamo.config.recompile_limit, dynamo.config.accumulated_recompile_limit)
    dynamo.utils.counters.clear()
    for rows in range(1, 13):
        ck.orthogonalize(gaussian(2, rows, 16))
        ck.condition_number(gaussian(2, rows, 16))
    assert (dynamo.config.recompile_limit, dynamo.config.accumulated_recompile_limit) == limits
    assert not dynamo.utils.counters["frames"]
