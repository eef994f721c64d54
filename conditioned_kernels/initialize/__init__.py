"""Initialization schemes, one file each; all return an :class:`InitReport`."""

from .calibrate import CalibrationReport, LayerCalibration, calibrate_gain
from .conditioned import conditioned_
from .init_report import InitReport, ProjectionReport
from .initialize import SCHEMES, initialize_
from .materialize import materialize_
from .mimetic import mimetic_
from .random import random_
from .spectral_conditioning import (
    export_spectral_conditioning,
    remove_spectral_conditioning,
    spectral_conditioning,
)
from .warmup import warmup
from .weight_selection import weight_selection_

__all__ = [
    "SCHEMES",
    "CalibrationReport",
    "InitReport",
    "LayerCalibration",
    "ProjectionReport",
    "calibrate_gain",
    "conditioned_",
    "export_spectral_conditioning",
    "initialize_",
    "materialize_",
    "mimetic_",
    "random_",
    "remove_spectral_conditioning",
    "spectral_conditioning",
    "warmup",
    "weight_selection_",
]
