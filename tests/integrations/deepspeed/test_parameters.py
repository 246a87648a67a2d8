"""ZeRO's parameters as differences: copies follow masters as a plain model says, through faults and checkpoints."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from tests.support import deepspeed_parameters as jobs
from tests.support.deepspeed_cases import ACCUMULATE, BF16, OFFLOAD, zero
from tests.support.deepspeed_training import Case, result, run_all
from tests.support.distributed import run

BF16_OPTIMIZER = Case("BF16_Optimizer", 1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}})
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
SMALL = {"allgather_bucket_size": 700}
SMALL_MESSAGES = zero(2, **SMALL, overlap_comm=True, reduce_bucket_size=2000)
UNUSED = zero(1, ignore_unused_parameters=True)
# (case, width, steps, whether the model has tied and frozen parameters)
FOLLOWED: list[tuple[Case, str, int, bool]] = [
    (Case("stage 1", 1), "int2", 20, False),
    (Case("stage 2, small messages", 2, SMALL_MESSAGES), "int4", 20, True),
    (Case("stage 2, bf16", 2, {**BF16, **ACCUMULATE, "gradient_clipping": 0.3}), "int2", 20, True),
    (Case("stage 1, bf16, round robin", 1, {**BF16, **zero(1, round_robin_gradients=True)}), "int8", 20, False),
    (BF16_OPTIMIZER, "int2", 20, False),
    (Case("stage 2, offload", 2, OFFLOAD, own_adamw=True), "int2", 20, False),
    (Case("stage 2, SGD", 2, sgd=True), "int2", 20, False),
    (Case("stage 1, unused layer", 1, UNUSED, model={"unused": True}), "int2", 10, False),
    (Case("stage 1, fp16", 1, FP16, fp16=True), "int2", 20, False),
]
MORE_WORKERS: list[tuple[Case, str, int, bool]] = [
    (Case("stage 1", 1), "int4", 10, True),
    (Case("stage 2, bf16", 2, {**BF16, **zero(2, **SMALL)}), "int2", 10, False),
    (BF16_OPTIMIZER, "int8", 10, False),
]
SAVED = [
    Case("stage 1", 1),
    Case("stage 2, bf16", 2, BF16),
    BF16_OPTIMIZER,
    Case("stage 2, offload", 2, OFFLOAD, own_adamw=True),
]
COUNTED = [Case("stage 2, small messages", 2, {**BF16, **SMALL_MESSAGES})]
UNCHANGED = [Case("stage 1", 1), Case("stage 2, bf16", 2, BF16), BF16_OPTIMIZER]


def name(case: Case) -> str:
    return case.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parameters")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Any:
    """All jobs of two workers."""
    work: list[Any] = [
        (f"follow {case.name}", jobs.follow, (case, width, steps, 0, tied)) for case, width, steps, tied in FOLLOWED
    ]
    work += [(f"null {case.name}", jobs.unchanged_without, (case,)) for case in UNCHANGED]
    for index, case in enumerate(SAVED):
        work += [(f"resume {case.name}", jobs.resume, (case, str(folder / f"resume-{index}")))]
        work += [(f"export {case.name}", jobs.export, (case, str(folder / f"export-{index}")))]
    work += [(f"broken {case.name}", jobs.refused_or_broken, (case,)) for case in UNCHANGED]
    for section, case in itertools.product((None, jobs.INT2), [*UNCHANGED, *COUNTED]):
        work += [(f"bytes {case.name} {section}", jobs.gathered_bytes, (case, section))]
    work += [("pipeline", jobs.pipeline, (Case("", 1, BF16, train="pipeline_losses", pipeline_stages=1),))]
    return run(run_all, 2, work)


def check_followed(found: Sequence[dict[str, Any]]) -> None:
    for worker in found:
        assert worker["as modelled"]
        assert worker["skipped"], "a step that overflowed changed something"
        assert worker["excess"] <= 1
        assert worker["moved"], "the copies are the masters: nothing was rounded"
        assert worker["digest"] == found[0]["digest"], "workers have different copies"


@pytest.mark.parametrize(("case", "tied"), [pytest.param(c, tied, id=c.name) for c, _, _, tied in FOLLOWED])
def test_copies_follow_as_a_plain_model_says(pair: Any, case: Case, tied: bool) -> None:
    found = result(pair, f"follow {case.name}")
    check_followed(found)
    assert found[0]["groups"] == (2 if tied else 1)


@pytest.mark.parametrize("workers", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_copies_follow_on_more_workers(workers: int) -> None:
    work = [(case.name, jobs.follow, (case, width, steps, 1, tied)) for case, width, steps, tied in MORE_WORKERS]
    results = run(run_all, workers, work)
    for case, *_ in MORE_WORKERS:
        check_followed(result(results, case.name))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
def test_200_steps_with_faults_and_restarts_on_other_numbers_of_workers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    loaded = ""
    for index, (workers, steps) in enumerate([(2, 70), (3, 70), (2, 60)]):
        saved = tmp_path / str(index)
        case = Case("faults", 2, {**options, **(jobs.UNIVERSAL if loaded else {})})
        work = [("follow", jobs.follow, (case, "int2", steps, index, False, loaded, str(saved)))]
        found = result(run(run_all, workers, work), "follow")
        check_followed(found)
        assert all(worker.get("loaded", True) for worker in found)
        universal = jobs.convert(saved / "saved", saved / "universal" / "saved")
        (state,) = (saved / "saved").glob("powersgd_*_state.pt")
        shutil.copy(state, universal)
        loaded = str(universal.parent)


@pytest.mark.parametrize("case", UNCHANGED, ids=name)
def test_null_is_deepspeeds_own_gather(pair: Any, case: Case) -> None:
    assert all(result(pair, f"null {case.name}"))


@pytest.mark.parametrize("case", SAVED, ids=name)
def test_a_resumed_training_has_the_same_bits(pair: Any, case: Case) -> None:
    for found in result(pair, f"resume {case.name}"):
        assert found == {"resumed": True, "same bits": True, "close": True, "from null": True}


@pytest.mark.parametrize("case", SAVED, ids=name)
def test_exports_have_the_masters(pair: Any, case: Case) -> None:
    for found in result(pair, f"export {case.name}"):
        assert all(found.values()), found


@pytest.mark.parametrize("case", UNCHANGED, ids=name)
def test_a_step_that_fails_leaves_the_copies(pair: Any, case: Case) -> None:
    for found in result(pair, f"broken {case.name}"):
        assert found["failed"] == "MemoryError: no memory is left"
        assert found["kept"]
        assert "a step inside exact_parameters()" in found["inside"]
        # Found by ``check_every``.
        assert "DisagreementError" in found["changed"]
        assert "parameters of group 0" in found["changed"]
        assert "gathered them without all_gather_dp_groups" in found["went around"]


def check_pipeline(found: Sequence[dict[str, Any]]) -> None:
    assert all(worker["learned"] for worker in found)
    for stage in {worker["stage"] for worker in found}:
        assert len({worker["digest"] for worker in found if worker["stage"] == stage}) == 1


def test_a_pipeline_of_one_stage(pair: Any) -> None:
    check_pipeline(result(pair, "pipeline"))


@pytest.mark.slow
def test_a_pipeline_of_two_stages() -> None:
    case = Case("pipeline", 1, {}, train="pipeline_losses", pipeline_stages=2)
    check_pipeline(result(run(run_all, 4, [("pipeline", jobs.pipeline, (case,))]), "pipeline"))


@pytest.mark.parametrize("case", [*UNCHANGED, *COUNTED], ids=name)
def test_bytes_by_deepspeeds_own_logger(pair: Any, case: Case) -> None:
    plain, coded = (result(pair, f"bytes {case.name} {section}")[0] for section in (None, jobs.INT2))
    assert coded["logged"] == coded["expected"]
    # 2 bits and a scale for 128 elements, and at most one block in each partition that is not full.
    if case in UNCHANGED:
        bits = 16 if "bf16" in case.options else 32
        assert plain["logged"] / coded["logged"] > 0.94 * bits / (2 + 16 / 128)
