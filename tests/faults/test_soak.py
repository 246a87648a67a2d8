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


def spoiled(gradient: Tensor, kind: str) -> Tensor:
    if kind == "zero":
        return torch.zeros_like(gradient)
    if kind == "overflow":
        # All of it: the product of a few such elements with a basis may be in range, and the average applied.
        return torch.full_like(gradient, 3e38)
    gradient = gradient.clone()
    gradient.view(-1)[0] = float(kind)
    return gradient


def training(worker: int, world_size: int, steps: int, seed: int, happen: bool) -> float:
    """Train until so many steps were applied; the loss after them."""
    images, labels = images_and_labels(0)
    torch.manual_seed(seed)
    model = Classifier()
    state = PowerSGDState(None, module=model, **SETTINGS)
    replica = DistributedDataParallel(model, bucket_cap_mb=BUCKET, find_unused_parameters=True)
    replica.register_comm_hook(state, powerSGD_hook)
    # {parameter: fault} of this worker in the current step. All workers draw the same faults.
    plan: dict[str, str] = {}
    rng, seen = random.Random(seed), collections.Counter[str]()
    names = [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda G, name=name: spoiled(G, plan[name]) if name in plan else G)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    order = torch.Generator().manual_seed(seed)
    applied = skipped = 0
    memory, peaks, digests = [], [], []
    while applied < steps:
        mine = TEST_IMAGES + torch.randint(len(labels) - TEST_IMAGES, (world_size, BATCH), generator=order)[worker]
        kinds = {kind for kind, share in FAULTS.items() if rng.random() < share and happen}
        if "overflow" in kinds:
            # Needs a gradient on every worker.
            kinds.discard("unused")
        seen.update(kinds)
        plan.clear()
        for kind in sorted(kinds - {"unused", "reload"}):
            victim, culprit = rng.choice(names), rng.randrange(world_size)
            # A sum that overflows is one of finite gradients.
            if kind == "overflow" or culprit == worker:
                plan[victim] = kind
        # By turns on one of the workers, or on all.
        model.use_side = "unused" not in kinds or seen["unused"] % (world_size + 1) not in (worker, world_size)
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
        if "reload" in kinds:
            state.load_state_dict(state.state_dict())
        if kinds:
            digests.append(digest([*gradients, *model.parameters()]))
            held = [part for m in state._engine.memory.matrices.values() for part in (*m.bases.values(), m.error)]
            assert all(part is None or part.isfinite().all() for part in held), "what is kept is not finite"
        if happen and len(memory) < applied * SAMPLES // steps:
            del gradients
            optimizer.zero_grad()
            memory.append(live_bytes())
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    assert len(state.error()) == 4
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, [*digests, digest(model.parameters())])
    assert all(other == everyone[0] for other in everyone), "workers hold different bits"
    if happen:
        assert len(memory) == SAMPLES
        assert max(memory) - min(memory) <= TENSORS_SLACK, memory
        assert peaks[-1] - peaks[0] <= PROCESS_SLACK, peaks
        assert seen.keys() == FAULTS.keys()
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
