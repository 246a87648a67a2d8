"""The rows of the table of wrappers, see ``wrappers.py``; DeepSpeed, and nodes of several workers."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support import deepspeed_training, tensor_parallel
from tests.support.sharded_training import RANK_2, RATE, Batch, Gradients, Net, loss_of
from tests.support.wrappers import (
    FSDP1,
    FSDP2,
    HSDP,
    OptimizerLoop,
    PlainLoop,
    Replicate,
    TensorParallel,
    WithReplicateGroup,
    Wrapped,
)


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
        deepspeed_training.prepare(dist.get_rank(), dist.get_world_size())
        if node_group is not None:
            use_nodes()
        section = None
        if config is not None:
            given = {key: value for key, value in config.to_dict().items() if value is not None}
            section = {**given, "parameters": None, "node_group": node_group}
        case = deepspeed_training.Case("", stage, options, optimizer="sgd")
        self.net, self.module = net, deepspeed_training.new_engine(case, section, net)
        if stage:
            self.module.optimizer.loss_scaler = deepspeed_training.halving_scale()
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
    return kind(net, config, node_group="auto", **options)


FORMATS = {
    "fp32": RANK_2,
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
"""Of what is compressed and sent."""


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A row of the table.

    ``workers`` is the smallest number that shows what is special to it, ``elsewhere`` another one, which can load what
    was saved. The rows of a parameter are split into ``shards`` parts before they are compressed. Of a ``thin`` one,
    only this property is quick, since most of it is another wrapper's. ``lacks`` says of properties and ways of
    training why they mean nothing here.
    """

    make: Callable[..., Wrapped]
    workers: int = 2
    elsewhere: int | None = 3
    shards: int = 1
    thin: str = ""
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
    **dict.fromkeys(FORMATS.keys() - {"fp32"}, "it has one algorithm, in fp32"),
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
BALANCE = "conservation"
WRAPPERS: dict[str, Wrapper] = {
    "DDP": Wrapper(Wrapped),
    "FSDP1": Wrapper(FSDP1),
    "FSDP1 SHARD_GRAD_OP": Wrapper(
        functools.partial(FSDP1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), thin=BALANCE
    ),
    "FSDP1 NO_SHARD": Wrapper(functools.partial(FSDP1, sharding_strategy=ShardingStrategy.NO_SHARD), thin=BALANCE),
    "FSDP2": Wrapper(FSDP2),
    "HSDP": Wrapper(HSDP, 4, 2, shards=2, lacks=PADDED),
    "HSDP by group": Wrapper(WithReplicateGroup, 4, 2, shards=2, thin=BALANCE, lacks=PADDED),
    "replicate": Wrapper(Replicate, thin=BALANCE),
    "DDP in nodes": Wrapper(functools.partial(in_nodes, Wrapped), 4, 2, thin=BALANCE, lacks=NODES),
    "FSDP1 in nodes": Wrapper(functools.partial(in_nodes, FSDP1), 4, 2, thin=BALANCE, lacks=NODES),
    "tensor parallel": Wrapper(TensorParallel, 4, 2, thin="full_rank", net=tensor_parallel.Net, lacks=PARTS),
    "tensor parallel by group": Wrapper(
        functools.partial(TensorParallel, by_mesh=False), 4, 2, thin=BALANCE, net=tensor_parallel.Net, lacks=PARTS
    ),
    "Compressor": Wrapper(PlainLoop, lacks=LOOP),
    "optimizer": Wrapper(OptimizerLoop, lacks=LOOP | ALTERNATING),
    "local steps": Wrapper(Exchanged, lacks=LOOP | LOCAL),
    "DeepSpeed 0": Wrapper(Engine, lacks=ENGINE | {"void": "fp16 alone skips steps, see deepspeed/test_training.py"}),
    # DeepSpeed loads checkpoints of these on another number of workers only after its conversion.
    "DeepSpeed 1": Wrapper(functools.partial(Engine, stage=1), elsewhere=None, thin=BALANCE, lacks=ENGINE),
    "DeepSpeed 2": Wrapper(functools.partial(Engine, stage=2), elsewhere=None, lacks=ENGINE),
    "DeepSpeed 3": Wrapper(functools.partial(Engine, stage=3), elsewhere=None, lacks=ENGINE),
    "DeepSpeed 2 in nodes": Wrapper(
        functools.partial(in_nodes, functools.partial(Engine, stage=2)), 4, None, thin=BALANCE, lacks=ENGINE
    ),
    "DeepSpeed 3 in nodes": Wrapper(
        functools.partial(in_nodes, functools.partial(Engine, stage=3)), 4, None, thin=BALANCE, lacks=ENGINE
    ),
}
