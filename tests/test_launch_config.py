"""The launch table, the head tables and the backend's reasons: all without triton and without a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conditioned_kernels import _triton
from conditioned_kernels._triton import launch_config
from conditioned_kernels._triton.heads import group, heads_of, launches, samples_of, table

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120, launch_config.HIP)
CPU = torch.device("cpu")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", _triton.DTYPES)
def test_every_head_size_has_a_launch(dtype: torch.dtype, arch: int) -> None:
    for rows in (1, 3, 16, 17, 63, 64, 65, 80, 96, 127, 128):
        for sampled in (False, True):
            for launch in (
                launch_config.gram(rows, dtype, arch, sampled=sampled),
                launch_config.apply(rows, dtype, arch, sampled=sampled),
            ):
                assert launch.block_rows >= rows
                assert launch.block_cols % 16 == 0
                assert launch.precision in (("ieee",) if arch == launch_config.HIP else ("tf32", "tf32x3"))
                assert launch.options(sampled)["enable_fp_fusion"] is not sampled


def test_precision_follows_the_accuracy_class_of_the_result() -> None:
    assert [launch_config.gram_precision(dtype) for dtype in _triton.DTYPES] == ["tf32", "tf32", "tf32x3"]
    assert [launch_config.apply_precision(dtype) for dtype in _triton.DTYPES] == ["tf32x3", "tf32", "tf32x3"]


@given(cols=st.integers(1, 20000), heads=st.integers(1, 5000), rows=st.sampled_from((16, 32, 64, 128)))
def test_splits_cover_the_columns_in_whole_blocks(cols: int, heads: int, rows: int) -> None:
    launch = launch_config.gram(rows, torch.float32, 90, sampled=False)
    parts = launch_config.splits(cols, heads, launch)
    width = launch_config.split_columns(cols, parts, launch)
    assert width % launch.block_cols == 0
    assert (-(-cols // width) - 1) * width < cols <= parts * width
    assert heads * (parts - 1) < 2 * launch_config.PROCESSORS


def test_offsets_do_not_wrap_at_31_bits() -> None:
    # 320 x 2560 x 3072 (field report E06), and a small view into a parent with a huge stride.
    batch = torch.empty(320, 2560, 3072, dtype=torch.bfloat16, device="meta")
    assert int(heads_of(batch).offsets[-1]) == 319 * 7_864_320
    view = torch.empty_strided((3, 4, 5), (1 << 33, 1 << 20, 1), device="meta")
    assert heads_of(view).offsets.tolist() == [0, 1 << 33, 1 << 34]
    assert heads_of(view).strides == (1 << 20, 1)


def test_groups_merge_equal_heads_of_several_tensors() -> None:
    first, second = torch.arange(24.0).view(2, 3, 4), torch.arange(24.0, 60.0).view(3, 3, 4)
    other = torch.zeros(2, 4, 3).mT
    (merged, members), (alone, single) = group([first, other, second])
    assert (members, single, merged.count, alone.count) == ([0, 2], [1], 5, 2)
    for place, offset in enumerate(merged.offsets.tolist()):
        expected = torch.cat((first, second))[place]
        assert merged.base.data_ptr() + 4 * offset == (first[place] if place < 2 else second[place - 2]).data_ptr()
        assert expected.shape == (merged.rows, merged.cols)


def test_alignment_is_claimed_only_where_it_holds() -> None:
    storage = torch.zeros(64 * 64)
    assert heads_of(storage.view(4, 16, 64)).alignment == 16
    assert heads_of(storage.view(4, 16, 64).mT).alignment == 16
    assert heads_of(storage[1:].narrow(0, 0, 48 * 64).view(3, 16, 64)).alignment == 1
    assert heads_of(storage[: 4 * 16 * 63].view(4, 16, 63)).alignment == 1
    assert heads_of(storage.view(4, 16, 64)[:, :, ::2]).alignment == 1
    assert samples_of([1], [0], [1], 4, 8, CPU).alignment == 4
    assert samples_of([1], [0], [1], 4, 9, CPU).alignment == 1
    assert samples_of([1], [0], [1], 9, 4, CPU).alignment == 1


def test_table_holds_keys_and_heads_of_the_stream() -> None:
    source = samples_of([(1 << 64) - 5, 7], [0, 0], [2, 1], 4, 8, CPU)
    target = heads_of(torch.zeros(3, 4, 8))
    assert table(source, target).tolist() == [[0, 0, -5, 0], [0, 32, -5, 1], [0, 64, 7, 0]]


def test_launches_cover_all_heads_under_the_cap() -> None:
    ranges = list(launches(5000, 128))
    assert ranges[0] == (0, 2048)
    assert [stop for _, stop in ranges][-1] == 5000
    assert list(launches(576, 64)) == [(0, 576)]


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch):
    """Pretend that there is a GPU of a capability."""
    _triton.unavailable.cache_clear()

    def pretend(found: tuple[int, int] | Exception) -> str:
        def ask(_: torch.device) -> tuple[int, int]:
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(torch.cuda, "get_device_capability", ask)
        monkeypatch.setattr(_triton, "missing", lambda: "")
        monkeypatch.setattr("importlib.import_module", lambda _: type("Route", (), {"self_test": lambda device: ""}))
        return _triton.refusal(torch.device("cuda", 0), torch.float32, 64)

    yield pretend
    _triton.unavailable.cache_clear()


@pytest.mark.parametrize(("found", "works"), [((6, 0), False), ((7, 5), False), ((8, 0), True), ((12, 1), True)])
def test_capability_gate(capability, found: tuple[int, int], works: bool) -> None:
    reason = capability(found)
    assert (reason == "") is works
    assert works or f"{found[0]}.{found[1]}" in reason


def test_broken_driver_is_a_reason_and_no_crash(capability) -> None:
    assert "no driver today" in capability(RuntimeError("no driver today"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_dtypes_without_kernels_are_refused(dtype: torch.dtype) -> None:
    assert str(dtype).removeprefix("torch.") in _triton.refusal(torch.device("cuda", 0), dtype, 64)


def test_cpu_is_refused_in_words() -> None:
    assert "cpu" in _triton.refusal(CPU, torch.float32, 64)


@pytest.mark.parametrize("blocked", [True, False])
def test_import_builds_no_kernel_and_needs_no_triton(blocked: bool) -> None:
    code = (
        "import sys\n"
        f"if {blocked}: sys.modules['triton'] = None\n"
        "import torch, conditioned_kernels as ck\n"
        "from conditioned_kernels._triton import heads, launch_config, polar, missing\n"
        "before = set(sys.modules)\n"
        "assert 'conditioned_kernels._triton.gram' not in before\n"
        "ck.orthogonalize(torch.randn(4, 8))\n"
        "assert ck.backends()['triton'].startswith('not available')\n"
        f"assert bool('cannot be imported' in missing()) is {blocked}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
