"""Measure and initialize models that are files: one tensor, or one attention layer, in memory at a time."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import architectures
from ._version import __version__
from .checkpoint import Checkpoint, CheckpointError, Entry, reason, write_safetensors
from .file_schemes import InitOptions
from .heads.discover import AttentionLayer
from .heads.layout import Projection
from .initialize import InitReport
from .initialize.init_report import ProjectionReport
from .initialize.materialize import Block, blocks, fill, forget, joined
from .initialize.measure import measure
from .initialize.scope import Scope, locate
from .initialize.target import resolve
from .shards import INDEX, clear_unfinished, write_shards

Progress = Callable[[int], None]

LENIENT = Scope(strict=False)


@contextmanager
def opened(
    path: str | Path, like: str | None, config: str | Path | None, *, outputs: bool = False
) -> Iterator[tuple[Checkpoint, nn.Module, dict[str, str]]]:
    """A checkpoint, its architecture on the meta device, and the map from its attention weights' names to the file's.

    The architecture is ``like``, else the ``config.json`` beside the file. With ``outputs``, W_O is in the map too.
    """
    with Checkpoint(path) as checkpoint:
        model = architectures.of_checkpoint(like, config, checkpoint.config)
        if model is None:
            raise CheckpointError(
                f"{path} does not say what model it is of, and no config.json lies beside it; name its architecture "
                "with --like, e.g. --like transformers:bert --config config.json"
            )
        targets = resolve(locate(model, LENIENT), outputs=outputs)
        yield checkpoint, model, match_names([target.name for target in targets], checkpoint)


def match_names(wanted: list[str], checkpoint: Checkpoint) -> dict[str, str]:
    """Names of the model to names in the file, which may add or lack one prefix, such as "bert.".

    Raises
    ------
    CheckpointError
        if no prefix fits all of them, or several do, as where a file has a model and its average.
    """
    wanted = list(dict.fromkeys(wanted))
    prefixes = {""}
    for name in checkpoint.entries:
        if name.endswith(wanted[0]):
            prefixes.add(name[: -len(wanted[0])])
    stripped = wanted[0].split(".")
    for i in range(1, len(stripped)):
        prefixes.add("-" + ".".join(stripped[:i]) + ".")
    best: dict[str, str] = {}
    complete: list[str] = []
    for prefix in sorted(prefixes, key=len):
        names = {name: name.removeprefix(prefix[1:]) if prefix.startswith("-") else prefix + name for name in wanted}
        found = {name: file for name, file in names.items() if file in checkpoint.entries}
        if len(found) > len(best):
            best = found
        if len(found) == len(wanted):
            complete.append(prefix)
    if len(complete) > 1 and "" not in complete:
        raise CheckpointError(
            f"{checkpoint.path} holds several models of this architecture, under {' and '.join(map(repr, complete))}; "
            "save the one that is meant into a file of its own"
        )
    missing = [name for name in wanted if name not in best]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(missing)} of the architecture's {len(wanted)} attention weights, "
            f"{missing[0]!r} first; name the right architecture with --like"
        )
    return best


def measure_source(
    source: str,
    *,
    like: str | None = None,
    config: str | Path | None = None,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> tuple[tuple[ProjectionReport, ...], tuple[tuple[str, str], ...]]:
    """(entries, unknown): kappa of every head of an architecture or a checkpoint.

    Parameters
    ----------
    source : an architecture's name, or a file or folder of safetensors or torch tensors.
    like, config : the architecture of a checkpoint; default the ``config.json`` beside it.
    seed : of an architecture's own initialization.
    progress : called with the number of heads measured, after each projection.

    Raises
    ------
    ArchitectureError, CheckpointError, NoAttentionFound, LayoutError, TypeError
        naming the file or parameter.
    """
    entries = []
    if architectures.is_architecture(source):
        model = architectures.build(source, config=config, seed=seed)
        found = locate(model, LENIENT)
        for target in resolve(found):
            entries.append(measure(target, target.heads, made="", gain=float("nan")))
            progress(entries[-1].heads)
        return tuple(entries), found.unknown
    with opened(source, like, config) as (checkpoint, model, names):
        found = locate(model, LENIENT)
        last, tensor = "", torch.empty(0)
        for target in resolve(found):
            if target.name != last:
                tensor, last = checkpoint.tensor(names[target.name]), target.name
            _check_stored(names[target.name], checkpoint.entries[names[target.name]], target.weight)
            entries.append(measure(target, target.projection.view(tensor), made="", gain=float("nan")))
            progress(entries[-1].heads)
    return tuple(entries), found.unknown


def init_file(
    source: str,
    out: str | Path,
    *,
    options: InitOptions,
    like: str | None = None,
    config: str | Path | None = None,
    dtype: torch.dtype | None = None,
    attention_only: bool = False,
    shard_size: int | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Write an initialized model to a safetensors file, or to a folder as transformers reads it.

    Parameters
    ----------
    source : an architecture's name, or a checkpoint whose other tensors are copied.
    out : a ``.safetensors`` file, or a folder (made if missing) for model.safetensors and the configuration.
    options : the scheme, with its seed and options.
    like, config : as in :func:`measure_source`.
    dtype : of the written floating tensors; default as they are.
    attention_only : write only the Q, K and V weights (and W_O with a scheme that writes it), one attention layer in
        memory at a time.
    shard_size : write a folder of shards of at most so many bytes with their index, and never hold more than one block
        of an architecture in memory: what is not attention is drawn by the model's own rule, block by block as in
        :func:`conditioned_kernels.materialize_`. The same call continues a killed one.
    force : replace existing files; in a folder also the shards that an index there names.
    progress : called with (bytes written, bytes in all).

    Returns
    -------
    Written

    Raises
    ------
    As :func:`measure_source` and :func:`~conditioned_kernels.checkpoint.write_safetensors`; nothing is left behind.
    """
    out = Path(out)
    file = out if out.suffix == ".safetensors" else out / "model.safetensors"
    if shard_size is not None and file == out:
        raise CheckpointError(f"--shard-size writes several files, so --out must be a folder, got {out}")
    if shard_size is not None and shard_size < 1:
        raise CheckpointError(f"--shard-size must be a positive number of bytes, got {shard_size}")
    stale = _stale(out) if shard_size is None and file != out else []
    if shard_size is None and not force:
        for path in (file, *stale):
            if path.exists():
                raise CheckpointError(f"{path} exists; pass --force (force=True) to replace it")
    if (attention_only or shard_size is not None) and not architectures.is_architecture(source) and _same(source, out):
        raise CheckpointError(
            f"--out is the source {source}, which would be gone before its tensors are all written; choose another "
            "folder"
        )
    if options.whole and (attention_only or shard_size is not None or not architectures.is_architecture(source)):
        raise ValueError(
            f"{options.whole}, so the source must be an architecture, and --attention-only and --shard-size cannot be "
            "used"
        )
    with ExitStack() as stack:
        job = _job(stack, source, options, like, config, dtype, attention_only, streamed=shard_size is not None)
        total, done, start = sum(entry.nbytes for entry in job.entries.values()), 0, time.perf_counter()

        def count(written: int) -> None:
            nonlocal done
            done += written
            progress(done, total)

        stack.enter_context(_folder(file.parent))
        if shard_size is not None:
            clear_unfinished(out)
        if out != file:
            stack.enter_context(_beside_the_weights(out, job.save_config, force))
        kept: tuple[str, ...] = ()
        if shard_size is None:
            write_safetensors(file, job.entries, job.tensor, force=force, progress=count)
            for path in stale:  # now of an older model, which some programs would load by its index
                path.unlink()
        else:
            facts = [source, like, _text(config), _state(source), str(options), str(dtype), attention_only]
            facts += [__version__, torch.__version__]
            kept = write_shards(
                out, job.entries, job.tensor, size=shard_size, job=json.dumps(facts), force=force, progress=count
            )
    return Written(job.report(), total, time.perf_counter() - start, kept)


