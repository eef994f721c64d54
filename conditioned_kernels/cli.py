"""The command line ``conditioned-kernels``: thin commands over the public functions."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import report as reports
from ._backend import backends as list_backends
from ._version import __version__
from .file_schemes import FILE_SCHEMES, InitOptions
from .initialize.conditioned import VALUES
from .initialize.selection import ELEMENTS, LAYERS
from .report import printable

app = typer.Typer(
    help="Fast, certified conditioning of attention weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# A pipe has no width of its own; wide enough keeps one row on one line.
out = Console(width=None if sys.stdout is not None and sys.stdout.isatty() else 160)
err = Console(stderr=True)

Source = Annotated[
    str,
    typer.Argument(
        help="A safetensors or torch file or folder, or an architecture: transformers:gpt2, "
        "timm:vit_base_patch16_224, torch:encoder-12x768x12."
    ),
]
Like = Annotated[str | None, typer.Option(help="Architecture of a checkpoint without a config.json beside it.")]
Config = Annotated[Path | None, typer.Option(help="JSON configuration of a transformers architecture.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights.")]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> NoReturn:
    """Run the command line. Exit code: 0, 1 if ``verify``, ``probe`` or ``bench --compare`` finds a fault, 2 on error,
    130 on Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no reason to lose a result
    try:
        code = app(standalone_mode=False) or 0  # without standalone mode, the exit code is returned
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if hasattr(error, "format_message"):  # a wrong option, reported by the option parser
            err.print(f"error: {escape(error.format_message())}", highlight=False)
        elif isinstance(error, ValueError | TypeError | OSError | RuntimeError | MemoryError):
            err.print(
                f"error: {escape(printable(str(error) or type(error).__name__))}", highlight=False, soft_wrap=True
            )
        else:
            raise
        code = 2
    if code == 130:
        err.print("interrupted; nothing was left behind")
    sys.exit(code)


@app.command()
def inspect(
    source: Source,
    like: Like = None,
    config: Config = None,
    seed: Seed = 0,
    heads: Annotated[bool, typer.Option("--heads", help="Print every head, not only layers.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write one line per head.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write one object per head.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write heat maps of kappa.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write everything to one self-contained page.")] = None,
    force: Force = False,
) -> None:
    """Condition number of W_Q, W_K and W_V of every head of a model."""
    files = {"--csv": csv, "--json": json, "--png": png, "--html": html}
    for option, path in files.items():
        _check_output(option, path, force)
    with _counting("heads") as progress:
        from .sources import measure_source

        entries, unknown = measure_source(source, like=like, config=config, seed=seed, progress=progress)
    rows = reports.head_rows(entries) if heads else reports.layer_table(entries)
    _table(rows)
    _unknown(unknown)
    out.print(f"{reports.summarize(entries)}.", highlight=False)
    if csv:
        reports.write_csv(csv, entries)
    if json:
        reports.write_json(json, entries)
    if png:
        reports.write_png(png, reports.kappa_figure({"": entries}))
    if html:
        reports.inspection_html(html, source, entries)
    _written(*files.values())


