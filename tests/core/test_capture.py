"""Steps in CUDA graphs: replays do what further steps do."""

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core import engine as engines
from powersgd_triton.core.engine import Engine
from powersgd_triton.handle import Handle
from powersgd_triton.kernels import table
from powersgd_triton.ops.step import LossScale
from powersgd_triton.schemes import new_engine
from tests.support.thinned import slow

SHAPES: list[dict[str, tuple[int, ...]]] = [
    {"weight": (20, 17), "bias": (7,)},
    {"other": (9, 12), "same": (9, 12), "scale": (3,)},
]
EAGER, NOT_FINITE = 2, 2


class FakeGraph(TorchDispatchMode):
    """A CUDA graph without a GPU: operations and kernels of Triton's interpreter, noted once and run again.

    Kernels reach ``memory`` through addresses. ``work`` is what a replay runs: one function for each launch.
    """

    def __init__(self, memory: list[Tensor]) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []
        # Storages and what was in them.
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._new: set[int] = set()
        self._in_kernel = False
        self._save(memory)

    def replay(self) -> None:
        for work in self.work:
            work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_kernel:
            return func(*args, **kwargs)
        self._save([*args, *kwargs.values()])
        result = func(*args, **kwargs)
        new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and self._is_new(leaf)]
        self._new |= {tensor.untyped_storage()._cdata for tensor in new}

        def work() -> None:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            if new:
                for place, value in zip(tree_leaves(result), again, strict=True):
                    place.copy_(value)

        if new or func._schema.is_mutable:
            self.work.append(work)
        return result

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Capture the block. Then all memory has the values of before."""
        launch = interpreter.GridExecutor.__call__

        def noted(*args: Any, **kwargs: Any) -> None:
            run = functools.partial(launch, *args, **kwargs)
            self.work.append(run)
            with mock.patch.object(self, "_in_kernel", True):
                self._save(args[1:])
                run()

        with (
            mock.patch.object(engines, "is_captured", return_value=True),
            mock.patch.object(table, "is_captured", return_value=True),
            mock.patch.object(interpreter.GridExecutor, "__call__", noted),
        ):
            try:
                with self:
                    yield
            finally:
                for tensor, value in self._before.values():
                    tensor.copy_(value)

    def _is_new(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._before.keys() | self._new

    def _save(self, arguments: Any) -> None:
        for tensor in [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]:
            if self._is_new(tensor):
                storage = tensor.untyped_storage()
                numel = storage.nbytes() // tensor.itemsize
                whole = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (numel,), (1,))
                self._before[storage._cdata] = whole, whole.clone()


class Training:
    """Steps of two buckets whose gradients stay where they are, as they do in a graph."""

    def __init__(self, device: torch.device, **fields: Any) -> None:
        self.config = PowerSGDConfig(rank=2, min_compression_rate=0.1, backend="triton", **fields)
        self.keys = ["first", "second"]
        self.engine = new_engine(self.config, Communicator(), lambda: SHAPES[0] | SHAPES[1])
        self.gradients = [{n: torch.zeros(s, device=device) for n, s in shapes.items()} for shapes in SHAPES]
        self.device = device
        self.launches: int | None = None
        """Of the captured step; a graph does not tell."""

    def enqueue(self) -> None:
        for key, shapes, gradients in zip(self.keys, SHAPES, self.gradients, strict=True):
            layout = self.engine.begin(key, lambda shapes=shapes: shapes, self.device, last=shapes is SHAPES[-1])  # type: ignore[misc]
            self.engine.average(layout, gradients)

    def result(self) -> dict[str, Tensor]:
        """Copies of the averages and errors."""
        # NaN is not equal to itself.
        found = {name: tensor.cpu().nan_to_num(nan=1e9) for part in self.gradients for name, tensor in part.items()}
        return found | {f"error of {n}": e.cpu() for n, e in self.engine.residuals.error(self.engine.step).items()}

    def run(self, numbers: Sequence[int], step: Callable[[], None] | None = None) -> list[dict[str, Tensor]]:
        """Results of steps, or of what replays one.

        Some gradients are zero, so that directions are drawn, and those of one step are not finite.
        """
        results = []
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            for gradient in (gradient for gradients in self.gradients for gradient in gradients.values()):
                gradient.copy_(torch.randn(gradient.shape, generator=generator))
            if number % 2:
                self.gradients[1]["same"].zero_()
            if number == NOT_FINITE:
                self.gradients[1]["other"][3, 3] = float("nan")
            (step or self.enqueue)()
            results.append(self.result())
        return results

    def capture(self) -> Callable[[], None]:
        """Capture a step; return what replays it."""
        if self.device.type == "cpu":
            errors = [matrix.error for matrix in self.engine.residuals.matrices.values() if matrix.error is not None]
            fake = FakeGraph([*errors, *(tensor for part in self.gradients for tensor in part.values())])
            with fake.captured():
                self.enqueue()
            self.launches = len(fake.work)
            return fake.replay
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.enqueue()
        return graph.replay


@functools.cache
def steps(device: torch.device) -> list[dict[str, Tensor]]:
    """Seven steps without a graph."""
    return Training(device).run(range(7))


@pytest.mark.parametrize("fields", [{}, *slow([{"error_feedback": False, "warm_start": False}])], ids=str)
def test_replays_are_steps(fields: dict[str, Any], device: torch.device):
    """Also after one that is not finite, after looking at the error, and with steps that are not captured between."""
    expected = Training(device, **fields).run(range(7)) if fields else steps(device)
    training = Training(device, **fields)
    found = training.run(range(EAGER))
    replay = training.capture()
    found += training.run(range(EAGER, 4), replay)
    found += training.run([4])
    # A step that is captured later goes on, too.
    found += training.run([5], training.capture())
    found += training.run([6], replay)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # A captured step makes two launches more.
    assert fields or training.launches in (None, 2 + 13 * len(SHAPES))


def test_replays_keep_their_scratch_memory(device: torch.device):
    """Also when a larger bucket comes later, whose step needs more of it."""
    training = Training(device)
    training.run(range(EAGER))
    replay = training.capture()
    workspace = training.engine.buckets.scheme._factors._workspace  # type: ignore[attr-defined]
    used = [weakref.ref(memory) for memory in workspace._memory.values()]
    assert used
    if device.type == "cpu":
        # The stand-in for a graph keeps all memory.
        del replay
    larger: dict[str, tuple[int, ...]] = {"larger": (400, 300)}
    layout = training.engine.begin("larger", lambda: larger, device, last=True)
    training.engine.average(layout, {name: torch.randn(shape, device=device) for name, shape in larger.items()})
    gc.collect()
    assert all(memory() is not None for memory in used)
    assert {id(memory()) for memory in used} - {id(memory) for memory in workspace._memory.values()}


def move(training: Training, gap: int) -> None:
    """Put the gradients of a bucket into other memory, with so many elements between them."""
    for gradients in training.gradients:
        memory, start = torch.zeros(1 << 12, device=training.device), 0
        for name, gradient in gradients.items():
            gradients[name] = memory[start : start + gradient.numel()].view(gradient.shape)
            start += gradient.numel() + gap


def test_a_capture_may_have_gradients_in_other_places(device: torch.device):
    """The host allocates no pinned memory for them then."""

    def capture(training: Training, gap: int) -> Callable[[], None]:
        move(training, gap)
        with mock.patch.object(table, "on_host", side_effect=AssertionError):
            return training.capture()

    training = Training(device)
    found = training.run(range(EAGER))
    replay = capture(training, 4)
    found += training.run(range(EAGER, 4), replay)
    torch.testing.assert_close(found, steps(device)[:4], rtol=0, atol=0)
    for further in range(1, table.SPARES):
        capture(training, 4 + 4 * further)
    with pytest.raises(RuntimeError, match="in another way than before"):
        capture(training, 400)
    training.run([4])
    training.run([5])
    capture(training, 400)


@pytest.mark.parametrize("further", [0, 1, 2])
def test_nothing_is_lost_by_a_capture_that_fails(further: int, device: torch.device):
    """Or that is not replayed. Places that were new in it were not uploaded."""
    training = Training(device)
    with pytest.raises(RuntimeError, match="in the step before it"):
        training.capture()
    training.run(range(EAGER))
    move(training, gap=4)
    training.keys = ["first", "another layout of the second"]
    with pytest.raises(RuntimeError, match="the same bucket in the step before"):
        training.capture()
    training.keys = ["first", "second"]
    replay = None
    for _ in range(further):
        replay = training.capture()
    torch.testing.assert_close(training.run(range(EAGER, 4), replay), steps(device)[EAGER:4], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fields", "prepare", "match"),
    [
        ({"algorithm": "alternating"}, None, "alternating"),
        ({"check_every": 5}, None, "check_every=0"),
        ({"start_iter": 3}, None, "first 3 steps are exact"),
        ({}, lambda engine: Handle(engine).telemetry(), "telemetry is on"),
        ({}, lambda engine: setattr(engine.step, "loss_scale", LossScale(lambda: 2.0)), "loss scale"),
        ({"bypass": "int8"}, None, "random numbers of quantized tensors"),
    ],
    ids=["alternating", "check_every", "start_iter", "telemetry", "loss scale", "bypass"],
)
def test_what_cannot_be_captured(
    fields: dict[str, Any], prepare: Callable[[Engine], None] | None, match: str, device: torch.device
):
    training = Training(device, **fields)
    training.run([0])
    if prepare is not None:
        prepare(training.engine)
    with pytest.raises(RuntimeError, match=match):
        training.capture()
    assert training.engine.step.iteration == 1
    assert not training.engine.step.keys