@dataclass(frozen=True)
class Written:
    """What :func:`init_file` wrote.

    Attributes
    ----------
    report : of the heads drawn in this call.
    nbytes : of all tensors.
    seconds : to make, write and read them back.
    kept : files that an earlier, killed call had finished.
    """

    report: InitReport
    nbytes: int
    seconds: float
    kept: tuple[str, ...]


def _stale(out: Path) -> list[Path]:
    """The index in a folder that is about to get one file of weights, and the shards it names."""
    index = out / INDEX
    if not index.is_file():
        return []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        names = set()
    shards = [path for path in sorted(out.glob("*.safetensors")) if path.name in names - {"model.safetensors"}]
    return [index, *shards]


def _same(source: str, out: Path) -> bool:
    """Whether a checkpoint lies in the folder, or is the file, that shall be written."""
    given, target = Path(source).resolve(), out.resolve()
    return target in (given, given.parent) if given.is_file() else target == given


def _state(source: str) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files of a checkpoint, which change when it does."""
    path = Path(source)
    if architectures.is_architecture(source):
        return []
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files if each.is_file()]


def _text(config: str | Path | None) -> str:
    return "" if config is None else Path(config).read_text(encoding="utf-8")


def _job(
    stack: ExitStack,
    source: str,
    options: InitOptions,
    like: str | None,
    config: str | Path | None,
    dtype: torch.dtype | None,
    attention_only: bool,
    streamed: bool,
) -> _Job:
    if not architectures.is_architecture(source):
        checkpoint = stack.enter_context(opened(source, like, config, outputs=options.outputs))
        return _checkpoint_job(*checkpoint, options, dtype, attention_only)
    if attention_only or streamed:
        model = architectures.build(source, config=config, device="meta").to(dtype)
        return _meta_job(model, options, attention_only)
    return _model_job(architectures.build(source, config=config, seed=options.seed).to(dtype), options)


@dataclass(frozen=True)
class _Job:
    """What to write: the entries in order, each one's value when asked for, then the rest of a folder."""

    entries: dict[str, Entry]
    tensor: Callable[[str], Tensor]
    report: Callable[[], InitReport]
    save_config: Callable[[Path], None]


