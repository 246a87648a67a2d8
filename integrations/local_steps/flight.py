"""An exchange under way: differences that travel in fragments, while the workers may take their next steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from powersgd_triton.core.engine import Engine
from powersgd_triton.core.loading import adopt
from powersgd_triton.core.saved_state import LoadReport, SavedState
from powersgd_triton.integrations.local_steps.replica import Tensors

FRAGMENT = 1 << 25
"""Elements of the model that are exchanged at a time, since an exchange needs memory for several copies of them."""


class Flight:
    """An exchange under way.

    Args:
        engine: Engine that averages the differences. An exchange is one of its steps.
        differences: {name: θ − local parameters}, which the exchange replaces by their means.
        delay: Number of steps that it may take. 0 for none.
        since: Number of steps whose changes are exchanged.
        begun: {name: local parameters when the exchange began}, with a delay.

    Attributes:
        differences, since, begun: See above.
    """

    def __init__(
        self, engine: Engine, differences: Tensors, delay: int, since: int, begun: Tensors | None = None
    ) -> None:
        self.differences, self.since, self.begun = differences, since, begun
        self._engine, self._delay, self._steps = engine, delay, 0
        self._waiting = _fragments(differences, delay)
        # Not if it or the exchange of another shard has failed.
        self._applied = True
        self._ended = engine.step.ended
        # A step that fails leaves factors' errors with the differences in them. Errors of codes stay as they were.
        self._before: SavedState | None = None
        if engine.config.codes is None:
            self._before = dataclasses.replace(engine.residuals.save(engine.step, lambda error: error), own=True)

    @property
    def arrived(self) -> bool:
        """Whether the exchange has ended."""
        return self._engine.step.ended > self._ended

    @property
    def counts(self) -> bool:
        """Whether it has ended and counts, so that the differences are their means."""
        return self.arrived and self._applied

    def travel(self) -> None:
        """Advance by one step."""
        self._steps += 1
        if self._steps > self._delay:
            self.finish()
        else:
            # The first call only starts the first fragment.
            self._run(self._waiting[:1], finish=False)

    def finish(self) -> None:
        """Wait until it has arrived."""
        self._run(self._waiting, finish=True)

    def _run(self, fragments: Sequence[list[str]], *, finish: bool) -> None:
        """Start fragments, or advance those under way if none is left. With ``finish``, finish all.

        If that fails before it has arrived, the exchange has not been: the local parameters still have all changes.
        """
        engine = self._engine
        self._waiting = self._waiting[len(fragments) :]
        try:
            for names in fragments:
                self._start(names)
            if finish:
                verdict = engine.end_step()
                self._applied = verdict is None or bool(verdict)
            elif not fragments:
                engine.advance(next(iter(self.differences.values())).device)
        except BaseException:
            if not self.arrived:
                self._undo()
            raise

    def _undo(self) -> None:
        """Leave the engine as it was before the exchange. If other shards were exchanged, they hear of the failure."""
        engine, self._applied = self._engine, False
        if engine.step.keys and engine.communicator.others:
            # The workers that hold them end the step too, and agree with this one that it does not count. They may be
            # gone.
            with contextlib.suppress(RuntimeError):
                engine.end_step()
        engine.void()
        if self._before is not None:
            adopt(engine, self._before, LoadReport())

    def _start(self, names: list[str]) -> None:
        """Start averaging a fragment in place."""
        engine, differences = self._engine, {name: self.differences[name] for name in names}
        shapes = {name: tuple(difference.shape) for name, difference in differences.items()}
        bucket = engine.begin(tuple(names), shapes.copy, differences[names[0]].device, last=False)
        if engine.compressing:
            engine.average(bucket, differences)
            return
        buffer = torch.cat([difference.view(-1) for difference in differences.values()])
        engine.average_exactly(buffer, done=functools.partial(_split, buffer, differences))


def _fragments(differences: Mapping[str, Tensor], delay: int) -> list[list[str]]:
    """Divide tensors into fragments that travel one after the other: lists of names."""
    sizes = {name: math.prod(difference.shape) for name, difference in differences.items() if difference.numel()}
    # With a delay, the next one leaves in the next step, so that the host never waits for the one before.
    most = -(-sum(sizes.values()) // max(1, delay - 1)) if delay else FRAGMENT
    fragments: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if fragments[-1] and filled + size > most:
            fragments.append([])
            filled = 0
        fragments[-1].append(name)
        filled += size
    return fragments


def _split(buffer: Tensor, out: Mapping[str, Tensor]) -> None:
    """Copy a flat buffer to tensors."""
    for tensor, part in zip(out.values(), buffer.split([t.numel() for t in out.values()]), strict=True):
        tensor.view(-1).copy_(part)
