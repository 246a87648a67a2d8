"""Workers that do not do the same, or of which one alone meets something or gives a wrong argument: all are told."""

import datetime
import pickle
import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig, attach
from powersgd_triton.comm.agreement import DIFFERENT_BITS
from powersgd_triton.config import logger
from powersgd_triton.core import buckets, facts
from powersgd_triton.integrations import fsdp1, optimizer
from powersgd_triton.integrations.ddp import PowerSGDState
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.integrations.local_steps import LocalSteps
from powersgd_triton.ops import torch_backend
from tests.support.checks import everything, gradients, step
from tests.support.distributed import folder, make_test, on_workers
from tests.support.sharded_training import Net, mesh_of, sharded, train
from tests.support.thinned import slow
from tests.support.training import RANK_2, complaint, linear_stack, logged, training, warnings
from tests.support.wrappers import WithReplicateGroup

SHAPES = {"a": (16, 12), "b": (5,), "c": (8, 8)}
CONFIG: dict[str, Any] = {"rank": 2, "min_compression_rate": 0}
TOLD = "DisagreementError: workers do not agree:"


exact = torch_backend._orthogonalize


def compress(compressor: Compressor, shapes: dict[str, Any] = SHAPES, spoil: bool = False) -> None:
    given = gradients(dist.get_rank(), shapes)
    if spoil:
        given["a"][2, 2] = float("nan")
    compressor.decompress(compressor.compress(given))


def every_worker_is_told_at_the_start(worker: int, world_size: int) -> None:
    for differs, difference in (
        ({"rank": 3}, "config.rank: 3 instead of 2"),
        # One worker averages exactly, in one message, where the others send two.
        ({"start_iter": 1}, "config.start_iter: 1 instead of 0"),
        ({"shapes": {**SHAPES, "c": (8, 9)}}, "shape of 'c': [8, 9] instead of [8, 8]"),
        ({"shapes": {**SHAPES, "more": (3,)}}, "shape of 'more': [3] instead of none"),
        ({"shapes": {}}, "shape of 'a': none instead of [16, 12]"),
        ({"shapes": {name: SHAPES[name] for name in "cba"}}, "tensors in order: ['c', 'b', 'a'] instead of"),
        ({"dtype": torch.float64}, "dtypes of gradients: ['torch.float64'] instead of []"),
    ):
        fields: dict[str, Any] = {"shapes": SHAPES, "dtype": torch.float32, **CONFIG}
        fields |= differs if worker == 1 else {}
        shapes, dtype = fields.pop("shapes"), fields.pop("dtype")
        given = gradients(dist.get_rank(), shapes, dtype)
        said = complaint(Compressor(PowerSGDConfig(**fields), shapes).compress, given)
        assert said.startswith(f"{TOLD} worker 1 differs from worker 0 in {difference}"), said
        dist.barrier()
    # Another version of the package.
    with mock.patch.object(facts, "PROTOCOL", facts.PROTOCOL + (worker == 1)):
        said = complaint(compress, Compressor(PowerSGDConfig(**CONFIG), SHAPES))
    assert f"the package's protocol: {facts.PROTOCOL + 1} instead of {facts.PROTOCOL}" in said, said
    compressor = Compressor(PowerSGDConfig(**CONFIG), SHAPES)
    if worker == 1:
        compressor.attach(lambda: 8.0)
    assert "a loss scale is attached: True instead of False" in complaint(compress, compressor)
    dist.barrier()


def workers_that_agree_until_an_iteration_or_a_factor_differs(worker: int, world_size: int) -> None:
    """Overflows, exact first steps and a loss scale are no disagreement."""
    compressor = Compressor(PowerSGDConfig(**CONFIG, check_every=1, start_iter=2), SHAPES)
    compressor.attach(lambda: 8.0)
    for number in range(6):
        compress(compressor, spoil=number == 4 and worker == 0)
    compressor._engine.step.iteration += worker == 1
    assert complaint(compress, compressor).startswith(f"{TOLD} worker 1 differs from worker 0 in iteration: 8 instead")
    dist.barrier()

    # Factors are compared.
    def inexact(*args: Any, out: Tensor, **options: Any) -> None:
        exact(*args, out=out, **options)
        out.mul_(1 + 2.0**-20)

    compressor = Compressor(PowerSGDConfig(**CONFIG, check_every=3), SHAPES)
    for _ in range(3):
        compress(compressor)
    with mock.patch.object(torch_backend, "_orthogonalize", inexact if worker == 1 else exact):
        for _ in range(3, 5):
            compress(compressor)
        said = complaint(compress, compressor)
    assert "worker 1 differs from worker 0 in " in said
    assert "P̂ of the bucket of 'a' and 2 more" in said
    everyone = [""] * world_size
    dist.all_gather_object(everyone, said)
    assert {*everyone} == {said}


