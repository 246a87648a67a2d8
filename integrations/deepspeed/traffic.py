"""DeepSpeed: bytes that a step sends at each ZeRO stage, with and without compression."""

from __future__ import annotations

import dataclasses
from typing import Any

from powersgd_triton.integrations.announce import describe_bytes, describe_ranks
from powersgd_triton.integrations.deepspeed.seams import is_bf16_optimizer
from powersgd_triton.integrations.deepspeed.state import DeepSpeedState
from powersgd_triton.ranks.report import RankReport


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one optimizer step, as a ring sends them: twice for an all-reduce, once for reduce-scatter and gather.

    Multiply bytes by (workers - 1) / workers for exact figures.

    Attributes:
        elements: Number of elements of all dense trainable parameters.
        compressed: Number of these elements whose gradients are compressed.
        gradients: Bytes of gradients without compression, in the dtype in which DeepSpeed sends them.
        factors: Bytes sent for gradients with compression.
        parameters: Bytes of ZeRO's all-gathers of parameters without compression.
        differences: Bytes sent for parameters with compression.
    """

    elements: int
    compressed: int
    gradients: float
    factors: float
    parameters: float
    differences: float

    @property
    def plain(self) -> float:
        """Bytes of a whole step without compression."""
        return self.gradients + self.parameters

    @property
    def sent(self) -> float:
        """Bytes of a whole step with compression."""
        return self.factors + self.differences

    @property
    def reduction(self) -> float:
        """Factor by which the gradients' traffic shrinks."""
        return self.gradients / self.factors if self.factors else 1.0

    @property
    def total_reduction(self) -> float:
        """Factor by which all traffic between data-parallel workers shrinks."""
        return self.plain / self.sent if self.sent else 1.0


def expected_traffic(engine: Any, state: DeepSpeedState) -> Traffic:
    """Return the bytes that a step sends after ``start_iter``."""
    layout = state._engine.layout()
    stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
    micro_batches = engine.gradient_accumulation_steps() if stage >= 2 else 1
    compressed = sum(segment.numel for segment in layout.compressed)
    parameter_bytes = layout.numel * next(iter(engine.module.parameters())).element_size()
    if is_bf16_optimizer(optimizer):
        gradient_size, gathers = optimizer.grad_acc_dtype.itemsize, 1.0
    elif stage == 0:
        gradient_size, gathers = engine.communication_data_type.itemsize, 0.0
    else:
        gradient_size = optimizer.communication_data_type.itemsize
        gathers = 1.0 if stage < 3 else 2.0 * micro_batches
    # At stages 1 and 2 DeepSpeed all-reduces buckets, unless it is configured to send each slice to its owner only.
    once = stage == 3 or (
        stage in (1, 2)
        and not is_bf16_optimizer(optimizer)
        and engine.zero_reduce_scatter()
        and not getattr(optimizer, "use_multi_rank_bucket_allreduce", True)
    )
    parameters = gathers * parameter_bytes
    return Traffic(
        elements=layout.numel,
        compressed=compressed,
        gradients=micro_batches * (1 if once else 2) * layout.numel * gradient_size,
        factors=micro_batches * 2 * RankReport.of(layout, state.config, {}).bytes_per_step,
        parameters=parameters,
        differences=parameters if state.parameters is None else state.parameters.sent_bytes(),
    )


def describe(engine: Any, state: DeepSpeedState) -> str:
    """Return one line for the log."""
    traffic = expected_traffic(engine, state)
    stage = int(engine.zero_optimization_stage())
    share = 100 * traffic.compressed / traffic.elements if traffic.elements else 0.0
    parameters = ""
    if traffic.parameters:
        how = "as DeepSpeed sends them" if state.parameters is None else f"in {state.parameters.width.name}"
        parameters = f"Parameters are sent {how}. "
    return (
        f"powersgd: on at ZeRO stage {stage} ({type(engine.optimizer).__name__}), {describe_ranks(state.config)}; "
        f"{share:.1f}% of {traffic.elements:,} gradient elements are compressed, gradients take "
        f"{traffic.reduction:.1f}x fewer bytes. "
        f"{parameters}A whole step sends {describe_bytes(traffic.sent)} in place of {describe_bytes(traffic.plain)}, "
        f"{traffic.total_reduction:.1f}x fewer"
    )
