"""Models, steps and measurements that the tests of the DDP hook share. All but `check` runs inside a worker."""

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
FULL_RANK = {"matrix_approximation_rank": WIDTH, "start_powerSGD_iter": 0, "min_compression_rate": 0}


def linear_stack(layers: int = 24, width: int = WIDTH, bias: bool = True, seed: int = 0) -> nn.Sequential:
    """Linear layers whose initial weights are orthogonal, so that the gradients of all have the same size."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(layers)))
    for weight in (p for p in model.parameters() if p.dim() == 2):
        nn.init.orthogonal_(weight)
    return model


class WithUnused(nn.Module):
    """Three layers that are always used, one that never is, and one that only some workers use in a step."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third, self.never, self.sometimes = (nn.Linear(width, width) for _ in range(5))
        self.use = False

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(inputs)))))
        return outputs + self.sometimes(inputs) if self.use else outputs


class Images(nn.Module):
    """Convolutions in channels_last, a grouped one among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 12, 3), nn.Tanh(), nn.Conv2d(12, 12, (3, 1), groups=2), nn.Tanh(), nn.Conv2d(12, 8, 1)
        )
        self.head = nn.Linear(8, 8)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs.view(-1, 3, 8, 8)).mean(dim=(2, 3)))
        return outputs


def batch(worker: int, step: int, micro: int = 0, size: int = 16, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one worker in one step."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + worker)
    return torch.randn(size, width, generator=generator), torch.randn(size, width, generator=generator)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[: output.shape[0], : output.shape[1]]).square().mean()


@dataclasses.dataclass
class Run:
    """What ``train`` saw."""

    gradients: list[Gradients] = dataclasses.field(default_factory=list)
    digests: list[str] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    buckets: list[list[tuple[int, ...]]] = dataclasses.field(default_factory=list)
    """For each backward pass the buckets in the order in which the hook was called, as sizes of their parameters."""


def train(
    model: nn.Module,
    worker: int,
    state: PowerSGDState | None,
    *,
    hook: Callable[..., Any] = powerSGD_hook,
    steps: Iterable[int] = range(10),
    bucket_cap_mb: float = 0.3,
    accumulate: int = 1,
    lr: float = 0.05,
    group: dist.ProcessGroup | None = None,
    batch_size: int = 16,
    width: int = WIDTH,
    uneven: bool = False,
    before_step: Callable[[int], None] | None = None,
    **options: Any,
) -> Run:
    """Train with DDP and, where ``state`` is given, the hook."""
    run = Run()
    replica = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, process_group=group, **options)
    if state is not None:
        replica.register_comm_hook(state, recorded(hook, run.buckets))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with replica.join(enable=uneven):
        for step in steps:
            if before_step is not None:
                before_step(step)
            optimizer.zero_grad()
            for micro in range(accumulate):
                inputs, targets = batch(worker, step, micro, batch_size, width)
                with contextlib.nullcontext() if micro == accumulate - 1 else replica.no_sync():
                    loss = squared_error(replica(inputs), targets)
                    loss.backward()
            run.losses.append(float(loss.detach()))
            run.gradients.append(gradients_of(model))
            optimizer.step()
            run.digests.append(digest([*run.gradients[-1].values(), *model.parameters()]))
    return run


def recorded(hook: Callable[..., Any], log: list[list[tuple[int, ...]]]) -> Callable[..., Any]:
    """A hook that writes down the buckets it is called with."""

    def wrapper(state, bucket):
        if bucket.index() == 0:
            log.append([])
        log[-1].append(tuple(parameter.numel() for parameter in bucket.parameters()))
        return hook(state, bucket)

    return wrapper


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


def worst_parameter(got: Sequence[Gradients], expected: Sequence[Gradients]) -> float:
    """The largest relative difference of one parameter's gradient in one step."""
    return max(
        relative(ours[name], theirs[name]) for ours, theirs in zip(got, expected, strict=True) for name in theirs
    )


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].reshape(-1) for name in sorted(gradients)])


def state_for(model: nn.Module | None, group: dist.ProcessGroup | None = None, **settings: Any) -> PowerSGDState:
    """At full rank, unless the settings say otherwise."""
    return PowerSGDState(group, module=model, **{**FULL_RANK, **settings})


def against_ddp(make: Callable[[], nn.Module], worker: int, **options: Any) -> dict[str, Any]:
    """The same training with DDP alone and with the hook at full rank."""
    expected = train(make(), worker, None, **options)
    model = make()
    got = train(model, worker, state_for(model, options.get("group")), **options)
    return summary(got, expected)


def summary(got: Run, expected: Run) -> dict[str, Any]:
    return {
        "steps": step_differences(got.gradients, expected.gradients),
        "parameter": worst_parameter(got.gradients, expected.gradients),
        "digests": got.digests,
        "buckets": got.buckets,
    }


def check(found: Sequence[Mapping[str, Any]], steps: int) -> None:
    """That all workers' summaries show the expected gradients, and the same bits."""
    for seen in found:
        assert len(seen["steps"]) == steps, seen["steps"]
        assert max(seen["steps"]) <= LIMIT, seen["steps"]
        assert seen["parameter"] <= LIMIT, seen["parameter"]
        assert seen["digests"] == found[0]["digests"], "workers hold different bits"


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


@contextlib.contextmanager
def patched(target: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(target, name)
    setattr(target, name, replacement)
    try:
        yield
    finally:
        setattr(target, name, original)
