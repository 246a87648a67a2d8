"""The one configuration object that every part of the package shares."""

import dataclasses
import difflib
import logging
import numbers
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

logger = logging.getLogger("powersgd_triton")

RankFunction = Callable[[str, tuple[int, ...]], int]
"""Maps a parameter's name and shape to the rank of its approximation; 0 means that it is averaged exactly."""
MatricesFunction = Callable[[str, tuple[int, ...]], tuple[int, int, int] | None]
"""Maps a parameter's name and shape to (batch, rows, columns), or to None for the default."""

DEFAULT_RANK = 4
PLANNED_WIRE_DTYPE = "int4"
"""The width that gave the lowest loss for the same bytes; measured by benchmarks/loss_per_byte.py."""
DEFAULT_MAX_RANK = 64
"""Limit of planned ranks: two blocks of columns in the kernels. Wider models need a smaller share of their width."""

AUTO = "auto"
ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
DTYPES = {"wire_dtype": ("float32", "bfloat16", "float16", "int8", "int4"), "error_dtype": ("float32", "bfloat16")}
"""The fields that are dtypes, with the names that they may have."""
RANK_LIMITS = ("max_rank", "max_overhead")
"""The fields that go with a budget only."""
QUANTIZED = ("bf16", "fp8", "int8", "int4", "int2", "ternary")
STATELESS = QUANTIZED[:3]
"""The formats that need no error feedback."""
SPARSE, MOST_SPARSE = "sparse", 1000
"""The format of local steps that sends some elements only, and how many times fewer bytes than fp32 it can have."""
NOT_WITH_QUANTIZE = ("rank", "compression", "bytes_per_step", "wire_dtype", "error_dtype", "bypass")
"""Fields of factors and of what is sent beside them, and how errors are kept. Quantized tensors have fp32 errors."""
CHOICES: dict[str, tuple[str | None, ...]] = {
    **{"backend": (AUTO, "triton", "torch"), "algorithm": ("standard", "alternating")},
    **{"quantize": (None, *QUANTIZED, SPARSE), "bypass": (None, *STATELESS)},
}
"""The fields that have one of a few values."""
INTEGERS = {"start_iter": 0, "iterations": 1, "seed": 0, "check_every": 0, "replan_every": 0, "explore_every": 0}
"""The integer fields, with the smallest value of each."""


def whole_number(what: str, value: Any, minimum: int = 0, kind: str = "an int") -> int:
    """Return a value such as a ``numpy.int64`` as an int. TypeError: It is no whole number. ValueError: Too small."""
    # Bools count as integers in Python and torch, and in older versions of NumPy.
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", None)).endswith("bool")
    try:
        number = None if is_bool else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{what} must be {kind}; got {value!r}")
    if number < minimum:
        raise ValueError(f"{what} must be at least {minimum}; got {number}")
    return number


