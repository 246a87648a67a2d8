"""What a step has sent, until it is known whether the step was applied."""

import weakref
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.core.engine import Engine
from powersgd_triton.core.scheme import Listener, Task, watched
from powersgd_triton.ops.bucket import Bucket


class Unsettled(Listener):
    """Keeps P̂ and this worker's own Q of the last step, also if it was interrupted, until ``settle``.

    A worker that hears of a failure in a step's last collective does not know whether the others have finished the step
    and apply it. If they do, they apply what it has sent, and its error must lose that. (Every worker contributes to
    every collective. So the others cannot finish a step of which this worker has not begun the last one.)
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = weakref.proxy(engine)
        self._whole = engine.residuals.whole
        self.products: dict[Bucket, list[tuple[Tensor, Tensor]]] = {}
        # What was sent of other tensors, if the adapter sends it again.
        self.exact: dict[str, Tensor] = {}
        self._void = False
        self._whole.late = self._whole.notes = True
        engine.listeners.append(self)

    def obstacle(self) -> str | None:
        return "the host decides about each step"

    def watch(self, task: Task) -> Task:
        bucket: Any = getattr(task.memory, "bucket", None)
        earlier: list[tuple[Tensor, Tensor]] = []

        def before(stage: str) -> None:
            if stage == "commit" and task.config.iterations > 1 and bucket in self.products:
                # The next repetition overwrites the factors.
                P, Q = self.products[bucket][-1]
                earlier.append((P.clone(), Q.clone()))

        def after(stage: str, *_: Any) -> None:
            if stage == "backproject":
                self.products[bucket] = [*earlier, (bucket.P_hat, bucket.Q)]
            elif stage == "project" and task.config.algorithm == "alternating":
                self.products[bucket] = [*earlier, (bucket.P, bucket.basis)]

        return watched(task, before, after)

    def names(self) -> set[str]:
        """Return the names of the tensors of which it is known what was sent."""
        sent = {segment.name for bucket in self.products for segment in bucket.layout.compressed}
        return sent | {segment.name for held, _ in self._whole.noted() for segment in held.layout.segments}

    def end_step(self) -> None:
        self._engine.step.undecided = True

    def void(self) -> None:
        step = self._engine.step
        if not step.keys:
            return
        for held, M in self._whole.noted():
            scale = step.scale(M.device)
            if not held.left and scale is not None:
                M.div_(scale)
            held.left = True
        self._void = True
        self.end_step()

    def forget(self) -> None:
        """Forget what was sent: the errors have lost it, or become zero."""
        self.products.clear()
        self.exact = {}

    def settle(self, *, applied: bool) -> None:
        """Let errors lose what the last step has sent if it was ``applied``. Else they keep it."""
        whole, self._engine.step.undecided = self._whole, False
        with self._engine.residuals.streams.everywhere():
            for bucket, product in self.products.items():
                if not applied and bucket.applied is not None:
                    bucket.applied.zero_()
                elif applied and self._void and bucket.M:
                    bucket.product = product
                    bucket.applied = torch.ones((), dtype=torch.int64, device=bucket.message_P.device)
            verdict, noted = whole.verdict, whole.noted()
            if verdict is not None or noted:
                if verdict is None or self._void or not applied:
                    device = noted[0][1].device if verdict is None else verdict.device
                    verdict = torch.full((), int(applied), device=device)
                whole.verdict = verdict
                whole.settle(self._engine.step)
            if applied:
                whole.hold({name: -sent for name, sent in self.exact.items()})
        self.forget()
        self._void = False
