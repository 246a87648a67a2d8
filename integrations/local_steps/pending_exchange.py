"""An exchange under way: pseudo-gradients that travel in fragments, while the workers may take their next steps."""

from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.comm.agreement import exhaust
from powersgd_triton.core.loading import on_streams
from powersgd_triton.core.undo import Undo
from powersgd_triton.integrations.local_steps.local_tensors import unpadded
from powersgd_triton.integrations.local_steps.outer_state import OuterState, Tensors
from powersgd_triton.ops.local_steps import go_on
from powersgd_triton.schemes.quantized import QuantizedAverage

FRAGMENT = 1 << 25
"""Elements of the model that are exchanged at a time, since an exchange needs memory for several copies of them."""


class PendingExchange:
    """An exchange under way. It is one step of the engine, and may take ``delay`` steps of the local optimizer.

    Attributes:
        gradients: {name: pseudo-gradient}, of which the exchange makes errors or means.
        finite: Whether this worker was finite, as a scalar on the device.
        begun: {name: local parameters when the exchange began}, with a delay.

    Args:
        meeting: Compares the workers; see ``Rounds``. It goes on when the exchange is advanced for the second time. By
            then, all workers have started the same collectives, so that all may stop.
        refused: Whether this worker has refused in the meeting. The others do not know yet, and wait for its messages.
            So it sends zeros.
    """

    def __init__(
        self, outer: OuterState, undo: Undo, delay: int, meeting: Generator[Any, None, Any], *, refused: bool
    ) -> None:
        self._engine, self._outer, self._undo = outer.engine, outer, undo
        self._meeting, self._refused = meeting, refused
        self.begun: Tensors = {}
        if refused:
            self.gradients, self.finite = outer.no_gradients(), torch.ones((), dtype=torch.bool, device=outer.device)
        elif delay:
            self.gradients, self.finite, self.begun = outer.begin()
        else:
            self.gradients, self.finite = outer.pseudo_gradients()
        self._delay = self._left = delay
        self._waiting = _fragments(self.gradients, delay)
        # Averages of quantized gradients, whose own memory has errors, and their names.
        self._averages: list[tuple[QuantizedAverage, list[str]]] = []
        self.counts = False
        undo.begin()

    def advance(self, *, finish: bool) -> bool:
        """Advance by one step, or to the end. Return whether the exchange has ended.

        An exception ends it too. Unless it ``counts``, the local parameters and the errors then have all changes.
        """
        finish = finish or self._left == 0
        # Without a fragment to start, advance those under way.
        fragments = self._waiting if finish else self._waiting[:1]
        try:
            if self._left < self._delay:
                self._hear()
            self._left, self._waiting = self._left - 1, self._waiting[len(fragments) :]
            for names in fragments:
                self._start(names)
            if finish:
                # First the messages: workers that have taken more steps may have sent them already.
                while self._engine.schedule:
                    self._engine.advance(self._outer.device)
                same = self._outer.exact.unchanged()
                verdict = self._engine.end_step()
                # In one copy, since the host waits for it.
                counts = same.new_ones(1) if verdict is None else verdict.view(1)
                *unchanged, number = torch.cat([same, counts]).tolist()
                self.counts = bool(number)
            elif not fragments:
                self._engine.advance(self._outer.device)
        except BaseException:
            # A user's function in telemetry, for example, comes after the end: the other workers count the exchange.
            self.counts = self._undo.ended
            if not self.counts:
                self._undo.give_up()
                self.take_back()
            raise
        if finish and self.counts:
            self._engine.sent += self._outer.exact.average(unchanged, self.finite)
        elif finish:
            self.take_back()
        return finish

    def apply(self, errors: Callable[[], Tensors], keep: float) -> None:
        """Update θ by what has arrived. Go on from θ − ``keep`` · {name: E}, with the changes since the exchange began.

        The parameters as it began are overwritten. If it raises an exception, as the outer optimizer may, call it again
        after the next step, whose changes are not lost. What was added to θ is not added again.
        """
        outer, begun = self._outer, self.begun
        try:
            kept = errors()
            self._update()
        except BaseException:
            begun |= {} if begun else outer.begin(self.finite)[2]
            raise
        own, theta = outer.local.tensors(), outer.theta()
        parameters = {name: (tensor, theta[name], begun.get(name), kept.get(name)) for name, tensor in own}
        outer.write(go_on(parameters, keep))

    def _update(self) -> None:
        """Update θ by what has arrived."""
        outer, theta = self._outer, self._outer.theta()
        padded = any(theta[name].shape != gradient.shape for name, gradient in self.gradients.items())
        rate = None if padded or not self._averages else outer.rate()
        with on_streams(self._engine):
            if rate is not None:
                # A mean that is only to be added need not be in memory.
                self.gradients = {}
                while self._averages:
                    average, names = self._averages[0]
                    average.add_to({name: theta[name] for name in names}, -rate)
                    del self._averages[0]
            elif self._averages:
                gradients = outer.local.memory({name: theta[name] for name in self.gradients}, outer.device)
                for average, names in self._averages:
                    average.reconstruct({name: gradients[name] for name in names}, None)
                self.gradients = gradients
                self._averages.clear()
        for name, mean in self.gradients.items():
            parameter = outer.shared[name]
            parameter.grad = unpadded(mean, parameter).to(parameter.device)
        outer.optimizer.step()
        outer.optimizer.zero_grad()
        self.gradients = {}

    def take_back(self) -> None:
        """Subtract the pseudo-gradients from the errors, since the next exchange sends them again."""
        outer = self._outer
        # Again, since means may have been written over them.
        gradients = outer.no_gradients() if self._refused else outer.pseudo_gradients(self.finite, self.begun)[0]
        # Where a sum was not finite, the average is NaN, and the engine has taken the gradient back itself.
        self._undo.subtract({name: gradients[name] for name, mean in self.gradients.items() if not mean.isnan().any()})

    def _hear(self) -> None:
        """Hear of the other workers. Parameters that were taken in since the beginning were equal to θ then."""
        exhaust(self._meeting)
        # Listing a model's parameters takes time, and this is called in every step of a delay.
        for name, tensor in self._outer.local.tensors() if 0 < len(self.begun) < len(self._outer.shared) else ():
            if name not in self.begun:
                self.begun[name] = self._outer.rounded(name, tensor).clone()

    def _start(self, names: list[str]) -> None:
        """Start averaging a fragment in place."""
        engine, gradients = self._engine, {name: self.gradients[name] for name in names}
        shapes = {name: self._outer.local.shapes[name] for name in names}
        bucket = engine.begin(tuple(names), lambda: shapes, self._outer.device, last=False)
        if engine.compressing:
            apart = bool(engine.config.quantize and engine.config.error_feedback)
            write = (lambda average: self._averages.append((average, names))) if apart else None
            engine.average(bucket, gradients, write=write)
            return
        flats = [gradient.view(-1) for gradient in gradients.values()]
        buffer, sizes = torch.cat(flats), [len(flat) for flat in flats]
        engine.average_exactly(buffer, done=lambda: torch._foreach_copy_(flats, buffer.split(sizes)))


def _fragments(tensors: Mapping[str, Tensor], delay: int) -> list[list[str]]:
    """Divide tensors into fragments that travel one after the other: lists of names."""
    sizes = {name: tensor.numel() for name, tensor in tensors.items() if tensor.numel()}
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
