"""Errors of tensors that are sent whole: one copy of them between steps, and the one that the verdict asks for."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from powersgd_triton import Compressor
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core import whole
from powersgd_triton.ops.step import LossScale
from powersgd_triton.schemes import new_engine
from tests.support.checks import gradients, live_bytes
from tests.support.distributed import on_workers

INT4 = PowerSGDConfig(quantize="int4")
SHAPES = {"weight": (240, 200), "bias": (70,), "other": (160, 120)}
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
CPU = torch.device("cpu")
WHOLE, HALVES = (["weight", "bias", "other"],), (["weight", "bias"], ["other"])


@pytest.mark.parametrize("on_host", [True, False])
@on_workers(2)
def test_errors_take_four_bytes_and_lose_nothing(worker: int, world_size: int, on_host: bool) -> None:
    """Over steps with a scale, with other buckets from the second one on, one that is not finite, and one that fails.

    Also if the host does not read verdicts, as on a GPU.
    """
    communicator, scale = Communicator(), 1.0
    engine = new_engine(INT4, communicator, lambda: SHAPES)
    engine.step.loss_scale = LossScale(lambda: scale)
    balance = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    before = live_bytes()
    with mock.patch.object(whole, "on_host", return_value=on_host):
        for step in range(7):
            scale, given = 3.0**step, gradients(10 * step + worker, SHAPES)
            for names in WHOLE if step == 0 else HALVES:
                own = {name: given[name] * scale for name in names}
                if step == 3 and worker == 0 and "other" in own:
                    own["other"][0, 0] = torch.inf
                bucket = engine.begin(tuple(names), lambda: {n: SHAPES[n] for n in names}, CPU)  # noqa: B023
                engine.average(bucket, own)
                if step == 5:
                    engine.void()
                    break
                if step != 3:
                    for name in names:
                        balance[name] += given[name].double() - own[name].double() / scale
            engine.end_step()
            del given, own, bucket
            # The rest is what decides about 1024 steps. The memory of messages and of the old errors stays on the CPU.
            messages = 1.6 * NUMEL * (1 if step == 0 else 2)
            assert live_bytes() - before - messages <= (2.5 if on_host else 1.5) * 4 * NUMEL, step
    for name, error in engine.residuals.error(engine.step).items():
        left = communicator.mean(error.double()).view(SHAPES[name])
        # Five steps that count, of elements of size 1, in fp32.
        lost = (left - communicator.mean(balance[name])).square().mean().sqrt()
        assert lost <= 5 * 2**-23, (name, lost)


@pytest.mark.parametrize("on_host", [True, False])
@on_workers(2)
def test_errors_stay_if_an_average_does_not_fit(worker: int, world_size: int, on_host: bool) -> None:
    """With a loss scale, ``decompress`` decides about the step. Without it, the next step or a look at the errors."""
    compressor = Compressor(INT4, SHAPES)
    compressor.attach(lambda: 1.0)
    with mock.patch.object(whole, "on_host", return_value=on_host):
        compressor.compress(gradients(worker, SHAPES))
        before = compressor.error()
        assert before["weight"].any()
        large = {name: 1e5 * tensor for name, tensor in gradients(worker, SHAPES).items()}
        narrow = {name: torch.empty(shape, dtype=torch.float16) for name, shape in SHAPES.items()}
        compressed = compressor.compress(large)
        compressor.decompress(compressed, out=narrow)
        assert not compressed.verdict
        assert all(torch.equal(error, before[name]) for name, error in compressor.error().items())
        compressor.compress(large)
        compressor.decompress(compressor.compress(large))
        assert not torch.equal(compressor.error()["weight"], before["weight"])


def test_errors_take_turns_in_two_memories() -> None:
    """On the CPU, where new memory takes longer than a step."""
    engine = new_engine(INT4, Communicator(), lambda: SHAPES)
    errors: list[torch.Tensor] = []
    for _ in range(5):
        bucket = engine.begin(0, lambda: SHAPES, CPU, last=True)
        engine.average(bucket, gradients(0, SHAPES))
        errors += engine.residuals.whole._flat.values()
    assert len({E.data_ptr() for E in errors}) == 2
