"""Where records go, read back: files, TensorBoard, Weights & Biases, the terminal, and two trainers' callbacks."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import struct
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conditioned_kernels as ck
from conditioned_kernels.integrations.files import CsvSink, JsonlSink, ParquetSink, read_records
from conditioned_kernels.monitor import (
    JACOBIAN,
    Alert,
    ConditioningMonitor,
    KappaAbove,
    KappaGrowth,
    Record,
    SigmaCollapse,
    summarize,
)

SINKS = {".jsonl": JsonlSink, ".csv": CsvSink, ".parquet": ParquetSink}

RECORDS = [
    Record(0, "encoder.0", "q", 0, 0, 1.5, 1.4, 1.6, 3.0, 2.0, 4.5),
    Record(0, "encoder.0", "q", 1, 0, math.inf, 1e7, math.inf, 3.0, 0.0, 1.0, "tolerance_not_met"),
    Record(0, "encoder.0", "k.rope", 0, status="non_finite"),
    Record(1, "", JACOBIAN, 2, 3, 120.5, 120.0, 121.0, status="converged", bound=5e4, theorem=True, kappa_x=3.25),
    Record(1, 'odd, "name"\x1b[31m', JACOBIAN, -1, status="no attention Jacobian: a, b"),
    Record(2, "line\u2028and\rline\x85", JACOBIAN, -1, status='an error in\ntwo lines, "quoted"'),
    Record(2, "=1+1", "v", 0, status="non_finite", spectrum=(math.nan, math.inf)),
    Record(2, "encoder.0", "q", 0, kappa=2.0, sigma_max=1.0, sigma_min=0.5, spectrum=(1.0, 1 / 3, 0.5)),
]


class Keep:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = 0

    def write(self, records: Sequence[Record]) -> None:
        self.records += records

    def close(self) -> None:
        self.closed += 1


def same(left: Sequence[Record], right: Sequence[Record]) -> bool:
    return [repr(each) for each in left] == [repr(each) for each in right]  # repr, since NaN is not NaN


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SINKS)
def test_files_give_back_every_bit(suffix: str, tmp_path: Path) -> None:
    """F19: inf and NaN too."""
    path = tmp_path / f"run{suffix}"
    sink = SINKS[suffix](path)
    sink.write(RECORDS[:4])
    sink.write(RECORDS[4:])
    sink.close()
    assert same(read_records(path), RECORDS)
    with pytest.raises(FileExistsError):
        SINKS[suffix](path)
    sink = SINKS[suffix](path, exist="replace")
    sink.write(RECORDS[:1])
    sink.close()
    assert same(read_records(path), RECORDS[:1])
    if suffix != ".parquet":
        sink = SINKS[suffix](path, exist="append")
        sink.write(RECORDS[1:])
        sink.close()
        assert same(read_records(path), RECORDS)
        for line in path.read_text(encoding="utf-8").splitlines() if suffix == ".jsonl" else ():
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_folder_of_files_is_one_run(tmp_path: Path) -> None:
    for number, suffix in enumerate(SINKS):
        sink = SINKS[suffix](tmp_path / f"part{number}{suffix}")
        sink.write(RECORDS[3 * number : 3 * number + 3])
        sink.close()
    (tmp_path / "notes.txt").write_text("no records")
    assert same(read_records(tmp_path), RECORDS)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_file_cut_short_by_a_kill_keeps_its_whole_lines_and_is_continued(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"run{suffix}"
    sink = SINKS[suffix](path)
    sink.write(RECORDS)
    sink.close()
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        kept = read_records(path)
        assert same(kept, RECORDS[: len(kept)])
        if cut % 4 == 0:
            SINKS[suffix](path, exist="append").write(RECORDS[-1:])
            assert same(read_records(path), [*kept, RECORDS[-1]])


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_text_files_go_on_after_close_and_when_moved_away(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"run{suffix}"
    sink = SINKS[suffix](path)
    sink.write(RECORDS[:1])
    sink.close()
    sink.write(RECORDS[1:2])
    assert same(read_records(path), RECORDS[:2])
    path.rename(tmp_path / f"old{suffix}")
    sink.write(RECORDS[2:3])
    assert same(read_records(path), RECORDS[2:3])
    notes = tmp_path / f"notes{suffix}"
    notes.write_text("mine")
    with pytest.raises(ValueError, match="does not begin with"):
        SINKS[suffix](notes, exist="append")
    assert notes.read_text() == "mine"


def test_what_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.jsonl, \.csv, \.parquet file"):
        read_records(tmp_path)
    for name, text, message in (
        ("a.txt", "", r"a\.txt must be one of"),
        ("a.jsonl", '{"step": 1}\n{"step": "x"}\n', "a.jsonl, line 1: not a record"),
        ("b.jsonl", "[1]\n2\n", "b.jsonl, line 1"),
        ("c.jsonl", '{"step": 1, "layer": "a", "projection": "q", "head": 0, "evil": 1}\n', "line 1.*evil"),
        ("a.csv", "step,layer\n1,b\n", "a.csv, line 2"),
        ("a.parquet", "nothing", "not a complete Parquet file"),
    ):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_records(path)


# --- scalars ---------------------------------------------------------------------------------------------------------


def test_f19_summaries_are_finite_and_count() -> None:
    rows = dict(summarize(RECORDS))
    assert rows[0] == {
        "log10_kappa_max/q/encoder.0": 16.0,
        "log10_kappa_median/q/encoder.0": math.log10(1.5),
        "sigma_min/q/encoder.0": 0.0,
        "log10_kappa_max/k.rope/encoder.0": 16.0,
        "log10_kappa_median/k.rope/encoder.0": 16.0,
        "nonfinite_heads": 2.0,
    }
    assert rows[1] == {
        "log10_kappa_max/jacobian": math.log10(120.5),
        "log10_kappa_median/jacobian": math.log10(120.5),
        "log10_bound_max/jacobian": math.log10(5e4),
        "nonfinite_jacobians": 0.0,
    }
    assert set(rows) == {0, 1}


def test_tensorboard_file_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from conditioned_kernels.integrations.tensorboard import TensorBoardSink

    sink = TensorBoardSink(tmp_path)
    sink.write(RECORDS[:3])
    sink.write(RECORDS[3:])
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for step, scalars in summarize(RECORDS):
        for tag, value in scalars.items():
            [event] = [each for each in events.Scalars(f"conditioning/{tag}") if each.step == step]
            assert event.value == pytest.approx(value, rel=1e-6)
    [histogram] = [each for each in events.Histograms("conditioning/log10_kappa/q") if each.step == 0]
    assert histogram.histogram_value.num == 2 and histogram.histogram_value.max == 16


def test_wandb_run_interface() -> None:
    """Against the calls that wandb's Run documents: define_metric(name, step_metric=) and log(dict)."""
    from conditioned_kernels.integrations.wandb import WandbSink

    class Run:
        def __init__(self) -> None:
            self.metrics: dict[str, str | None] = {}
            self.rows: list[dict[str, float]] = []

        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            self.metrics[name] = step_metric

        def log(self, data: dict[str, float]) -> None:
            self.rows.append(data)

    run = Run()
    sink = WandbSink(run)
    sink.write(RECORDS)
    sink.close()
    assert run.metrics == {"conditioning/step": None, "conditioning/*": "conditioning/step"}
    expected = [
        {"conditioning/step": step} | {f"conditioning/{tag}": value for tag, value in scalars.items()}
        for step, scalars in summarize(RECORDS)
    ]
    assert run.rows == expected
    assert all(math.isfinite(value) for row in run.rows for value in row.values())


