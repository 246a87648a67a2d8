"""Every way of wrapping a model, behind one interface, for the properties in ``tests/support/properties.py``.

All of it runs inside a worker. To add a wrapper, derive a class from ``Wrapped`` and add a row to ``wrapper_table.py``:
``__init__(net, config, **options)`` wraps ``net``, whose parameters have their values, as users do, with SGD without
momentum at the rate ``RATE``, and compresses its gradients unless ``config`` is None. ``parameters()`` and
``mean_error()``, over the workers and in units of the averaged gradients, are whole tensors by their names in ``Net``,
equal on all workers. ``step`` skips a step on all workers if an average is not finite. ``save`` and ``load`` are
collective and keep the compression's state alone.

What a step has averaged is (parameters before − parameters after) / ``RATE``: no property needs a framework's own
gradients.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig, attach
from powersgd_triton.integrations.common import plain_name
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.integrations.optimizer import Config, PowerSGD
from tests.support import tensor_parallel
from tests.support.sharded_training import (
    RATE,
    Batch,
    Block,
    Gradients,
    Net,
    loss_of,
    mesh_of,
    replicated,
    sharded,
    whole,
    whole_errors,
)
from tests.support.training import total


def means(tensors: Mapping[str, Tensor]) -> Gradients:
    """Over all workers, in fp64, with one all-reduce."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    summed = total(torch.cat([torch.empty(0), *(tensor.detach().flatten() for tensor in tensors.values())]))
    parts = (summed / dist.get_world_size()).split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def local(tensor: Tensor) -> Tensor:
    """This worker's part of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Wrapped:
    """A model of DistributedDataParallel, and what most wrappers have in common with it. See the module."""

    net: Net
    module: Any
    optimizer: Any
    state: Any = None
    net_type: Callable[[], Any] = Net

    def __init__(self, net: Net, config: PowerSGDConfig | None, *, node_group: Any = None, **options: Any) -> None:
        self.finish(net, DistributedDataParallel(net, bucket_cap_mb=0.005, **options), config, node_group=node_group)

    def finish(self, net: Net, module: Any, config: PowerSGDConfig | None, **options: Any) -> None:
        """Attach the compression, and make the optimizer."""
        self.net, self.module = net, module
        if config is not None:
            self.state = attach(module, config, **options)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def step(
        self,
        batches: Sequence[Batch],
        *,
        sync_each: bool = False,
        all_reduce_last: bool = False,
        clip: float | None = None,
    ) -> None:
        """Average after each micro-batch, after the last, or over shards after each and over replicas at the end."""
        self.optimizer.zero_grad()
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            if all_reduce_last:
                self.module.set_requires_all_reduce(last)
            with self.syncing(sync_each or all_reduce_last or last):
                (loss_of(self.module, batch) / len(batches)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        self.update()

    def syncing(self, on: bool) -> contextlib.AbstractContextManager[None]:
        """A context whose backward passes average gradients, or only accumulate them."""
        return contextlib.nullcontext() if on else self.module.no_sync()

    def update(self) -> None:
        """Apply the averages if they are finite on all workers, as a gradient scaler does."""
        averages = [p.grad for p in self.module.parameters() if p.grad is not None]
        if everywhere(all(bool(local(average).isfinite().all()) for average in averages)):
            self.optimizer.step()

    def data_worker(self) -> int:
        """Whose data this worker has."""
        return dist.get_rank()

    def parameters(self) -> Gradients:
        return {plain(name): whole(parameter) for name, parameter in self.module.named_parameters()}

    def mean_error(self) -> Gradients:
        return means(self.state.error())

    def save(self, folder: str) -> None:
        self.state.save(folder)

    def load(self, folder: str) -> None:
        self.state.load(folder)


def plain(name: str) -> str:
    """A parameter's name in ``Net``."""
    return plain_name(name).removeprefix("module.")


def everywhere(found: bool) -> bool:
    return bool(total(torch.tensor(float(found))) == dist.get_world_size())


class FSDP1(Wrapped):
    def __init__(self, net: Net, config: PowerSGDConfig | None, *, node_group: Any = None, **options: Any) -> None:
        given: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
        given |= {"auto_wrap_policy": ModuleWrapPolicy({Block}), **options}
        module: Any = FullyShardedDataParallel(net, **given)
        self.finish(net, module, config, node_group=node_group)

    def parameters(self) -> Gradients:
        with FullyShardedDataParallel.summon_full_params(self.module):
            return super().parameters()


