"""Random runs: layouts, configurations, and gradients of every kind."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.matrices import compressed_rank
from powersgd_triton.ranks.planner import sent_bytes
from tests.support.lockstep import Values

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [1, 2, 3, 5, 8, 13, 17]
NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
KINDS = ["zero", "low rank", "one row", "denormal", "huge", "peak", "all largest", "tiny", "spread", *NOT_FINITE]


@dataclasses.dataclass(frozen=True)
class Fault:
    """In one step, on one worker (or on all, where it is None) a gradient of another kind."""

    step: int
    worker: int | None
    tensor: int
    kind: str


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: everything that it depends on."""

    fields: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    workers: int
    steps: int
    seed: int
    scale: float
    faults: tuple[Fault, ...]
    buckets: tuple[int, ...]
    """Number of buckets in each step."""
    overlapping: bool
    reads: frozenset[int]
    """Steps after which the error is read, hence written down."""
    saves: frozenset[int]
    """Steps after which the state is saved and loaded."""
    node_sizes: tuple[int, ...] = (1,)
    """Workers of a node, at first and after each load."""


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    size = st.sampled_from(SIZES)
    sizes = st.tuples(size, size) | st.tuples(size, size) | st.tuples(size) | st.tuples(size, size, size)
    special = [(), (1, 13), (13, 1), (1, 1), (0, 5), (5, 0), (0,), (4, 3, 2, 2), (8, 13), (8, 13)]
    return sizes | st.sampled_from(special)


@st.composite
def cases(draw: st.DrawFn, backend: str, max_steps: int) -> Case:
    triton = backend == "triton"
    alternating = draw(st.booleans())
    fields: dict[str, Any] = {
        "rank": draw(st.sampled_from([1, 2, 3, 4, 16])),
        "min_compression_rate": draw(st.sampled_from([0, 0, 0.5, 2])),
        "start_iter": draw(st.sampled_from([0, 0, 0, 1, 2])),
        "algorithm": "alternating" if alternating else "standard",
        "iterations": 1 if triton else draw(st.sampled_from([1, 1, 2])),
        "error_feedback": draw(st.sampled_from([True, True, True, False])),
        "warm_start": alternating or draw(st.sampled_from([True, True, False])),
        "error_dtype": draw(st.sampled_from([None, None, "bf16"])),
        "orthogonalization_epsilon": draw(st.sampled_from([0.0, 0.0, 1e-8, 0.01])),
        "seed": draw(st.integers(0, 3)),
        "backend": backend,
    }
    chosen = draw(st.lists(shapes(), min_size=1, max_size=3 if triton else 6))
    named = {f"t{index}": shape for index, shape in enumerate(chosen)}
    if fields["error_feedback"] and draw(st.sampled_from([False, False, True])):
        fields |= {"rank": None, "bytes_per_step": 1, "replan_every": draw(st.sampled_from([1, 1, 2]))}
        fields["wire_dtype"] = "fp32"
        config = PowerSGDConfig(**fields)
        least = sent_bytes(named, {name: 1 for name, shape in named.items() if compressed_rank(shape, config)}, config)
        fields["bytes_per_step"] = max(1, math.ceil(least * draw(st.sampled_from([1.0, 1.5, 3.0, 10.0]))))
    dtype = st.sampled_from(DTYPES[:3] if triton else DTYPES)
    common = draw(dtype)
    mixed = not triton and draw(st.sampled_from([False, False, False, True]))
    workers, steps = (
        draw(st.sampled_from([1, 2, 3, 4] if triton else [1, 2, 3, 4, 4, 6])),
        draw(st.integers(1, max_steps)),
    )
    node_size = st.sampled_from([size for size in (1, 2, 3) if workers % size == 0])
    faults = st.builds(
        Fault,
        st.integers(0, steps - 1),
        st.none() | st.integers(0, workers - 1),
        st.integers(0, len(named) - 1),
        st.sampled_from(KINDS),
    )
    some_steps = st.frozensets(st.integers(0, steps - 1), max_size=2)
    return Case(
        fields=fields,
        shapes=named,
        dtypes={name: draw(dtype) if mixed else common for name in named},
        workers=workers,
        steps=steps,
        seed=draw(st.integers(0, 2**16)),
        scale=10.0 ** draw(st.sampled_from([0, 0, -3, 2])),
        faults=tuple(draw(st.lists(faults, max_size=8))),
        buckets=tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))),
        overlapping=draw(st.booleans()),
        reads=draw(some_steps),
        saves=draw(some_steps),
        node_sizes=tuple(draw(st.lists(node_size, min_size=1, max_size=3))),
    )


def gradient(
    kind: str, shape: Sequence[int], dtype: torch.dtype, scale: float, limit: float, generator: torch.Generator
) -> Tensor:
    """A gradient of one kind, with finite elements up to ``limit``; "normal" is what is none of KINDS."""
    largest, smallest = min(limit, torch.finfo(dtype).max), torch.finfo(dtype).smallest_normal
    G = torch.randn(tuple(shape), dtype=torch.float64, generator=generator) * scale
    matrix = G.view(len(G), -1) if G.dim() > 1 and G.numel() else G.view(1, -1)
    place = int(torch.randint(max(1, G.numel()), (), generator=generator))
    if kind == "zero":
        G.zero_()
    elif kind == "low rank":
        matrix.copy_(matrix[:, :1] * matrix[:1])
    elif kind == "one row":
        matrix[1:] = 0
    elif kind == "denormal":
        G.mul_(smallest / 64 / scale)
    elif kind == "tiny":
        G.mul_(smallest * 64 / scale)
    elif kind == "huge":
        G = (torch.rand(G.shape, dtype=torch.float64, generator=generator) * 2 - 1) * largest
    elif kind == "all largest":
        G.fill_(largest)
    elif kind == "spread":
        G.mul_(10.0 ** (torch.rand(G.shape, dtype=torch.float64, generator=generator) * 8 - 6))
    elif kind == "peak" and G.numel():
        G.view(-1)[place] = -largest
    elif kind in NOT_FINITE and G.numel():
        G.view(-1)[place] = NOT_FINITE[kind]
    # A normal number, however large, is no overflow.
    return torch.where(G.isfinite(), G.clamp(-largest, largest), G).to(dtype)


def gradients(case: Case, step: int) -> list[Values]:
    """Each worker's gradients."""
    given: list[Values] = []
    # A 16-bit error buffer holds somewhat less than fp32, and far less than fp64. The model itself, in fp64, must not
    # overflow, nor the squares that it sums.
    limit = 1e36 if case.fields["error_dtype"] else 1e140
    for worker in range(case.workers):
        generator = torch.Generator().manual_seed((case.seed * 1000 + step) * 10 + worker)
        kinds = {f.tensor: f.kind for f in case.faults if f.step == step and f.worker in (None, worker)}
        given.append(
            {
                name: gradient(kinds.get(index, "normal"), shape, case.dtypes[name], case.scale, limit, generator)
                for index, (name, shape) in enumerate(case.shapes.items())
            }
        )
    return given
