"""Records in CSV, JSON-lines and Parquet files, and back."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import IO, Any

from .. import _validate
from ..monitor.records import FIELDS, Record

_DEFAULTS = {field.name: field.default for field in fields(Record) if field.default is not MISSING}
_KINDS = {field.name: str(field.type) for field in fields(Record)}


class _TextSink:
    """Writes records to a text file as they come; what was written survives a crash of the process."""

    def __init__(self, path: str | Path, *, exist: str = "error") -> None:
        """``exist`` says what happens to an existing file: "error", "replace" or "append"."""
        mode = {"error": "x", "replace": "w", "append": "a"}[_validate.choice(exist, "exist", _EXIST)]
        self.path = Path(path)
        self._file: IO[str] = open(self.path, mode, encoding="utf-8", newline="")  # noqa: SIM115

    def close(self) -> None:
        self._file.close()


_EXIST = ("error", "replace", "append")


class JsonlSink(_TextSink):
    """One JSON object per record and line; fields at their default are left out, inf is the string "inf"."""

    def write(self, records: Sequence[Record]) -> None:
        self._file.writelines(json.dumps(_compact(record)) + "\n" for record in records)
        self._file.flush()


class CsvSink(_TextSink):
    """One line per record under a header; the values of a spectrum are separated by spaces."""

    def write(self, records: Sequence[Record]) -> None:
        writer = csv.writer(self._file)
        if self._file.tell() == 0:
            writer.writerow(FIELDS)
        for record in records:
            row = [getattr(record, name) for name in FIELDS]
            row[-1] = " ".join(map(repr, record.spectrum))
            writer.writerow(row)
        self._file.flush()


class ParquetSink:
    """A row group per flush, by pyarrow. The file can be read once the sink is closed, and only then."""

    def __init__(self, path: str | Path, *, exist: str = "error") -> None:
        import pyarrow
        import pyarrow.parquet

        if _validate.choice(exist, "exist", _EXIST[:2]) == "error" and Path(path).exists():
            raise FileExistsError(f"{path} exists; pass exist='replace' to replace it")
        kinds = {"bool": pyarrow.bool_(), "int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string()}
        spectrum = pyarrow.list_(pyarrow.float64())
        self.path = Path(path)
        self._pyarrow = pyarrow
        self._schema = pyarrow.schema([(name, kinds.get(_KINDS[name], spectrum)) for name in FIELDS])
        self._writer = pyarrow.parquet.ParquetWriter(self.path, self._schema)

    def write(self, records: Sequence[Record]) -> None:
        columns = [[getattr(record, name) for record in records] for name in FIELDS]
        self._writer.write_table(
            self._pyarrow.Table.from_arrays(list(map(self._array, columns, self._schema)), schema=self._schema)
        )

    def _array(self, column: list, field: Any) -> Any:
        return self._pyarrow.array(column, type=field.type)

    def close(self) -> None:
        self._writer.close()


def read_records(path: str | Path) -> list[Record]:
    """Records of a .jsonl, .csv or .parquet file, or of all such files in a folder, in the order of their steps.

    Raises
    ------
    FileNotFoundError
        where there is no such file.
    ValueError
        for another kind of file, or a line that is no record, with its number. A last line cut short, as a killed run
        leaves it, is left out.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in _READERS)
        if not files:
            raise FileNotFoundError(f"no {', '.join(_READERS)} file in the folder {path}")
    else:
        files = [path]
    records: list[Record] = []
    for each in files:
        reader = _READERS.get(each.suffix)
        if reader is None:
            raise ValueError(f"{each} must be one of {', '.join(_READERS)}, as the monitor's sinks write them")
        records += reader(each)
    return sorted(records, key=lambda record: record.step)


def _compact(record: Record) -> dict[str, Any]:
    row = {}
    for name in FIELDS:
        value = getattr(record, name)
        if value == _DEFAULTS.get(name, MISSING) or value != value:
            continue
        row[name] = str(value) if value in (math.inf, -math.inf) else value
    return row


def _read_jsonl(path: Path) -> Iterator[Record]:
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield _record(json.loads(line))
        except (ValueError, TypeError, AttributeError) as error:
            if number == len(lines):
                return  # no line feed after it
            raise ValueError(f"{path}, line {number}: not a record ({error})") from error


def _read_csv(path: Path) -> Iterator[Record]:
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    whole = text[: text.rfind("\n") + 1]
    for number, row in enumerate(csv.DictReader(whole.splitlines(keepends=True)), 2):
        try:
            row["spectrum"] = tuple(row.get("spectrum", "").split())
            yield _record(row)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a record ({error})") from error


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a complete Parquet file ({error})") from error
    yield from map(_record, table.to_pylist())


def _record(row: dict[str, Any]) -> Record:
    """A record of values as files give them."""
    if unknown := row.keys() - _KINDS.keys():
        raise ValueError(f"unknown fields {sorted(map(str, unknown))}")
    return Record(**{name: _CASTS[_KINDS[name]](value) for name, value in row.items()})


_CASTS: dict[str, Callable[[Any], Any]] = {
    "bool": lambda value: value in (True, "True"),
    "int": int,
    "float": float,
    "str": str,
    "tuple[float, ...]": lambda values: tuple(map(float, values)),
}
_READERS = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