class FSDP2(Wrapped):
    """``fully_shard`` on one dimension."""

    def __init__(self, net: Net, config: PowerSGDConfig | None, **options: Any) -> None:
        self.finish(net, sharded(net, mesh_of(shard=dist.get_world_size()), **options), config)

    def syncing(self, on: bool) -> contextlib.AbstractContextManager[None]:
        self.module.set_requires_gradient_sync(on)
        return contextlib.nullcontext()


class HSDP(FSDP2):
    """``fully_shard`` on replicas × shards, of which the state averages the replicas."""

    def __init__(self, net: Net, config: PowerSGDConfig | None, **options: Any) -> None:
        self.finish(net, sharded(net, mesh_of(replicate=2, shard=dist.get_world_size() // 2), **options), config)

    def mean_error(self) -> Gradients:
        return whole_errors(self.state)


class WithReplicateGroup(HSDP):
    """``fully_shard`` on the shards alone, and a group of replicas. Without compression that is ``HSDP``."""

    def __init__(self, net: Net, config: PowerSGDConfig | None, **options: Any) -> None:
        if config is None:
            super().__init__(net, config, **options)
            return
        mesh = mesh_of(replicate=2, shard=dist.get_world_size() // 2)
        self.finish(net, sharded(net, mesh["shard"], **options), None)
        self.state = apply_powersgd(self.module, config, mesh["replicate"].get_group())


class Replicate(HSDP):
    """``replicate()``: replicas alone."""

    def __init__(self, net: Net, config: PowerSGDConfig | None, **options: Any) -> None:
        self.finish(net, replicated(net, **options), config)


class TensorParallel(HSDP):
    """Tensor parallelism of two in HSDP on replicas alone, which are a group with ``by_mesh=False``."""

    net_type = tensor_parallel.Net

    def __init__(self, net: Any, config: PowerSGDConfig | None, *, by_mesh: bool = True) -> None:
        mesh = mesh_of(replicate=2, shard=1, tensor=dist.get_world_size() // 2)
        self.finish(net, tensor_parallel.parallel(net, mesh, two_dimensional=by_mesh or config is None), None)
        if config is not None:
            self.state = apply_powersgd(self.module, config, None if by_mesh else mesh["replicate"].get_group())

    def data_worker(self) -> int:
        return dist.get_rank() // (dist.get_world_size() // 2)


class PlainLoop(Wrapped):
    """A ``Compressor``, whose averages are written over the gradients. Without compression, all-reduces."""

    def __init__(self, net: Net, config: PowerSGDConfig | None) -> None:
        self.finish(net, net, None)
        if config is not None:
            self.state = Compressor(config, self.trained())

    def trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    def syncing(self, _on: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def update(self) -> None:
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.trained().items()}
        self.average(gradients)
        for name, parameter in self.trained().items():
            parameter.grad = gradients[name]
        super().update()

    def average(self, gradients: Gradients) -> None:
        if self.state is None:
            for name, average in means(gradients).items():
                gradients[name].copy_(average)
        else:
            self.state.decompress(self.state.compress(gradients), out=gradients)


class OptimizerLoop(PlainLoop):
    """``integrations.optimizer``, whose gradients keep the error. It knows rank, rate and first step alone."""

    def __init__(self, net: Net, config: PowerSGDConfig | None) -> None:
        super().__init__(net, None)
        self.errors = {name: torch.zeros_like(p) for name, p in self.trained().items()}
        if config is not None:
            chosen = Config(int(config.rank), config.min_compression_rate, 1, config.start_iter)  # type: ignore[arg-type]
            self.state = PowerSGD(list(self.trained().values()), chosen)

    def average(self, gradients: Gradients) -> None:
        if self.state is None:
            super().average(gradients)
            return
        self.errors = {name: self.errors[name] + gradient for name, gradient in gradients.items()}
        averages = self.state.aggregate([*self.errors.values()])
        if not everywhere(all(bool(average.isfinite().all()) for average in averages)):
            # What is finite is sent later. The averages of what is never compressed are lost with the step.
            averages = [torch.full_like(average, torch.nan) for average in averages]
        for gradient, average in zip(gradients.values(), averages, strict=True):
            gradient.copy_(average)

    def mean_error(self) -> Gradients:
        return means({name: error for name, error in self.errors.items() if error.ndim > 1})

    def save(self, folder: str) -> None:
        saved = {"errors": self.mean_error(), "state": self.state.state_dict()}
        if dist.get_rank() == 0:
            torch.save(saved, f"{folder}/loop")
        dist.barrier()

    def load(self, folder: str) -> None:
        saved = torch.load(f"{folder}/loop")
        self.state.load_state_dict(saved["state"])
        self.errors |= {name: error.float() for name, error in saved["errors"].items()}
