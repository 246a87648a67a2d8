"""DeepSpeed's training with gradients compressed: what the table of wrappers does not know of."""

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("deepspeed")

import torch
from torch import Tensor

from tests.support.balance import Ledger, batches, build
from tests.support.deepspeed_training import (
    ACCUMULATE,
    BF16,
    BF16_OPTIMIZER,
    FP16,
    FULL_RANK,
    LOGGED,
    OFFLOAD,
    RANK_4,
    Case,
    each,
    engine_for,
    logged_bytes,
    losses,
    spoiled,
    weights,
    zero,
)
from tests.support.distributed import make_test
from tests.support.sharded_training import RANK_2, RATE, Net
from tests.support.training import total

STEPS = 6
CLIPPING = {"gradient_clipping": 0.3}
# Neither works with DeepSpeed's reduce-scatter.
PRESCALE = {"prescale_gradients": True, **zero(reduce_scatter=False)}
PREDIVIDE = {"gradient_predivide_factor": 4.0, **zero(reduce_scatter=False)}
OVERSIZE, SMALL = zero(reduce_bucket_size=900, overlap_comm=True), zero(reduce_bucket_size=2000)
QUICK = [
    *[Case(f"stage {stage}, bf16", stage, BF16) for stage in (0, 2)],
    Case("stage 0, accumulation, clipping", 0, {**ACCUMULATE, **CLIPPING}),
    Case("stage 0, predivide", 0, {"gradient_predivide_factor": 4.0}, optimizer="sgd"),
    Case("stage 0, sparse embedding", 0, sparse=True, optimizer="sgd"),
    Case("stage 2, sequence parallel", 2, way="sequence", optimizer="sgd"),
    Case("stage 0, pipeline", 0, pipeline_stages=1),
    Case("stage 1, BF16_Optimizer", 1, BF16_OPTIMIZER),
    Case("stage 2, oversize, overlap, accumulation", 2, {**ACCUMULATE, **OVERSIZE}),
    Case("stage 3, small buckets, clipping", 3, {**SMALL, **CLIPPING}),
]
ALL, SHARDED = range(4), range(1, 4)
# (name, stages, options, fields of the case)
WIDE: list[tuple[str, Sequence[int], dict[str, Any], dict[str, Any]]] = [
    ("bf16", [1, 3], BF16, {}),
    ("sequence parallel", [0, 1], {}, {"way": "sequence", "optimizer": "sgd"}),
    ("small buckets", [1], SMALL, {}),
    ("offload", [2], OFFLOAD, {"optimizer": "adamw"}),
    ("accumulation, clipping", SHARDED, {**ACCUMULATE, **CLIPPING}, {}),
    ("prescale", ALL, PRESCALE, {"optimizer": "sgd"}),
    ("predivide", SHARDED, PREDIVIDE, {"optimizer": "sgd"}),
    # 4 bytes a scalar of fp32 rounded to 16 bits on DeepSpeed's wire, not on ours.
    ("communication dtype", ALL, {"communication_data_type": "bf16"}, {}),
    ("autocast bf16", ALL, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {}),
    ("unused layer", ALL, zero(ignore_unused_parameters=True), {"unused": True}),
    ("unmanaged", ALL, {"managed_gradient_accumulation": False}, {"way": "unmanaged"}),
    ("overlap", SHARDED, zero(overlap_comm=True), {}),
    ("oversize", SHARDED, zero(reduce_bucket_size=900), {}),
    ("no reduce-scatter", SHARDED, zero(reduce_scatter=False), {}),
    ("round robin", SHARDED, zero(round_robin_gradients=True), {}),
    ("alignment", SHARDED, zero(parameter_alignment=True), {}),
    ("offload, accumulation", SHARDED, {**OFFLOAD, **ACCUMULATE}, {"optimizer": "adamw"}),
    ("coalesced", SHARDED, {}, {"way": "coalesced"}),
    ("fp16", SHARDED, FP16, {}),
    ("non-contiguous", [3], zero(contiguous_gradients=False), {}),
    ("pipeline, bf16", [1], BF16, {"pipeline_stages": 1}),
]
# Two stages, each on two workers.
PIPELINES = [
    Case("pipeline, accumulation", 0, ACCUMULATE, pipeline_stages=2),
    Case("pipeline, stage 1, bf16", 1, BF16, pipeline_stages=2),
]


