"""Averages that do not fit fp16, on gloo workers of DDP and FSDP whose optimizers skip such steps: nothing is lost."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.comm.communicator import Communicator
from tests.support.distributed import make_test
from tests.support.sharded_training import mesh_of, whole
from tests.support.training import Given, total
from tests.support.wrappers import local

SIZE = 16
SHAPES = dict.fromkeys(("large", "small"), (SIZE, SIZE))
# The gradients are held for a while, then turned, then small: what was carried leaves again.
FACTORS = [1.0, 1.0, 1.0, -0.9, -0.9, -0.9, 0.01, 0.01]
CONFIG = PowerSGDConfig(rank=1, min_compression_rate=0)


def gradients(worker: int, factor: float) -> dict[str, Tensor]:
    """Only the first rows of the first matrix are large, so that other workers' parts of the averages are not."""
    common, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + worker)
    given = {}
    for name, scale in (("large", 30000.0), ("small", 1.0)):
        G = torch.randn(SIZE, SIZE, generator=common) * scale
        G[SIZE // 2 :] /= 1000
        given[name] = (factor * (G + torch.randn(SIZE, SIZE, generator=own)).clamp(-60000, 60000)).half()
    return given


def wrap(kind: str, dtype: torch.dtype) -> Any:
    if kind == "DDP":
        return DistributedDataParallel(Given(SHAPES).to(dtype), bucket_cap_mb=0.0004)
    if kind == "FSDP1":
        # One worker holds the first matrix, the other one the second.
        policy, device = MixedPrecision(reduce_dtype=dtype), torch.device("cpu")
        return FullyShardedDataParallel(Given(SHAPES), use_orig_params=True, device_id=device, mixed_precision=policy)
    # Each worker holds half of the rows of both.
    return fully_shard(Given(SHAPES), mesh=mesh_of(shard=2), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))


def averages(module: Any) -> dict[str, Tensor]:
    """All of them, whole, in fp64."""
    in_fsdp1 = isinstance(module, FullyShardedDataParallel)
    with module.summon_full_params(module, with_grads=True) if in_fsdp1 else contextlib.nullcontext():
        return {name.split(".")[-1]: whole(p.grad).view(SIZE, SIZE).double() for name, p in module.named_parameters()}


def nothing_is_lost(worker: int, world_size: int, kind: str, dtype: torch.dtype) -> None:
    """Where an average does not fit. Verdicts are shared only where workers may see different ones."""
    module = wrap(kind, dtype)
    state = attach(module, CONFIG, loss_scale=lambda: 1.0)
    shares = []

    def minimum(self: Communicator, tensor: Tensor) -> None:
        shares.append(tensor.numel())
        right(self, tensor)

    right = Communicator.minimum
    # Σ G − W Σ Ĝ, and the size of what it is the sum of.
    balance = {name: torch.zeros(SIZE, SIZE, dtype=torch.float64) for name in ("large", "small")}
    sizes = dict.fromkeys(balance, 0.0)
    rounded = {name: tensor.clone() for name, tensor in balance.items()}
    applied, alone = [], 0
    with mock.patch.object(Communicator, "minimum", minimum):
        for factor in FACTORS:
            given = gradients(worker, factor)
            module.zero_grad()
            module({name: G.to(next(module.parameters()).dtype) for name, G in given.items()}).backward()
            own = [local(p.grad) for p in module.parameters() if p.grad is not None]
            fitting = float(total(torch.tensor(float(all(G.isfinite().all() for G in own)))))
            applied.append(fitting == world_size)
            alone += 0 < fitting < world_size
            for name, average in averages(module).items():
                balance[name] += total(given[name].double())
                sizes[name] += float(total(given[name].double().norm()))
                if applied[-1]:
                    balance[name] -= world_size * average
                    # Ĝ is rounded to fp16, which is not fed back.
                    rounded[name] += world_size * (2.0**-11 * average.abs() + 2.0**-24)
        errors = state.error()
    for name, left in balance.items():
        key = next(key for key in errors if key.endswith(name))
        E = total(errors[key].double()).view(SIZE, SIZE)
        if kind == "FSDP2" and dtype == torch.float16:
            # FSDP2 halves fp16 gradients of two workers before it has them summed; errors are those of the halves.
            E = 2 * E
        # Products in fp32 of what is no larger than the gradients together, over eight steps.
        assert ((left - E).abs() <= rounded[name] + 2.0**-16 * sizes[name]).all(), name
    if dtype == torch.float32:
        assert all(applied)
        assert shares == []
    else:
        assert not all(applied[:3])
        assert all(applied[-2:])
        assert len(shares) == (0 if kind == "DDP" else len(FACTORS))
        assert (alone > 0) == (kind != "DDP"), "each worker saw the same"


CASES: dict[str, Callable[..., None]] = {
    f"{kind}, {str(dtype).removeprefix('torch.')}": functools.partial(nothing_is_lost, kind=kind, dtype=dtype)
    for kind, dtype in itertools.product(("DDP", "FSDP1", "FSDP2"), (torch.float16, torch.float32))
}
test_nothing_is_lost = make_test(CASES, 2)
