"""Every way of wrapping a model, behind one interface, for the properties in ``tests/support/properties.py``.

All of it runs inside a worker. To add a wrapper, derive a class from ``Wrapped`` and put a row into ``WRAPPERS``:
``__init__(net, config, **options)`` wraps ``net``, whose parameters have their values, as users do, with SGD without
momentum at the rate ``RATE``, and compresses its gradients unless ``config`` is None. ``parameters()`` and
``mean_error()``, over the workers and in units of the averaged gradients, are whole tensors by their names in ``Net``,
equal on all workers. ``step`` skips a step on all workers if an average is not finite. ``save`` and ``load`` are
collective and keep the compression's state alone.

What a step has averaged is (parameters before − parameters after) / ``RATE``: no property needs a framework's own
gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig, attach
from powersgd_triton.integrations.common import plain_name
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.integrations.local_steps import LocalSteps
from powersgd_triton.integrations.optimizer import Config, PowerSGD
from tests.support import deepspeed_training, tensor_parallel
from tests.support.sharded_training import (
    Block,
    Gradients,
    Net,
    full_mesh,
    hybrid_mesh,
    replica_mesh,
    replicated,
    sharded,
    whole,
)
from tests.support.training import total

RATE = 0.5
"""The learning rate: a power of two, so that dividing by it rounds nothing."""
Batch = tuple[Tensor, Tensor]


def loss_of(module: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy."""
    tokens, targets = batch
    return F.cross_entropy(module(tokens).float().flatten(0, 1), targets.flatten())


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
    levels = 1
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
    """FSDP1 around each block and the model."""

    def __init__(self, net: Net, config: PowerSGDConfig | None, *, node_group: Any = None, **options: Any) -> None:
        given = {"device_id": torch.device("cpu"), "use_orig_params": True, **options}
        module: Any = FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({Block}), **given)
        self.finish(net, module, config, node_group=node_group)

    def parameters(self) -> Gradients:
        with FullyShardedDataParallel.summon_full_params(self.module):
            return super().parameters()


class FSDP2(Wrapped):
    """``fully_shard`` on one dimension."""

    def __init__(self, net: Net, config: PowerSGDConfig | None, **options: Any) -> None:
        self.finish(net, sharded(net, full_mesh(dist.get_world_size()), **options), config)

    def syncing(self, on: bool) -> contextlib.AbstractContextManager[None]:
        self.module.set_requires_gradient_sync(on)
        return contextlib.nullcontext()


