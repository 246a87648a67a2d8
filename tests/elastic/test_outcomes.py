"""Steps of which a worker hears late, or otherwise than others, whether they were applied. Without a real manager."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.elastic.group import ManagedCommunicator
from powersgd_triton.integrations.local_steps import LocalSteps
from powersgd_triton.ops.torch_backend import TorchBackend
from tests.support.checks import gradients, same_bits, step
from tests.support.distributed import on_workers
from tests.support.elastic.alone import CONFIG, SHAPES, Manager
from tests.support.training import at_call, relative
from tests.support.wrappers import means

BF16 = {"error_dtype": "bf16"}


@pytest.mark.parametrize("config", [{"rank": 2}, {"rank": 2, "algorithm": "alternating"}])
@pytest.mark.parametrize("applied", [True, False])
def test_a_step_is_settled_when_its_outcome_is_known(config: dict[str, Any], applied: bool):
    """The same worker once votes for a step, and once hears that the others have applied it or not."""
    given = gradients(0, SHAPES)

    def after(heals: bool) -> dict[str, torch.Tensor]:
        manager = Manager(_quorum_id=1)
        compressor = Compressor(PowerSGDConfig(min_compression_rate=1, **config), SHAPES, manager=manager)
        for _ in range(2):
            compressor.compress(given)
            manager.should_commit()
        compressor.compress(given)
        load, save = manager.states["powersgd"]
        if heals:
            # Of a worker that has applied this attempt, or another one at the same step.
            state, quorum = save.__self__._shared(), 1 if applied else 7
            assert save.__self__._attempt == (1, manager._step)
            state["history"] = [[manager._step, quorum]]
            manager._step += 1
            load(state)
        else:
            manager.should_commit(applied=applied)
        manager._quorum_id = 2
        assert compressor._managed.begin()
        return compressor.error()

    healed, voted = after(True), after(False)
    assert voted
    torch.testing.assert_close(healed, voted, rtol=0, atol=0)


@pytest.mark.parametrize("votes", [[True] * 4, [False] * 4, [True, False]])
@pytest.mark.parametrize("error_dtype", ["fp32", "bf16"])
def test_models_are_trained_by_turns_and_saved(votes: Sequence[bool], error_dtype: str):
    """A vote about a step of another model does not decide about the last step of this one, and saving changes none."""
    manager = Manager(_quorum_id=1)
    compressor = Compressor(PowerSGDConfig(rank=2, error_dtype=error_dtype), SHAPES, manager=manager)
    owed = torch.zeros(48, 32)
    for number, applied in enumerate(votes):
        given = gradients(number, SHAPES)
        owed += given["weight"] - step(compressor, given)["weight"] * applied
        manager.should_commit(applied=applied)
        # Of the other model.
        manager.should_commit()
    limit = 1e-5 if error_dtype == "fp32" else 0.1
    assert (compressor.state_dict()["matrices"]["weight"]["error"] - owed).abs().max() < limit
    assert compressor._managed.begin()
    assert (compressor.error()["weight"] - owed).abs().max() < limit


def test_a_saved_exchange_that_was_not_applied_is_sent_again():
    net = nn.Linear(16, 24, bias=False)
    manager = Manager(_quorum_id=1, start_quorum=lambda: None, votes=[True, False, True])
    sync = LocalSteps(net, PowerSGDConfig(rank=2, min_compression_rate=1), every=1, manager=manager)
    start, changes = net.weight.detach().clone(), torch.zeros(24, 16)
    for number in range(3):
        change = torch.randn(24, 16)
        with torch.no_grad():
            net.weight += change
        changes += change
        sync.step()
        sync.state_dict()
        manager._quorum_id += number == 1
    left = net.weight.detach() - sync.error()["weight"]
    torch.testing.assert_close(left, start + changes, rtol=0, atol=1e-5)


def quorum(worker: int, world_size: int) -> Manager:
    """The manager of one of the workers of the default group."""
    place: dict[str, Any] = {"participating_rank": lambda: worker, "num_participants": lambda: world_size}
    gloo: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    methods = {name: getattr(gloo, name) for name in ("allreduce", "allgather", "alltoall_base", "broadcast")}
    return Manager(_quorum_id=1, _pg=SimpleNamespace(getBackendName=lambda: "gloo", **methods), **place)


@pytest.mark.parametrize("fields", [{}, BF16, {**BF16, "algorithm": "alternating"}, {"quantize": "int4"}], ids=str)
@on_workers(2)
def test_saving_changes_nothing_of_a_step_that_turns_out_void(
    worker: int, world_size: int, fields: dict[str, Any]
) -> None:
    """A loss scale lets ``decompress`` find that, and under a manager the vote decides. What is saved counts it."""
    config = PowerSGDConfig(**({"rank": 2} | fields if "quantize" not in fields else fields))

    def after(managed: bool, *, applied: bool, saves: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        manager, saved = quorum(worker, world_size) if managed else None, dict[str, Any]()
        compressor = Compressor(config, SHAPES, manager=manager)
        compressor.attach(lambda: 2.0)
        for last in (False, True):
            given = {n: (1e5 if last else 1.0) * G for n, G in gradients(2 * worker + last, SHAPES).items()}
            compressed = compressor.compress(given)
            if last and saves:
                saved = compressor.state_dict()["matrices"]
            narrow = last and not (managed or applied)
            out = {n: G.half() if narrow else G for n, G in given.items()}
            compressor.decompress(compressed, out=out)
            if manager is not None:
                manager.should_commit(applied=applied or not last)
                manager._quorum_id += last
                assert not last or compressor._managed.begin()
        return compressor.error(), saved

    for managed in (False, True):
        left, saved = after(managed, applied=False, saves=True)
        assert same_bits(left, after(managed, applied=False, saves=False)[0])
        counted = means(after(managed, applied=True, saves=False)[0])
        assert not torch.equal(counted["weight"], means(left)["weight"])
        for name, parts in saved.items():
            assert relative(parts["error"].view(SHAPES[name]), counted[name]) < (0.01 if fields else 1e-5), name


@pytest.mark.parametrize("config", [CONFIG, PowerSGDConfig(quantize="int4")], ids=["low rank", "int4"])
@on_workers(2)
def test_one_worker_has_errors_and_the_other_one_joins(worker: int, world_size: int, config: PowerSGDConfig):
    compressor = Compressor(config, SHAPES, manager=quorum(worker, world_size))
    if worker == 0:
        compressor._residuals.whole.hold({"weight": torch.ones(48, 32)})
    total = torch.zeros(48, 32)
    for number in range(3):
        given = gradients(10 * number + worker, SHAPES)
        averages = step(compressor, given)
        compressor._managed._manager.should_commit()
        compressor._managed._manager._quorum_id += number == 1
        total += given["weight"] - averages["weight"]
    assert compressor._managed.begin()
    left = total - compressor.error()["weight"]
    dist.all_reduce(left)
    torch.testing.assert_close(left, -torch.ones(48, 32), rtol=0, atol=1e-5)


def lose(communicator: Any) -> None:
    communicator.lost = True
    raise RuntimeError("a worker was lost")


def test_a_worker_that_heals_after_a_failed_quorum_does_not_send_again(monkeypatch: pytest.MonkeyPatch):
    """It has not heard of the end of a step, which another worker applies. That one is not in the next quorum."""
    manager = Manager(_quorum_id=1)
    compressor = Compressor(CONFIG, SHAPES, manager=manager)
    given = gradients(0, SHAPES)
    averages = step(compressor, given)
    load, save = manager.states["powersgd"]
    state = save.__self__._shared()
    manager.should_commit(applied=False)
    manager._quorum_id = 2
    with monkeypatch.context() as patched:
        patched.setattr(ManagedCommunicator, "gather", lambda communicator, _: lose(communicator))
        compressor.compress(given)
    manager.should_commit(applied=False)
    manager._quorum_id, manager._step, manager.error = 3, 1, None
    load({**state, "history": [[0, 1]]})
    torch.testing.assert_close(averages["weight"] + compressor.error()["weight"], given["weight"])


def heal(manager: Manager) -> None:
    """Let its worker take the state of one that has applied step 0 in quorum 1."""
    load, save = manager.states["powersgd"]
    manager._quorum_id, manager._step, manager.error = 2, 1, None
    load({**save.__self__._shared(), "history": [[0, 1]]})


@pytest.mark.parametrize("config", [{}, {"iterations": 2}, {"iterations": 2, "algorithm": "alternating"}], ids=str)
def test_others_apply_a_step_whose_last_collective_failed_here(config: dict[str, Any]):
    """The error loses what was sent in each repetition, as if this worker had heard of the step's end."""

    def after(failing: int) -> dict[str, torch.Tensor]:
        manager = Manager(_quorum_id=1)
        compressor = Compressor(PowerSGDConfig(rank=2, **config), SHAPES, manager=manager)
        with at_call(ManagedCommunicator, "all_reduce", failing, lambda: lose(compressor._managed._communicator)):
            compressor.compress(gradients(0, SHAPES))
        assert bool(manager.errored()) == (failing >= 0)
        manager.should_commit(applied=False)
        heal(manager)
        return compressor.error()

    last = config.get("iterations", 1) * (1 if "algorithm" in config else 2) - 1
    torch.testing.assert_close(after(last), after(-1))