@app.command()
def init(
    source: Source,
    out_path: Annotated[Path, typer.Option("--out", help="A .safetensors file, or a folder.")],
    like: Like = None,
    config: Config = None,
    seed: Seed = 0,
    scheme: Annotated[str, typer.Option(help=f"{', '.join(FILE_SCHEMES)}.")] = "conditioned",
    gain: Annotated[
        str | None,
        typer.Option(help="conditioned: unit (default), preserve or a number; per role as q=unit,k=unit,v=preserve."),
    ] = None,
    value: Annotated[str | None, typer.Option(help=f"conditioned: W_V, {', '.join(VALUES)}.")] = None,
    qk: Annotated[str | None, typer.Option(help="mimetic: alpha,beta of W_Q W_K^T; none leaves Q and K alone.")] = None,
    vo: Annotated[str | None, typer.Option(help="mimetic: alpha,beta of W_V W_O; none leaves V and W_O alone.")] = None,
    positions: Annotated[
        str | None, typer.Option(help="mimetic: sinusoidal, or the name of a position table to write sinusoids into.")
    ] = None,
    std: Annotated[float | None, typer.Option(help="trunc_normal: standard deviation, 0.02 unless given.")] = None,
    teacher: Annotated[
        Path | None, typer.Option(help="weight_selection: file or folder of the larger model that is selected from.")
    ] = None,
    teacher_like: Annotated[
        str | None, typer.Option(help="weight_selection: the teacher's architecture, without a config.json beside it.")
    ] = None,
    teacher_config: Annotated[
        Path | None, typer.Option(help="weight_selection: JSON configuration of the teacher's architecture.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help=f"weight_selection: {', '.join(LAYERS)}.")] = None,
    elements: Annotated[str | None, typer.Option(help=f"weight_selection: {', '.join(ELEMENTS)}.")] = None,
    leave: Annotated[
        list[str] | None,
        typer.Option(help="weight_selection: leave parameters whose names begin so; may be repeated."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the written weights: fp64, fp32, fp16 or bf16.")] = None,
    attention_only: Annotated[
        bool, typer.Option("--attention-only", help="Write only Q, K and V weights, and W_O for mimetic.")
    ] = False,
    shard_size: Annotated[
        str | None,
        typer.Option(help="Write shards of at most this size, such as 5GB, one block in memory at a time; resumable."),
    ] = None,
    force: Force = False,
) -> None:
    """Write an initialized model to safetensors; by default with semi-orthogonal W_Q and W_K, and identity W_V."""
    from .shards import disk_speed
    from .sources import init_file

    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"expected one of {', '.join(DTYPES)}, got {dtype!r}", param_hint="--dtype")
    given = {
        "gain": gain,
        "value": value,
        "qk": qk,
        "vo": vo,
        "positions": positions,
        "std": std,
        "teacher": teacher,
        "like": teacher_like,
        "config": teacher_config,
        "layers": layers,
        "elements": elements,
        "leave": leave,
    }
    options = InitOptions(seed, scheme, _scheme_options(scheme, given))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("writing", total=None)
        result = init_file(
            source,
            out_path,
            options=options,
            like=like,
            config=config,
            dtype=None if dtype is None else DTYPES[dtype],
            attention_only=attention_only,
            shard_size=None if shard_size is None else _parse_size(shard_size),
            force=force,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    out.print(printable_lines(str(result.report)), highlight=False, markup=False)
    if shard_size is not None:
        if result.kept:
            out.print(
                f"kept {len(result.kept)} shards of an earlier run, which still have their bytes", highlight=False
            )
        disk = disk_speed(out_path, min(result.nbytes, 256 << 20))
        out.print(
            f"{result.nbytes / 1e9:.3g} GB drawn, written and read back in {result.seconds:.1f} s: "
            f"{result.nbytes / result.seconds / 1e9:.3g} GB/s; the disk alone takes {disk / 1e9:.3g} GB/s",
            highlight=False,
        )
    _written(out_path)


@app.command()
def verify(
    source: Source,
    like: Like = None,
    config: Config = None,
    seed: Seed = 0,
    gain: Annotated[str, typer.Option(help="Expected singular value: unit, any, or a number.")] = "unit",
    roles: Annotated[str, typer.Option(help="Roles to check.")] = "qkv",
) -> None:
    """Check that every head's singular values equal its gain; exit code 1 if not."""
    from .sources import measure_source
    from .verify import judge

    expected = gain if gain in ("unit", "any") else _parse_number(gain, "--gain")
    with _counting("heads") as progress:
        entries, unknown = measure_source(source, like=like, config=config, seed=seed, progress=progress)
    result = judge(entries, gain=expected, roles=roles, unknown=unknown)
    out.print(printable_lines(str(result)), highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(0 if result.ok else 1)


@app.command()
def probe(
    source: Annotated[str, typer.Argument(help="An architecture, or python:FILE:FUNCTION for a model of yours.")],
    config: Config = None,
    seed: Seed = 0,
) -> None:
    """Prove by the model's own forward that its heads are where their layout says; exit code 1 if not."""
    from .architectures import build, example_input
    from .heads import probe as run_probe

    model = build(source, config=config, seed=seed)
    args, kwargs = example_input(model)
    result = run_probe(model, *args, **kwargs)
    out.print(printable_lines(str(result)), highlight=False, markup=False, soft_wrap=True)
    heads = sum(row.heads for row in result.rows)
    wrong = sum(not row.ok for row in result.rows)
    out.print(f"{heads} heads in {len(result.rows)} projections probed, {wrong} projections disagree", highlight=False)
    raise typer.Exit(0 if result.ok else 1)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A monitor's .jsonl, .csv or .parquet file, or a folder of them.")],
    out_path: Annotated[Path | None, typer.Option("--out", help="The page to write; RUN.html unless given.")] = None,
    force: Force = False,
) -> None:
    """What a ConditioningMonitor saw during training, as one self-contained page."""
    from .integrations.files import read_records
    from .monitor.run_report import run_html

    page = out_path or run.resolve().with_suffix(".html")
    _check_output("--out", page, force)
    run_html(page, run.resolve().stem, read_records(run))
    _written(page)


@app.command()
def layouts(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """The attention classes that are known, how each stores its heads, the rule, and where its source says so."""
    from .heads.support import support_rows, support_table

    if markdown:
        out.print(support_table(), markup=False, highlight=False, soft_wrap=True)
        return
    _table(
        [
            {
                "class": f"{row.module}.{row.cls}",
                "storage": row.form,
                "rule": row.rule,
                "Jacobian": row.jacobian,
                "installed": row.installed,
            }
            for row in support_rows()
        ],
        words=True,
    )


@app.command()
def backends() -> None:
    """Which implementations are available and, for the rest, why not."""
    _table([{"backend": name, "status": status} for name, status in list_backends().items()], words=True)


@app.command()
def bench(
    group: Annotated[list[str] | None, typer.Option(help="Only this group of cases; may be repeated.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda or cuda:1.")] = "cpu",
    budget: Annotated[float, typer.Option(min=0, help="Seconds of turns per case; never fewer than 3 turns.")] = 4.0,
    turns: Annotated[int, typer.Option(min=1, help="The most turns per case.")] = 25,
    json: Annotated[Path | None, typer.Option(help="Write the record of the run.")] = None,
    compare: Annotated[Path | None, typer.Option(help="An older record; exit code 1 if a ratio fell.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the scaling plot of the group growth as PNG.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the groups and cases, and measure nothing.")] = False,
    force: Force = False,
) -> None:
    """Measure this package beside what torch, numpy, scipy and others offer; at most 10 minutes on 2 cores."""
    from .bench import compare as comparing
    from .bench import measure, tables
    from .bench.plot import scaling_figure

    where = measure.available(device)
    if list_:
        chosen = measure.chosen(where, group or (), case or ())
        _table([{"group": one.group, "case": one.name, "what": one.title} for one in chosen], words=True)
        return
    for option, path in {"--json": json, "--plot": plot}.items():
        _check_output(option, path, force)
    if plot and group and measure.GROWTH not in group:
        raise ValueError(
            f"--plot: the scaling plot comes from the group {measure.GROWTH}; add --group {measure.GROWTH}"
        )
    old = None if compare is None else comparing.load(compare)
    with Progress(TextColumn("{task.description}"), console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("measuring the machine", total=None)
        record = measure.run(
            where,
            groups=group or (),
            names=case or (),
            budget=budget,
            most=turns,
            say=lambda title: bar.update(task, description=title),
        )
    if json:
        json.write_text(measure.as_json(record), encoding="utf-8")
    tables.show(record, out)
    if plot:
        reports.write_png(plot, scaling_figure(record))
    _written(json, plot)
    if old is not None:
        found = list(comparing.regressions(old, record))
        for sentence in found:
            out.print(f"regression: {escape(sentence)}", highlight=False, soft_wrap=True)
        compared = len(comparing.shared(old, record))
        out.print(
            f"{len(found)} regressions in {compared} ratios against {escape(printable(str(compare)))}",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(1 if found else 0)


@app.command()
def version() -> None:
    """Print the version."""
    out.print(f"conditioned_kernels {__version__}, torch {torch.__version__}", highlight=False)


@app.command()
def demo(
    out_path: Annotated[Path, typer.Option("--out", help="The report to write.")] = Path("report.html"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps per initialization.")] = 300,
    seed: Seed = 0,
    force: Annotated[bool, typer.Option("--force/--no-force", help="Replace an existing report.")] = True,
) -> None:
    """Condition GPT-2 small, then train a small language model with and without; at most 3 minutes on 2 cores."""
    from .demo_run import run_demo

    _check_output("--out", out_path, force)
    run_demo(out, err, out_path, steps=steps, seed=seed)
    _written(out_path)


def _table(rows: list[dict[str, Any]], *, words: bool = False) -> None:
    """Print rows as a table: columns of ``words`` may wrap, numbers after the first two columns stay whole."""
    if not rows:
        return
    # Without lines between numbers, a layer's name has room beside them in 80 columns.
    plain: dict[str, Any] = {"box": None, "pad_edge": False, "collapse_padding": True}
    table = Table(header_style="bold", **({"show_lines": True} if words else plain))
    for number, name in enumerate(rows[0]):
        whole = number > 1 and not words
        table.add_column(escape(name), justify="right" if whole else "left", no_wrap=whole, overflow="fold")
    for row in rows:
        table.add_row(*(escape(reports.cell(value)) for value in row.values()))
    out.print(table)


def _unknown(unknown: tuple[tuple[str, str], ...]) -> None:
    for name, reason in unknown:
        out.print(escape(printable(f"unknown attention {name}: {reason}")), highlight=False)


@contextmanager
def _counting(what: str) -> Iterator[Any]:
    """A progress display on standard error; yields a function that adds to the count."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda number: bar.advance(task, number)


def _check_output(option: str, path: Path | None, force: bool) -> None:
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder, and a file is to be written")
    if path.exists() and not force:
        raise ValueError(f"{option}: {path} exists; pass --force to replace it")
    if not path.parent.is_dir():
        raise ValueError(f"{option}: the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}: there is no permission to write {path}")


def _written(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            out.print(f"wrote {escape(printable(str(path)))}", highlight=False, soft_wrap=True)


def printable_lines(text: str) -> str:
    """Several lines with control characters made visible in each."""
    return "\n".join(map(printable, text.splitlines()))


def _parse_gain(text: str) -> Any:
    if "=" not in text:
        return text if text in ("unit", "preserve") else _parse_number(text, "--gain")
    gains = {}
    for part in text.split(","):
        role, _, size = part.partition("=")
        gains[role.strip()] = _parse_gain(size.strip())
    return gains


def _parse_pair(text: str) -> tuple[float, float] | None:
    if text == "none":
        return None
    try:
        alpha, beta = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"--qk and --vo: expected two numbers such as 0.7,0.7, or none, got {text!r}") from None
    return alpha, beta


_PARSERS: dict[str, Callable[[str], Any]] = {"gain": _parse_gain, "qk": _parse_pair, "vo": _parse_pair}
_FLAGS = {"like": "--teacher-like", "config": "--teacher-config"}


def _scheme_options(scheme: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as the scheme's function takes them; those of another scheme are refused."""
    if scheme not in FILE_SCHEMES:
        raise typer.BadParameter(f"expected one of {', '.join(FILE_SCHEMES)}, got {scheme!r}", param_hint="--scheme")
    known = {name: _FLAGS.get(name, f"--{name}") for name in FILE_SCHEMES[scheme].options}
    options = {}
    for name, value in given.items():
        if value is None or value == []:
            continue
        if name not in known:
            raise ValueError(
                f"{_FLAGS.get(name, f'--{name}')} is not an option of --scheme {scheme}, which has "
                f"{', '.join(known.values()) or 'none of its own'}"
            )
        options[name] = _PARSERS[name](value) if name in _PARSERS else value
    return options


SIZES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1, "": 1}


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B|)", text.strip().upper())
    if match is None or not (size := int(float(match[1]) * SIZES[match[2]])):
        raise ValueError(f"--shard-size: expected a size such as 5GB or 500MB, got {text!r}")
    return size


def _parse_number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option}: expected a number or a word it names, got {text!r}") from None
