"""What ``trajectories.py`` trains, saves and loads."""

from __future__ import annotations

import torch

# The file beside this one; `tests` would be that of the commit on PYTHONPATH.
from trajectory_models import (  # type: ignore[import-not-found]
    Ddp,
    DeepSpeed,
    Fsdp1,
    Fsdp2,
    Options,
    Plain,
    Reference,
    Training,
)

Case = tuple[type[Training], Options, Options]
EVERY: dict[str, Options] = {
    "defaults": {},
    "start 1": {"start_iter": 1},
    "start 2": {"start_iter": 2},
    "iterations 2": {"iterations": 2},
    "cold start": {"warm_start": False},
    "no error feedback": {"error_feedback": False},
    "error bf16": {"error_dtype": "bf16"},
    "budget": {"compression": 6, "replan_every": 10},
    "alternating": {"algorithm": "alternating"},
    "alternating, iterations 2": {"algorithm": "alternating", "iterations": 2},
    "alternating, budget, fp32": {
        "algorithm": "alternating",
        "compression": 4,
        "replan_every": 10,
        "wire_dtype": "fp32",
    },
    **{f"wire {wire}": {"wire_dtype": wire} for wire in ("bf16", "fp16", "int8", "int4")},
    **{
        f"alternating, wire {wire}": {"algorithm": "alternating", "wire_dtype": wire}
        for wire in ("bf16", "int8", "int4")
    },
}
"""With DDP and a Compressor, on 1, 2 and 3 workers."""

SOME = {name: EVERY[name] for name in ("defaults", "alternating, wire int4", "budget")}
"""With all other adapters."""


def cases(workers: int) -> dict[str, Case]:
    """Everything that is compared in a group of so many workers."""
    alternating, int4, start_2 = {"algorithm": "alternating"}, {"wire_dtype": "int4"}, {"start_iter": 2}
    poison, scales = {"poison": True}, [8.0, 4.0, 4.0, 2.0]
    found: dict[str, Case] = {}
    if workers <= 3:
        # One worker sends nothing, so that no width matters.
        every = {name: options for name, options in EVERY.items() if workers > 1 or "wire" not in name}
        both: dict[str, type[Training]] = {"DDP": Ddp, "Compressor": Plain}
        for adapter, kind in both.items():
            found |= {f"{adapter}, {name}": (kind, options, {}) for name, options in every.items()}
            found |= {
                f"{adapter}, infinite gradient": (kind, {}, poison),
                f"{adapter}, infinite gradient, int4": (kind, alternating | int4, poison),
                f"{adapter}, loss scale": (kind, {}, {"scales": [1024.0, 2048.0, 512.0]}),
                f"{adapter}, resumed": (kind, alternating, {"resume": True}),
                f"{adapter}, resumed, budget": (kind, EVERY["budget"], {"resume": True}),
            }
        found |= {
            "DDP, batched hook": (Ddp, start_2, {"hook": "batched_powerSGD_hook"}),
            "DDP, without names": (Ddp, {}, {"named": False, "resume": True}),
            "DDP, bf16 gradients": (Ddp, {}, {"dtype": torch.bfloat16}),
            "DDP, fp64 gradients": (Ddp, {}, {"dtype": torch.float64}),
            "DDP, checks": (Ddp, {"check_every": 4, "batch_by_shape": False}, {"micro_batches": 2}),
            "Compressor, flat": (Plain, {}, {"form": "flat"}),
            "Compressor, list": (Plain, {"batch_by_shape": False}, {"form": "list"}),
            "Compressor, fp16": (Plain, alternating, {"scales": scales, **poison, "gradients": torch.float16}),
            "optimizer.PowerSGD": (Reference, {}, {}),
            "optimizer.PowerSGD, iterations 2": (Reference, {}, {"iterations": 2, "start": 0, "resume": True}),
        }
    if workers == 2:
        found |= {
            "FSDP1, NO_SHARD": (Fsdp1, {}, {"strategy": "NO_SHARD"}),
            "FSDP1, NO_SHARD, int4": (Fsdp1, int4, {"strategy": "NO_SHARD"}),
            "FSDP1, SHARD_GRAD_OP": (Fsdp1, alternating, {"strategy": "SHARD_GRAD_OP"}),
        }
        for stage in range(4):
            how = {"stage": stage}
            found |= {f"DeepSpeed {stage}, {name}": (DeepSpeed, SOME[name], how) for name in SOME}
            found[f"DeepSpeed {stage}, start 2, resumed"] = (DeepSpeed, start_2, {**how, "resume": True})
            buckets = {**how, "zero": {"reduce_bucket_size": 3000}}
            found[f"DeepSpeed {stage}, small buckets"] = (DeepSpeed, alternating, buckets)
    sharded: list[tuple[type[Training], str, Options]] = [(Fsdp1, "FSDP1", {})] if workers == 2 else []
    sharded += [(Fsdp2, "FSDP2", {})] if workers in (2, 3) else []
    sharded += [(Fsdp2, "HSDP", {"replicas": 2})] if workers == 4 else []
    for kind, adapter, how in sharded:
        found |= {f"{adapter}, {name}": (kind, options, how) for name, options in SOME.items()}
        found[f"{adapter}, infinite gradient"] = (kind, {}, {**how, "poison": True})
        found[f"{adapter}, resumed"] = (kind, alternating, {**how, "resume": True})
        found[f"{adapter}, start 2, error bf16"] = (kind, {**start_2, "error_dtype": "bf16"}, how)
    return found


def quick(workers: int) -> dict[str, Case]:
    """Those of ``cases`` that a run takes by default: all on 2 workers, of DDP and Compressor fewer on 1 and 3."""
    kept = [*SOME, "start 1", "start 2", "alternating", *(f"wire {wire}" for wire in ("bf16", "int8", "int4"))]
    kept += ["infinite gradient", "infinite gradient, int4", "resumed, budget", "batched hook", "without names"]
    names = {f"DDP, {name}" for name in kept}
    names |= {f"Compressor, {name}" for name in (*SOME, "infinite gradient, int4", "resumed, budget")}
    many = cases(workers)
    return many if workers not in (1, 3) else {
        name: case for name, case in many.items() if name in names or case[0] not in (Ddp, Plain)
    }  # fmt: skip


def files(workers: int) -> dict[str, Case]:
    """What is saved by a group of so many workers, by file name; a name without a suffix is that of two files."""
    if workers == 1:
        return {
            "ddp.pickle": (Ddp, {}, {}),
            "ddp-without-names.pickle": (Ddp, {}, {"named": False}),
            "compressor": (Plain, {}, {}),
            "optimizer": (Reference, {}, {}),
        }
    if workers == 2:
        return {
            "ddp": (Ddp, {}, {}),
            "ddp-alternating": (Ddp, EVERY["alternating, wire int4"], {}),
            "ddp-budget": (Ddp, EVERY["budget"], {}),
            "compressor-alternating": (Plain, EVERY["alternating"], {}),
            "fsdp1.dcp": (Fsdp1, {}, {}),
            "fsdp2.dcp": (Fsdp2, EVERY["budget"], {}),
            "deepspeed": (DeepSpeed, {}, {"stage": 2}),
        }
    return {"hsdp.dcp": (Fsdp2, EVERY["alternating"], {"replicas": 2})} if workers == 4 else {}
