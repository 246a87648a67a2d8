"""Two levels of DDP, four processes as two nodes of two, and joined buckets, whose messages go together."""

import contextlib
import copy
import dataclasses
import functools
import os
import pickle
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from powersgd_triton.comm.communicator import Communicator
from tests.support.balance import Ledger, batches, check_same, train
from tests.support.distributed import make_test, on_workers
from tests.support.exchanges import Watch, latency_decides
from tests.support.sharded_training import RANK_2, Net
from tests.support.training import (
    LIMIT,
    WIDTH,
    batch,
    complaint,
    gradients_of,
    hooked,
    linear_stack,
    logged,
    relative,
    squared_error,
    state_for,
    step_differences,
    total,
    training,
)
from tests.support.wrapper_table import in_nodes, use_nodes
from tests.support.wrappers import Wrapped

SAME = 1e-3
"""Relative difference at rank 2 between one level and two. It grows from step to step."""


def pair(worker: int, world_size: int, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    inside = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
    across = [dist.new_group(list(range(index, world_size, size))) for index in range(size)]
    return inside[worker // size], across[worker % size]


def unused(worker: int, world_size: int) -> None:
    """A layer that two workers use in some steps, and nobody in others: nothing is lost."""
    net = Net()
    model = in_nodes(Wrapped, net, RANK_2, find_unused_parameters=True)
    ledger = Ledger(model)
    for step in range(4):
        net.use = step % 2 == 1 and worker in (1, 2)
        ledger.step(batches(model, step))
    ledger.check()


def shares(worker: int, world_size: int) -> None:
    """The two workers of a node hold and multiply each matrix once, in about equal shares."""
    model = in_nodes(Wrapped, Net(), RANK_2)
    train(range(2), model)
    engine = model.state._engine
    memory = engine.residuals
    held = sum(matrix.error.numel() for matrix in memory.matrices.values() if matrix.error is not None)
    multiplied = sum(piece.numel for bucket in memory.buckets() for group in bucket.own for piece in group.segments)
    elements = sum(parameter.numel() for parameter in model.net.parameters() if parameter.dim() > 1)
    assert len(memory.buckets()) > 1
    assert max(held, multiplied) <= 1.25 / 2 * elements
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, (held, multiplied))
    first = worker // 2 * 2
    assert [a + b for a, b in zip(*found[first : first + 2], strict=True)] == [elements] * 2
    # Other groups, in which each worker has the other index of its node: what is owed is owed still.
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])], [dist.new_group([0, 1]), dist.new_group([2, 3])]
    inside, across = (next(g for g in made if dist.get_rank(g) >= 0) for made in groups)
    ledger = Ledger(model)
    engine.connect(Communicator(None, node_group=(inside, across)))
    ledger.train([2])
    ledger.check()
    # And from the errors that these nodes hold.
    ledger = Ledger(model)
    ledger.train([3])
    ledger.check()


VICTIM = 3


@on_workers(4, casualties=[VICTIM])
def test_death_of_a_worker_is_an_exception_in_backward(worker: int, world_size: int) -> None:
    """The others are told. Each of their errors is what it was, or has the gradients of their node too."""
    use_nodes()
    model = linear_stack()
    state = state_for(model, node_group="auto")
    training(model, worker, state, range(2))
    before = {name: error.double() for name, error in state.error().items()}
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for member in (worker, worker ^ 1):
        inputs, targets = batch(member, 2)
        squared_error(twin(inputs), targets).backward()
    given = gradients_of(twin)
    if worker == VICTIM:
        model[2].weight.register_hook(lambda _: os._exit(17))  # type: ignore[operator]
    assert complaint(training, model, worker, state, range(2, 3), find_unused_parameters=True) != "nothing"
    for name, error in state.error().items():
        # This worker's rows.
        matrix = state._engine.residuals.matrices[name]
        own = slice(matrix.first_row, matrix.first_row + (0 if matrix.error is None else len(matrix.error)))
        old, new = before[name][own], error[own]
        assert min(relative(new, old), relative(new, old + given[name].view_as(error)[own])) <= LIMIT, name


def resumed(worker: int, world_size: int) -> None:
    """Saved with two nodes of two workers; continued by every layout, by a copy and by a pickle."""
    use_nodes()
    model = linear_stack()
    state = state_for(model, node_group="auto")
    training(model, worker, state, range(2))
    weights, saved = copy.deepcopy(model.state_dict()), state.state_dict()
    # A copy knows the parameters of the model itself.
    ways = [(model, copy.deepcopy(state)), (model, pickle.loads(pickle.dumps(state)))]
    for node_group in (None, pair(worker, world_size, 4), init_device_mesh("cpu", (2, 2))):
        other = linear_stack()
        ways.append((other, state_for(other, node_group=node_group)))
        ways[-1][1].load_state_dict(saved)
    expected = training(model, worker, state, range(2, 4))
    for number, (continued, into) in enumerate(ways):
        continued.load_state_dict(weights)
        got = training(continued, worker, into, range(2, 4))
        assert max(step_differences(got, expected)) <= SAME, number


