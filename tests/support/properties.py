"""What holds for every wrapper: properties as functions of a worker, with their assertions. See ``wrappers.py``."""

import contextlib
import dataclasses
import io
import math
from pathlib import Path

import torch
import torch.distributed as dist

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.core.telemetry import StepRecord
from powersgd_triton.layout.matrices import compressed_rank
from tests.support.balance import (
    EIGHT_BITS,
    Ledger,
    batches,
    build,
    check_close,
    check_errors,
    check_same,
    exact_mean,
    iteration,
    train,
)
from tests.support.exchanges import Watch
from tests.support.sharded_training import FULL_RANK, RANK_2, batch
from tests.support.training import LIMIT, complaint, flat, relative
from tests.support.ways import WAYS
from tests.support.wrapper_table import FORMATS, WRAPPERS


def full_rank(worker: int, world_size: int, *, wrapper: str, way: str = "plain") -> None:
    """At full rank a step is the framework's own."""
    how = WAYS[way]
    models = []
    for config in (None, FULL_RANK):
        net = WRAPPERS[wrapper].net()
        how.prepare(net)
        models.append(WRAPPERS[wrapper].make(net, config, **how.options.get(wrapper.split()[0], {})))
        how.after(models[-1].module)
    alone, ours = models
    start = alone.parameters()
    for step in range(3):
        for model in models:
            model.net.use = not how.unused or step % 2 == 0
            model.step(batches(model, step, how.micro), **how.step)
    check_close(ours.parameters(), alone.parameters(), start, how.limit)
    check_same(ours.parameters().values())


def exact_first(worker: int, world_size: int, *, wrapper: str) -> None:
    """The first ``start_iter`` steps are the framework's own, and owe nothing. The next one is compressed."""
    alone, ours = build(wrapper, None), build(wrapper, dataclasses.replace(RANK_2, start_iter=2))
    start = alone.parameters()
    train(range(2), alone, ours)
    check_close(ours.parameters(), alone.parameters(), start)
    assert not any(error.any() for error in ours.mean_error().values())
    ledger = Ledger(ours)
    ledger.train([2])
    ledger.check()


def conservation(worker: int, world_size: int, *, wrapper: str, form: str = "fp32") -> None:
    """Nothing is lost: what is not applied is owed. All workers hold the same bits."""
    model = build(wrapper, FORMATS[form])
    ledger = Ledger(model)
    ledger.train(range(3))
    if FORMATS[form].quantize is not None:
        whole = model.state._engine.residuals.whole
        held = [errors for held in whole._flat for errors in (held.E, held.M) if errors is not None]
        assert model.state.report().error_bytes == sum(errors.nbytes for errors in held)
    ledger.check(rounds=FORMATS[form].bypass is not None)
    assert iteration(model) == 3
    if wrapper.endswith("in nodes"):
        assert model.state._engine.communicator.inside is not None, "sums did not take two levels"


def stateless(worker: int, world_size: int, *, wrapper: str, folder: str) -> None:
    """Averages in 8 bits keep nothing on a worker, are the same on all, and are repeated by a run that goes on."""
    path = f"{folder}/{wrapper} without errors"
    Path(path).mkdir(exist_ok=True)
    alone, ours = build(wrapper, None), build(wrapper, PowerSGDConfig(quantize="int8"))
    start = alone.parameters()
    train(range(2), alone, ours)
    check_close(ours.parameters(), alone.parameters(), start, EIGHT_BITS)
    residuals = ours.state._engine.residuals
    assert not any((ours.mean_error(), residuals.matrices, residuals.pending))
    ours.save(path)
    # DDP's first step has other buckets than the later ones, so that two runs go on.
    others = [build(wrapper, PowerSGDConfig(quantize="int8"), ours.parameters()) for _ in range(2)]
    for model in others:
        model.load(path)
    train([2], *others)
    first, second = (model.parameters() for model in others)
    check_same([*first.values()])
    assert all(torch.equal(second[name], parameter) for name, parameter in first.items())


