"""Sum messages over the workers, with factors in fp32 or narrower."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from powersgd_triton.comm.communicator import Communicator, wait
from powersgd_triton.ops.backend import Backend, Message


def sum_over_workers(backend: Backend, message: Message, communicator: Communicator) -> Iterator[None]:
    """Sum a message of a bucket in place. Whenever this yields, a collective is under way.

    A message in fp32 or fp64 takes one all-reduce. If factors are narrower, each worker owns a part of the message. It
    sums that part in the message's dtype, rounds the sum, and sends it to all workers. This takes an all-to-all and an
    all-gather, with the bytes of one all-reduce. (An all-reduce in 16 bits would round partial sums, and no worker's
    error would contain what that loses.)
    """
    content, workers = message.content, communicator.world_size
    plan = backend.bucket.wire_plan(content.numel(), left=message.left, workers=workers)
    if plan is None:
        work = communicator.all_reduce(content)
        yield
        wait(work)
        return
    wire = backend.wire(plan)
    sent, received = torch.empty(2, workers, plan.size, dtype=torch.uint8, device=content.device)
    wire.encode(content, message.own, out=sent)
    work = communicator.all_to_all(received, sent)
    yield
    wait(work)
    mine = torch.empty(plan.size, dtype=torch.uint8, device=content.device)
    wire.reduce(received, message.own, communicator.index, out=mine)
    work = communicator.all_gather(sent, mine)
    yield
    wait(work)
    wire.decode(sent, out=content)
