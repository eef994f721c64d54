"""Initialization schemes, one file each; all return an :class:`InitReport`."""

from .conditioned import conditioned_
from .init_report import InitReport, ProjectionReport
from .random import random_
from .warmup import warmup

__all__ = ["InitReport", "ProjectionReport", "conditioned_", "random_", "warmup"]
