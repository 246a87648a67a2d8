"""What a step costs the host, without a GPU: launches, kernels to compile, uploads, calls, and microseconds.

python benchmarks/host_time.py [--json] [--rank 4] [--steps 300]

Kernels are compiled for sm_90 and go through Triton's own launcher to a driver that does nothing (``stub_driver.py``).
Microseconds are the least CPU time of many steps, beside what Triton's launch of the same kernels takes. Calls of
functions, as Python's profiler counts them, do not depend on the machine.
"""

import argparse
import contextlib
import cProfile
import dataclasses
import functools
import json
import math
import pstats
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Before torch and triton are imported by these, the stub has taken the interpreter out of the environment.
import torch
import torch.distributed as dist
import triton
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.buckets import FilledBucket, ddp_buckets
from benchmarks.markdown import markdown_table
from benchmarks.network.stand_ins import CountedWorker
from benchmarks.shapes import GRADIENT_SETS
from benchmarks.stub_driver import stub_driver
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations import ddp
from powersgd_triton.kernels import launcher, table
from powersgd_triton.ops import backends
from powersgd_triton.ops.triton_backend import TritonBackend
from powersgd_triton.planning import bucket_caps
from powersgd_triton.planning.models import Shapes
from powersgd_triton.schemes import new_engine

WORKERS = 4
STAGES = ("project", "backproject", "commit", "reconstruct")
DEVICE = torch.device("cpu")


class Training:
    """Steps of a model whose gradients come in flat buckets, each time at another place."""

    def __init__(self, shapes: Shapes, config: PowerSGDConfig) -> None:
        buckets = bucket_caps.ddp_buckets({str(number): shape for number, shape in enumerate(shapes)})
        self._buckets, self.buckets = buckets, len(buckets)
        self._shapes = {name: shape for bucket in buckets for name, shape in bucket.items()}
        self.engine = new_engine(config, CountedWorker(0, WORKERS, []), lambda: self._shapes)
        # What is not used is not in memory: nothing writes here.
        self._homes = [[torch.zeros(_numel(bucket)) for bucket in buckets] for _ in range(2)]
        self._steps = 0

    def step(self) -> None:
        homes = self._homes[self._steps % 2]
        self._steps += 1
        for number, (bucket, home) in enumerate(zip(self._buckets, homes, strict=True)):
            pieces = home.split([math.prod(shape) for shape in bucket.values()])
            gradients = {name: piece.view(shape) for (name, shape), piece in zip(bucket.items(), pieces, strict=True)}
            last = number == len(self._buckets) - 1
            layout = self.engine.begin(number, functools.partial(dict, bucket), DEVICE, last=last)
            self.engine.average(layout, gradients)


def _numel(bucket: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in bucket.values())


