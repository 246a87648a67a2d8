"""When a step begins, ends, is void and waits for further buckets, whatever adapter drives the engine."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.exchange import waits
from powersgd_triton.core import buckets
from powersgd_triton.core.buckets import BucketState, Part
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.loading import forget, load, save
from powersgd_triton.core.schedule import Schedule
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.matrices import sizes
from powersgd_triton.ops.step import LossScale
from powersgd_triton.schemes import new_engine
from tests.support.checks import CPU, MODES, everything, same_bits, step, trained
from tests.support.checks import gradients as random_gradients
from tests.support.exchanges import latency_decides

SHAPES = dict.fromkeys("abc", (12, 10))


def engine_for(**fields: Any) -> Engine:
    """One process's engine, which gets each tensor in a bucket of its own."""
    return new_engine(everything(2, **fields), Communicator(), lambda: SHAPES)


def give(engine: Engine, name: str, seed: int, value: float | None = None, **how: Any) -> list[str]:
    """One bucket; the names of the tensors that were written, which may happen later."""
    written: list[str] = []
    gradients = random_gradients(seed, {name: SHAPES[name]})
    if value is not None:
        gradients[name][0, 0] = value

    bucket = engine.begin(name, lambda: {name: SHAPES[name]}, CPU, **how)
    engine.average(bucket, gradients, done=lambda: written.append(name), join=True)
    return written


def test_a_first_bucket_voids_an_interrupted_step_though_its_tensors_are_others():
    """DDP may be wrapped anew after an exception, with the parameters in other buckets."""
    engine = engine_for()
    give(engine, "a", 0, keys=(0,), last=False)
    written = [give(engine, name, 1, keys=(index,), last=name == "c") for index, name in enumerate("bac")]
    assert written == [["b"], ["a"], ["c"]], "a bucket of the new step was dropped"
    assert engine.step.iteration == 1


@pytest.mark.parametrize("waits", [False, True], ids=["sent", "waits"])
@pytest.mark.parametrize("fields", [{}, {"error_feedback": False}], ids=str)
def test_a_loaded_state_drops_what_is_under_way(fields: dict[str, Any], waits: bool, monkeypatch: pytest.MonkeyPatch):
    """Also a bucket that waits for the next ones. So does a new start."""
    monkeypatch.setattr("powersgd_triton.core.buckets.waits", lambda *_: waits)

    def steps(engine: Engine) -> list[Tensor]:
        # The first bucket is another one than that which is under way, so that it does not begin a step by itself.
        for seed in range(3, 6):
            for name in "bca":
                give(engine, name, seed, keys=(name,), last=name == "a")
        bases = [basis for matrix in engine.residuals.matrices.values() for basis in matrix.bases.values()]
        return [*engine.residuals.error(engine.step).values(), *bases]

    interrupted = engine_for(**fields)
    for name in "abc":
        give(interrupted, name, 1, keys=(name,), last=name == "c")
    saved = save(interrupted)
    stale = give(interrupted, "a", 2, torch.nan, keys=("a",), last=False)
    load(interrupted, lambda: (saved, None))
    fresh = engine_for(**fields)
    load(fresh, lambda: (saved, None))
    torch.testing.assert_close(steps(interrupted), steps(fresh), rtol=0, atol=0)
    assert stale == [], "an abandoned bucket was written"
    abandoned = give(fresh, "a", 2, torch.nan, keys=("a",), last=False)
    forget(fresh)
    assert not any(error.any() for error in fresh.residuals.error(fresh.step).values())
    assert all(tensor.isfinite().all() for tensor in steps(fresh))
    assert abandoned == []


def test_a_state_of_an_interrupted_first_step_knows_all_tensors():
    """It has no matrices of tensors to which the step has not come. They begin with their next gradients."""
    interrupted, fresh, ended = engine_for(), engine_for(), engine_for()
    give(interrupted, "a", 1, last=False)
    interrupted.void()
    saved = save(interrupted)
    assert load(fresh, lambda: (saved, sizes(SHAPES, fresh.config))).loaded == ("a",)
    for engine in (interrupted, fresh):
        for name in "abc":
            give(engine, name, 2, last=name == "c")
    assert same_bits(fresh.residuals.error(fresh.step), interrupted.residuals.error(interrupted.step))
    # Of a model with one tensor.
    give(ended, "a", 1, last=True)
    alone = {**save(ended), "tensors": {"a": [12, 10, 2]}}
    del alone["fingerprint"]
    with pytest.raises(ValueError, match="missing from it: 'b', 'c'"):
        load(fresh, lambda: (alone, sizes(SHAPES, fresh.config)))


@pytest.mark.parametrize("start_iter", [0, 10])
def test_a_step_that_is_not_applied_stays_in_the_error(start_iter: int):
    """Also where an adapter compresses before the engine has counted ``start_iter`` steps, as DeepSpeed's may."""
    engine = engine_for(start_iter=start_iter)
    give(engine, "a", 0)
    engine.end_step(applied=False)
    assert same_bits(engine.residuals.error(engine.step), random_gradients(0, {"a": SHAPES["a"]}))