def test_errors_that_are_forgotten_stay_zero_when_others_apply_the_step():
    manager = Manager(_quorum_id=1, report_error=lambda _: None)
    compressor = Compressor(CONFIG, SHAPES, manager=manager)
    with at_call(TorchBackend, "commit", 0, lambda: lose(compressor._managed._communicator)):
        compressor.compress(gradients(0, SHAPES))
    manager.should_commit(applied=False)
    compressor.forget()
    heal(manager)
    assert not any(error.any() for error in compressor.error().values())


def test_a_worker_that_is_lost_in_a_check_does_not_settle_the_step(monkeypatch: pytest.MonkeyPatch):
    manager = Manager(_quorum_id=1, report_error=lambda _: None)
    compressor = Compressor(PowerSGDConfig(rank=2, check_every=1), SHAPES, manager=manager)
    # As of a tensor that was compressed before ranks were planned again.
    unsent = torch.randn(1, 32)
    compressor._residuals.whole.hold({"bias": unsent})
    monkeypatch.setattr(compressor._engine.buckets, "end_step", lambda: lose(compressor._managed._communicator))
    step(compressor, gradients(0, SHAPES))
    manager.should_commit(applied=False)
    manager._quorum_id = 2
    assert compressor._managed.begin()
    assert torch.equal(compressor.error()["bias"], unsent[0])


