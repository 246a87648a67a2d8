"""Numbers that kernels and plain torch share."""

DEAD_COLUMN = 2.0**-22
"""If projection leaves a smaller share of a column of fp32 values than this, what is left is rounding error."""

ORTHONORMAL = 1e-3
"""Largest element that |P̂ᵀP̂ − I| may have. Rounding leaves less than 1e-5, dependent columns about 1. At this bound,
the sum over 256 columns is a quarter: no average is enlarged by more than that."""

BF16_NAN = 0x7FC0
"""Bits of the NaN that is written as the scale of a block with an element that is not finite."""

INFINITE_BF16 = 0x7F80
"""Bits of the smallest positive bf16 number that is not finite."""

PERIOD = 1 << 16
"""Adjacent elements of a tensor that are rounded with different random numbers, which have 16 bits."""

E4M3_SHIFT = 2.0**-120
"""Factor that gives E4M3's numbers the bits of their exponents in fp32, also its subnormal ones."""

E4M3_EXPONENT = (127 - 6) << 23
"""Bits of the exponent of E4M3's smallest normal number, 2⁻⁶, in fp32."""

E4M3_MULTIPLES = (20 << 23) + (1 << 22)
"""Added to the bits of the exponent of a number with a mantissa of 3 bits: makes 1.5 · 2²³ units in its last place."""

HEADROOM = 2.0**-18
"""Share of the largest number that an error may keep after a step that was not finite, since products of larger errors
could make every later step overflow. It is 2¹¹⁰ in fp32. A product of such an n × m error with orthonormal columns is
at most √n · 2¹¹⁰, so its sum over W workers fits if W √n < 2¹⁷."""

CARRY = 0.05
"""Weight of the old column against a random direction of about √(m/3). If what waits is less than about a twentieth of
what the old column carries, the old column prevails. So gradients of rank at most r are still sent, up to the rounding
errors of products with the random direction: about 1e-5 to 1e-4 of the largest singular value."""

OTHER_KEY = 4
"""Added to a matrix's key. In four passes, kernels draw what replaces dead columns with the numbers before it."""

SMALLEST_REST = 2.0**-8
"""If a smaller share of a random direction's squared norm is left, what is left is not orthogonal in fp32. The column
then stays until the next time."""
