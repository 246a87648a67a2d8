"""DeepSpeed: the methods of an engine and its optimizer that are overridden.

Gradients are averaged by another method at each ZeRO stage. What ``engine.save_checkpoint`` writes has the model's
parameters v as they are, so training continues with the same bits. Exports have the masters w, rounded.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton.config import logger
from powersgd_triton.integrations.common import NO_STATE
from powersgd_triton.integrations.deepspeed.engines import checkpoint_folder, is_bf16_optimizer, run_within
from powersgd_triton.integrations.deepspeed.experts import State

EXACT = "_powersgd_exact"
"""Marks the function of ``Accelerator`` that is replaced, once for all engines."""

Method = Callable[..., Any]


def override_methods(engine: Any, state: State) -> None:
    """Let a state average an engine's gradients, end its steps, and be in its checkpoints."""
    owner, method, override = averaging_method(engine)
    setattr(owner, method, override(engine, state, getattr(owner, method)))
    run_within(engine, "_take_model_step", state.step)
    _override_checkpoints(engine, state)
    if state.parameters is not None:
        _override_exports(engine, state)


def averaging_method(engine: Any) -> tuple[Any, str, Callable[[Any, State, Method], Method]]:
    """Return the object that averages an engine's gradients, its method's name, and what returns the override."""
    stage = int(engine.zero_optimization_stage())
    if stage == 3:
        return engine.optimizer, "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads", _reduce_scatter
    if stage in (1, 2) and not is_bf16_optimizer(engine.optimizer):
        return engine.optimizer, "gradient_reduction_w_predivide", _reduce_bucket
    # Of the pipeline engine too.
    return engine, "allreduce_no_retain", _all_reduce


def _all_reduce(engine: Any, state: State, original: Method) -> Method:
    """Stage 0, the pipeline engine and BF16_Optimizer: an all-reduce of a list of gradients."""

    def all_reduce(
        bucket: Sequence[Tensor],
        dp_group: dist.ProcessGroup,
        numel_per_bucket: int = 500_000_000,
        dp_world_size: float | None = None,
    ) -> None:
        if not state.compressing() or not state.averages(dp_group):
            original(bucket, dp_group, numel_per_bucket, dp_world_size)
            return
        flats = _parameters_by_address(engine)
        unknown = [tensor for tensor in bucket if tensor.data_ptr() not in flats]
        if unknown:
            original(unknown, dp_group, numel_per_bucket, dp_world_size)
        known = {parameter: g.detach() for tensor in bucket for parameter, g in flats.get(tensor.data_ptr(), [])}
        # Copy gradients that are not contiguous, as DeepSpeed itself does.
        copies = {parameter: gradient.contiguous() for parameter, gradient in known.items()}
        divisor = dp_world_size if getattr(engine, "gradient_average", True) else 1
        state.average(copies, divisor=divisor)
        for parameter, gradient in known.items():
            if copies[parameter] is not gradient:
                gradient.copy_(copies[parameter])
        if is_bf16_optimizer(engine.optimizer):
            # It clips only what this worker has used, and averages are of all workers, and of errors.
            used = engine.optimizer.fp32_groups_has_gradients
            used[:] = [[True] * len(parameters) for parameters in used]

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


