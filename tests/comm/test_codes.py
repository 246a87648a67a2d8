"""Averages of whole tensors in codes: nothing is lost, and all workers get the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton import PowerSGDConfig
from powersgd_triton.config import QUANTIZED
from powersgd_triton.schemes.quantized import quantized_mean
from tests.support.lockstep import Line, communicate
from tests.support.thinned import thinned


def average(given: Sequence[Tensor], codes: str, node_size: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    """Each worker's average, and what is left of its tensor."""
    workers, config = len(given), PowerSGDConfig(quantize=codes, error_feedback=True)
    lines = [Line(index, workers) for index in range(workers)]
    groups: list[list[Line]] = [lines]
    if node_size > 1:
        nodes = workers // node_size
        insides = [[Line(index, node_size) for index in range(node_size)] for _ in range(nodes)]
        across = [[Line(node, nodes) for node in range(nodes)] for _ in range(node_size)]
        for worker, line in enumerate(lines):
            node, index = divmod(worker, node_size)
            line.inside, line.across = insides[node][index], across[index][node]
        groups = [*insides, *across]
    left, means = [tensor.clone() for tensor in given], [torch.empty(0)] * workers

    def run(worker: int) -> Iterator[Any]:
        means[worker] = yield from quantized_mean(left[worker], config, lines[worker])

    running = [run(worker) for worker in range(workers)]
    while running:
        running = [schedule for schedule in running if next(schedule, "done") != "done"]
        for group in groups:
            communicate(group)
    return means, left


@thinned(
    "numel, cluster, codes", (0, 1, 127, 641, 5000), ((1, 1), (2, 1), (3, 1), (8, 1), (4, 2), (6, 3)), tuple(QUANTIZED)
)
def test_nothing_is_lost(numel: int, cluster: tuple[int, int], codes: str):
    workers, node_size = cluster
    torch.manual_seed(numel + workers)
    given = [torch.randn(numel) * 10 ** torch.empty(numel).uniform_(-3, 1) for _ in range(workers)]
    means, left = average(given, codes, node_size)
    for mean in means[1:]:
        assert torch.equal(mean, means[0])
    total = torch.stack(given).double().sum(0)
    kept = torch.stack(left).double().sum(0) + workers * means[0].double()
    assert ((kept - total).abs() <= 1e-6 * workers * total.abs().max() if numel else kept == total).all()
    assert workers > 1 or torch.equal(means[0], given[0])