def _number(name: str, value: Any, minimum: int, kind: str = "a number") -> float:
    """Return a value such as a ``numpy.float64`` as Python's number: saved states have no others."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {kind}; got {value!r}")
    number = int(value) if isinstance(value, numbers.Integral) else float(value)
    if not minimum <= number <= sys.float_info.max:
        raise ValueError(f"{name} must be finite and at least {minimum}; got {value}")
    return number


def unknown(key: object, valid: Sequence[str]) -> str:
    """Return a message about a key that is none of the valid ones."""
    nearest = difflib.get_close_matches(str(key), valid, n=1)
    meant = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return f"unknown key {key!r}{meant} Valid keys: {', '.join(valid)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGDConfig:
    """How gradients are compressed. Immutable, keyword-only, and validated on construction.

    Give at most one of ``rank``, ``compression``, ``bytes_per_step`` and ``quantize``; "sparse" takes ``compression``.

    Args:
        rank: Number of columns of the factors P and Q. An n × m matrix uses min(rank, n, m). It may be a function
            (name, shape) → rank, which must be the same on all workers; 0 means that the matrix is averaged exactly.
            Default: 4, or planned ranks if a budget is given.
        compression: A byte budget in place of a rank: how many times fewer bytes than fp32 gradients a step sends,
            counting all tensors of the model. Ranks are planned for each matrix. "auto" measures step and network
            during the first steps, which are exact, and chooses ``quantize``, a budget and ``wire_dtype``, or no
            compression.
        bytes_per_step: The same budget as a number of bytes, counted so that an all-reduce of B bytes counts B. Both
            budgets count 4 bytes for an element that is averaged exactly (see ``bypass``), and each compression of the
            gradients as one step.
        quantize: Send whole tensors in few bits in place of factors, as "bf16", "fp8" (E4M3), "int8", "int4", "int2" or
            "ternary" (−s, 0 and s; 1.7 bits an element). All but "bf16" have one bf16 scale s for 128 elements. Sums
            are computed in fp32. "sparse", for ``LocalSteps``, sends the signs of the largest elements, as many as fit
            into ``compression`` times fewer bytes than fp32, from 16 to 1,000 times. Default: 50.
        replan_every: Steps between two plans, counted from ``start_iter``. A plan is measured at the end of a step and
            takes effect after the next one. 0 keeps the first plan, which gives all matrices about the same rank.
        max_rank: Largest planned rank, which limits the compute of a step. Default: 64.
        max_overhead: Largest share of a step that compression may compute, for example 0.05. The first steps are
            measured, and ``max_rank`` is lowered if necessary. It then stays, also in saved states.
        matrices: A function (name, shape) → (batch, rows, columns): of which matrices a gradient of two or more
            dimensions consists, for example (3, shape[0] // 3, shape[1]) for a fused projection. The shape of a sharded
            parameter is its shard's. None, and the default: [..., n, m] is a batch of n × m matrices, such as experts,
            unless dim 0 × the rest has much smaller factors, as for convolutions. One row is averaged exactly.
        min_compression_rate: A matrix is compressed only if (n + m) · r · min_compression_rate < n · m (for factors
            sent in fp32 beside exact tensors; else their bytes are compared). 0 compresses every non-empty matrix.
        start_iter: Number of first steps that average gradients exactly. 0 compresses from the first step.
        error_feedback: Keep what a step did not send and add it to the next gradient (Vogels et al. 2019, Algorithm 2).
            False needs no memory. Quantization in 4 bits and more then rounds stochastically, so that averages are
            unbiased. Default: True, but False for gradients in "bf16", "fp8" and "int8".
        warm_start: Start each step from the last step's Q. Otherwise, from a new random Q (section 3 of the paper).
        explore_every: Steps after which one column of a warm-started basis is replaced by a direction that the basis
            does not see. Otherwise, a gradient that noise hides from the basis may never be sent (arXiv:2509.11254).
            0 never explores, as in the paper. It needs error feedback and the standard algorithm.
        algorithm: "standard" is the paper's Algorithm 1: P = M Q and Q = Mᵀ P̂, with two all-reduces a step.
            "alternating" computes one of them in a step, by turns, with one all-reduce (Vogels et al. 2020, "Practical
            Low-Rank Communication Compression in Decentralized Deep Learning"). It requires ``warm_start``.
        iterations: Number of times that a step repeats the algorithm, each time on what is left over.
        orthogonalization_epsilon: A column is replaced by a random direction if, after projecting out the columns
            before it, at most max(epsilon, 2⁻²²) of its norm is left.
        wire_dtype: Width of the factors in messages, as a torch.dtype or its name: fp32 (fp64 for fp64 gradients),
            bf16, fp16, int8 or int4. Default: fp32, or int4 if ranks are planned. Narrower factors than fp32 are summed
            in fp32 by one worker, rounded, and sent back. fp16 and integers have one bf16 scale for each 128 entries of
            a column. What rounding loses stays in the error.
        bypass: Send the tensors without factors, such as vectors, in few bits too, as "int8", "fp8" or "bf16" (see
            ``quantize``), in messages of their own. They are rounded stochastically, so that averages are unbiased, and
            have no errors between steps. Default: they are averaged exactly, in the messages of the factors.
        error_dtype: Dtype of the error buffer between steps, as a torch.dtype or its name. Default: fp32 (fp64 for fp64
            gradients). bf16 halves its memory.
        seed: Seed of the first Q and of replacement directions, used together with the parameter's name.
        batch_by_shape: Without effect. Operations on matrices of equal shape are always batched, which takes no memory.
        check_every: Steps after which workers compare configuration, step and factors: ``DisagreementError`` if they
            differ. The host then waits for the device. 0 compares only before the first step.
        backend: "triton", "torch", or "auto", which chooses Triton on CUDA and ROCm devices that support it.
        codes: The older name of ``quantize``.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range.
    """

    rank: int | RankFunction | None = None
    compression: float | str | None = None
    bytes_per_step: int | None = None
    quantize: str | None = None
    replan_every: int = 50
    max_rank: int | None = None
    max_overhead: float | None = None
    matrices: MatricesFunction | None = None
    min_compression_rate: float = 2.0
    start_iter: int = 0
    error_feedback: bool | None = None
    warm_start: bool = True
    explore_every: int = 16
    algorithm: str = "standard"
    iterations: int = 1
    orthogonalization_epsilon: float = 0.0
    wire_dtype: torch.dtype | str | None = None
    bypass: str | None = None
    error_dtype: torch.dtype | str | None = None
    seed: int = 0
    batch_by_shape: bool = True
    check_every: int = 0
    backend: str = "auto"
    codes: dataclasses.InitVar[str | None] = None

    def __post_init__(self, codes: str | None) -> None:
        self._check_quantize(codes)
        if self.error_feedback is None and self.quantize not in STATELESS:
            self._set("error_feedback", True)
        self._check_rank()
        for name, minimum in INTEGERS.items():
            self._set(name, whole_number(name, getattr(self, name), minimum))
        if not (self.matrices is None or callable(self.matrices)):
            raise TypeError(f"matrices must be a function (name, shape) → (batch, rows, columns); got {self.matrices}")
        for name in ("seed", "explore_every"):
            if getattr(self, name) >= 2**32:
                raise ValueError(f"{name} must be below 2**32; got {getattr(self, name)}")
        for name in ("min_compression_rate", "orthogonalization_epsilon"):
            self._set(name, _number(name, getattr(self, name), 0))
        if (epsilon := self.orthogonalization_epsilon) >= 1:
            raise ValueError(f"orthogonalization_epsilon, relative to a column's norm, must be below 1; got {epsilon}")
        for name in ("error_feedback", "warm_start", "batch_by_shape"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (name, value) != ("error_feedback", None):
                raise TypeError(f"{name} must be True or False; got {value!r}")
        if self.algorithm == "alternating" and not self.warm_start:
            raise ValueError("algorithm 'alternating' starts from the last step's factors and requires warm_start=True")
        if self.wire_dtype is None and self.planned and self.compression != AUTO:
            self._set("wire_dtype", PLANNED_WIRE_DTYPE)
        for name, names in DTYPES.items():
            value = getattr(self, name)
            if value is not None:
                given = str(value).removeprefix("torch.")
                # Kept as a name, so that configurations compare equal and can be written as JSON.
                self._set(name, ALIASES.get(given, given))
                if getattr(self, name) not in names:
                    raise ValueError(f"{name} must be None, {', '.join(names[:-1])} or {names[-1]}; got {value!r}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_quantize(self, codes: str | None) -> None:
        if codes is not None:
            if self.quantize not in (None, codes):
                raise ValueError(f"codes is another name of quantize: give one; got {codes!r} and {self.quantize!r}")
            self._set("quantize", codes)
        for name, values in CHOICES.items():
            value = getattr(self, name)
            if value not in values:
                kinds = f"{'None or ' * (None in values)}one of {', '.join(filter(None, values))}"
                raise ValueError(f"{name} must be {kinds}; got {value!r}")
            self._set(name, value and str(value))
        for name in NOT_WITH_QUANTIZE if self.quantize is not None else ():
            if getattr(self, name) is not None and (name, self.quantize) != ("compression", SPARSE):
                got = f"quantize={self.quantize!r} and {name}={getattr(self, name)!r}"
                raise ValueError(f"quantize sends whole tensors, so {name} has no use beside it; got {got}")

    def _check_rank(self) -> None:
        sparse = self.quantize == SPARSE
        budget: Any = 50.0 if sparse and self.compression is None else self.compression
        if budget is not None:
            least, kind = (16, "a number") if sparse else (1, f"a number or {AUTO!r}")
            budget = AUTO if budget == AUTO and not sparse else _number("compression", budget, least, kind)
            self._set("compression", budget)
        if sparse and (budget > MOST_SPARSE or self.error_feedback is False):
            needed = f"quantize='sparse' needs compression up to {MOST_SPARSE} and error_feedback=True"
            raise ValueError(f"{needed}; got compression={budget}, error_feedback={self.error_feedback}")
        given = [name for name in ("rank", "compression", "bytes_per_step") if getattr(self, name) is not None]
        if len(given) > 1:
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in given)
            raise ValueError(f"expected one of rank, compression and bytes_per_step; got {values}")
        for name in ("bytes_per_step", "max_rank"):
            if getattr(self, name) is not None:
                self._set(name, whole_number(name, getattr(self, name), 1))
        if not given and self.quantize is None:
            self._set("rank", DEFAULT_RANK)
        if self.planned and self.max_rank is None:
            self._set("max_rank", DEFAULT_MAX_RANK)
        for name in RANK_LIMITS:
            if not self.planned and getattr(self, name) is not None:
                got = f"rank={self.rank!r}" if self.quantize is None else f"quantize={self.quantize!r}"
                raise ValueError(f"{name} limits planned ranks: give it with compression or bytes_per_step; got {got}")
        if self.max_overhead is not None:
            self._set("max_overhead", _number("max_overhead", self.max_overhead, 0))
            if not 0 < self.max_overhead < 1:
                raise ValueError(f"max_overhead is a share of a step between 0 and 1; got {self.max_overhead}")
        if self.planned and not self.error_feedback:
            raise ValueError(f"{given[0]} plans ranks from the error buffers: it needs error_feedback=True")
        if self.rank is not None and not callable(self.rank):
            self._set("rank", whole_number("rank", self.rank, 1, "an int or a function (name, shape) → int"))

    @property
    def planned(self) -> bool:
        """Whether ranks are planned under a byte budget."""
        return self.rank is None and self.quantize is None

    @property
    def whole_format(self) -> str | None:
        """Format of tensors that are sent whole. None if they are averaged exactly."""
        return self.quantize or self.bypass

    @property
    def measures(self) -> bool:
        """Whether something is chosen from times of the first steps."""
        return self.compression == AUTO or self.max_overhead is not None

    @classmethod
    def from_dict(cls, section: Mapping[str, Any]) -> "PowerSGDConfig":
        """Build a configuration from a JSON section.

        TypeError, ValueError: As above, or a key is not a field. The message then names a similar one, if any.
        """
        if not isinstance(section, Mapping):
            raise TypeError(f"expected an object like {{'compression': 20}}; got {section!r}")
        fields = [*(field.name for field in dataclasses.fields(cls)), "codes"]
        for key in section:
            if key not in fields:
                raise ValueError(unknown(key, fields))
        return cls(**section)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values. A function becomes its name, which ``from_dict`` refuses."""
        fields = dataclasses.asdict(self)
        for name in ("rank", "matrices"):
            if callable(function := fields[name]):
                fields[name] = f"function {getattr(function, '__qualname__', type(function).__qualname__)}"
        return fields


def quantized(config: PowerSGDConfig, **fields: Any) -> PowerSGDConfig:
    """Return a configuration with ``quantize`` and possibly other fields in place of those of factors."""
    of_factors: dict[str, Any] = dict.fromkeys((*NOT_WITH_QUANTIZE, *RANK_LIMITS, "error_feedback"))
    return dataclasses.replace(config, **(of_factors | fields))