class HSDP(FSDP2):
    """``fully_shard`` on replicas × shards, of which the state averages the replicas."""

    def __init__(self, net: Net, config: PowerSGDConfig | None, **options: Any) -> None:
        self.finish(net, sharded(net, hybrid_mesh(2, dist.get_world_size() // 2), **options), config)

    def mean_error(self) -> Gradients:
        return {name: whole(error) for name, error in self.state.state_dict()["error"].items()}


class WithReplicateGroup(HSDP):
    """``fully_shard`` on the shards alone, and a group of replicas. Without compression that is ``HSDP``."""

    def __init__(self, net: Net, config: PowerSGDConfig | None, **options: Any) -> None:
        if config is None:
            super().__init__(net, config, **options)
            return
        mesh = hybrid_mesh(2, dist.get_world_size() // 2)
        self.finish(net, sharded(net, mesh["shard"], **options), None)
        self.state = apply_powersgd(self.module, config, mesh["replicate"].get_group())


class Replicate(HSDP):
    """``replicate()``: replicas alone."""

    def __init__(self, net: Net, config: PowerSGDConfig | None, **options: Any) -> None:
        self.finish(net, replicated(net, replica_mesh(dist.get_world_size()), **options), config)


class TensorParallel(HSDP):
    """Tensor parallelism of two in HSDP on replicas alone, which are a group with ``by_mesh=False``."""

    net_type = tensor_parallel.Net

    def __init__(self, net: Any, config: PowerSGDConfig | None, *, by_mesh: bool = True) -> None:
        mesh = tensor_parallel.mesh_of(2, 1, dist.get_world_size() // 2)
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


class Exchanged(PlainLoop):
    """Local steps with an exchange after each, so that what is compressed is ``RATE`` times the gradient."""

    def __init__(self, net: Net, config: PowerSGDConfig | None) -> None:
        super().__init__(net, None)
        if config is not None:
            self.state = LocalSteps(net, config, every=1)

    def average(self, gradients: Gradients) -> None:
        if self.state is None:
            super().average(gradients)

    def update(self) -> None:
        if self.state is None:
            super().update()
            return
        self.optimizer.step()
        self.state.step()

    def mean_error(self) -> Gradients:
        return {name: error / RATE for name, error in super().mean_error().items()}


class Engine(Wrapped):
    """DeepSpeed with a stage of ZeRO, and a loss scale that halves where a gradient is not finite."""

    def __init__(
        self, net: Net, config: PowerSGDConfig | None, *, stage: int = 0, node_group: Any = None, **options: Any
    ) -> None:
        from powersgd_triton.integrations import deepspeed

        deepspeed_training.prepare(dist.get_rank(), dist.get_world_size())
        if node_group is not None:
            use_nodes()
        section = None
        if config is not None:
            given = {key: value for key, value in config.to_dict().items() if value is not None}
            section = {**given, "parameters": None, "node_group": node_group}
        made = deepspeed_training.configuration(stage, section, options)
        made.pop("optimizer")
        made["zero_allow_untested_optimizer"] = True
        self.net, self.optimizer = net, torch.optim.SGD(net.parameters(), lr=RATE)
        with contextlib.redirect_stdout(None):
            self.module = deepspeed.initialize(
                model=net, model_parameters=list(net.parameters()), config=made, optimizer=self.optimizer
            )[0]
        if stage:
            self.module.optimizer.loss_scaler = deepspeed_training.StubScaler()
        self.state = getattr(self.module, "powersgd", None)

    def step(self, batches: Sequence[Batch], **_options: Any) -> None:
        (batch,) = batches
        self.module.backward(loss_of(self.module, batch))
        self.module.step()

    def parameters(self) -> Gradients:
        return deepspeed_training.weights(self.module)

    def save(self, folder: str) -> None:
        self.module.save_checkpoint(folder)

    def load(self, folder: str) -> None:
        self.module.load_checkpoint(folder)


def use_nodes() -> None:
    """Set what torchrun sets on nodes of two workers."""
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(dist.get_rank() % 2))


def in_nodes(kind: Callable[..., Wrapped], net: Net, config: PowerSGDConfig | None, **options: Any) -> Wrapped:
    """Nodes of two workers, which share the compression of their sum."""
    use_nodes()
    made = kind(net, config, node_group="auto", **options)
    made.levels = min(2, dist.get_world_size() // 2)
    return made


RANK_2 = PowerSGDConfig(rank=2, min_compression_rate=1)
FORMATS = {
    "alternating": dataclasses.replace(RANK_2, algorithm="alternating"),
    "iterations": dataclasses.replace(RANK_2, iterations=2),
    **{
        f"{wire} {algorithm}": dataclasses.replace(RANK_2, wire_dtype=wire, algorithm=algorithm)
        for wire in ("bf16", "fp16", "int8", "int4")
        for algorithm in ("standard", "alternating")
    },
    "quantized": PowerSGDConfig(quantize="int4"),
    "bypass": dataclasses.replace(RANK_2, bypass="int8"),
}
"""Of what is compressed and sent, beside the standard algorithm in fp32."""


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A row of the table.

    ``workers`` is the smallest number that shows what is special to it, ``elsewhere`` another one, which can load what
    was saved. The rows of a parameter are split into ``shards`` parts before they are compressed. If ``thin``, only
    two properties are quick, since most of it is another wrapper's. ``lacks`` says of properties and ways of
    training why they mean nothing here.
    """

    make: Callable[..., Wrapped]
    workers: int = 2
    elsewhere: int | None = 3
    shards: int = 1
    thin: bool = False
    net: Callable[[], Any] = Net
    lacks: Mapping[str, str] = dataclasses.field(default_factory=dict)


LOOP = {
    "no sync": "the program decides when gradients are averaged",
    "several backwards": "the program decides when gradients are averaged",
    "attached": "it has a constructor of its own",
    "traffic": "it is counted in the tests of the compressor",
    "watched": "it is watched in the tests of the compressor",
}
ALTERNATING = {
    "full_rank": "one product with a basis is not exact at any rank",
    **dict.fromkeys(FORMATS, "it has one algorithm, in fp32"),
    **dict.fromkeys(("budget", "stateless"), "it has ranks only"),
    "void": "the error is in the gradient, so that of an element that is not finite goes with it",
}
LOCAL = {
    "void": "a worker that is not finite contributes nothing",
    "damaged": "it saves a part of each worker",
    "stateless": "it always keeps what is left",
}
# What it owes there is not saved, and decays.
PADDED = {"resume alternating": "the first left basis is not zero in the rows that pad a shard"}
PARTS = {
    **dict.fromkeys(("traffic", "budget"), "each worker sends something else"),
    **dict.fromkeys(("frozen", "checkpointing", "unused"), "its model has other layers"),
    "clipping": "torch has no norm of tensors on several meshes",
    "attached": "it is attached as without it",
    **dict.fromkeys(("quantized", "stateless", "bypass"), "it is refused, since a scale is for several tensors"),
    # Then their copies drift apart.
    "void": "of a matrix that is not split, one worker of a pair may keep the error where the other one carries it",
}
NODES = {"traffic": "sums within a node are all-reduces too", "attached": "it is attached as on one level"}
ENGINE = {
    **dict.fromkeys(
        ("several backwards", "no sync", "clipping"), "its configuration says so, see deepspeed/test_training.py"
    ),
    "attached": "what it says is tested in deepspeed/test_refusals.py",
    "traffic": "its own logger counts it, see deepspeed/test_training.py",
}
WRAPPERS: dict[str, Wrapper] = {
    "DDP": Wrapper(Wrapped),
    "FSDP1": Wrapper(FSDP1),
    "FSDP1 SHARD_GRAD_OP": Wrapper(
        functools.partial(FSDP1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), thin=True
    ),
    "FSDP1 NO_SHARD": Wrapper(functools.partial(FSDP1, sharding_strategy=ShardingStrategy.NO_SHARD), thin=True),
    "FSDP2": Wrapper(FSDP2),
    "HSDP": Wrapper(HSDP, 4, 2, shards=2, lacks=PADDED),
    "HSDP by group": Wrapper(WithReplicateGroup, 4, 2, shards=2, thin=True, lacks=PADDED),
    "replicate": Wrapper(Replicate, thin=True),
    "DDP in nodes": Wrapper(functools.partial(in_nodes, Wrapped), 4, 2, thin=True, lacks=NODES),
    "FSDP1 in nodes": Wrapper(functools.partial(in_nodes, FSDP1), 4, 2, thin=True, lacks=NODES),
    "tensor parallel": Wrapper(TensorParallel, 4, 2, thin=True, net=tensor_parallel.Net, lacks=PARTS),
    "tensor parallel by group": Wrapper(
        functools.partial(TensorParallel, by_mesh=False), 4, 2, thin=True, net=tensor_parallel.Net, lacks=PARTS
    ),
    "Compressor": Wrapper(PlainLoop, lacks=LOOP),
    "optimizer": Wrapper(OptimizerLoop, lacks=LOOP | ALTERNATING),
    "local steps": Wrapper(Exchanged, lacks=LOOP | LOCAL),
    "DeepSpeed 0": Wrapper(Engine, lacks=ENGINE | {"void": "fp16 alone skips steps, see deepspeed/test_training.py"}),
    # DeepSpeed loads checkpoints of these on another number of workers only after its conversion.
    "DeepSpeed 1": Wrapper(functools.partial(Engine, stage=1), elsewhere=None, thin=True, lacks=ENGINE),
    "DeepSpeed 2": Wrapper(functools.partial(Engine, stage=2), elsewhere=None, lacks=ENGINE),
    "DeepSpeed 3": Wrapper(functools.partial(Engine, stage=3), elsewhere=None, lacks=ENGINE),
    "DeepSpeed 2 in nodes": Wrapper(
        functools.partial(in_nodes, functools.partial(Engine, stage=2)), 4, None, thin=True, lacks=ENGINE
    ),
}
