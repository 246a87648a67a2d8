"""torch.compile and DDP: a compiled model trains as an uncompiled one, and their checkpoints fit each other."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.ddp import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.support.distributed import outcome, run_cases
from tests.support.small import MANY, WIDTH, Results, complaint, stack
from tests.support.training import Run, batch, patched, recorded, squared_error

CONFIG = PowerSGDConfig(rank=2, min_compression_rate=0)
STEPS, SAVED_AFTER = 5, 3
MODES = ("ddp_optimizer", "no_optimization")
# Losses of the same training, of 2, with and without the compiler's reordering of sums.
LIMIT = 1e-6


class Net(nn.Module):
    """Layers in a module of our own, since the compiler leaves out the ``forward`` of torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack()

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


def replicated(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=MANY)


def compiled(model: Any, backend: str) -> Any:
    """A compiled model. ``counters["graphs"]`` counts the graphs that the backend gets."""
    original = torch._dynamo.lookup_backend(backend)

    def counting(*args: Any, **kwargs: Any) -> Any:
        counters["graphs"][backend] += 1
        return original(*args, **kwargs)

    return torch.compile(model, backend=counting)


WRAPS: dict[str, Callable[[nn.Module, str], Any]] = {
    "eager": lambda model, _: replicated(model),
    "compile(DDP)": lambda model, backend: compiled(replicated(model), backend),
    "DDP(compile)": lambda model, backend: replicated(compiled(model, backend)),
}


@contextlib.contextmanager
def optimizing(mode: str) -> Iterator[None]:
    """Set how the compiler treats DDP, and forget what was compiled before."""
    torch._dynamo.reset()
    counters.clear()
    with (
        # The compiler refuses buckets that are smaller than the first one, which has 1 MB otherwise.
        patched(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", int(MANY * 2**20)),
        torch._dynamo.config.patch(optimize_ddp=mode),
    ):
        yield


def train(model: nn.Module, worker: int, steps: range) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        inputs, targets = batch(worker, step, width=WIDTH)
        loss = squared_error(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(worker: int, wrap: str, mode: str, backend: str) -> dict[str, Any]:
    """What a training shows, and a checkpoint of it. Without the hook, only the number of graph breaks."""
    with optimizing(mode):
        train(WRAPS[wrap](Net(), backend), worker, range(2))
        plain_breaks = counters["graph_break"].total()
    with optimizing(mode):
        model = Net()
        wrapped, run = WRAPS[wrap](model, backend), Run()
        # The state sees through the compiler's wrapper.
        state = PowerSGDState(CONFIG, module=wrapped)
        wrapped.register_comm_hook(state, recorded(powerSGD_hook, run.buckets))
        losses = train(wrapped, worker, range(SAVED_AFTER))
        saved = state.state_dict(), copy.deepcopy(model.state_dict())
        losses += train(wrapped, worker, range(SAVED_AFTER, STEPS))
        return {
            "losses": losses,
            "resumed": resumed(worker, *saved),
            "buckets": [len(buckets) for buckets in run.buckets],
            "names": sorted(state.error()),
            "stats": state.compression_stats(),
            "breaks": (counters["graph_break"].total(), plain_breaks),
            "graphs": counters["graphs"].total(),
        }


def resumed(worker: int, state_dict: dict[str, Any], parameters: dict[str, Any]) -> list[float]:
    """Losses of a model that is not compiled, from a checkpoint on."""
    model = Net()
    model.load_state_dict(parameters)
    state = PowerSGDState(CONFIG, module=model)
    state.load_state_dict(state_dict)
    replica = replicated(model)
    replica.register_comm_hook(state, powerSGD_hook)
    return train(replica, worker, range(SAVED_AFTER, STEPS))


def all_ways(worker: int, backend: str) -> dict[str, dict[str, Any]]:
    ways = [("eager", MODES[0]), *((wrap, mode) for wrap in list(WRAPS)[1:] for mode in MODES)]
    return {f"{wrap}, {mode}": trained(worker, wrap, mode, backend) for wrap, mode in ways}


def aot_eager(worker: int, world_size: int) -> dict[str, dict[str, Any]]:
    return all_ways(worker, "aot_eager")


def inductor(worker: int, world_size: int) -> dict[str, dict[str, Any]]:
    return all_ways(worker, "inductor")


def python_reducer(worker: int, world_size: int) -> dict[str, str]:
    """How a step ends with each hook, compiled and not."""
    found = {}
    for hook in (powerSGD_hook, batched_powerSGD_hook):
        for wrap in ("eager", "compile(DDP)"):
            with optimizing("python_reducer"), torch._dynamo.config.patch(compiled_autograd=wrap != "eager"):
                model = WRAPS[wrap](Net(), "aot_eager")
                state = PowerSGDState(None, 2, start_powerSGD_iter=2, module=model)
                model.register_comm_hook(state, hook)
                found[f"{hook.__name__}, {wrap}"] = complaint(train, model, worker, range(1))
                assert (state.iter, state.error()) == (0, {})
    return found


@pytest.fixture(scope="module")
def two() -> Results:
    # DDP's Python reducer changes settings of the compiler for good, so it comes last.
    return run_cases([aot_eager, python_reducer], 2)


def check(found: list[dict[str, dict[str, Any]]]) -> None:
    for ways in found:
        expected = ways["eager, ddp_optimizer"]
        assert expected["names"] == [f"layers.{index}.weight" for index in range(6)]
        assert max(expected["buckets"]) > 1
        for name, way in ways.items():
            assert way["losses"] == pytest.approx(expected["losses"], rel=0, abs=LIMIT), name
            assert way["resumed"] == pytest.approx(expected["losses"][SAVED_AFTER:], rel=0, abs=LIMIT), name
            assert (way["names"], way["stats"]) == (expected["names"], expected["stats"]), name
            assert max(way["buckets"]) > 1, name
            with_hook, without = way["breaks"]
            assert with_hook == without, name
            # torch's optimizer for DDP splits the graph at buckets.
            assert min(way["graphs"], 2) == {"eager, ddp_optimizer": 0}.get(name, 1 + ("ddp_optimizer" in name)), name


def test_a_compiled_model_trains_as_an_uncompiled_one(two: Results) -> None:
    check(outcome(two, aot_eager))


@pytest.mark.slow
def test_a_model_compiled_by_inductor_trains_as_an_uncompiled_one() -> None:
    check(outcome(run_cases([inductor], 2), inductor))


def test_the_python_reducer_is_refused(two: Results) -> None:
    for ways in outcome(two, python_reducer):
        for name, said in ways.items():
            assert said.startswith("TypeError: with torch._dynamo.config.optimize_ddp = "), (name, said)
            assert '"python_reducer"' in said
            assert 'Set torch._dynamo.config.optimize_ddp = "ddp_optimizer"' in said
