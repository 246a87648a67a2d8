"""What holds for every wrapper: properties as functions of a worker, with their assertions. See ``wrappers.py``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.core.telemetry import StepRecord
from powersgd_triton.layout.matrices import compressed_rank
from powersgd_triton.ranks.report import RankReport
from tests.support import wrappers
from tests.support.sharded_training import Gradients, Net, batch, checkpoint, freeze, sent_elements
from tests.support.small import complaint
from tests.support.training import digest, flat, relative
from tests.support.wrappers import RANK_2, RATE, WRAPPERS, Batch, Wrapped, loss_of, means

FULL_RANK = PowerSGDConfig(rank=999, min_compression_rate=0)
FORMATS = {"fp32": RANK_2, **wrappers.FORMATS}
LIMIT = 1e-5
"""Relative difference of sums in fp32 that are taken in another order."""
EIGHT_BITS = 0.02
"""Relative difference of sums that are rounded to 8 bits."""
U = 2.0**-24
"""Unit roundoff of fp32."""


def build(wrapper: str, config: PowerSGDConfig | None, parameters: Gradients | None = None, **options: Any) -> Wrapped:
    """A new model in a wrapper, with parameters of its own or those that are given."""
    net = WRAPPERS[wrapper].net()
    if parameters is not None:
        net.load_state_dict(parameters)
    return WRAPPERS[wrapper].make(net, config, **options)


def batches(model: Wrapped, step: int, micro: int = 1) -> list[Batch]:
    """This worker's micro-batches of a step."""
    return [batch(model.data_worker(), step, index) for index in range(micro)]


def exact_mean(model: Wrapped, given: Sequence[Batch]) -> Gradients:
    """The mean over workers of their own gradients, by autograd alone. What is not finite counts as zero."""
    twin = model.net_type()
    twin.load_state_dict(model.parameters())
    twin.use, twin.inject = model.net.use, model.net.inject
    for micro in given:
        (loss_of(twin, micro) / len(given)).backward()
    own = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in twin.named_parameters()}
    return means({name: torch.where(gradient.isfinite(), gradient, 0) for name, gradient in own.items()})


class Ledger:
    """What a model is given and what it applies, from now on."""

    def __init__(self, model: Wrapped) -> None:
        self.model, self.begin, self.steps = model, model.parameters(), 0
        self.given: Gradients = {name: torch.zeros_like(p).double() for name, p in self.begin.items()}
        self.owed = model.mean_error()

    def step(self, given: Sequence[Batch], **options: Any) -> None:
        for name, gradient in exact_mean(self.model, given).items():
            self.given[name] += gradient
        self.model.step(given, **options)
        self.steps += 1

    def check(self, *, rounds: bool = False) -> None:
        """mean E + Σ Ĝ = mean Σ G + mean E before; something was left out; all workers hold the same parameters.

        If it ``rounds`` what has no errors, the averages of these tensors are nearly those of the gradients.
        """
        now, error, rounded = self.model.parameters(), self.model.mean_error(), list[tuple[Tensor, Tensor]]()
        for name, given in self.given.items():
            sent = (self.begin[name].double() - now[name].double()) / RATE
            left = sum(
                sign * e[name].double().view(given.shape) for sign, e in ((1, error), (-1, self.owed)) if name in e
            )
            if rounds and not (name in error and error[name].any()):
                rounded.append((sent.view(-1), given.view(-1)))
                continue
            # Each step rounds the parameter once.
            allowed = LIMIT * given.norm() + self.steps * U * now[name].norm() / RATE
            assert (sent + left - given).norm() <= allowed, f"{name}: {relative(sent + left, given)} is missing"
        assert relative(flat(error) * 0, flat(error)) == 1, "nothing was left out"
        if rounds:
            # Together, since small tensors share a scale with larger ones.
            sent, given = (torch.cat(tensors) for tensors in zip(*rounded, strict=True))
            assert 10 * LIMIT < relative(sent, given) < EIGHT_BITS, relative(sent, given)
        check_same(now.values())


