"""What is reported of a step: energies, errors, bytes and times, by clocks and events that a test moves on."""

import copy
import itertools
import logging
import math
import pickle
import re
import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import PowerSGDConfig
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.core import clock
from powersgd_triton.core.clock import COMPUTE, EXCHANGE, PHASES, STEP
from powersgd_triton.core.telemetry import StepRecord, Telemetry
from powersgd_triton.handle import Handle
from powersgd_triton.integrations.ddp import PowerSGDState
from powersgd_triton.schemes import new_engine
from tests.support.checks import CPU, everything, gradients, same_bits
from tests.support.lockstep import Fleet

SHAPES: dict[str, tuple[int, ...]] = {"weight": (24, 20), "same": (24, 20), "thin": (30, 1), "bias": (7,)}


def handle(**fields: Any) -> Handle:
    """One process's engine, in which every step is one bucket."""
    return Handle(new_engine(everything(2, **fields), Communicator(), lambda: SHAPES))


def watched(every: int = 1, **fields: Any) -> tuple[Handle, list[StepRecord]]:
    """The same, with the records that it reports."""
    state, records = handle(**fields), list[StepRecord]()
    state.telemetry(records.append, every=every)
    return state, records


def step(state: Handle, given: dict[str, Tensor], applied: bool | None = None, **how: Any) -> None:
    """One step, which the engine ends with its last bucket, or the adapter if it says whether the step counts."""
    engine = state._engine
    layout = engine.begin("all", lambda: SHAPES, CPU, last=True if applied is None else None)
    if engine.compressing:
        engine.average(layout, {name: tensor.clone() for name, tensor in given.items()}, **how)
    else:
        engine.average_exactly(torch.cat([tensor.reshape(-1) for tensor in given.values()]))
    if applied is not None:
        engine.end_step(applied=applied)


def steps(state: Handle, numbers: Iterable[int]) -> None:
    for number in numbers:
        step(state, gradients(number, SHAPES))


def assert_errors(record: StepRecord, errors: dict[str, Tensor], rtol: float = 1e-4) -> None:
    for name, layer in record.layers.items():
        norm = float(torch.linalg.vector_norm(errors[name].double()))
        assert layer.error_norm == pytest.approx(norm, rel=rtol, abs=1e-5 * layer.gradient_norm), name


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"algorithm": "alternating", "iterations": 2}, {"iterations": 2}, {"warm_start": False},
        {"error_dtype": "bf16"},
    ],
    ids=str,
)  # fmt: skip
def test_norms_are_those_of_the_error(fields: dict[str, Any]):
    """Without the loss scale, which changes. One gradient is not finite, and the optimizer skips another step."""
    state, records = watched(**fields)
    scales: list[float] = []
    state.attach(lambda: scales.append(4.0 ** (len(scales) % 3)) or scales[-1])  # type: ignore[func-returns-value]
    rtol = 0.02 if "error_dtype" in fields else 1e-4
    for number in range(6):
        error, given = state.error(), gradients(number, SHAPES)
        if number == 2:
            given["weight"][3, 3] = math.nan
        scaled = {name: 4.0 ** (number % 3) * tensor for name, tensor in given.items()}
        step(state, scaled, applied=False if number == 4 else None)
        assert len(scales) == number + 1, "a loss scale is read once a step"
        assert len(records) == number, "the first step has no step before it, from whose end it could be timed"
        if number == 0:
            continue
        record = records[-1]
        assert (record.step, record.applied) == (number + 1, number not in (2, 4))
        assert ("(not applied)" in str(record)) is not record.applied
        assert record.layers.keys() == {"weight", "same", "thin"}
        assert_errors(record, state.error(), rtol)
        for name, layer in record.layers.items():
            # Errors do not keep the gradients of a step that is not finite.
            if number != 2:
                whole = float(torch.linalg.vector_norm(error[name].float() + given[name]))
                assert layer.gradient_norm == pytest.approx(whole, rel=rtol)
                assert layer.captured == pytest.approx(1 - (layer.error_norm / layer.gradient_norm) ** 2)
            assert layer.rank == min(2, SHAPES[name][1])
            assert 0 < layer.captured <= 1 if record.applied else layer.captured == 0


