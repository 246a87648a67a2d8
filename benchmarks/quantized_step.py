"""A communication-hook step with quantized gradients on the CPU, beside rank 4 and a plain copy.

    python benchmarks/quantized_step.py [--record]

One process stands for one of two workers: collectives copy its own message, so the links cost nothing. "message" is
the time of such copies in int8.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.buckets import FilledBucket
from benchmarks.environment import describe_cpu
from benchmarks.providers import STEP_PROVIDERS, Step, ours
from benchmarks.results_file import RESULTS, Row, record
from benchmarks.shapes import CPU_GRADIENT_SETS, GRADIENT_SETS
from powersgd_triton.integrations import ddp
from powersgd_triton.layout.wire_format import QUANTIZED

FORMATS = ("bf16", "int8", "int4", "fp8")
ROUNDS = 9


def quantized(name: str, error_feedback: bool | None = None) -> Step:
    state = ddp.PowerSGDState(None, start_powerSGD_iter=0, quantize=name, error_feedback=error_feedback)
    return lambda bucket: ddp.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]


def message(numel: int) -> Step:
    sent = torch.zeros(QUANTIZED["int8"].difference_bytes(numel)[1], dtype=torch.uint8)
    gathered = torch.zeros(2, len(sent), dtype=torch.uint8)
    return lambda _: gathered.copy_(sent)


def rows_of(gradients: str, threads: int) -> list[Row]:
    """Time all providers by turns, so that what else runs on the machine slows all of them down."""
    torch.set_num_threads(threads)
    bucket = FilledBucket(GRADIENT_SETS[gradients])
    steps = {"copy": STEP_PROVIDERS["copy"](0), "rank 4": ours(4)}
    steps |= {name: quantized(name) for name in FORMATS} | {"int8, errors": quantized("int8", True)}
    steps["message"] = message(bucket.buffer().numel())
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(2 + ROUNDS):
        for name, step in steps.items():
            bucket.refill()
            start = time.perf_counter()
            step(bucket)
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    row = {"gradients": gradients, "threads": threads}
    return [{**row, "provider": name, "ms": s * 1e3, "copies": s / medians["copy"]} for name, s in medians.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/cpu-quantized-step.json")
    arguments = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    machine, rows = describe_cpu(), list[Row]()
    for threads in sorted({1, os.cpu_count() or 1}):
        for gradients in CPU_GRADIENT_SETS:
            rows += rows_of(gradients, threads)
            for row in rows[-len(FORMATS) - 4 :]:
                print(
                    "{gradients:>14}  {threads} threads  {provider:>12}  {ms:7.1f} ms  {copies:5.1f} copies".format(
                        **row
                    )
                )
    if arguments.record:
        record(RESULTS / "cpu-quantized-step.json", machine, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