def test_a_unit_begins_a_step_though_other_tensors_of_it_are_trained():
    """FSDP2 may freeze one parameter of a unit and unfreeze another one."""
    engine = engine_for()
    scale = 1.0
    engine.step.loss_scale = LossScale(lambda: scale)
    give(engine, "a", 0, keys=("unit",))
    assert engine.step.iteration == 0
    scale = 2.0
    give(engine, "b", 1, keys=("unit",))
    assert engine.step.iteration == 1
    bucket = engine.residuals.matrices["b"].bucket
    assert bucket.scale is not None
    assert float(bucket.scale) == 2.0


def test_checks_are_counted_anew_with_other_workers(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []

    def together(call: str, act: Callable[[], tuple[Any, Any, Any]], *_: Any) -> Any:
        calls.append(call)
        return act()[0]

    monkeypatch.setattr(buckets, "together", together)
    new = ["a step", "the allocation for a bucket"]
    engine = engine_for(check_every=2)
    for number in range(3):
        give(engine, "a", number, last=True)
    assert calls == [*new, "a check"]
    engine.connect(Communicator())
    give(engine, "a", 0, last=True)
    assert calls == [*new, "a check", *new]
    give(engine, "a", 1, last=True)
    assert calls == [*new, "a check"] * 2


def test_alternating_sends_one_message_and_standard_two():
    for name, count in {"standard": 2, "twice": 4, "alternating": 1, "alternating twice": 2}.items():
        compressor, sent = trained(0, **MODES[name]), list[int]()
        with mock.patch.object(Communicator, "all_reduce", lambda _, tensor: sent.append(tensor.numel())):  # noqa: B023
            for index in range(1, 5):
                step(compressor, random_gradients(index))
                assert len(sent) == index * count
                # The statistics are what was sent.
                assert compressor.compression_stats()[2] == sum(sent)


# Buckets that wait for the next ones, since their messages are small -----------------------------------------------


def test_a_tensor_is_in_one_bucket_at_a_time():
    """Else a bucket that comes again would go on from what it has sent long ago."""
    engine, totals = engine_for(), {name: torch.zeros(SHAPES[name]) for name in "ab"}
    for number, buckets_ in enumerate([["a", "b"], ["ab"]] * 3):
        for names in buckets_:
            shapes = {name: SHAPES[name] for name in names}
            given = random_gradients(number, shapes)
            averages = {name: gradient.clone() for name, gradient in given.items()}
            engine.average(engine.begin(names, shapes.copy, CPU), averages)
            for name in names:
                totals[name] += given[name] - averages[name]
        engine.end_step()
    for name, error in engine.residuals.error(engine.step).items():
        assert torch.allclose(error, totals[name], atol=1e-4)


def test_buckets_are_joined_until_they_are_large_and_that_stays(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def waits(layout: Layout, *_: object) -> bool:
        asked.append(layout.numel)
        return len(layout.segments) < 2

    monkeypatch.setattr("powersgd_triton.core.buckets.waits", waits)
    engine, schedule = new_engine(everything(8), Communicator(), lambda: SHAPES), Schedule()
    joined = []
    for _ in range(2):
        lists: list[list[Part]] = []
        for name in "ab":
            bucket = engine.buckets.find(name, functools.partial(dict, {name: SHAPES[name]}), CPU)
            lists += schedule.ready(Part(bucket, {name: torch.zeros(12, 10)}), engine.buckets.are_large)
        assert [[*part.gradients] for part in lists[0]] == [["a"], ["b"]]
        joined.append(engine.buckets.join([part.bucket for part in lists[0]]))
    assert joined[0] is joined[1]
    assert [segment.name for segment in joined[0].layout.segments] == ["a", "b"]
    assert asked == [120, 240], "the decision of the first step stays"


def test_small_messages_wait():
    """Each matrix adds 8 kB to a message, which is small below 32 kB, and below 4 kB a worker."""
    config, cases = everything(8), ((3, 2, True), (4, 2, False), (4, 8, False), (31, 64, True), (32, 64, False))
    with latency_decides():
        for matrices, workers, expected in cases:
            layout = Layout.build({str(number): (256, 256) for number in range(matrices)}, config)
            assert waits(layout, config, workers) == expected, (matrices, workers)
        assert not waits(layout, config, 1)


@pytest.mark.parametrize(("dtype", "device"), [(torch.bfloat16, "cpu"), (torch.float32, "meta")])
def test_only_buckets_of_one_dtype_and_device_are_joined(dtype: torch.dtype, device: str):
    schedule, layout = Schedule(), Layout.build({"a": (12, 10)}, everything(8))
    tensors = torch.zeros(12, 10), torch.zeros(12, 10, dtype=dtype, device=device)
    first, second = (Part(BucketState(layout), {"a": tensor}) for tensor in tensors)
    third = second._replace(bucket=first.bucket)
    assert schedule.ready(first, lambda _: False) == []
    assert schedule.ready(second, lambda _: False) == [[first]]
    assert schedule.ready(third, None) == [[second, third]]
