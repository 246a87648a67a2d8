"""A model, steps and measurements that the tests of the FSDP adapters share. All of it runs inside a worker."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.fsdp2 import HybridShardState, apply_powersgd
from tests.support.distributed import HUNG, Failure, Worker, run
from tests.support.training import flat, relative

WIDTH = 25
TOKENS = 17
STEPS = 4
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
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.use = True
        self.checkpointing: bool | None = None
        # Called with the gradient of what the embedding returns: may change it, or raise an exception.
        self.inject: Callable[[Tensor], Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.inject is not None:
            x.register_hook(self.inject)
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
    optimizer: torch.optim.Optimizer | None = None,
) -> Run:
    """Train a model of FSDP2. ``before_micro(step, last)`` may give a context for a micro-batch."""
    run = Run()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
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


def in_one_group(cases: Mapping[str, Worker], world_size: int, timeout: float = HUNG) -> dict[str, list[Any]]:
    """Like ``run_cases``, but in one process group: DTensor remembers groups of meshes that look the same."""
    by_worker = run(_in_turn, world_size, cases, timeout=timeout)
    return {name: [results.get(name, MISSING) for results in by_worker] for name in cases}


def _in_turn(worker: int, world_size: int, cases: Mapping[str, Worker]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            results[name] = case(worker, world_size)
        # DCP's exceptions are not derived from Exception.
        except BaseException:
            results[name] = Failure(traceback.format_exc())
            # The others may wait for this worker.
            break
    return results


def outcome(results: Mapping[str, list[Any]], name: str) -> list[Any]:
    """Results of one case, see ``tests.support.distributed.outcome``."""
    for worker, result in enumerate(results[name]):
        assert not isinstance(result, Failure), f"{name} failed on worker {worker}:\n{result}"
    return results[name]


@functools.cache
def hybrid_mesh(replicas: int, shards: int) -> DeviceMesh:
    """A mesh of the first workers; all must call it."""
    workers = torch.arange(replicas * shards).view(replicas, shards)
    return DeviceMesh("cpu", workers, mesh_dim_names=("replicate", "shard"))


def sharded(model: Net, mesh: DeviceMesh, **options: Any) -> Any:
    """``fully_shard`` on each block and on the model."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def hybrid(model: Net, mesh: DeviceMesh, config: PowerSGDConfig, **options: Any) -> tuple[Any, Any]:
    """The model sharded on the mesh's second dimension, compressed across its first; and the compression's state."""
    module = sharded(model, mesh["shard"], **options)
    return module, apply_powersgd(module, config, replicate_group=mesh["replicate"].get_group())


def two_dimensional(model: Net, mesh: DeviceMesh, config: PowerSGDConfig, **options: Any) -> tuple[Any, Any]:
    """The model sharded on the whole mesh, and compressed; and the compression's state."""
    module = sharded(model, mesh, **options)
    return module, apply_powersgd(module, config)


# In torch 2.9 the argument has another name, and the mesh a shard dimension of one worker.
MESH_ARGUMENT = "mesh" if "mesh" in inspect.signature(replicate).parameters else "device_mesh"


@functools.cache
def replica_mesh(workers: int) -> DeviceMesh:
    """A mesh of replicas alone."""
    if MESH_ARGUMENT != "mesh":
        return hybrid_mesh(workers, 1)
    return DeviceMesh("cpu", torch.arange(workers), mesh_dim_names=("replicate",))


def replicated(model: Net, mesh: DeviceMesh, **options: Any) -> Any:
    """``replicate`` on each block and on the model."""
    options[MESH_ARGUMENT] = mesh
    for block in model.blocks:
        replicate(block, **options)
    return replicate(model, **options)


def full_mesh(world_size: int) -> DeviceMesh:
    """A mesh of one dimension."""
    return hybrid_mesh(1, world_size)["shard"]


def full_shard(model: Net, mesh: DeviceMesh, config: PowerSGDConfig, **options: Any) -> tuple[Any, Any]:
    """The model sharded on a mesh of one dimension and compressed over it; and the compression's state."""
    module = sharded(model, mesh, **options)
    return module, apply_powersgd(module, config)


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