def workers_that_compute_differently_are_warned(worker: int, world_size: int) -> None:
    """Once, on all workers, and they go on."""
    expected = f"{DIFFERENT_BITS}: triton 3.7.1 on sm_80 on workers 0; torch 2.13.0 on sm_90 on workers 1"
    kinds = ("triton 3.7.1 on sm_80", "torch 2.13.0 on sm_90")
    for kind, said in ((kinds[0], []), (kinds[worker], [expected])):
        with mock.patch.object(buckets, "computed_by", lambda *_, kind=kind: kind), logged(logger.name) as messages:
            compressor = Compressor(PowerSGDConfig(**CONFIG), SHAPES)
            for _ in range(2):
                compress(compressor)
        assert [text for text in warnings(messages) if DIFFERENT_BITS in text] == said


@on_workers(4)
def test_shards_and_replicas_of_a_shard_are_compared(worker: int, world_size: int) -> None:
    """At first each pair of replicas agrees, and the two shards do not."""
    mesh = mesh_of(replicate=2, shard=2)
    config = PowerSGDConfig(rank=2 + mesh["shard"].get_local_rank(), min_compression_rate=1)
    said = complaint(train, WithReplicateGroup(Net(), config).module, worker, steps=range(1))
    assert said.startswith(f"{TOLD} worker 1 differs from worker 0 in config.rank: 3 instead of 2")
    assert "worker 3 differs" in said
    # Shards have factors and plans of their own, which only their replicas share.
    dist.barrier()
    config = PowerSGDConfig(compression=3, min_compression_rate=1, replan_every=1, check_every=1)
    made = WithReplicateGroup(Net(), config)
    module, state = made.module, made.state
    train(module, worker, steps=range(4))
    plans = [""] * world_size
    dist.all_gather_object(plans, str(state.report()))
    assert plans[0] == plans[2] != plans[1] == plans[3]
    if worker == 3:
        next(iter(state._engine.buckets.in_use())).basis.add_(1.0)
    said = complaint(train, module, worker, steps=range(4, 6))
    assert "workers do not agree" in said
    assert "of the bucket of" in said


FOUR = {"a": (16, 12), "b": (5,), "c": (8, 8), "d": (12, 16)}
VICTIM = 1


def steps(compressor: Compressor, numbers: range) -> list[dict[str, Tensor]]:
    return [step(compressor, gradients(100 * number + dist.get_rank(), FOUR)) for number in numbers]


def ranks_that_differ_on_one_worker(worker: int, world_size: int) -> None:
    """What a rank function returns is compared, where DDP without ``module=`` meets a parameter late, too."""

    def rank(name: str, shape: Any) -> int:
        return 3 if worker == VICTIM and (name == "c" or (name.isdecimal() and int(name) > 6)) else 2

    state = PowerSGDState(None, **{**RANK_2, "matrix_approximation_rank": rank})
    for said in (
        complaint(steps, Compressor(PowerSGDConfig(rank=rank, min_compression_rate=0), FOUR), range(1)),
        complaint(training, linear_stack(), worker, state, range(1), find_unused_parameters=True),
    ):
        assert re.search("worker 1 differs from worker 0 in rank of '.*': 3 instead of 2", said), said


def what_was_unpickled_is_compared(worker: int, world_size: int) -> None:
    """Unpickling is no collective, so that the next step compares what was unpickled."""
    model = linear_stack()
    state = PowerSGDState(None, module=model, **RANK_2)
    training(model, worker, state, range(1))
    content = pickle.dumps(state)
    assert complaint(training, model, worker, pickle.loads(content), range(1)) == "nothing"
    # The same step, configuration and tensors, but other bases.
    forged = pickle.loads(content)
    if worker == VICTIM:
        for parts in forged._engine.residuals.loaded.matrices.values():
            parts["basis"].neg_()
    assert "worker 1 differs from worker 0 in saved parts of " in complaint(training, model, worker, forged, range(1))


@on_workers(2, *slow([3]))
def test_whoever_loads_alone_is_told(worker: int, world_size: int) -> None:
    """One worker loads while the others step, save, or begin their first step. Nobody waits for a timeout."""
    calls = {"first step": "a step", "step": "a step that waits for the others", "save": "state_dict"}
    for what, call in calls.items():
        group = dist.new_group(timeout=datetime.timedelta(seconds=60))
        compressor = Compressor(everything(), FOUR, group)
        steps(compressor, range(0 if what == "first step" else 2))
        saved = compressor.state_dict()
        dist.barrier()
        start = time.monotonic()
        if worker == VICTIM:
            said = complaint(compressor.load_state_dict, saved)
        else:
            said = complaint(compressor.state_dict) if what == "save" else complaint(steps, compressor, range(2, 4))
        assert f"worker 1 is in load_state_dict and worker 0 in {call}: all workers must call it" in said
        assert time.monotonic() - start < 30
        # The next sum of the group would take the interrupted one's place on the other workers.
        said = complaint(steps, compressor, range(4, 5))
        assert ("interrupted an earlier step of this process group" in said) == (what == "step")
        dist.barrier()


