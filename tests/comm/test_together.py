"""What only one worker meets, all are told before they wait for it: refused states, exceptions, failed allocations."""

from __future__ import annotations

import contextlib
import datetime
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig, checkpoint
from powersgd_triton.core import memory
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from powersgd_triton.integrations.optimizer import Config, PowerSGD
from tests.support.checks import everything
from tests.support.distributed import Worker, outcome, run_cases
from tests.support.small import MANY, RANK_2, WIDTH, complaint, stack
from tests.support.training import batch, squared_error

SHAPES = {"a": (16, 12), "b": (5,), "c": (8, 8), "d": (12, 16)}
SYMPTOMS: dict[str, dict[str, Any]] = {
    # These waited for each other, had other gradients, and sent messages of other sizes.
    "planned": {"compression": 4, "replan_every": 2},
    "alternating": {"rank": 2, "algorithm": "alternating"},
    "start": {"rank": 2, "start_iter": 3},
}
VICTIM = 1


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of worker 0 that all know."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    yield Path(str(names[0]))
    dist.barrier()


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def steps(compressor: Compressor, numbers: range) -> list[dict[str, Tensor]]:
    return [dict(compressor.decompress(compressor.compress(gradients(n)))) for n in numbers]  # type: ignore[arg-type]


def equal_everywhere(tensors: dict[str, Tensor]) -> bool:
    mine = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(other, mine) for other in everyone)


def same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


# States that one worker refuses -------------------------------------------------------------------------------------


def refused_in_mid_run(worker: int, world_size: int) -> dict[str, tuple[str, bool, bool]]:
    """What each worker is told; whether all go on as without the attempt, and with the same averages."""
    found = {}
    for name, fields in SYMPTOMS.items():
        config = PowerSGDConfig(**fields, min_compression_rate=0)
        run, untouched = Compressor(config, SHAPES), Compressor(config, SHAPES)
        steps(run, range(1))
        saved = run.state_dict()
        steps(run, range(1, 4))
        steps(untouched, range(4))
        if worker == VICTIM:
            saved["iteration"] = "one"
        said = complaint(run.load_state_dict, saved)
        after = steps(run, range(4, 8))
        equal = [equal_everywhere(averages) for averages in after]
        found[name] = said, all(equal), same(after, steps(untouched, range(4, 8)))
    return found


def refused_file(worker: int, world_size: int) -> list[str]:
    """DDP: a file that is cut off on one worker. All go on."""
    model = stack()
    state = PowerSGDState(None, module=model, **RANK_2, compression=None, algorithm="alternating")
    replica = DistributedDataParallel(model, bucket_cap_mb=MANY)
    replica.register_comm_hook(state, powerSGD_hook)

    def train(numbers: range) -> None:
        for number in numbers:
            model.zero_grad()
            inputs, targets = batch(worker, number, width=WIDTH)
            squared_error(replica(inputs), targets).backward()

    train(range(1))
    saved = state.state_dict()
    train(range(1, 4))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        checkpoint.save(saved, path)
        if worker == VICTIM:
            path.write_bytes(path.read_bytes()[:-100])
        said = [complaint(state.load_state_dict, path)]
        train(range(4, 6))
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        said += ["equal" if equal_everywhere(gradients) else "different", str(state.iter)]  # type: ignore[arg-type]
        checkpoint.save(saved, path)
        said.append(complaint(state.load_state_dict, str(path)))
    return [*said, str(state.iter)]


def plain_loop(worker: int, world_size: int) -> list[str]:
    parameters = [torch.zeros(shape) for shape in SHAPES.values()]
    powersgd = PowerSGD(parameters, Config(rank=2, min_compression_rate=1, start_compressing_after_num_steps=0))
    powersgd.aggregate([torch.randn(shape) for shape in SHAPES.values()])
    saved = powersgd.state_dict()
    powersgd.aggregate([torch.randn(shape) for shape in SHAPES.values()])
    said = complaint(powersgd.load_state_dict, {**saved, "iteration": "one"} if worker == VICTIM else saved)
    averages = powersgd.aggregate([torch.randn(shape) for shape in SHAPES.values()])
    return [said, str(equal_everywhere(dict(zip(SHAPES, averages, strict=True)))), str(powersgd.step_counter)]


def different_states(worker: int, world_size: int) -> dict[str, str]:
    run = Compressor(everything(compression=None), SHAPES)
    steps(run, range(2))
    one = run.state_dict()
    steps(run, range(2, 3))
    other = run.state_dict()
    told = {"another step": complaint(run.load_state_dict, other if worker == VICTIM else one)}
    forged = run.state_dict()
    forged["matrices"]["a"]["basis"][0, 0] += 1
    told["another basis"] = complaint(run.load_state_dict, forged if worker == VICTIM else other)
    told["not strict"] = complaint(run.load_state_dict, other, strict=worker != VICTIM)
    steps(run, range(3, 5))
    return {**told, "iteration": str(run.iteration)}