def full_rank(case: Case) -> None:
    """Full rank is plain DeepSpeed."""
    found = []
    for section in (None, FULL_RANK):
        with engine_for(case, section) as engine:
            for owner in (engine, engine.optimizer) if case.way == "sequence" else ():
                # What two workers compute is of one sequence, and is summed.
                owner.sequence_parallel_size = 2
            found.append(losses(engine, range(STEPS), case.way))
    plain, ours = found
    assert ours == pytest.approx(plain, rel=0, abs=case.limit)
    assert plain[-1] < plain[0] - 0.2, "nothing was learned"


def writes_its_own_slice(stage: int) -> None:
    """Of averages each worker writes what it keeps. Buckets cut through the model, and partitions through matrices."""
    with engine_for(Case("slices", stage, SMALL), RANK_4) as engine:
        inner = engine.powersgd._engine
        with mock.patch.object(inner, "average", wraps=inner.average) as average:
            losses(engine, range(1))
    own = torch.tensor(0.0)
    for call in average.call_args_list:
        ranges = call.kwargs.get("ranges")
        own += (
            sum(s.numel for s in call.args[0].layout.segments)
            if ranges is None
            else sum(t.numel() for _, t in ranges.values())
        )
    model = sum(p.numel() for p in Net().parameters())
    if stage == 0:
        assert own == model
    else:
        assert total(own) == model
        assert own < model / 2


def compresses_once_a_step(case: Case, expected: int) -> None:
    """Stages 2 and 3 reduce in each of 3 micro-batches, unless ``coalesce_grad_reduction`` is used."""
    with engine_for(case, RANK_4) as engine:
        losses(engine, range(2), case.way)
        assert engine.powersgd.iteration == expected


def sends_what_is_reported(stage: int) -> None:
    """Bytes a step by DeepSpeed's own logger: of reductions of gradients, and of all-gathers of parameters."""
    from powersgd_triton.integrations.deepspeed import expected_traffic

    def logged(section: Mapping[str, Any] | None) -> tuple[float, float, Any]:
        with engine_for(Case("", stage, LOGGED), section) as engine:
            # A tensor of the model's size is a gradient; norms and flags are of a few bytes.
            found = logged_bytes(engine, above=64)
            gradients = sum(found.pop(name, 0) for name in ("all_reduce", "reduce_scatter_tensor", "reduce"))
            parameters = sum(found.pop(name, 0) for name in ("all_gather_into_tensor", "all_gather"))
            if section is None:
                return gradients, parameters, found
            (layout,) = [bucket.layout for bucket in engine.powersgd._engine.buckets.in_use()]
            assert gradients == 4 * layout.sent_numel(engine.powersgd.config, 1)
            return gradients, parameters, (expected_traffic(engine, engine.powersgd), found)

    plain, plain_parameters, plain_others = logged(None)
    ours, parameters, (computed, others) = logged(RANK_4)
    # In a ring of two workers each of them sends as much as it gives to an all-reduce, and half as much to others.
    assert ours == computed.factors
    if stage < 3:
        assert plain == pytest.approx(computed.gradients, rel=0.01)
        assert plain_parameters == pytest.approx(computed.parameters, rel=0.01)
    assert (parameters, others) == (plain_parameters, plain_others)
    # Partitions are padded. What the logger notes of a reduce-scatter is what goes in or comes out of it.
    model = 4 * sum(parameter.numel() for parameter in Net().parameters())
    assert any(size <= plain <= 1.01 * size for size in ([model, model / 2] if stage == 3 else [model]))
    assert computed.gradients == (model / 2 if stage == 3 else model)


