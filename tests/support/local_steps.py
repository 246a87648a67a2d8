"""Small models in local steps, plain or wrapped on two nodes of two workers. All of it runs inside a worker."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.local_steps import LocalSteps, node_mpu
from tests.support.deepspeed_training import configuration

TERNARY = PowerSGDConfig(quantize="ternary")
CONFIGS: dict[str, PowerSGDConfig | None] = {
    "exact": None,
    "ternary": TERNARY,
    "sparse": PowerSGDConfig(quantize="sparse", compression=16),
    "int2": PowerSGDConfig(quantize="int2"),
    "int4": PowerSGDConfig(quantize="int4"),
    "int8": PowerSGDConfig(quantize="int8"),
    "rank": PowerSGDConfig(rank=2, min_compression_rate=0),
    "int8 factors": PowerSGDConfig(rank=2, min_compression_rate=0, wire_dtype="int8"),
    "budget": PowerSGDConfig(compression=3, replan_every=2, min_compression_rate=0),
    "alternating": PowerSGDConfig(rank=2, algorithm="alternating", start_iter=1),
}
WORKERS, NODE = 4, 2
WIDTH, HIDDEN = 12, 19
LOST = 3e-6
"""What rounding in fp32 may lose of the changes of parameters below 1."""
SGD = functools.partial(torch.optim.SGD, lr=0.1)
WITH_MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 5))


class Net(nn.Module):
    """Rows that two workers cannot share evenly, a matrix of one row, tied and frozen parameters, and buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.again = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.again.weight = self.up.weight
        self.scale = nn.Parameter(torch.ones(1, HIDDEN))
        self.down = nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(x))
        with torch.no_grad():
            self.get_buffer("average").lerp_(x.mean(0).to(self.get_buffer("average").dtype), 0.1)
        h = torch.tanh(self.up(x)) + 0.1 * self.again(x)
        outputs: Tensor = self.down(h * self.scale)
        return outputs


class OddNet(Net):
    """With complex parameters too, and with others that are channels-last."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.mix = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64))
        self.filter = nn.Conv2d(2, 2, 3, padding=1)
        self.filter.weight.data = self.filter.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = self.filter(x.view(-1, 2, 2, 3)).reshape(len(x), WIDTH)
        return super().forward(x + image) + 0.1 * (x.to(torch.complex64) @ self.mix).abs().sum(1, keepdim=True)


@functools.cache
def mesh() -> DeviceMesh:
    """[nodes, workers of a node]."""
    return init_device_mesh("cpu", (WORKERS // NODE, NODE), mesh_dim_names=("replicate", "shard"))


def node() -> dist.ProcessGroup:
    return mesh()["shard"].get_group()


def across() -> dist.ProcessGroup:
    return mesh()["replicate"].get_group()


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(8, 12, generator=generator)
    return x, x[:, :5].sin() + 0.1 * worker


def flat(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def mean(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def same_bits(tensor: Tensor, group: dist.ProcessGroup | None = None) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group=group)
    return all(torch.equal(tensor, other) for other in everyone)


def owed(sync: LocalSteps) -> Tensor:
    """This worker's error, as ``flat`` is laid out. Zero where nothing is owed."""
    errors = sync.error()
    return torch.cat([errors.get(name, torch.zeros_like(t)).reshape(-1) for name, t in sync.shared().items()])


def theta(sync: LocalSteps) -> Tensor:
    """The shared parameters, as ``flat`` is laid out."""
    return torch.cat([shared.reshape(-1) for shared in sync.shared().values()])