def check_same(tensors: Any, group: Any = None) -> None:
    """That all workers have the same bits."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, digest(tensors), group)
    assert len(set(found)) == 1, "workers hold different bits"


def check_close(got: Gradients, expected: Gradients, start: Gradients, limit: float = LIMIT) -> None:
    """That two trainings from the same parameters have moved to the same ones."""
    assert got.keys() == expected.keys(), (sorted(got), sorted(expected))
    moved = flat(expected) - flat(start)
    assert moved.norm() > 0.01, "nothing was learned"
    difference = (flat(got) - flat(expected)).norm()
    # Parameters were rounded in each step.
    assert difference <= limit * moved.norm() + 4 * U * flat(expected).norm(), f"{difference} of {moved.norm()}"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of training.

    ``prepare`` changes the model before it is wrapped with ``options``, which go by a wrapper's first word, ``after``
    the wrapped one. If ``unused``, a layer is used in every second step only. ``quick`` names wrappers; with ``only``,
    wrappers that ``options`` does not name do not have this way.
    """

    micro: int = 1
    step: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Net], None] = lambda _: None
    unused: bool = False
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    after: Callable[[Any], None] = lambda _: None
    only: bool = False
    quick: tuple[str, ...] = ()
    limit: float = LIMIT

    def fits(self, wrapper: str) -> bool:
        return not self.only or wrapper.split()[0] in self.options


def for_fsdp2(**options: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(("FSDP2", "HSDP", "replicate"), options)


def compiled(net: Net) -> None:
    for block in net.blocks:
        block.compile(backend="eager")


def sums(module: Any, factor: float | None = None) -> None:
    """Sums in place of averages, or what is divided by a factor."""
    for child in [module, *module.blocks]:
        if factor is not None:
            child.set_gradient_divide_factor(factor)
        child.set_force_sum_reduction_for_comms(True)


def reduces_unused(module: Any) -> None:
    # torch 2.9 lacks it.
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True)


BF16 = torch.bfloat16
WAYS = {
    "plain": Way(),
    "several backwards": Way(2, {"sync_each": True}, quick=("FSDP1 SHARD_GRAD_OP", "HSDP")),
    "no sync": Way(2, quick=("DDP", "FSDP1", "FSDP2")),
    "clipping": Way(step={"clip": 0.1}, quick=("FSDP2",)),
    "frozen": Way(prepare=freeze, quick=("DDP", "FSDP1", "FSDP2", "local steps")),
    "checkpointing": Way(prepare=checkpoint, quick=("FSDP2",)),
    "unused": Way(
        unused=True,
        options={"DDP": {"find_unused_parameters": True}},
        quick=("DDP", "FSDP2", "Compressor", "optimizer"),
    ),
    "mixed precision": Way(
        options={
            "FSDP1": {"mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)},
            **for_fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)),
        },
        only=True,
        quick=("FSDP1", "FSDP2"),
        # Parameters that differ in their last bit may be rounded to different bf16 numbers.
        limit=1e-3,
    ),
    # What torch sums in bf16 is rounded once more or less often than our averages.
    "bf16": Way(
        options=for_fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)),
        only=True,
        quick=("replicate",),
        limit=2**-6,
    ),
    "no all-reduce": Way(2, {"all_reduce_last": True}, options={"HSDP": {}}, only=True, quick=("HSDP",)),
    "divide factor": Way(
        options=for_fsdp2(), after=functools.partial(sums, factor=8.0), only=True, quick=("FSDP2", "replicate")
    ),
    "sums": Way(options=for_fsdp2(), after=sums, only=True, quick=("replicate",)),
    "unused, reduced": Way(unused=True, options=for_fsdp2(), after=reduces_unused, only=True, quick=("FSDP2",)),
    "no reshard": Way(
        options={name: {"reshard_after_forward": False} for name in ("FSDP2", "HSDP")}, only=True, quick=("FSDP2",)
    ),
    "reshard to two": Way(options={"HSDP": {"reshard_after_forward": 2}}, only=True),
    "offload": Way(
        options=for_fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)), only=True, quick=("replicate",)
    ),
    "compiled": Way(prepare=compiled, options=for_fsdp2(), only=True, quick=("replicate",)),
    "bucket view": Way(options={"DDP": {"gradient_as_bucket_view": True}}, only=True, quick=("DDP",)),
    "static graph": Way(options={"DDP": {"static_graph": True}}, only=True, quick=("DDP",)),
    "unused, bucket view": Way(
        unused=True,
        options={"DDP": {"find_unused_parameters": True, "gradient_as_bucket_view": True}},
        only=True,
        quick=("DDP",),
    ),
    "flat parameters": Way(options={"FSDP1": {"use_orig_params": False}}, only=True, quick=("FSDP1",)),
    "reentrant checkpointing": Way(
        prepare=functools.partial(checkpoint, use_reentrant=True), options={"FSDP1": {}}, only=True, quick=("FSDP1",)
    ),
}


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
    for step in range(2):
        for model in (alone, ours):
            model.step(batches(model, step))
    check_close(ours.parameters(), alone.parameters(), start)
    assert not any(error.any() for error in ours.mean_error().values())
    ledger = Ledger(ours)
    ledger.step(batches(ours, 2))
    ledger.check()


