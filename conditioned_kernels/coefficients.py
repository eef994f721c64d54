"""Polynomial coefficients, each with its interval and its error bound.

All three were computed with the Remez exchange algorithm in 40-digit arithmetic, minimizing the
*relative* error of the function named, and then rounded to float32. The bounds are those of the
rounded coefficients; ``tests/test_sampling.py`` re-measures each in float64. They are part of stream
version 1 (see ``sampling.py``): changing a digit changes every weight this package has ever drawn.
"""

from __future__ import annotations

SQRT_HALF_BITS = 0x3F3504F3
"""float32 bit pattern of sqrt(1/2): the lower end of the mantissa interval used for log."""

LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
"""ln 2 = LN2_HIGH + LN2_LOW, the first exact in nine bits so that exponent * LN2_HIGH is exact."""

LOG1P = (
    0.3333333134651184,
    -0.2500081956386566,
    0.20001226663589478,
    -0.16623356938362122,
    0.14201757311820984,
    -0.13160181045532227,
    0.1276157945394516,
    -0.07634501904249191,
)
"""log(1+f) = f - f^2/2 + f^3 * sum(c[k] f^k) on f in [sqrt(1/2)-1, sqrt(2)-1], rel. error 6.5e-9."""

SIN_QUARTER = (1.5707963705062866, -0.6459634900093079, 0.07968003302812576, -0.00460165785625577)
"""sin(pi/2 t) = t * sum(c[k] t^2k) on |t| <= 1/2, rel. error 3.5e-8."""

COS_QUARTER = (-1.2337005138397217, 0.25366923213005066, -0.02086016535758972, 0.0009037665440700948)
"""cos(pi/2 t) = 1 + t^2 * sum(c[k] t^2k) on |t| <= 1/2, rel. error 1.1e-8."""
