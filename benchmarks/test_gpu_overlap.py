"""A step of several buckets whose messages take long: overlapped with later buckets, or one bucket after the other.

Messages and the backward pass are kernels that only wait, so one GPU is enough. Averages are compared too.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.buckets import ddp_buckets
from benchmarks.results_file import Results, Row
from benchmarks.shapes import GRADIENT_SETS
from benchmarks.timing import Clock, Sleep
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.planning.models import Shapes
from powersgd_triton.planning.trial import StandIn
from powersgd_triton.schemes import new_engine

pytestmark = pytest.mark.gpu

RANK = 4


class Late(StandIn):
    """Collectives of one process that stands for two, in order on a stream of their own. Each takes a time."""

    def __init__(self, sleep: Sleep) -> None:
        super().__init__()
        self._sleep, self._stream = sleep, torch.cuda.Stream() if sleep.device.type == "cuda" else None
        self.milliseconds = 0.0

    def all_reduce(self, tensor: Tensor) -> Any:
        if self._stream is None:
            tensor.mul_(2)
            return None
        done = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._sleep(self.milliseconds)
            tensor.mul_(2)
            done.record()
        return done.wait


class Training:
    """Steps of DDP's buckets without DDP.

    Args:
        buckets: Shapes of each bucket's gradients.
        device: Where they are.
        overlapping: Whether the engine is told which bucket is the last one. Else it finishes each bucket.
    """

    def __init__(self, buckets: list[Shapes], device: torch.device, *, overlapping: bool) -> None:
        self._sleep, self._device, self._overlapping = Sleep(device), device, overlapping
        self.network = Late(self._sleep)
        self._shapes = [
            {f"{number}.{index}": shape for index, shape in enumerate(bucket)} for number, bucket in enumerate(buckets)
        ]
        generator = torch.Generator(device).manual_seed(0)
        self._fresh = [
            {name: torch.randn(shape, generator=generator, device=device) for name, shape in bucket.items()}
            for bucket in self._shapes
        ]
        self.gradients = [{name: tensor.clone() for name, tensor in bucket.items()} for bucket in self._fresh]
        names = {name: shape for bucket in self._shapes for name, shape in bucket.items()}
        self._engine = new_engine(PowerSGDConfig(rank=RANK), self.network, lambda: names, device)
        self.backward = 0.0

    @property
    def buckets(self) -> int:
        return len(self._shapes)

    def refill(self) -> None:
        for bucket, fresh in zip(self.gradients, self._fresh, strict=True):
            for name, gradient in bucket.items():
                gradient.copy_(fresh[name])

    def step(self) -> None:
        engine = self._engine
        for number, (shapes, bucket) in enumerate(zip(self._shapes, self.gradients, strict=True)):
            self._sleep(self.backward)
            last = number == self.buckets - 1 if self._overlapping else None
            layout = engine.begin(number, lambda shapes=shapes: shapes, self._device, last=last)  # type: ignore[misc]
            # The backward pass does not wait for the averages, as with DDP.
            with engine.residuals.streams.on(self._device, join=False):
                engine.average(layout, bucket)
        engine.finish()
        # The optimizer does.
        with engine.residuals.streams.everywhere():
            pass


@pytest.mark.parametrize(("backward", "message"), [(0.0, 0.1), (0.0, 1.0), (2.0, 0.5)], ids=lambda ms: f"{ms}ms")
def test_overlap(backward: float, message: float, clock: Clock, results: Results, pytestconfig: pytest.Config) -> None:
    gradients = "tiny" if pytestconfig.option.dry else "gpt2-124M"
    shapes = GRADIENT_SETS[gradients]
    buckets = [[shape] for shape in shapes] if pytestconfig.option.dry else ddp_buckets(shapes)
    averages = []
    for provider in ("one by one", "overlapped"):
        training = Training(buckets, clock.device, overlapping=provider == "overlapped")
        for _ in range(2):
            training.refill()
            training.step()
        averages.append([gradient.clone() for bucket in training.gradients for gradient in bucket.values()])
        training.backward, training.network.milliseconds = backward, message
        timing = clock.measure(training.step, training.refill)
        row: Row = {"kind": "overlap", "provider": provider, "gradients": gradients, "rank": RANK, "dtype": "fp32"}
        row |= {"buckets": training.buckets, "backward_ms": backward, "message_ms": message}
        # What the backward pass and a network that is never idle would take.
        row["least_ms"] = max(training.buckets * backward + 2 * message, 2 * training.buckets * message)
        results.add({**row, "device_ms": timing.median, "device_iqr_ms": timing.iqr, "rounds": timing.rounds})
        del training
    # The time of another result is worth nothing.
    assert all(torch.equal(one, other) for one, other in zip(*averages, strict=True))
