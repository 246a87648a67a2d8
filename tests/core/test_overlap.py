"""Messages travel while later buckets are computed: what runs at the same time, on which stream and memory."""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.clock import PROJECT
from powersgd_triton.core.loading import load, save
from powersgd_triton.core.telemetry import StepRecord
from powersgd_triton.handle import Handle
from powersgd_triton.ops.step import LossScale
from powersgd_triton.schemes import new_engine
from tests.support.checks import CPU, gradients, step
from tests.support.streams import BUCKETS, SHAPES, FakeStream, Network, StreamMachine, Timed, begin, stream_machine
from tests.support.thinned import slow

REBUILT = [["d", "scale"], ["c", "b"], ["bias", "a"]]
FIELDS: dict[str, dict[str, Any]] = {
    "standard": {},
    "alternating": {"algorithm": "alternating"},
    "planned": {"rank": None, "compression": 2.5, "replan_every": 1, "wire_dtype": "fp32"},
    "narrow, first exact": {"wire_dtype": "int8", "error_dtype": "bf16", "start_iter": 2},
    "cold": {"warm_start": False, "error_feedback": False},
    "iterations": {"iterations": 2},
}
TIMES = {"project": 45.0, "backproject": 65.0, "commit": 10.0, "reconstruct": 20.0}
"""Of a bucket of 27 MB on a fast GPU, about, in µs."""


class Training:
    """One worker whose hook runs on the stream of the backward pass, as DDP's does.

    Without ``overlapping`` the engine is not told which bucket is a step's last, and finishes each bucket.
    """

    def __init__(
        self, machine: StreamMachine, overlapping: bool = True, backward: float = 0, message: float = 0, **fields: Any
    ) -> None:
        self.machine, self.overlapping, self.backward = machine, overlapping, backward
        self.network = Network(machine, message)
        config = PowerSGDConfig(**{"rank": 2, "min_compression_rate": 0.1, **fields})
        self.engine = new_engine(config, self.network, lambda: SHAPES)
        self.engine.listeners.append(Timed(machine, TIMES))
        # Frameworks keep gradients until the main stream has waited.
        self._gradients: list[dict[str, Tensor]] = []

    def step(
        self, number: int, buckets: Sequence[Sequence[str]], stop: int | None = None, spoilt: str | None = None
    ) -> dict[str, Tensor]:
        """The step's averages. It is interrupted before bucket ``stop``, and gradient ``spoilt`` is not finite."""
        generator = torch.Generator().manual_seed(number)
        main, engine, streams = self.machine.current, self.engine, self.engine.residuals.streams
        self.network.sent.clear()
        found: dict[str, Tensor] = {}
        for index, names in enumerate(buckets):
            if index == stop:
                return found
            gradients = {name: torch.randn(SHAPES[name], generator=generator) for name in names}
            if spoilt in gradients:
                gradients[spoilt][0] = torch.inf
            main.time += self.backward
            self._gradients.append(gradients)
            layout = begin(engine, names, CPU, index == len(buckets) - 1 if self.overlapping else None)
            with streams.on(CPU, join=False):
                if engine.compressing:
                    engine.average(layout, gradients)
                else:
                    for gradient in gradients.values():
                        # DDP has one buffer, of which these are views.
                        engine.average_exactly(gradient)
            found |= gradients
        engine.finish()
        # DDP waits for the Futures.
        main.wait_stream(*self.machine.made)
        self._gradients.clear()
        return found


def steps(training: Training) -> list[dict[str, Tensor]]:
    """Results of steps with other buckets, of a state that is saved and loaded, and of what all buckets share.

    That is the verdict of a step that is not finite, a loss scale that changes, and telemetry.
    """
    engine, results, records = training.engine, list[dict[str, Tensor]](), list[StepRecord]()

    def go(numbers: Sequence[int], buckets: Sequence[Sequence[str]], spoilt: str | None = None) -> None:
        for number in numbers:
            found = training.step(number, buckets, spoilt=spoilt)
            results.append({name: average.nan_to_num(nan=1e9) for name, average in found.items()})
            errors = engine.residuals.error(engine.step)
            results[-1] |= {f"error of {name}": error for name, error in errors.items()}

    go(range(2), BUCKETS)
    engine.step.loss_scale = LossScale(lambda: 2.0 ** (len(results) % 3))
    Handle(engine).telemetry(records.append, every=1)
    go([2], BUCKETS)
    go([3], BUCKETS, spoilt="b")
    go([4, 5], REBUILT)
    state = save(engine)
    go([6], REBUILT)
    load(engine, lambda: (state, None))
    go([6, 7], BUCKETS)
    assert [record.applied for record in records] == [False, True, True, True, True]
    return results


@pytest.mark.parametrize(
    "name", ["standard", "alternating", "planned", "narrow, first exact", *slow(["cold", "iterations"])]
)
def test_bits_are_those_of_one_bucket_after_the_other(name: str):
    with stream_machine() as machine:
        overlapped = steps(Training(machine, **FIELDS[name]))
        assert machine.races == []
    with stream_machine() as machine:
        expected = steps(Training(machine, overlapping=False, **FIELDS[name]))
    torch.testing.assert_close(overlapped, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "stop"), [("standard", 1), ("standard", 3), ("alternating", 2)])
