"""Sum messages over the workers, with factors in fp32 or narrower, flat or hierarchically."""

import collections
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator, Work
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.matrices import factors_sent, wire_format
from powersgd_triton.ops.backend import Backend, Message
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.wire import Wire

Collectives = Iterator[Work]
"""Yields each collective that it starts. The caller waits for each of them before resuming."""

ALL_REDUCE, ALL_GATHER, ALL_TO_ALL = "all-reduce", "all-gather", "all-to-all"
SMALL_PART = 4096
"""Bytes of a worker's part of a message up to which latency decides, so that buckets are joined."""
JOINED = 32768
"""Bytes of a message up to which buckets are joined, however few workers there are: each takes time of the host."""
SMALL = 8192
"""Bytes of a message up to which latency decides, so that one all-reduce takes less time than an exchange."""


def waits(layout: Layout, config: PowerSGDConfig, workers: int) -> bool:
    """Return whether a bucket waits for the step's next one: the time of small messages is mostly latency."""
    messages = 2 * factors_sent(config)
    size = 4 * layout.sent_numel(config, config.start_iter) / messages
    return workers > 1 and size < max(SMALL_PART * workers, JOINED)


def exchange_of(size: float, config: PowerSGDConfig, workers: int) -> str:
    """Return how a message of ``size`` bytes is summed over the workers, or over the nodes.

    An all-reduce sends the message as it is. The others send narrow factors, and as many bytes as an all-reduce of the
    narrow message would. With an all-gather, each of two workers sends its whole message, and both compute the sum.
    With an all-to-all, each worker owns a part of the message. All send it this part, and it sends the sum to all.
    """
    if wire_format(config).bits == 32 or workers == 1 or size == 0:
        return ALL_REDUCE
    if workers == 2:
        return ALL_GATHER
    # With a budget, bytes count more than latency.
    return ALL_REDUCE if size <= SMALL and not config.planned else ALL_TO_ALL


def exchanges(buckets: Iterable[Bucket], config: PowerSGDConfig, communicator: Communicator) -> dict[str, int]:
    """Return {how messages are summed: how many of a step}. Those that are sent as they are include "in fp32"."""
    found: collections.Counter[str] = collections.Counter()
    for bucket in buckets if communicator.world_size > 1 else []:
        alternating = config.algorithm == "alternating"
        for message in [bucket.message_P] if alternating else [bucket.message_P, bucket.message_Q]:
            kind = exchange_of(message.nbytes, config, communicator.across.world_size)
            found[f"{kind} in fp32" if kind == ALL_REDUCE else kind] += config.iterations * bool(message.numel())
        if bucket.layout.rounded.numel and communicator.across.world_size > 1:
            found[ALL_GATHER if communicator.across.world_size == 2 else ALL_TO_ALL] += 1
    return dict(found)


def sum_over_workers(backend: Backend, message: Message, communicator: Communicator) -> Collectives:
    """Sum a message of a bucket in place.

    If workers of a node share a network card, they sum the message within the node first. Then each of them sums a part
    of it over the nodes, and they put the parts together. So a card carries one message in either direction.
    """
    content, own, inside, across = message.content, message.own, communicator.inside, communicator.across
    bucket, (part, parts) = backend.bucket, communicator.share
    if inside is not None:
        yield inside.all_reduce(content)
    kind = exchange_of(content.nbytes, bucket.config, across.world_size)
    if kind == ALL_REDUCE:
        if inside is not None and own is not None:
            # The node contributes as one. Each of its workers subtracts the node's product from its own rows.
            own.copy_(content[: own.numel()])
        if inside is None:
            yield across.all_reduce(content)
        else:
            pieces = content.tensor_split(parts)
            yield across.all_reduce(pieces[part])
            for other in [*pieces[:part], *pieces[part + 1 :]]:
                other.zero_()
            yield inside.all_reduce(content)
        return
    owners = 1 if kind == ALL_GATHER else across.world_size
    wire = bucket.wire(backend.wire, content.numel(), left=message.left, owners=owners, part=part)
    if inside is None:
        yield from exchange_parts(wire, content, own, content, across)
        return
    # Zero but for this worker's part, so that the sum over the node puts the parts together.
    sizes = [content.numel(), 0 if own is None else own.numel()]
    gathered = content.new_zeros(sum(sizes))
    target, contributed = gathered.split(sizes)
    yield from exchange_parts(wire, content, None if own is None else contributed, target, across)
    yield inside.all_reduce(gathered)
    content.copy_(target)
    if own is not None:
        own.copy_(contributed)


