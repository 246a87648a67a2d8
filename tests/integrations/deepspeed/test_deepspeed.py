"""The DeepSpeed adapter with 2 and 3 gloo workers: plain DeepSpeed's training at full rank, and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from tests.support import deepspeed_jobs as jobs
from tests.support.deepspeed_cases import PIPELINES, QUICK, THREE_WORKERS, WIDE
from tests.support.deepspeed_training import (
    BF16_LIMIT,
    FP32_LIMIT,
    RANK_4,
    STEPS,
    Case,
    Net,
    compare,
    largest_difference,
    result,
    run_all,
)
from tests.support.distributed import run

Results = Sequence[Mapping[str, Any]]
AUTOCAST_FP16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
COMPRESSED, BYPASS = "blocks.0.up.weight", "blocks.0.norm.bias"
OVERFLOWS: list[tuple[int, str, dict[str, Any], bool]] = [
    (stage, where, {}, True) for stage in (1, 2, 3) for where in (COMPRESSED, BYPASS)
]
OVERFLOWS += [(0, where, AUTOCAST_FP16, False) for where in (COMPRESSED, BYPASS)]


def overflow_name(stage: int, where: str) -> str:
    return f"overflow at stage {stage} in {where}"


@pytest.fixture(scope="module")
def pair() -> Results:
    """All jobs of two workers."""
    work: list[Any] = [(case.name, compare, (case,)) for case in QUICK]
    work += [(f"rank 4 at stage {stage}", jobs.rank_4, (stage,)) for stage in range(4)]
    work += [("the DDP hook", jobs.ddp_rank_4, ()), ("compressions", jobs.compressions, ())]
    work += [(f"bytes at stage {stage}", jobs.traffic, (stage, RANK_4)) for stage in range(4)]
    work += [(f"plain bytes at stage {stage}", jobs.traffic, (stage, None)) for stage in range(4)]
    work += [(overflow_name(stage, where), jobs.overflow, (stage, where, o, s)) for stage, where, o, s in OVERFLOWS]
    work += [(f"bypassed at stage {stage}", jobs.bypassed_seam, (stage,)) for stage in range(4)]
    work += [(f"start at stage {stage}", jobs.start_iter, (stage,)) for stage in (0, 3)]
    return run(run_all, 2, work)


@pytest.fixture(scope="module")
def three() -> Results:
    """All jobs of three workers."""
    work: list[Any] = [(case.name, compare, (case,)) for case in THREE_WORKERS]
    work += [(f"slices at stage {stage}", jobs.written_elements, (stage,)) for stage in range(4)]
    work += [(f"digests at stage {stage}", jobs.digests, (stage,)) for stage in range(4)]
    return run(run_all, 3, work)


@pytest.fixture(scope="module")
def wide() -> Results:
    return run(run_all, 2, [(case.name, compare, (case,)) for case in WIDE])


def check_case(results: Results, case: Case) -> None:
    for found in result(results, case.name):
        assert len(found["plain"]) == STEPS
        assert largest_difference(found["full rank"], found["plain"]) <= case.limit
        assert found["plain"][-1] < found["plain"][0] - 0.5, "nothing was learned"


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_full_rank_is_plain_deepspeed(pair: Results, case: Case) -> None:
    check_case(pair, case)


@pytest.mark.parametrize("case", THREE_WORKERS, ids=lambda case: case.name)
def test_full_rank_is_plain_deepspeed_on_three_workers(three: Results, case: Case) -> None:
    check_case(three, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_full_rank_is_plain_deepspeed_in_the_wide_matrix(wide: Results, case: Case) -> None:
    check_case(wide, case)


@pytest.fixture(scope="module")
def four() -> Results:
    return run(run_all, 4, [(case.name, compare, (case,)) for case in PIPELINES])


@pytest.mark.slow
@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: case.name)
def test_full_rank_is_plain_deepspeed_in_pipelines(four: Results, case: Case) -> None:
    check_case(four, case)


@pytest.mark.parametrize("stage", range(4))
def test_rank_4_trains_as_the_ddp_hook(pair: Results, stage: int) -> None:
    # The same gradients, bases and errors, summed in another order.
    expected = result(pair, "the DDP hook")[0]
    assert largest_difference(result(pair, f"rank 4 at stage {stage}")[0], expected) <= FP32_LIMIT


@pytest.mark.parametrize("stage", range(4))
def test_only_the_own_slice_is_written(three: Results, stage: int) -> None:
    found = result(three, f"slices at stage {stage}")
    model = found[0]["model"]
    written = [worker["written"] for worker in found]
    if stage == 0:
        assert written == [model] * 3
    else:
        assert sum(written) == model
        assert max(written) < model / 2


@pytest.mark.parametrize("stage", range(4))
def test_workers_hold_the_same_weights(three: Results, stage: int) -> None:
    assert len(set(result(three, f"digests at stage {stage}"))) == 1


def test_one_compression_a_step(pair: Results) -> None:
    found = result(pair, "compressions")[0]
    # Stages 2 and 3 reduce in each of 3 micro-batches, unless coalesce_grad_reduction is used.
    assert found.pop("stage 2") == found.pop("stage 3") == 6
    assert set(found.values()) == {2}, found


@pytest.mark.parametrize("stage", range(4))
def test_bytes_by_deepspeeds_own_logger(pair: Results, stage: int) -> None:
    plain, ours = (result(pair, f"{kind} at stage {stage}")[0] for kind in ("plain bytes", "bytes"))
    model = 4 * sum(parameter.numel() for parameter in Net().parameters())
    # In a ring of two workers each of them sends as much as it gives to an all-reduce, and half as much to others.
    assert ours["gradients"] == ours["expected"] == ours["computed"]["factors"]
    if stage < 3:
        assert plain["gradients"] == pytest.approx(ours["computed"]["gradients"], rel=0.01)
        assert plain["parameters"] == pytest.approx(ours["computed"]["parameters"], rel=0.01)
    assert ours["parameters"] == plain["parameters"]
    assert ours["others"] == plain["others"]
    # Partitions are padded. What the logger notes of a reduce-scatter is what goes in or comes out of it.
    logged = [model, model / 2] if stage == 3 else [model]
    assert any(size <= plain["gradients"] <= 1.01 * size for size in logged)


@pytest.mark.parametrize(("stage", "where"), [(stage, where) for stage, where, _, _ in OVERFLOWS])
def test_overflow_leaves_error_and_basis(pair: Results, stage: int, where: str) -> None:
    for found in result(pair, overflow_name(stage, where)):
        assert found["weights"] == 0, "the step was not skipped"
        assert found["bases"] == 0
        # One rounding of |M|, which is |G| + |E|, relative to the largest element of E.
        assert found["errors"] <= 16 * 2**-23
        limit = FP32_LIMIT if stage else BF16_LIMIT
        assert largest_difference(found["losses"], found["expected"]) <= limit
        if stage:
            assert found["scale"] == 128


@pytest.mark.parametrize("stage", range(4))
def test_a_release_that_goes_around_is_noticed(pair: Results, stage: int) -> None:
    for message in result(pair, f"bypassed at stage {stage}"):
        assert "without it" in message
        assert "step 1" in message


@pytest.mark.parametrize("stage", [0, 3])
def test_start_iter_counts_deepspeeds_steps(pair: Results, stage: int) -> None:
    found = result(pair, f"start at stage {stage}")[0]
    # Losses of a step are those of the weights before it.
    assert found["late"][:5] == found["plain"][:5]
    assert found["late"][5] != found["plain"][5]
