"""Models under DDP, FSDP2 and DeepSpeed inside a node, which take local steps across nodes. All of it runs in a worker.

Four workers are two nodes of two.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.local_steps import LocalSteps, node_mpu
from tests.support.deepspeed_training import configuration
from tests.support.distributed import folder
from tests.support.local_steps import LOST, TERNARY, batch, mean, owed, same_bits, theta
from tests.support.small import complaint

WORKERS, NODE = 4, 2
STEPS, EVERY = 9, 3
CONFIGS: dict[str, tuple[PowerSGDConfig | None, dict[str, Any]]] = {
    "exact": (None, {}),
    "ternary": (TERNARY, {}),
    "int2, delay": (PowerSGDConfig(codes="int2"), {"delay": 2}),
    "rank": (PowerSGDConfig(rank=2, min_compression_rate=0), {}),
    "budget": (PowerSGDConfig(compression=2, replan_every=1, min_compression_rate=0), {}),
}
WIDTH, HIDDEN = 12, 19
RATE, MOMENTUM = 0.1, 0.5


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


class Setup:
    """A model of torch on its way, whose changes are averaged over the workers ``mean_over``."""

    def __init__(self, model: Any, mean_over: dist.ProcessGroup | None, clip: float = torch.inf) -> None:
        self.model, self.mean_over, self._clip = model, mean_over, clip
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(self._trained, lr=RATE, momentum=MOMENTUM)

    def masters(self) -> list[Tensor]:
        """What the optimizer changes on this worker."""
        return [parameter.detach() for parameter in self._trained]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x.to(self._trained[0].dtype)).float(), y)

    def advance(self, x: Tensor, y: Tensor) -> None:
        """Take a step."""
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        if self._clip < torch.inf:
            norm = torch.nn.utils.clip_grad_norm_(self._trained, self._clip)
            assert norm > 1.2 * self._clip, "nothing was clipped"
        self.optimizer.step()

    def flat(self) -> Tensor:
        """A copy of ``masters``."""
        return torch.cat([real(tensor).reshape(-1) for tensor in self.masters()]).clone()

    def train(self, steps: range, sync: Any = None) -> Tensor:
        """Returns the sum of all that the optimizer has changed."""
        changed = torch.zeros_like(self.flat())
        for step in steps:
            before = self.flat()
            self.advance(*batch(dist.get_rank(), step))
            changed += before - self.flat()
            if sync is not None:
                sync.step()
        return changed

    def whole(self) -> Tensor:
        """All parameters, frozen ones too."""
        full = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        return torch.cat([real(tensor).reshape(-1).float() for tensor in full]).clone()

    def save(self, _path: str) -> Any:
        """What users save themselves."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, _path: str, saved: Any) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])


class EngineSetup(Setup):
    """The same with DeepSpeed."""

    def __init__(self, net: nn.Module, stage: int = 2, **options: Any) -> None:
        import deepspeed

        super().__init__(net, across())
        config = configuration(stage, None, {"zero_force_ds_cpu_optimizer": False, **options})
        config.pop("optimizer")
        config["zero_allow_untested_optimizer"] = True
        with contextlib.redirect_stdout(None):
            self.model = deepspeed.initialize(
                model=net,
                model_parameters=self._trained,
                optimizer=self.optimizer,
                config=config,
                mpu=node_mpu(node(), across()),
            )[0]

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


def real(tensor: Tensor) -> Tensor:
    tensor = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def in_ddp(net: nn.Module, clip: float = torch.inf) -> Setup:
    return Setup(DistributedDataParallel(net, process_group=node()), None, clip)


def in_fsdp2(net: nn.Module, **options: Any) -> Setup:
    return Setup(fully_shard(net, mesh=mesh()["shard"], **options), across())


BUILD: Mapping[str, Callable[..., Setup]] = {"ddp": in_ddp, "fsdp2": in_fsdp2, "deepspeed": EngineSetup}


class Watch(TorchDispatchMode):
    """Notes the workers of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            for argument in (*args, *(kwargs or {}).values()):
                with contextlib.suppress(Exception):
                    group = dist.ProcessGroup.unbox(argument)
                    self.groups.append(tuple(sorted(dist.get_process_group_ranks(group))))
        return func(*args, **(kwargs or {}))


def equals_averaging(kind: str, clip: float = torch.inf, **options: Any) -> None:
    """Exact messages average the replicas, as by hand. Steps between exchanges stay in a node, and clip there."""
    expected = in_ddp(Net(), clip)
    for first in range(0, STEPS, EVERY):
        expected.train(range(first, first + EVERY))
        for tensor in expected.masters():
            real(tensor).copy_(mean(real(tensor), across()))
    got = BUILD[kind](Net(seed=dist.get_rank(across())), **options)
    sync = LocalSteps(got.model, None, EVERY, group=across())
    untrained = got.whole()
    for first in range(0, STEPS, EVERY):
        with Watch() as watch:
            got.train(range(first, first + EVERY - 1), sync)
        own = {*dist.get_process_group_ranks(node())}
        assert watch.groups
        assert all(own.issuperset(group) for group in watch.groups)
        got.train(range(first + EVERY - 1, first + EVERY), sync)
    whole = got.whole()
    assert (whole - expected.whole()).abs().max() <= 1e-5 < 0.01 < (whole - untrained).abs().max()


def conserves(kind: str, configs: Sequence[str], net: Callable[[], nn.Module] = Net, **options: Any) -> None:
    """Nothing is lost with each kind of message, and workers have the same bits."""
    for name in configs:
        config, settings = CONFIGS[name]
        setup = BUILD[kind](net(), **options)
        begin = setup.flat()
        sync = LocalSteps(setup.model, config, EVERY, group=across(), **settings)
        changed = setup.train(range(STEPS - 1), sync)
        sync.finish()
        missing = mean(changed, setup.mean_over) - (begin - theta(sync)) - mean(owed(sync), setup.mean_over)
        assert missing.abs().max() <= LOST, (name, missing.abs().max())
        assert changed.abs().max() > 0.01, name
        assert same_bits(theta(sync), setup.mean_over), name
        assert same_bits(setup.whole(), None), name
        assert torch.equal(setup.flat(), theta(sync)), name
        # DDP takes those of a node's first worker in each step.
        assert same_bits(next(setup.model.buffers()), setup.mean_over), name


def resumes(kind: str, name: str, **options: Any) -> None:
    """A run that is killed in a round goes on with the bits of one that is not."""
    config, settings = CONFIGS[name]
    first = BUILD[kind](Net(), **options)
    sync = LocalSteps(first.model, config, EVERY, group=across(), **settings)
    first.train(range(5), sync)
    with folder(dist.get_rank()) as path:
        saved = first.save(path)
        sync.save(path)
        first.train(range(5, STEPS), sync)
        second = BUILD[kind](Net(seed=7), **options)
        other = LocalSteps(second.model, config, EVERY, group=across(), **settings)
        second.load(path, saved)
        other.load(path)
        second.train(range(5, STEPS), other)
    assert torch.equal(theta(sync), theta(other))
    assert torch.equal(first.flat(), second.flat())


def refused(make: Callable[[], Any], pattern: str, group: Any = None, config: Any = TERNARY) -> None:
    """That local steps of what ``make`` returns are refused, on this worker with these words."""
    said = complaint(lambda: LocalSteps(make(), config, EVERY, group=group))
    assert re.search(pattern, said, re.DOTALL), said
