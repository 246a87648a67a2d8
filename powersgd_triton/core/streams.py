"""The CUDA streams on which an engine works."""

import contextlib
from collections.abc import Iterator

import torch

HIGH_PRIORITY = -1
"""Kernels of a compression are short and other workers wait for their results."""


class Streams:
    """One stream a device, on which all of an engine's work runs, whichever streams its callers use.

    The engine's memory is allocated, used and freed on this stream only. Otherwise, a hook on a framework's stream and
    a ``state_dict()`` on the main stream could use an error buffer at once. Messages travel on streams of the process
    group, and this stream waits for one only where its bucket goes on. So kernels overlap with messages.
    """

    def __init__(self) -> None:
        self._own: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def on(self, *devices: torch.device, wait: bool = True, join: bool = True) -> Iterator[None]:
        """Make the engine's streams, and their devices, current within this block. CPU devices have no streams.

        Args:
            devices: Devices of the tensors that the work uses.
            wait: Whether the work starts after everything that the caller's streams were given before. Without it, the
                work must use nothing that the caller has made since the streams last waited.
            join: Whether the caller's streams wait for the work. The host never waits. Without it, the caller must
                record the stream on the tensors that it passes, and wait for the results in another way.
        """
        with contextlib.ExitStack() as stack:
            for kind in {device.type for device in devices}:
                if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                    # It would change dtypes, and a backward pass may run within it.
                    stack.enter_context(torch.autocast(kind, enabled=False))
            for device in filter(has_streams, devices):
                caller = torch.cuda.current_stream(device)
                if device not in self._own:
                    self._own[device] = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
                own, is_current = self._own[device], torch.cuda.current_device() == device.index
                if own == caller and is_current:
                    # Within another block.
                    continue
                if own != caller and wait:
                    own.wait_stream(caller)
                if own != caller and join:
                    # When the block is left.
                    stack.callback(caller.wait_stream, own)
                if is_current:
                    # A tenth of the time that the context takes.
                    torch.cuda.set_stream(own)
                    stack.callback(torch.cuda.set_stream, caller)
                else:
                    # Also makes the device the current one, on which Triton launches kernels.
                    stack.enter_context(torch.cuda.stream(own))
            yield

    def everywhere(self) -> contextlib.AbstractContextManager[object]:
        """Make the engine's streams current on all devices on which it has worked."""
        return self.on(*self._own)


def is_captured(device: torch.device) -> bool:
    """Return whether work on the device is captured in a CUDA graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def has_streams(device: torch.device) -> bool:
    """Return whether work on the device is enqueued on streams."""
    return device.type == "cuda"
