"""A model, steps and measurements that the tests of the FSDP adapters share. All of it runs inside a worker."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from tests.distributed import Failure, Worker, run
from tests.training import flat, relative

WIDTH = 25
TOKENS = 17
STEPS = 6
FULL_RANK = PowerSGDConfig(rank=999, min_compression_rate=0)
RANK_2 = PowerSGDConfig(rank=2, min_compression_rate=1)
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Gradients = dict[str, Tensor]
MISSING = Failure("not run, since a case before it failed")


class Block(nn.Module):
    """Its parameters' first dimensions divide by none of the numbers of workers; a matrix has fewer rows than those."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH + 1)
        self.down = nn.Linear(4 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.down(torch.tanh(self.up(self.norm(x) * self.scale.mean(0))))
        return outputs


class Net(nn.Module):
    """An embedding, identical blocks, and a layer that is used in some steps only."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.use = True
        self.checkpointing: bool | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.checkpointing)
        if self.use:
            x = x + self.sometimes(x)
        logits: Tensor = self.head(x)
        return logits


def batch(worker: int, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and, for each, what is to be predicted."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + worker)
    tokens = torch.randint(0, TOKENS, (8, 6), generator=generator)
    return tokens, (tokens * 3 + 1) % TOKENS


@dataclasses.dataclass
class Run:
    """What ``train`` saw: averaged gradients and losses of each step, parameters after the last."""

    gradients: list[Gradients] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    parameters: Gradients = dataclasses.field(default_factory=dict)


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float().clone()


def train(
    model: Any,
    worker: int,
    *,
    steps: range = range(STEPS),
    micro_batches: int = 1,
    lr: float = 0.05,
    before_micro: Callable[[int, bool], Any] | None = None,
    before_step: Callable[[int], None] | None = None,
    clip: float | None = None,
) -> Run:
    """Train a model of FSDP2. ``before_micro(step, last)`` may give a context for a micro-batch."""
    run = Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in steps:
        if before_step is not None:
            before_step(step)
        optimizer.zero_grad()
        for micro in range(micro_batches):
            context = before_micro(step, micro == micro_batches - 1) if before_micro is not None else None
            with context or contextlib.nullcontext():
                tokens, targets = batch(worker, step, micro)
                loss = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
                loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        run.gradients.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        run.losses.append(float(loss.detach()))
        optimizer.step()
    run.parameters = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return run


def compare(got: Run, expected: Run) -> dict[str, float]:
    """The largest relative difference of a step's gradient, and of the parameters at the end."""
    for ours, theirs in zip(got.gradients, expected.gradients, strict=True):
        assert ours.keys() == theirs.keys(), (sorted(ours), sorted(theirs))
    return {
        "gradient": max(
            relative(flat(ours), flat(theirs)) for ours, theirs in zip(got.gradients, expected.gradients, strict=True)
        ),
        "parameters": relative(flat(got.parameters), flat(expected.parameters)),
        "moved": float(expected.losses[0] - expected.losses[-1]),
    }


def in_one_group(cases: Sequence[Worker], world_size: int, timeout: float = 200) -> dict[str, list[Any]]:
    """Like ``run_cases``, but in one process group: DTensor remembers groups of meshes that look the same."""
    by_worker = run(_in_turn, world_size, cases, timeout=timeout)
    return {case.__name__: [results.get(case.__name__, MISSING) for results in by_worker] for case in cases}


def _in_turn(worker: int, world_size: int, cases: Sequence[Worker]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for case in cases:
        try:
            results[case.__name__] = case(worker, world_size)
        except Exception:
            results[case.__name__] = Failure(traceback.format_exc())
            # The others may wait for this worker.
            break
    return results


@functools.cache
def hybrid_mesh(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(model: Net, mesh: DeviceMesh, **options: Any) -> Any:
    """``fully_shard`` on each block and on the model."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def hybrid(model: Net, mesh: DeviceMesh, config: PowerSGDConfig, **options: Any) -> tuple[Any, Any]:
    """The model sharded on the mesh's second dimension, compressed across its first; and the compression's state."""
    module = sharded(model, mesh["shard"], **options)
    return module, apply_powersgd(module, config, replicate_group=mesh["replicate"].get_group())


@contextlib.contextmanager
def sent_elements(group: dist.ProcessGroup | None = None, names: tuple[str, ...] = ("all_reduce",)) -> Iterator[list]:
    """Elements that each collective over a group (None: any) was handed."""
    counts: list[int] = []
    originals = {name: getattr(dist, name) for name in names}

    def counting(original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if group is None or kwargs.get("group") is group:
            counts.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    for name, original in originals.items():
        setattr(dist, name, functools.partial(counting, original))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