def conservation(worker: int, world_size: int, *, wrapper: str, form: str = "fp32") -> None:
    """Nothing is lost: what is not applied is owed. All workers hold the same bits."""
    model = build(wrapper, FORMATS[form])
    ledger = Ledger(model)
    for step in range(3):
        ledger.step(batches(model, step))
    if FORMATS[form].quantize is not None:
        whole = model.state._engine.residuals.whole
        held = [*whole._flat.values(), *whole.left.values()]
        assert model.state.report().error_bytes == sum(errors.nbytes for errors in held)
    ledger.check(rounds=FORMATS[form].bypass is not None)
    assert iteration(model) == 3
    if model.levels == 2:
        assert model.state._engine.communicator.inside is not None, "sums did not take two levels"


def stateless(worker: int, world_size: int, *, wrapper: str, folder: str) -> None:
    """Averages in 8 bits keep nothing on a worker, are the same on all, and are repeated by a run that goes on."""
    path = f"{folder}/{wrapper} without errors"
    Path(path).mkdir(exist_ok=True)
    alone, ours = build(wrapper, None), build(wrapper, PowerSGDConfig(quantize="int8"))
    start = alone.parameters()
    for step in range(2):
        for model in (alone, ours):
            model.step(batches(model, step))
    check_close(ours.parameters(), alone.parameters(), start, EIGHT_BITS)
    residuals = ours.state._engine.residuals
    assert not any((ours.mean_error(), residuals.matrices, residuals.pending))
    ours.save(path)
    # DDP's first step has other buckets than the later ones, so that two runs go on.
    others = [build(wrapper, PowerSGDConfig(quantize="int8"), ours.parameters()) for _ in range(2)]
    for model in others:
        model.load(path)
        model.step(batches(model, 2))
    first, second = (model.parameters() for model in others)
    check_same([*first.values()])
    assert all(torch.equal(second[name], parameter) for name, parameter in first.items())


def iteration(model: Wrapped) -> int:
    """Steps that the compression has taken."""
    name = "iteration" if hasattr(model.state, "iteration") else "step_counter"
    return int(getattr(model.state, name))