def skips_overflows_in_fp16(where: str) -> None:
    """At stage 0 with autocast, a step that overflows in one gradient of one worker changes nothing.

    At other stages the table has it.
    """

    def everything(engine: Any) -> dict[str, Tensor]:
        matrices = engine.powersgd._engine.residuals.matrices
        bases = {f"basis of {name}": matrix.bases["basis"].clone() for name, matrix in matrices.items()}
        errors = {f"error of {name}": error.clone() for name, error in engine.powersgd.error().items()}
        return {**weights(engine), **bases, **errors}

    with engine_for(Case("", 0, {"torch_autocast": {"enabled": True, "dtype": "float16"}}), RANK_4) as engine:
        losses(engine, range(3))
        before = everything(engine)
        with spoiled(dict(engine.module.named_parameters())[where]):
            losses(engine, [100])
        after = everything(engine)
        assert after.keys() == before.keys()
        for name, old in before.items():
            # One rounding of |M|, which is |G| + |E|, relative to the largest element of E.
            allowed = 16 * 2**-23 * float(old.abs().max()) if name.startswith("error") else 0.0
            assert float((after[name] - old).abs().max()) <= allowed, f"{name} has changed"
        assert torch.tensor(losses(engine, range(3, 5))).isfinite().all()


def carries_what_deepspeed_alone_skips(stage: int) -> None:
    """All gradients are finite, but not what DeepSpeed makes of them."""
    model = build(f"DeepSpeed {stage}", RANK_2)
    ledger = Ledger(model)
    ledger.step(batches(model, 0))
    before = model.parameters()
    with mock.patch.object(model.module.optimizer, "scaled_global_norm", return_value=torch.tensor(torch.inf)):
        ledger.step(batches(model, 1))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.parameters().items())
    ledger.step(batches(model, 2))
    # What is not compressed has no error, and is lost with its step as with plain DeepSpeed.
    ledger.given = {name: ledger.given[name] for name, error in model.mean_error().items() if error.any()}
    ledger.check()


def clips_what_is_not_used(stage: int) -> None:
    """What an error sends of parameters that no worker uses in a step belongs to the norm of all gradients."""
    options = {**BF16_OPTIMIZER, "gradient_clipping": 0.01}
    with engine_for(Case("", stage, options, optimizer="sgd", unused=True), RANK_4) as engine:
        losses(engine, range(1))
        masters = torch.cat(engine.optimizer.fp32_groups_flat_partition)
        losses(engine, range(1, 2))
        changes = torch.cat(engine.optimizer.fp32_groups_flat_partition) - masters
        assert total(changes.square().sum()).sqrt() == pytest.approx(0.01 * RATE, rel=1e-3)


def notices_what_goes_around(stage: int) -> None:
    """An error says that DeepSpeed has stopped calling what was replaced."""
    from powersgd_triton.integrations.deepspeed.overrides import averaging_method

    with engine_for(Case("", stage), RANK_4) as engine:
        losses(engine, range(1))
        owner, method, _ = averaging_method(engine)
        # The method of the class is found again.
        delattr(owner, method)
        with pytest.raises(RuntimeError, match=r"step 1 without it"):
            losses(engine, range(1, 2))


THRICE = {"gradient_accumulation_steps": 3}
WIDE_CASES = [Case(f"stage {n}, {name}", n, options, **how) for name, stages, options, how in WIDE for n in stages]
SMALL_BUCKETS = [Case(f"stage {stage}, small buckets", stage, SMALL) for stage in ALL]
test_two_workers = make_test(
    {
        **each(full_rank, *QUICK),
        **each(compresses_once_a_step, *[(Case(f"stage {n}", n, THRICE), 2 if n < 2 else 6) for n in ALL]),
        **each(compresses_once_a_step, *[(Case(f"stage {n}, coalesced", n, way="coalesced"), 2) for n in SHARDED]),
        **each(compresses_once_a_step, (Case("pipeline", 0, THRICE, pipeline_stages=1), 2)),
        **each(sends_what_is_reported, *ALL),
        **each(notices_what_goes_around, *ALL),
        **each(clips_what_is_not_used, 1),
        **each(carries_what_deepspeed_alone_skips, 1, 2),
        # Last: DeepSpeed remembers autocast for a process's life.
        **each(skips_overflows_in_fp16, "blocks.0.up.weight", "blocks.0.norm.bias"),
    },
    2,
)
test_three_workers = make_test(each(writes_its_own_slice, *ALL), 3)
test_more_buckets = pytest.mark.slow(make_test(each(full_rank, *SMALL_BUCKETS), 3))
test_more_ways = pytest.mark.slow(make_test(each(full_rank, *WIDE_CASES), 2))
test_four_workers = pytest.mark.slow(make_test(each(full_rank, *PIPELINES), 4))
