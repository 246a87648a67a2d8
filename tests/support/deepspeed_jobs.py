"""What the tests of the DeepSpeed adapter measure inside a worker, beside losses."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig, attach, checkpoint
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.deepspeed_cases import zero
from tests.support.deepspeed_training import (
    RANK_4,
    STEPS,
    WORLD,
    Case,
    Net,
    StubScaler,
    batch,
    coalesced_losses,
    engine_for,
    losses,
    mean,
    pipeline_losses,
    token_loss,
    train,
    weights,
)
from tests.support.small import complaint

Errors = dict[str, Tensor]


def mean_errors(engine: Any) -> Errors:
    """{name: mean over workers of E}."""
    errors = engine.powersgd.error()
    for error in errors.values():
        dist.all_reduce(error)
        error.div_(dist.get_world_size())
    return dict(errors)


def bases(engine: Any) -> dict[str, Tensor]:
    return {name: matrix.bases["basis"].clone() for name, matrix in engine.powersgd._engine.memory.matrices.items()}


def rank_4(stage: int) -> list[float]:
    return train(Case("rank 4", stage), RANK_4)


def ddp_rank_4() -> list[float]:
    """The DDP hook with the same model, data and optimizer."""
    model = Net()
    replica = DistributedDataParallel(model)
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=0, module=model)
    replica.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(STEPS):
        tokens = batch(step)
        loss = token_loss(replica(tokens), WORLD[tokens])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return mean(found)


def written_elements(stage: int) -> dict[str, int]:
    """How many elements of averages a step writes on this worker, and how many the model has."""
    # In buckets that cut through it, and partitions through matrices.
    with engine_for(Case("slices", stage, zero(stage, reduce_bucket_size=2000)), RANK_4) as engine:
        state, written = engine.powersgd, []
        average = state._engine.average

        def recorded(layout: Any, gradients: Any, ranges: Any = None) -> None:
            parts = {s.name: s.numel for s in layout.segments}
            written.append(
                sum(part.numel() for _, part in ranges.values()) if ranges is not None else sum(parts.values())
            )
            average(layout, gradients, ranges=ranges)

        state._engine.average = recorded
        losses(engine, range(1))
        return {"written": sum(written), "model": sum(p.numel() for p in Net().parameters())}


def compressions() -> dict[str, int]:
    """Steps of the compression in 2 steps of training, of several micro-batches each."""
    found = {}
    for stage in range(4):
        with engine_for(Case("", stage, {"gradient_accumulation_steps": 3}), RANK_4) as engine:
            losses(engine, range(2))
            found[f"stage {stage}"] = engine.powersgd.iteration
        if stage:
            with engine_for(Case("", stage, {}), RANK_4) as engine:
                coalesced_losses(engine, range(2))
                found[f"stage {stage}, coalesced"] = engine.powersgd.iteration
    with engine_for(Case("", 0, {"gradient_accumulation_steps": 3}, pipeline_stages=1), RANK_4) as engine:
        pipeline_losses(engine, range(2))
        found["pipeline"] = engine.powersgd.iteration
    return found


def traffic(stage: int, section: Mapping[str, Any] | None) -> dict[str, Any]:
    """Bytes a step by DeepSpeed's own logger: of reductions of gradients and of all-gathers of parameters."""
    from deepspeed.comm.comm import comms_logger

    from powersgd_triton.integrations.deepspeed import expected_traffic

    options = {"comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False}}
    # A tensor of the model's size is a gradient; norms and flags are of a few bytes.
    with engine_for(Case("", stage, options), section) as engine:
        losses(engine, range(1))
        comms_logger.comms_dict.clear()
        losses(engine, range(1, 4))
        found = {
            name: sum(size * record[0] for size, record in sizes.items() if size > 64) / 3
            for name, sizes in comms_logger.comms_dict.items()
        }
        comms_logger.enabled = False
        expected, computed = None, None
        if section is not None:
            layout = next(iter(engine.powersgd._engine.peers._layouts.values()))
            expected = 4 * layout.sent_numel(engine.powersgd.config, 1)
            computed = dataclasses.asdict(expected_traffic(engine, engine.powersgd))
    reductions = ("all_reduce", "reduce_scatter_tensor", "reduce")
    gathers = ("all_gather_into_tensor", "all_gather")
    return {
        "gradients": sum(found.get(name, 0) for name in reductions),
        "parameters": sum(found.get(name, 0) for name in gathers),
        "others": {name: size for name, size in found.items() if name not in (*reductions, *gathers)},
        "expected": expected,
        "computed": computed,
    }


@contextlib.contextmanager
def spoiled(parameter: nn.Parameter, value: float) -> Any:
    """A gradient with one element that is not finite, on the last worker only."""

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[3] = value
        return gradient

    handle = parameter.register_hook(spoil) if dist.get_rank() == dist.get_world_size() - 1 else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def overflow(stage: int, where: str, options: Mapping[str, Any], scaler: bool = True) -> dict[str, Any]:
    """A step that overflows in one gradient of one worker, against a run that never had that step."""

    def prepared(engine: Any) -> None:
        if scaler and stage:
            engine.optimizer.loss_scaler = StubScaler()

    with engine_for(Case("", stage, options), RANK_4) as engine:
        prepared(engine)
        losses(engine, range(3))
        errors, basis = engine.powersgd.error(), bases(engine)
        before = weights(engine)
        with spoiled(dict(engine.module.named_parameters())[where], float("inf")):
            losses(engine, range(100, 101))
        found = {
            "errors": _largest(engine.powersgd.error(), errors),
            "bases": _largest(bases(engine), basis),
            "weights": _largest(weights(engine), before),
            "scale": getattr(getattr(engine.optimizer, "loss_scaler", None), "cur_scale", None),
        }
        found["losses"] = losses(engine, range(3, 6))
    with engine_for(Case("", stage, options), RANK_4) as engine:
        prepared(engine)
        losses(engine, range(3))
        found["expected"] = losses(engine, range(3, 6))
    return found


def _largest(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference in units of each tensor's largest element."""
    assert got.keys() == expected.keys()
    return max(float((got[n] - e).abs().max() / e.abs().max().clamp_min(1e-30)) for n, e in expected.items())


def bypassed_seam(stage: int) -> str:
    """What is said when DeepSpeed stops calling what was replaced."""
    from powersgd_triton.integrations.deepspeed.seams import seam_class

    with engine_for(Case("", stage), RANK_4) as engine:
        losses(engine, range(1))
        kind = seam_class(engine)
        # The method of the class is found again.
        delattr(kind.owner(engine), kind.method)
        try:
            losses(engine, range(1, 2))
        except RuntimeError as error:
            return str(error)
    return ""


def start_iter(stage: int) -> dict[str, Any]:
    case = Case("", stage)
    return {
        "plain": train(case, None, 6),
        "late": train(case, {**RANK_4, "start_iter": 4}, 6),
    }


def digests(stage: int) -> str:
    """Of all weights after some steps."""
    from tests.support.training import digest

    with engine_for(Case("", stage), {**RANK_4, "algorithm": "alternating"}) as engine:
        losses(engine, range(4))
        return digest(weights(engine).values())


def messages() -> dict[str, Any]:
    """What is said and raised on the three ways to switch it on."""
    import deepspeed as real

    from powersgd_triton.integrations import deepspeed
    from tests.support.deepspeed_training import configuration

    found: dict[str, Any] = {"forwarded": deepspeed.zero is real.zero and "zero" in dir(deepspeed)}
    made = []
    for name, section, initialize in (
        ("on", {"rank": 2, "start_iter": 3}, deepspeed.initialize),
        ("off", None, deepspeed.initialize),
        ("disabled", {"enabled": False}, deepspeed.initialize),
        ("by hand", RANK_4, real.initialize),
    ):
        model, spoken = Net(), io.StringIO()
        config = configuration(2, section, {})
        with contextlib.redirect_stdout(spoken):
            engine = initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
            if name == "by hand":
                found["before"] = getattr(engine, "powersgd", None)
                state = deepspeed.enable(engine)
                found["again"] = deepspeed.enable(engine) is state is engine.powersgd
        found[name] = [line for line in spoken.getvalue().splitlines() if line.startswith("powersgd:")]
        made.append(engine)
    found["no section"] = complaint(deepspeed.enable, made[1])
    spoken = io.StringIO()
    with contextlib.redirect_stdout(spoken):
        attached = attach(made[1], rank=3)
    found["attached"] = spoken.getvalue()
    found["attached again"] = attach(made[1]) is deepspeed.enable(made[1]) is attached is made[1].powersgd
    found["other rank"] = complaint(deepspeed.enable, made[1], PowerSGDConfig(rank=2))
    found["section attached"] = attach(made[0]) is made[0].powersgd
    found["other than the section"] = complaint(attach, made[0], rank=5)
    found["disabled attached"] = complaint(attach, made[2])
    for engine in made:
        engine.destroy()
    return found


def refused(stage: int, section: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    try:
        with engine_for(Case("", stage, options), section):
            return ""
    except ValueError as error:
        return str(error)


# Checkpoints ----------------------------------------------------------------------------------------------------


def resume(stage: int, folder: str, options: Mapping[str, Any], own_adamw: bool = False) -> dict[str, Any]:
    """5 steps, saved, 5 more; and these again by another engine."""
    case = Case("", stage, options, own_adamw=own_adamw)
    with engine_for(case, RANK_4) as engine:
        losses(engine, range(5))
        engine.save_checkpoint(folder, client_state={"mine": 1})
        expected = losses(engine, range(5, 10))
    with engine_for(case, RANK_4) as engine:
        _, client = engine.load_checkpoint(folder)
        iteration = engine.powersgd.iteration
        got = losses(engine, range(5, 10))
    with engine_for(case, RANK_4) as engine:
        engine.load_checkpoint(folder)
        engine.powersgd.forget()
        forgetful = losses(engine, range(5, 10))
    return {"got": got, "expected": expected, "forgetful": forgetful, "iteration": iteration, "client": client["mine"]}


def save(stage: int, folder: str, options: Mapping[str, Any]) -> Errors:
    """Train, save, and give the mean error."""
    with engine_for(Case("", stage, options), RANK_4) as engine:
        losses(engine, range(5))
        engine.save_checkpoint(folder, "saved")
        return mean_errors(engine)


def load(stage: int, folder: str, options: Mapping[str, Any], section: Mapping[str, Any] = RANK_4, **how: Any) -> Any:
    """Load on as many workers as there are, and give the mean error, the step, and that training goes on."""
    with engine_for(Case("", stage, options), section) as engine:
        path, _ = engine.load_checkpoint(folder, "saved", **how)
        assert path is not None
        return mean_errors(engine), engine.powersgd.iteration, losses(engine, range(5, 8))


def commit_order(stage: int, folder: str) -> dict[str, bool]:
    """Whether the state is there when DeepSpeed names the checkpoint the latest, and a broken one is refused whole."""
    with engine_for(Case("", stage), RANK_4) as engine:
        losses(engine, range(2))
        seen = []
        commit = engine.checkpoint_engine.commit

        def watched(*args: Any) -> Any:
            # Worker 0 names it the latest, and does not wait for the others before.
            latest = Path(folder, "latest").exists() and dist.get_rank() == 0
            seen.append([len(list(Path(folder, "a").glob("powersgd_*"))), latest])
            return commit(*args)

        engine.checkpoint_engine.commit = watched
        engine.save_checkpoint(folder, "a")
        found = {"first": seen == [[1, False]]}
        latest = Path(folder, "latest").read_text() if dist.get_rank() == 0 else "a"
        found["latest"] = latest == "a"
        before = weights(engine)
        dist.barrier()
        if dist.get_rank() == 0:
            (file,) = Path(folder, "a").glob("powersgd_*")
            saved = checkpoint.load(file)
            del saved["tensors"]["head.weight"], saved["matrices"]["head.weight"], saved["fingerprint"]
            checkpoint.save(saved, file)
        dist.barrier()
    other = Net()
    torch.manual_seed(9)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    with engine_for(Case("", stage), RANK_4, other) as engine:
        before = weights(engine)
        try:
            engine.load_checkpoint(folder, "a")
        except ValueError as error:
            found["refused"] = "head.weight" in str(error)
        found["unchanged"] = _largest(weights(engine), before) == 0
    return found


def one_file_refused(stage: int, folder: str) -> dict[str, Any]:
    """In mid-run, one worker cannot read the state's file. Then all of them can."""

    def read(path: Any) -> Any:
        if dist.get_rank() == 1 and damaged:
            raise ValueError("the file is damaged")
        return checkpoint.load(path)

    case = Case("", stage, {})
    with engine_for(case, {**RANK_4, "algorithm": "alternating"}) as engine:
        losses(engine, range(1))
        engine.save_checkpoint(folder, "one")
        losses(engine, range(1, 4))
        before, errors = weights(engine), mean_errors(engine)
        with mock.patch("powersgd_triton.integrations.deepspeed.state.load_file", read):
            damaged = True
            said = complaint(engine.load_checkpoint, folder, "one")
            unchanged = _largest(weights(engine), before) == 0 and engine.powersgd.iteration == 4
            unchanged &= all(torch.equal(error, errors[name]) for name, error in mean_errors(engine).items())
            losses(engine, range(4, 6))
            damaged = False
            engine.load_checkpoint(folder, "one")
        return {"said": said, "unchanged": unchanged, "iteration": engine.powersgd.iteration}


def weights_only(folder: str) -> dict[str, float]:
    """Sizes of the errors of a trained engine after it loads weights alone, or a checkpoint without the state."""

    def size(engine: Any) -> float:
        return sum(float(error.abs().sum()) for error in engine.powersgd.error().values())

    with engine_for(Case("", 0), RANK_4) as engine:
        losses(engine, range(2))
        engine.load_checkpoint(folder, "saved", load_module_only=True)
        found = {"loaded": size(engine)}
    with engine_for(Case("", 0)) as engine:
        losses(engine, range(2))
        engine.save_checkpoint(folder + "-plain")
    with engine_for(Case("", 0), RANK_4) as engine:
        losses(engine, range(2))
        engine.load_checkpoint(folder + "-plain")
        return {**found, "absent": size(engine)}
