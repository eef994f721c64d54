"""Initialization schemes, one file each; all return an :class:`InitReport`."""

from .conditioned import conditioned_
from .init_report import InitReport, ProjectionReport
from .initialize import SCHEMES, initialize_
from .materialize import materialize_
from .mimetic import mimetic_
from .random import random_
from .warmup import warmup

__all__ = [
    "SCHEMES",
    "InitReport",
    "ProjectionReport",
    "conditioned_",
    "initialize_",
    "materialize_",
    "mimetic_",
    "random_",
    "warmup",
]
