"""Long training with faults of every kind at random steps: memory stays flat, and it learns as well."""

from __future__ import annotations

import collections
import random
import resource

import pytest
import torch
from torch import Tensor

from tests.support.balance import batches, build
from tests.support.checks import live_bytes
from tests.support.distributed import HUNG, run
from tests.support.sharded_training import RANK_2, batch, loss_of

# Of a step to have one. Those that spoil a gradient make the optimizer skip the step.
FAULTS = {"inf": 0.04, "nan": 0.04, "overflow": 0.04, "zero": 0.06, "unused": 0.06, "reload": 0.04}
SAMPLES = 4
"""Measurements of the memory, the first after a quarter of the run."""

TENSORS_SLACK = 2 * 4096
"""Bytes of live tensors: scalars that say which steps counted are made 1024 at a time, and two such blocks may live."""

PROCESS_SLACK = 4 << 20
"""Bytes by which a process may grow: threads' stacks and allocators' arenas. One layer's gradient a step would be 10 KB
a step, 20 MB in the long run; what is smaller shows in the tensors."""


def training(worker: int, world_size: int, steps: int, happen: bool) -> float:
    """Train until so many steps were applied; the loss after them."""
    model = build("DDP", RANK_2, find_unused_parameters=True)
    # {parameter: fault} of this worker in the current step. All workers draw the same faults.
    plan: dict[str, str] = {}

    def faulty(name: str, gradient: Tensor) -> Tensor:
        kind = plan.get(name)
        if kind in ("zero", "overflow"):
            # All of it: the product of a few such elements with a basis may be in range, and the average applied.
            return torch.full_like(gradient, 3e38 if kind == "overflow" else 0)
        first = torch.zeros(1, dtype=torch.int64)
        return gradient if kind is None else gradient.flatten().index_fill(0, first, float(kind)).view_as(gradient)

    names = [name for name, _ in model.net.blocks.named_parameters(prefix="blocks")]
    for name, parameter in model.net.named_parameters():
        parameter.register_hook(lambda gradient, name=name: faulty(name, gradient))
    rng, seen = random.Random(0), collections.Counter[str]()
    applied = 0
    memory: list[int] = []
    peaks: list[int] = []
    while applied < steps:
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
        model.net.use = "unused" not in kinds or seen["unused"] % (world_size + 1) not in (worker, world_size)
        before = model.net.tokens.weight.clone()
        model.step(batches(model, applied))
        moved = not torch.equal(before, model.net.tokens.weight)
        applied += moved
        if "reload" in kinds:
            model.state.load_state_dict(model.state.state_dict())
        if happen and len(memory) < applied * SAMPLES // steps:
            model.optimizer.zero_grad()
            memory.append(live_bytes())
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if happen:
        assert len(memory) == SAMPLES
        assert max(memory) - min(memory) <= TENSORS_SLACK, memory
        assert peaks[-1] - peaks[0] <= PROCESS_SLACK, peaks
        assert seen.keys() == FAULTS.keys()
    model.net.use = True
    return float(loss_of(model.net, batch(worker, -1)).detach())


def learn_as_well(worker: int, world_size: int, steps: int) -> None:
    without, loss = (training(worker, world_size, steps, happen) for happen in (False, True))
    assert loss < 2 * without < 0.01, (loss, without)


@pytest.mark.slow
def test_long_run_with_faults() -> None:
    run(learn_as_well, 2, 2000, timeout=2 * HUNG)
