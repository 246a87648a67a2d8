"""Checkpoints of DeepSpeed engines carry the compression's state, for any number of workers."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from tests.support import deepspeed_jobs as jobs
from tests.support.deepspeed_cases import OFFLOAD
from tests.support.deepspeed_parameters import UNIVERSAL, convert
from tests.support.deepspeed_training import result, run_all
from tests.support.distributed import run

STAGES = range(4)
RANK_2_LESS = {"rank": 2, "min_compression_rate": 12.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Any:
    """Jobs of two workers that need no other number of them, and what three are to load."""
    work: list[Any] = [
        (f"resume {stage}", jobs.resume, (stage, str(folder / f"resume-{stage}"), {})) for stage in STAGES
    ]
    work += [("resume offload", jobs.resume, (2, str(folder / "resume-offload"), OFFLOAD, True))]
    work += [(f"commit {stage}", jobs.commit_order, (stage, str(folder / f"commit-{stage}"))) for stage in (0, 3)]
    work += [(f"refused {stage}", jobs.one_file_refused, (stage, str(folder / f"refused-{stage}"))) for stage in (0, 2)]
    work += [("save", jobs.save, (0, str(folder / "of-2"), {}))]
    work += [("another rank", jobs.load, (0, str(folder / "of-2"), {}, RANK_2_LESS))]
    work += [("weights only", jobs.weights_only, (str(folder / "of-2"),))]
    return run(run_all, 2, work)


@pytest.fixture(scope="module")
def three(folder: Path, pair: Any) -> Any:
    work: list[Any] = [
        ("load", jobs.load, (0, str(folder / "of-2"), {})),
        ("save", jobs.save, (0, str(folder / "of-3"), {})),
    ]
    return run(run_all, 3, work)


@pytest.mark.parametrize("stage", [*STAGES, "offload"])
def test_resuming_gives_the_same_losses(pair: Any, stage: Any) -> None:
    for found in result(pair, f"resume {stage}"):
        pairs = list(zip(found["got"], found["expected"], strict=True))
        assert max(abs(a - b) / b for a, b in pairs) <= 1e-6
        assert found["iteration"] == 5
        assert found["client"] == 1
        # The check can fail: without the error it is another training.
        assert max(abs(a - b) / b for a, b in zip(found["forgetful"], found["expected"], strict=True)) > 1e-5


@pytest.mark.parametrize("stage", [0, 3])
def test_the_state_is_there_before_the_checkpoint_is_the_latest(pair: Any, stage: int) -> None:
    for found in result(pair, f"commit {stage}"):
        assert found == {"first": True, "latest": True, "refused": True, "unchanged": True}


@pytest.mark.parametrize("stage", [0, 2])
def test_a_file_that_one_worker_cannot_read_changes_nothing(pair: Any, stage: int) -> None:
    own = "ValueError: the file is damaged"
    for worker, found in enumerate(result(pair, f"refused {stage}")):
        assert found["said"] == (own if worker == 1 else f"ValueError: load failed on worker 1: {own}")
        assert found["unchanged"]
        assert found["iteration"] == 1


def check_errors(saved: list[Any], loaded: list[Any]) -> None:
    expected = saved[0]
    for errors, iteration, losses in loaded:
        assert errors.keys() == expected.keys()
        for name, error in errors.items():
            assert float((error - expected[name]).abs().max()) <= 1e-6 * float(expected[name].abs().max())
        assert iteration == 5
        assert all(math.isfinite(loss) for loss in losses)


def test_the_mean_error_survives_two_to_three_workers(pair: Any, three: Any) -> None:
    check_errors(result(pair, "save"), result(three, "load"))


def test_the_mean_error_survives_three_to_two_workers(three: Any, folder: Path) -> None:
    fewer = run(run_all, 2, [("load", jobs.load, (0, str(folder / "of-3"), {}))])
    check_errors(result(three, "save"), result(fewer, "load"))


# DeepSpeed itself loads ZeRO's checkpoints on another number of workers only after its conversion.
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_universal_checkpoints_ask_for_the_state(stage: int, before: int, after: int, tmp_path: Path) -> None:
    saved = run(run_all, before, [("save", jobs.save, (stage, str(tmp_path), {}))])
    universal = convert(tmp_path / "saved", tmp_path / "universal" / "saved")
    work = [("load", jobs.load, (stage, str(universal.parent), UNIVERSAL))]
    with pytest.raises(RuntimeError, match=r"universal checkpoint .* has no PowerSGD state.*cp "):
        result(run(run_all, after, work), "load")
    (state,) = (tmp_path / "saved").glob("powersgd_*_state.pt")
    shutil.copy(state, universal)
    check_errors(result(saved, "save"), result(run(run_all, after, work), "load"))


def test_at_another_rank_no_error_is_lost(pair: Any) -> None:
    expected = result(pair, "save")[0]
    for errors, _, _ in result(pair, "another rank"):
        assert errors.keys() == expected.keys()
        assert all(torch.equal(errors[name].flatten(), expected[name].flatten()) for name in expected)


def test_weights_alone_bring_no_error(pair: Any) -> None:
    for found in result(pair, "weights only"):
        assert found == {"loaded": 0.0, "absent": 0.0}
