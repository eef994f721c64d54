"""The small-matrix algorithms as a team of threads, under the sanitizers. No torch is involved."""

from __future__ import annotations

import subprocess

import pytest

from conditioned_kernels import build

from .extension_build import compile_test


def run(name: str, *flags: str) -> subprocess.CompletedProcess:
    try:
        program = compile_test("team_test.cpp", name, "-std=c++20", "-ffp-contract=off", *flags)
    except build.CannotBuild as reason:
        pytest.skip(str(reason))
    return subprocess.run([program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("thread", ("-fsanitize=thread",)),
        ("address", ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")),
    ],
)
def test_team_of_threads_equals_one_thread_under_sanitizer(name: str, flags: tuple[str, ...]) -> None:
    done = run(f"team_{name}", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failures" in done.stdout
    assert "WARNING" not in done.stderr


def test_thread_sanitizer_reports_a_removed_barrier() -> None:
    """The negative control: without it, a clean run might mean that nothing was looked at."""
    program = compile_test("barrier_test.cpp", "barrier_good", "-std=c++20", "-fsanitize=thread")
    assert subprocess.run([program], capture_output=True, timeout=60).returncode == 0
    program = compile_test(
        "barrier_test.cpp", "barrier_removed", "-std=c++20", "-fsanitize=thread", "-DCK_SKIP_BARRIER=3"
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stderr
