"""Fill the generated parts of README.md: ``python -m benchmarks.readme`` (``--check`` only compares).

A part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` and is never written by hand: the support
table comes from the family table, the rest from the committed result files.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from conditioned_kernels.heads.support import support_table

from .experiments.report import readme_text
from .measure import markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def performance() -> str:
    """Every committed result file's tables, one machine after the other."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))]
    return "\n".join(markdown(record).rstrip() + "\n" for record in records)


PARTS: dict[str, Callable[[], str]] = {"support": support_table, "performance": performance, "experiments": readme_text}


def filled(text: str) -> str:
    """``text`` with every part generated anew."""
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no part {name!r}: expected <!-- begin {name} --> and <!-- end {name} -->")
        content = make().rstrip() + "\n"
        text = pattern.sub(lambda match, content=content: match[1] + "\n" + content + "\n" + match[2], text)
    return text


def main() -> int:
    """Rewrite README.md, or with ``--check`` return 1 if it is out of date."""
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = filled(before)
    if "--check" in sys.argv[1:]:
        if before != after:
            print("README.md is out of date: run python -m benchmarks.readme", file=sys.stderr)
        return int(before != after)
    readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
