"""Sums messages over the workers, in the width in which their factors travel."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from powersgd_triton.comm.communicator import Communicator, wait
from powersgd_triton.ops import BucketState, Message


def summed(bucket: BucketState, message: Message, communicator: Communicator) -> Iterator[None]:
    """Sum a message of a bucket in place; each time this yields, a collective is under way.

    In fp32 (fp64 where messages are) that is one all-reduce. What is narrower is given to owners of its parts, which
    add up in that dtype, round, and give the sums to all: an all-to-all and an all-gather, with the bytes of one
    all-reduce.
    """
    content, workers = message.content, communicator.world_size
    if bucket.width.bits == 32 or workers == 1 or content.numel() == 0:
        work = communicator.all_reduce(content)
        yield
        wait(work)
        return
    wire = bucket.wire(message, workers)
    sent, received = torch.empty(2, workers, wire.plan.size, dtype=torch.uint8, device=content.device)
    wire.encode(content, message.own, out=sent)
    work = communicator.all_to_all(received, sent)
    yield
    wait(work)
    mine = torch.empty(wire.plan.size, dtype=torch.uint8, device=content.device)
    wire.reduce(received, message.own, communicator.rank, out=mine)
    work = communicator.all_gather(sent, mine)
    yield
    wait(work)
    wire.decode(sent, out=content)
