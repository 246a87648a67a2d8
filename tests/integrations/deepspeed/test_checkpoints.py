"""Checkpoints of DeepSpeed engines carry the compression's state, for any number of workers."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("deepspeed")

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import checkpoint
from tests.support.checks import same_bits
from tests.support.deepspeed_training import RANK_4, Case, convert, each, engine_for, losses, ready, weights
from tests.support.distributed import folder, make_test, run
from tests.support.sharded_training import Net
from tests.support.training import complaint
from tests.support.wrappers import means


def mean_errors(engine: Any) -> dict[str, Tensor]:
    return {name: error.float() for name, error in means(engine.powersgd.error()).items()}


def is_there_before_the_checkpoint_is_the_latest(stage: int) -> None:
    """And one that is broken, or that one worker cannot read, is refused by all before it changes the model."""

    def read(path: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("the file is damaged")
        return checkpoint.load(path)

    with folder(dist.get_rank()) as path:
        saved = Path(path, "a")
        with engine_for(Case("", stage), RANK_4) as engine:
            losses(engine, range(2))
            seen = []
            commit = engine.checkpoint_engine.commit

            def watched(*arguments: Any) -> Any:
                # Worker 0 names it the latest, and does not wait for the others before.
                latest = Path(path, "latest").exists() and dist.get_rank() == 0
                seen.append([len(list(saved.glob("powersgd_*"))), latest])
                return commit(*arguments)

            engine.checkpoint_engine.commit = watched
            engine.save_checkpoint(path, "a", client_state={"mine": 1})
            assert seen == [[1, False]]
            dist.barrier()
            assert Path(path, "latest").read_text() == "a"
            assert engine.load_checkpoint(path)[1]["mine"] == 1
            if dist.get_rank() == 0:
                (file,) = saved.glob("powersgd_*")
                content = checkpoint.load(file)
                del content["tensors"]["head.weight"], content["matrices"]["head.weight"], content["fingerprint"]
                checkpoint.save(content, file)
            dist.barrier()
        with engine_for(Case("", stage), RANK_4, Net(seed=9)) as engine:
            before = weights(engine)
            assert "head.weight" in complaint(engine.load_checkpoint, path, "a")
            with mock.patch("powersgd_triton.integrations.deepspeed.state.load_file", read):
                said, own = complaint(engine.load_checkpoint, path, "a"), "ValueError: the file is damaged"
            assert said == (own if dist.get_rank() == 1 else f"ValueError: load failed on worker 1: {own}")
            assert same_bits(weights(engine), before)


def brings_no_error_with_weights_alone() -> None:
    """Nor without a state. At another rank all of it is brought."""
    at_rank_2 = {"rank": 2, "min_compression_rate": 12.0, "parameters": None}
    with folder(dist.get_rank()) as path:
        save(Case("", 0), f"{path}/with")
        save(Case("", 0), f"{path}/without", None)
        for name, section, how in (("with", RANK_4, True), ("without", RANK_4, False), ("with", at_rank_2, False)):
            with engine_for(Case("", 0), section) as engine:
                losses(engine, range(2))
                engine.load_checkpoint(f"{path}/{name}", "saved", load_module_only=how)
                found = mean_errors(engine)
                # They must agree whether the exact first steps are over.
                assert engine.powersgd.iteration == engine.global_steps
            if section is at_rank_2:
                assert same_bits(found, torch.load(f"{path}/with/errors"))
            else:
                assert found
                assert not any(error.any() for error in found.values())


test_a_checkpoint = make_test(
    each(is_there_before_the_checkpoint_is_the_latest, 0, 3) | each(brings_no_error_with_weights_alone), 2
)


def save(case: Case, path: str, section: Mapping[str, Any] | None = RANK_4) -> None:
    """With the mean error beside it."""
    with engine_for(case, section) as engine:
        losses(engine, range(5))
        engine.save_checkpoint(path, "saved")
        errors = mean_errors(engine) if section is not None else {}
        if dist.get_rank() == 0:
            torch.save(errors, f"{path}/errors")
        dist.barrier()


def load(case: Case, path: str, errors: str) -> None:
    with engine_for(case, RANK_4) as engine:
        engine.load_checkpoint(path, "saved")
        found, expected = mean_errors(engine), torch.load(errors)
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name].flatten(), expected[name].flatten(), 0, 1e-6) for name in expected)
        assert engine.powersgd.iteration == 5
        assert torch.tensor(losses(engine, range(5, 8))).isfinite().all()


# DeepSpeed itself loads ZeRO's checkpoints on another number of workers only after its conversion.
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "before", "after"), [(1, 2, 3), (2, 3, 2), (3, 2, 3), (3, 3, 2)])
def test_universal_checkpoints_ask_for_the_state(stage: int, before: int, after: int, tmp_path: Path) -> None:
    run(ready, before, save, (Case("", stage), str(tmp_path)))
    universal = convert(tmp_path / "saved", tmp_path / "universal" / "saved")
    case = Case("", stage, {"checkpoint": {"load_universal": True}})
    arguments = case, str(universal.parent), f"{tmp_path}/errors"
    with pytest.raises(RuntimeError, match=r"universal checkpoint .* has no PowerSGD state.*cp "):
        run(ready, after, load, arguments)
    (state,) = (tmp_path / "saved").glob("powersgd_*_state.pt")
    shutil.copy(state, universal)
    run(ready, after, load, arguments)
