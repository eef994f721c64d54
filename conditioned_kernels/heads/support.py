"""The support table: what the family table covers, and what of it the installed libraries have."""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass

from .families import FAMILIES
from .mechanics import coverage


@dataclass(frozen=True)
class SupportRow:
    """One attention class.

    Attributes
    ----------
    library, module, cls : where the class is.
    form : its storage form, in words.
    output : where it keeps W_O, "../" being the module around it; "none" and why.
    rule : what is conditioned, where the paper is silent.
    jacobian : whether the heads have an attention Jacobian, or why not.
    source : where the class splits its heads.
    installed : "yes", or why not.
    """

    library: str
    module: str
    cls: str
    form: str
    output: str
    rule: str
    jacobian: str
    source: str
    installed: str


def support_rows(*, check_installed: bool = True) -> tuple[SupportRow, ...]:
    """One row per class of the family table, in its order.

    Parameters
    ----------
    check_installed : import the classes' modules to see whether the installed versions have them; "" otherwise.
    """
    rows = []
    for family in FAMILIES:
        for name in family.classes:
            module, _, cls = name.rpartition(".")
            installed = _installed(module, cls) if check_installed else ""
            rows.append(
                SupportRow(
                    module.partition(".")[0],
                    module,
                    cls,
                    family.layout.form,
                    family.output.form,
                    family.rule,
                    coverage(name),
                    family.source,
                    installed,
                )
            )
    return tuple(rows)


def support_table(*, check_installed: bool = True) -> str:
    """:func:`support_rows` as a Markdown table."""
    head = ["library", "class", "storage form", "W_O", "rule where the paper is silent", "Jacobian", "source"]
    lines = []
    for row in support_rows(check_installed=check_installed):
        name = f"`{row.module.rpartition('.')[2]}.{row.cls}`"
        lines.append([row.library, name, row.form, row.output, row.rule, row.jacobian, row.source])
        if check_installed:
            lines[-1].append(row.installed)
    if check_installed:
        head.append("installed")
    table = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in table) + "\n"


def _installed(module: str, cls: str) -> str:
    library = module.partition(".")[0]
    try:
        version = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return f"no, {library} is not installed"
    try:
        found = getattr(importlib.import_module(module), cls, None)
    except ImportError:
        found = None
    # A class that a library moved can still be imported from its old place.
    return "yes" if found is not None and found.__module__ == module else f"no, not in {library} {version}"