def traffic(worker: int, world_size: int, *, wrapper: str) -> None:
    """What is all-reduced are the factors and the tensors that are not compressed, as the statistics count them."""
    model = build(wrapper, RANK_2)
    shards = WRAPPERS[wrapper].shards
    expected = 0
    for parameter in model.parameters().values():
        rows, columns = -(-parameter.shape[0] // shards), parameter.numel() // parameter.shape[0]
        rank = compressed_rank((rows, *parameter.shape[1:]), model.state.config)
        expected += (rows + columns) * rank if rank else rows * columns
    with sent_elements() as counts:
        for step in range(2):
            model.step(batches(model, step))
    # A single element is a verdict.
    found = sum(count for count in counts if count > 1)
    assert found == model.state.compression_stats()[2] == 2 * expected, (found, 2 * expected)


def void(worker: int, world_size: int, *, wrapper: str) -> None:
    """A step with a gradient that is not finite on one worker is skipped on all, and carried whole or not at all."""
    model = build(wrapper, RANK_2)
    for step in range(2):
        model.step(batches(model, step))
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
    for step in range(3, 5):
        ledger.step(batches(model, step))
    ledger.check()


def resume(worker: int, world_size: int, *, wrapper: str, folder: str, form: str = "fp32") -> None:
    """A run that is saved goes on as if it had not been interrupted. ``taken_over`` reads what is left behind."""
    path = f"{folder}/{wrapper}"
    Path(path).mkdir(exist_ok=True)
    model = build(wrapper, FORMATS[form])
    for step in range(3):
        model.step(batches(model, step))
    start, error = model.parameters(), model.mean_error()
    model.save(path)
    if worker == 0:
        torch.save({"parameters": start, "error": error}, f"{path}/expected")
    dist.barrier()
    other, forgetful = build(wrapper, FORMATS[form], start), build(wrapper, FORMATS[form], start)
    other.load(path)
    check_errors(other, error)
    for step in range(3, 5):
        for one in (model, other, forgetful):
            one.step(batches(one, step))
    check_close(other.parameters(), model.parameters(), start)
    moved = [flat(one.parameters()) - flat(start) for one in (forgetful, model)]
    assert relative(*moved) > 1e-3, "the error makes no difference"
    assert iteration(other) == iteration(model) == 5


def check_errors(model: Wrapped, expected: Gradients) -> None:
    found = model.mean_error()
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    for name, error in expected.items():
        assert (found[name] - error).norm() <= LIMIT * error.norm() + U, name


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
    for step in range(3, 5):
        ledger.step(batches(model, step))
    ledger.check()
    assert iteration(model) == 5


def damaged(worker: int, world_size: int, *, wrapper: str) -> None:
    """A state that one worker refuses is refused by all, and none has changed. So are states that differ."""
    models = [build(wrapper, FORMATS["alternating"]) for _ in range(2)]
    for step in range(2):
        for model in models:
            model.step(batches(model, step))
    ours, untouched = models
    saved = ours.state.state_dict()
    for model in models:
        model.step(batches(model, 2))
    for value, expected in ((-1, "ValueError"), (7, "DisagreementError")):
        said = complaint(ours.state.load_state_dict, {**saved, "iteration": value} if worker == 1 else saved)
        assert said.startswith(expected), said
        assert "worker 1" in said or (worker, value) == (1, -1), said
    for model in models:
        model.step(batches(model, 3))
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
    start = ranks(model.state.report())
    for step in range(4):
        model.step(batches(model, step))
    report = model.state.report()
    numel = sum(-(-p.shape[0] // shards) * p.numel() // p.shape[0] for p in model.parameters().values())
    allowed = 4 * numel / COMPRESSION
    # Elements are counted in whole ones, bucket by bucket.
    assert model.state.compression_stats()[2] <= allowed + 8
    assert report.bytes_per_step <= allowed < 2 * report.bytes_per_step, (report.bytes_per_step, allowed)
    assert start.keys() == ranks(report).keys()
    assert start != ranks(report), "no rank has moved"
    shares = [tensor.energy_sent for tensor in report.tensors if tensor.rank]
    assert shares
    assert all(share is not None and 0 < share <= 1 + LIMIT for share in shares), shares
    check_same(model.parameters().values())
    model.save(path)
    other = build(wrapper, BUDGET)
    other.load(path)
    assert other.state.report().tensors == report.tensors


def ranks(report: RankReport) -> dict[str, int]:
    return {tensor.name: tensor.rank for tensor in report.tensors}


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
    for step in range(4):
        model.step(batches(model, step))
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
