"""Fast, certified conditioning of attention weights."""

from ._backend import backends, explain_backend
from ._status import Status
from ._version import __version__
from .condition import ConditionEstimate, condition_number
from .heads import LayoutError, NoAttentionFound, find_attention, probe, register_layout
from .initialize import (
    CalibrationReport,
    InitReport,
    calibrate_gain,
    conditioned_,
    export_spectral_conditioning,
    initialize_,
    materialize_,
    mimetic_,
    random_,
    remove_spectral_conditioning,
    spectral_conditioning,
    warmup,
    weight_selection_,
)
from .jacobian import (
    AttentionHeads,
    JacobianBound,
    JacobianEstimate,
    NoJacobian,
    jacobian_bound,
    jacobian_condition,
    limiting_factor,
)
from .monitor import ConditioningMonitor
from .orthogonalize import Certificate, certify, orthogonalize, semi_orthogonal, semi_orthogonal_
from .verify import VerifyReport, verify

__all__ = [
    "AttentionHeads",
    "CalibrationReport",
    "Certificate",
    "ConditionEstimate",
    "ConditioningMonitor",
    "InitReport",
    "JacobianBound",
    "JacobianEstimate",
    "LayoutError",
    "NoAttentionFound",
    "NoJacobian",
    "Status",
    "VerifyReport",
    "__version__",
    "backends",
    "calibrate_gain",
    "certify",
    "condition_number",
    "conditioned_",
    "explain_backend",
    "export_spectral_conditioning",
    "find_attention",
    "initialize_",
    "jacobian_bound",
    "jacobian_condition",
    "limiting_factor",
    "materialize_",
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
