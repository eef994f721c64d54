"""Watching condition numbers while a model trains."""

from .alerts import Alert, KappaAbove, KappaGrowth, SigmaCollapse
from .monitor import ConditioningMonitor
from .records import JACOBIAN, Record, Sink, summarize

__all__ = [
    "JACOBIAN",
    "Alert",
    "ConditioningMonitor",
    "KappaAbove",
    "KappaGrowth",
    "Record",
    "SigmaCollapse",
    "Sink",
    "summarize",
]
