"""Configurations of DeepSpeed in which full rank must give plain DeepSpeed's losses."""

from __future__ import annotations

from typing import Any

from tests.support.deepspeed_training import BF16_LIMIT, Case


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **options}}


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
OFFLOAD: dict[str, Any] = {
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
}
UNIVERSAL: dict[str, Any] = {"checkpoint": {"load_universal": True}}
LOGGED: dict[str, Any] = {"comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False}}
# These two with all-reduces only: DeepSpeed refuses them with its reduce-scatter.
PRESCALE: dict[str, Any] = {"prescale_gradients": True}
PREDIVIDE: dict[str, Any] = {"gradient_predivide_factor": 4.0}
ACCUMULATE: dict[str, Any] = {"gradient_accumulation_steps": 2}
# 4 bytes a scalar of fp32 rounded to 16 bits on DeepSpeed's wire, not on ours.
COMMUNICATION: dict[str, Any] = {"communication_data_type": "bf16"}

OVERSIZE = zero(2, reduce_bucket_size=900, overlap_comm=True)
SMALL = zero(3, reduce_bucket_size=2000)

# In `make test`.
QUICK: list[Case] = [Case(f"stage {stage}, bf16", stage, BF16, BF16_LIMIT) for stage in range(3)]
QUICK += [
    Case("stage 0, accumulation, clipping", 0, {**ACCUMULATE, "gradient_clipping": 0.3}),
    Case("stage 0, predivide", 0, PREDIVIDE, sgd=True),
    Case("stage 0, sparse embedding", 0, sparse=True, sgd=True),
    Case("stage 0, pipeline", 0, pipeline_stages=1),
    Case("stage 1, BF16_Optimizer", 1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, BF16_LIMIT),
    Case("stage 1, small buckets", 1, zero(1, reduce_bucket_size=2000)),
    Case("stage 2, oversize, overlap, accumulation", 2, {**ACCUMULATE, **OVERSIZE}),
    Case("stage 2, offload", 2, OFFLOAD, own_adamw=True),
    Case("stage 3, small buckets, clipping, accumulation", 3, {**ACCUMULATE, **SMALL, "gradient_clipping": 0.3}),
]

# In `make test-all`.
WIDE: list[Case] = [Case("stage 3, bf16", 3, BF16, BF16_LIMIT)]
for stage in range(4):
    name = f"stage {stage}"
    WIDE += [
        Case(f"{name}, accumulation", stage, ACCUMULATE),
        Case(f"{name}, clipping", stage, {"gradient_clipping": 0.3}),
        Case(f"{name}, prescale", stage, {**PRESCALE, **zero(stage, reduce_scatter=False)}, sgd=True),
        Case(f"{name}, communication dtype", stage, COMMUNICATION, BF16_LIMIT),
        Case(f"{name}, autocast bf16", stage, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, BF16_LIMIT),
        Case(f"{name}, unused layer", stage, zero(stage, ignore_unused_parameters=True), unused=True),
        Case(f"{name}, unmanaged", stage, {"managed_gradient_accumulation": False}, way="unmanaged"),
    ]
    if stage > 0:
        WIDE += [
            Case(f"{name}, overlap", stage, zero(stage, overlap_comm=True)),
            Case(f"{name}, small buckets", stage, zero(stage, reduce_bucket_size=2000)),
            Case(f"{name}, oversize", stage, zero(stage, reduce_bucket_size=900)),
            Case(f"{name}, oversize, overlap", stage, zero(stage, reduce_bucket_size=900, overlap_comm=True)),
            Case(f"{name}, no reduce-scatter", stage, zero(stage, reduce_scatter=False)),
            Case(f"{name}, round robin", stage, zero(stage, round_robin_gradients=True)),
            Case(f"{name}, alignment", stage, zero(stage, parameter_alignment=True)),
            Case(f"{name}, offload", stage, OFFLOAD, own_adamw=True),
            Case(f"{name}, offload, accumulation", stage, {**OFFLOAD, **ACCUMULATE}, own_adamw=True),
            Case(f"{name}, coalesced", stage, way="coalesced"),
            Case(f"{name}, fp16", stage, {"fp16": {"enabled": True, "initial_scale_power": 8}}, BF16_LIMIT, fp16=True),
        ]
WIDE += [
    Case("stage 0, predivide, AdamW", 0, PREDIVIDE),
    Case("stage 1, predivide", 1, {**zero(1, reduce_scatter=False), **PREDIVIDE}, sgd=True),
    Case("stage 2, predivide", 2, {**zero(2, reduce_scatter=False), **PREDIVIDE}, sgd=True),
    Case("stage 1, pipeline", 1, pipeline_stages=1),
    Case("stage 1, pipeline, bf16", 1, BF16, BF16_LIMIT, pipeline_stages=1),
    Case("stage 3, predivide", 3, {**zero(3, reduce_scatter=False), **PREDIVIDE}, sgd=True),
    Case("stage 3, non-contiguous", 3, zero(3, contiguous_gradients=False)),
]  # fmt: skip

# Two stages, each on two workers.
PIPELINES = [
    Case("pipeline", 0, pipeline_stages=2),
    Case("pipeline, accumulation", 0, ACCUMULATE, pipeline_stages=2),
    Case("pipeline, stage 1", 1, pipeline_stages=2),
    Case("pipeline, stage 1, bf16", 1, BF16, BF16_LIMIT, pipeline_stages=2),
]

THREE_WORKERS = [
    Case(f"stage {stage}, small buckets", stage, zero(stage, reduce_bucket_size=2000)) for stage in range(4)
]