def in_an_open_step(worker: int, world_size: int) -> list[bool]:
    """The open step is dropped on all workers, and they go on as from the state."""
    model = stack()
    state = PowerSGDState(None, module=model, **RANK_2)
    replica = DistributedDataParallel(model, bucket_cap_mb=MANY)
    replica.register_comm_hook(state, powerSGD_hook)
    inputs, targets = batch(worker, 0, width=WIDTH)
    squared_error(replica(inputs), targets).backward()
    saved, owed = state.state_dict(), state.error()
    mean = {name: parts["error"] for name, parts in saved["matrices"].items()}
    first = next(iter(model.parameters()))
    engine = state._engine
    layout = engine.begin("first", lambda: {"0.weight": tuple(first.shape)}, torch.device("cpu"), last=False)
    engine.average(layout, {"0.weight": torch.ones_like(first)})
    state.load_state_dict(saved)
    loaded = all(torch.equal(error, mean[name]) for name, error in state.error().items())
    squared_error(replica(inputs), targets).backward()
    averages = {name: parameter.grad for name, parameter in model.named_parameters()}
    return [bool(owed), loaded, equal_everywhere(averages), state.iter == 2]  # type: ignore[arg-type]


# Exceptions ---------------------------------------------------------------------------------------------------------


def rank_function(worker: int, world_size: int) -> dict[str, list[str]]:
    """A function of the user's that raises, or returns nonsense, on one worker. Then it works."""
    ranks = {"negative": -1, "another": 3}
    found = {}
    for what in ("raises", *ranks):
        now = [True]

        def rank(name: str, shape: Any, what: str = what, now: list[bool] = now) -> int:
            return ranks[what] if now[0] and worker == VICTIM and name == "c" else 2

        compressor = Compressor(PowerSGDConfig(rank=rank, min_compression_rate=0), SHAPES)
        found[what] = [complaint(steps, compressor, range(1))]
        now[0] = False
        found[what].append(str(equal_everywhere(steps(compressor, range(2))[-1])))
    return found


def rank_function_without_names(worker: int, world_size: int) -> str:
    """DDP without ``module=`` meets a parameter only in its bucket, which need not be the first one."""

    def rank(name: str, shape: Any) -> int:
        if worker == VICTIM and int(name) > 6:
            raise KeyError("missing")
        return 2

    options = {**RANK_2, "matrix_approximation_rank": rank}
    model = stack()
    replica = DistributedDataParallel(model, bucket_cap_mb=MANY, find_unused_parameters=True)
    replica.register_comm_hook(PowerSGDState(None, **options), powerSGD_hook)
    inputs, targets = batch(worker, 0, width=WIDTH)
    return complaint(lambda: squared_error(replica(inputs), targets).backward())


def failed_allocation(worker: int, world_size: int) -> list[Any]:
    """No gradient, no error and no loaded part is lost."""
    run = Compressor(everything(), SHAPES)
    steps(run, range(2))
    saved = run.state_dict()
    resumed = Compressor(everything(), SHAPES)
    resumed.load_state_dict(saved)
    fill, calls = memory._fill, []

    def failing(*args: Any) -> bool:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory is left")
        return fill(*args)

    with mock.patch.object(memory, "_fill", failing if worker == VICTIM else fill):
        said = complaint(steps, resumed, range(2, 3))
    untouched = Compressor(everything(), SHAPES)
    untouched.load_state_dict(saved)
    return [said, resumed.iteration, same(steps(resumed, range(2, 5)), steps(untouched, range(2, 5)))]


def pickles(worker: int, world_size: int) -> list[str]:
    """Unpickling is no collective, so that the next step compares what was unpickled."""
    model = stack()

    def trained(number: int) -> tuple[PowerSGDState, Callable[[], None]]:
        state = PowerSGDState(None, module=model, **{**RANK_2, "random_seed": number})
        return state, train(state)

    def train(state: PowerSGDState) -> Callable[[], None]:
        replica = DistributedDataParallel(model, bucket_cap_mb=100.0)
        replica.register_comm_hook(state, powerSGD_hook)
        inputs, targets = batch(worker, 0, width=WIDTH)
        return lambda: squared_error(replica(inputs), targets).backward()

    state, step = trained(0)
    step()
    content = pickle.dumps(state)
    equal = complaint(train(pickle.loads(content)))
    # The same step, configuration and tensors, but other bases.
    forged = pickle.loads(content)
    if worker == VICTIM:
        for parts in forged._engine.memory.loaded.matrices.values():
            parts["basis"].neg_()
    return [equal, complaint(train(forged))]


# Workers that are alone ---------------------------------------------------------------------------------------------


