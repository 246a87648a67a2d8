"""Parameters that are not contiguous: gradients, errors and checkpoints are in the order of the shapes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations import fsdp1
from powersgd_triton.integrations.ddp import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from powersgd_triton.integrations.memory_order import memory_order, strides_of
from tests.support.distributed import outcome, run, run_cases
from tests.support.training import LIMIT, digest, gradients_of, local_gradients, relative, total

Gradients = dict[str, Tensor]
STEPS = 5
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Net(nn.Module):
    """Convolutions in two and three dimensions, one of equal sizes, and a matrix that may be stored transposed."""

    def __init__(self, memory_format: str = "contiguous", transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 10, 3)
        self.second = nn.Conv2d(10, 12, (3, 1))
        self.volume = nn.Conv3d(2, 6, 3)
        self.head = nn.Linear(6, 7)
        if memory_format != "contiguous":
            convert(self, memory_format)
            weight = self.volume.weight.detach()
            self.volume.weight = nn.Parameter(weight.contiguous(memory_format=torch.channels_last_3d))
        if transposed:
            self.head.weight = nn.Parameter(self.head.weight.detach().t().contiguous().t())

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(images))))
        x = torch.tanh(self.volume(x.unflatten(1, (2, 6))))
        outputs: Tensor = self.head(x.mean((2, 3, 4)))
        return outputs.square().sum()


def convert(model: Net, memory_format: str) -> None:
    for module in (model.first, model.second):
        module.to(memory_format=FORMATS[memory_format])  # type: ignore[call-overload]


def images(worker: int, step: int) -> Tensor:
    return torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(10 * step + worker))


class Training:
    """Steps of DDP with the hook at rank 2, and what was given and sent."""

    def __init__(
        self, model: Net, worker: int, rank: int = 2, start: int = 0, hook: Any = powerSGD_hook, **options: Any
    ) -> None:
        self.model, self.worker = model, worker
        self.replica = DistributedDataParallel(model, **options)
        self.state = PowerSGDState(None, rank, start, 0, module=model)
        self.replica.register_comm_hook(self.state, hook)
        self.own = local_gradients(model)
        self.given: Gradients = {}
        self.sent: Gradients = {}
        self.averages: list[Gradients] = []

    def step(self, step: int, scale: float = 1.0) -> None:
        self.model.zero_grad()
        (scale * self.replica(images(self.worker, step))).backward()
        self.averages.append(gradients_of(self.model))
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            self.given[name] = self.given.get(name, 0) + self.own[name].contiguous().double()
            self.sent[name] = self.sent.get(name, 0) + parameter.grad.contiguous().double()

    def check(self, case: object, before: Gradients | None = None) -> None:
        """Σ_w E_T + W Σ_t Ĝ_t = Σ_w Σ_t G_t + Σ_w E_0 for each parameter, in the order of its shape."""
        errors = self.state.error()
        assert len(errors) == 4
        for name, error in errors.items():
            start = torch.zeros(()) if before is None else before[name]
            arrived = total(error) + 2 * self.sent[name].flatten(1)
            lost = relative(arrived, total(self.given[name].flatten(1)) + 2 * start.double())
            assert lost <= LIMIT, (case, name, lost)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]
Conversion = tuple[dict[str, Any], int, tuple[str, str]]
CONVERSIONS: list[Conversion] = [*itertools.product(OPTIONS, (0, 1, 3), itertools.permutations(FORMATS, 2))]
"""Options, step, and from where to where."""
BY_TURNS = [pair[index % 2] for index, pair in enumerate(zip(CONVERSIONS[::2], CONVERSIONS[1::2], strict=True))]
"""Each of the options at each step, in one direction."""


def conversions(worker: int, _world_size: int, chosen: Sequence[Conversion] = BY_TURNS) -> None:
    """The memory format changes after DDP was made, before the first step, before buckets are rebuilt, and later."""
    for case in chosen:
        options, event, (before, after) = case
        training = Training(Net(before), worker, **options)
        for step in range(STEPS):
            if step == event:
                training.model.zero_grad()
                convert(training.model, after)
            # A gradient of zeros does not show how it lies in the bucket.
            training.step(step, scale=0.0 if step == 0 else 1.0)
        training.check(case)


def all_conversions(worker: int, world_size: int) -> None:
    conversions(worker, world_size, CONVERSIONS)


def exact_conversions(worker: int, _world_size: int) -> None:
    """The same where gradients are averaged exactly, and at full rank with both hooks."""
    kinds = ((powerSGD_hook, STEPS), (batched_powerSGD_hook, 2), (powerSGD_hook, 0))
    for index, (options, transposed) in enumerate(itertools.product(OPTIONS, (False, True))):
        hook, start = kinds[index % 3]
        model = Net("channels_last" if transposed else "contiguous", transposed)
        training = Training(model, worker, rank=999, start=start, hook=hook, **options)
        for step in range(STEPS):
            if step in (1, 3):
                training.model.zero_grad()
                convert(training.model, "channels_last" if step == 1 else "contiguous")
            training.step(step)
        for name, given in training.given.items():
            assert relative(training.sent[name], total(given) / 2) <= LIMIT, (options, transposed, start, name)


class Pair(nn.Module):
    """Two convolutions, of which the second is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        outputs: Tensor = self.first(inputs).square().sum()
        return outputs + self.second(inputs).square().sum() if both else outputs


