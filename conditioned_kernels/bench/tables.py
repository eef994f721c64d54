"""A record as tables: rich for the terminal, Markdown for the README. The rows are made once, for both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Record = Mapping[str, Any]
OURS = "the same"
TORCH_BACKEND = f"{OURS}, torch backend"
"""How the name of a contestant begins that is ours too, such as another backend."""
WORDS = ("remark", "the fastest other", "targets")
"""Columns of words behind columns of numbers."""


class Table(NamedTuple):
    """A titled table of strings; the first ``words`` columns are words, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    words: int = 1


def headline(record: Record) -> str:
    """The machine in a sentence, with its measured limits."""
    machine, rates = record["environment"], record["rates"]
    matmul = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in rates["matmul"].items())
    return (
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}, "
        f"backend {machine['backend']}, {machine['date']}; copy {rates['copy'] / 1e9:,.1f} GB/s read plus write, "
        f"matrix products in Gflop/s: {matmul}."
    )


def result_table(result: Mapping[str, Any]) -> Table:
    """One case: milliseconds, ratio, share of the floor, errors; then what is to be said of a row."""
    rows = [row for row in result["rows"] if not row["skipped"]]
    kinds = tuple(dict.fromkeys(kind for row in rows for kind in row["errors"]))
    title = result["title"]
    if result["seconds"]:
        title += f"; target {result['seconds']:.3g} s"
    if result["floor"]:
        title += f"; floor {1e3 * result['floor']:.3g} ms ({result['bound']})"
    return Table(
        title,
        ("", "ms", "times ours", "% of floor", *kinds, "remark"),
        [
            (
                row["contestant"],
                _milliseconds(row["best"]),
                _ratio(row),
                "" if row["floor"] is None else f"{100 * row['floor']:.0f}",
                *(f"{row['errors'][kind]:.1e}" if kind in row["errors"] else "" for kind in kinds),
                _remark(row),
            )
            for row in rows
            if row["best"] is not None
        ],
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _ratio(row: Mapping[str, Any]) -> str:
    """In brackets where the result is not ours' equal, and so no claim."""
    text = _times(row) + (f", target {row['target']:g}" if row["target"] else "")
    return text if row["equal"] else f"({text})"


def _times(row: Mapping[str, Any]) -> str:
    return f"{row['ratio']:.1f}" if row["ratio"] >= 0.95 else f"{row['ratio']:.2f}"


def _aim(row: Mapping[str, Any]) -> str:
    """A target and what was reached, in words: against another way to the result, or as the share of another job."""
    said = " missed" if row["ratio"] < row["target"] else ""
    if row["equal"]:
        return f"{_times(row)} times as fast as {row['contestant']} (target {row['target']:g}{said})"
    return f"{100 / row['ratio']:.3g} % of {row['contestant']} (target {100 / row['target']:.3g} %{said})"


def _deadline(result: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    said = " missed" if ours["best"] > result["seconds"] else ""
    return f"{ours['best']:.2g} s (target {result['seconds']:.2g} s{said})"


def _remark(row: Mapping[str, Any]) -> str:
    remarks = [row["note"]] if row["note"] else []
    if row["share"] < 1:
        remarks.append(f"timed on {100 * row['share']:.2g} % of the heads")
    return "; ".join(remarks)


def skipped(record: Record) -> dict[str, list[str]]:
    """Sentence on what was not timed to the cases it concerns."""
    found: dict[str, list[str]] = {}
    for result in record["results"]:
        for row in result["rows"]:
            if row["skipped"]:
                found.setdefault(f"{row['contestant']}: {row['skipped']}", []).append(result["name"])
    return found


def missed(record: Record) -> Iterator[str]:
    """A sentence per target that was not reached."""
    for result in record["results"]:
        ours = result["rows"][0]
        if result["seconds"] and ours["best"] and ours["best"] > result["seconds"]:
            yield f"{result['name']}: {_deadline(result, ours)}"
        for row in result["rows"]:
            if row["target"] and row["ratio"] is not None and row["ratio"] < row["target"]:
                yield f"{result['name']}: {_aim(row)}"


def summary(record: Record) -> Table:
    """One line per case: ours, its distance to the floor, the fastest peer of equal results, and the targets."""
    rows = []
    for result in record["results"]:
        ours, *others = (row for row in result["rows"] if row["best"] is not None) if result["turns"] else (None,)
        if ours is None:
            continue
        peers = [row for row in others if row["equal"] and not row["contestant"].startswith(OURS)]
        fastest = min(peers, key=lambda row: row["ratio"], default=None)
        targets = [_aim(row) for row in others if row["target"]]
        if result["seconds"]:
            targets.append(_deadline(result, ours))
        rows.append(
            (
                result["title"],
                _milliseconds(ours["best"]),
                "" if ours["floor"] is None else f"{100 * ours['floor']:.0f}",
                "" if fastest is None else _ratio({**fastest, "target": None}),
                "" if fastest is None else fastest["contestant"],
                "; ".join(targets),
            )
        )
    columns = ("", "ours, ms", "% of floor", "times ours", "the fastest other", "targets")
    return Table("Ours and the fastest other way of equal results", columns, rows)


def growth_table(growth: Mapping[str, Any]) -> Table:
    """Exponents, and the memory beside the input at the two largest sizes: the same where it grows with the input."""

    def memory(values: list[float | None]) -> tuple[str, str]:
        before, last = values[-2], values[-1]
        return ("", "") if before is None or last is None else (f"{before:.2f}", f"{last:.2f}")

    return Table(
        "time ~ size^exponent; memory in a call beyond its input, in units of the input",
        ("operation", "along", "sizes", "ms", "exponent", "R²", "memory, size before", "largest"),
        [
            (
                fit["operation"],
                fit["axis"],
                f"{fit['sizes'][0]:,} to {fit['sizes'][-1]:,}",
                f"{1e3 * fit['seconds'][0]:.2g} to {1e3 * fit['seconds'][-1]:.3g}",
                f"{fit['exponent']:.2f}",
                f"{fit['r_squared']:.3f}",
                *memory(fit["memory"]),
            )
            for fit in growth["fits"]
        ],
        words=2,
    )


def tables(record: Record) -> list[Table]:
    """Every table of a record."""
    made = [table for result in record["results"] if (table := result_table(result)).rows]
    return made + ([growth_table(record["growth"])] if record.get("growth") else [])


def markdown(table: Table) -> str:
    """A Markdown table under its title in bold; columns that are empty throughout are left out."""
    kept = [i for i in range(len(table.columns)) if i == 0 or any(row[i] for row in table.rows)]

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cells[i].replace("|", "\\|") for i in kept) + " |"

    rule = tuple("---" if i < table.words or table.columns[i] in WORDS else "--:" for i in range(len(table.columns)))
    return "\n".join((f"**{table.title}**", "", line(table.columns), line(rule), *map(line, table.rows)))


def as_markdown(record: Record) -> str:
    """A whole record: every contestant of every case."""
    parts = [headline(record), *map(markdown, tables(record))]
    if absent := skipped(record):
        parts.append("Not timed:\n\n" + "\n".join(f"- {why} ({_cases(names)})" for why, names in absent.items()))
    return "\n\n".join((*parts, *_targets(record)))


def as_summary(record: Record) -> str:
    """A record in short: a line per case, growth, targets missed."""
    parts = [headline(record), markdown(summary(record))]
    if record.get("growth"):
        parts.append(markdown(growth_table(record["growth"])))
    return "\n\n".join((*parts, *_targets(record)))


def _targets(record: Record) -> Iterator[str]:
    if unmet := list(missed(record)):
        yield "Targets missed: " + "; ".join(unmet) + "."


def _cases(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} cases"


def show(record: Record, console: Any) -> None:
    """Print a whole record with rich."""
    from rich.markup import escape
    from rich.table import Table as RichTable

    console.print(escape(headline(record)), highlight=False)
    for table in (*tables(record), summary(record)):
        drawn = RichTable(title=escape(table.title), title_justify="left", header_style="bold")
        for number, column in enumerate(table.columns):
            words = number < table.words or column in WORDS
            drawn.add_column(escape(column), justify="left" if words else "right", no_wrap=not words)
        for row in table.rows:
            drawn.add_row(*map(escape, row))
        console.print(drawn)
    for why, names in skipped(record).items():
        console.print(escape(f"not timed: {why} ({_cases(names)})"), highlight=False)
    for sentence in missed(record):
        console.print(escape(f"target missed: {sentence}"), highlight=False)