# Full rank against the framework's own averaging ----------------------------------------------------------------------

LIMITS = {"gradient": 1e-5, "parameters": 1e-6}
MESHES = {2: (2, 1), 3: (3, 1), 4: (2, 2)}


def freeze(model: Net) -> None:
    """An embedding and one of three identical matrices."""
    model.tokens.weight.requires_grad_(False)
    model.get_parameter("blocks.1.up.weight").requires_grad_(False)


def checkpoint(model: Net, use_reentrant: bool = False) -> None:
    """Activation checkpointing of the blocks."""
    model.checkpointing = use_reentrant


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "several backwards": {"accumulate": "each"},
    "no sync": {"accumulate": "no sync"},
    "no all-reduce": {"accumulate": "no all-reduce"},
    "clipping": {"clip": 0.1},
    "mixed precision": {"options": {"mp_policy": BFLOAT16}},
    "frozen": {"prepare": freeze},
    "unused": {"unused": True},
    "unused, reduced": {"unused": True, "reduce_unused": True},
    "divide factor": {"divide": 8.0},
    "sums": {"force_sum": True},
    "checkpointing": {"prepare": checkpoint},
}


def against_native(
    worker: int,
    world_size: int,
    *,
    mode: str,
    accumulate: str = "",
    prepare: Callable[[Net], None] | None = None,
    unused: bool = False,
    reduce_unused: bool = False,
    divide: float | None = None,
    force_sum: bool = False,
    options: dict[str, Any] | None = None,
    shape: tuple[int, int] | None = None,
    after: Callable[[Any], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Steps of FSDP2 alone, and of ours at full rank.

    Modes: "hybrid" shards on one dimension of replicas × shards, "mesh" on both; "replicate" has replicas alone, "full"
    has shards alone.

    Returns:
        What ``compare`` gives; the numbers of elements all-reduced, over the replicas in the hybrid mode.
    """
    runs, sent = [], []
    for native in (True, False):
        if mode == "full":
            mesh, group = full_mesh(world_size), None
        else:
            mesh = replica_mesh(world_size) if mode == "replicate" else hybrid_mesh(*(shape or MESHES[world_size]))
            group = mesh["replicate"].get_group()
        # Native replicas must start from the same parameters, ours are made to.
        model = Net(seed=0 if native or group is None else dist.get_rank(group))
        if prepare is not None:
            prepare(model)
        wrap = replicated if mode == "replicate" else sharded
        module = wrap(model, mesh["shard"] if mode == "hybrid" and not native else mesh, **(options or {}))
        placements = [parameter.placements for parameter in module.parameters()]
        state = None
        if not native:
            state = apply_powersgd(module, FULL_RANK, replicate_group=group if mode == "hybrid" else None)
        if after is not None:
            after(module)
        # torch 2.9 lacks it.
        if reduce_unused and hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True)
        for child in [module, *module.blocks]:
            if divide is not None:
                child.set_gradient_divide_factor(divide)
            if force_sum or divide is not None:
                child.set_force_sum_reduction_for_comms(True)

        def before_micro(step: int, last: bool, module: Any = module) -> None:
            if accumulate == "no sync":
                module.set_requires_gradient_sync(last)
            elif accumulate == "no all-reduce":
                module.set_requires_all_reduce(last)

        def before_step(step: int, module: Any = module) -> None:
            module.use = not unused or step % 2 == 0

        with sent_elements(group) as counts:
            settings |= {"micro_batches": 2 if accumulate else 1}
            runs.append(train(module, worker, before_micro=before_micro, before_step=before_step, **settings))
        sent.append(sum(counts))
        assert [parameter.placements for parameter in module.parameters()] == placements
        if isinstance(state, HybridShardState):
            state.check_replicas()
    return {**compare(runs[1], runs[0]), "sent": sent}


def check_full_rank(found: Sequence[Mapping[str, Any]]) -> None:
    """That gradients and parameters are the framework's own, which changed."""
    for seen in found:
        for key, limit in LIMITS.items():
            assert seen[key] <= limit, seen
        assert abs(seen["moved"]) > 0.01
