"""DeepSpeed: the method that averages gradients at each ZeRO stage, overridden to compress them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.integrations.deepspeed.engines import is_bf16_optimizer
from powersgd_triton.integrations.deepspeed.state import DeepSpeedState, Gradient


class GradientOverride:
    """Overrides ``method`` of an engine's optimizer, or of the engine itself."""

    method = ""

    def __init__(self, engine: Any, state: DeepSpeedState) -> None:
        self._engine, self._optimizer, self._state = engine, engine.optimizer, state
        owner = self.owner(engine)
        self._original = getattr(owner, self.method)
        setattr(owner, self.method, self._reduce)

    @staticmethod
    def owner(engine: Any) -> Any:
        """Return the object that has the method."""
        return engine.optimizer

    def _reduce(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class AllReduceOverride(GradientOverride):
    """The engine's all-reduce of a list of gradients: stage 0, the pipeline engine, and BF16_Optimizer."""

    method = "allreduce_no_retain"

    @staticmethod
    def owner(engine: Any) -> Any:
        return engine

    def _reduce(
        self,
        bucket: Sequence[Tensor],
        dp_group: dist.ProcessGroup,
        numel_per_bucket: int = 500_000_000,
        dp_world_size: float | None = None,
    ) -> None:
        compressing, workers = self._state.compressing(), dist.get_process_group_ranks(self._state.group)
        if not compressing or dist.get_process_group_ranks(dp_group) != workers:
            self._original(bucket, dp_group, numel_per_bucket, dp_world_size)
            return
        known, unknown = self._named(bucket)
        if unknown:
            self._original(unknown, dp_group, numel_per_bucket, dp_world_size)
        divisor = len(workers) / (dp_world_size or len(workers))
        averaging = getattr(self._engine, "gradient_average", True)
        # Copy gradients that are not contiguous, as DeepSpeed itself does.
        copies = [Gradient(gradient.parameter, gradient.tensor.contiguous()) for gradient in known]
        self._state.average(copies, divisor if averaging else len(workers))
        for gradient, copy in zip(known, copies, strict=True):
            if copy.tensor is not gradient.tensor:
                gradient.tensor.copy_(copy.tensor)

    def _named(self, bucket: Sequence[Tensor]) -> tuple[list[Gradient], list[Tensor]]:
        """Return the gradients whose parameters are known, and the other tensors."""
        flats: dict[int, list[tuple[Tensor, Tensor]]] = {}
        optimizer = self._engine.optimizer
        if is_bf16_optimizer(optimizer):
            # Each parameter group has one flat buffer. Every worker needs all averages, for the norm of all gradients.
            groups = zip(optimizer.fp32_groups_gradients, optimizer.bf16_groups, strict=True)
            for flat, (gradients, parameters) in zip(optimizer.fp32_groups_gradients_flat, groups, strict=True):
                flats[flat.data_ptr()] = list(zip(gradients, parameters, strict=True))
        else:
            for parameter in self._engine.module.parameters():
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    flats[parameter.grad.data_ptr()] = [(parameter.grad, parameter)]
        pairs = [pair for tensor in bucket for pair in flats.get(tensor.data_ptr(), [])]
        known = [Gradient(parameter, gradient.detach()) for gradient, parameter in pairs]
        return known, [tensor for tensor in bucket if tensor.data_ptr() not in flats]


class BucketOverride(GradientOverride):
    """The optimizer's all-reduce of a flat bucket, of which each worker keeps slices: stages 1 and 2."""

    method = "gradient_reduction_w_predivide"

    def __init__(self, engine: Any, state: DeepSpeedState) -> None:
        super().__init__(engine, state)
        # DeepSpeed up to 0.17.1 has one bucket and no argument for its dtype.
        self._buckets_by_dtype = len(inspect.signature(self._original).parameters) == 2
        # With reduce_scatter, the optimizer would not call this method, and would cut gradients at partitions.
        self._optimizer.reduce_scatter = False

    def _reduce(self, tensor: Tensor, *dtype: torch.dtype) -> Any:
        optimizer = self._optimizer
        if not self._state.compressing() or tensor.numel() == 0:
            return self._original(tensor, *dtype)
        entries = optimizer.ipg_buckets[dtype[0]].params if self._buckets_by_dtype else optimizer.params_in_ipg_bucket
        gradients: list[Gradient] = []
        offset = 0
        for group, _, identity in entries:
            parameter = optimizer.param_dict[identity]
            numel = parameter.numel()
            view = tensor[offset : offset + numel]
            offset += numel
            first, kept = self._slice(group, identity, numel)
            gradients.append(Gradient(parameter, view, (first, view[first : first + kept])))
        if offset != tensor.numel():
            raise RuntimeError(
                f"DeepSpeed's bucket has {tensor.numel()} elements and its parameters have {offset}; powersgd does not "
                "know the bucket layout of this release"
            )
        averaging = getattr(optimizer, "gradient_average", True)
        workers = dist.get_world_size(self._state.group)
        self._state.average(gradients, float(optimizer.sequence_parallel_size) if averaging else workers)
        return tensor

    def _slice(self, group: int, identity: Any, numel: int) -> tuple[int, int]:
        """Return (first element, number of elements) of the slice of a gradient that this worker keeps."""
        optimizer = self._optimizer
        worker = dist.get_rank(optimizer.real_dp_process_group[group])
        first = optimizer.grad_start_offset[group][worker].get(identity)
        if first is None:
            return 0, 0
        room = optimizer.partition_size[group] - optimizer.grad_partition_insertion_offset[group][worker][identity]
        return int(first), int(min(numel - first, room))


class PartitionOverride(GradientOverride):
    """The optimizer's reduce-scatter of a list of gradients, of which each worker keeps partitions: stage 3."""

    method = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"

    def __init__(self, engine: Any, state: DeepSpeedState) -> None:
        super().__init__(engine, state)
        optimizer = self._optimizer
        # Without reduce-scatter, DeepSpeed sums over the workers of one sequence instead of averaging. Do the same.
        flat = optimizer.contiguous_gradients and not optimizer.reduce_scatter
        self._factor = float(getattr(optimizer, "sequence_parallel_size", 1)) if flat else 1.0
        # Otherwise DeepSpeed averages contiguous gradients in another method.
        optimizer.reduce_scatter = True

    def _reduce(self, parameters: Sequence[Tensor], *dtype: torch.dtype) -> list[Tensor]:
        if not self._state.compressing() or not parameters:
            partitions: list[Tensor] = self._original(parameters, *dtype)
            return partitions
        worker, workers = dist.get_rank(self._state.group), dist.get_world_size(self._state.group)
        gradients: list[Gradient] = []
        outputs: list[Tensor] = []
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            each = -(-gradient.numel() // workers)
            first = min(worker * each, gradient.numel())
            kept = min(each, gradient.numel() - first)
            outputs.append(gradient.new_empty(kept, dtype=self._optimizer.gradient_accumulation_dtype))
            gradients.append(Gradient(parameter, gradient.detach().contiguous(), (first, outputs[-1])))
        self._state.average(gradients, self._factor)
        return outputs


def override_class(engine: Any) -> type[GradientOverride]:
    """Return the override through which an engine's gradients go."""
    stage = int(engine.zero_optimization_stage())
    if stage == 3:
        return PartitionOverride
    if stage in (1, 2) and not is_bf16_optimizer(engine.optimizer):
        return BucketOverride
    return AllReduceOverride
