"""Parameters that are not contiguous: gradients, errors and checkpoints are in the order of the shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations import fsdp1
from powersgd_triton.integrations.ddp import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from powersgd_triton.integrations.memory_order import memory_order, strides_of
from tests.support.distributed import outcome, run_cases
from tests.support.small import Results, complaint
from tests.support.training import LIMIT, digest, local_gradients, relative, total

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
        self.averages.append({})
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            self.given[name] = self.given.get(name, 0) + self.own[name].contiguous().double()
            self.sent[name] = self.sent.get(name, 0) + parameter.grad.contiguous().double()
            self.averages[-1][name] = parameter.grad.detach().clone()

    def lost(self, before: Gradients | None = None) -> float:
        """Largest relative ‖Σ_w E_T + W Σ_t Ĝ_t − Σ_w Σ_t G_t − Σ_w E_0‖ of a parameter, in the order of its shape."""
        found = []
        for name, error in self.state.error().items():
            given = self.given[name].flatten(1)
            start = torch.zeros(()) if before is None else before[name]
            found.append(relative(total(error) + 2 * self.sent[name].flatten(1), total(given) + 2 * start.double()))
        assert len(found) == 4
        return max(found)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]
EVENTS = (0, 1, 3)


def conversions(worker: int, world_size: int) -> dict[str, float]:
    """The memory format changes after DDP was made, before the first step, before buckets are rebuilt, and later."""
    found = {}
    for options, event, (before, after) in itertools.product(OPTIONS, EVENTS, itertools.permutations(FORMATS)):
        training = Training(Net(before), worker, **options)
        for step in range(STEPS):
            if step == event:
                training.model.zero_grad()
                convert(training.model, after)
            # A gradient of zeros does not show how it lies in the bucket.
            training.step(step, scale=0.0 if step == 0 else 1.0)
        found[f"{options}, {before} → {after} before step {event}"] = training.lost()
    return found


def exact_conversions(worker: int, world_size: int) -> dict[str, float]:
    """The same where gradients are averaged exactly, and with the batched hook at full rank."""
    found = {}
    for options, hook in itertools.product(OPTIONS, (powerSGD_hook, batched_powerSGD_hook)):
        training = Training(
            Net(), worker, rank=99, start=2 if hook is batched_powerSGD_hook else 99, hook=hook, **options
        )
        for step in range(STEPS):
            if step in (1, 3):
                training.model.zero_grad()
                convert(training.model, "channels_last" if step == 1 else "contiguous")
            training.step(step)
        found[f"{options}, {hook.__name__}"] = max(
            relative(training.sent[name], total(given) / 2) for name, given in training.given.items()
        )
    return found


class Pair(nn.Module):
    """Two convolutions, of which the second is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        outputs: Tensor = self.first(inputs).square().sum()
        return outputs + self.second(inputs).square().sum() if both else outputs


def unused_conversions(worker: int, world_size: int) -> dict[str, float]:
    """A worker that does not use the parameter gets its average too, also where that lies in another order."""
    found = {}
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
            found[f"{as_view}, step {step}"] = relative(model.second.weight.grad, mean)
    return found


def formats(worker: int, world_size: int) -> dict[str, Any]:
    """The same training in every format, and from each other's checkpoints."""
    models: dict[str, Callable[[], Net]] = {
        "contiguous": Net,
        "channels_last": lambda: Net("channels_last"),
        "transposed": lambda: Net("channels_last", transposed=True),
    }
    trainings = {name: Training(make(), worker) for name, make in models.items()}
    for training in trainings.values():
        for step in range(STEPS):
            training.step(step)
    expected = trainings["contiguous"]
    saved = {name: training.state.state_dict() for name, training in trainings.items()}
    found: dict[str, Any] = {"lost": {name: training.lost() for name, training in trainings.items()}}
    for name, training in trainings.items():
        assert training.model.first.weight.is_contiguous() == (name == "contiguous")
        found[name] = max(
            relative(a[key], b[key]) for a, b in zip(training.averages, expected.averages, strict=True) for key in b
        )
        parts = saved[name]["matrices"]
        for key, theirs in saved["contiguous"]["matrices"].items():
            found[f"{name}, {key}"] = max(relative(parts[key][part], theirs[part]) for part in theirs)
    for one, other in itertools.permutations(models, 2):
        resumed = Training(models[other](), worker)
        resumed.state.load_state_dict(saved[one])
        errors = resumed.state.error()
        for step in range(STEPS, STEPS + 2):
            resumed.step(step)
        found["lost"][f"{one} → {other}"] = resumed.lost(errors)
        found[f"digest {one} → {other}"] = digest(resumed.averages[-1].values())
    return found