def test_steps_without_factors_that_are_not_finite():
    """Of quantized gradients, and of tensors that are averaged exactly."""
    for config in (PowerSGDConfig(quantize="int8"), PowerSGDConfig(rank=lambda *_: 0)):
        state, records = Handle(new_engine(config, Communicator(), lambda: SHAPES)), list[StepRecord]()
        state.telemetry(records.append, every=1)
        for number in range(3):
            given = gradients(number, SHAPES)
            given["weight"][3, 3] = math.nan if number == 1 else 0.0
            step(state, given)
        assert [record.applied for record in records] == [False, True], config


@pytest.mark.parametrize(("node_size", "wire"), [(1, None), (1, "int8"), (2, None), (2, "int4")])
def test_workers_report_their_own_numbers(node_size: int, wire: str | None):
    """Two of four workers measure, and the others do not hear of it. With one row, half of a node has none."""
    for shape, workers in (((24, 20), (0, 3)), ((1, 64), range(4))):
        shapes = {"weight": shape, "bias": (7,)}
        fleet = Fleet(PowerSGDConfig(rank=2, min_compression_rate=0.1, wire_dtype=wire), shapes, 4, node_size)
        records: dict[int, list[StepRecord]] = {worker: [] for worker in workers}
        for worker, found in records.items():
            engine = fleet.engines[worker]
            engine.listeners.append(Telemetry(engine, found.append, None, 1))
        for number in range(3):
            fleet.step([gradients(10 * number + worker, shapes) for worker in range(4)], [["weight"], ["bias"]])
        for worker, found in records.items():
            assert [(record.step, record.applied) for record in found] == [(2, True), (3, True)]
            # The last step subtracted what the owner of a part lost by rounding only after its sums.
            assert_errors(found[-1], fleet.errors()[worker])
        without = sum(not found[-1].layers for found in records.values())
        assert without == (2 if shape[0] < node_size else 0)


def test_only_every_nth_step_is_measured(monkeypatch: pytest.MonkeyPatch):
    state, records = watched(every=3)
    steps(state, range(9))
    assert [record.step for record in records] == [3, 6, 9]
    with monkeypatch.context() as patch:
        # Steps that are not reported read no clock and multiply nothing.
        patch.setattr(clock, "now", lambda _: pytest.fail("read the clock"))
        patch.setattr("powersgd_triton.core.telemetry._squares", lambda *_: pytest.fail("measured energies"))
        steps(state, [9])
    steps(state, [10])
    # The twelfth step would be measured now. It is not, since what it began with is replaced.
    state.load_state_dict(state.state_dict())
    steps(state, range(11, 15))
    assert [record.step for record in records[3:]] == [13, 15]
    state.telemetry(every=0)
    steps(state, range(4))
    assert len(records) == 5
    # The step after an interrupted one is.
    state, records = watched(every=4)
    engine = state._engine
    steps(state, range(3))
    bucket = engine.begin("all", lambda: SHAPES, CPU, last=True)
    with pytest.raises(ZeroDivisionError):
        engine.average(bucket, gradients(9, SHAPES), write=lambda _: 1 / 0)  # type: ignore[arg-type]
    steps(state, range(3, 5))
    assert_errors(records[-1], state.error())
    steps(state, [5])
    assert [record.step for record in records] == [5]


def test_what_fails_to_take_a_record_is_not_called_again_and_steps_go_on(caplog: pytest.LogCaptureFixture):
    """The other workers are in the same step: an exception on one would leave them waiting."""
    state, other, records = handle(), handle(), list[StepRecord]()

    def fails(record: StepRecord) -> None:
        records.append(record)
        raise OSError("the disk is full")

    writer = Writer()
    for arguments in ({"callback": fails, "writer": writer}, {"writer": types.SimpleNamespace(add_scalar=fails)}):
        state.telemetry(every=1, **arguments)
        steps(state, range(3))
        steps(other, range(3))
        assert same_bits(state.error(), other.error())
    assert len(records) == 1
    assert {at for _, at in writer.scalars} == {2, 3}
    failed = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.exc_info and record.exc_info[0] for record in failed] == [OSError, TypeError]


