"""Quantized averages: whole tensors in a few bits an element, with error feedback or stochastic rounding."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
import zlib
from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator, Work
from powersgd_triton.comm.exchange import flat, flat_view
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.scheme import FlatAverage, Ranges, Scheme, Task
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.wire_format import BLOCK, QUANTIZED, WireFormat
from powersgd_triton.ops.backends import difference_codec
from powersgd_triton.ops.reference import note_overflow

RECEIVED = ("received", "gathered")
"""Messages that are not sent."""
Mean = Generator[Work, None, Tensor]
"""Yields each collective that it starts, and returns the average."""
INFINITE_BF16 = 0x7F80
"""Bits of the smallest positive bf16 number that is not finite."""
Shards = list[list[slice]]
"""The elements of a bucket whose averages each worker needs."""
Memory = dict[str, Tensor]
"""A bucket's messages on the CPU, where memory that is new in each step takes longer than the codec."""


class Quantized(Scheme):
    """The scheme of ``PowerSGDConfig(quantize=…)``: whole tensors, with a scale for each block.

    Without error feedback, nothing stays between steps. Random numbers are a function of the configuration's seed, the
    step, the worker and the bucket.
    """

    def __init__(self) -> None:
        # Of each bucket. They stay if a step is void, since only some workers may have noticed that.
        self._shards: weakref.WeakKeyDictionary[Layout, Shards | None] = weakref.WeakKeyDictionary()
        self._memory: weakref.WeakKeyDictionary[Layout, Memory] = weakref.WeakKeyDictionary()

    def prepare(self, task: Task) -> None:
        """Note the tensors."""
        task.residuals.enter(task.layout, task.device)

    def average(self, task: Task) -> Generator[Work, None, FlatAverage | QuantizedAverage]:
        layout, step, config, communicator = task.layout, task.step, task.config, task.communicator
        if layout not in self._shards:
            self._shards[layout] = _shards(task)
        shards, memory, seed = self._shards[layout], self._memory.setdefault(layout, {}), None
        if config.error_feedback:
            M = task.residuals.compensated(layout, task.gradients, step)
        else:
            M = flat(layout, task.gradients)
            own = f"{config.seed} {step.iteration} {communicator.index} {layout.segments[0].name}"
            seed = zlib.crc32(own.encode())
        average: FlatAverage | QuantizedAverage
        if shards is None:
            messages = yield from _summed(M, config, communicator, seed, memory)
            step.verdict(M.device).mul_(messages.finite)
            average = QuantizedAverage(layout, messages)
        else:
            mean = yield from scattered_mean(M, shards, config, communicator, seed, memory)
            note_overflow(mean, step.verdict(M.device))
            # Each worker has looked at its own part.
            step.uneven = True
            average = FlatAverage(layout, mean)
        if config.error_feedback:
            task.residuals.keep(layout, M, step)
        return average


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

    @property
    def finite(self) -> Tensor:
        """Whether the mean is finite, a bool on its device."""
        content = self.content
        if content.dtype == torch.uint8:
            width = _format(self.config)
            # Codes are finite where their scales are.
            end = width.difference_bytes(self.each)[0] if width.scaled else content.shape[1]
            # Encoders write ``BF16_NAN``, which has no sign, for what is not finite: no finite number has more bits.
            return content[:, :end].view(torch.int16).amax() < INFINITE_BF16
        return content.isfinite().all()

    def write(self, out: Tensor) -> Tensor:
        """Write the mean to ``out`` [numel], fp32 and contiguous, and return it."""
        if self.content.dtype != torch.uint8:
            return out.copy_(self.content)
        width, (_, apply) = _format(self.config), difference_codec(self.config, out.device, out.dtype)
        workers = len(self.content)
        if self.each >= self.numel:
            apply(self.content, width, out.expand(workers, -1), 1 / workers, fresh=True)
            return out
        full = self.numel // self.each
        apply(self.content[:full], width, out[: full * self.each].view(full, self.each), 1 / workers, fresh=True)
        if full * self.each < self.numel:
            apply(
                self.content[full : full + 1], width, out[full * self.each :][None], 1 / workers, self.each, fresh=True
            )
        return out


