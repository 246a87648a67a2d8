"""Averages the gradients of a model's buckets, several of them on their way at once."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from powersgd_triton.comm.agreement import Agreement
from powersgd_triton.comm.communicator import Communicator, wait
from powersgd_triton.compressor import Compression
from powersgd_triton.core.replanner import Replanner
from powersgd_triton.core.state import State
from powersgd_triton.layout.layout import Layout


class Reducer:
    """Replaces gradients by their averages over the workers, bucket by bucket as the backward pass fills them.

    A bucket's step has stages, with a collective between them. On the CPU each call starts the new bucket's
    first stage and moves those before it one stage on, so that their messages travel while the backward pass goes on.
    Which collective is issued when depends on nothing but the order of the calls, hence is the same on all workers.
    On other devices all stages are enqueued at once on the current stream.

    Args:
        state: the model's state.
        communicator: whom to average with.
        others: groups of further workers that compress the same model, so that all together are compared.
    """

    def __init__(self, state: State, communicator: Communicator, others: Sequence[Communicator] = ()) -> None:
        self._state = state
        self._communicator = communicator
        self._agreement = Agreement(state, [communicator, *others])
        self._replanner = Replanner(state, communicator)
        self._under_way: collections.deque[Iterator[None]] = collections.deque()

    def reduce(
        self,
        layout: Layout,
        gradients: Mapping[str, Tensor],
        *,
        last: bool,
        done: Callable[[], None],
        ranges: Mapping[str, tuple[int, Tensor]] | None = None,
    ) -> None:
        """Average one bucket's gradients in place, compressed.

        Args:
            layout: its tensors; the same object whenever it is the same bucket.
            gradients: {name: contiguous tensor}, which no one else touches before ``done`` is called.
            last: whether the step ends with this bucket; if so all buckets are done on return, and the caller closes
                the step with ``end_step()``.
            done: called once the averages are written (or enqueued, on a device).
            ranges: what to write instead of all of the averages, see ``reconstruct_ranges``; the gradients stay.
        """
        device = next(iter(gradients.values())).device
        self._advance(self._compressed(layout, gradients, done, ranges), last or device.type != "cpu")

    def average(self, buffer: Tensor, *, last: bool, done: Callable[[], None]) -> None:
        """Average one bucket's flat buffer in place, exactly. Arguments as for ``reduce``."""
        self._advance(self._exact(buffer, done), last or buffer.device.type != "cpu")

    @property
    def checked(self) -> bool:
        """Whether ``check`` was done."""
        return self._agreement.begun

    def check(self, tensors: Mapping[str, Sequence[int]], device: torch.device) -> None:
        """Before the first bucket: see ``Agreement.begin``."""
        self._agreement.begin(tensors, device)

    def begin_step(self) -> None:
        """Where the backward pass before did not come to its end: forget its buckets, see ``State.void_step``."""
        if self._under_way or self._state.interrupted:
            self._void()

    def end_step(self) -> None:
        """Close a step whose buckets are all done."""
        self._state.end_step()
        self._agreement.end_step()
        self._replanner.end_step()

    def _void(self) -> None:
        self._under_way.clear()
        self._state.void_step()

    def _advance(self, newcomer: Iterator[None], to_the_end: bool) -> None:
        try:
            next(newcomer)
            older, self._under_way = self._under_way, collections.deque()
            self._under_way.extend(steps for steps in older if next(steps, self) is not self)
            self._under_way.append(newcomer)
            while to_the_end and self._under_way:
                steps = self._under_way.popleft()
                if next(steps, self) is not self:
                    self._under_way.append(steps)
        except BaseException:
            # A peer may be gone: nothing that is on its way is waited for.
            self._void()
            raise

    def _compressed(
        self,
        layout: Layout,
        gradients: Mapping[str, Tensor],
        done: Callable[[], None],
        ranges: Mapping[str, tuple[int, Tensor]] | None,
    ) -> Iterator[None]:
        compression = Compression(self._state, layout, gradients, self._communicator)
        yield from compression.run()
        if ranges is None:
            compression.reconstruct(gradients)
        else:
            compression.reconstruct_ranges(ranges)
        done()

    def _exact(self, buffer: Tensor, done: Callable[[], None]) -> Iterator[None]:
        work = self._communicator.all_reduce(buffer)
        yield
        wait(work)
        buffer.div_(self._communicator.world_size)
        done()
