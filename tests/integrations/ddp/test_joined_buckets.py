"""Small buckets are averaged together: the same trajectory as separately, with fewer collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.distributed import environment, outcome, run_cases
from tests.support.exchanges import latency_decides
from tests.support.small import MANY, RANK_2, WIDTH, complaint, stack, training
from tests.support.training import (
    LIMIT,
    Run,
    batch,
    gradients_of,
    local_gradients,
    patched,
    relative,
    squared_error,
    step_differences,
    total,
)

SAME = 1e-4
"""Relative difference of gradients in some steps, since joined matrices are multiplied in other batches."""
NODES: tuple[str | None, ...] = (None, "auto")


class TwoDtypes(nn.Module):
    """Layers in bf16 and then in fp32, so that the dtype of DDP's buckets changes in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack()
        self.layers[:3].to(torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers[3:](self.layers[:3](inputs.bfloat16()).float())
        return outputs


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The elements of each all-reduce."""
    numels: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        numels.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    with patched(dist, "all_reduce", counting):
        yield numels


def state_for(model: nn.Module, node_group: Any = None, **settings: Any) -> PowerSGDState:
    return PowerSGDState(None, module=model, node_group=node_group, **{**RANK_2, **settings})


def compared(
    worker: int, make: Callable[[], nn.Module], node_group: str | None, joined: Any, **settings: Any
) -> dict[str, Any]:
    """The same training with separate and with joined buckets."""
    runs: list[Run] = []
    errors, sent = [], []
    for how in (contextlib.nullcontext(), joined):
        with environment(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(worker % 2)), how, counted() as numels:
            model = make()
            state = state_for(model, node_group, **settings)
            runs.append(training(model, worker, state, range(5), cap=0.005))
            sent.append((len(numels), sum(numels)))
            errors.append({name: total(error) for name, error in state.error().items()})
    (many, elements), (few, same) = sent
    return {
        "difference": max(step_differences(runs[1].gradients, runs[0].gradients)),
        "errors": max(relative(errors[1][name], error) for name, error in errors[0].items()),
        "digests": runs[1].digests,
        "collectives": (many, few),
        "elements": (elements, same),
    }


CASES: list[tuple[str, Callable[[], nn.Module], dict[str, Any]]] = [
    ("standard", stack, {}),
    ("alternating", stack, {"algorithm": "alternating"}),
    ("exact first steps", stack, {"start_powerSGD_iter": 2}),
    ("two dtypes", TwoDtypes, {}),
]


def joined(worker: int, world_size: int) -> dict[str, dict[str, Any]]:
    found = {}
    for node_group in NODES:
        for name, make, settings in CASES:
            found[f"{name}, {node_group}"] = compared(worker, make, node_group, latency_decides(), **settings)
    return found


def interrupted(worker: int, world_size: int) -> dict[str, Any]:
    """An exception while buckets wait: they are forgotten, and the next step sends all of its own gradients."""
    found = {}
    for node_group in NODES:
        with environment(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(worker % 2)), latency_decides():
            model = stack()
            own = local_gradients(model)
            state = state_for(model, node_group, wire_dtype="int4")
            training(model, worker, state, range(2))

            def stop(_: Tensor) -> None:
                raise KeyError("stop")

            handle = model[0].weight.register_hook(stop)  # type: ignore[operator]
            failed = complaint(training, model, worker, state, range(1), find_unused_parameters=True)
            handle.remove()
            waiting = len(state._engine._waiting._buckets)
            replica = DistributedDataParallel(model, bucket_cap_mb=MANY)
            replica.register_comm_hook(state, powerSGD_hook)
            missing = 0.0
            for step in range(3):
                before = {name: total(error) for name, error in state.error().items()}
                model.zero_grad()
                inputs, targets = batch(worker, step, width=WIDTH)
                squared_error(replica(inputs), targets).backward()
                averages = gradients_of(model)
                for name, error in before.items():
                    left = total(state.error()[name]) + averages[name].double() * world_size
                    missing = max(missing, relative(left, error + total(own[name])))
            found[str(node_group)] = {"failed": failed, "waiting": waiting, "missing": missing}
    return found


@pytest.fixture(scope="module")
def four() -> dict[str, list[Any]]:
    return run_cases([joined, interrupted], 4)


def test_joined_buckets_give_the_same_trajectory(four: dict[str, list[Any]]) -> None:
    found = outcome(four, joined)
    for name in found[0]:
        for seen in found:
            one = seen[name]
            coarse = "two dtypes" in name
            assert one["difference"] <= (0.02 if coarse else SAME), (name, one)
            assert one["errors"] <= (0.1 if coarse else SAME), (name, one)
            assert one["digests"] == found[0][name]["digests"]
            many, few = one["collectives"]
            assert few < many, (name, one)
            elements, same = one["elements"]
            assert elements == same, (name, one)


def test_an_exception_while_buckets_wait_loses_nothing_later(four: dict[str, list[Any]]) -> None:
    for found in outcome(four, interrupted):
        for seen in found.values():
            assert "KeyError" in seen["failed"]
            assert seen["missing"] <= LIMIT, found
