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

POLAR_INTERVAL = (1e-3, 1.0)
POLAR_SCHEDULE = (
    (8.470328803848073, -25.10807470666187, 18.629275599118007),
    (4.18283418329394, -3.1087011098892425, 0.5806066813500494),
    (3.961857278961598, -2.9540637463593784, 0.5629761179538966),
    (3.2865862170279527, -2.4647201345312766, 0.5073576938614541),
    (2.273749994434037, -1.6446603679080687, 0.41619092749788655),
    (1.8887161973518298, -1.265157225338603, 0.3765189255574919),
)
"""Odd quintics x (a + b x^2 + c x^4) whose composition takes POLAR_INTERVAL into [1 - 9.2e-4, 1 + 9.2e-4].

Each is the minimax approximation of 1 on the interval the one before leaves, [1e-3, 1] first, which makes the
composition optimal (Amsel, Persson, Musco, Gower, "The Polar Express", 2025, theorem 3.1). Computed here with the
Remez exchange algorithm in float64: the errors are 0.9915, 0.9646, 0.8598, 0.5459, 0.1134 and 9.165e-4. One cubic step
takes the last of them to 6.3e-7, a second to rounding. Not part of the sample stream."""