def mean_in_place(content: Tensor, communicator: Communicator) -> Collectives:
    """Average a tensor in place by an all-reduce."""
    # Before the sum, which may not fit fp16 although the average does. DDP does so too.
    content.div_(communicator.world_size)
    yield communicator.all_reduce(content)


def exchange_parts(
    wire: Wire, content: Tensor, own: Tensor | None, target: Tensor, communicator: Communicator
) -> Collectives:
    """Write the sum of all workers' ``content`` to ``target``, with rounded factors, and what was sent to ``own``.

    Module ``ops.wire`` describes it. (What an all-reduce in 16 bits loses in its partial sums would be in no worker's
    error.)
    """
    owners, size, workers = len(wire.plan.chunks), wire.plan.size, communicator.world_size
    sent = torch.empty(owners, size, dtype=torch.uint8, device=content.device)
    received = torch.empty(workers, size, dtype=torch.uint8, device=content.device)
    wire.encode(content, own, out=sent)
    if owners == 1:
        yield communicator.all_gather(received, sent)
        wire.decode(received, out=target)
        return
    yield communicator.all_to_all(received, sent)
    sums, mine = torch.empty_like(sent), torch.empty_like(sent[0])
    wire.reduce(received, own, communicator.index, out=mine)
    yield communicator.all_gather(sums, mine)
    wire.decode(sums, out=target)


def share_of_sum(
    bucket: Bucket, gradients: Mapping[str, Tensor], communicator: Communicator
) -> Generator[Work, None, Mapping[str, Tensor]]:
    """Sum a bucket's gradients over the workers of a node, and return {name: this worker's rows}.

    Bypass tensors remain this worker's own, since the messages sum them. All are in the dtype of messages. Without
    nodes, return the gradients themselves.
    """
    layout, inside = bucket.layout, communicator.inside
    if inside is None or not layout.compressed:
        return gradients
    cuts, index, dtype = bucket.partition.cuts, inside.index, bucket.message_P.dtype
    sizes = [end - start for start, end in itertools.pairwise(cuts)]
    sent = flat(layout, gradients)[cuts[0] : cuts[-1]]
    received = sent.new_empty(len(sizes) * sizes[index])
    yield inside.all_to_all(received, sent, sizes)
    total = received.view(len(sizes), -1).sum(dim=0, dtype=dtype) if sizes[index] else received.to(dtype)
    rows = {
        piece.name: total[piece.offset - cuts[index] :][: piece.numel].view(piece.shape)
        for group in bucket.own
        for piece in group.segments
    }
    bypass = {segment.name: gradients[segment.name] for segment in layout.bypass}
    if bypass and sent.dtype != dtype:
        # One conversion of all of them.
        whole = torch.cat([tensor.reshape(-1) for tensor in bypass.values()]).to(dtype)
        parts = whole.split([tensor.numel() for tensor in bypass.values()])
        bypass = {name: part.view_as(bypass[name]) for name, part in zip(bypass, parts, strict=True)}
    return rows | bypass


def flat(layout: Layout, gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the gradients as one flat tensor: without a copy if they lie in one buffer in the layout's order."""
    whole = flat_view(layout, gradients)
    return torch.cat([gradients[s.name].reshape(-1) for s in layout.segments]) if whole is None else whole


def flat_view(layout: Layout, gradients: Mapping[str, Tensor]) -> Tensor | None:
    """Return the memory of the gradients as one flat tensor, if they lie in one buffer in the layout's order."""
    tensors = [gradients[segment.name] for segment in layout.segments]
    places = [(t.untyped_storage().data_ptr(), t.dtype, t.storage_offset()) for t in tensors]
    storage, dtype, start = places[0]
    if places == [(storage, dtype, start + segment.offset) for segment in layout.segments]:
        return tensors[0].as_strided((layout.numel,), (1,))
    return None