def traffic(worker: int, world_size: int, *, wrapper: str) -> None:
    """What is all-reduced are the factors and the tensors that are not compressed, as the statistics count them."""
    model = build(wrapper, RANK_2)
    shards = WRAPPERS[wrapper].shards
    expected = 0
    for parameter in model.parameters().values():
        rows, columns = -(-parameter.shape[0] // shards), parameter.numel() // parameter.shape[0]
        rank = compressed_rank((rows, *parameter.shape[1:]), model.state.config)
        expected += (rows + columns) * rank if rank else rows * columns
    with Watch() as watch:
        train(range(2), model)
    # A single element is a verdict.
    found = sum(count for count in watch.reduced if count > 1)
    assert found == model.state.compression_stats()[2] == 2 * expected, (found, 2 * expected)


def void(worker: int, world_size: int, *, wrapper: str) -> None:
    """A step with a gradient that is not finite on one worker is skipped on all, and carried whole or not at all."""
    model = build(wrapper, RANK_2)
    train(range(2), model)
    before, owed = model.parameters(), model.mean_error()
    if worker == world_size - 1:
        model.net.inject = lambda G: G.flatten().index_fill(0, torch.tensor(0), torch.inf).view_as(G)
    given = exact_mean(model, batches(model, 2))
    model.step(batches(model, 2))
    model.net.inject = None
    after = model.mean_error()
    assert all(torch.equal(now, before[name]) for name, now in model.parameters().items()), "the step was applied"
    for name, error in after.items():
        gradient = given[name].view(error.shape)
        assert error.isfinite().all(), name
        # Each shard for itself, which has whole rows.
        kept, carried = (error - owed[name]).norm(dim=1), (error - owed[name] - gradient).norm(dim=1)
        # An error may be rounding alone.
        allowed = LIMIT * (owed[name].norm() + gradient.norm())
        assert (torch.minimum(kept, carried) <= allowed).all(), f"{name}: {kept}, {carried}"
        if name == "tokens.weight":
            # What was spoiled is not carried, not even what is finite of it.
            token = int(batch(world_size - 1, 2)[0][0, 0])
            assert kept[token] <= allowed < carried[token]
    ledger = Ledger(model)
    ledger.train(range(3, 5))
    ledger.check()


def resume(worker: int, world_size: int, *, wrapper: str, folder: str, form: str = "fp32") -> None:
    """A run that is saved goes on as if it had not been interrupted. ``taken_over`` reads what is left behind."""
    path = f"{folder}/{wrapper}"
    Path(path).mkdir(exist_ok=True)
    model = build(wrapper, FORMATS[form])
    train(range(3), model)
    start, error = model.parameters(), model.mean_error()
    model.save(path)
    if worker == 0:
        torch.save({"parameters": start, "error": error}, f"{path}/expected")
    dist.barrier()
    other, forgetful = build(wrapper, FORMATS[form], start), build(wrapper, FORMATS[form], start)
    other.load(path)
    check_errors(other, error)
    train(range(3, 5), model, other, forgetful)
    check_close(other.parameters(), model.parameters(), start)
    moved = [flat(one.parameters()) - flat(start) for one in (forgetful, model)]
    assert relative(*moved) > 1e-3, "the state makes no difference"
    assert iteration(other) == iteration(model) == 5


def taken_over(worker: int, world_size: int, *, wrapper: str, folder: str, source: str = "") -> None:
    """Another number of workers, or another wrapper, goes on from what ``resume`` has saved, and loses nothing."""
    path = f"{folder}/{source or wrapper}"
    expected = torch.load(f"{path}/expected")
    model = build(wrapper, RANK_2, expected["parameters"])
    model.load(path)
    # Where a matrix is split differently it may not be compressed, and its error is added to its next gradient.
    found = model.mean_error()
    assert found
    check_errors(model, {name: expected["error"][name] for name in found})
    ledger = Ledger(model)
    ledger.owed = expected["error"]
    ledger.train(range(3, 5))
    ledger.check()
    assert iteration(model) == 5


def damaged(worker: int, world_size: int, *, wrapper: str) -> None:
    """A state that one worker refuses is refused by all, and none has changed. So are states that differ."""
    models = [build(wrapper, FORMATS["alternating"]) for _ in range(2)]
    train(range(2), *models)
    ours, untouched = models
    saved = ours.state.state_dict()
    train([2], *models)
    for value, expected in ((-1, "ValueError"), (7, "DisagreementError")):
        said = complaint(ours.state.load_state_dict, {**saved, "iteration": value} if worker == 1 else saved)
        assert said.startswith(expected), said
        assert "worker 1" in said or (worker, value) == (1, -1), said
    train([3], *models)
    changed = ours.parameters()
    assert all(torch.equal(changed[name], parameter) for name, parameter in untouched.parameters().items())
    assert iteration(ours) == 4


COMPRESSION = 3
BUDGET = PowerSGDConfig(compression=COMPRESSION, min_compression_rate=1, replan_every=2, wire_dtype="int8")
TOO_SMALL = PowerSGDConfig(bytes_per_step=10, min_compression_rate=1)


def budget(worker: int, world_size: int, *, wrapper: str, folder: str) -> None:
    """A step sends what the budget allows; ranks move, are the same on all workers, and are saved."""
    path = f"{folder}/budget of {wrapper}"
    Path(path).mkdir(exist_ok=True)
    model, shards = build(wrapper, BUDGET), WRAPPERS[wrapper].shards
    start = {tensor.name: tensor.rank for tensor in model.state.report().tensors}
    train(range(4), model)
    report = model.state.report()
    numel = sum(-(-p.shape[0] // shards) * p.numel() // p.shape[0] for p in model.parameters().values())
    allowed = 4 * numel / COMPRESSION
    # Elements are counted in whole ones, bucket by bucket.
    assert model.state.compression_stats()[2] <= allowed + 8
    assert report.bytes_per_step <= allowed < 2 * report.bytes_per_step, (report.bytes_per_step, allowed)
    moved = {tensor.name: tensor.rank for tensor in report.tensors}
    assert start.keys() == moved.keys()
    assert start != moved, "no rank has moved"
    shares = [tensor.energy_sent for tensor in report.tensors if tensor.rank]
    assert shares
    assert all(share is not None and 0 < share <= 1 + LIMIT for share in shares), shares
    check_same(model.parameters().values())
    model.save(path)
    other = build(wrapper, BUDGET)
    other.load(path)
    assert other.state.report().tensors == report.tensors


def attached(worker: int, world_size: int, *, wrapper: str) -> None:
    """One line says that compression is on. A wrong configuration is refused by all, and changes nothing."""
    model = build(wrapper, None)
    said = complaint(attach, model.module, TOO_SMALL if worker == 1 else RANK_2)
    assert "bytes_per_step" in said, said
    assert "at rank 1 this model sends" in said, said
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        state = attach(model.module, FULL_RANK)
    compression = state.report().compression / (2 if state.replaces_reduce_scatter else 1)
    change = f"{compression:.1f}x fewer" if compression >= 1 else f"{1 / compression:.1f}x more"
    if worker == 0:
        assert output.getvalue().startswith("powersgd: on, rank 999; in a step each worker sends "), output.getvalue()
        assert output.getvalue().endswith(f"in fp32 ({change})\n"), output.getvalue()
    assert output.getvalue().count("\n") == (worker == 0)
    assert attach(model.module, FULL_RANK) is attach(model.module) is state
    assert "ValueError: the model is compressed with" in complaint(attach, model.module, rank=3)
    assert "got both, with rank" in complaint(attach, model.module, FULL_RANK, rank=3)
    before = flat(model.parameters())
    model.step(batches(model, 0))
    assert relative(flat(model.parameters()), before) > 0


def watched(worker: int, world_size: int, *, wrapper: str) -> None:
    """A worker hears of its own steps: the errors' norms, bytes and times."""
    model = build(wrapper, RANK_2)
    records: list[StepRecord] = []
    if worker == 0:
        model.state.telemetry(records.append, every=1)
    train(range(4), model)
    # Where the framework does not say which bucket is the last one, looking at the error ends the step.
    model.state._engine.finish()
    errors = model.state._engine.residuals.error(model.state._engine.step)
    assert [record.step for record in records] == ([2, 3, 4] if worker == 0 else []), records
    for record in records:
        assert record.applied
        assert record.bytes == model.state.report().bytes_per_step
        times = record.milliseconds
        assert 0 < times["project"] + times["backproject"] < sum(times.values()) - times["step"] < times["step"], times
    if worker == 0:
        found = math.hypot(*(layer.error_norm for layer in records[-1].layers.values()))
        expected = math.hypot(*(float(error.norm()) for error in errors.values()))
        assert math.isclose(found, expected, rel_tol=1e-4), (found, expected)
