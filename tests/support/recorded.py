"""One process's engine in which every step is one bucket, and the records that it reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.core.telemetry import StepRecord
from powersgd_triton.handle import Handle
from powersgd_triton.schemes import new_engine
from tests.support.checks import everything, gradients

CPU = torch.device("cpu")
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
