"""Times work on a device with its events and as a CUDA graph. On the CPU, for dry runs, with the host's clock."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import torch

Work = Callable[[], object]

SCRATCH_BYTES = 512 << 20
"""More than any L2. Writing it takes some 0.2 ms, for which a host may run ahead of its device."""

COPY_BYTES = 1 << 30
WARM_UP = 2
CYCLES = 10_000_000
AHEAD, LONGEST = 2, 20.0
"""By how many times the host's time the device waits before a round, and milliseconds at most: of work for which the
host itself waits, the device needs not wait as long."""
FEWEST, MOST = 5, 50


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median and interquartile range over the rounds."""

    median: float
    iqr: float
    rounds: int

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        lower, median, upper = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
        return cls(median, upper - lower, len(samples))


class CaptureError(RuntimeError):
    """Work cannot be captured as a CUDA graph."""


class Sleep:
    """Kernels that wait. On the CPU, nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._cycles = device, 0.0
        if device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(CYCLES)
            events[0].record()
            torch.cuda._sleep(CYCLES)
            events[1].record()
            events[1].synchronize()
            self._cycles = CYCLES / events[0].elapsed_time(events[1])

    def __call__(self, milliseconds: float) -> None:
        if self._cycles and milliseconds:
            torch.cuda._sleep(int(milliseconds * self._cycles))


class Clock:
    """Times work on one device.

    Before each round the L2 cache is overwritten, and the device then waits for as long as the host takes to enqueue
    the work. So the events around the work have no gaps between them in which the device waits for the host.

    Args:
        device: where the work runs.
        seconds: how long one measurement should take, within 5 and 50 rounds.
    """

    def __init__(self, device: torch.device, seconds: float = 0.3) -> None:
        self.device = device
        self._seconds = seconds
        self._on_device = device.type == "cuda"
        self._capturing, self._sleep = True, Sleep(device)

    def synchronize(self) -> None:
        if self._on_device:
            torch.cuda.synchronize(self.device)

    def flush(self) -> None:
        """Put something else into L2."""
        if self._on_device:
            _scratch(self.device).zero_()

    def measure(self, work: Work, before: Work = lambda: None) -> Timing:
        """Time ``work`` after ``before``, warm."""
        if not self._on_device:
            return Timing.of(self._samples(work, before, 1))
        for _ in range(WARM_UP):
            before()
            work()
        host = self.host(work, before)
        (once,) = self._samples(work, before, 1, host)
        rounds = max(FEWEST, min(MOST, int(self._seconds * 1e3 / max(once, 1e-3))))
        return Timing.of(self._samples(work, before, rounds, host))

    def host(self, work: Work, before: Work) -> float:
        """Return the milliseconds until ``work`` returns to the host, with nothing under way before."""
        before()
        self.synchronize()
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3

    def _samples(self, work: Work, before: Work, rounds: int, host: float = 0.0) -> list[float]:
        if not self._on_device:
            samples = []
            for _ in range(rounds):
                before()
                start = time.perf_counter()
                work()
                samples.append((time.perf_counter() - start) * 1e3)
            return samples
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
        for start_event, end_event in events:
            before()
            self.flush()
            self._sleep(min(AHEAD * host, LONGEST))
            start_event.record()
            work()
            end_event.record()
        self.synchronize()
        return [start_event.elapsed_time(end_event) for start_event, end_event in events]

    def capture(self, work: Work) -> Work:
        """``work``, warm, as a CUDA graph; returns what replays it. Not on the CPU.

        Raises:
            CaptureError: it waits for the device, or does something else that a graph cannot hold. Nothing is captured
                after that, as a broken capture can leave the allocator in a state of its own.
        """
        if not self._on_device:
            raise CaptureError("graphs are CUDA's")
        if not self._capturing:
            raise CaptureError("an earlier capture failed in this process")
        self.synchronize()
        stream = torch.cuda.Stream(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                # Other threads, NCCL's for one, may go on meanwhile.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
            graph.replay()
            self.synchronize()
        except Exception as error:
            self._capturing = False
            raise CaptureError(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        return graph.replay

    @functools.cached_property
    def copy_bandwidth(self) -> float:
        """GB/s of a plain copy, bytes read plus bytes written."""
        source = torch.rand(COPY_BYTES // 4 if self._on_device else 1 << 16, device=self.device)
        target = torch.empty_like(source)
        return gigabytes_per_second(2 * source.numel() * source.itemsize, self.measure(lambda: target.copy_(source)))


@functools.lru_cache(maxsize=1)
def _scratch(device: torch.device) -> torch.Tensor:
    return torch.empty(SCRATCH_BYTES // 4, dtype=torch.int32, device=device)


def gigabytes_per_second(moved: float, timing: Timing) -> float:
    """Rate at which bytes moved in a time."""
    return moved / max(timing.median, 1e-9) / 1e6


def why_it_waits(work: Work, device: torch.device) -> str:
    """Run work. Return what torch says of the first call of it that waits for the device, or nothing."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return ""
