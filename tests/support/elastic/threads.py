"""Workers as threads, of which one runs at a time."""

import threading
import traceback
from collections.abc import Callable
from typing import Any

from tests.support.elastic.trainers import Trainer


class Killed(BaseException):
    """Ends the thread of a worker that is killed."""


class Worker:
    """A thread that runs when it is told to, and until it waits.

    Attributes:
        ready: Returns whether it can go on.
        failed: The traceback of its exception.
    """

    def __init__(self, name: int, act: Callable[["Worker"], None], others: threading.Semaphore) -> None:
        self.name, self.others, self.turn = name, others, threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.done, self.stopped, self.failed = False, False, ""
        self.log: list[dict[str, Any]] = []
        self.manager: Any = None
        self.trainer: Trainer | None = None
        threading.Thread(target=self._run, args=(act,), daemon=True).start()

    def _run(self, act: Callable[["Worker"], None]) -> None:
        self.turn.acquire()
        try:
            act(self)
        except Killed:
            pass
        except BaseException:
            self.failed = traceback.format_exc()
        self.done = True
        self.others.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let the others run until ``ready`` returns True."""
        self.ready = ready
        self.others.release()
        self.turn.acquire()
        self.ready = lambda: True
