"""Sums messages over the workers, in the width in which their factors travel."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from powersgd_triton.comm.communicator import Communicator, wait
from powersgd_triton.ops.backend import Backend, Message


def sum_over_workers(backend: Backend, message: Message, communicator: Communicator) -> Iterator[None]:
    """Sum a message of a bucket in place; each time this yields, a collective is under way.

    In fp32 (fp64 where messages are) that is one all-reduce. Narrower factors go to owners of their parts, which add up
    in that dtype, round, and give the sums to all: an all-to-all and an all-gather, with the bytes of one all-reduce.
    (A 16-bit all-reduce would round partial sums, and what it loses would belong to no worker.)
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