def _model_job(model: nn.Module, options: InitOptions) -> _Job:
    report = options.apply(model)
    tensors = _state_dict(model)
    entries = {name: Entry(tuple(value.shape), value.dtype) for name, value in tensors.items()}
    return _Job(entries, tensors.__getitem__, lambda: report, lambda out: _save_config(model, out))


def _meta_job(model: nn.Module, options: InitOptions, attention_only: bool) -> _Job:
    found = locate(model, LENIENT)
    layers = {layer.module: layer for layer in found.layers}
    targets = resolve(found, outputs=options.outputs)
    weights = {target.name: target.weight for target in targets} if attention_only else _state_dict(model)
    entries = {name: Entry(tuple(weight.shape), weight.dtype) for name, weight in weights.items()}

    def fill_block(block: Block) -> None:
        if attention_only and _overwritten(layers[block.modules[-1][1]], options):
            block.modules[-1][1].to_empty(device="cpu")
        else:
            fill(model, block, torch.device("cpu"), init=None, seed=options.seed, made={})

    parts = blocks(model)
    if attention_only:
        parts = [_as_block(layer, options) for layer in found.layers]
    drawn = _BlockByBlock(model, options, parts, fill_block, overwrite=False)
    return _Job(entries, drawn.tensor, drawn.report, lambda out: _save_config(model, out))


def _written(layer: AttentionLayer, options: InitOptions) -> list[Projection]:
    """The projections that the scheme may write."""
    return [*layer.projections, *([layer.output] if options.outputs and layer.output else [])]


def _as_block(layer: AttentionLayer, options: InitOptions) -> Block:
    """An attention layer alone, its own module last; and what else holds weights of it that are written."""
    begin = f"{layer.name}." if layer.name else ""
    members = {f"{begin}{name}": module for name, module in layer.module.named_modules() if name}
    for projection in _written(layer, options):
        owner = layer.owner(projection)
        if owner is not layer.module and owner not in members.values():
            members[layer.parameter_name(projection).rpartition(".")[0]] = owner
    return Block(layer.name, (*reversed(members.items()), (layer.name, layer.module)))


def _overwritten(layer: AttentionLayer, options: InitOptions) -> bool:
    """Whether none of the old values of the layer's Q, K and V weights will show."""
    weights = {each.parameter: layer.weight(each) for each in layer.projections}
    written = sum(each.view(weights[each.parameter]).numel() for each in layer.projections)
    return not options.reads_weights and written == sum(weight.numel() for weight in weights.values())


def _checkpoint_job(
    checkpoint: Checkpoint,
    model: nn.Module,
    names: dict[str, str],
    options: InitOptions,
    dtype: torch.dtype | None,
    attention_only: bool,
) -> _Job:
    back = {stored: name for name, stored in names.items()}
    kept = [name for name in checkpoint.entries if name in back or not attention_only]
    entries = {name: checkpoint.entries[name].cast(dtype) for name in kept}

    def stored(name: str) -> Tensor:
        return checkpoint.tensor(name).to(entries[name].dtype)

    found = locate(model, LENIENT)
    of_module = {layer.module: layer for layer in found.layers}

    def fill_block(block: Block) -> None:
        layer = of_module[block.modules[-1][1]]
        for projection in _written(layer, options):
            file_name = names[layer.parameter_name(projection)]
            owner, attribute = layer.owner(projection), projection.parameter.rpartition(".")[2]
            _check_stored(file_name, checkpoint.entries[file_name], getattr(owner, attribute))
            owner._parameters[attribute] = nn.Parameter(stored(file_name).clone())

    parts = [_as_block(layer, options) for layer in found.layers]
    drawn = _BlockByBlock(model, options, parts, fill_block, overwrite=True)
    return _Job(
        entries,
        lambda name: drawn.tensor(back[name]) if name in back else stored(name),
        drawn.report,
        lambda out: _copy_side_files(checkpoint.path, out),
    )


