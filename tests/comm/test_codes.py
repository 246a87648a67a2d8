"""Averages of quantized tensors: nothing is lost or they are unbiased, and all workers get the same bits."""

import functools
import itertools
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

from benchmarks.network.stand_ins import CountedWorker
from powersgd_triton import PowerSGDConfig
from powersgd_triton.comm.agreement import exhaust
from powersgd_triton.config import QUANTIZED, SPARSE
from powersgd_triton.demo.measure import Call
from powersgd_triton.layout import wire_format
from powersgd_triton.planning.trial import StandIn
from powersgd_triton.schemes import new_engine
from powersgd_triton.schemes import quantized as scheme
from powersgd_triton.schemes.quantized_mean import Exchange, Shards, scattered_mean, summed
from tests.support.lines import in_nodes, together
from tests.support.thinned import thinned

CLUSTERS = ((1, 1), (2, 1), (3, 1), (8, 1), (4, 2), (6, 3))
"""Workers, and those of a node."""


def average(
    given: Sequence[Tensor], codes: str, node_size: int = 1, shards: Shards | None = None, seed: int | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Each worker's average, and what is left of its tensor. With a seed, without error feedback."""
    workers, config = len(given), PowerSGDConfig(quantize=codes, error_feedback=seed is None)
    left, means = [tensor.clone() for tensor in given], [torch.empty(0)] * workers

    def run(worker: int) -> None:
        exchange = Exchange(config, lines[worker], None if seed is None else seed + worker)
        if shards is None:
            means[worker] = exhaust(summed(left[worker], exchange)).write(torch.empty(len(given[0])))
        else:
            means[worker] = exhaust(scattered_mean(left[worker], shards, exchange))

    lines = in_nodes(workers, node_size)
    together(lines, run)
    return means, left


def tensors(numel: int, workers: int) -> list[Tensor]:
    torch.manual_seed(numel + workers)
    return [torch.randn(numel) * 10 ** torch.empty(numel).uniform_(-3, 1) for _ in range(workers)]


def dealt(numel: int, workers: int) -> Shards:
    """Parts of unequal lengths, by turns; the last elements are nobody's, and with 3 workers one has none."""
    cuts = [0, *torch.linspace(0, numel - numel // 50, 3 * workers).long().tolist()[1:]]
    parts = [slice(first, end) for first, end in itertools.pairwise(cuts) if first < end]
    turns = workers - (workers == 3)
    return [parts[worker::turns] if worker < turns else [] for worker in range(workers)]


@thinned("numel, cluster, codes", (0, 1, 127, 641, 768, 5000), CLUSTERS, (*QUANTIZED, SPARSE))
def test_nothing_is_lost(numel: int, cluster: tuple[int, int], codes: str):
    workers, node_size = cluster
    given = tensors(numel, workers)
    means, left = average(given, codes, node_size)
    for mean in means[1:]:
        assert torch.equal(mean, means[0])
    check_sum(given, left, means[0])
    assert workers > 1 or torch.equal(means[0], given[0])


def check_sum(given: Sequence[Tensor], left: Sequence[Tensor], mean: Tensor) -> None:
    total = torch.stack(list(given)).double().sum(0)
    kept = torch.stack(list(left)).double().sum(0) + len(given) * mean.double()
    assert ((kept - total).abs() <= 1e-6 * len(given) * total.abs().max() if len(total) else kept == total).all()


@thinned("numel, workers, codes", (30, 641, 5000), (2, 3, 8), tuple(QUANTIZED), together=1)
def test_shards_lose_nothing(numel: int, workers: int, codes: str):
    """Each worker has the average of its own shard, and what is in none stays where it was."""
    given, shards = tensors(numel, workers), dealt(numel, workers)
    means, left = average(given, codes, shards=shards)
    sums = torch.stack(means)
    for worker, parts in enumerate(shards):
        for part in parts:
            assert not sums[[other for other in range(workers) if other != worker], part].any()
    # Behind all shards.
    end = numel - numel // 50
    check_sum([tensor[:end] for tensor in given], [tensor[:end] for tensor in left], sums.sum(0)[:end])


STOCHASTIC = [name for name, width in wire_format.QUANTIZED.items() if width.stochastic]


CASES = [*((*cluster, False) for cluster in CLUSTERS[1:]), (2, 1, True), (3, 1, True), (8, 1, True)]


@thinned("codes, case", STOCHASTIC, CASES, together=1)
def test_unbiased_without_errors(codes: str, case: tuple[int, int, bool]):
    """Gradients stay as they are, a seed gives the same bits, and the mean over seeds is the mean of the gradients."""
    (workers, node_size, sharded), numel = case, 3000
    given, seeds = tensors(numel, workers), 40
    shards = dealt(numel, workers) if sharded else None
    cut = numel - numel // 50 if sharded else numel
    exact = torch.stack(given).double().mean(0)[:cut]
    found = []
    for seed in range(seeds):
        means, left = average(given, codes, node_size, shards, 1000 * seed)
        assert all(torch.equal(one, other) for one, other in zip(left, given, strict=True))
        assert sharded or all(torch.equal(mean, means[0]) for mean in means[1:])
        found.append((torch.stack(means).sum(0) if sharded else means[0]).double()[:cut] - exact)
    again, _ = average(given, codes, node_size, shards, 1000 * (seeds - 1))
    assert torch.equal(torch.stack(again), torch.stack(means))
    single = torch.stack(found).square().mean(0).sum().sqrt()
    bias = torch.stack(found).mean(0).norm()
    assert 0 < bias <= 1.2 * single / seeds**0.5


@thinned("codes, case, value", tuple(QUANTIZED), CASES, (float("nan"), float("-inf")), together=1)
def test_what_is_not_finite_arrives(codes: str, case: tuple[int, int, bool], value: float):
    """Whoever needs the average of a block in which one worker has a NaN gets one."""
    (workers, node_size, sharded), numel = case, 3000
    # The first worker sums the part in which it lies.
    for seed, worker in itertools.product((None, 3), (0, -1)):
        given, shards = tensors(numel, workers), dealt(numel, workers) if sharded else None
        given[worker][7] = value
        means, _ = average(given, codes, node_size, shards, seed)
        assert not all(mean[7].isfinite() for mean in means)
        assert sharded or not any(mean[7].isfinite() for mean in means)
        assert all(mean[2000:].isfinite().all() for mean in means)


FEWER = {"bf16": 2.0, "fp8": 3.9, "int8": 3.9, "int4": 7.7, "int2": 15, "ternary": 18}
"""How many times fewer bytes than an all-reduce in fp32, which does not depend on the workers."""


@thinned("codes, workers", tuple(FEWER), (2, 3, 8, 64), together=1)
def test_bytes_of_a_worker(codes: str, workers: int):
    """As many as an all-reduce of the quantized tensors, and half of that where each worker needs a shard.

    However long the shards are: the first worker sends all of M where another one needs it.
    """
    numel, config = 640 * 640, PowerSGDConfig(quantize=codes)
    each = numel // workers
    shards = [[slice(index * each, (index + 1) * each)] for index in range(workers)]
    last = [*([] for _ in range(workers - 1)), [slice(0, numel)]]
    whole, halves, alone = (list[tuple[bool, Call]]() for _ in range(3))
    for calls, parts in ((whole, None), (halves, shards), (alone, last)):
        M, exchange = torch.randn(numel), Exchange(config, CountedWorker(0, workers, calls))
        for _ in summed(M, exchange) if parts is None else scattered_mean(M, parts, exchange):
            pass
    sent, scattered, to_one = (sum(call.sent for _, call in calls) for calls in (whole, halves, alone))
    exact = 2 * (workers - 1) / workers * 4 * numel
    # Parts end with whole blocks.
    assert exact / sent >= 0.99 * FEWER[codes]
    assert sent / 2 <= scattered <= 1.05 * sent / 2 or workers == 2
    assert len(whole) == 2 - (workers == 2)
    assert to_one <= 1.05 * scattered * workers / (workers - 1)
    assert len(halves) == len(alone) == 1


def test_who_needs_what_is_asked_once():
    """Also if steps are void, which another worker may not have noticed: it would not answer."""
    shapes, device = {"a": (40, 10)}, torch.device("cpu")
    silent = StandIn(collectives=mock.Mock(**{"all_to_all_single.return_value": None}))
    engine = new_engine(PowerSGDConfig(quantize="int8"), silent, lambda: shapes, device)
    with mock.patch.object(silent, "minimum"), mock.patch.object(scheme, "_shards", wraps=scheme._shards) as asked:
        for void in (True, False, False):
            bucket = engine.begin(0, functools.partial(dict, shapes), device, last=not void)
            engine.average(bucket, {"a": torch.randn(40, 10)}, ranges={"a": (0, torch.empty(200))})
            if void:
                engine.void()
    assert asked.call_count == 1


def test_messages_of_an_abandoned_step_are_not_written_again():
    """Its collectives may still be under way. Those of other steps are."""
    shapes, silent = {"a": (40, 10)}, StandIn()
    engine = new_engine(PowerSGDConfig(quantize="int4"), silent, lambda: shapes, torch.device("cpu"))
    with mock.patch.object(silent, "all_gather", return_value=None) as gathers:
        for void in (True, False, False):
            bucket = engine.begin(0, functools.partial(dict, shapes), torch.device("cpu"), last=not void)
            engine.average(bucket, {"a": torch.randn(40, 10)})
            if void:
                engine.void()
    first, second, third = (call.args[1] for call in gathers.call_args_list)
    assert first is not second
    assert second is third