def test_a_worker_that_healed_and_did_not_connect_keeps_its_next_steps(monkeypatch: pytest.MonkeyPatch):
    net, manager = nn.Linear(4, 4), Manager(_quorum_id=1, start_quorum=lambda: None, report_error=lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(ManagedCommunicator, "gather", lambda communicator, _: lose(communicator))
        LocalSteps(net, PowerSGDConfig(quantize="ternary"), every=2, manager=manager)
    load, save = manager.states["powersgd"]
    state = save()
    load(state)
    with torch.no_grad():
        net.weight += 1
    trained = net.weight.detach().clone()
    load(state)
    assert torch.equal(net.weight, trained)


def test_local_steps_of_workers_that_differ(monkeypatch: pytest.MonkeyPatch):
    """One has missed a quorum of which nothing was applied; another one trains other parameters; states are local."""
    found = list[tuple[LocalSteps, Manager, nn.Sequential]]()
    for trains in (True, False):
        net, manager = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Manager(_quorum_id=1, start_quorum=lambda: None)
        net[1].requires_grad_(trains)
        found.append((LocalSteps(net, PowerSGDConfig(quantize="ternary"), every=1, manager=manager), manager, net))
    (sync, manager, net), (_, other, _) = found
    manager._quorum_id = 2
    others = torch.tensor([8])
    monkeypatch.setattr(
        ManagedCommunicator, "gather", lambda _, own: torch.stack([own, others if len(own) == 1 else own])
    )
    sync.step()
    assert sync.steps == 8
    weight = net.get_parameter("0.weight")
    before = weight.detach().clone()
    with pytest.raises(ValueError, match=r"heals trains '1.bias', '1.weight'"):
        manager.states["powersgd"][0](other.states["powersgd"][1]())
    assert torch.equal(weight, before)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no optimizer="):
        LocalSteps(net, PowerSGDConfig(quantize="ternary"), manager=Manager(), optimizer=optimizer)
