"""The one configuration object that every part of the package shares."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

import torch

BACKENDS = ("auto", "triton", "torch")
ALGORITHMS = ("standard", "alternating")
ERROR_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGDConfig:
    """How gradients are compressed: immutable, keyword-only, validated on construction.

    Args:
        rank: columns of the factors P and Q; a matrix of n × m uses min(rank, n, m).
        min_compression_rate: a matrix is compressed only if (n + m) · r · min_compression_rate < n · m.
            0 compresses every non-empty matrix.
        start_iter: number of first steps that average gradients exactly. 0 compresses from the first step.
        error_feedback: keep what a step lost and add it to the next gradient (Vogels et al. 2019, Algorithm 2).
        warm_start: start a step from the last step's Q; otherwise from a fresh random one (section 3).
        algorithm: "standard" is the paper's Algorithm 1: P = M Q and Q = Mᵀ P̂, two all-reduces a step. "alternating"
            multiplies from the left and from the right by turns: one product and one all-reduce a step (Vogels et al.
            2020, "Practical Low-Rank Communication Compression in Decentralized Deep Learning", and the authors'
            reference implementation). It needs warm_start.
        iterations: how often a step repeats that, each time on what the last time left over.
        orthogonalization_epsilon: a column is replaced by a random direction when what is left of it after projecting
            out its predecessors is at most max(epsilon, 2⁻²²) of its norm before.
        error_dtype: dtype in which the error is kept between steps, a torch.dtype or its name: None for fp32 (fp64 for
            fp64 gradients), or bf16, which halves that memory.
        seed: seeds Q and the replacement directions, together with the parameter's name.
        batch_by_shape: treat matrices of equal shape in batched operations. The result does not depend on it
            beyond rounding.
        check_every: number of steps after which workers compare configuration, step and factors, to raise a
            ``DisagreementError`` instead of training on; the host waits for the device then. 0: only before the first.
        backend: "triton", "torch", or "auto", which is Triton where it can be used on a CUDA or ROCm device.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of its range.
    """

    rank: int = 4
    min_compression_rate: float = 2.0
    start_iter: int = 0
    error_feedback: bool = True
    warm_start: bool = True
    algorithm: str = "standard"
    iterations: int = 1
    orthogonalization_epsilon: float = 0.0
    error_dtype: torch.dtype | str | None = None
    seed: int = 0
    batch_by_shape: bool = True
    check_every: int = 0
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name, minimum in (("rank", 1), ("start_iter", 0), ("iterations", 1), ("seed", 0), ("check_every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int; got {value!r}")
            if value < minimum:
                raise ValueError(f"{name} must be at least {minimum}; got {value}")
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32; got {self.seed}")
        for name in ("min_compression_rate", "orthogonalization_epsilon"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number; got {value!r}")
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and at least 0; got {value}")
        if self.orthogonalization_epsilon >= 1:
            raise ValueError(
                f"orthogonalization_epsilon is relative to a column's norm and must be below 1; "
                f"got {self.orthogonalization_epsilon}"
            )
        for name in ("error_feedback", "warm_start", "batch_by_shape"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False; got {getattr(self, name)!r}")
        for name, choices in (("backend", BACKENDS), ("algorithm", ALGORITHMS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.algorithm == "alternating" and not self.warm_start:
            raise ValueError("algorithm 'alternating' starts from the last step's factors: it needs warm_start=True")
        if self.error_dtype is not None:
            name = str(self.error_dtype).removeprefix("torch.")
            if name not in ERROR_DTYPES:
                raise ValueError(f"error_dtype must be None, float32 or bfloat16; got {self.error_dtype!r}")
            # Kept as its name, so that equal configurations are equal and go into JSON.
            object.__setattr__(self, "error_dtype", str(ERROR_DTYPES[name]).removeprefix("torch."))

    @classmethod
    def from_dict(cls, section: Mapping[str, Any]) -> PowerSGDConfig:
        """Build a configuration from a JSON section.

        Raises:
            ValueError: a key is not a field; the message names it and the nearest field.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        for key in section:
            if key not in fields:
                nearest = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.0)[0]
                raise ValueError(f"unknown key {key!r}; did you mean {nearest!r}? Valid keys: {', '.join(fields)}")
        return cls(**section)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, such that ``from_dict`` gives back an equal configuration."""
        return dataclasses.asdict(self)
