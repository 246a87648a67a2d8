"""Numbers that kernels and plain torch share."""

DEAD_COLUMN = 2.0**-22
"""If projection leaves a smaller share of a column of fp32 values than this, what is left is rounding error."""

ORTHONORMAL = 1e-3
"""Largest element that |P̂ᵀP̂ − I| may have. Rounding leaves less than 1e-5, dependent columns about 1. At this bound,
the sum over 256 columns is a quarter: no average is enlarged by more than that."""

BF16_NAN = 0x7FC0
"""Bits of the NaN that is written as the scale of a block with an element that is not finite."""
