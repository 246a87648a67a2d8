"""Random layouts, gradients and configurations: every step follows the method, and nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given

from tests.support.device import INTERPRETED
from tests.support.fuzz_cases import NOT_FINITE, Case, Fault, cases
from tests.support.fuzzing import Follower
from tests.support.thinned import thinned

triton_in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled for the GPU")


def examples(count: int) -> hypothesis.settings:
    """The same examples in every run with the same modules: hypothesis also draws numbers that stand in their code."""
    return hypothesis.settings(
        deadline=None, derandomize=True, max_examples=count, suppress_health_check=list(HealthCheck), database=None
    )


@examples(40)
@given(cases())
def test_steps_follow_the_method(case: Case) -> None:
    Follower(case).run()


@pytest.mark.slow
@examples(4000)
@given(cases(max_steps=10))
def test_many_steps_follow_the_method(case: Case) -> None:
    Follower(case).run()


@triton_in_interpreter
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@examples(2)
@given(cases("triton", max_steps=2))
def test_steps_follow_the_method_in_triton(case: Case) -> None:
    Follower(case).run()


@pytest.mark.slow
@triton_in_interpreter
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@examples(150)
@given(cases("triton"))
def test_many_steps_follow_the_method_in_triton(case: Case) -> None:
    Follower(case).run()


SHAPES: dict[str, tuple[int, ...]] = {
    "linear": (13, 8), "twin": (13, 8), "conv": (5, 3, 2, 2), "row": (1, 13), "column": (13, 1), "bias": (8,),
    "scalar": (), "empty": (0, 5), "wide": (3, 17), "cube": (4, 3, 5),
}  # fmt: skip
FIELDS: dict[str, Any] = {"rank": 2, "min_compression_rate": 0, "backend": "torch", "error_dtype": None}
MODES: dict[str, dict[str, Any]] = {
    "standard": {},
    "standard twice, late": {"iterations": 2, "start_iter": 5},
    "cold": {"warm_start": False, "batch_by_shape": False},
    "alternating": {"algorithm": "alternating", "rank": 3},
    "alternating twice": {"algorithm": "alternating", "iterations": 2},
}
# Finite ones leave an error that is far below those of most steps, or as large as the dtype allows.
HARMLESS = ["zero", "low rank", "one row", "denormal", "tiny", "spread"]


@thinned("mode, dtype", list(MODES), [torch.float32, torch.bfloat16], together=1)
def test_nothing_is_lost_in_25_steps(mode: str, dtype: torch.dtype) -> None:
    keep_books(2, mode, dtype, steps=25)


def test_nothing_is_lost_between_nodes_and_one_level() -> None:
    """Nodes of 2 workers, then one level, then nodes of 3."""
    keep_books(6, "standard", torch.float32, steps=24, node_sizes=(2, 1, 3))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("algorithm", ["standard", "alternating"])
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=[triton_in_interpreter, pytest.mark.slow])])
def test_nodes_with_workers_that_have_no_row(backend: str, algorithm: str) -> None:
    """One row for two workers, and rows of one matrix for both. One worker's share is not finite in the second step."""
    fields = {**FIELDS, "backend": backend, "algorithm": algorithm}
    shapes = {"row": (1, 13), "linear": (5, 3), "bias": (4,)}
    for tensor, kind in ((0, "inf"), (1, "nan")):
        case = Case(
            fields, shapes, dict.fromkeys(shapes, torch.float32), workers=4, steps=3, seed=1, scale=1.0,
            faults=(Fault(1, 2, tensor, kind),), buckets=(3,), overlapping=True, reads=frozenset({0, 2}),
            saves=frozenset({0}), node_sizes=(2, 4),
        )  # fmt: skip
        Follower(case).run()


@pytest.mark.parametrize("algorithm", ["standard", "alternating"])
def test_matrices_of_one_shape_and_several_dtypes(algorithm: str) -> None:
    """None is rounded to the dtype of another one."""
    fields = {**FIELDS, "algorithm": algorithm}
    dtypes = {"half": torch.bfloat16, "full": torch.float32, "float": torch.float16}
    case = Case(
        fields, dict.fromkeys(dtypes, (5, 3)), dtypes, workers=2, steps=3, seed=1, scale=1.0,
        faults=(Fault(1, 0, 0, "inf"),), buckets=(1,), overlapping=False, reads=frozenset({0, 2}),
        saves=frozenset({0}), node_sizes=(1,),
    )  # fmt: skip
    Follower(case).run()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_nothing_is_lost_in_200_steps_of_any_number_of_workers(workers: int, mode: str, dtype: torch.dtype) -> None:
    keep_books(workers, mode, dtype, steps=200)


def keep_books(workers: int, mode: str, dtype: torch.dtype, steps: int, node_sizes: tuple[int, ...] = (1,)) -> None:
    """Faults all the time, other buckets from step 20 on, and two saved states. Each step conserves what is owed."""
    rng = random.Random(f"{workers} {mode} {dtype}")
    faults = [
        Fault(step, rng.choice([None, *range(workers)]), rng.randrange(len(SHAPES)), rng.choice(kinds))
        for step in range(steps)
        for kinds, share in ((HARMLESS, 0.3), (list(NOT_FINITE), 0.05))
        if rng.random() < share
    ] + [Fault(steps // 2, 0, 0, "inf")]
    case = Case(
        {**FIELDS, **MODES[mode]}, SHAPES, dict.fromkeys(SHAPES, dtype), workers, steps, rng.randrange(1000), 1.0,
        tuple(faults), buckets=(*[2] * 20, 3), overlapping=True, reads=frozenset(),
        saves=frozenset({steps // 4, steps * 3 // 5}), node_sizes=node_sizes,
    )  # fmt: skip
    follower = Follower(case)
    follower.run()
    assert 0 < follower.skipped < steps / 2
    assert len(follower.owed_by_all()) == 7