class _BlockByBlock:
    """Values of a meta model's tensors by name, holding one block's at a time."""

    def __init__(
        self,
        model: nn.Module,
        options: InitOptions,
        parts: list[Block],
        fill_block: Callable[[Block], None],
        *,
        overwrite: bool,
    ) -> None:
        self.model, self.options, self.fill_block, self.overwrite = model, options, fill_block, overwrite
        self.found = locate(model, LENIENT)
        self.blocks = {name: block for block in parts for name in _tensor_names(block)}
        self.layers = {layer.module for layer in self.found.layers}
        self.reports: list[InitReport] = []
        self._ready: dict[str, Tensor] = {}
        self._refuse_early({module: block for block in parts for _, module in block.modules})

    def _refuse_early(self, block_of: dict[nn.Module, Block]) -> None:
        """What is wrong with the options or a layer, before anything is drawn."""
        for layer in self.found.layers:
            for projection in _written(layer, self.options):
                if block_of[layer.owner(projection)] is not block_of[layer.module]:
                    raise CheckpointError(
                        f"{layer.parameter_name(projection)} lies outside of its attention layer's block; write the "
                        "model without --shard-size"
                    )
        self._initialize(set(block_of))
        forget(self.model)  # without values it was only noted

    def tensor(self, name: str) -> Tensor:
        if name not in self._ready:
            self._ready.clear()
            block = self.blocks[name]
            modules = {module for _, module in block.modules}
            with _emptied_after(modules):
                self.fill_block(block)
                if modules & self.layers:
                    self.reports.append(self._initialize(modules))
                self._ready = {
                    each: value.detach() for each, value in _tensor_names(block).items() if not value.is_meta
                }
        return self._ready[name]

    def _initialize(self, modules: set[nn.Module]) -> InitReport:
        return self.options.apply(
            self.model,
            where=lambda _, candidate: candidate in modules,
            include_frozen=True,
            overwrite=self.overwrite,
        )

    def report(self) -> InitReport:
        scheme = self.reports[0].scheme if self.reports else self.options.scheme
        return replace(joined(self.reports), scheme=scheme, seed=self.options.seed, unknown=self.found.unknown)


def _tensor_names(block: Block) -> dict[str, Tensor]:
    """The tensors of the block's modules, by their names in the model."""
    return {
        f"{name}.{key}" if name else key: tensor
        for name, module in block.modules
        for kind in (module._parameters, module._buffers)
        for key, tensor in kind.items()
        if tensor is not None
    }


@contextmanager
def _emptied_after(modules: set[nn.Module]) -> Iterator[None]:
    """Give the modules the tensors back that they have now, without values."""
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict with every storage once: transformers' tied names are left out, as it restores them on loading."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    tensors = {}
    for name, value in model.state_dict().items():
        place = (value.untyped_storage()._cdata, int(value.storage_offset()), tuple(value.shape))
        if name not in tied and place not in seen:
            tensors[name] = value
            seen.add(place)
    return tensors


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """Make the folder, and take it away again if what follows fails and it is empty."""
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {path}: {error.strerror}") from error
    try:
        yield
    except BaseException:
        if made and not any(path.iterdir()):
            path.rmdir()
        raise


@contextmanager
def _beside_the_weights(out: Path, save: Callable[[Path], None], force: bool) -> Iterator[None]:
    """Write the files that go with the weights out of sight, and put them in place when what follows has succeeded.

    So a disk that is full behind the weights leaves neither weights without a configuration nor half of one. A file
    that is there with other content is kept, and refused, without ``force``.
    """
    try:
        hidden = Path(tempfile.mkdtemp(prefix=".", suffix=".partial", dir=out))
    except OSError as error:
        raise CheckpointError(f"cannot write in {out}: {reason(error)}; nothing was changed") from error
    try:
        try:
            save(hidden)
        except OSError as error:
            raise CheckpointError(f"cannot write in {out}: {reason(error)}; nothing was changed") from error
        for path in sorted(hidden.iterdir()) if not force else ():
            there = out / path.name
            if there.exists() and not (there.is_file() and filecmp.cmp(path, there, shallow=False)):
                raise CheckpointError(f"{there} exists with other content; pass --force (force=True) to replace it")
        yield
        for path in sorted(hidden.iterdir()):
            os.replace(path, out / path.name)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _save_config(model: Any, out: Path) -> None:
    if hasattr(model, "config"):
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(out)


def _check_stored(name: str, entry: Entry, weight: Tensor) -> None:
    if entry.shape != tuple(weight.shape):
        raise CheckpointError(
            f"{name} has shape {entry.shape}, the architecture expects {tuple(weight.shape)}; name the right one "
            "with --like"
        )
    if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
        raise TypeError(
            f"{name} is stored as {str(entry.dtype).removeprefix('torch.')}, a quantized format whose bytes are no "
            "weights; dequantize the checkpoint first"
        )


def _copy_side_files(source: Path, out: Path) -> None:
    """Configuration and tokenizer of a transformers folder, so that the result loads like the original."""
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and "index" not in path.name:
            shutil.copyfile(path, out / path.name)
