"""Random training through the DDP hook on gloo workers: nothing is lost on the way between gradients and averages."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from tests.support.distributed import run
from tests.support.held import owed
from tests.support.training import digest, total

WIDTH, LAYERS, STEPS = 12, 6, 25
KINDS = ["zero", "large", "inf", "nan", "overflow"]


class Branches(nn.Module):
    """Layers side by side, of which each forward pass uses some."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.5) for _ in range(LAYERS))
        self.product = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.used: set[int] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs * self.scale
        for index in sorted(self.used):
            outputs = outputs + torch.tanh(self.layers[index](inputs))
        return outputs + self.product(inputs, outputs) if 0 in self.used else outputs


def options(seed: int) -> dict[str, Any]:
    """What one run is like; the same on all workers."""
    rng = random.Random(seed)
    alternating = rng.random() < 0.5
    return {
        "cap": rng.choice([0.0005, 0.001, 0.003]),
        "view": rng.random() < 0.5,
        "state": {
            "matrix_approximation_rank": rng.choice([1, 2, 5]),
            "start_powerSGD_iter": rng.choice([0, 0, 3]),
            "min_compression_rate": rng.choice([0, 0.5]),
            "algorithm": "alternating" if alternating else "standard",
            "iterations": rng.choice([1, 1, 2]),
            "warm_start": alternating or rng.random() < 0.7,
            "batch_tensors_with_same_shape": rng.random() < 0.5,
        },
    }


def training(worker: int, world_size: int, seeds: list[int]) -> list[dict[str, Any]]:
    return [one_run(worker, world_size, seed) for seed in seeds]


class Books:
    """What this worker gave, received and owes of every parameter. Summed over workers the balance is the error."""

    def __init__(self, state: PowerSGDState, model: nn.Module) -> None:
        self.engine = state._engine
        self.balance = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
        self.sizes = {name: torch.zeros_like(tensor) for name, tensor in self.balance.items()}

    def owed(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{name: (E, size of what it is the sum of)}, of compressed parameters."""
        buckets = {matrix.bucket for matrix in self.engine.residuals.matrices.values()}
        segments = {segment.name: segment for bucket in buckets for segment in bucket.layout.compressed}
        both = {}
        for name in self.engine.residuals.matrices:
            E, size = owed(self.engine, segments[name])
            both[name] = (E.view(self.balance[name].shape), size.view(self.balance[name].shape))
        return both

    def enter(self, buckets: list[list[str]], given: dict[str, Tensor], returned: dict[str, Tensor]) -> bool:
        """Book a step; whether the optimizer may apply it."""
        finite = {name: bool(tensor.isfinite().all()) for name, tensor in returned.items()}
        applied = all(finite.values())
        held = self.owed()
        for members in buckets:
            whole = all(finite[name] for name in members)
            for name in members:
                G = given[name].nan_to_num(nan=0, posinf=0, neginf=0)
                # A bucket that is whole carries its gradient on; what is not compressed has nothing to carry it in.
                if applied or (whole and name in held):
                    self.balance[name] += G
                if applied:
                    self.balance[name] -= returned[name].double()
                # A broken bucket's buffer takes the gradient and gives it back, which is rounded too.
                self.sizes[name] += G.abs() + (held[name][1] if name in held else 0)
        return applied

    def worst(self, roundings: int) -> float:
        """The largest difference between balance and errors, in units of what roundings may add up to."""
        held = self.owed()
        found = 0.0
        for name, balance in self.balance.items():
            difference = total(balance - held[name][0] if name in held else balance).abs()
            allowed = roundings * 2.0**-24 * total(self.sizes[name]) + 2.0**-126
            found = max(found, float((difference / allowed).max()))
        return found


def one_run(worker: int, world_size: int, seed: int) -> dict[str, Any]:
    """Train with random faults, and keep the books."""
    chosen = options(seed)
    model = Branches(seed)
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = PowerSGDState(None, module=model, **chosen["state"])
    books = Books(state, model)
    given: dict[str, Tensor] = {}
    returned: dict[str, Tensor] = {}
    buckets: list[list[str]] = []
    fault: tuple[str, str] | None = None

    def hook(state, bucket):
        buckets.append([names[parameter] for parameter in bucket.parameters()])
        for name, gradient in zip(buckets[-1], bucket.gradients(), strict=True):
            if fault is not None and fault[0] == name:
                spoil(gradient, fault[1])
            given[name], returned[name] = gradient.detach().clone(), gradient
        return powerSGD_hook(state, bucket)

    replica = DistributedDataParallel(
        model, bucket_cap_mb=chosen["cap"], find_unused_parameters=True, gradient_as_bucket_view=chosen["view"]
    )
    replica.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    digests, skipped, most = [], 0, 0
    for step in range(STEPS):
        shared, own = random.Random(1000 * seed + step), random.Random((1000 * seed + step) * 10 + worker)
        micros = shared.randint(1, 3)
        candidates = [index for index in range(LAYERS) if shared.random() < 0.7]
        victim, kind = shared.choice(list(names.values())), shared.choice(KINDS)
        culprits = range(world_size) if kind == "overflow" else [shared.randrange(world_size)]
        fault = (victim, kind) if shared.random() < 0.3 and worker in culprits else None
        buckets.clear()
        optimizer.zero_grad(set_to_none=shared.random() < 0.5)
        for micro in range(micros):
            model.used = {index for index in candidates if own.random() < 0.8}
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(own.randrange(2**31)))
            with contextlib.nullcontext() if micro == micros - 1 else replica.no_sync():
                replica(inputs).square().mean().backward()
        most = max(most, len(buckets))
        applied = books.enter(buckets, given, returned)
        if applied:
            optimizer.step()
        skipped += not applied
        digests.append(digest([*returned.values(), *model.parameters()]))
    config = state.config
    # Of an element: what is subtracted and averaged in products of r columns, the sum over workers, what is added.
    assert isinstance(config.rank, int)
    roundings = 4 * config.rank * config.iterations + world_size + 8
    return {
        "lost": books.worst(roundings),
        "digests": digests,
        "skipped": skipped,
        "buckets": most,
        "compressed": len(state._engine.residuals.matrices),
        "finite": all(E.isfinite().all() for E in state.error().values()),
    }


def spoil(gradient: Tensor, kind: str) -> None:
    if kind == "zero":
        gradient.zero_()
    elif kind == "large":
        gradient.mul_(1e3)
    elif kind == "overflow":
        # In one row only: of what is added to the largest numbers nothing is left.
        gradient.view(-1)[: gradient.shape[-1] if gradient.dim() else 1] = 3e38
    else:
        gradient.view(-1)[0] = float(kind)


def check(found: list[list[dict[str, Any]]]) -> None:
    for runs in zip(*found, strict=True):
        for seen in runs:
            assert seen["lost"] <= 1, runs
            assert seen["finite"]
            assert seen["buckets"] > 1
            assert seen["compressed"] > 1
            assert seen["digests"] == runs[0]["digests"], "workers hold different bits"
    # Otherwise no bucket was spoiled.
    assert sum(seen["skipped"] for seen in found[0]) > 0


def test_nothing_is_lost() -> None:
    check(run(training, 2, list(range(4))))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_lost_in_many_runs(world_size: int) -> None:
    check(run(training, world_size, list(range(100, 125))))
