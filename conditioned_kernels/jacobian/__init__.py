"""The attention Jacobian: kappa(J) of a head, its bound, and products with J, in closed form."""

from .bound import FACTORS, JacobianBound, LimitingFactor, jacobian_bound, limiting_factor
from .estimate import JacobianEstimate, jacobian_condition
from .heads import AttentionHeads, HeadNorm, NoJacobian, Rotary
from .products import attention_output, attention_probabilities, jvp, vjp

__all__ = [
    "FACTORS",
    "AttentionHeads",
    "HeadNorm",
    "JacobianBound",
    "JacobianEstimate",
    "LimitingFactor",
    "NoJacobian",
    "Rotary",
    "attention_output",
    "attention_probabilities",
    "jacobian_bound",
    "jacobian_condition",
    "jvp",
    "limiting_factor",
    "vjp",
]
