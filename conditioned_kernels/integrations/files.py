"""Records in CSV, JSON-lines and Parquet files, and back."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from .. import _validate
from ..monitor.records import FIELDS, Record

_DEFAULTS = {field.name: field.default for field in fields(Record) if field.default is not MISSING}
_KINDS = {field.name: str(field.type) for field in fields(Record)}


class _TextSink:
    """Appends records to a text file, which is opened for every write and holds nothing but whole records then.

    So what was written survives a crash of the process, a sink goes on after ``close``, as it must when a trainer fits
    twice, and a file that was moved away meanwhile is begun again.
    """

    _start = _header = ""

    def __init__(self, path: str | Path, *, exist: str = "error") -> None:
        """``exist`` says what happens to an existing file: "error", "replace" or "append"."""
        mode = {"error": "xb", "replace": "wb", "append": "ab"}[_validate.choice(exist, "exist", _EXIST)]
        self.path = Path(path).absolute()
        with open(self.path, mode):
            pass
        data = self.path.read_bytes()
        if not self._start.encode().startswith(data[: len(self._start)]):
            raise ValueError(
                f"{path} does not begin with {self._start.strip()!r}, as a file of {type(self).__name__} does, so "
                "nothing is appended to it; give another path"
            )
        # A killed run leaves a record cut short, and what is appended to it could not be read.
        os.truncate(self.path, self._complete(data))

    def write(self, records: Sequence[Record]) -> None:
        with open(self.path, "ab") as file:
            # In one piece, so that lines of other processes cannot fall into it.
            file.write(((self._header if file.tell() == 0 else "") + self._text(records)).encode())

    def close(self) -> None:
        """Nothing: the file is closed after every write."""

    def _text(self, records: Sequence[Record]) -> str:
        raise NotImplementedError

    @staticmethod
    def _complete(data: bytes) -> int:
        """Bytes of ``data`` up to the end of its last whole record."""
        return data.rfind(b"\n") + 1


_EXIST = ("error", "replace", "append")


class JsonlSink(_TextSink):
    """One JSON object per record and line; NaN and fields at their default are left out, inf is the string "inf"."""

    _start = f'{{"{FIELDS[0]}": '

    def _text(self, records: Sequence[Record]) -> str:
        return "".join(json.dumps(_compact(record), allow_nan=False) + "\n" for record in records)


class CsvSink(_TextSink):
    """One line per record under a header; the values of a spectrum are separated by spaces."""

    _start = _header = ",".join(FIELDS) + "\r\n"

    def _text(self, records: Sequence[Record]) -> str:
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        for record in records:
            row = [getattr(record, name) for name in FIELDS]
            row[-1] = " ".join(map(repr, record.spectrum))
            writer.writerow(row)
        return text.getvalue()

    @staticmethod
    def _complete(data: bytes) -> int:
        """A line feed between quotes ends no record."""
        end = len(data)
        while (end := data.rfind(b"\n", 0, end)) >= 0 and data.count(b'"', 0, end) % 2:
            pass
        return end + 1


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
        if not self._writer.is_open:
            raise ValueError(f"{self.path} is complete: a Parquet file cannot be continued, so give every run its own")
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
    """Fields that are neither at their default nor NaN, without the numbers that JSON lacks."""
    row = {}
    for name in FIELDS:
        value = getattr(record, name)
        if value == _DEFAULTS.get(name, MISSING) or value != value:
            continue
        row[name] = [_jsonable(each) for each in value] if isinstance(value, tuple) else _jsonable(value)
    return row


def _jsonable(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _whole(path: Path, kind: type[_TextSink]) -> str:
    data = path.read_bytes()
    return data[: kind._complete(data)].decode("utf-8")


def _read_jsonl(path: Path) -> Iterator[Record]:
    for number, line in enumerate(_whole(path, JsonlSink).split("\n"), 1):
        if not line:
            continue
        try:
            yield _record(json.loads(line))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a record ({error})") from error


def _read_csv(path: Path) -> Iterator[Record]:
    reader = csv.DictReader(io.StringIO(_whole(path, CsvSink), newline=""))
    for row in reader:
        try:
            row["spectrum"] = (row.get("spectrum") or "").split()
            yield _record(row)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {reader.line_num}: not a record ({error})") from error


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
