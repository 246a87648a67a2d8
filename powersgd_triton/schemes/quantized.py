"""Quantized averages: whole tensors in a few bits an element, with error feedback."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator, Work
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.scheme import FlatAverage, Scheme, Task
from powersgd_triton.layout.wire_format import BLOCK, DIFFERENCES
from powersgd_triton.ops.backends import difference_codec

Mean = Generator[Work, None, Tensor]
"""Yields each collective that it starts, and returns the average."""


class Quantized(Scheme):
    """The scheme of ``PowerSGDConfig(codes=…)``: whole tensors, in codes with a scale for each block."""

    def prepare(self, task: Task) -> None:
        """Note the tensors. Nothing stays between steps but the residuals."""
        task.residuals.enter(task.layout, task.device)

    def average(self, task: Task) -> Generator[Work, None, FlatAverage]:
        M = task.residuals.compensated(task.layout, task.gradients, task.step)
        mean = yield from quantized_mean(M, task.config, task.communicator)
        task.residuals.keep(task.layout, M, task.step)
        return FlatAverage(task.layout, mean)


def quantized_mean(M: Tensor, config: PowerSGDConfig, communicator: Communicator) -> Mean:
    """Return the mean of all workers' M. M keeps what this worker has not sent yet.

    What rounding a sum loses stays in the M of the worker that owns this part of it. So with M' for what is left,
    Σ_w M'_w + W · mean = Σ_w M_w, except for fp32 rounding. M is fp32 [numel], contiguous, and as long on all workers.
    In a hierarchy, workers sum M within the node first, and each averages its own part of the sum over the nodes.
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
    if workers == 1 or not M.numel():
        mean = M.clone()
        M.zero_()
        return mean
    assert config.codes is not None
    width, (encode, apply) = DIFFERENCES[config.codes], difference_codec(config, M.device, M.dtype)

    def new(*rows: int) -> Tensor:
        # Not empty: the end of a shorter part is sent too, and adds nothing.
        return torch.zeros(*rows, size, dtype=torch.uint8, device=M.device)

    if workers == 2:
        _, size = width.difference_bytes(len(M))
        gathered, sent = new(workers), new()
        encode(M, None, width, sent, True)
        yield communicator.all_gather(gathered, sent)
        mean = torch.zeros_like(M)
        apply(gathered, width, mean.expand(workers, -1), 1 / workers)
        return mean
    # Parts of equal length, but for the last ones, in whole groups of blocks that share bytes.
    unit = BLOCK * width.blocks
    each = -(-len(M) // (workers * unit)) * unit
    first, behind = worker * each, (worker + 1) * each
    _, size = width.difference_bytes(each)
    sent, received, mine, gathered = new(workers), new(workers), new(), new(workers)
    # Not the own part, which is not sent and so not rounded.
    encode(M[:first], None, width, sent[:worker], True, each)
    encode(M[behind:], None, width, sent[worker + 1 :], True, each)
    yield communicator.all_to_all(received, sent)
    own = M[first:behind]
    apply(received, width, own.expand(workers, -1), 1.0, each)
    encode(own, None, width, mine[None], True, each)
    yield communicator.all_gather(gathered, mine)
    mean = M.new_zeros(workers, each)
    apply(gathered, width, mean, 1 / workers)
    return mean.view(-1)[: len(M)]