def real(tensor: Tensor) -> Tensor:
    tensor = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Training:
    """Local steps of a model, and the sum of what this worker has changed. A plain one begins differently everywhere.

    The workers of ``group`` exchange, and those of ``mean_over`` have the same part of the model."""

    group: Any = None
    mean_over: Any = None
    clip = torch.inf

    def __init__(
        self,
        worker: int,
        config: str = "ternary",
        every: Any = 3,
        *,
        net: nn.Module | None = None,
        optimizer: Callable[..., Any] = SGD,
        options: Mapping[str, Any] | None = None,
        share: bool = False,
        **more: Any,
    ) -> None:
        self.worker, self.net, self.done = worker, model(worker) if net is None else net, 0
        self.model: Any = self.net
        self.wrap(**(options or {}))
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = optimizer(self.trained)
        self.prepare()
        if share:
            more["optimizer"] = self.optimizer
        self.sync = LocalSteps(self.model, CONFIGS[config], every, **{"group": self.group, **more})
        self.start, self.changed = self.flat(), torch.zeros_like(self.flat(), dtype=torch.float32)

    def wrap(self) -> None:
        """Wrap the model, and set the groups."""

    def prepare(self) -> None:
        """Finish the wrapper, which may need the optimizer."""

    def unfreeze(self, parameters: Iterable[nn.Parameter]) -> None:
        """Train these too."""
        found = list(parameters)
        self.trained += found
        self.optimizer.add_param_group({"params": found})
        self.start = torch.cat([self.start, *(parameter.detach().flatten() for parameter in found)])
        self.changed = torch.cat([self.changed, torch.zeros(len(self.start) - len(self.changed))])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x.to(self.trained[0].dtype)).float(), y)

    def advance(self, x: Tensor, y: Tensor) -> None:
        """Take a step of the optimizer."""
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        if self.clip < torch.inf:
            norm = torch.nn.utils.clip_grad_norm_(self.trained, self.clip)
            assert norm > 1.2 * self.clip, "nothing was clipped"
        self.optimizer.step()

    def masters(self) -> list[Tensor]:
        """What the optimizer changes on this worker."""
        return [parameter.detach() for parameter in self.trained]

    def flat(self) -> Tensor:
        """A copy of ``masters``."""
        return torch.cat([real(tensor).reshape(-1) for tensor in self.masters()]).clone()

    def whole(self) -> Tensor:
        """All parameters, frozen ones too."""
        full = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        return torch.cat([real(tensor).reshape(-1).float() for tensor in full]).clone()

    def train(self, steps: int, within: Any = None) -> None:
        """Take steps. ``LocalSteps.step`` is called in the context ``within``."""
        for _ in range(steps):
            before = self.flat()
            self.advance(*batch(self.worker, self.done))
            self.changed += before.float() - self.flat().float()
            self.done += 1
            with within or contextlib.nullcontext():
                self.sync.step()

    def check(self) -> None:
        """That nothing is lost, and θ has the same bits on all workers. Nothing may be under way."""
        # What neither θ nor the errors nor the local parameters have of all changes.
        kept = mean(owed(self.sync) + theta(self.sync).to(self.start) - self.flat(), self.mean_over)
        missing = mean(self.changed, self.mean_over) - (self.start - theta(self.sync)) - kept
        assert missing.abs().max() < LOST, missing.abs().max()
        assert same_bits(theta(self.sync), self.mean_over), "workers hold different bits"

    def finish(self) -> None:
        """Exchange the rest, after which the workers' own parameters are θ."""
        self.sync.finish()
        assert torch.equal(self.flat(), theta(self.sync).to(self.start))
        self.check()

    def save(self, _path: str) -> Any:
        """What users save themselves."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, _path: str, saved: Any) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])


class InDDP(Training):
    def wrap(self, clip: float = torch.inf) -> None:
        self.model, self.clip, self.group = DistributedDataParallel(self.net, process_group=node()), clip, across()


class InFSDP2(Training):
    def wrap(self, **options: Any) -> None:
        fully_shard(self.net, mesh=mesh()["shard"], **options)
        self.group = self.mean_over = across()


class InDeepSpeed(Training):
    def wrap(self, stage: int = 2, **options: Any) -> None:
        self.group = self.mean_over = across()
        self.config = configuration(stage, None, {"zero_force_ds_cpu_optimizer": False, **options})
        self.config.pop("optimizer")
        self.config["zero_allow_untested_optimizer"] = True

    def prepare(self) -> None:
        import deepspeed

        given = {"model_parameters": self.trained, "optimizer": self.optimizer, "config": self.config}
        with contextlib.redirect_stdout(None):
            self.model = deepspeed.initialize(model=self.net, mpu=node_mpu(node(), across()), **given)[0]

    def masters(self) -> list[Tensor]:
        zero = self.model.optimizer
        name = "fp32_groups_flat_partition"
        return list(getattr(zero, name if hasattr(zero, name) else "single_partition_of_fp32_groups"))

    def advance(self, x: Tensor, y: Tensor) -> None:
        self.model.backward(self.loss(x, y))
        self.model.step()

    def save(self, path: str) -> None:
        self.model.save_checkpoint(path)

    def load(self, path: str, _saved: None) -> None:
        assert self.model.load_checkpoint(path)[0] is not None


BUILD: Mapping[str, Callable[..., Training]] = {"ddp": InDDP, "fsdp2": InFSDP2, "deepspeed": InDeepSpeed}
