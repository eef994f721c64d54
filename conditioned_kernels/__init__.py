"""Fast, certified conditioning of attention weights."""

from ._backend import backends, explain_backend
from ._status import Status
from ._version import __version__
from .condition import ConditionEstimate, condition_number
from .heads import LayoutError, NoAttentionFound, find_attention, probe, register_layout
from .initialize import (
    InitReport,
    conditioned_,
    export_spectral_conditioning,
    initialize_,
    mimetic_,
    random_,
    remove_spectral_conditioning,
    spectral_conditioning,
    warmup,
    weight_selection_,
)
from .orthogonalize import Certificate, certify, orthogonalize, semi_orthogonal, semi_orthogonal_
from .verify import VerifyReport, verify

__all__ = [
    "Certificate",
    "ConditionEstimate",
    "InitReport",
    "LayoutError",
    "NoAttentionFound",
    "Status",
    "VerifyReport",
    "__version__",
    "backends",
    "certify",
    "condition_number",
    "conditioned_",
    "explain_backend",
    "export_spectral_conditioning",
    "find_attention",
    "initialize_",
    "mimetic_",
    "orthogonalize",
    "probe",
    "random_",
    "register_layout",
    "remove_spectral_conditioning",
    "semi_orthogonal",
    "semi_orthogonal_",
    "spectral_conditioning",
    "verify",
    "warmup",
    "weight_selection_",
]
