"""How much memory a process has held at most."""

from __future__ import annotations

import re
from pathlib import Path


def peak_bytes() -> int:
    """Peak resident memory of this program; ru_maxrss would start at what the program that ran this one had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM")
    return int(found[1]) * 1024