def test_an_interrupted_step_uses_memory_in_order(name: str, stop: int):
    """Messages of its buckets are under way when the next step begins, and nobody waits for them."""
    with stream_machine() as machine:
        training = Training(machine, **FIELDS[name])
        for number in range(3):
            training.step(number, BUCKETS)
        training.step(3, BUCKETS, stop=stop)
        for number in range(4, 6):
            training.step(number, BUCKETS)
        training.step(6, BUCKETS, stop=stop)
        state = save(training.engine)
        load(training.engine, lambda: (state, None))
        training.step(7, REBUILT)
    assert machine.races == []


def looks_between_steps(machine: StreamMachine, **fields: Any) -> None:
    """The hook runs on a framework's stream. The main stream, which does not wait for it, uses the engine's memory."""
    config = PowerSGDConfig(**{"rank": 2, "min_compression_rate": 0.1, **fields})
    engine = new_engine(config, Communicator(), lambda: SHAPES)
    hook, main = FakeStream(), machine.current
    # Frameworks keep gradients until the main stream has waited.
    given: list[dict[str, Tensor]] = []

    def step() -> None:
        given.append({name: torch.randn(shape) for name, shape in SHAPES.items()})
        hook.wait_stream(main)
        with machine.on(hook):
            engine.average(begin(engine, [*SHAPES], CPU, last=True), given[-1])

    for _ in range(3):
        step()
        engine.residuals.error(engine.step)
    state = save(engine)
    step()
    load(engine, lambda: (state, None))
    for _ in range(2):
        step()
        # What frameworks do after the backward pass.
        main.wait_stream(hook)
        given.clear()
    step()
    engine.residuals.forget_errors()
    step()
    saved = save(engine)
    load(engine, lambda: (saved, None))
    main.wait_stream(hook)
    assert machine.current is main


@pytest.mark.parametrize("name", ["standard", "alternating", "planned"])
def test_callers_may_use_any_streams(name: str):
    """An engine has its own, on the device of the gradients. Without it, the check finds what goes wrong."""
    with stream_machine() as machine:
        looks_between_steps(machine, **FIELDS[name])
    assert machine.races == []
    assert [(stream.device, stream.priority) for stream in machine.made] == [(CPU, -1)]
    with stream_machine(own=False) as machine:
        looks_between_steps(machine, **FIELDS[name])
    for what in ("freed", "reads", "writes"):
        assert any(what in race for race in machine.races), what


@pytest.mark.parametrize("name", ["standard", "alternating", "narrow, first exact"])
def test_a_compressor_waits_for_its_messages(name: str):
    """It has one bucket, whose averages are used when the call returns."""
    with stream_machine() as machine:
        compressor = Compressor(PowerSGDConfig(rank=2, min_compression_rate=0.1, **FIELDS[name]), SHAPES)
        compressor._engine.connect(Network(machine, seconds=1.0))
        for number in range(4):
            begun = machine.current.time
            assert all(average.sum().isfinite() for average in step(compressor, gradients(number, SHAPES)).values())
            assert machine.current.time > begun
            compressor.error()
        compressor.load_state_dict(compressor.state_dict())
        compressor.compress(gradients(4, SHAPES))
    assert machine.races == []
    # The check sees a message whose sum is used before it has arrived.
    with stream_machine() as machine, mock.patch("powersgd_triton.core.schedule.wait"):
        Training(machine).step(0, BUCKETS)
    assert machine.races


def timed(*, backward: float, message: float) -> tuple[float, Training]:
    """Return how long a step takes after the backward pass has begun, when everything has its memory."""
    with stream_machine() as machine:
        training = Training(machine, backward=backward, message=message)
        names = [[name] for name in "abcd"]
        training.step(0, names)
        (own,) = machine.made
        begin = machine.current.time = training.network.stream.time = own.time
        training.step(1, names)
        return own.time - begin, training


KERNELS = sum(TIMES.values())


@pytest.mark.parametrize("message", [300.0, 3000.0])
def test_messages_follow_each_other_without_a_gap(message: float):
    """On a slow link only the kernels of one bucket are visible: its first product, its second, and the end."""
    seconds, training = timed(backward=10.0, message=message)
    assert seconds <= 10 + 8 * message + KERNELS
    # One bucket after the other takes longer: the network waits for kernels.
    one_by_one = 4 * (2 * message + KERNELS)
    assert seconds < one_by_one - 2 * TIMES[PROJECT]
    starts = [start for _, start in training.network.sent]
    gaps = [later - start - message for start, later in itertools.pairwise(starts)]
    assert sum(gap > 0 for gap in gaps) <= 1
    # On a fast link no message of an earlier bucket is late, and only the last one is left after the backward pass.
    seconds, _ = timed(backward=3000.0, message=300.0)
    assert seconds == 4 * 3000 + 2 * 300 + KERNELS


@pytest.mark.parametrize("cuda", [True, False])
def test_collectives_are_in_one_order(cuda: bool):
    """P₀ P₁ Q₀ P₂ Q₁ …; on CUDA the last bucket's come after the message that was due before it."""
    with stream_machine() as machine, mock.patch("powersgd_triton.core.engine.has_streams", return_value=cuda):
        training = Training(machine)
        for number in range(2):
            training.step(number, [["a"], ["b"], ["c"], ["d"]])
        sent = [numel for numel, _ in training.network.sent]
    P, Q = zip(*((2 * n, 2 * m) for n, m in map(SHAPES.get, "abcd")), strict=True)  # type: ignore[misc]
    assert sent == [P[0], P[1], Q[0], P[2], Q[1], *([Q[2], P[3], Q[3]] if cuda else [P[3], Q[2], Q[3]])]
