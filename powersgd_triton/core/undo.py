"""Taking gradients out of the error buffers again."""

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from powersgd_triton.core.engine import Engine
from powersgd_triton.core.scheme import Listener, Task, watched
from powersgd_triton.ops.bucket import Bucket


class Undo(Listener):
    """Turns G + E back into E, but for its rounding, if an adapter sends the gradients of a step again."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = weakref.proxy(engine)
        # What was added to the error buffers in the step that ``begin`` began, and the number of steps before.
        self._added: dict[Bucket, Mapping[str, Tensor]] = {}
        self._ended = 0
        engine.listeners.append(self)

    def watch(self, task: Task) -> Task:
        """See ``Listener``. Other schemes than factors change no residuals before the step counts."""

        def after(stage: str, gradients: Mapping[str, Tensor], *_: Any) -> None:
            if stage in ("project", "backproject"):
                self._added[task.memory.bucket] = gradients

        return watched(task, lambda _: None, after)

    def begin(self) -> None:
        self._ended = self._engine.step.ended
        self._added.clear()

    @property
    def ended(self) -> bool:
        """Whether the step has ended, if only with an exception of a listener."""
        return self._engine.step.ended > self._ended

    def give_up(self) -> None:
        """Void the step, which has failed on this worker. Collective if others compress other shards."""
        engine = self._engine
        if engine.step.keys and engine.communicator.others:
            # They end the step too, and agree with this worker that it does not count. They may be gone.
            engine.void(stays_open=True)
            with contextlib.suppress(RuntimeError):
                engine.end_step()
        engine.void()

    def subtract(self, gradients: Mapping[str, Tensor]) -> None:
        """Subtract {name: G} from the error buffers to which it was added. Nobody has changed them since."""
        with self._engine.residuals.streams.everywhere():
            for bucket, added in self._added.items():
                # The workers of a node have added rows of their sum, which nobody overwrites.
                found = added if bucket.shared else gradients
                for name, M in bucket.buffers.items():
                    if name in gradients:
                        M.sub_(found[name].view_as(M))
            whole = self._engine.residuals.whole
            for held, M in whole.noted() if whole.notes else ():
                for name, part in held.named(M).items():
                    if name in gradients:
                        part.sub_(gradients[name].reshape_as(part))
        self._added.clear()
