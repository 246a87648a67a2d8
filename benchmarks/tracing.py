"""What a step starts on the device: launches, copies, waits of the host, and where the device's time goes.

python3 benchmarks/tracing.py [--gradients gpt2-124M] [--rank 4] [--provider ours] [--dry]

Several of each may be named; without any, all gradient sets at rank 4, ours and torch's hook, are summed up.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.environment import choose_interpreter, device_under_test, process_group
from benchmarks.shapes import GPU_GRADIENT_SETS, GRADIENT_SETS, TINY_GRADIENT_SETS

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")
WINDOW = "measured step"


@dataclasses.dataclass(frozen=True)
class DeviceEvent:
    """One kernel, copy or fill: name, start and duration in microseconds."""

    name: str
    start: float
    duration: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one piece of work did.

    Attributes:
        events: on the device, in the order of their starts.
        waits: how often the host waited for the device.
    """

    events: tuple[DeviceEvent, ...]
    waits: int

    @property
    def span(self) -> float:
        """Microseconds from the first start to the last end."""
        ends = [event.start + event.duration for event in self.events]
        return max(ends) - self.events[0].start if ends else 0.0

    @property
    def busy(self) -> float:
        """Microseconds of the span in which something ran."""
        total, until = 0.0, float("-inf")
        for event in self.events:
            end = event.start + event.duration
            total += max(0.0, end - max(event.start, until))
            until = max(until, end)
        return total

    def by_name(self) -> list[tuple[str, int, float]]:
        """(name, how often, microseconds) of each kind of event, the longest first."""
        durations: dict[str, list[float]] = {}
        for event in self.events:
            durations.setdefault(event.name, []).append(event.duration)
        kinds = [(name, len(found), sum(found)) for name, found in durations.items()]
        return sorted(kinds, key=lambda kind: -kind[2])


def read_trace(events: Sequence[dict[str, Any]]) -> Trace:
    """The device's events and the host's waits in a Chrome trace with one ``WINDOW``."""
    window = next((e for e in events if e.get("name") == WINDOW and e.get("cat") == "user_annotation"), None)
    first = window["ts"] if window else float("-inf")
    last = first + window["dur"] if window else float("inf")
    device = [
        DeviceEvent(event["name"], float(event["ts"]), float(event.get("dur", 0)))
        for event in events
        if event.get("cat") in DEVICE_CATEGORIES
    ]
    # The profiler itself waits before and after.
    waits = [e for e in events if e.get("name") in WAITS and first <= e["ts"] <= last]
    return Trace(tuple(sorted(device, key=lambda event: event.start)), len(waits))


def trace(work: Callable[[], object], device: torch.device) -> Trace:
    """Run ``work``, warm, under the profiler."""
    on_device = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    if on_device:
        torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        with record_function(WINDOW):
            work()
        if on_device:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text())["traceEvents"])


def describe(found: Trace, longest: int = 12) -> str:
    """A table of the kinds of events, the longest first."""
    if not found.events:
        return "  the profiler saw nothing on the device"
    lines = [
        f"  {len(found.events)} launches and copies, {found.waits} waits of the host; from first to last "
        f"{found.span:.1f} µs, of which the device was busy {found.busy:.1f} µs ({found.busy / found.span:.0%})"
    ]
    kinds = found.by_name()
    lines += [f"  {time:>10.1f} µs {count:>6} × {name[:90]}" for name, count, time in kinds[:longest]]
    if len(kinds) > longest:
        rest = kinds[longest:]
        lines.append(
            f"  {sum(t for _, _, t in rest):>10.1f} µs {sum(c for _, c, _ in rest):>6} × {len(rest)} other kinds"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gradients", action="append", help="default: all")
    parser.add_argument("--rank", action="append", type=int, help="default: 4")
    parser.add_argument("--provider", action="append", help="default: ours and torch")
    parser.add_argument("--dry", action="store_true", help="a tiny gradient set, in the interpreter without a GPU")
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        parser.error("this needs a CUDA device; try --dry")
    choose_interpreter()
    # What imports triton, after the interpreter was chosen.
    from benchmarks.buckets import FilledBucket
    from benchmarks.providers import STEP_PROVIDERS

    device = device_under_test()
    with process_group():
        trace(lambda: None, device)  # the first session of a process misses events
        for gradients in options.gradients or (TINY_GRADIENT_SETS if options.dry else GPU_GRADIENT_SETS):
            bucket = FilledBucket(GRADIENT_SETS[gradients], device)
            for rank, provider in itertools.product(options.rank or [4], options.provider or ["ours", "torch"]):
                step = STEP_PROVIDERS[provider](rank)
                for _ in range(3):
                    bucket.refill()
                    step(bucket)
                bucket.refill()
                print(f"{gradients}, rank {rank}, {provider}")
                print(describe(trace(functools.partial(step, bucket), device)), flush=True)


if __name__ == "__main__":
    main()