class TwoDtypes(nn.Module):
    """Layers in bf16 and then in fp32, so that the dtype of DDP's buckets changes in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linear_stack()
        self.layers[:3].to(torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers[3:](self.layers[:3](inputs.bfloat16()).float())
        return outputs


few_layers = functools.partial(linear_stack, 4)
TRAININGS: list[tuple[Callable[[], nn.Module], str | None, dict[str, Any]]] = [
    (few_layers, None, {}),
    (few_layers, "auto", {"algorithm": "alternating"}),
    (few_layers, None, {"start_powerSGD_iter": 2}),
    (TwoDtypes, None, {}),
]


def joined(worker: int, world_size: int) -> None:
    """The same training with separate and with joined buckets, in fewer messages with as many elements."""
    use_nodes()
    for make, node_group, settings in TRAININGS:
        runs, errors, sent = [], [], []
        for how in (contextlib.nullcontext(), latency_decides()):
            with how, Watch() as watch:
                model = make()
                state = state_for(model, node_group=node_group, **settings)
                runs.append(training(model, worker, state, range(3), cap=0.005))
                sent.append(watch.reduced)
                errors.append({name: total(error) for name, error in state.error().items()})
        coarse = make is TwoDtypes
        assert max(step_differences(runs[1], runs[0])) <= (0.02 if coarse else 0.1 * SAME), (node_group, settings)
        for name, error in errors[0].items():
            assert relative(errors[1][name], error) <= (0.1 if coarse else 0.1 * SAME), (node_group, settings, name)
        check_same([gradient for gradients in runs[1] for gradient in gradients.values()])
        assert len(sent[1]) < len(sent[0])
        assert sum(sent[1]) == sum(sent[0])


def interrupted(worker: int, world_size: int) -> None:
    """An exception while buckets wait: they are forgotten, and the next step sends all of its own gradients."""

    def stop(_: Tensor) -> Tensor:
        raise KeyError("stop")

    use_nodes()
    config = dataclasses.replace(RANK_2, wire_dtype="int4")
    for node_group in (None, "auto"):
        with latency_decides():
            model = Wrapped(Net(), config, node_group=node_group)
            train(range(2), model)
            model.net.inject = stop
            assert "KeyError" in complaint(train, [2], model)
            model.net.inject = None
            # The wrapper itself cannot go on.
            model.module = hooked(model.net, model.state, bucket_cap_mb=0.005, find_unused_parameters=True)
            # As saved and loaded right after it.
            model.state.load_state_dict(model.state.state_dict())
            ledger = Ledger(model)
            ledger.train(range(3))
            ledger.check()


def refused(worker: int, world_size: int) -> None:
    """Wrong groups are refused by all workers."""
    inside, across = pair(worker, world_size, 2)
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][worker in (1, 2)]
    alone = [dist.new_group([index]) for index in range(world_size)][worker]
    some, everyone = dist.new_group([0, 1]), dist.group.WORLD

    def step(node_group: Any, group: dist.ProcessGroup | None = None) -> str:
        model = nn.Linear(8, 8)
        state = state_for(model, group=group, node_group=node_group)
        replica = hooked(model, state, process_group=group)
        return complaint(replica(torch.ones(2, 8)).sum().backward)

    for wrong, said in (
        ("node", "TypeError: node_group must be"),
        (init_device_mesh("cpu", (4,)), "two dimensions"),
        ((inside,), "TypeError: node_group must be"),
    ):
        assert said in complaint(state_for, linear_stack(), node_group=wrong)
    # The third one is wrong on one worker alone.
    for groups in ((alone, across), (everyone, everyone), (inside if worker else alone, across), (inside, crossed)):
        assert re.search("ValueError.*groups of node_group must", step(groups))
    assert re.search("DisagreementError.*node_group", step("auto" if worker == 1 else None), re.DOTALL)
    if worker < 2:
        assert 'node_group="auto" needs the process group of all' in step("auto", some)


test_two_nodes = make_test([unused, shares, resumed, joined, interrupted, refused], 4)


@on_workers(3)
def test_unequal_nodes_use_one_level(worker: int, world_size: int) -> None:
    """Nodes of 2 and 1 workers, of 3, and none that are known, use one level, and worker 0 says so."""
    expected = training(linear_stack(), worker, None, range(2))
    for reason, size, index in (
        ("2, 1 workers", "2" if worker < 2 else "1", str(worker % 2)),
        ("3 workers", "3", str(worker)),
        ("not set", "", ""),
    ):
        model = linear_stack()
        variables = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=size, LOCAL_RANK=index)
        with variables, logged("powersgd_triton") as messages:
            got = training(model, worker, state_for(model, WIDTH, node_group="auto"), range(2))
        about = [text for _, text in messages if "node" in text]
        assert max(step_differences(got, expected)) <= LIMIT
        assert [reason in text for text in about] == [True] * (worker == 0), about