def wandb_log(path: Path) -> Iterator[Any]:
    """The records of a run's file: blocks of 32 KiB after 7 bytes, of pieces under (checksum, length, kind)."""
    from wandb.proto.wandb_internal_pb2 import Record as Logged

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 0 < (left := -at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield Logged.FromString(whole)
            whole = b""


def test_wandb_itself_offline_read_back(tmp_path: Path) -> None:
    """Beside the training's own rows, whose step only goes up while the monitor's records come later."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from conditioned_kernels.integrations.wandb import WandbSink

    run = wandb.init(mode="offline", project="test", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    sink = WandbSink()
    run.log({"loss": 1.0})
    sink.write(RECORDS[:3])
    run.log({"loss": 0.5})
    sink.write(RECORDS[3:])
    sink.close()
    run.finish()
    wandb.teardown()  # waits until the file is written
    [path] = tmp_path.rglob("*.wandb")
    rows, axes = [], {}
    for logged in wandb_log(path):
        if logged.WhichOneof("record_type") == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in logged.history.item}
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
        elif logged.WhichOneof("record_type") == "metric":
            axes[logged.metric.name or logged.metric.glob_name] = logged.metric.step_metric
    assert axes == {"conditioning/step": "", "conditioning/*": "conditioning/step"}
    (_, first), (_, second) = summarize(RECORDS)
    assert rows == [
        {"loss": 1.0},
        {"conditioning/step": 0} | {f"conditioning/{tag}": value for tag, value in first.items()},
        {"loss": 0.5},
        {"conditioning/step": 1} | {f"conditioning/{tag}": value for tag, value in second.items()},
    ]


def test_live_view() -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    from rich.console import Console

    from conditioned_kernels.integrations.live import LAYERS, LiveView

    text = io.StringIO()
    view = LiveView(Console(file=text, width=120))
    view.write(RECORDS)
    view.write([Record(3, f"block.{i}", "q", 0, kappa=10.0 + i) for i in range(LAYERS + 3)])
    view.close()
    shown = text.getvalue()
    assert "Condition numbers after step 3" in shown and "W_Q" in shown and "Jacobian" in shown
    assert "encoder.0" in shown and "1.5  inf" in shown and "120.5" in shown
    assert f"the worst {LAYERS} of" in shown and "2 heads without a finite kappa" in shown
    assert f"block.{LAYERS + 2}" in shown and "block.0 " not in shown


# --- alerts ----------------------------------------------------------------------------------------------------------


def rows(*kappas: float, sigma_min: Sequence[float] = ()) -> list[Record]:
    sigmas = sigma_min or [1 / kappa for kappa in kappas]
    return [
        Record(2 * i, "h.3.attn", "k", 7, kappa=kappa, sigma_max=1.0, sigma_min=sigma)
        for i, (kappa, sigma) in enumerate(zip(kappas, sigmas, strict=True))
    ]


@pytest.mark.parametrize(
    ("make", "records", "steps", "words"),
    [
        (lambda to: KappaAbove(10, callback=to), rows(5, 11, 12, 9, 20, math.nan, 3, math.inf), [2, 8, 14], "above 10"),
        (lambda to: KappaGrowth(1.5, callback=to), rows(2, 4, 10, 10, 40, 41, math.inf, 2), [4, 8, 12], "kappa went"),
        (
            lambda to: SigmaCollapse(0.1, callback=to),
            rows(*[2.0] * 6, sigma_min=[1.0, 0.2, 0.09, 0.05, 0.5, 0.01]),
            [4, 10],
            "sigma_min fell from 1",
        ),
    ],
    ids=["above", "growth", "collapse"],
)
def test_alerts_name_the_head_and_speak_once(make: Any, records: list[Record], steps: list[int], words: str) -> None:
    said: list[tuple[str, Record]] = []
    alert: Alert = make(lambda message, record: said.append((message, record)))
    for record in records:
        alert.check([record])
    assert [record.step for _, record in said] == steps
    for message, record in said:
        assert message.startswith(f"step {record.step}: h.3.attn k head 7: ") and words in message


def test_alerts_refuse_what_can_never_or_always_hold() -> None:
    for make, name in (
        (lambda: KappaAbove(0), "threshold"),
        (lambda: KappaGrowth(1.0), "per_step"),
        (lambda: SigmaCollapse(1.0), "fraction"),
    ):
        with pytest.raises(ValueError, match=name):
            make()


def test_alerts_and_sinks_of_a_monitor() -> None:
    """The default callback warns; a callback's exception stops the run; a sink's never does."""

    class Full(Keep):
        def write(self, records: Sequence[Record]) -> None:
            raise OSError("no space left on device")

    model = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    keep, full = Keep(), Full()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = ConditioningMonitor(model, sinks=[full, keep], alerts=[KappaAbove(1.0)], spectra=0)
        monitor.step()
        monitor.flush()
        monitor.step()
        monitor.close()
    messages = [str(each.message) for each in caught]
    assert messages[0] == "Full failed and is dropped: OSError: no space left on device"
    assert len(messages) == 1 + 6 and all("self_attn" in message for message in messages[1:])
    assert len(keep.records) == 3 * 6 and (keep.closed, full.closed) == (1, 0)

    def stop(message: str, record: Record) -> None:
        raise KeyboardInterrupt(message)

    monitor = ConditioningMonitor(model, alerts=[KappaAbove(1.0, callback=stop)])
    with pytest.raises(KeyboardInterrupt, match="step 0: self_attn q head 0: kappa"):
        monitor.flush()


# --- trainers --------------------------------------------------------------------------------------------------------


def exact(model: nn.Module, layer: str, role: str, head: int) -> float:
    for found in ck.find_attention(model).layers:
        for projection in found.projections:
            if (found.name, projection.label) == (layer, role):
                return float(torch.linalg.cond(projection.view(found.weight(projection).detach())[head].double()))
    raise AssertionError(layer)


def library_text() -> bytes:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:20])


def test_hugging_face_trainer(tmp_path: Path) -> None:
    """A small GPT-2 on the standard library's sources, with accumulated gradients, with the monitor and without."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")
    from conditioned_kernels.integrations.transformers import ConditioningCallback

    text = torch.tensor(list(library_text()[: 32 * 400]))
    data = [{"input_ids": each, "labels": each} for each in text.split(32)]
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=256, n_positions=32, bos_token_id=0, eos_token_id=0
    )

    def run(callbacks: list[Any], steps: int = 12, **options: Any) -> tuple[nn.Module, list[float]]:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()
        return model, [row["loss"] for row in trainer.state.log_history if "loss" in row]

    sink = Keep()
    callback = ConditioningCallback(sinks=[sink], activations_every=5, tokens=4, flush_every=4)
    model, losses = run([callback])
    plain, plain_losses = run([])
    assert losses == plain_losses and losses[-1] < losses[0]
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    weights = [record for record in sink.records if record.projection != JACOBIAN and not record.spectrum]
    assert {record.step for record in weights} == set(range(13))
    assert len(weights) == 13 * 2 * 3 * 2
    for record in (each for each in weights if each.step == 12):
        kappa = exact(model, record.layer, record.projection, record.head)
        assert record.low * (1 - 1e-9) <= kappa <= record.high * (1 + 1e-9)
    seen = {(record.step, record.head) for record in sink.records if record.projection == JACOBIAN}
    assert seen == {(step, head) for step in (0, 5, 10) for head in (0, 1)}
    assert sink.closed == 1 and callback.monitor is not None and not callback.monitor.silent