@dataclasses.dataclass(frozen=True)
class QuantizedAverage:
    """An average that is decoded where it is written."""

    layout: Layout
    messages: Messages

    def reconstruct(self, out: Mapping[str, Tensor], overflow: Tensor | None) -> None:
        whole = flat_view(self.layout, out) if len(out) == len(self.layout.segments) else None
        if whole is None or whole.dtype != torch.float32:
            self._decoded().reconstruct(out, overflow)
        else:
            self.messages.write(whole)

    def reconstruct_ranges(self, out: Ranges, overflow: Tensor | None) -> None:
        self._decoded().reconstruct_ranges(out, overflow)

    def _decoded(self) -> FlatAverage:
        content = self.messages.content
        dtype = torch.float32 if content.dtype == torch.uint8 else content.dtype
        whole = torch.empty(self.messages.numel, dtype=dtype, device=content.device)
        return FlatAverage(self.layout, self.messages.write(whole))


def _shards(task: Task) -> Shards | None:
    """Return which averages each worker needs, or None if not each is needed by one worker. Collective."""
    layout, communicator = task.layout, task.communicator
    if task.ranges is None or communicator.world_size == 1 or communicator.inside is not None:
        return None
    own = torch.zeros(len(layout.segments), 2, dtype=torch.int64)
    for row, segment in zip(own, layout.segments, strict=True):
        if segment.name in task.ranges:
            start, target = task.ranges[segment.name]
            row += segment.offset + start
            row[1] += target.numel()
    places = communicator.gather(own, task.device).tolist()
    found = [[slice(*place) for place in worker if place[0] < place[1]] for worker in places]
    return found if 0 < sum(part.stop - part.start for part in itertools.chain(*found)) <= layout.numel else None


def quantized_mean(M: Tensor, config: PowerSGDConfig, communicator: Communicator, seed: int | None = None) -> Mean:
    """Return the mean of all workers' M in fp32. With error feedback, M keeps what this worker has not sent yet.

    What rounding a sum loses stays in the M of the worker that owns this part of it. So with M' for what is left,
    Σ_w M'_w + W · mean = Σ_w M_w, except for fp32 rounding. Without error feedback M stays as it is, and a ``seed``
    below 2³² makes rounding stochastic. M is [numel], contiguous, as long on all workers, and fp32 with error feedback.
    In a hierarchy, workers sum M within the node first, and each averages its own part of the sum over the nodes.
    """
    messages = yield from _summed(M, config, communicator, seed, {})
    return messages.write(torch.empty(len(M), device=M.device))