def alone(worker: int, world_size: int) -> dict[str, str]:
    """One worker loads while the others step, save, or begin their first step, in a group with a short timeout."""
    found = {}
    for what in ("first step", "step", "save"):
        group = dist.new_group(timeout=datetime.timedelta(seconds=2))
        compressor = Compressor(everything(), SHAPES, group)
        steps(compressor, range(0 if what == "first step" else 2))
        saved = compressor.state_dict()
        dist.barrier()

        def act(compressor: Compressor = compressor, saved: Any = saved, what: str = what) -> Any:
            if worker == VICTIM:
                return compressor.load_state_dict(saved)
            return compressor.state_dict() if what == "save" else steps(compressor, range(2, 4))

        found[what] = complaint(act)
        dist.barrier()
    return found


CASES: list[Worker] = [
    refused_in_mid_run, refused_file, plain_loop, different_states, in_an_open_step, rank_function,
    rank_function_without_names, failed_allocation, pickles, alone,
]  # fmt: skip
RESULTS: dict[int, dict[str, list[Any]]] = {}


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    if request.param not in RESULTS:
        RESULTS[request.param] = run_cases(CASES, request.param)
    return RESULTS[request.param]


def told(found: list[str], own: str, others: str) -> None:
    """Whether the victim had its own error and the others one that names it."""
    for worker, said in enumerate(found):
        assert said.startswith(own if worker == VICTIM else others), said


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_state_that_one_worker_refuses_changes_nothing(results: dict[str, list[Any]], symptom: str):
    found = [seen[symptom] for seen in outcome(results, refused_in_mid_run)]
    refusal = "ValueError: expected a non-negative number of steps as iteration"
    told([said for said, *_ in found], refusal, f"ValueError: load_state_dict failed on worker 1: {refusal}")
    assert all(equal and untouched for _, equal, untouched in found)


def test_a_file_that_one_worker_cannot_read_changes_nothing(results: dict[str, list[Any]]):
    found = outcome(results, refused_file)
    own = "ValueError: "
    told([said for said, *_ in found], own, f"ValueError: load_state_dict failed on worker 1: {own}")
    assert {tuple(rest) for _, *rest in found} == {("equal", "6", "nothing", "1")}


def test_the_plain_loop_tells_all(results: dict[str, list[Any]]):
    found = outcome(results, plain_loop)
    own = "ValueError: expected a non-negative number of steps as iteration"
    told([said for said, *_ in found], own, f"ValueError: load_state_dict failed on worker 1: {own}")
    assert {tuple(rest) for _, *rest in found} == {("True", "3")}


def test_workers_do_not_load_different_states(results: dict[str, list[Any]]):
    expected = "DisagreementError: workers do not agree: worker 1 differs from worker 0 in "
    for seen in outcome(results, different_states):
        assert seen["another step"].startswith(expected)
        assert "saved iteration: 3 instead of 2" in seen["another step"]
        assert seen["another basis"].startswith(f"{expected}saved parts of 'a'")
        assert seen["not strict"] == f"{expected}strict: False instead of True"
        assert seen["iteration"] == "5"


def test_loading_in_an_open_step_drops_the_step(results: dict[str, list[Any]]):
    assert all(all(seen) for seen in outcome(results, in_an_open_step))


def test_a_rank_function_that_fails_on_one_worker(results: dict[str, list[Any]]):
    found = outcome(results, rank_function)
    for what, own, kind in (
        ("raises", "KeyError: 'raises'", "DisagreementError"),
        ("negative", "ValueError: the rank of 'c', (8, 8), must be at least 0", "ValueError"),
    ):
        told([seen[what][0] for seen in found], own, f"{kind}: a step failed on worker 1: {own}")
    for seen in found:
        assert "worker 1 differs from worker 0 in rank of 'c': 3 instead of 2" in seen["another"][0]
        assert all(after == "True" for _, after in seen.values())


def test_a_rank_function_that_fails_in_a_later_bucket(results: dict[str, list[Any]]):
    own = "KeyError: 'missing'"
    told(outcome(results, rank_function_without_names), own, f"DisagreementError: a step failed on worker 1: {own}")


def test_an_allocation_that_fails_on_one_worker(results: dict[str, list[Any]]):
    found = outcome(results, failed_allocation)
    own = "OutOfMemoryError: no memory is left"
    others = f"DisagreementError: the allocation for a bucket failed on worker 1: {own}"
    told([said for said, *_ in found], own, others)
    assert all(rest == [2, True] for _, *rest in found)


def test_what_was_unpickled_is_compared(results: dict[str, list[Any]]):
    for equal, forged in outcome(results, pickles):
        assert equal == "nothing"
        assert "worker 1 differs from worker 0 in saved parts of " in forged


def test_whoever_loads_alone_is_told(results: dict[str, list[Any]]):
    for worker, seen in enumerate(outcome(results, alone)):
        assert "worker 1 differs from worker 0 in call: load_state_dict instead of a step" in seen["first step"]
        for what in ("step", "save"):
            if worker == VICTIM:
                assert seen[what].startswith("RuntimeError: load_state_dict is collective, but this worker could not")
            else:
                assert "a sum over the workers failed, for example because a worker was lost" in seen[what]
