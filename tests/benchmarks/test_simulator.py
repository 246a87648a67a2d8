"""The simulator counts what process groups of up to 8 workers really send; bytes do not grow with the workers."""

import contextlib
import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.buckets import ddp_buckets
from benchmarks.network import two_levels
from benchmarks.network.simulator import RESULTS, exact, simulate
from benchmarks.network.traffic import Traffic
from benchmarks.network.turns import Row
from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.demo import model as text_model
from powersgd_triton.demo.measure import Call, counting
from powersgd_triton.planning.cost import ComputeTime, Job, Network
from powersgd_triton.planning.models import Shapes
from tests.support.distributed import run
from tests.support.exchanges import latency_decides
from tests.support.thinned import slow, thinned

RECORD = RESULTS / "two-levels.json"
SHAPES = {"a": (48, 70), "bias": (70,), "b": (48, 70), "c": (301, 20), "d": (129, 36), "norm": (5,)}
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {"rank": 4},
    "int4": {"rank": 8, "wire_dtype": "int4"},
    "int8": {"rank": 4, "wire_dtype": "int8", "algorithm": "alternating", "iterations": 2},
}
CONFIGS = {name: PowerSGDConfig(min_compression_rate=0, **options) for name, options in OPTIONS.items()}
FLAT = {4: [(2, 1), (4, 1)], 8: [(8, 1)]}
TWO_LEVELS = {4: [(2, 2)], 8: [(2, 4), (4, 2)]}
"""{processes: (nodes, workers of each)}."""


def counted_steps(worker: int, world_size: int) -> dict[Any, list[Call]]:
    """The collectives of each case's second step, in their order."""
    found: dict[Any, list[Call]] = {}
    for nodes, node_size in FLAT[world_size] + TWO_LEVELS[world_size]:
        workers = nodes * node_size
        group = dist.new_group(list(range(workers)))
        # This worker's group of its node and that of its index. All workers make all groups.
        table = torch.arange(workers).view(nodes, node_size)
        made = [dist.new_group(members) for members in [*table.tolist(), *table.T.tolist()]] if node_size > 1 else []
        levels = [each for each in made if dist.get_rank(each) >= 0]
        if worker >= workers:
            continue
        for name, config in CONFIGS.items():
            node_group = (levels[0], levels[1]) if levels else None
            compressor = Compressor(config, SHAPES, group, node_group=node_group)
            calls: list[Call] = []
            for _ in range(2):
                calls.clear()
                with counting(calls.append):
                    compressor.decompress(compressor.compress({n: torch.randn(shape) for n, shape in SHAPES.items()}))
            found[nodes, node_size, name] = calls
    return found


@pytest.mark.parametrize("world_size", [4, *slow([8])])
def test_counts_are_those_of_process_groups(world_size: int) -> None:
    found = run(counted_steps, world_size)
    layouts = FLAT[world_size] + TWO_LEVELS[world_size]
    for (nodes, node_size), (name, config) in itertools.product(layouts, CONFIGS.items()):
        simulated = simulate([list(SHAPES.values())], config, nodes, node_size, two_levels=node_size > 1)
        for worker in range(nodes * node_size):
            expected = [call for _, call in simulated.calls[worker % node_size]]
            assert found[worker][nodes, node_size, name] == expected, (nodes, node_size, name, worker)


def test_bytes_are_those_that_interfaces_counted() -> None:
    rows = [Row(**row) for row in json.loads(RECORD.read_text())["rows"]]
    for model, width in two_levels.MODELS.items():
        buckets = ddp_buckets([tuple(p.shape) for p in text_model.GPT(width).parameters()][::-1])
        for arm, options in two_levels.FACTORS.items():
            config = PowerSGDConfig(rank=two_levels.RANK, wire_dtype=options.get("wire_dtype"))
            with latency_decides():
                card = simulate(buckets, config, 2, 2, two_levels="node_group" in options).card
            counted = [row.most for row in rows if (row.model, row.arm) == (model, arm)]
            assert counted
            # Headers and acknowledgements take 6.4%, and gloo's own messages some kilobytes a collective.
            assert all(1.05 * card < most < 1.08 * card + 25_000 for most in counted), (model, arm)


def test_times_follow_the_model() -> None:
    network = Network(2, 2, card=1e9, inside=1e10, latency=1e-3, inside_latency=1e-4)
    gradients = exact([[(1000, 1000)]], torch.float32, 2, 2)
    assert gradients.most() == gradients.card == 6_000_000
    assert gradients.seconds(network) == pytest.approx(6 * 1e-3 + 6e-3)
    # On one node, nothing passes the card.
    node = dataclasses.replace(network, nodes=1, node_size=4)
    assert exact([[(1000, 1000)]], torch.float32, 1, 4).seconds(node) == pytest.approx(6 * 1e-4 + 6e-4)
    # Each of two workers of a node sends a third of its parts to the other, and the rest through the card.
    exchange = Traffic(2, 2, (((False, Call("all_to_all_single", 4, 3_000_000, 3_000_000)),),))
    assert exchange.card == 4_000_000
    assert exchange.seconds(network) == pytest.approx(3 * 1e-3 + 4e-3)
    levels = Traffic(2, 2, tuple(((False, Call("all_reduce", 2, size, size)),) for size in (1000, 3000)))
    assert levels.card == 4000
    assert levels.most() == levels.normalized == 3000


def predict_as_counted(config: PowerSGDConfig, nodes: int, node_size: int) -> None:
    """Also where small messages wait for the next bucket, and of a bucket without matrices."""
    buckets: list[Shapes] = [[(600, 600), (30_000,)], [(9_000,), (70_000,)], [(512, 512), (512,), (20_000,)]]
    network, two_levels = Network(nodes, node_size, 1e8, 1e9, 1e-3, 1e-4), node_size > 1
    named = [{f"{b}.{i}": shape for i, shape in enumerate(shapes)} for b, shapes in enumerate(buckets)]
    job = Job(named, 0.0, network, two_levels)
    traffic = simulate(buckets, config, nodes, node_size, two_levels=two_levels)
    # The prediction does not know where messages are cut.
    assert sum(job.messages(job.layouts(config), config)) == pytest.approx(traffic.seconds(network), rel=0.02)
    sent = job.compressed(config, ComputeTime((0.0,) * 3)).bytes_per_step
    # The workers of a node share its messages.
    counted = traffic.normalized * (node_size if two_levels else 1)
    assert counted == (pytest.approx(sent, rel=0.02) if nodes > 1 else 0)


@thinned(
    "cluster, joined, bypass, width, fields",
    [(2, 1), (3, 1), (2, 2), (3, 2)],
    [True, False],
    [None, "int8", "fp8", "bf16"],
    ["float32", "int4"],
    [{}, {"iterations": 2}, {"algorithm": "alternating"}],
)
def test_predicted_times_and_bytes_of_vectors_are_those_of_the_counted_collectives(
    joined: bool, bypass: str | None, width: str, fields: dict[str, Any], cluster: tuple[int, int]
) -> None:
    """In its first step the alternating algorithm sends Q, as long as P here."""
    with latency_decides() if joined else contextlib.nullcontext():
        predict_as_counted(PowerSGDConfig(rank=16, wire_dtype=width, bypass=bypass, **fields), *cluster)


@pytest.mark.parametrize("cluster", [(2, 1), (3, 1), (2, 2), (3, 2), (1, 2)])
def test_predicted_times_and_bytes_of_quantized_gradients_are_those_of_the_counted_collectives(
    cluster: tuple[int, int],
) -> None:
    predict_as_counted(PowerSGDConfig(quantize="int8"), *cluster)
