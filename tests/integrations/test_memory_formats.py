"""Parameters that are not contiguous: gradients, errors and checkpoints are in the order of the shapes."""

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.ddp.views import memory_order, strides_of
from tests.support.balance import Ledger, check_close
from tests.support.distributed import make_test
from tests.support.sharded_training import FULL_RANK, Batch, Gradients
from tests.support.training import complaint, relative
from tests.support.wrappers import FSDP1, Wrapped

LOW = PowerSGDConfig(rank=2, min_compression_rate=0)
STEPS = 5
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Net(nn.Module):
    """Convolutions in two and three dimensions, and a matrix that may be stored transposed. One is not always used."""

    def __init__(self, memory_format: str = "contiguous", transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = True
        self.inject: Callable[[Tensor], Tensor] | None = None
        self.first, self.sometimes = nn.Conv2d(3, 10, 3), nn.Conv2d(3, 10, 3)
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
        x = self.first(images)
        if self.use:
            x = x + self.sometimes(images)
        x = torch.tanh(self.second(torch.tanh(x)))
        x = torch.tanh(self.volume(x.unflatten(1, (2, 6))))
        logits: Tensor = self.head(x.mean((2, 3, 4)))
        if self.inject is not None:
            logits.register_hook(self.inject)
        return logits[:, None]


def convert(model: Net, memory_format: str) -> None:
    for module in (model.first, model.sometimes, model.second):
        module.to(memory_format=FORMATS[memory_format])  # type: ignore[call-overload]


def given(worker: int, step: int) -> list[Batch]:
    images = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(10 * step + worker))
    return [(images, (torch.arange(4)[:, None] + step + 3 * worker) % 7)]


def in_ddp(net: Net, config: PowerSGDConfig = LOW, **options: Any) -> Any:
    wrapper: Any = Wrapped
    made = wrapper(net, config, **options)
    made.net_type = Net
    return made


OPTIONS = ("init_sync", "gradient_as_bucket_view", "find_unused_parameters", "static_graph")
"""Of DDP. The first one is on anyway."""


def conversions(worker: int, _world_size: int) -> None:
    """The memory format changes after DDP was made, before the first step, before buckets are rebuilt, and later."""
    # Each option with a conversion before the first step, or before buckets are rebuilt, and later.
    for index, (option, event) in enumerate(itertools.product(OPTIONS, (0, 1, 3))):
        if event == (0, 1)[index // 3 % 2]:
            continue
        before, after = list(FORMATS)[:: 1 if index % 2 else -1]
        # Exact steps at first, with every other option.
        config = dataclasses.replace(LOW, start_iter=2 * (index // 3 % 2))
        model = in_ddp(Net(before), config, **{option: True})
        ledger = Ledger(model)
        for step in range(STEPS):
            if step == event:
                model.optimizer.zero_grad()
                convert(model.net, after)
            # Zeros do not show how gradients lie in the bucket.
            model.net.inject = None if step else torch.zeros_like
            ledger.step(given(worker, step))
        assert len(ledger.model.mean_error()) == 5
        ledger.check()


def unused_conversions(worker: int, _world_size: int) -> None:
    """A worker that does not use the parameter gets its average too, also where that lies in another order."""
    for as_view in (False, True):
        model = in_ddp(Net(), find_unused_parameters=True, gradient_as_bucket_view=as_view)
        ledger = Ledger(model)
        for step in range(5):
            if step == 2:
                model.optimizer.zero_grad()
                convert(model.net, "channels_last")
            model.net.use = step % 2 == 0 or worker == 0
            ledger.step(given(worker, step))
        ledger.check()


def formats(worker: int, _world_size: int) -> None:
    """The same training in every format, and from each other's checkpoints."""
    models = {"contiguous": Net(), "channels_last": Net("channels_last"), "transposed": Net("channels_last", True)}
    resumed = [in_ddp(copy.deepcopy(net)) for net in models.values()]
    trained = [in_ddp(net) for net in models.values()]
    first, start = trained[0], trained[0].parameters()
    for model in trained:
        for step in range(STEPS):
            model.step(given(worker, step))
        assert model.net.first.weight.is_contiguous() == (model is first)
        check_close(model.parameters(), first.parameters(), start, 1e-3)
    saved = [model.state.state_dict() for model in trained]
    for one, (key, parts) in itertools.product(saved, saved[0]["matrices"].items()):
        assert all(relative(one["matrices"][key][part], parts[part]) <= 1e-3 for part in parts), key
    for index, model in enumerate(resumed):
        model.state.load_state_dict(saved[index - 1])
        ledger = Ledger(model)
        for step in range(STEPS, STEPS + 2):
            ledger.step(given(worker, step))
        ledger.check()


def lost_gradients(worker: int, _world_size: int) -> None:
    """A conversion moves gradients out of DDP's buckets, of which they were views: DDP would not average them."""
    model = in_ddp(Net(), gradient_as_bucket_view=True)
    for step in range(3):
        model.step(given(worker, step))
    convert(model.net, "channels_last")
    assert "no longer in DDP's bucket" in complaint(model.step, given(worker, 3))


def in_fsdp1(worker: int, _world_size: int) -> None:
    """Full rank is FSDP1 alone; a checkpoint of channels_last fits a contiguous model, and the reverse."""

    def wrapped(memory_format: str, config: PowerSGDConfig | None = LOW) -> FSDP1:
        # One bias of odd length makes shards cut through parameters.
        return FSDP1(Net(memory_format, memory_format != "contiguous"), config)  # type: ignore[arg-type]

    alone, hooked = (wrapped("channels_last", config) for config in (None, FULL_RANK))
    start = alone.parameters()
    for step, model in itertools.product(range(2), (alone, hooked)):
        model.step(given(worker, step))
    check_close(hooked.parameters(), alone.parameters(), start)
    found: list[Gradients] = []
    for one, other in itertools.permutations(FORMATS, 2):
        source, model = wrapped(one), wrapped(other)
        for step in range(3):
            source.step(given(worker, step))
        model.state.load_state_dict(source.state.state_dict())
        start = model.parameters()
        model.step(given(worker, 3))
        found.append(model.parameters())
        check_close(found[-1], found[0], start)


test_two_workers = make_test([conversions, unused_conversions, formats, lost_gradients, in_fsdp1], 2)


DENSE = [
    (torch.zeros(4, 3), (0, 1)),
    (torch.zeros(3, 4).t(), (1, 0)),
    (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
    (torch.zeros(2, 1, 4, 5).to(memory_format=torch.channels_last), (0, 1, 2, 3)),
    (torch.zeros(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), (0, 2, 3, 4, 1)),
    (torch.zeros(6).as_strided((2, 1, 3), (1, 99, 2)), (1, 2, 0)),
    (torch.zeros(()), ()),
]


def test_memory_order() -> None:
    for tensor, order in DENSE:
        assert memory_order(tensor) == order
        strides = zip(strides_of(tensor.shape, order), tensor.stride(), tensor.shape, strict=True)
        assert all(ours == theirs for ours, theirs, size in strides if size > 1)
    # What is not dense has the order of its shape.
    for tensor in (torch.zeros(4, 6)[:, ::2], torch.zeros(1, 6).expand(4, 6), torch.zeros(0, 3).t()):
        assert memory_order(tensor) == (0, 1)