def native(worker: int, world_size: int) -> dict[str, float]:
    """Full rank is DDP alone, in every format."""
    found: dict[str, float] = {}
    for transposed, options in itertools.product((False, True), OPTIONS[:2]):
        model = Net("channels_last", transposed)
        training = Training(model, worker, rank=999, **options)
        other = Net("channels_last", transposed)
        replica = DistributedDataParallel(other, **options)
        for step in range(3):
            training.step(step)
            other.zero_grad()
            replica(images(worker, step)).backward()
            for name, parameter in other.named_parameters():
                key = f"{transposed}, {options}, {name}"
                assert parameter.grad is not None
                found[key] = max(found.get(key, 0.0), relative(training.averages[-1][name], parameter.grad))
    return found


def lost_gradients(worker: int, world_size: int) -> str:
    """A conversion moves gradients out of DDP's buckets, of which they were views: DDP would not average them."""
    training = Training(Net(), worker, gradient_as_bucket_view=True)
    for step in range(3):
        training.step(step)
    convert(training.model, "channels_last")
    return complaint(training.step, 3)


def sharded(worker: int, world_size: int) -> dict[str, Any]:
    """FSDP1: full rank is FSDP1 alone; a checkpoint of channels_last fits a contiguous model, and the reverse."""
    found: dict[str, Any] = {}

    def wrapped(memory_format: str, strategy: ShardingStrategy, rank: int) -> tuple[Any, Any]:
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
            return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for memory_format in FORMATS:
            alone, _ = wrapped(memory_format, strategy, 0)
            hooked, _ = wrapped(memory_format, strategy, 999)
            for number in range(2):
                expected, got = step(alone, number), step(hooked, number)
                assert expected.keys() == got.keys()
                worst = max(relative(got[name], expected[name]) for name in expected)
                found[f"{strategy}, {memory_format}, step {number}"] = worst
    states = {}
    for memory_format in FORMATS:
        module, state = wrapped(memory_format, ShardingStrategy.FULL_SHARD, 2)
        for number in range(3):
            step(module, number)
        states[memory_format] = module, state
    averages = {}
    for one, other in itertools.product(FORMATS, repeat=2):
        module, state = wrapped(other, ShardingStrategy.FULL_SHARD, 2)
        state.load_state_dict(states[one][1].state_dict())
        averages[one, other] = step(module, 3)
    expected = averages["contiguous", "contiguous"]
    for case, got in averages.items():
        found[" → ".join(case)] = max(relative(got[name], expected[name]) for name in expected)
    return found


CASES: list[Callable[..., Any]] = [
    conversions,
    exact_conversions,
    unused_conversions,
    formats,
    native,
    lost_gradients,
    sharded,
]


@pytest.fixture(scope="module")
def two() -> Results:
    return run_cases(CASES, 2)


@pytest.mark.parametrize("case", [conversions, exact_conversions, unused_conversions, native, sharded])
def test_nothing_is_lost(two: Results, case: Callable[..., Any]) -> None:
    for seen in outcome(two, case):
        assert {name: wrong for name, wrong in seen.items() if not wrong <= LIMIT} == {}


def test_training_and_checkpoints_do_not_depend_on_the_format(two: Results) -> None:
    first, second = outcome(two, formats)
    for name, wrong in {**first.pop("lost"), **second.pop("lost")}.items():
        assert wrong <= LIMIT, name
    for name, wrong in first.items():
        assert wrong == second[name] if name.startswith("digest") else wrong <= 1e-3, name


def test_a_gradient_that_is_not_in_its_bucket_is_noticed(two: Results) -> None:
    for seen in outcome(two, lost_gradients):
        assert seen.startswith("RuntimeError")
        assert "no longer in DDP's bucket" in seen


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


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 6)[:, ::2], torch.zeros(1, 6).expand(4, 6), torch.zeros(0, 3).t()], ids=str
)
def test_what_is_not_dense_has_the_order_of_its_shape(tensor: Tensor) -> None:
    assert memory_order(tensor) == (0, 1)
