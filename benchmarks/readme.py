"""Fill the generated parts of README.md: ``python -m benchmarks.readme`` (``--check`` only compares).

A part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` and is never written by hand: the support
table comes from the family table, the rest from the committed result files. So do the pages beside those.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from conditioned_kernels.bench.tables import Table, as_markdown, as_summary
from conditioned_kernels.bench.tables import markdown as table_markdown
from conditioned_kernels.heads.support import support_table

from . import soak
from .experiments.report import readme_text, verdict_text
from .published import PUBLISHED, Published

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def records(kind: str) -> dict[Path, dict[str, Any]]:
    """The committed results of one kind by file, one per machine."""
    return {file: json.loads(file.read_text(encoding="utf-8")) for file in sorted((RESULTS / kind).glob("*.json"))}


def performance() -> str:
    """Every committed benchmark in short, one machine after the other."""
    return "\n\n".join(as_summary(record) for record in records("bench").values())


def pages() -> dict[Path, str]:
    """Beside every committed benchmark's file, all its tables."""
    return {
        file.with_suffix(".md"): f"# {record['environment']['device']}\n\n{as_markdown(record)}\n"
        for file, record in records("bench").items()
    }


def published() -> str:
    """Public figures of others by hardware, with ours against the same code where the suite runs it."""
    measured = records("bench").values()
    rows = [
        (each.hardware, each.who, each.job, each.figure, _ours(each, measured), each.remark, each.source)
        for each in PUBLISHED
    ]
    columns = ("hardware", "who", "job", "their figure", "ours beside their code", "to know", "source")
    return table_markdown(Table("Public figures of others", columns, rows, words=len(columns)))


def _ours(each: Published, measured: Iterable[dict[str, Any]]) -> str:
    """How ours compares with the same code, on each machine of the committed results."""
    found = []
    for record in measured:
        for result in record["results"]:
            for row in result["rows"]:
                if (result["name"], row["contestant"]) == each.beside and row["ratio"] is not None:
                    text = (
                        f"{row['ratio']:.1f} times as fast as {row['contestant']} on {record['environment']['device']}"
                    )
                    found.append(text if row["equal"] else f"({text}; not of equal accuracy)")
    return "; ".join(found) or "no like job"


def soaked() -> str:
    """The figures of every committed soak."""
    return "\n\n".join(soak.as_markdown(record) for record in records("soak").values())


def sharded() -> str:
    """What `python -m benchmarks.sharded` measured, in words."""
    record = json.loads((RESULTS / "sharded.json").read_text(encoding="utf-8"))
    eight, seventy, ranks = (record[name] for name in ("llama_8b_attention", "llama_70b_attention", "scaling"))
    two = seventy["two_layers"]
    sentences = [
        f"Measured on {record['environment']['cores']} cores (`python -m benchmarks.sharded`): the attention of Llama "
        f"3 8B, {_streamed(eight)}. Two of 80 layers of a 70B model: {_streamed(two)}, which does not grow with "
        f"layers; 40 times the time, starts included, is {seventy['extrapolated_seconds']:.0f} s for "
        f"{seventy['extrapolated_bytes'] / 1e9:.1f} GB.",
        f"Drawing its shards of one layer takes a rank of two 1/{ranks['ratio']:.1f} of the processor time of a rank "
        f"that draws all; a process that draws half and is alone takes 1/{ranks['ratio_of_half_alone']:.1f}.",
    ]
    if full := record.get("llama_8b_full"):
        sentences.insert(1, f"The whole of Llama 3 8B (`--full`): {_streamed(full)}.")
    return " ".join(sentences)


def _streamed(run: dict[str, Any]) -> str:
    text = f"{run['said']}; {run['seconds']:.0f} s with the start of the program, "
    if "processor_seconds" in run:
        text += f"{run['processor_seconds']:.0f} s of processor time at a load of {run['load_average']:.0f}, "
    return text + f"peak memory {run['peak_rss_bytes'] / 1e9:.2f} GB"


PARTS: dict[str, Callable[[], str]] = {
    "support": support_table,
    "performance": performance,
    "published": published,
    "soak": soaked,
    "sharded": sharded,
    "experiments": readme_text,
    "verdict": verdict_text,
}


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
    """Rewrite README.md and the pages, or with ``--check`` return 1 if one is out of date."""
    readme = ROOT / "README.md"
    wanted = {readme: filled(readme.read_text(encoding="utf-8")), **pages()}
    old = [file for file, text in wanted.items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for file in old:
            print(f"{file.relative_to(ROOT)} is out of date: run python -m benchmarks.readme", file=sys.stderr)
        return int(bool(old))
    for file in old:
        file.write_text(wanted[file], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
