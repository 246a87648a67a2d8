"""Times launch parameters on a GPU, so that the best become those of kernels/configurations.py.

python3 benchmarks/tune.py [--gradients gpt2-124M] [--rank 4] [--dtype fp32] [--record NAME] [--limit 540] [--dry]

Every alternative takes a step whose result must be the reference's; then its kernels' launches are timed by
themselves. Alternatives of different kernels are tried side by side, and one by one where that fails, since they do not
depend on each other, except that compensate_project and reconstruct share the tile.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from benchmarks.buckets import FilledBucket
from benchmarks.cases import ALLOWED_DISTANCE, DTYPES, WIRE_PHASES
from benchmarks.environment import choose_interpreter, describe_gpu, device_under_test
from benchmarks.kernel_providers import Prepared
from benchmarks.launches import Problem
from benchmarks.results_file import Results, Row
from benchmarks.shapes import GRADIENT_SETS
from benchmarks.timing import CaptureError, Clock, Timing, Work
from benchmarks.wire_providers import PreparedWire
from powersgd_triton.kernels.configurations import (
    TABLES,
    Configuration,
    Launch,
    architecture,
    select_configuration,
)

KERNELS = ("compensate_project", "reconstruct", "backproject", "gram", "orthogonalize", "wire")
"""Of a step on one worker, and all three of the wire, with factors in ``WIRE_WIDTH``."""

WIRE_WIDTH = "int8"
WIRE_PANELS = (16, 32, 64)
ROW_TILES = ((64, 16), (128, 16), (128, 32), (64, 32), (32, 32), (64, 64), (128, 64), (32, 128))
COLUMN_TILES = ((16, 64), (16, 128), (32, 32), (32, 64), (64, 64), (32, 128), (64, 128), (128, 64))
REGISTERS = (None,) if torch.version.hip else (None, 168, 128)
"""Limits for a thread, with which three or four programs of four warps fit a multiprocessor."""

FACTOR_ROWS = (32, 64, 128)
GROUPS = (KERNELS[:2], *((kernel,) for kernel in KERNELS[2:]))
"""Kernels whose launches depend on each other."""


def alternatives(now: Configuration) -> Iterator[Configuration]:
    """Configurations to try, beginning with the one in use."""
    yield now

    def tiles(
        launch: Launch, shapes: Sequence[tuple[int, int]], limits: Sequence[int | None] = (None,)
    ) -> list[Launch]:
        return [
            dataclasses.replace(
                launch, rows=rows, columns=columns, num_warps=warps, num_stages=stages, registers=(registers, registers)
            )
            for registers, (rows, columns), warps, stages in itertools.product(limits, shapes, (2, 4, 8), (1, 2, 3))
        ]

    def blocks(launch: Launch) -> list[Launch]:
        return [
            dataclasses.replace(launch, rows=rows, num_warps=warps, num_stages=stages)
            for rows, warps, stages in itertools.product(FACTOR_ROWS, (2, 4, 8), (1, 2))
        ]

    def panels(launch: Launch) -> list[Launch]:
        return [
            dataclasses.replace(launch, columns=panel, panel=panel, num_warps=warps)
            for panel, warps in itertools.product(WIRE_PANELS, (2, 4, 8, 16))
        ]

    together = itertools.zip_longest(
        tiles(now.compensate_project, ROW_TILES, REGISTERS),
        # The same tiles as the kernel before.
        tiles(now.reconstruct, ROW_TILES, REGISTERS),
        tiles(now.backproject, COLUMN_TILES),
        blocks(now.gram),
        blocks(now.orthogonalize),
        panels(now.wire),
    )
    for launches in together:
        # A list that is at its end stays with what is in use.
        named = dict(zip(KERNELS, launches, strict=True))
        yield dataclasses.replace(now, **{name: launch for name, launch in named.items() if launch is not None})


def measure(
    configuration: Configuration, bucket: FilledBucket, rank: int, dtype: str, expected: Tensor, clock: Clock
) -> Iterator[tuple[str, Timing]]:
    """Time each kernel of one step with a configuration.

    Raises:
        ValueError: the step's result is not the ``expected`` one.
    """
    with mock.patch.dict(TABLES, {architecture(clock.device): {256: configuration}}):
        bucket.refill()
        gradients = {str(index): gradient for index, gradient in enumerate(bucket.gradients())}
        Problem(gradients, rank, "triton").step(gradients)
        difference = float((bucket.buffer() - expected).norm() / expected.norm())
        if not difference <= ALLOWED_DISTANCE[dtype]:
            raise ValueError(f"the result is off by {difference:.1e}")
        prepared = Prepared.of(bucket, rank, "triton")
    shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
    ours, reference = (
        PreparedWire(shapes, rank, WIRE_WIDTH, kernels, clock.device, configuration.wire) for kernels in (True, False)
    )
    difference = float((ours.decoded - reference.decoded).norm() / reference.decoded.norm())
    # A scale of the reference's may be rounded to the next bf16 value, as a GPU multiplies by 1 / 127.
    if not difference <= ALLOWED_DISTANCE["bf16"]:
        raise ValueError(f"the message is off by {difference:.1e}")
    launches = [launch for phase in prepared.phases.values() for launch in phase]
    for kernel in KERNELS:
        work = _together([launch for launch in launches if launch.name == kernel])
        if kernel == "wire":
            work = _together([ours.work(phase) for phase in WIRE_PHASES])
        with contextlib.suppress(CaptureError):
            work = clock.capture(work)
        yield kernel, clock.measure(work)


def _together(launches: Sequence[Work]) -> Callable[[], object]:
    def run() -> None:
        for launch in launches:
            launch()

    return run


def sweep(
    configurations: Sequence[Configuration], bucket: FilledBucket, rank: int, dtype: str, limit: float
) -> Iterator[Row]:
    """Rows of one kernel with one launch each; of a configuration that fails, one row with the error."""
    clock = Clock(device_under_test(), seconds=0.05)
    started = time.monotonic()
    gradients = {str(index): gradient for index, gradient in enumerate(bucket.gradients())}
    bucket.refill()
    Problem(gradients, rank, "torch").step(gradients)
    expected = bucket.buffer().clone()
    seen = set()
    left = list(reversed(configurations))
    while left:
        if time.monotonic() - started > limit:
            print(f"stopped with {len(left)} alternatives left (--limit)")
            return
        configuration = left.pop()
        try:
            for kernel, timing in measure(configuration, bucket, rank, dtype, expected, clock):
                launch = getattr(configuration, kernel)
                if (kernel, launch) not in seen:
                    seen.add((kernel, launch))
                    values = {"device_ms": timing.median, "device_iqr_ms": timing.iqr}
                    yield {"kind": "tune", "kernel": kernel, **dataclasses.asdict(launch), **values}
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            yield {"kind": "tune failure", "error": text, "configuration": dataclasses.asdict(configuration)}
            left += _apart(configuration, configurations[0])
        gc.collect()


def _apart(configuration: Configuration, now: Configuration) -> list[Configuration]:
    """The parts in which a configuration differs from the one in use, each by itself; none if it is one such part."""
    parts = []
    for group in GROUPS:
        launches = {kernel: getattr(configuration, kernel) for kernel in group}
        if any(launches[kernel] != getattr(now, kernel) for kernel in group):
            parts.append(dataclasses.replace(now, **launches))
    return parts if len(parts) > 1 else []


def describe(rows: Sequence[Row]) -> str:
    """A table a kernel, the fastest first, the tiles by the sum of the two kernels that share them, and failures."""
    lines = []
    for kernel in KERNELS:
        lines += [f"\n{kernel}", f"{'ms':>10} {'IQR':>8}  rows columns panel warps stages registers"]
        lines += [
            f"{row['device_ms']:>10.4f} {row['device_iqr_ms']:>8.4f}  {row['rows']:>4} {row['columns']:>7} "
            f"{row['panel']:>5} {row['num_warps']:>5} {row['num_stages']:>6} {row['registers'][0] or '':>9}"
            for row in sorted(_of(rows, kernel), key=_time)
        ]
    lines.append("\ncompensate_project + reconstruct, the fastest of each for one tile")
    lines += [
        f"{sum(map(_time, pair)):>10.4f}  {tile[0]} × {tile[1]}"
        for tile, pair in sorted(_by_tile(rows).items(), key=lambda item: sum(map(_time, item[1])))
    ]
    failures = [row["error"] for row in rows if row["kind"] == "tune failure"]
    lines += [f"\n{len(failures)} alternatives failed"] * bool(failures)
    lines += [f"  {failures.count(text)} × {text}" for text in dict.fromkeys(failures)]
    return "\n".join([*lines, "", *_best(rows)])


def _best(rows: Sequence[Row]) -> Iterator[str]:
    """The fastest configuration, as one would write it."""
    tiles = _by_tile(rows)
    if not tiles:
        return
    best = dict(zip(KERNELS[:2], min(tiles.values(), key=lambda pair: sum(map(_time, pair))), strict=True))
    best |= {kernel: min(_of(rows, kernel), key=_time) for kernel in KERNELS[2:] if _of(rows, kernel)}
    fields = [field.name for field in dataclasses.fields(Launch)]
    yield "Configuration("
    for kernel, row in best.items():
        yield f"    {kernel}=Launch({', '.join(repr(row[name]) for name in fields)}),"
    yield ")"


def _of(rows: Sequence[Row], kernel: str) -> list[Row]:
    return [row for row in rows if row.get("kernel") == kernel]


def _time(row: Row) -> float:
    return float(row["device_ms"])


def _by_tile(rows: Sequence[Row]) -> dict[tuple[int, int], list[Row]]:
    """(rows, columns): the fastest launch of each of the two kernels."""
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for kernel in KERNELS[:2]:
        for row in sorted(_of(rows, kernel), key=_time):
            found.setdefault((row["rows"], row["columns"]), {}).setdefault(kernel, row)
    return {tile: [pair[kernel] for kernel in KERNELS[:2]] for tile, pair in found.items() if len(pair) == 2}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gradients", choices=GRADIENT_SETS, default="gpt2-124M")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--record", metavar="NAME", help="write the rows to benchmarks/results/NAME.json and $OUT")
    parser.add_argument("--limit", type=float, default=540, metavar="SECONDS", help="then stop")
    parser.add_argument("--dry", action="store_true", help="a tiny gradient set, in the interpreter without a GPU")
    options: Any = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        parser.error("this needs a CUDA device; try --dry")
    choose_interpreter()
    device = device_under_test()
    gradients = "tiny" if options.dry else options.gradients
    results = Results(options.record, options.dry)
    results.machine = {**describe_gpu(device), "gradients": gradients, "rank": options.rank, "dtype": options.dtype}
    configurations = list(alternatives(select_configuration(architecture(device), options.rank)))
    bucket = FilledBucket(GRADIENT_SETS[gradients], device, DTYPES[options.dtype])
    print(f"{gradients}, rank {options.rank}, {options.dtype}, {architecture(device)}", flush=True)
    for row in sweep(configurations[: 2 if options.dry else None], bucket, options.rank, options.dtype, options.limit):
        results.add(row)
    print(describe(results.rows))


if __name__ == "__main__":
    main()
