"""Quantized averages: whole tensors in a few bits an element, with error feedback."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator, Work
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.scheme import FlatAverage, Task
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.wire_format import BLOCK, DIFFERENCES
from powersgd_triton.ops.backends import difference_codec

Mean = Generator[Work, None, Tensor]
"""Yields each collective that it starts, and returns the average."""


class Quantized:
    """The scheme of ``PowerSGDConfig(codes=…)``: whole tensors, in codes with a scale for each block."""

    def prepare(self, task: Task) -> None:
        """Note the tensors. Nothing stays between steps but the residuals."""
        task.residuals.enter(task.layout, task.device)

    def average(self, task: Task) -> Generator[Work, None, FlatAverage]:
        M = task.residuals.compensated(task.layout, task.gradients, task.step)
        mean = yield from quantized_mean(M, task.config, task.communicator)
        task.residuals.keep(task.layout, M, task.step)
        return FlatAverage(task.layout, mean)

    def sent_numel(self, layout: Layout, config: PowerSGDConfig, iteration: int) -> int:
        return layout.sent_numel(config, iteration)


def quantized_mean(M: Tensor, config: PowerSGDConfig, communicator: Communicator) -> Mean:
    """Return the mean of all workers' M. M keeps what this worker has not sent yet.

    What rounding a sum loses stays in the M of the worker that owns this part of it. So with M' for what is left,
    Σ_w M'_w + W · mean = Σ_w M_w, except for fp32 rounding. M is fp32 [numel], contiguous, and as long on all workers.

    If the workers of a node share a network card, they sum M within the node first, and each of them averages its own
    part of the sum over the nodes.
    """
    inside = communicator.inside
    if inside is None:
        return (yield from _average(M, config, communicator))
    # Rows of equal length, one for each worker, with zeros at the end.
    each = -(-len(M) // inside.world_size)
    rows = torch.nn.functional.pad(M, (0, inside.world_size * each - len(M))).view(inside.world_size, each)
    received = torch.empty_like(rows)
    yield inside.all_to_all(received, rows)
    own = received.sum(0)
    mean = yield from _average(own, config, communicator.across)
    mean /= inside.world_size
    yield inside.all_gather(rows, mean)
    # What is left of the node's sum lies with the worker that has sent this part.
    first = inside.index * each
    M.zero_()
    M[first : first + each] = own[: max(0, len(M) - first)]
    return rows.view(-1)[: len(M)]


def _average(M: Tensor, config: PowerSGDConfig, communicator: Communicator) -> Mean:
    """Do the same on one level.

    Both of two workers receive what the other one has sent, so that nothing is rounded a second time. With more, each
    worker owns a part of M: it receives this part from all workers, sums it, and sends the sum to all, in codes again.
    Either way, a worker sends and receives less than twice the bytes of its codes, however many workers there are.
    """
    workers, worker = communicator.world_size, communicator.index
    mean = torch.zeros_like(M)
    if workers == 1 or not M.numel():
        mean.copy_(M)
        M.zero_()
        return mean
    assert config.codes is not None
    width, (encode, apply) = DIFFERENCES[config.codes], difference_codec(config, M.device, M.dtype)

    def add(content: Tensor, part: Tensor, weight: float) -> None:
        apply(content.unsqueeze(0), width, part.unsqueeze(0), weight)

    def new(*rows: int) -> Tensor:
        # Not empty: the ends of shorter parts are sent too.
        return torch.zeros(*rows, size, dtype=torch.uint8, device=M.device)

    if workers == 2:
        _, size = width.difference_bytes(len(M))
        gathered, sent = new(workers), new()
        encode(M, None, width, sent, True)
        yield communicator.all_gather(gathered, sent)
        for content in gathered:
            add(content, mean, 1 / workers)
        return mean
    # In whole groups of blocks that share bytes.
    unit = BLOCK * width.blocks
    parts = list(zip(_parts(M, workers, unit), _parts(mean, workers, unit), strict=True))
    own, _ = parts[worker]
    _, size = width.difference_bytes(len(parts[0][0]))
    sent, received, mine, gathered = new(workers), new(workers), new(), new(workers)
    for other, (part, _) in enumerate(parts):
        if other != worker:
            encode(part, None, width, sent[other], True)
    yield communicator.all_to_all(received, sent)
    # A worker's own contribution to its part is not rounded, since it is not sent.
    for other, content in enumerate(received):
        if other != worker:
            add(content, own, 1.0)
    encode(own, None, width, mine, True)
    yield communicator.all_gather(gathered, mine)
    for content, (_, average) in zip(gathered, parts, strict=True):
        add(content, average, 1 / workers)
    return mean


def _parts(flat: Tensor, owners: int, unit: int) -> list[Tensor]:
    """Divide a tensor into a part for each owner, a multiple of ``unit``. The last parts may be shorter, or empty."""
    each = -(-len(flat) // (owners * unit)) * unit
    return [flat[index * each : (index + 1) * each] for index in range(owners)]