def test_a_trainer_that_fails_and_then_trains_again(tmp_path: Path) -> None:
    """Trainer tells its callbacks of no error: the next run closes the failed one's monitor, and the file has both."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")
    from conditioned_kernels.integrations.transformers import ConditioningCallback

    class Fail(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise ZeroDivisionError

    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    data = [{"input_ids": each, "labels": each} for each in torch.randint(32, (24, 8))]
    callback = ConditioningCallback(sinks=[JsonlSink(tmp_path / "run.jsonl")], activations_every=1)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback, Fail()])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert any(module._forward_pre_hooks for module in model.modules())
    trainer.remove_callback(Fail)
    trainer.train()
    assert not any(module._forward_pre_hooks for module in model.modules())
    steps = [each.step for each in read_records(tmp_path / "run.jsonl") if each.projection == "q" and not each.spectrum]
    assert Counter(steps) == {0: 4, 1: 4, 2: 4, 3: 2}


def test_lightning_trainer_with_tensorboard(tmp_path: Path) -> None:
    """A ViT on the digits by Lightning, its figures in TensorBoard."""
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    timm = pytest.importorskip("timm", reason="timm is not installed")
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from conditioned_kernels.integrations.lightning import ConditioningCallback
    from conditioned_kernels.integrations.tensorboard import TensorBoardSink

    images, labels = datasets.load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16

    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.vit = timm.models.VisionTransformer(
                img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=32, depth=2, num_heads=2
            )

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.vit(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    torch.manual_seed(0)
    module = Digits()
    data = torch.utils.data.TensorDataset(images[:640], torch.tensor(labels[:640]))
    keep = Keep()
    callback = ConditioningCallback(
        sinks=[keep, TensorBoardSink(tmp_path / "board")], activations_every=8, tokens=6, layers_per_step=1
    )
    trainer = lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        default_root_dir=tmp_path,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about loaders and loggers
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=32, shuffle=True))
    assert trainer.global_step == 10 and callback.monitor is not None and not callback.monitor.silent
    weights = [record for record in keep.records if record.projection != JACOBIAN and not record.spectrum]
    assert {record.step for record in weights} == set(range(11))
    assert {record.layer for record in weights} == {"vit.blocks.0.attn", "vit.blocks.1.attn"}
    for record in (each for each in weights if each.step == 10):
        kappa = exact(module, record.layer, record.projection, record.head)
        assert record.low * (1 - 1e-9) <= kappa <= record.high * (1 + 1e-9)
    jacobians = [record for record in keep.records if record.projection == JACOBIAN]
    assert {record.step for record in jacobians} == {0, 8} and all(record.head >= 0 for record in jacobians)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for step, scalars in summarize(keep.records):
        for tag, value in scalars.items():
            [event] = [each for each in events.Scalars(f"conditioning/{tag}") if each.step == step]
            assert event.value == pytest.approx(value, rel=1e-5)


def test_record_fields_are_documented() -> None:
    text = Record.__doc__ or ""
    assert all(field.name in text for field in dataclasses.fields(Record))