class Writer:
    """Keeps what a SummaryWriter would write."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag, step] = value

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a file cannot be copied")


def test_a_callback_a_writer_and_the_logger_get_the_same_record(caplog: pytest.LogCaptureFixture):
    writer, records, state = Writer(), list[StepRecord](), handle(start_iter=2)
    state.telemetry(records.append, writer=writer, every=2)
    with caplog.at_level(logging.INFO, "powersgd_triton"):
        steps(state, range(4))
    exact, record = records
    # Exact steps send all bytes and have no layers.
    assert exact.bytes == sum(4 * math.prod(shape) for shape in SHAPES.values())
    assert (exact.captured, exact.layers) == (0, {})
    assert record.bytes == state.report().bytes_per_step < exact.bytes
    expected = {"bytes": record.bytes, "captured": record.captured}
    expected |= {f"milliseconds/{phase}": record.milliseconds[phase] for phase in (*PHASES, STEP)}
    for name, layer in record.layers.items():
        expected |= {f"layers/{name}/captured": layer.captured, f"layers/{name}/error_norm": layer.error_norm}
    got = {tag: value for (tag, at), value in writer.scalars.items() if at == 4}
    assert got == {f"powersgd/{name}": value for name, value in expected.items()}
    first, second = [message for message in caplog.messages if message.startswith("PowerSGD step")]
    assert "captured" not in first
    assert re.fullmatch("PowerSGD step 4: captured .*", second)


def test_bad_arguments_change_nothing_and_copies_are_without_telemetry():
    state, records = watched()
    for arguments, error, match in (
        ({"callback": 3}, TypeError, "callback must be a function of a StepRecord; got int"),
        ({"writer": "runs"}, TypeError, "writer must have add_scalar, as a SummaryWriter has; got str"),
        ({"every": -1}, ValueError, "every must be at least 0; got -1"),
        ({"every": 1.5}, TypeError, "every must be an int"),
    ):
        with pytest.raises(error, match=match):
            state.telemetry(**arguments)
    steps(state, range(2))
    assert len(records) == 1
    # Copies and saved states are without telemetry.
    told = PowerSGDState(None, matrix_approximation_rank=2)
    told.telemetry(writer=Writer())
    for other in (copy.deepcopy(told), pickle.loads(pickle.dumps(told))):
        assert other._engine.listeners == []
    assert "telemetry" not in str(told.state_dict())


def test_waiting_is_exchange_and_the_backward_pass_is_no_phase(monkeypatch: pytest.MonkeyPatch):
    """The clock moves on by a millisecond when it is read, and further while the program sleeps."""
    ticks, slept = itertools.count(1), list[float]()
    time = types.SimpleNamespace(perf_counter=lambda: (next(ticks) + sum(slept)) / 1000)
    monkeypatch.setattr("powersgd_triton.core.clock.time", time)
    # A collective for which one has to wait.
    monkeypatch.setattr(Communicator, "all_reduce", lambda *_: lambda: slept.append(100))
    state, records = watched()
    engine = state._engine
    for number in range(2):
        for name in ("weight", "same"):
            layout = engine.begin(name, lambda name=name: {name: SHAPES[name]}, CPU, last=name == "same")  # type: ignore[misc]
            engine.average(layout, {name: gradients(number, SHAPES)[name]})
            # More of the backward pass, while the first bucket is under way.
            slept.append(1000)
    (record,) = records
    found = record.milliseconds
    assert found.keys() == {*PHASES, STEP}
    # Two sums of each bucket, and a reading whenever a bucket goes on.
    assert found[EXCHANGE] == pytest.approx(4 * 100 + 6)
    assert all(0 < found[phase] < 20 for phase in COMPUTE)
    assert record.compute == pytest.approx(sum(found[phase] for phase in COMPUTE))
    # The step begins at the end of the first one, before a pause. What is between the turns of the buckets is in no
    # phase: two pauses, and nine readings of the clock.
    assert found[STEP] == pytest.approx(sum(found[phase] for phase in PHASES) + 2000 + 9)


class FakeEvent:
    """A CUDA event, which the device reaches when the test says so."""

    made = reached = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.made += 1
        self.number = FakeEvent.made

    def query(self) -> bool:
        return self.number <= FakeEvent.reached

    def synchronize(self) -> None:
        assert self.query()

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.query()
        return float(end.number - self.number)


def test_a_record_comes_when_the_device_has_reached_its_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(clock, "has_streams", lambda _: True)
    FakeEvent.made = FakeEvent.reached = 0
    state, records = watched(every=2)
    steps(state, range(4))
    assert records == []
    made, FakeEvent.reached = FakeEvent.made, FakeEvent.made // 2
    steps(state, [4])
    assert [record.step for record in records] == [2]
    FakeEvent.reached = made
    steps(state, [5])
    assert [record.step for record in records] == [2, 4]
    for record in records:
        # One unit between two events.
        assert record.milliseconds["commit"] == record.milliseconds["telemetry"] == 1
        assert record.milliseconds[STEP] == made // 2 - 1
