"""Random layouts, gradients and configurations: every step follows the method, and nothing is lost."""

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given

from tests.support.device import INTERPRETED
from tests.support.fuzz_cases import Case, Fault, cases
from tests.support.fuzzing import Follower

triton_in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled for the GPU")


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("backend", "examples", "max_steps"),
    [
        ("torch", 80, 6),
        pytest.param("torch", 4000, 10, marks=pytest.mark.slow),
        pytest.param("triton", 2, 2, marks=triton_in_interpreter),
        pytest.param("triton", 150, 6, marks=[triton_in_interpreter, pytest.mark.slow]),
    ],
)
def test_steps_follow_the_method(backend: str, examples: int, max_steps: int) -> None:
    # The same examples in every run with the same modules: hypothesis also draws numbers that stand in their code.
    @hypothesis.settings(
        deadline=None, derandomize=True, max_examples=examples, suppress_health_check=list(HealthCheck), database=None
    )
    @given(cases(backend, max_steps))
    def follow(case: Case) -> None:
        Follower(case).run()

    follow()


FIELDS: dict[str, Any] = {"rank": 2, "min_compression_rate": 0, "backend": "torch", "error_dtype": None}


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
