"""Fast, certified conditioning of attention weights."""

from ._backend import backends, explain_backend
from ._status import Status
from ._version import __version__
from .condition import ConditionEstimate, condition_number
from .heads import LayoutError, NoAttentionFound, find_attention, probe, register_layout
from .initialize import InitReport, conditioned_, initialize_, materialize_, mimetic_, random_, warmup
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
    "find_attention",
    "initialize_",
    "materialize_",
    "mimetic_",
    "orthogonalize",
    "probe",
    "random_",
    "register_layout",
    "semi_orthogonal",
    "semi_orthogonal_",
    "verify",
    "warmup",
]
