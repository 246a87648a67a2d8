"""Means of flat tensors that travel in few bits an element."""

import dataclasses
import itertools
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator, Work
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.matrices import flat_format
from powersgd_triton.layout.sparse_format import SparseFormat
from powersgd_triton.layout.wire_format import WireFormat
from powersgd_triton.ops.backends import difference_codec
from powersgd_triton.ops.reference import note_overflow

Shards = list[list[slice]]
"""The elements of a bucket whose averages each worker needs."""
Memory = dict[str, Tensor]
"""A bucket's messages on the CPU, where memory that is new in each step takes longer than the codec."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """With whom flat tensors are averaged, and how.

    Attributes:
        config: With error feedback, a tensor keeps what this worker has not sent yet. Without, it stays as it is.
        seed: Makes rounding stochastic without error feedback, below 2³². None rounds to nearest.
        terms: Two tensors of which M is the sum. It is computed as it is encoded, in one pass. None if M is given.
        memory: That of the last exchange of tensors of the same sizes.
    """

    config: PowerSGDConfig
    communicator: Communicator
    seed: int | None = None
    terms: tuple[Tensor, Tensor] | None = None
    memory: Memory = dataclasses.field(default_factory=dict)

    @property
    def keeps(self) -> bool:
        return bool(self.config.error_feedback)

    @property
    def width(self) -> WireFormat | SparseFormat:
        return _format(self.config)

    def encode(self, M: Tensor, out: Tensor, each: int | None = None, *, message: int = 0) -> None:
        """Write messages of ``each`` elements to ``out``. Messages of a step have different random numbers."""
        seed = None if self.seed is None else (self.seed + message * 0x9E3779B9) % 2**32
        encode = difference_codec(self.config, M.device, M.dtype).encode
        encode(Encoding(M, None, self.width, out, self.keeps, each, seed, self._terms(M)))

    def computed(self, M: Tensor) -> Tensor:
        """Return M, or a part of it, that is not to be encoded."""
        terms = self._terms(M)
        return M if terms is None else torch.add(*terms, out=M)

    def _terms(self, M: Tensor) -> list[Tensor] | None:
        first = M.storage_offset()
        return None if self.terms is None else [term[first : first + len(M)] for term in self.terms]

    def bytes_of(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` elements."""
        return self.width.difference_bytes(numel)[1]

    def memory_for(self, name: str, device: torch.device, *shape: int, zero: bool = False) -> Tensor:
        """Return uint8 of this shape for messages.

        Parts are to be ``zero``, since the end of a shorter one is sent too, and adds nothing. What is kept stays zero
        there: each step writes the same messages.
        """
        found = self.memory.get(name)
        if found is None or found.shape != shape:
            found = (torch.zeros if zero else torch.empty)(shape, dtype=torch.uint8, device=device)
            if device.type == "cpu":
                self.memory[name] = found
        return found


@dataclasses.dataclass(frozen=True)
class Messages:
    """The mean of flat fp32 tensors, in the form in which it has arrived.

    Attributes:
        numel: Its elements.
        content: uint8 [workers, bytes]: the whole tensors of workers to be averaged, or the sums of all parts of
            ``each`` elements. In fp32 or fp64 [numel] it is the mean itself.
    """

    numel: int
    content: Tensor
    each: int
    config: PowerSGDConfig

    def note_infinite(self, verdict: Tensor) -> None:
        """Set an int64 scalar to 0 if the mean is not finite."""
        content = self.content
        if content.dtype == torch.uint8:
            # Codes are finite where their scales are.
            bits = content[:, : _format(self.config).checked_bytes(self.each)].view(torch.int16)
            difference_codec(self.config, content.device, torch.float32).note_infinite(bits, verdict)
        else:
            note_overflow(content, verdict)

    def write(self, out: Tensor, rate: float | None = None) -> Tensor:
        """Write the mean to ``out`` [numel], contiguous, or add ``rate`` times the mean to it. Return it."""
        fresh = rate is None
        if self.content.dtype != torch.uint8:
            return out.copy_(self.content) if rate is None else out.add_(self.content, alpha=rate)
        width, apply = _format(self.config), difference_codec(self.config, out.device, out.dtype).apply
        workers, weight = len(self.content), (1.0 if rate is None else rate) / len(self.content)
        if self.each >= self.numel:
            apply(Decoding(self.content, width, out.expand(workers, -1), weight, fresh=fresh))
            return out
        full = self.numel // self.each
        whole, rest = out[: full * self.each].view(full, self.each), out[full * self.each :][None]
        apply(Decoding(self.content[:full], width, whole, weight, fresh=fresh))
        if rest.numel():
            apply(Decoding(self.content[full : full + 1], width, rest, weight, self.each, fresh=fresh))
        return out


