"""Long training with faults of every kind at random steps: memory stays flat, workers agree, and it learns as well."""

from __future__ import annotations

import collections
import random
import resource
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.checks import live_bytes
from tests.support.digits import BATCH, TEST_IMAGES, images_and_labels
from tests.support.distributed import HUNG, run
from tests.support.training import digest

SEEDS = (0, 1, 2)
# Of a step to have one. Those that spoil a bucket make the optimizer skip the step.
FAULTS = {"inf": 0.02, "nan": 0.02, "overflow": 0.02, "zero": 0.03, "unused": 0.03, "reload": 0.02}
SPOILS = ("inf", "nan", "overflow")
LEARNING_RATE = 0.03
SETTINGS: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0, "min_compression_rate": 1}
# In MB: about one layer a bucket.
BUCKET = 0.01
SAMPLES = 4
"""Measurements of the memory, the first after a quarter of the run."""

TENSORS_SLACK = 2 * 4096
"""Bytes of live tensors: scalars that say which steps counted are made 1024 at a time, and two such blocks may live."""

PROCESS_SLACK = 4 << 20
"""Bytes by which a process may grow: threads' stacks and allocators' arenas. One layer's gradient a step would be 16 KB
a step, 32 MB in the long run; what is smaller shows in the tensors."""


class Classifier(nn.Module):
    """Digits in three layers, and a side branch that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.side, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.use_side = True

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.body(images)
        if self.use_side:
            hidden = hidden + torch.relu(self.side(images))
        logits: Tensor = self.head(hidden)
        return logits


class Faults:
    """Draws each step's faults, the same on all workers, and puts them into this worker's gradients.

    Attributes:
        kinds: of the current step.
        seen: how often each kind came.
    """

    def __init__(self, model: nn.Module, worker: int, world_size: int, seed: int, happen: bool) -> None:
        self.rng = random.Random(seed)
        self.worker, self.world_size, self.happen = worker, world_size, happen
        self.names = [name for name, _ in model.named_parameters()]
        self.kinds: set[str] = set()
        self.seen: collections.Counter[str] = collections.Counter()
        self.plan: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self._spoiled(name, gradient))

    def draw(self) -> None:
        rng = self.rng
        self.plan = {}
        self.kinds = {kind for kind, share in FAULTS.items() if rng.random() < share and self.happen}
        if "overflow" in self.kinds:
            # Needs a gradient on every worker.
            self.kinds.discard("unused")
        self.seen.update(self.kinds)
        for kind in sorted(self.kinds & {"zero", *SPOILS}):
            victim, culprit = rng.choice(self.names), rng.randrange(self.world_size)
            # A sum that overflows is one of finite gradients.
            if kind == "overflow" or culprit == self.worker:
                self.plan[victim] = kind

    def here(self, kind: str) -> bool:
        """Whether this worker has a fault of the current step that needs no victim: one has by turns, or all have."""
        return kind in self.kinds and self.seen[kind] % (self.world_size + 1) in (self.worker, self.world_size)

    def _spoiled(self, name: str, gradient: Tensor) -> Tensor:
        kind = self.plan.get(name)
        if kind is None:
            return gradient
        gradient = gradient.clone()
        if kind == "zero":
            return gradient.zero_()
        if kind == "overflow":
            # All of it: the product of a few such elements with a basis may be in range, and the average applied.
            return gradient.fill_(3e38)
        gradient.view(-1)[0] = float(kind)
        return gradient


def training(worker: int, world_size: int, steps: int, seed: int, happen: bool) -> float:
    """Train until so many steps were applied; the loss after them."""
    images, labels = images_and_labels(0)
    torch.manual_seed(seed)
    model = Classifier()
    faults = Faults(model, worker, world_size, seed, happen)
    state = PowerSGDState(None, module=model, **SETTINGS)
    replica = DistributedDataParallel(model, bucket_cap_mb=BUCKET, find_unused_parameters=True)
    buckets: set[int] = set()

    def hook(state, bucket):
        buckets.add(bucket.index())
        return powerSGD_hook(state, bucket)

    replica.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    order = torch.Generator().manual_seed(seed)
    applied = skipped = 0
    memory: list[int] = []
    peaks, digests = [], []
    while applied < steps:
        mine = TEST_IMAGES + torch.randint(len(labels) - TEST_IMAGES, (world_size, BATCH), generator=order)[worker]
        faults.draw()
        model.use_side = not faults.here("unused")
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(images[mine]), labels[mine]).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        # As torch.amp.GradScaler does it.
        if all(gradient.isfinite().all() for gradient in gradients):
            optimizer.step()
            applied += 1
        else:
            skipped += 1
            assert skipped <= steps, "the gradients stay not finite"
        if "reload" in faults.kinds:
            state.load_state_dict(state.state_dict())
        if faults.kinds:
            digests.append(digest([*gradients, *model.parameters()]))
            held = [part for m in state._engine.memory.matrices.values() for part in (*m.bases.values(), m.error)]
            assert all(part is None or part.isfinite().all() for part in held), "what is kept is not finite"
        if happen and len(memory) < applied * SAMPLES // steps:
            del gradients
            optimizer.zero_grad()
            memory.append(live_bytes())
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    assert len(buckets) > 1
    assert len(state.error()) == 4
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, [*digests, digest(model.parameters())])
    assert all(other == everyone[0] for other in everyone), "workers hold different bits"
    if happen:
        assert len(memory) == SAMPLES
        assert max(memory) - min(memory) <= TENSORS_SLACK, memory
        assert peaks[-1] - peaks[0] <= PROCESS_SLACK, peaks
        assert faults.seen.keys() == FAULTS.keys()
        assert skipped > 0
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(images[:TEST_IMAGES]), labels[:TEST_IMAGES]))


def learn_as_well(worker: int, world_size: int, steps: int, faulty: Sequence[int]) -> None:
    """The runs without faults differ in their first weights and in what they draw.

    As far as those are apart, those with faults may be from them.
    """
    without = [training(worker, world_size, steps, seed, happen=False) for seed in SEEDS]
    loss = statistics.mean(training(worker, world_size, steps, seed, happen=True) for seed in faulty)
    assert abs(loss - statistics.mean(without)) <= max(without) - min(without), (loss, without)


def test_short_run_with_faults() -> None:
    run(learn_as_well, 2, 60, SEEDS[:1])


@pytest.mark.slow
def test_long_run_with_faults() -> None:
    run(learn_as_well, 2, 2000, SEEDS, timeout=2 * HUNG)
