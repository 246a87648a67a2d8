"""A scheme needs a file of its own and nothing else: the one that docs/architecture.md adds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.loading import load, save
from powersgd_triton.ops.step import LossScale
from tests.support.checks import gradients
from tests.support.distributed import on_workers
from tests.support.programs import ROOT

SHAPES = {"weight": (24, 20), "bias": (7,), "other": (16, 12)}
CPU = torch.device("cpu")


def scheme() -> Any:
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["Sign"]()


@pytest.mark.parametrize("scaled", [False, True])
@on_workers(1, 2, 3)
def test_nothing_is_lost(worker: int, world_size: int, scaled: bool) -> None:
    """Over steps of two buckets, with a gradient that is not finite, and a saved state."""
    communicator = Communicator()
    engine = Engine(scheme(), PowerSGDConfig(rank=1), communicator, lambda: SHAPES)
    scale = 1.0
    if scaled:
        engine.step.loss_scale = LossScale(lambda: scale)
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    applied = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(8):
        scale = 2.0**step if scaled else 1.0
        values = gradients(10 * step + worker, SHAPES)
        for names in (["weight", "bias"], ["other"]):
            own = {name: values[name] * scale for name in names}
            if step == 3 and worker == 0 and "other" in own:
                own["other"][0, 0] = torch.inf
            bucket = engine.begin(names[0], lambda: {n: SHAPES[n] for n in names}, CPU)  # noqa: B023
            engine.average(bucket, own)
            if step != 3:
                for name, average in own.items():
                    applied[name] += average / scale
                    given[name] += values[name]
                    assert torch.equal(average, communicator.gather(average)[0])
        engine.end_step()
        if step == 5:
            saved = save(engine)
            load(engine, lambda: (saved, None))  # noqa: B023
    errors = engine.residuals.error(engine.step)
    for name, shape in SHAPES.items():
        left = communicator.mean(errors[name].view(shape).clone())
        mean = communicator.mean(given[name])
        assert torch.allclose(applied[name] + left, mean, atol=1e-4), name
