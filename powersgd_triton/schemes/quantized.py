"""Quantized averages: whole tensors in a few bits an element, with error feedback or stochastic rounding."""

import dataclasses
import itertools
import zlib
from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Work
from powersgd_triton.comm.exchange import flat, flat_view
from powersgd_triton.core.scheme import FlatAverage, Ranges, Task
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.reference import note_overflow
from powersgd_triton.schemes.quantized_mean import Exchange, Memory, Messages, Shards, scattered_mean, summed


class Quantized:
    """The scheme of ``PowerSGDConfig(quantize=…)``: whole tensors, with a scale for each block.

    Without error feedback, nothing stays between steps. Random numbers are a function of the configuration's seed, the
    step, the worker and the bucket.
    """

    def prepare(self, task: Task) -> Memory:
        """Return the memory of the bucket's messages. A void step drops it: collectives under way may still use it."""
        task.residuals.enter(task.layout, task.device)
        return {}

    def average(self, task: Task) -> Generator[Work, None, "FlatAverage | QuantizedAverage"]:
        layout, step, config, communicator = task.layout, task.step, task.config, task.communicator
        if "shards" not in task.found:
            task.found["shards"] = _shards(task)
        shards: Shards | None = task.found["shards"]
        seed, terms = None, None
        if config.error_feedback:
            M, terms = task.residuals.whole.terms(layout, task.gradients, step)
        else:
            M = flat(layout, task.gradients)
            own = f"{config.seed} {step.iteration} {communicator.index} {layout.segments[0].name}"
            seed = zlib.crc32(own.encode())
        exchange = Exchange(config, communicator, seed, terms, task.memory)
        average: FlatAverage | QuantizedAverage
        if shards is None:
            messages = yield from summed(M, exchange)
            messages.note_infinite(step.verdict(M.device))
            average = QuantizedAverage(layout, messages)
        else:
            mean = yield from scattered_mean(M, shards, exchange)
            note_overflow(mean, step.verdict(M.device))
            # Each worker has looked at its own part.
            step.uneven = True
            average = FlatAverage(layout, mean)
        if config.error_feedback:
            task.residuals.whole.keep(layout, M, step)
        return average


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

    def add_to(self, tensors: Mapping[str, Tensor], rate: float) -> None:
        """Add ``rate`` times the average to tensors of fp32 or fp64: the same bits wherever they lie."""
        whole = flat(self.layout, tensors).to(self.messages.content.device)
        self.messages.write(whole, rate)
        if whole.data_ptr() != tensors[self.layout.segments[0].name].data_ptr():
            FlatAverage(self.layout, whole).reconstruct(tensors, None)

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
    own = torch.zeros(len(layout.segments), 2, dtype=torch.int64, device="cpu")
    for row, segment in zip(own, layout.segments, strict=True):
        if segment.name in task.ranges:
            start, target = task.ranges[segment.name]
            row += segment.offset + start
            row[1] += target.numel()
    places = communicator.gather(own, task.device).tolist()
    found = [[slice(*place) for place in worker if place[0] < place[1]] for worker in places]
    return found if 0 < sum(part.stop - part.start for part in itertools.chain(*found)) <= layout.numel else None