def summed(M: Tensor, exchange: Exchange) -> Generator[Work, None, Messages]:
    """Return the mean of all workers' M as it has arrived. It yields each collective that it starts.

    What rounding a sum loses stays in the M of the worker that owns this part of it. So with M' for what is left,
    Σ_w M'_w + W · mean = Σ_w M_w, except for fp32 rounding, with error feedback. M is [numel], contiguous, as long on
    all workers, and fp32 with error feedback. In a hierarchy, workers sum M within the node first. Each then averages
    its own part of the sum over the nodes.
    """
    inside = exchange.communicator.inside
    if inside is None:
        return (yield from _sum_of_workers(M, exchange))
    # Rows of equal length, one for each worker, with zeros at the end.
    each, M = -(-len(M) // inside.world_size), exchange.computed(M)
    rows = torch.nn.functional.pad(M, (0, inside.world_size * each - len(M))).view(inside.world_size, each)
    received = torch.empty_like(rows)
    yield inside.all_to_all(received, rows)
    own = received.sum(0, dtype=torch.float32)
    across = dataclasses.replace(exchange, communicator=exchange.communicator.across, terms=None)
    messages = yield from _sum_of_workers(own, across)
    mean = messages.write(torch.empty_like(own)).div_(inside.world_size)
    whole = mean.new_empty(inside.world_size, each)
    yield inside.all_gather(whole, mean)
    if exchange.keeps:
        # What is left of the node's sum lies with the worker that has sent this part.
        first = inside.index * each
        M.zero_()
        M[first : first + each] = own[: max(0, len(M) - first)]
    return Messages(len(M), whole.view(-1)[: len(M)], len(M), exchange.config)


def _sum_of_workers(M: Tensor, exchange: Exchange) -> Generator[Work, None, Messages]:
    """Do the same on one level.

    Both of two workers receive what the other one has sent, so that nothing is rounded a second time. With more, each
    worker owns a part of M: it receives this part from all workers, sums it, and sends the sum to all, quantized again.
    Either way, a worker sends and receives less than twice the bytes of its codes, however many workers there are.
    """
    config, communicator, numel = exchange.config, exchange.communicator, len(M)
    workers, worker = communicator.world_size, communicator.index
    if workers == 1 or not numel:
        mean = exchange.computed(M).to(torch.promote_types(M.dtype, torch.float32), copy=True)
        if exchange.keeps:
            M.zero_()
        return Messages(numel, mean, numel, config)
    if workers == 2:
        sent = exchange.memory_for("sent", M.device, exchange.bytes_of(numel))
        gathered = exchange.memory_for("gathered", M.device, workers, len(sent))
        exchange.encode(M, sent)
        yield communicator.all_gather(gathered, sent)
        return Messages(numel, gathered, numel, config)
    # Parts of equal length, but for the last ones, in whole groups of blocks that share bytes.
    unit = exchange.width.unit
    each = -(-numel // (workers * unit)) * unit
    own = exchange.computed(M[worker * each : (worker + 1) * each])
    own = own if exchange.keeps else own.to(torch.float32, copy=True)
    yield from _sum_part(M, own, [each] * workers, exchange)
    exchange, length = dataclasses.replace(exchange, terms=None), exchange.bytes_of(each)
    mine = exchange.memory_for("mine", M.device, length, zero=True)
    gathered = exchange.memory_for("gathered", M.device, workers, length)
    exchange.encode(own, mine[None], each, message=workers)
    yield communicator.all_gather(gathered, mine)
    return Messages(numel, gathered, each, config)


def _sum_part(M: Tensor, own: Tensor, sizes: Sequence[int], exchange: Exchange) -> Generator[Work, None, None]:
    """Send worker w its part of M, ``sizes[w]`` elements. Add the parts that the others send to ``own``, in fp32."""
    communicator = exchange.communicator
    workers, worker = communicator.world_size, communicator.index
    lengths = [exchange.bytes_of(size) for size in sizes]
    sent = exchange.memory_for("parts", M.device, sum(lengths), zero=True)
    received = exchange.memory_for("received", M.device, workers, lengths[worker])
    first = place = 0
    # Workers side by side whose parts have one size get a message. Not the own part, which is not rounded.
    groups = itertools.groupby(range(workers), lambda w: (w == worker, sizes[w]))
    for message, ((mine, size), alike) in enumerate(groups):
        count = len(list(alike))
        end, behind = first + count * size, place + count * exchange.bytes_of(size)
        if size and not mine:
            exchange.encode(M[first:end], sent[place:behind].view(count, -1), size, message=message)
        first, place = end, behind
    if len({*lengths}) == 1:
        yield communicator.all_to_all(received, sent.view(workers, -1))
    else:
        yield communicator.all_to_all(received.view(-1), sent, lengths)
    if not sizes[worker]:
        return
    # NaN where the own part is not finite, which counts as 0 otherwise.
    spoiled = own - own
    apply = difference_codec(exchange.config, own.device, own.dtype).apply
    apply(Decoding(received, exchange.width, own.expand(workers, -1), 1.0, sizes[worker]))
    own += spoiled


def scattered_mean(M: Tensor, shards: Shards, exchange: Exchange) -> Generator[Work, None, Tensor]:
    """Return the mean of all workers' M as ``summed`` does, but only this worker's shard; the rest is 0.

    A worker sends half as many bytes, and rounds no sum.
    """
    communicator, unit = exchange.communicator, exchange.width.unit
    sizes = [-(-sum(part.stop - part.start for part in parts) // unit) * unit for parts in shards]
    M = exchange.computed(M)
    whole = M.new_zeros(sum(sizes))
    rows = whole.split(sizes)
    places = [
        (row[end - (part.stop - part.start) : end], M[part])
        for row, parts in zip(rows, shards, strict=True)
        for part, end in zip(parts, itertools.accumulate(part.stop - part.start for part in parts), strict=True)
    ]
    torch._foreach_copy_([place for place, _ in places], [part for _, part in places])
    own = rows[communicator.index].float()
    yield from _sum_part(whole, own, sizes, dataclasses.replace(exchange, terms=None))
    mean, first = torch.zeros(len(M), dtype=torch.float32, device=M.device), 0
    own /= communicator.world_size
    for part in shards[communicator.index]:
        mean[part] = own[first : first + part.stop - part.start]
        first += part.stop - part.start
    if exchange.keeps:
        rows[communicator.index].zero_()
        M.zero_()
        torch._foreach_copy_([part for _, part in places], [place for place, _ in places])
    return mean


def _format(config: PowerSGDConfig) -> WireFormat | SparseFormat:
    found = flat_format(config)
    assert found is not None
    return found
