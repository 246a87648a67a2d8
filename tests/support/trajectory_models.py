"""A small model in training with every adapter, for ``trajectories.py``; the public interface alone."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig, checkpoint
from powersgd_triton.integrations import ddp, fsdp1
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.integrations.optimizer import Config, PowerSGD, optimizer_step

STEPS, POISONED_STEP, RESUMED_STEP = 30, 7, 15
TOKENS = 23
Options = dict[str, Any]


class Block(nn.Module):
    """Two matrices of odd sizes, of which the square one has its like in the other block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.square = nn.Linear(width, hidden), nn.Linear(57, 57, bias=False)
        self.down = nn.Linear(hidden, 57)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.square(torch.tanh(self.down(torch.tanh(self.up(x))))))


class Net(nn.Module):
    """An embedding, a convolution, two blocks and a head; ``poison`` makes one element of a gradient infinite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.mix = nn.Embedding(TOKENS, 20), nn.Conv1d(20, 24, 3)
        self.first, self.second = Block(24, 61), Block(57, 33)
        self.norm, self.head = nn.LayerNorm(57), nn.Linear(57, TOKENS)
        self.poison = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(torch.tanh(self.mix(self.tokens(tokens).mT)).mean(2))
        if self.poison:
            x.register_hook(_with_an_infinity)
        logits: Tensor = self.head(self.norm(self.second(x)))
        return logits


def _with_an_infinity(gradient: Tensor) -> Tensor:
    changed = gradient.clone()
    changed.view(-1)[0] = torch.inf
    return changed


def local(tensor: Tensor) -> Tensor:
    """This worker's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Training:
    """One model, its optimizer and its compression. An adapter's class says how they are put together.

    Args:
        worker: index of this process.
        options: fields of PowerSGDConfig.
        how: what else an adapter can be told; all know ``poison``, ``resume`` and ``scales``, the loss scales in turn.
    """

    rebuilds = True

    def __init__(self, worker: int, options: Options, **how: Any) -> None:
        self.worker, self.how = worker, how
        self.options: Options = {"min_compression_rate": 1.0, **options}
        if not {"rank", "compression"} & options.keys():
            self.options["rank"] = 3
        self.scale = 1.0
        self.net = Net().to(how.get("dtype", torch.float32))
        self.module: Any = self.net
        self.state: Any = None
        self.build()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)

    @property
    def config(self) -> PowerSGDConfig:
        return PowerSGDConfig(**self.options)

    def build(self) -> None:
        """Set ``module`` and ``state``."""

    def loss(self, step: int, micro: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + self.worker)
        tokens = torch.randint(0, TOKENS, (8, 6), generator=generator)
        self.net.poison = bool(self.how.get("poison")) and self.worker == 0 and step == POISONED_STEP
        return F.cross_entropy(self.module(tokens).float(), (3 * tokens[:, 0] + 1) % TOKENS) * self.scale

    def backward(self, step: int) -> None:
        """Leave the averaged gradients in ``.grad``."""
        self.loss(step).backward()

    def step(self, step: int) -> None:
        """Train one step; no worker applies a gradient that is not finite on one of them."""
        scales = self.how.get("scales", [1.0])
        self.scale = scales[step * len(scales) // STEPS]
        self.optimizer.zero_grad()
        self.backward(step)
        if self.scale != 1:
            for parameter in self.module.parameters():
                parameter.grad.div_(self.scale)
        finite = all(bool(local(p.grad).isfinite().all()) for p in self.module.parameters() if p.grad is not None)
        flag = torch.tensor(float(finite))
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        if flag:
            self.optimizer.step()

    def resume(self) -> None:
        """Go on from what is saved now, in a new state where the wrapped model can have one."""
        saved = self.state.state_dict()
        if self.rebuilds:
            self.build()
        self.state.load_state_dict(saved)

    def save(self, path: Path) -> None:
        """Write the compression's state to a file."""
        saved = self.state.state_dict()
        if self.worker == 0:
            for suffix in (".pt", ".safetensors"):
                checkpoint.save(saved, path.with_suffix(suffix))

    def load(self, path: Path) -> None:
        """Go on from that file."""
        self.state.load_state_dict(checkpoint.load(path))

    def parameters(self) -> list[Tensor]:
        """What this worker holds of them."""
        return list(self.module.parameters())

    def close(self) -> None:
        """Give back what outlives the object."""


class Ddp(Training):
    """The hook with several buckets. ``hook``, ``named``, ``micro_batches``."""

    def build(self) -> None:
        names = {
            "rank": "matrix_approximation_rank", "start_iter": "start_powerSGD_iter",
            "error_feedback": "use_error_feedback", "batch_by_shape": "batch_tensors_with_same_shape",
        }  # fmt: skip
        settings = {"start_iter": 0, **self.options}
        module = self.net if self.how.get("named", True) else None
        self.wrap(ddp.PowerSGDState(None, module=module, **{names.get(k, k): v for k, v in settings.items()}))

    def wrap(self, state: Any) -> None:
        self.state, self.buckets, hook = state, 0, getattr(ddp, self.how.get("hook", "powerSGD_hook"))

        # Without annotations: DDP would compare them with the types themselves.
        def counting(state, bucket):
            self.buckets = max(self.buckets, bucket.index() + 1)
            return hook(state, bucket)

        self.module = DistributedDataParallel(self.net, bucket_cap_mb=0.015)
        self.module.register_comm_hook(state, counting)
        if "scales" in self.how:
            state.attach(lambda: self.scale)

    def backward(self, step: int) -> None:
        micro_batches = self.how.get("micro_batches", 1)
        for micro in range(micro_batches):
            with self.module.no_sync() if micro + 1 < micro_batches else contextlib.nullcontext():
                self.loss(step, micro).backward()

    def save(self, path: Path) -> None:
        if path.suffix == ".pickle":
            path.write_bytes(pickle.dumps(self.state))
        else:
            super().save(path)

    def load(self, path: Path) -> None:
        if path.suffix == ".pickle":
            self.wrap(pickle.loads(path.read_bytes()))
        else:
            super().load(path)


class Plain(Training):
    """A Compressor and a loop of its own. ``form``: named, list or flat; ``gradients``: their dtype."""

    def build(self) -> None:
        self.state = Compressor(self.config, {name: p.shape for name, p in self.net.named_parameters()})
        if "scales" in self.how:
            self.state.attach(lambda: self.scale)

    def backward(self, step: int) -> None:
        self.loss(step).backward()
        parameters = dict(self.net.named_parameters())
        gradients: Any = {n: p.grad.to(self.how.get("gradients", p.dtype)) for n, p in parameters.items()}  # type: ignore[union-attr]
        form = self.how.get("form", "named")
        if form == "list":
            gradients = list(gradients.values())
        elif form == "flat":
            gradients = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
        compressed = self.state.compress(gradients)
        if form == "named":
            averages = self.state.decompress(compressed)
        else:
            averages = {n: torch.empty_like(p) for n, p in parameters.items()}
            self.state.decompress(compressed, out=list(averages.values()) if form == "list" else gradients)
            if form == "flat":
                pieces = gradients.split([p.numel() for p in parameters.values()])
                averages = {n: piece.view_as(parameters[n]) for n, piece in zip(parameters, pieces, strict=True)}
        for name, parameter in parameters.items():
            parameter.grad = averages[name].to(parameter.dtype)


class Reference(Training):
    """The interface of the reference implementation. ``iterations``, ``start``."""

    def build(self) -> None:
        config = Config(
            rank=2, min_compression_rate=1, num_iters_per_step=self.how.get("iterations", 1),
            start_compressing_after_num_steps=self.how.get("start", 3),
        )  # fmt: skip
        self.state = PowerSGD(list(self.net.parameters()), config)

    def step(self, step: int) -> None:
        self.loss(step).backward()
        optimizer_step(self.optimizer, self.state)


class Sharded(Training):
    """What the states for sharded models share: DCP saves them, and a model has one only."""

    rebuilds = False

    def save(self, path: Path) -> None:
        dcp_save({"powersgd": self.state}, checkpoint_id=path)

    def load(self, path: Path) -> None:
        dcp_load({"powersgd": self.state}, checkpoint_id=path)


class Fsdp1(Sharded):
    """``strategy``: name of a ShardingStrategy."""

    def build(self) -> None:
        self.module = FullyShardedDataParallel(
            self.net, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True,
            sharding_strategy=ShardingStrategy[self.how.get("strategy", "FULL_SHARD")],
        )  # fmt: skip
        self.state = fsdp1.PowerSGDState(self.module, self.config)
        self.module.register_comm_hook(self.state, fsdp1.powerSGD_hook)


class Fsdp2(Sharded):
    """``replicas``: across so many (HSDP), None for one dimension."""

    def build(self) -> None:
        replicas = self.how.get("replicas")
        mesh = hybrid_mesh(replicas or 1)
        for module in (self.net.first, self.net.second, self.net):
            fully_shard(module, mesh=mesh["shard"])
        group = mesh["replicate"].get_group() if replicas else None
        self.state = apply_powersgd(self.net, self.config, replicate_group=group)


class DeepSpeed(Training):
    """``stage``; ``zero``: further settings of it."""

    rebuilds = False

    def build(self) -> None:
        os.environ.update(DS_ACCELERATOR="cpu", RANK=str(self.worker), LOCAL_RANK=str(self.worker),
                          WORLD_SIZE=str(dist.get_world_size()))  # fmt: skip
        import deepspeed as real

        from powersgd_triton.integrations import deepspeed

        # It would have to be compiled first.
        real.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        real.utils.logger.setLevel(logging.ERROR)
        real.init_distributed("gloo")
        section: Options = {
            "train_micro_batch_size_per_gpu": 8,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
            "zero_optimization": {"stage": self.how["stage"], **self.how.get("zero", {})},
            "powersgd": {**self.options, "parameters": None},
        }
        with contextlib.redirect_stdout(io.StringIO()):
            parameters = list(self.net.parameters())
            self.module = deepspeed.initialize(model=self.net, model_parameters=parameters, config=section)[0]
        self.state = self.module.powersgd

    def step(self, step: int) -> None:
        self.module.backward(self.loss(step))
        self.module.step()

    def parameters(self) -> list[Tensor]:
        return [self.part(parameter) for parameter in self.net.parameters()]

    def part(self, parameter: Any) -> Tensor:
        if not hasattr(parameter, "ds_tensor"):
            return parameter  # type: ignore[no-any-return]
        mine: Tensor = parameter.ds_tensor.flatten()
        # Parts are of one size; what lies behind a parameter's last element was never written.
        return mine[: max(0, parameter.ds_numel - self.worker * mine.numel())]

    def close(self) -> None:
        self.module.destroy()


@functools.cache
def hybrid_mesh(replicas: int) -> DeviceMesh:
    """All workers as replicas × shards."""
    workers = torch.arange(dist.get_world_size()).view(replicas, -1)
    return DeviceMesh("cpu", workers, mesh_dim_names=("replicate", "shard"))
