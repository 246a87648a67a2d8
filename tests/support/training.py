"""Models, steps and measurements that the tests of the DDP hook share. All runs inside a worker."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook

Gradients = dict[str, Tensor]
WIDTH = 256
# Of relative differences: what rounding in fp32 adds up to in a few steps is below it.
LIMIT = 1e-5


def linear_stack(layers: int = 24, width: int = WIDTH, bias: bool = True, seed: int = 0) -> nn.Sequential:
    """Linear layers whose initial weights are orthogonal, so that the gradients of all have the same size."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(layers)))
    for weight in (p for p in model.parameters() if p.dim() == 2):
        nn.init.orthogonal_(weight)
    return model


def batch(worker: int, step: int, micro: int = 0, size: int = 16, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one worker in one step."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + worker)
    return torch.randn(size, width, generator=generator), torch.randn(size, width, generator=generator)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[: output.shape[0], : output.shape[1]]).square().mean()


@dataclasses.dataclass
class Run:
    """What ``train`` saw in each step."""

    gradients: list[Gradients] = dataclasses.field(default_factory=list)
    digests: list[str] = dataclasses.field(default_factory=list)


def train(
    model: nn.Module,
    worker: int,
    state: PowerSGDState | None,
    *,
    hook: Callable[..., Any] = powerSGD_hook,
    steps: Iterable[int] = range(10),
    bucket_cap_mb: float = 0.3,
    lr: float = 0.05,
    group: dist.ProcessGroup | None = None,
    width: int = WIDTH,
    uneven: bool = False,
    before_step: Callable[[int], None] | None = None,
    **options: Any,
) -> Run:
    """Train with DDP and, where ``state`` is given, the hook."""
    run = Run()
    replica = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, process_group=group, **options)
    if state is not None:
        # DDP looks at the names of hooks.
        replica.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with replica.join(enable=uneven):
        for step in steps:
            if before_step is not None:
                before_step(step)
            optimizer.zero_grad()
            inputs, targets = batch(worker, step, width=width)
            squared_error(replica(inputs), targets).backward()
            run.gradients.append(gradients_of(model))
            optimizer.step()
            run.digests.append(digest([*run.gradients[-1].values(), *model.parameters()]))
    return run


def gradients_of(model: nn.Module) -> Gradients:
    """Copies, of the parameters that have a gradient."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def digest(tensors: Iterable[Tensor]) -> str:
    """sha256 of the tensors' bits."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def relative(got: Tensor, expected: Tensor) -> float:
    """‖got − expected‖ / ‖expected‖; 0 where both are 0, infinite where it is not a number."""
    difference, size = float((got.double() - expected.double()).norm()), float(expected.double().norm())
    if difference == 0:
        return 0.0
    return difference / size if size > 0 and math.isfinite(difference) else math.inf


def step_differences(got: Sequence[Gradients], expected: Sequence[Gradients]) -> list[float]:
    """For each step the relative difference of the whole gradient. The same parameters must have one."""
    differences = []
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys(), (sorted(ours), sorted(theirs))
        differences.append(relative(flat(ours), flat(theirs)))
    return differences


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].reshape(-1) for name in sorted(gradients)])


def local_gradients(model: nn.Module) -> Gradients:
    """A mapping that each backward pass fills with this worker's own gradients, before DDP averages them."""
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: found.__setitem__(name, gradient.detach().clone()))
    return found


def total(tensor: Tensor) -> Tensor:
    """Sum over all workers, in fp64."""
    summed = tensor.detach().double().clone()
    dist.all_reduce(summed)
    return summed


def check_training(
    model: nn.Module,
    worker: int,
    state: PowerSGDState,
    steps: Iterable[int],
    owed: Mapping[str, Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """Train: Σ E + W Σ Ĝ = Σ G + Σ E before, over the workers of a group. ``owed`` is the last sum if given."""
    workers = dist.get_world_size(group)
    summed = total if workers > 1 else Tensor.double
    before = {name: summed(error) for name, error in state.error().items()} if owed is None else owed
    given: Gradients = {}
    hooks = [
        parameter.register_hook(lambda G, name=name: given.__setitem__(name, given.get(name, 0) + G.double()))
        for name, parameter in model.named_parameters()
    ]
    run = train(model, worker, state, steps=steps, group=group, **options)
    for hook in hooks:
        hook.remove()
    after = {name: summed(error) for name, error in state.error().items()}
    for name, gradient in given.items():
        nothing = torch.zeros_like(gradient)
        sent = workers * sum(gradients[name].double() for gradients in run.gradients)
        left = sent + after.get(name, nothing).view_as(gradient)
        expected = summed(gradient) + before.get(name, nothing).double().view_as(gradient)
        assert relative(left, expected) <= LIMIT, name


@contextlib.contextmanager
def patched(target: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(target, name)
    setattr(target, name, replacement)
    try:
        yield
    finally:
        setattr(target, name, original)
