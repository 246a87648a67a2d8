"""The progress of a training."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """Shows a progress bar with loss and bytes on a terminal, and prints ten lines elsewhere.

    Args:
        title: Title of the bar.
        steps: Number of steps.
        shown: Whether this worker shows progress.
    """

    def __init__(self, title: str, steps: int, *, shown: bool) -> None:
        self._title, self._steps, self._shown = title, steps, shown
        self._done = 0
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=steps, desc=f"{title:<16}", unit="step", mininterval=0.5)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, loss: float, bytes_sent: float) -> None:
        """Count a finished step."""
        self._done += 1
        figures = f"loss {loss:.3f}, {bytes_sent / 1e6:.1f} MB sent"
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update()
        elif self._shown and self._done * 10 // self._steps > (self._done - 1) * 10 // self._steps:
            print(f"{self._title:<16} step {self._done}/{self._steps}: {figures}", file=sys.stderr, flush=True)
