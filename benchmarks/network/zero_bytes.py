"""Bytes of a whole ZeRO step between two hosts: at the collectives, in DeepSpeed's log, and on the interface.

python benchmarks/network/zero_bytes.py [--steps 20]

Two network namespaces run one worker each. Needs root and iproute2. Prints a Markdown table and writes
benchmarks/results/zero-bytes.json.
"""

import collections
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# By its path Python would look for modules in this folder.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.markdown import markdown_table
from benchmarks.network import programs
from benchmarks.network.namespaces import network, own_counters

WORKERS = 2
STAGES = (1, 2)
STEPS, WARMUP_STEPS = 20, 3
# The bytes of a step do not depend on the batch.
BATCH = 2
PLAIN = "plain DeepSpeed"


def _coded(rank: int) -> dict[str, Any]:
    return {"rank": rank, "wire_dtype": "int4", "parameters": "int2"}


ARMS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "rank 4, int4; int2": _coded(4),
    "rank 8, int4; int2": _coded(8),
    "rank 16, int4; int2": _coded(16),
    "rank 8, int4; DeepSpeed's own": {**_coded(8), "parameters": None},
}
"""{name: the section "powersgd" of the configuration}. Names give factors; parameters."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Bytes of a step and worker, means over workers and steps.

    Attributes:
        arm: Key of ``ARMS``.
        stage: ZeRO stage.
        collectives: Bytes passed to collectives, as a ring sends them.
        logged: The same from DeepSpeed's communication log.
        sent, received: Bytes that passed the interface, with all headers.
        calls: Of ``collectives``, the bytes by collective.
    """

    arm: str
    stage: int
    collectives: float
    logged: float
    sent: float
    received: float
    calls: dict[str, float]


def measure(arms: Sequence[str], stages: Sequence[int], steps: int, timeout: float = 300) -> list[Row]:
    """Run all arms at all stages, one after the other in the same processes.

    Raises:
        RuntimeError: No network can be made here, or a worker failed.
        TimeoutError: The workers were not done in time.
    """
    task = {"arms": list(arms), "stages": list(stages), "steps": steps}
    with network(WORKERS) as hosts:
        found = programs.run_workers(__file__, hosts, 1, task, timeout, {"DS_ACCELERATOR": "cpu"})
    return [_mean([Row(**row) for row in rows]) for rows in zip(*found, strict=True)]


def _mean(rows: Sequence[Row]) -> Row:
    """Return the mean over workers."""
    figures = {
        name: sum(getattr(row, name) for row in rows) / len(rows)
        for name in ("collectives", "logged", "sent", "received")
    }
    calls = {name: sum(row.calls[name] for row in rows) / len(rows) for name in rows[0].calls}
    return dataclasses.replace(rows[0], **figures, calls=calls)


def work(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train with every arm as one worker, and return its rows. Runs inside a host."""
    import torch
    import torch.distributed as dist

    from powersgd_triton.demo.measure import counting

    torch.set_num_threads(1)
    # DeepSpeed looks up the collectives when it starts, so counting must begin before that.
    sent = collections.Counter[str]()
    with counting(lambda call: sent.update({call.name: call.sent})):
        dist.init_process_group("gloo")
        rows = [_train(arm, stage, task["steps"], sent) for stage in task["stages"] for arm in task["arms"]]
        dist.destroy_process_group()
    return [dataclasses.asdict(row) for row in rows]


def _train(arm: str, stage: int, steps: int, sent: Any) -> Row:
    """Return this worker's bytes."""
    import torch
    import torch.distributed as dist
    from deepspeed.comm.comm import comms_logger

    from powersgd_triton.demo.arms import make_engine
    from powersgd_triton.demo.model import CONTEXT, GPT, next_token_loss, read_corpus, sample_batch

    torch.manual_seed(0)
    training, _ = read_corpus()
    engine = make_engine(GPT(), configuration(stage, ARMS[arm]), torch.device("cpu"), lambda _: 1.0)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())

    def train(number: int) -> None:
        for _ in range(number):
            inputs, targets = sample_batch(training, BATCH, CONTEXT, generator)
            engine.backward(next_token_loss(engine, inputs, targets))
            engine.step()

    train(WARMUP_STEPS)
    dist.barrier()
    sent.clear()
    comms_logger.comms_dict.clear()
    before = own_counters()
    train(steps)
    dist.barrier()
    passed = own_counters() - before
    logged = _logged_bytes(comms_logger.comms_dict)
    engine.destroy()
    return Row(
        arm,
        stage,
        collectives=sent.total() / steps,
        logged=logged / steps,
        sent=passed.sent / steps,
        received=passed.received / steps,
        calls={name: size / steps for name, size in sent.items()},
    )


def _logged_bytes(logged: Mapping[str, Mapping[int, list[Any]]]) -> float:
    """Return the bytes in the dictionary of DeepSpeed's logger, {collective: {bytes of its message: [times, …]}}."""
    from powersgd_triton.demo.measure import COUNTED, ring_factor

    sizes = {name: sum(size * record[0] for size, record in records.items()) for name, records in logged.items()}
    return float(sum(round(size * ring_factor(name, WORKERS)) for name, size in sizes.items() if name in COUNTED))


def configuration(stage: int, section: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return DeepSpeed's configuration: bf16, its own defaults otherwise."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        **({} if section is None else {"powersgd": dict(section)}),
    }


def ratio(rows: Sequence[Row], arm: str, stage: int, count: str = "sent") -> float:
    """Return by how much a count is smaller than plain DeepSpeed's at the same stage."""
    found = {row.arm: getattr(row, count) for row in rows if row.stage == stage}
    return float(found[PLAIN] / found[arm])


def table(rows: Sequence[Row]) -> str:
    """Markdown: kB of a step and worker, each with the ratio to plain DeepSpeed's own count."""
    lines = [["stage", "factors; parameters", "collectives", "DeepSpeed's log", "sent", "received"]]
    lines.append([":-:", "---", *["--:"] * 4])
    for row in rows:
        cells = [str(row.stage), row.arm]
        for count in ("collectives", "logged", "sent", "received"):
            fewer = "" if row.arm == PLAIN else f" ({ratio(rows, row.arm, row.stage, count):.1f}×)"
            cells.append(f"{getattr(row, count) / 1e3:,.1f} kB{fewer}")
        lines.append(cells)
    return markdown_table(lines)


if __name__ == "__main__":
    programs.main(
        description=__doc__,
        name="zero-bytes",
        steps=STEPS,
        work=work,
        measure=lambda steps: measure(list(ARMS), STAGES, steps),
        table=table,
        packages=("torch", "deepspeed"),
    )
