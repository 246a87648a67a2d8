"""Models, steps and measurements that the tests of the DDP hook share; what is logged, and how calls fail."""

import contextlib
import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook

Gradients = dict[str, Tensor]
WIDTH = 64
RANK_2: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0, "min_compression_rate": 0}
# Bucket sizes in MB, named after how many buckets they make.
MANY, FEW, ONE = 0.02, 0.05, 100.0
# DDP's first backward pass has one bucket whatever their size, but for this option, with which it has several at once.
AT_ONCE: dict[str, Any] = {"find_unused_parameters": True}
Messages = list[tuple[int, str]]
LIMIT = 1e-5
"""Of relative differences of sums in fp32 that are taken in another order, also over a few steps."""


def linear_stack(layers: int = 6) -> nn.Sequential:
    """Linear layers whose initial weights are orthogonal, so that the gradients of all have the same size."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    for weight in (p for p in model.parameters() if p.dim() == 2):
        nn.init.orthogonal_(weight)
    return model


class Given(nn.Module):
    """A model whose parameters' gradients are exactly the tensors that it is given."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(tuple(shape))))
        self.at: tuple[str, Callable[[Tensor], None]] | None = None

    def forward(self, given: Mapping[str, Tensor]) -> Tensor:
        """Σ p · G over the parameters that are given a gradient; the others are unused.

        Where the backward pass comes to the parameter ``self.at[0]`` it calls ``self.at[1]``.
        """
        products = []
        for name, parameter in self.named_parameters():
            if name in given:
                product = parameter * given[name]
                if self.at is not None and name == self.at[0]:
                    product.register_hook(self.at[1])
                products.append(product.sum())
        return torch.stack(products).sum()


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * step + worker)
    return torch.randn(16, WIDTH, generator=generator), torch.randn(16, WIDTH, generator=generator)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[: output.shape[0], : output.shape[1]]).square().mean()


def hooked(model: nn.Module, state: Any, hook: Callable[..., Any] = powerSGD_hook, **options: Any) -> Any:
    """A model in DDP with these options and, where ``state`` is given, the hook."""
    replica = DistributedDataParallel(model, **options)
    if state is not None:
        # DDP looks at the names of hooks.
        replica.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    return replica


def training(
    model: nn.Module,
    worker: int,
    state: Any,
    steps: Iterable[int],
    cap: float = MANY,
    *,
    hook: Callable[..., Any] = powerSGD_hook,
    group: dist.ProcessGroup | None = None,
    uneven: bool = False,
    before_step: Callable[[int], None] | None = None,
    **options: Any,
) -> list[Gradients]:
    """Train with DDP and, where ``state`` is given, the hook: the averages of each step."""
    averages, replica = list[Gradients](), hooked(model, state, hook, bucket_cap_mb=cap, process_group=group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with replica.join(enable=uneven):
        for step in steps:
            if before_step is not None:
                before_step(step)
            optimizer.zero_grad()
            inputs, targets = batch(worker, step)
            squared_error(replica(inputs), targets).backward()
            averages.append(gradients_of(model))
            optimizer.step()
    return averages


def gradients_of(model: nn.Module) -> Gradients:
    """Copies, of the parameters that have a gradient."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def digest(tensors: Iterable[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def wide(tensor: Tensor) -> Tensor:
    """A copy in fp64, of complex numbers in complex128."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float64), copy=True)


def relative(got: Tensor, expected: Tensor) -> float:
    """‖got − expected‖ / ‖expected‖; 0 where both are 0, infinite where it is not a number."""
    difference, size = float((wide(got) - wide(expected)).norm()), float(wide(expected).norm())
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
    summed = wide(tensor)
    dist.all_reduce(summed)
    return summed


def state_for(
    model: nn.Module | None, rank: int = 2, group: dist.ProcessGroup | None = None, **settings: Any
) -> PowerSGDState:
    """All matrices are compressed from the first step on. Without a model, parameters are known by numbers."""
    return PowerSGDState(group, **{**RANK_2, "matrix_approximation_rank": rank, "module": model, **settings})


@contextlib.contextmanager
def logged(name: str) -> Iterator[Messages]:
    """Levels and texts of what is logged under a name."""
    messages: Messages = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append((record.levelno, record.getMessage()))

    logger, handler = logging.getLogger(name), Collector()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def warnings(messages: Messages) -> list[str]:
    return [text for level, text in messages if level == logging.WARNING]


def complaint(attempt: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Kind and text of the exception that a call ends with."""
    try:
        attempt(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextlib.contextmanager
def at_call(owner: Any, name: str, number: int, act: Callable[[], Any], *, after: bool = False) -> Iterator[None]:
    """Do something before one call of a function, counted from 0, or ``after`` it."""
    original, calls = getattr(owner, name), itertools.count()

    def call(*arguments: Any, **options: Any) -> Any:
        now = next(calls) == number
        if now and not after:
            act()
        result = original(*arguments, **options)
        if now and after:
            act()
        return result

    with mock.patch.object(owner, name, call):
        yield


def without_memory(owner: Any, name: str, call: int) -> contextlib.AbstractContextManager[None]:
    """Let one call of a function, counted from 0, find no memory before it does anything."""
    return at_call(owner, name, call, mock.Mock(side_effect=torch.OutOfMemoryError("no memory is left")))
