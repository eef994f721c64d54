"""Soak: ``init``, ``verify`` and ``inspect`` of many random models and checkpoints, with faults.

``python -m benchmarks.soak --cells 500 --json FILE`` draws that many cells (family, sizes, dtype, storage, options,
fault) from a seed, runs each in a scratch folder, and judges what happened by an oracle of its own: the file read by
the safetensors library, its tensors loaded into the real model, and float64 singular values of every head. About a
quarter of the cells are streamed to shards (``--shard-size``): there a fault leaves finished shards, of which in some
cells one is damaged too, and the same command must then continue and come to the right result.

An outcome is one of

- done right: verify holds, the oracle agrees, every number of inspect is bracketed rightly;
- refused clearly: an error of a class and with a sentence that the command line prints, and nothing changed on disk;
- wrong: verify and the oracle disagree, a damaged file was taken, or an error was none of the above;
- lost: a file that was there is gone or half-written, or a half-written one can be seen.

The last two must not happen; the exit code says whether they did.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from conditioned_kernels import architectures
from conditioned_kernels.bench.machine import environment
from conditioned_kernels.bench.tables import Table, markdown
from conditioned_kernels.file_schemes import InitOptions
from conditioned_kernels.initialize.measure import sigma_tolerance
from conditioned_kernels.initialize.scope import Scope, locate
from conditioned_kernels.initialize.target import resolve
from conditioned_kernels.shards import INDEX, NOTES
from conditioned_kernels.sources import init_file, measure_source
from conditioned_kernels.verify import judge

RIGHT, REFUSED, WRONG, LOST = "done right", "refused clearly", "wrong", "lost"
BAD = (WRONG, LOST)
MOST_MEMORY = 8 << 30
CLEAR = (ValueError, TypeError, RuntimeError, OSError, MemoryError)
"""What the command line turns into one line; anything else would be a traceback."""


class Family(NamedTuple):
    """A transformers model type: the names its configuration has for the sizes, and what else keeps it small."""

    model_type: str
    width: str = "hidden_size"
    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    more: Mapping[str, Any] = {}
    kv: str = ""
    head_dim: str = ""


TEXT = {"vocab_size": 40, "max_position_embeddings": 32, "intermediate_size": 24}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"kv": "num_key_value_heads", "more": TEXT | IDS}
PICTURE = {"image_size": 8, "patch_size": 4, "intermediate_size": 24}
GPT = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES = (
    Family("gpt2", "n_embd", "n_head", "n_layer", GPT | {"n_positions": 32}),
    Family("gptj", "n_embd", "n_head", "n_layer", GPT | {"n_positions": 32, "rotary_dim": 4}),
    Family("gpt_neox", more=TEXT | IDS),
    Family("bloom", heads="n_head", layers="n_layer", more=GPT),
    Family("opt", more=IDS | {"vocab_size": 40, "max_position_embeddings": 32, "ffn_dim": 24}),
    Family("bert", more=TEXT),
    Family("roberta", more=TEXT | IDS),
    Family("electra", more=TEXT | {"embedding_size": 16}),
    Family("distilbert", "dim", "n_heads", "n_layers", {"vocab_size": 40, "hidden_dim": 24}),
    Family("nystromformer", more=TEXT | {"num_landmarks": 2, "segment_means_seq_len": 8}),
    Family("modernbert", more=TEXT | IDS | {"cls_token_id": 1, "sep_token_id": 2}),
    Family("t5", "d_model", "num_heads", "num_layers", {"vocab_size": 40, "d_ff": 24}, head_dim="d_kv"),
    Family("vit", more=PICTURE),
    Family("deit", more=PICTURE),
    Family("dinov2", more={"image_size": 8, "patch_size": 4, "mlp_ratio": 2}),
    Family("llama", **LLAMA, head_dim="head_dim"),
    Family("mistral", **LLAMA, head_dim="head_dim"),
    Family("qwen2", **LLAMA),
    Family("qwen3", **LLAMA, head_dim="head_dim"),
    Family("gemma", **LLAMA, head_dim="head_dim"),
    Family("gemma2", **LLAMA, head_dim="head_dim"),
    Family("phi", **LLAMA),
    Family("olmo2", **LLAMA),
    Family("starcoder2", **LLAMA),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
FAULTS = (
    *("none",) * 10,
    "kill while writing",
    "kill at any moment",
    "truncated",
    "flipped bits in the header",
    "flipped bits in the data",
    "broken config.json",
    "file size limit",
    "full disk",
)


@dataclass(frozen=True)
class Cell:
    """One run; everything is drawn from (seed, number)."""

    number: int
    seed: int
    family: str
    source: str
    config: dict[str, Any] | None
    dtype: str
    storage: str
    gain: Any
    value: str
    attention_only: bool
    to_folder: bool
    replaces: bool
    fault: str
    shard_size: int | None = None

    @property
    def options(self) -> InitOptions:
        """What ``init`` is asked for."""
        return InitOptions(self.number, options={"gain": self.gain, "value": self.value})


def draw(seed: int, number: int) -> Cell:
    """The cell ``number`` of a soak."""
    rng = random.Random(f"{seed}/{number}")
    heads, head_dim, layers = rng.choice((1, 2, 4)), rng.choice((4, 8, 16)), rng.choice((1, 2, 3))
    width = heads * head_dim
    if rng.random() < 0.1:
        family, source, config = "torch", f"torch:encoder-{layers}x{width}x{heads}", None
    else:
        chosen = rng.choice(FAMILIES)
        family, source = chosen.model_type, f"transformers:{chosen.model_type}"
        config = {chosen.width: width, chosen.heads: heads, chosen.layers: layers, **chosen.more}
        if chosen.kv:
            config[chosen.kv] = rng.choice([n for n in (1, 2, 4) if heads % n == 0])
        if chosen.head_dim:
            config[chosen.head_dim] = rng.choice([n for n in (4, 8, 16) if n <= width])
    storage = rng.choice(("architecture", "architecture", "file", "folder", "shards", "torch"))
    return Cell(
        number,
        seed,
        family,
        source,
        config,
        rng.choice(list(DTYPES)),
        storage,
        rng.choice(("unit", "unit", "preserve", 0.5)),
        rng.choice(("block", "repeat", "semi_orthogonal", "keep")),
        rng.random() < 0.3,
        to_folder := rng.random() < 0.5,
        rng.random() < 0.5,
        rng.choice(FAULTS),
        rng.choice((None, 1 << 10, 1 << 13, 1 << 16)) if to_folder else None,
    )


class Soak:
    """Runs cells in a scratch folder, one after the other."""

    def __init__(self, scratch: Path, small_disk: Path | None) -> None:
        self.scratch, self.small_disk = scratch, small_disk

    def run(self, cell: Cell) -> tuple[str, str]:
        """(outcome, why)."""
        folder = self.scratch / str(cell.number)
        folder.mkdir()
        try:
            return Run(cell, folder, self.small_disk).outcome()
        finally:
            shutil.rmtree(folder)
            if self.small_disk is not None:
                for path in self.small_disk.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


class Run:
    """One cell."""

    def __init__(self, cell: Cell, folder: Path, small_disk: Path | None) -> None:
        self.cell, self.folder = cell, folder
        self.rng = random.Random(f"{cell.seed}/{cell.number}/run")
        self.config: Path | None = None
        if cell.config is not None:
            self.config = folder / "given.json"
            self.config.write_text(json.dumps(cell.config))
        self.disk = small_disk if cell.fault == "full disk" and small_disk is not None else None
        base = self.disk or folder
        self.out = base / "out" if cell.to_folder else base / "out.safetensors"
        self.file = self.out / "model.safetensors" if cell.to_folder else self.out
        self.streamed = cell.shard_size is not None
        self.before: dict[str, bytes] = {}

    @property
    def written(self) -> list[Path]:
        """The files of weights that are there, one or several."""
        return sorted(self.out.glob("*.safetensors")) if self.streamed else [self.file]

    def tensors(self) -> dict[str, Tensor]:
        """What the written files hold."""
        return {name: value for path in self.written for name, value in load_file(path).items()}

    # --- what is there before ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """The source, and an older result where one is to be replaced."""
        cell = self.cell
        self.model = architectures.build(cell.source, config=self.config, seed=cell.number)
        self.like: str | None = cell.source
        self.source = cell.source
        if cell.storage != "architecture":
            self._store(self.model.to(DTYPES[cell.dtype]))
        if cell.replaces:
            self.out.mkdir(parents=True) if cell.to_folder else None
            save_file({"old": torch.arange(5.0)}, self.file)
        self.before = self._content()

    def _store(self, model: nn.Module) -> None:
        """Write the model as a checkpoint of the cell's kind."""
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        state = {name: value.clone() for name, value in model.state_dict().items() if name not in tied}
        place = self.folder / "source"
        place.mkdir()
        self.source = str(place)
        if self.cell.storage == "file":
            self.source = str(place / "weights.safetensors")
            save_file(state, self.source, {"format": "pt"})
            return
        if hasattr(model, "config"):
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(place)
            self.like = None
        if self.cell.storage == "folder":
            save_file(state, place / "model.safetensors", {"format": "pt"})
        elif self.cell.storage == "torch":
            torch.save(state, place / "pytorch_model.bin")
        else:
            names = list(state)
            halves = (names[: len(names) // 2], names[len(names) // 2 :])
            files = [f"model-{i}-of-2.safetensors" for i in (1, 2)]
            for file, part in zip(files, halves, strict=True):
                save_file({name: state[name] for name in part}, place / file, {"format": "pt"})
            weight_map = {name: file for file, part in zip(files, halves, strict=True) for name in part}
            (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    # --- what is done -----------------------------------------------------------------------------------------------

    def init(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """The command ``init``."""
        cell = self.cell
        init_file(
            self.source,
            self.out,
            options=cell.options,
            like=None if architectures.is_architecture(self.source) else self.like,
            config=self.config if architectures.is_architecture(self.source) or self.like else None,
            dtype=DTYPES[cell.dtype],
            attention_only=cell.attention_only,
            shard_size=cell.shard_size,
            # A folder of shards that has another model is to be kept, so that nothing of it may change.
            force=cell.replaces and not self.streamed,
            progress=progress,
        )

    def measured(self, source: Path | str) -> Any:
        """The command ``inspect``."""
        return measure_source(str(source), like=self.cell.source, config=self.config)[0]

    def outcome(self) -> tuple[str, str]:
        """Run the cell, judge it."""
        self.prepare()
        fault = self.cell.fault
        try:
            if fault == "none":
                self.init()
                return self.judged()
            if fault.startswith("kill"):
                return self._killed(at_any_moment=fault == "kill at any moment")
            if fault in ("file size limit", "full disk"):
                return self._no_room()
            if fault == "broken config.json":
                return self._broken_config()
            return self._damaged(fault)
        except CLEAR as error:
            return self._refused(error)
        except Exception as error:
            return WRONG, f"{type(error).__name__}: {error}"

    def _refused(self, error: BaseException) -> tuple[str, str]:
        if not str(error).strip():
            return WRONG, f"{type(error).__name__} without a sentence"
        changed = self._harm()
        if changed and self.streamed and not self.cell.replaces:
            # Finished shards stay, for the same command to continue.
            outcome, why = self._continued()
            return (REFUSED if outcome == RIGHT else outcome), f"{str(error).splitlines()[0]}; continued: {why}"
        why = str(error).splitlines()[0].replace(str(self.out), "OUT").replace(str(self.folder), "SCRATCH")
        return (LOST, changed) if changed else (REFUSED, f"{type(error).__name__}: {why}")

    # --- faults -----------------------------------------------------------------------------------------------------

    def _killed(self, *, at_any_moment: bool) -> tuple[str, str]:
        """SIGKILL a child in the middle; then the same command must succeed."""
        part, most = self.rng.random(), 0.4 * self.rng.random()

        def stop(done: int, total: int) -> None:
            if done >= part * total:
                os.kill(os.getpid(), signal.SIGKILL)

        def child() -> None:
            self.init() if at_any_moment else self.init(stop)

        ended = _in_child(child, kill_after=most if at_any_moment else None)
        harm = self._harm()
        if self.streamed and not self.cell.replaces:
            outcome, why = self._continued()
            return outcome, f"{ended}, then continued: {why}"
        if harm and not self._complete():
            return LOST, f"after {ended}: {harm}"
        if self.file.exists() and not self.cell.replaces:
            self.file.unlink()
        self.init()
        outcome, why = self.judged()
        return outcome, f"{ended}, then repeated: {why}"

    def _continued(self) -> tuple[str, str]:
        """The same command after it was stopped, with room on the disk; in some cells a finished shard is damaged."""
        for path in self.written:
            try:
                load_file(path)
            except Exception as error:  # the library has a class of its own for every kind of damage
                return LOST, f"the shard {path.name} is half-written: {error}"
        if (self.out / INDEX).exists():
            return self.judged()
        if self.disk is not None:
            (self.disk / "filler").unlink(missing_ok=True)
        if self.written and self.rng.random() < 0.3:
            victim = self.rng.choice(self.written)
            data = bytearray(victim.read_bytes())
            data[self.rng.randrange(len(data))] ^= 1
            victim.write_bytes(bytes(data))
        if not (self.out / NOTES).exists() and self.written:
            return self.judged()  # one shard, complete, needs no index
        self.init()
        return self.judged()

    def _no_room(self) -> tuple[str, str]:
        """A limit on the file's size, or a disk that ends somewhere: in the weights, or just behind them."""
        part = self.rng.random()
        if self.disk is None:
            with _file_size_limit(max(1, int(part * self._rehearsed()))):
                self.init()
        elif self.rng.random() < 0.5:
            _fill(self.disk, leave=self._rehearsed())
            self.init()
        else:
            self.init(lambda done, total: _fill(self.disk, leave=0) if done >= part * total else None)
        outcome, why = self.judged()
        return outcome, f"there was room: {why}"

    def _rehearsed(self) -> int:
        """Bytes of the weights' files, from writing them elsewhere; under a limit per file, of the largest shard."""
        out, self.out = self.out, self.folder / ("rehearsal" if self.streamed else "rehearsal.safetensors")
        file, self.file = self.file, self.out
        self.init()
        sizes = [path.stat().st_size for path in self.written]
        shutil.rmtree(self.out) if self.streamed else self.out.unlink()
        self.out, self.file = out, file
        return max(sizes) if self.disk is None else sum(sizes)

    def _broken_config(self) -> tuple[str, str]:
        """A configuration that is no JSON object, or none of this type."""
        broken = (b"{", b"[1, 2]", b'{"model_type": "nothing"}', b"\xff\xfe\x00", b'{"hidden_size": "wide"}', b"null")
        target = Path(self.source) / "config.json" if self.like is None else self.config
        if target is None:
            return RIGHT, "no configuration to break"
        target.write_bytes(self.rng.choice(broken))
        try:
            self.init()
        except CLEAR as error:
            return self._refused(error)
        return WRONG, f"init took the configuration {target.read_bytes()!r}"

    def _damaged(self, fault: str) -> tuple[str, str]:
        """Write a good file, damage it, and look at it with ``verify``, ``inspect`` and ``init``."""
        self.init()
        victim = self.rng.choice(self.written)
        good = victim.read_bytes()
        header = 8 + int.from_bytes(good[:8], "little")
        if fault == "truncated":
            bad = good[: self.rng.randrange(len(good))]
        else:
            low, high = (0, header) if fault.endswith("header") else (header, len(good))
            flipped = bytearray(good)
            for _ in range(self.rng.randint(1, 4)):
                flipped[self.rng.randrange(low, high)] ^= 1 << self.rng.randrange(8)
            bad = bytes(flipped)
        victim.write_bytes(bad)
        again = self.folder / "again.safetensors"
        try:
            truth = self.tensors()
        except Exception:  # the library has a class of its own for every kind of damage
            truth = {}
        try:
            source = self.out if self.streamed else self.file
            entries = self.measured(source)
            init_file(str(source), again, options=self.cell.options, like=self.cell.source, config=self.config)
        except CLEAR as error:
            if again.exists():
                return LOST, "init left a file behind"
            return REFUSED, f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if not truth or fault == "truncated":
            return WRONG, f"a file that is none was taken: {len(bad)} bytes of {len(good)}"
        # The format has no checksum: a flipped weight is a weight. What is said about it must be true of it.
        return self._agree(entries, truth)

    # --- the oracle -------------------------------------------------------------------------------------------------

    def judged(self) -> tuple[str, str]:
        """Is the written file what was asked for, and is it reported so?"""
        tensors = self.tensors()
        outcome, why = self._agree(self.measured(self.out if self.streamed else self.file), tensors)
        if outcome != RIGHT:
            return outcome, why
        if stray := self._stray():
            return LOST, stray
        names = {target.name for target in resolve(locate(self.model, Scope(strict=False)))}
        if self.cell.attention_only and set(tensors) != names:
            return WRONG, f"--attention-only wrote {sorted(set(tensors) ^ names)}"
        original = self.model.state_dict()
        for name, value in tensors.items():
            drawn = name in names or (self.streamed and self.cell.storage == "architecture")
            if not drawn and not torch.equal(value, original[name].to(value.dtype)):
                return WRONG, f"{name} changed"
            if value.is_floating_point() and not bool(value.isfinite().all()):
                return WRONG, f"{name} has no value"
        if self.streamed and (bad := self._unlike_index(tensors, original)):
            return WRONG, bad
        return RIGHT, why

    def _unlike_index(self, tensors: Mapping[str, Tensor], original: Mapping[str, Tensor]) -> str:
        """What is wrong with a folder of shards as a whole; "" if nothing is."""
        if len(self.written) > 1:
            listed = json.loads((self.out / INDEX).read_text())["weight_map"]
            if {name: path.name for path in self.written for name in load_file(path)} != listed:
                return "the index does not say where the tensors are"
        if (self.out / NOTES).exists():
            return "the folder still counts as unfinished"
        for path in self.written:
            held = load_file(path)
            if len(held) > 1 and sum(value.nbytes for value in held.values()) > (self.cell.shard_size or 0):
                return f"{path.name} is larger than a shard shall be"
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        missing = set(original) - set(tensors) - tied
        return f"{min(missing)} is missing" if missing and not self.cell.attention_only else ""

    def _agree(self, entries: Sequence[Any], tensors: dict[str, Tensor]) -> tuple[str, str]:
        """verify against float64 singular values of every head, and inspect's brackets against them."""
        model = architectures.build(self.cell.source, config=self.config)
        state = model.state_dict()
        if missing := [name for name in state if name in tensors and state[name].shape != tensors[name].shape]:
            return WRONG, f"a tensor of another shape was taken: {missing[0]}"
        model.to(next(iter(tensors.values())).dtype)
        model.load_state_dict(tensors, strict=False, assign=True)
        gain, roles = self.expected()
        verified = judge(entries, gain=gain, roles=roles).ok
        right = True
        places = {(entry.parameter, entry.label): entry for entry in entries}
        for target in resolve(locate(model, Scope(strict=False))):
            sigma = _singular_values(target.heads)
            entry = places[target.name, target.stream_role]
            if bad := _outside(entry.estimate, sigma):
                return WRONG, f"{target.name} ({entry.label}): {bad}"
            if set(entry.role) <= set(roles):
                scale = sigma[:, :1] if gain == "any" else torch.tensor(1.0 if gain == "unit" else float(gain))
                off = (sigma / scale - 1).abs().max().nan_to_num(torch.inf)
                right = right and float(off) <= sigma_tolerance(entry.dtype)
        if verified == right:
            return (RIGHT, "verify holds") if right else (REFUSED, "verify fails, as it must")
        return WRONG, f"verify {'holds' if verified else 'fails'}, the singular values say otherwise"

    def expected(self) -> tuple[Any, str]:
        """What ``verify`` is asked for: (gain, roles)."""
        gain = "any" if self.cell.gain == "preserve" else self.cell.gain
        return gain, "qk" if self.cell.value == "keep" else "qkv"

    # --- the disk ---------------------------------------------------------------------------------------------------

    def _content(self) -> dict[str, bytes]:
        """Every file at the destination by its relative name."""
        base = self.out if self.cell.to_folder else self.out.parent
        if not base.is_dir():
            return {}
        files = [path for path in base.rglob("*") if path.is_file() and path.name != "filler"]
        if not self.cell.to_folder:
            files = [path for path in files if self.out.name in path.name]
        return {str(path.relative_to(base)): path.read_bytes() for path in files}

    def _harm(self) -> str:
        """What changed at the destination, apart from hidden unfinished files; "" if nothing did."""
        now = {name: data for name, data in self._content().items() if not _hidden(name)}
        for name in sorted(set(now) | set(self.before)):
            if now.get(name) != self.before.get(name):
                state = "is gone" if name not in now else "is new" if name not in self.before else "has other content"
                return f"{name} {state}"
        return ""

    def _stray(self) -> str:
        hidden = [name for name in self._content() if _hidden(name)]
        killed = self.cell.fault.startswith("kill")
        return f"left behind: {hidden[0]}" if hidden and not killed else ""

    def _complete(self) -> bool:
        """Whether the whole new file is there, with what belongs beside it."""
        try:
            return self.judged()[0] == RIGHT
        except (OSError, *CLEAR):
            return False


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in Path(name).parts)


def _singular_values(heads: Tensor) -> Tensor:
    heads = heads.detach().double()
    finite = heads.isfinite().all(-1).all(-1)
    sigma = torch.full((len(heads), min(heads.shape[-2:])), torch.nan, dtype=torch.float64)
    if bool(finite.any()):
        sigma[finite] = torch.linalg.svdvals(heads[finite])
    return sigma


def _outside(estimate: Any, sigma: Tensor) -> str:
    """Which bracket misses the singular values; "" if all hold."""
    slack = 1e-12
    for name, values in (("sigma_max", sigma[:, 0]), ("sigma_min", sigma[:, -1])):
        low, high = getattr(estimate, f"{name}_low"), getattr(estimate, f"{name}_high")
        ok = (low <= values * (1 + slack) + 1e-300) & (values * (1 - slack) <= high + sigma[:, 0] * 1e-15)
        if not bool((ok | (values.isnan() & estimate.nonfinite)).all()):
            return f"the bracket of {name} misses it"
    return ""


def _in_child(run: Callable[[], None], kill_after: float | None) -> str:
    """Run in a forked child, kill it after so many seconds if given; how it ended, in words."""
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        except BaseException:
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "killed" if status == -signal.SIGKILL else f"ended with {status}"


@contextmanager
def _file_size_limit(size: int) -> Iterator[None]:
    """No file may grow beyond ``size``; the system says so by EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _fill(disk: Path, leave: int) -> None:
    """Take all room of ``disk`` but that for one file of ``leave`` bytes."""
    filler = disk / "filler"
    if filler.exists():
        return
    page = os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError), open(filler, "wb") as file:
        file.write(b"0" * (shutil.disk_usage(disk).free - -(-leave // page) * page))
        file.flush()


@contextmanager
def small_disk(size: str = "1m") -> Iterator[Path | None]:
    """A file system of that size in memory, or None where mounting is not allowed."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        mounted = shutil.which("mount") is not None and not subprocess.run(command, capture_output=True).returncode
        try:
            yield Path(folder) if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", folder], check=True)


def soak(cells: int, seed: int, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The record of a soak; plain data for JSON."""
    outcomes: list[tuple[Cell, str, str]] = []
    start = time.perf_counter()
    with small_disk() as disk, tempfile.TemporaryDirectory() as scratch:
        runner = Soak(Path(scratch), disk)
        for number in range(cells):
            cell = draw(seed, number)
            outcome, why = runner.run(cell)
            outcomes.append((cell, outcome, why))
            if outcome in BAD:
                say(f"{outcome}: cell {number}, {cell.fault}: {why}\n  {cell}")
        full_disk = "a small file system in memory" if disk else "a limit on the file size (mounting is not allowed)"
    by_fault: dict[str, Counter[str]] = {}
    for cell, outcome, _ in outcomes:
        by_fault.setdefault(cell.fault, Counter())[outcome] += 1
    return {
        "environment": environment(torch.device("cpu")),
        "seed": seed,
        "cells": cells,
        "families": sorted({cell.family for cell, _, _ in outcomes}),
        "streamed to shards": sum(cell.shard_size is not None for cell, _, _ in outcomes),
        "full disk": full_disk,
        "seconds": time.perf_counter() - start,
        "counts": {kind: sum(counter[kind] for counter in by_fault.values()) for kind in (RIGHT, REFUSED, WRONG, LOST)},
        "by fault": {fault: dict(counter) for fault, counter in sorted(by_fault.items())},
        "refused without a fault": dict(
            Counter(why for cell, kind, why in outcomes if (kind, cell.fault) == (REFUSED, "none"))
        ),
        "bad": [{"cell": asdict(cell), "outcome": kind, "why": why} for cell, kind, why in outcomes if kind in BAD],
    }


def as_markdown(record: Mapping[str, Any]) -> str:
    """The README's table of a soak."""
    kinds = (RIGHT, REFUSED, WRONG, LOST)
    rows = [
        (fault, str(sum(counts.values())), *(str(counts.get(kind, 0)) for kind in kinds))
        for fault, counts in record["by fault"].items()
    ]
    rows.append(("all", str(record["cells"]), *(str(record["counts"][kind]) for kind in kinds)))
    # Records of before there were any do not say so.
    streamed = record.get("streamed to shards", 0)
    title = (
        f"Soak, seed {record['seed']}: {record['cells']} models and checkpoints of {len(record['families'])} families, "
        f"{streamed} of them streamed to shards, {record['environment']['date']}; the full disk "
        f"was {record['full disk']}"
    )
    return markdown(Table(title, ("fault", "tried", *kinds), rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # matrices here are tiny
    # A configuration that is taken for what it is not can be of a model that fills the machine.
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    record = soak(options.cells, options.seed, lambda line: print(line, file=sys.stderr, flush=True))
    print(as_markdown(record))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(bool(record["bad"]))


if __name__ == "__main__":
    raise SystemExit(main())