def _summed(
    M: Tensor, config: PowerSGDConfig, communicator: Communicator, seed: int | None, memory: Memory
) -> Generator[Work, None, Messages]:
    inside = communicator.inside
    if inside is None:
        return (yield from _sum_of_workers(M, config, communicator, seed, memory))
    # Rows of equal length, one for each worker, with zeros at the end.
    each = -(-len(M) // inside.world_size)
    rows = torch.nn.functional.pad(M, (0, inside.world_size * each - len(M))).view(inside.world_size, each)
    received = torch.empty_like(rows)
    yield inside.all_to_all(received, rows)
    own = received.sum(0, dtype=torch.float32)
    messages = yield from _sum_of_workers(own, config, communicator.across, seed, memory)
    mean = messages.write(torch.empty_like(own)).div_(inside.world_size)
    whole = mean.new_empty(inside.world_size, each)
    yield inside.all_gather(whole, mean)
    if config.error_feedback:
        # What is left of the node's sum lies with the worker that has sent this part.
        first = inside.index * each
        M.zero_()
        M[first : first + each] = own[: max(0, len(M) - first)]
    return Messages(len(M), whole.view(-1)[: len(M)], len(M), config)


def _sum_of_workers(
    M: Tensor, config: PowerSGDConfig, communicator: Communicator, seed: int | None, memory: Memory
) -> Generator[Work, None, Messages]:
    """Do the same on one level.

    Both of two workers receive what the other one has sent, so that nothing is rounded a second time. With more, each
    worker owns a part of M: it receives this part from all workers, sums it, and sends the sum to all, quantized again.
    Either way, a worker sends and receives less than twice the bytes of its codes, however many workers there are.
    """
    workers, worker, keeps, numel = communicator.world_size, communicator.index, bool(config.error_feedback), len(M)
    if workers == 1 or not numel:
        mean = M.to(torch.promote_types(M.dtype, torch.float32), copy=True)
        if keeps:
            M.zero_()
        return Messages(numel, mean, numel, config)
    width, (encode, _) = _format(config), difference_codec(config, M.device, M.dtype)
    if workers == 2:
        sent = _bytes(memory, "sent", M, numel, config)
        gathered = _bytes(memory, "gathered", M, numel, config, workers)
        encode(M, None, width, sent, keeps, seed=seed)
        yield communicator.all_gather(gathered, sent)
        return Messages(numel, gathered, numel, config)
    # Parts of equal length, but for the last ones, in whole groups of blocks that share bytes.
    unit = BLOCK * width.blocks
    each = -(-numel // (workers * unit)) * unit
    own = M[worker * each : (worker + 1) * each]
    own = own if keeps else own.to(torch.float32, copy=True)
    yield from _sum_part(M, own, each, config, communicator, seed, memory)
    mine, gathered = _bytes(memory, "mine", M, each, config), _bytes(memory, "gathered", M, each, config, workers)
    encode(own, None, width, mine[None], keeps, each, _other(seed, 2))
    yield communicator.all_gather(gathered, mine)
    return Messages(numel, gathered, each, config)


def _sum_part(
    M: Tensor,
    own: Tensor,
    each: int,
    config: PowerSGDConfig,
    communicator: Communicator,
    seed: int | None,
    memory: Memory,
) -> Generator[Work, None, None]:
    """Send each worker its part of M, ``each`` elements. Add the parts that the others send to ``own``, in fp32."""
    workers, worker, keeps = communicator.world_size, communicator.index, bool(config.error_feedback)
    width, (encode, apply) = _format(config), difference_codec(config, M.device, M.dtype)
    sent, received = (_bytes(memory, name, M, each, config, workers) for name in ("sent", "received"))
    # Not the own part, which is not sent and so not rounded.
    encode(M[: worker * each], None, width, sent[:worker], keeps, each, seed)
    encode(M[(worker + 1) * each :], None, width, sent[worker + 1 :], keeps, each, _other(seed, 1))
    yield communicator.all_to_all(received, sent)
    # NaN where the own part is not finite, which counts as 0 otherwise.
    spoiled = own - own
    apply(received, width, own.expand(workers, -1), 1.0, each)
    own += spoiled


def scattered_mean(
    M: Tensor,
    shards: Shards,
    config: PowerSGDConfig,
    communicator: Communicator,
    seed: int | None,
    memory: Memory,
) -> Mean:
    """Return the mean of all workers' M as ``quantized_mean`` does, but only this worker's shard; the rest is 0.

    A worker sends half as many bytes, and rounds no sum.
    """
    unit = BLOCK * _format(config).blocks
    each = max(sum(part.stop - part.start for part in parts) for parts in shards)
    each = -(-each // unit) * unit
    rows = M.new_zeros(communicator.world_size, each)
    places = [
        (row[end - (part.stop - part.start) : end], M[part])
        for row, parts in zip(rows, shards, strict=True)
        for part, end in zip(parts, itertools.accumulate(part.stop - part.start for part in parts), strict=True)
    ]
    torch._foreach_copy_([place for place, _ in places], [part for _, part in places])
    own = rows[communicator.index].float()
    yield from _sum_part(rows.view(-1), own, each, config, communicator, seed, memory)
    mean, first = torch.zeros(len(M), device=M.device), 0
    own /= communicator.world_size
    for part in shards[communicator.index]:
        mean[part] = own[first : first + part.stop - part.start]
        first += part.stop - part.start
    if config.error_feedback:
        rows[communicator.index] = 0
        M.zero_()
        torch._foreach_copy_([part for _, part in places], [place for place, _ in places])
    return mean


def _format(config: PowerSGDConfig) -> WireFormat:
    assert config.quantize is not None
    return QUANTIZED[config.quantize]


def _bytes(memory: Memory, name: str, M: Tensor, numel: int, config: PowerSGDConfig, *rows: int) -> Tensor:
    """Return memory for messages. What is sent is zero: the end of a shorter part is sent too, and adds nothing.

    On the CPU, it may be that of the last step, in which the same bytes were zero.
    """
    shape = (*rows, _format(config).difference_bytes(numel)[1])
    if name in memory and memory[name].shape == shape:
        return memory[name]
    new = torch.empty if name in RECEIVED else torch.zeros
    found = new(shape, dtype=torch.uint8, device=M.device)
    if M.device.type == "cpu":
        memory[name] = found
    return found


def _other(seed: int | None, number: int) -> int | None:
    """Return the seed of another message of the step."""
    return None if seed is None else (seed + number * 0x9E3779B9) % 2**32