TWO = {"a": (16, 12), "b": (5,)}
Wrong = dict[str, list[Any]]
MODELS: Wrong = {"model": [5, nn.Linear(4, 4)], "config": ["rank", PowerSGDConfig(bytes_per_step=1)]}
ATTACHED: Wrong = {**MODELS, "rank": [0], "rnk": [4], "node_group": [5], "loss_scale": [5]}
STATES: Wrong = {"state_dict": [5, {}, "nowhere"]}
WRAPPERS: dict[str, Callable[[], Any]] = {
    "DDP": lambda: DistributedDataParallel(nn.Linear(40, 40)),
    "FSDP1": lambda: FullyShardedDataParallel(nn.Linear(40, 40), device_id=torch.device("cpu")),
    "FSDP2": lambda: sharded(Net(), mesh_of(shard=2)),
}


def calls(path: str) -> Iterator[tuple[Callable[..., Any], dict[str, Any], Wrong]]:
    """(what all workers call, with what, and what instead on one worker)."""
    for wrap in WRAPPERS.values():
        yield attach, {"model": wrap()}, ATTACHED
        state = attach(wrap(), rank=2)
        yield from checkpoints(state, path)
        yield state.load_state_dict, {"state_dict": state.state_dict()}, {**STATES, "rename": [5]}
    yield apply_powersgd, {"model": WRAPPERS["FSDP2"](), "config": everything()}, {**MODELS, "replicate_group": [5]}
    of_fsdp1 = {"fsdp_model": WRAPPERS["FSDP1"](), "config": everything()}
    yield fsdp1.PowerSGDState, of_fsdp1, {"fsdp_model": [5], "config": [5]}
    wrong: Wrong = {"model": [5], "config": [5], "every": [0], "delay": [-1], "group": [5], "node_group": [5]}
    yield LocalSteps, {"model": nn.Linear(4, 4), "config": None}, {**wrong, "outer": [5], "optimizer": [5]}
    steps = LocalSteps(nn.Linear(4, 4), None)
    yield from checkpoints(steps, path)
    yield steps.load_state_dict, {"state_dict": steps.state_dict()}, STATES
    compressor, given = Compressor(everything(), TWO), gradients(0, TWO)
    flat = list(given.values())
    yield compressor.compress, {"gradients": given}, {"gradients": [{}, 5, {**given, "a": 5}, flat[:1], torch.ones(3)]}
    saved = compressor.state_dict()
    yield compressor.load_state_dict, {"state_dict": saved}, {**STATES, "strict": [False], "rename": [5]}
    plain = optimizer.PowerSGD(flat, optimizer.Config(2))
    yield plain.aggregate, {"gradients": flat}, {"gradients": [5, flat[:1], [flat[0].expand(2, 16, 12), 5]]}


def checkpoints(state: Any, path: str) -> Iterator[tuple[Callable[..., Any], dict[str, Any], Wrong]]:
    yield state.save, {"folder": path}, {"folder": [None]}
    yield state.load, {"folder": path}, {"folder": [None, "nowhere", "a\0b"]}
    yield state.load, {"folder": f"{path}/0", "missing_ok": True}, {"missing_ok": [False]}


def all_workers_are_told(worker: int, world_size: int) -> None:
    with folder(worker) as path:
        for call, right, wrong in calls(path):
            for name, value in [(name, value) for name, values in wrong.items() for value in values]:
                start = time.monotonic()
                said = complaint(call, **{**right, **({name: value} if worker == 1 else {})})
                assert said != "nothing", (call, name, value)
                assert worker == 1 or "worker 1" in said, (call, name, value, said)
                assert time.monotonic() - start < 30
                dist.barrier()
            assert complaint(call, **right) == "nothing", call


MORE = (ranks_that_differ_on_one_worker, what_was_unpickled_is_compared)
test_two_workers = make_test((workers_that_compute_differently_are_warned, *MORE, all_workers_are_told), 2)
test_three_workers = make_test(
    (every_worker_is_told_at_the_start, workers_that_agree_until_an_iteration_or_a_factor_differs), 3
)
test_more_on_three_workers = pytest.mark.slow(make_test(MORE, 3))
