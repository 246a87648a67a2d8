"""FSDP2: the replacements of its all-reduce over replicas and of its reduce-scatter."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powersgd_triton.checkpoint import StateDict
from powersgd_triton.comm.agreement import fingerprint
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.passes import Passes
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.integrations.common import broadcast_from_first, plain_name
from powersgd_triton.integrations.fsdp2.units import Division, Unit, local_tensors
from powersgd_triton.integrations.saved_shards import Part, cut
from powersgd_triton.integrations.sharded import ShardedHandle, in_own_group
from powersgd_triton.ops.gradients import as_real, real_shape
from powersgd_triton.ops.reference import note_overflow
from powersgd_triton.ops.step import Step
from powersgd_triton.schemes import new_engine


class HybridShardState(ShardedHandle):
    """Compresses each worker's shard of the gradients across replicas. ``apply_powersgd`` creates it.

    Gradients accumulate as with FSDP's own HSDP: ``model.set_requires_gradient_sync(False)`` skips communication, and
    ``model.set_requires_all_reduce(False)`` keeps the sums, in fp32 shards, until a backward pass with ``True``.
    """

    def __init__(self, model: nn.Module, config: PowerSGDConfig, division: Division, names: set[str]) -> None:
        super().__init__(engine_of(division, config), functools.partial(part_of, division))
        self._model, self._units, self._equal = model, division.units, False
        self._shared = names
        # Sums of micro-batches that have not been averaged yet.
        self._unreduced: dict[Unit, Tensor] = {}

    def _take_over(self, passes: Passes) -> None:
        """Make FSDP call this state. Collective."""
        self._passes = passes
        self.make_replicas_equal()
        for unit in self._units:
            unit.take_over_all_reduce()
            unit.replace("_all_reduce_hook", functools.partial(self._all_reduce, unit))

    def make_replicas_equal(self) -> None:
        """Give all replicas the parameters and buffers of the first one, now or when they have values. Collective."""
        if not any(tensor.is_meta for tensor in (*self._model.parameters(), *self._model.buffers())):
            self._broadcast()
            return

        # Later, gradients would belong to other parameters. Not before an evaluation, which one replica may do alone.
        def before_first_step(module: nn.Module, _args: Any) -> None:
            if module.training or torch.is_grad_enabled():
                self._broadcast()
                handle.remove()

        # FSDP's own hook, which gathers the parameters, must come after it.
        handle = self._model.register_forward_pre_hook(torch.compiler.disable(before_first_step), prepend=True)

    @torch.no_grad()
    def _broadcast(self) -> None:
        broadcast_from_first(self._tensors().values(), self._communicator)
        self._equal = True

    def check_replicas(self) -> None:
        """Compare parameters and buffers of all replicas, bit by bit. Collective. RuntimeError if replicas differ.

        Buffers that are not saved (``persistent=False``) may differ, such as counts of a worker's tokens.
        """
        refuse_unequal(self.unequal())

    @torch.no_grad()
    def unequal(self) -> list[str]:
        """Return the names of the tensors that ``check_replicas`` refuses. Collective."""
        unsaved = {
            f"{path}.{name}".lstrip(".")
            for path, module in self._model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        tensors = {name: tensor for name, tensor in self._tensors().items() if name not in unsaved}
        prints = self._communicator.gather(torch.stack([fingerprint(tensor).cpu() for tensor in tensors.values()]))
        differs = (prints != prints[0]).any(dim=0).tolist()
        return list(itertools.compress(tensors, differs))

    def _tensors(self) -> dict[str, Tensor]:
        """Return {name: this worker's part} of the parameters and buffers that replicas have in common."""
        return {name: tensor for name, tensor in local_tensors(self._model) if plain_name(name) in self._shared}

    def _loading(self, state_dict: StateDict, **options: Any) -> Callable[[], LoadReport]:
        go_on = super()._loading(state_dict, **options)

        def discarding() -> LoadReport:
            """Discard gradients of micro-batches that have not been averaged yet."""
            self._unreduced.clear()
            return go_on()

        return discarding

    def forget(self) -> None:
        """See ``Handle.forget``. Discard gradients of micro-batches that have not been averaged yet."""
        super().forget()
        self._unreduced.clear()

    @torch.no_grad()
    def _all_reduce(self, unit: Unit, output: Tensor) -> None:
        """FSDP's all-reduce hook. It averages ``output``, this worker's result of the reduce-scatter, in place."""
        unit.calls += 1
        if not self._equal:
            raise RuntimeError(
                "replicas were not made equal: in apply_powersgd the model was on the meta device, and the first "
                "forward pass did not call the module given there. Call that module, or give parameters values before"
            )
        # On a 1-D mesh FSDP may free this memory while the hook's stream still uses it.
        if output.is_cuda:
            output.record_stream(torch.cuda.current_stream(output.device))
        output = as_real(output)
        earlier = self._unreduced.pop(unit, None)
        if earlier is not None and earlier.numel() != output.numel():
            raise RuntimeError(
                "this micro-batch has gradients of other parameters than the last one; call "
                "model.set_reduce_scatter_unused_params(True) if micro-batches use different parameters"
            )
        buffer = output if earlier is None else earlier.add_(output)
        # FSDP calls the hook after every reduce-scatter, so set_requires_all_reduce(False) has to be handled here.
        if not unit.parameter_group.all_reduce_grads:
            wide = torch.promote_types(output.dtype, torch.float32)
            self._unreduced[unit] = output.to(wide, copy=True) if earlier is None else earlier
            output.zero_()
            return
        self._passes.begin()
        bucket = self._engine.begin(unit.key, lambda: unit.shapes(padded=True), buffer.device, keys=(unit,))
        # FSDP leaves out parameters without a gradient and does not say which. Then average the buffer exactly.
        if not self._engine.compressing or bucket.layout.numel != buffer.numel():
            self._engine.average_exactly(buffer)
            if self._engine.compressing:
                # The step does not count then in other units either.
                note_overflow(buffer, self._step.verdict(buffer.device))
        else:
            views = {s.name: buffer[s.span].view(s.shape) for s in bucket.layout.segments}
            self._engine.average(bucket, views)
        divided = getattr(unit.parameter_group, "gradient_divide_factor", None) is not None
        if divided:
            # The user's divisor already covers all workers, so undo the division by the number of replicas.
            buffer.mul_(self._communicator.world_size)
        if buffer is not output:
            output.copy_(buffer)
        if output.dtype != buffer.dtype or divided:
            check_range(self._step, output)


def refuse_unequal(names: list[str]) -> None:
    """Raise RuntimeError if there are tensors in which replicas differ."""
    if names:
        raise RuntimeError(
            f"replicas differ in {len(names)} tensors, the first of them {names[:3]}. They are equal after "
            "apply_powersgd and stay so if every worker loads the same checkpoint and takes the same steps"
        )


class FullShardState(ShardedHandle):
    """Compresses whole gradients, of which each worker keeps its shard. ``apply_powersgd`` creates it."""

    replaces_reduce_scatter = True

    def __init__(self, config: PowerSGDConfig, division: Division) -> None:
        super().__init__(engine_of(division, config), functools.partial(part_of, division))
        self._units = division.units

    def _take_over(self, passes: Passes) -> None:
        self._passes = passes
        self._engine.connect(in_own_group(self._communicator, self._units[0].parameter_group.device))
        for unit in self._units:
            # FSDP has nothing to reduce-scatter on one worker.
            guarded = self._communicator.world_size > 1
            unit.replace("_reduce_scatter_comm", CustomReduceScatter(self, unit), guarded=guarded)


class CustomReduceScatter:
    """What FSDP calls in place of the reduce-scatter of one unit."""

    def __init__(self, state: FullShardState, unit: Unit) -> None:
        self._state, self._unit, self._default = state, unit, unit.parameter_group._reduce_scatter_comm
        self.allocate = self._default.allocate

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write this worker's shard of the averages to ``output_tensor``. ``input_tensor`` has one for each worker.

        A shard has the rows of each parameter that belong to one worker, padded.
        """
        state, engine, unit = self._state, self._state._engine, self._unit
        worker, workers = state._communicator.place
        unit.calls += 1
        output, sent = as_real(output_tensor), as_real(input_tensor)
        state._passes.begin()
        bucket = engine.begin(unit.key, lambda: unit.shapes(padded=False), output.device, keys=(unit,))
        parts = list(unit.shapes(padded=True).values())
        numels = [math.prod(shape) for shape in parts]
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(
                f"expected a sum or a mean over workers, but FSDP asks for {op}; if you use "
                "set_gradient_divide_factor, call set_force_sum_reduction_for_comms(True) on the same modules"
            )
        if not engine.compressing or sum(numels) != output.numel():
            self._default(output_tensor, input_tensor, group, op, async_op)
            if engine.compressing:
                note_overflow(output, state._step.verdict(output.device))
                # Each worker has looked at its own shard.
                state._step.uneven = True
            return
        memory = sent.new_empty(bucket.layout.numel)
        gradients: dict[str, Tensor] = {}
        ranges: dict[str, tuple[int, Tensor]] = {}
        cut: list[tuple[Tensor, Tensor]] = []
        shards, own = sent.view(workers, -1).split(numels, dim=1), output.split(numels)
        for whole, shape, columns, mine in zip(bucket.layout.segments, parts, shards, own, strict=True):
            dim = unit.named_parameters[whole.name].fsdp_placement.dim
            gradient = gradients[whole.name] = memory[whole.span].view(whole.shape)
            joined = columns.view(-1, *shape).movedim(0, dim).flatten(dim, dim + 1)
            gradient.copy_(joined.narrow(dim, 0, whole.shape[dim]))
            if dim > 0:
                # Not a range of the average. FSDP divides these dimensions into equal parts.
                ranges[whole.name] = 0, gradient.view(-1)
                cut.append((mine.view(shape), gradient.narrow(dim, worker * shape[dim], shape[dim])))
                continue
            # Shards are cut between complex numbers, so count the rows of a shard and not those of the parameter.
            first, behind = (min(index * shape[0], whole.shape[0]) for index in (worker, worker + 1))
            width = math.prod(shape[1:])
            mine[(behind - first) * width :].zero_()
            ranges[whole.name] = (first * width, mine[: (behind - first) * width])
        engine.average(bucket, gradients, ranges=ranges)
        for mine, average in cut:
            mine.copy_(average)
        if op == dist.ReduceOp.SUM:
            check_range(state._step, output.mul_(workers))


def check_range(step: Step, averages: Tensor) -> None:
    """Set a step's verdict to 0 if averages that were changed after they were written do not fit their dtype."""
    overflow = step.overflow(averages.device)
    # Only fp16 has a smaller range than the factors.
    if overflow is not None and averages.dtype == torch.float16:
        note_overflow(averages, overflow)


def engine_of(division: Division, config: PowerSGDConfig) -> Engine:
    """Return the engine of replicas, which compress their padded shards, or else of workers that compress wholes."""
    units = division.units

    def shapes() -> dict[str, tuple[int, ...]]:
        return {name: shape for unit in units for name, shape in unit.shapes(padded=division.hybrid).items()}

    return new_engine(config, division.communicator, shapes, buckets=len(units))


def part_of(division: Division, name: str) -> Part:
    """Return this worker's part of the error of what ``engine_of`` compresses."""
    found = next(unit.named_parameters[name] for unit in division.units if name in unit.named_parameters)
    parameter, dim = found.sharded_param, found.fsdp_placement.dim
    sizes = [real_shape(shape, parameter.dtype) for shape in (parameter.to_local().shape, found._orig_size)]
    workers = None if division.hybrid else division.units[0].parameter_group.mesh_info.mesh
    first, length = (0, sizes[0][dim]) if workers is None else cut(sizes[1][dim], workers)
    shape = real_shape(parameter.shape, parameter.dtype)
    return Part(dim, first, length, parameter.device_mesh, parameter.placements, shape, workers)
