"""How a worker that waits in a step hears that another one has called something else, such as ``save``, alone."""

import atexit
import contextlib
import datetime
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from powersgd_triton.config import logger

PATIENCE, WARNING = datetime.timedelta(seconds=1), datetime.timedelta(seconds=10)
"""After this time, a worker that waits in a step looks for calls, and one that waits in a call logs a warning."""


class DisagreementError(RuntimeError):
    """Workers differ in something that must be equal, or only some of them failed. It is raised on all workers."""


class Control:
    """What the workers of a group do, told in messages of their own through gloo.

    In one group, gloo would take a message about a call for the sum that another worker waits for, and end its process
    because the sizes differ.

    Args:
        group: The group. All of its workers must make a ``Control`` at the same time.

    Attributes:
        started: Collectives of steps that this worker has started in the group since the last call.
        answer: Takes part in a call of another worker. It raises an error on all workers.
        broken: Whether workers have started different collectives, so that further ones would sum what does not belong
            together.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store = PrefixStore("powersgd", _get_process_group_store(group))
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        self._group: Any = dist.ProcessGroupGloo(self._store, dist.get_rank(group), dist.get_world_size(group), timeout)
        self._calls, self.started, self._name = 0, 0, ""
        self.answer: Callable[[], object] | None = None
        self.broken = False

    def call(self, name: str, answer: Callable[[], object]) -> None:
        """Tell the others that this worker calls something in which all must take part, with ``start_gather`` next."""
        # Kept as the first worker says it: one that answers has started more.
        self._store.compare_set(f"call {self._calls}", "", str(self.started))
        self._calls, self.started, self._name, self.answer = self._calls + 1, 0, name, answer

    def start_gather(self, tensor: Tensor) -> Callable[[], list[Tensor]]:
        """Return a function that waits for every worker's tensor. All must have the same shape and dtype."""
        gathered = [torch.empty_like(tensor) for _ in range(self._group.size())]
        work, name = self._group.allgather([gathered], [tensor]), self._name

        def finish() -> list[Tensor]:
            if not _ended(work, WARNING):
                logger.warning("PowerSGD waits for the other workers in %s, which all workers must call", name)
            work.wait()
            return gathered

        return finish

    def look(self) -> None:
        """Take part in a call of a worker that has not started the collectives of this one, and will not."""
        key = f"call {self._calls}"
        if self.answer is not None and self._store.check([key]) and int(self._store.get(key)) < self.started:
            self.answer()


def uses_gloo(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether the group's collectives of tensors on the device are gloo's, for which the host waits."""
    # For example "cpu:gloo,cuda:nccl".
    return f"{device.type}:gloo" in dist.get_backend_config(group).split(",")


_controls: weakref.WeakKeyDictionary[dist.ProcessGroup, Control | None] = weakref.WeakKeyDictionary()
# Gloo's threads need Python when they end.
atexit.register(_controls.clear)


def control_of(group: dist.ProcessGroup | None, *, new: bool = False) -> Control | None:
    """Return the group's ``Control``, or make one if there is none and it may be ``new``. None for other backends."""
    group = group or dist.group.WORLD
    if group is None:
        return None
    if group not in _controls and new:
        _controls[group] = Control(group) if uses_gloo(group, torch.device("cpu")) else None
    return _controls.get(group)


def wait_and_look(work: dist.Work, controls: Sequence[Control]) -> None:
    """Wait for a collective of a step, and look for calls of other workers meanwhile.

    Raise the collective's error, or that of a call in which this worker does not take part.
    """
    while not _ended(work, PATIENCE):
        for control in controls:
            control.look()
    work.wait()


def _ended(work: Any, limit: datetime.timedelta) -> bool:
    """Wait for a collective. Return whether it has ended, if only with an error, within a time limit."""
    with contextlib.suppress(RuntimeError):
        work.wait(limit)
    return bool(work.is_completed())