def _reduce_bucket(engine: Any, state: State, original: Method) -> Method:
    """Stages 1 and 2: an all-reduce of a flat bucket, of which each worker keeps slices."""
    optimizer = engine.optimizer
    # With reduce_scatter, the optimizer would not call this method, and would cut gradients at partitions.
    optimizer.reduce_scatter = False

    @contextmanager
    def exactly() -> Iterator[None]:
        """Let DeepSpeed average experts before ``start_iter``. Its all-reduce of buckets would sum different ones."""
        optimizer.reduce_scatter = not state.compressing()
        try:
            yield
        finally:
            optimizer.reduce_scatter = False

    def reduce_bucket(tensor: Tensor, *dtype: torch.dtype) -> Any:
        if not state.compressing() or tensor.numel() == 0:
            return original(tensor, *dtype)
        # DeepSpeed up to 0.17.1 has one bucket, and gives no dtype.
        entries = optimizer.ipg_buckets[dtype[0]].params if dtype else optimizer.params_in_ipg_bucket
        parameters = [optimizer.param_dict[identity] for _, _, identity in entries]
        numels = [parameter.numel() for parameter in parameters]
        if sum(numels) != tensor.numel():
            raise RuntimeError(
                f"DeepSpeed's bucket has {tensor.numel()} elements, its parameters {sum(numels)}: the layout is unknown"
            )
        gradients = dict(zip(parameters, tensor.split(numels), strict=True))
        kept = {
            parameter: _kept(optimizer, gradients[parameter], group, identity)
            for (group, _, identity), parameter in zip(entries, parameters, strict=True)
        }
        # DeepSpeed divides the gradients of experts by the number of all workers too.
        averaging, workers = getattr(optimizer, "gradient_average", True), dist.get_world_size(state.group)
        state.average(gradients, kept, workers / optimizer.sequence_parallel_size if averaging else 1)
        return tensor

    if engine.has_moe_layers:
        run_within(optimizer, "average_tensor", exactly)
    return reduce_bucket


def _kept(optimizer: Any, gradient: Tensor, group: int, identity: Any) -> tuple[int, Tensor]:
    """Return (first element, view) of the slice of a flat gradient that this worker keeps."""
    worker = dist.get_rank(optimizer.real_dp_process_group[group])
    first = optimizer.grad_start_offset[group][worker].get(identity)
    if first is None:
        return 0, gradient[:0]
    room = optimizer.partition_size[group] - optimizer.grad_partition_insertion_offset[group][worker][identity]
    return int(first), gradient[first : first + room]


def _reduce_scatter(engine: Any, state: State, original: Method) -> Method:
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
        gradients: dict[Tensor, Tensor] = {}
        kept: dict[Tensor, tuple[int, Tensor]] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            gradient = gradients[parameter] = parameter.grad.detach().contiguous()
            each = -(-gradient.numel() // workers)
            first = min(worker * each, gradient.numel())
            numel = min(each, gradient.numel() - first)
            kept[parameter] = first, gradient.new_empty(numel, dtype=optimizer.gradient_accumulation_dtype)
        state.average(gradients, kept, workers / factor)
        return [partition for _, partition in kept.values()]

    return reduce_scatter


def _override_checkpoints(engine: Any, state: State) -> None:
    """Make the engine save the state before it marks a checkpoint as the latest, and load it after the model."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        tag = f"global_step{engine.global_steps}" if tag is None else tag
        # Written first, since DeepSpeed updates ``latest`` at the end: an interrupted save leaves the old checkpoint.
        state.save(Path(save_dir) / str(tag))
        return save(save_dir, tag, *args, **kwargs)

    @functools.wraps(load)
    def load_checkpoint(load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(load).bind(load_dir, tag, *args, **kwargs)
        weights_only = given.arguments.get("load_module_only", False)
        # Read and checked on all workers before DeepSpeed changes the model, which is collective.
        go_on = state._reading(lambda: None if weights_only else checkpoint_folder(engine, load_dir, tag))
        found = load(load_dir, tag, *args, **kwargs)
        if found[0] is not None and go_on is not None:
            go_on()
        elif found[0] is not None:
            if not weights_only:
                logger.warning(NO_STATE, checkpoint_folder(engine, load_dir, tag))
            state.forget()
        return found

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def _override_exports(engine: Any, state: State) -> None:
    """Make exports write the optimizer's parameters, rounded."""
    run_within(engine, "save_16bit_model", state.exact_parameters)
    accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", None)
    if accelerator is None or hasattr(accelerator.get_state_dict, EXACT):
        return
    get = accelerator.get_state_dict

    # Accelerate's and the Trainer's exports. They copy what they take from the model.
    @functools.wraps(get)
    def get_state_dict(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        compressed = getattr(model, "powersgd", None)
        with compressed.exact_parameters() if isinstance(compressed, State) else nullcontext():
            return get(self, model, *args, **kwargs)

    setattr(get_state_dict, EXACT, True)
    accelerator.get_state_dict = get_state_dict
