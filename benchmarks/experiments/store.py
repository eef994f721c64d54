"""Results as JSON lines: one finished cell a line, appended whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results" / "experiments"


class Store:
    """The finished cells of one suite, in ``folder/<suite>.jsonl``."""

    def __init__(self, folder: Path, suite: str) -> None:
        self.path = folder / f"{suite}.jsonl"

    def load(self) -> dict[str, dict[str, Any]]:
        """Finished cells by their config hash; a half-written line is no result, and the newest of equals counts."""
        if not self.path.exists():
            return {}
        records = {}
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
                records[record["config"]] = record
            except (ValueError, TypeError, KeyError):
                continue
        return records

    def append(self, record: dict[str, Any]) -> None:
        """Write one line; what a killed run left of a line is removed first."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
            file.seek(0, os.SEEK_END)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
