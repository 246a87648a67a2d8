"""DeepSpeed: the method that averages gradients at each ZeRO stage, overridden to compress them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.integrations.deepspeed.engines import is_bf16_optimizer
from powersgd_triton.integrations.deepspeed.state import DeepSpeedState, Gradient

Method = Callable[..., Any]
Override = Callable[[Any, DeepSpeedState, Method], Method]
"""Returns what replaces a method of an engine, or of its optimizer."""


def averaging_method(engine: Any) -> tuple[Any, str, Override]:
    """Return the object that averages an engine's gradients, the method's name, and its override."""
    stage = int(engine.zero_optimization_stage())
    if stage == 3:
        return engine.optimizer, "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads", _reduce_scatter
    if stage in (1, 2) and not is_bf16_optimizer(engine.optimizer):
        return engine.optimizer, "gradient_reduction_w_predivide", _reduce_bucket
    # Of the pipeline engine too.
    return engine, "allreduce_no_retain", _all_reduce


def override_averaging(engine: Any, state: DeepSpeedState) -> None:
    """Let a state average an engine's gradients."""
    owner, method, override = averaging_method(engine)
    setattr(owner, method, override(engine, state, getattr(owner, method)))


def _all_reduce(engine: Any, state: DeepSpeedState, original: Method) -> Method:
    """Stage 0, the pipeline engine and BF16_Optimizer: an all-reduce of a list of gradients."""
    workers = dist.get_process_group_ranks(state.group)

    def all_reduce(
        bucket: Sequence[Tensor],
        dp_group: dist.ProcessGroup,
        numel_per_bucket: int = 500_000_000,
        dp_world_size: float | None = None,
    ) -> None:
        if not state.compressing() or dist.get_process_group_ranks(dp_group) != workers:
            original(bucket, dp_group, numel_per_bucket, dp_world_size)
            return
        flats = _parameters_by_address(engine)
        unknown = [tensor for tensor in bucket if tensor.data_ptr() not in flats]
        if unknown:
            original(unknown, dp_group, numel_per_bucket, dp_world_size)
        known = [(parameter, g.detach()) for tensor in bucket for parameter, g in flats.get(tensor.data_ptr(), [])]
        # Copy gradients that are not contiguous, as DeepSpeed itself does.
        copies = [Gradient(parameter, gradient.contiguous()) for parameter, gradient in known]
        averaging = getattr(engine, "gradient_average", True)
        state.average(copies, len(workers) / (dp_world_size or len(workers)) if averaging else len(workers))
        for (_, gradient), copy in zip(known, copies, strict=True):
            if copy.tensor is not gradient:
                gradient.copy_(copy.tensor)

    return all_reduce


def _parameters_by_address(engine: Any) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """Return {address of what is all-reduced: [(parameter, its gradient)]}."""
    optimizer = engine.optimizer
    if not is_bf16_optimizer(optimizer):
        found = [(p, p.grad) for p in engine.module.parameters() if p.grad is not None and not p.grad.is_sparse]
        return {gradient.data_ptr(): [(parameter, gradient)] for parameter, gradient in found}
    # Each parameter group has one flat buffer. Every worker needs all averages, for the norm of all gradients.
    groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
    pairs = [list(zip(parameters, gradients, strict=True)) for parameters, gradients in groups]
    flats = [flat.data_ptr() for flat in optimizer.fp32_groups_gradients_flat]
    return dict(zip(flats, pairs, strict=True))


def _reduce_bucket(engine: Any, state: DeepSpeedState, original: Method) -> Method:
    """Stages 1 and 2: an all-reduce of a flat bucket, of which each worker keeps slices."""
    optimizer = engine.optimizer
    # DeepSpeed up to 0.17.1 has one bucket and no argument for its dtype.
    buckets_by_dtype = len(inspect.signature(original).parameters) == 2
    # With reduce_scatter, the optimizer would not call this method, and would cut gradients at partitions.
    optimizer.reduce_scatter = False

    def reduce_bucket(tensor: Tensor, *dtype: torch.dtype) -> Any:
        if not state.compressing() or tensor.numel() == 0:
            return original(tensor, *dtype)
        entries = optimizer.ipg_buckets[dtype[0]].params if buckets_by_dtype else optimizer.params_in_ipg_bucket
        parameters = [optimizer.param_dict[identity] for _, _, identity in entries]
        numels = [parameter.numel() for parameter in parameters]
        if sum(numels) != tensor.numel():
            raise RuntimeError(
                f"DeepSpeed's bucket has {tensor.numel()} elements and its parameters have {sum(numels)}; powersgd "
                "does not know the bucket layout of this release"
            )
        gradients = [
            Gradient(parameter, view, _kept(optimizer, view, group, identity))
            for (group, _, identity), parameter, view in zip(entries, parameters, tensor.split(numels), strict=True)
        ]
        averaging = getattr(optimizer, "gradient_average", True)
        workers = dist.get_world_size(state.group)
        state.average(gradients, float(optimizer.sequence_parallel_size) if averaging else workers)
        return tensor

    return reduce_bucket


def _kept(optimizer: Any, gradient: Tensor, group: int, identity: Any) -> tuple[int, Tensor]:
    """Return (first element, view) of the slice of a flat gradient that this worker keeps."""
    worker = dist.get_rank(optimizer.real_dp_process_group[group])
    first = optimizer.grad_start_offset[group][worker].get(identity)
    if first is None:
        return 0, gradient[:0]
    room = optimizer.partition_size[group] - optimizer.grad_partition_insertion_offset[group][worker][identity]
    return int(first), gradient[first : first + room]


def _reduce_scatter(engine: Any, state: DeepSpeedState, original: Method) -> Method:
    """Stage 3: a reduce-scatter of a list of gradients, of which each worker keeps partitions."""
    optimizer = engine.optimizer
    # Without reduce-scatter, DeepSpeed sums over the workers of one sequence instead of averaging. Do the same.
    flat = optimizer.contiguous_gradients and not optimizer.reduce_scatter
    factor = float(getattr(optimizer, "sequence_parallel_size", 1)) if flat else 1.0
    # Otherwise DeepSpeed averages contiguous gradients in another method.
    optimizer.reduce_scatter = True
    worker, workers = dist.get_rank(state.group), dist.get_world_size(state.group)

    def reduce_scatter(parameters: Sequence[Tensor], *dtype: torch.dtype) -> list[Tensor]:
        if not state.compressing() or not parameters:
            partitions: list[Tensor] = original(parameters, *dtype)
            return partitions
        gradients: list[Gradient] = []
        outputs: list[Tensor] = []
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            each = -(-gradient.numel() // workers)
            first = min(worker * each, gradient.numel())
            kept = min(each, gradient.numel() - first)
            outputs.append(gradient.new_empty(kept, dtype=optimizer.gradient_accumulation_dtype))
            gradients.append(Gradient(parameter, gradient.detach().contiguous(), (first, outputs[-1])))
        state.average(gradients, factor)
        return outputs

    return reduce_scatter