class Counts:
    """Launches, compiled kernels and uploads, while it is current."""

    def __init__(self) -> None:
        self.launches = self.compiled = self.uploads = 0

    def __enter__(self) -> "Counts":
        driver = triton.runtime.driver.active
        self._patches = [
            mock.patch.object(driver.launcher_cls, "__call__", self._counted(driver.launcher_cls.__call__, "launches")),
            mock.patch.object(table, "on_host", self._counted(table.on_host, "uploads")),
            mock.patch.object(triton.knobs.runtime, "jit_post_compile_hook", self._compile),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in reversed(self._patches):
            patch.stop()

    def _counted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            setattr(self, name, getattr(self, name) + 1)
            return function(*arguments, **named)

        return counted

    def _compile(self, **_: Any) -> None:
        self.compiled += 1


def repeated(step: Callable[[], None]) -> int:
    """Return how many launches of a step repeat those of an earlier one. AssertionError: with other arguments."""
    number, taken = 0, list[tuple[Any, ...]]()
    run, kind = launcher.Launches.run, triton.runtime.driver.active.launcher_cls
    call = kind.__call__

    def note(started: Any, *arguments: Any) -> None:
        taken.append((started, *arguments))
        call(started, *arguments)

    def twice(launches: launcher.Launches, launch: Callable[[], None], *others: Any) -> None:
        nonlocal number
        before = launches._noted
        taken.clear()
        run(launches, launch, *others)
        if launches._noted is before:
            first = taken.copy()
            taken.clear()
            launch()
            assert first == taken, "what is launched again takes other arguments"
            number += len(first)

    with mock.patch.object(kind, "__call__", note), mock.patch.object(launcher.Launches, "run", twice):
        step()
    return number


def counts_of(shapes: Shapes, config: PowerSGDConfig) -> dict[str, float]:
    """Return what all buckets of a model compile in the first steps, and what a later step takes."""
    training = Training(shapes, config)
    with Counts() as first:
        training.step()
        training.step()
    with Counts() as later:
        training.step()
    # Those of the alternating algorithm are repeated in every second step.
    for _ in range(2):
        training.step()
    buckets, again = training.buckets, repeated(training.step)
    return {
        "buckets": buckets,
        "launches a bucket": later.launches / buckets,
        "repeated": again / buckets,
        "kernels compiled": first.compiled,
        "compiled later": later.compiled,
        "uploads": later.uploads,
    }


def microseconds(training: Training, steps: int) -> float:
    """Return the least CPU time that a bucket's stages took in a step, without collectives and the engine."""
    spent = 0.0

    def timed(stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal spent
            start = time.thread_time()
            try:
                return stage(*arguments, **named)
            finally:
                spent += time.thread_time() - start

        return run

    with contextlib.ExitStack() as stack:
        for name in STAGES:
            stack.enter_context(mock.patch.object(TritonBackend, name, timed(getattr(TritonBackend, name))))
        found = []
        for _ in range(steps):
            spent = 0.0
            training.step()
            found.append(spent)
    return 1e6 * min(found) / training.buckets


def hook_step(config: PowerSGDConfig, shapes: Shapes, steps: int) -> dict[str, float]:
    """Return what the host does in DDP's hook with one of a model's buckets, and in the collectives of torch."""
    bucket = FilledBucket(ddp_buckets(shapes)[-1])
    state = ddp.PowerSGDState(config)

    def step() -> None:
        ddp.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]

    for _ in range(3):
        step()
    profile = cProfile.Profile()
    profile.runcall(step)
    found: dict[str, float] = {"calls a hook step": pstats.Stats(profile).total_calls}  # type: ignore[attr-defined]
    times = []
    for _ in range(steps):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return found | ({"µs a hook step": 1e6 * min(times)} if steps else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--gradients", choices=GRADIENT_SETS, default="gpt2-124M")
    parser.add_argument("--rank", type=int, action="append", help="default: 4 and 32")
    parser.add_argument("--steps", type=int, default=300, help="steps to time; 0 for none")
    arguments = parser.parse_args()
    shapes, rows = GRADIENT_SETS[arguments.gradients], []
    # Its collectives send nothing.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORKERS)
    with stub_driver(), mock.patch.object(backends, "why_not_triton", return_value=None):
        for rank in arguments.rank or (4, 32):
            config = PowerSGDConfig(rank=rank, backend="triton", wire_dtype="int4")
            rows.append({"ranks": str(rank), **counts_of(shapes, config)})
            exact = dataclasses.replace(config, wire_dtype="float32")
            rows[-1] |= hook_step(exact, shapes, arguments.steps)
            if arguments.steps:
                one = Training(shapes[1:7], exact)
                rows[-1]["µs a bucket"] = microseconds(one, arguments.steps)
                with mock.patch.object(launcher, "KNOWN", False):
                    rows[-1]["by Triton's launch"] = microseconds(one, arguments.steps)
        config = PowerSGDConfig(rank=4, algorithm="alternating", backend="triton")
        rows.append({"ranks": "4, alternating", **counts_of(shapes, config)})
        # Kernels of one plan of ranks are those of another.
        for compression in (20, 400):
            config = PowerSGDConfig(compression=compression, backend="triton")
            rows.append({"ranks": f"planned, {compression}×", **counts_of(shapes, config)})
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        lines = [[_shown(row.get(name)) for name in rows[0]] for row in rows]
        print(markdown_table([list(rows[0]), ["---", *["--:"] * (len(rows[0]) - 1)], *lines]))


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