def unused_conversions(worker: int, _world_size: int) -> None:
    """A worker that does not use the parameter gets its average too, also where that lies in another order."""
    for as_view in (False, True):
        model = Pair()
        replica = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        replica.register_comm_hook(PowerSGDState(None, 99, 0, 0, module=model), powerSGD_hook)
        own = local_gradients(model)
        for step in range(5):
            model.zero_grad()
            own.clear()
            if step == 2:
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            replica(images(worker, step), step % 2 == 0 or worker == 0).backward()
            mean = total(own.get("second.weight", torch.zeros(8, 3, 3, 3)).contiguous()) / 2
            assert model.second.weight.grad is not None
            assert relative(model.second.weight.grad, mean) <= LIMIT, (as_view, step)


def formats(worker: int, world_size: int) -> None:
    """The same training in every format, and from each other's checkpoints."""
    models: dict[str, Callable[[], Net]] = {
        "contiguous": Net,
        "channels_last": lambda: Net("channels_last"),
        "transposed": lambda: Net("channels_last", transposed=True),
    }
    trainings = {name: Training(make(), worker) for name, make in models.items()}
    for name, training in trainings.items():
        for step in range(STEPS):
            training.step(step)
        training.check(name)
        assert training.model.first.weight.is_contiguous() == (name == "contiguous")
    saved = {name: training.state.state_dict() for name, training in trainings.items()}
    for name, training in trainings.items():
        for ours, theirs in zip(training.averages, trainings["contiguous"].averages, strict=True):
            assert max(relative(ours[key], theirs[key]) for key in theirs) <= 1e-3, name
        for key, parts in saved["contiguous"]["matrices"].items():
            assert max(relative(saved[name]["matrices"][key][part], parts[part]) for part in parts) <= 1e-3, name
    for one, other in itertools.permutations(models, 2):
        resumed = Training(models[other](), worker)
        resumed.state.load_state_dict(saved[one])
        errors = resumed.state.error()
        for step in range(STEPS, STEPS + 2):
            resumed.step(step)
        resumed.check((one, other), errors)
        digests: list[Any] = [None] * world_size
        dist.all_gather_object(digests, digest(resumed.averages[-1].values()))
        assert len({*digests}) == 1, (one, other)


def lost_gradients(worker: int, _world_size: int) -> None:
    """A conversion moves gradients out of DDP's buckets, of which they were views: DDP would not average them."""
    training = Training(Net(), worker, gradient_as_bucket_view=True)
    for step in range(3):
        training.step(step)
    convert(training.model, "channels_last")
    with pytest.raises(RuntimeError, match="no longer in DDP's bucket"):
        training.step(3)


def in_fsdp1(worker: int, _world_size: int) -> None:
    """Full rank is FSDP1 alone; a checkpoint of channels_last fits a contiguous model, and the reverse."""

    def wrapped(memory_format: str, rank: int, strategy: Any = ShardingStrategy.FULL_SHARD) -> tuple[Any, Any]:
        # One bias of odd length makes shards cut through parameters.
        module = FullyShardedDataParallel(
            Net(memory_format, transposed=memory_format != "contiguous"),
            sharding_strategy=strategy,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        if rank == 0:
            return module, None
        state = fsdp1.PowerSGDState(module, PowerSGDConfig(rank=rank, min_compression_rate=0))
        module.register_comm_hook(state, fsdp1.powerSGD_hook)
        return module, state

    def step(module: Any, number: int) -> Gradients:
        module.zero_grad()
        module(images(worker, number)).backward()
        with FullyShardedDataParallel.summon_full_params(module, with_grads=True):
            return gradients_of(module)

    def check(got: Gradients, expected: Gradients, case: object) -> None:
        assert expected.keys() == got.keys()
        assert max(relative(got[name], expected[name]) for name in expected) <= LIMIT, case

    for strategy, memory_format in itertools.product(
        (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD), FORMATS
    ):  # fmt: skip
        alone, hooked = (wrapped(memory_format, rank, strategy)[0] for rank in (0, 999))
        for number in range(2):
            check(step(hooked, number), step(alone, number), (strategy, memory_format))
    states = {}
    for memory_format in FORMATS:
        module, states[memory_format] = wrapped(memory_format, 2)
        for number in range(3):
            step(module, number)
    averages = {}
    for one, other in itertools.product(FORMATS, repeat=2):
        module, state = wrapped(other, 2)
        state.load_state_dict(states[one].state_dict())
        averages[one, other] = step(module, 3)
        check(averages[one, other], averages["contiguous", "contiguous"], (one, other))


CASES = [conversions, exact_conversions, unused_conversions, formats, lost_gradients, in_fsdp1]


@functools.cache
def two() -> dict[str, list[Any]]:
    return run_cases(CASES, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_workers(case: Any) -> None:
    outcome(two(), case)


@pytest.mark.slow
def test_all_conversions() -> None:
    run(all_conversions, 2)


DENSE = [
    (torch.zeros(4, 3), (0, 1)),
    (torch.zeros(3, 4).t(), (1, 0)),
    (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
    (torch.zeros(2, 1, 4, 5).to(memory_format=torch.channels_last), (0, 1, 2, 3)),
    (torch.zeros(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), (0, 2, 3, 4, 1)),
    (torch.zeros(6).as_strided((2, 1, 3), (1, 99, 2)), (1, 2, 0)),
    (torch.zeros(()), ()),
]


@pytest.mark.parametrize(("tensor", "order"), DENSE)
def test_memory_order(tensor: Tensor, order: tuple[int, ...]) -> None:
    assert memory_order(tensor) == order
    strides = zip(strides_of(tensor.shape, order), tensor.stride(), tensor.shape, strict=True)
    assert all(ours == theirs for ours, theirs, size in strides if size > 1)


def test_what_is_not_dense_has_the_order_of_its_shape() -> None:
    for tensor in (torch.zeros(4, 6)[:, ::2], torch.zeros(1, 6).expand(4, 6), torch.zeros(0, 3).t()):
        assert memory_order(tensor) == (0, 1)
