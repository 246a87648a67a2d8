"""torch.compile and DDP: a compiled model trains as an uncompiled one, and their checkpoints fit each other."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.integrations.ddp import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.support.distributed import make_test, run
from tests.support.training import MANY, batch, complaint, linear_stack, squared_error

CONFIG = PowerSGDConfig(rank=2, min_compression_rate=0)
STEPS, SAVED_AFTER = 4, 2
# Losses of the same training, of 2, with and without the compiler's reordering of sums.
LIMIT = 1e-6


class Net(nn.Module):
    """Layers in a module of our own, since the compiler leaves out the ``forward`` of torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linear_stack(3)

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
        mock.patch.object(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", int(MANY * 2**20)),
        torch._dynamo.config.patch(optimize_ddp=mode),
    ):
        yield


def train(model: nn.Module, worker: int, steps: range) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        inputs, targets = batch(worker, step)
        loss = squared_error(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def compiled_models(
    worker: int, _world_size: int, backend: str = "aot_eager", wraps: Sequence[str] = ("eager", "compile(DDP)")
) -> None:
    """They train as an uncompiled one with as many graph breaks as without the hook, and take over its checkpoint."""
    expected: list[float] = []
    saved: dict[str, Any] = {}
    about: list[Any] = []
    for wrap in wraps:
        mode = "no_optimization" if wrap == "DDP(compile)" else "ddp_optimizer"
        with optimizing(mode):
            train(WRAPS[wrap](Net(), backend), worker, range(2))
            plain_breaks = counters["graph_break"].total()
        with optimizing(mode):
            model = Net()
            wrapped = WRAPS[wrap](model, backend)
            # The state sees through the compiler's wrapper, and so does ``attach``.
            state: Any = attach(wrapped, CONFIG)
            assert attach(wrapped) is state
            assert PowerSGDState(CONFIG, module=wrapped).report().tensors[0].name == "layers.0.weight"
            losses = train(wrapped, worker, range(SAVED_AFTER))
            if saved:
                # A state of the same model that was not compiled.
                state.load_state_dict(saved["state"])
                model.load_state_dict(saved["model"])
            saved = {"state": state.state_dict(), "model": copy.deepcopy(model.state_dict())}
            losses += train(wrapped, worker, range(SAVED_AFTER, STEPS))
            assert len(state._engine.buckets.in_use()) > 1
            assert state.iteration == STEPS
            assert counters["graph_break"].total() == plain_breaks
            # torch's optimizer for DDP splits the graph at buckets.
            graphs = 0 if wrap == "eager" else 1 + (mode == "ddp_optimizer")
            assert min(counters["graphs"].total(), 2) == graphs
        expected, about = expected or losses, about or [sorted(state.error()), state.compression_stats()]
        assert losses == pytest.approx(expected, rel=0, abs=LIMIT), (wrap, mode)
        assert [sorted(state.error()), state.compression_stats()] == about, (wrap, mode)
    assert about[0] == [f"layers.{index}.weight" for index in range(3)]


def python_reducer(worker: int, _world_size: int) -> None:
    """It is refused with each hook, compiled and not, and nothing has changed."""
    for hook, wrap in ((powerSGD_hook, "eager"), (batched_powerSGD_hook, "compile(DDP)")):
        with optimizing("python_reducer"), torch._dynamo.config.patch(compiled_autograd=wrap != "eager"):
            model = WRAPS[wrap](Net(), "aot_eager")
            state = PowerSGDState(None, 2, start_powerSGD_iter=2, module=model)
            model.register_comm_hook(state, hook)
            said = complaint(train, model, worker, range(1))
            assert said.startswith("TypeError: with torch._dynamo.config.optimize_ddp = "), said
            assert '"python_reducer"' in said
            assert 'Set torch._dynamo.config.optimize_ddp = "ddp_optimizer"' in said
            assert (state.iter, state.error()) == (0, {})


# DDP's Python reducer changes settings of the compiler for good, so it comes last.
test_two_workers = make_test([compiled_models, python_reducer], 2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_all_wrappers(backend: str) -> None:
    run(compiled_models, 2, backend, tuple(WRAPS))
