"""A slice of the soak, the same cells each time: every fault, and an oracle that can say no."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

soak = pytest.importorskip("benchmarks.soak", reason="the folder benchmarks is not beside the tests")
pytest.importorskip("transformers")

SEED = 0


@pytest.fixture(scope="module")
def slice_():
    """The first cells that have each fault twice and none four times."""
    wanted = {fault: 4 if fault == "none" else 2 for fault in soak.FAULTS}
    cells, number = [], 0
    while any(wanted.values()):
        cell = soak.draw(SEED, number)
        if wanted[cell.fault]:
            wanted[cell.fault] -= 1
            cells.append(cell)
        number += 1
    return cells


def test_nothing_is_wrong_or_lost(slice_, tmp_path):
    with soak.small_disk() as disk:
        runner = soak.Soak(tmp_path, disk)
        outcomes = [(cell, *runner.run(cell)) for cell in slice_]
    assert not [entry for entry in outcomes if entry[1] in soak.BAD]
    # A folder that has a model is refused as a place for shards, whatever the fault.
    kept = [kind for cell, kind, _ in outcomes if cell.shard_size and cell.replaces]
    outcomes = [entry for entry in outcomes if not (entry[0].shard_size and entry[0].replaces)]
    assert kept and set(kept) == {soak.REFUSED} and any(cell.shard_size for cell, *_ in outcomes)
    by_fault = {fault: {kind for cell, kind, _ in outcomes if cell.fault == fault} for fault in soak.FAULTS}
    assert by_fault["none"] == {soak.RIGHT}
    assert by_fault["truncated"] == by_fault["broken config.json"] == {soak.REFUSED}
    assert by_fault["kill while writing"] == {soak.RIGHT}
    assert not list(tmp_path.iterdir())


def good(tmp_path):
    """A cell without a fault, done, and ready to be judged again."""
    number = next(n for n in range(99) if soak.draw(SEED, n).fault == "none" and soak.draw(SEED, n).gain == "unit")
    run = soak.Run(replace(soak.draw(SEED, number), attention_only=False, value="block"), tmp_path, None)
    run.prepare()
    run.init()
    assert run.judged()[0] == soak.RIGHT
    return run


def test_the_oracle_sees_a_result_that_is_none(tmp_path):
    """A soak that could not call anything wrong would prove nothing."""
    run = good(tmp_path)
    tensors = load_file(run.file)
    other = next(name for name, value in tensors.items() if value.is_floating_point() and "norm" in name.lower())
    save_file({**tensors, other: tensors[other] + 1}, run.file)
    assert run.judged() == (soak.WRONG, f"{other} changed")


def test_the_oracle_sees_verify_and_the_singular_values_disagree(tmp_path, monkeypatch):
    run = good(tmp_path)
    monkeypatch.setattr(soak, "sigma_tolerance", lambda dtype: -1.0)
    outcome, why = run.judged()
    assert outcome == soak.WRONG and "the singular values say otherwise" in why


def streamed(tmp_path, fault):
    cell = next(cell for n in range(999) if (cell := soak.draw(SEED, n)).shard_size == 1 << 10 and not cell.replaces)
    run = soak.Run(replace(cell, fault=fault, storage="architecture", attention_only=False), tmp_path, None)
    run.prepare()
    return run


def test_the_oracle_sees_shards_that_are_no_model(tmp_path):
    run = streamed(tmp_path, "none")
    run.init()
    assert run.judged()[0] == soak.RIGHT and len(run.written) > 2
    index = json.loads((run.out / soak.INDEX).read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = run.written[-1].name
    (run.out / soak.INDEX).write_text(json.dumps(index))
    assert run.judged() == (soak.WRONG, "the index does not say where the tensors are")


@pytest.mark.parametrize("damaged", [True, False])
def test_a_stopped_stream_is_continued_and_a_torn_shard_is_lost(tmp_path, monkeypatch, damaged):
    run = streamed(tmp_path, "file size limit")
    calls = []

    def stop(done, total):
        calls.append(done)
        if done > total / 2:
            raise OSError("the disk is full")

    with pytest.raises(soak.CLEAR, match="the disk is full"):
        run.init(stop)
    assert run.written and not (run.out / soak.INDEX).exists()
    if damaged:
        run.written[0].write_bytes(run.written[0].read_bytes()[:-1])
        outcome, why = run._refused(OSError("the disk is full"))
        assert outcome == soak.LOST and "half-written" in why
    else:
        assert run._refused(OSError("the disk is full"))[0] == soak.REFUSED
        assert run.judged()[0] == soak.RIGHT


def test_a_destroyed_target_is_lost(tmp_path, monkeypatch):
    """An init that writes in place, killed half-way, or a disk that fills: the old file is gone."""
    cell = replace(soak.draw(SEED, 0), fault="file size limit", replaces=True, to_folder=False, storage="architecture")

    def in_place(source, out, **options):
        out.write_bytes(b"half")
        raise OSError("the disk is full")

    run = soak.Run(cell, tmp_path, None)
    monkeypatch.setattr(run, "_rehearsed", lambda: 1 << 20)
    monkeypatch.setattr(soak, "init_file", in_place)
    assert run.outcome() == (soak.LOST, "out.safetensors has other content")


def test_a_traceback_is_wrong(tmp_path, monkeypatch):
    def broken(*args, **options):
        raise KeyError("weight")

    monkeypatch.setattr(soak, "init_file", broken)
    outcome, why = soak.Run(replace(soak.draw(SEED, 0), fault="none"), tmp_path, None).outcome()
    assert outcome == soak.WRONG and why.startswith("KeyError")


def test_the_record_and_its_table():
    faults = [soak.draw(1, number).fault for number in range(3)]
    assert faults == ["none", "file size limit", "none"]
    record = soak.soak(3, seed=1)
    assert json.loads(json.dumps(record))["counts"] == {soak.RIGHT: 2, soak.REFUSED: 1, soak.WRONG: 0, soak.LOST: 0}
    assert "| all | 3 | 2 | 1 | 0 | 0 |" in soak.as_markdown(record)


def test_cells_depend_on_seed_and_number_alone():
    assert soak.draw(5, 17) == soak.draw(5, 17) != soak.draw(6, 17)
    assert torch.get_num_threads() == 1
