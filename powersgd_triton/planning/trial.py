"""Measurements of what ``planning.cost`` predicts from: the compute of compression on this device, and the network."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator, travel_device, wait
from powersgd_triton.comm.nodes import own_place
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.layout.matrices import Tensors
from powersgd_triton.planning.cost import RANKS, ComputeTime, Network
from powersgd_triton.schemes import new_engine

PROBES, PROBE_ROUNDS = (1 << 12, 1 << 18, 1 << 21), 3
"""Elements of the all-reduces that measure a network, and how often each is measured."""
ROUNDS = 2
LARGEST, LARGEST_ON_CPU = 1 << 26, 1 << 24
"""Elements of a larger model that are timed. A GPU needs many, since each bucket takes some time of the host."""
SCRATCH = 1 << 27
"""Bytes that fill the caches."""


class _Echo:
    """Collectives of a worker that receives what it sends."""

    @staticmethod
    def all_reduce(tensor: Tensor, **options: Any) -> None: ...

    @staticmethod
    def all_gather_single(gathered: Tensor, tensor: Tensor, **options: Any) -> None:  # noqa: ARG004
        gathered.view(-1, tensor.numel()).copy_(tensor)


class StandIn(Communicator):
    """One of several workers that all do the same, without the others."""

    world_size = index = 0

    def __init__(self, workers: int = 2, index: int = 0, collectives: Any = _Echo) -> None:
        super().__init__(collectives=collectives)
        self.world_size, self.index = workers, index

    def start_gather(self, tensor: Tensor, device: torch.device | None = None) -> Callable[[], Tensor]:  # noqa: ARG002
        return lambda: tensor.expand(self.world_size, *tensor.shape)


def time_compute(config: PowerSGDConfig, buckets: Sequence[Tensors], device: torch.device) -> ComputeTime:
    """Time the steps of an engine on this device, on random gradients in fp32. The host waits for the device.

    The rank or budget of ``config`` does not matter. Quantization takes the same time at all ranks. If the model is
    large, some matrices of it are timed.
    """
    matrices = [{name: tuple(s) for name, s in bucket.items() if len(s) > 1 and 0 not in s} for bucket in buckets]
    matrices = [bucket for bucket in matrices if bucket]
    whole = {name: shape for bucket in matrices for name, shape in bucket.items()}
    part = sample(whole, LARGEST_ON_CPU if device.type == "cpu" else LARGEST)
    if not part:
        return ComputeTime((0.0,) * len(RANKS))
    options: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    gradients = []
    for bucket in matrices if part == whole else [part]:
        # In one buffer, as DDP's.
        pieces = torch.randn(_numel(bucket), dtype=torch.float32, **options).split([*map(math.prod, bucket.values())])
        gradients.append({name: piece.view(bucket[name]) for name, piece in zip(bucket, pieces, strict=True)})
    scratch = torch.zeros(SCRATCH, dtype=torch.uint8, device=device)
    fields: dict[str, Any] = {"compression": None, "bytes_per_step": None, "max_rank": None, "max_overhead": None}
    fields |= {"start_iter": 0, "check_every": 0, "min_compression_rate": 0.0}
    seconds = []
    for rank in RANKS if config.quantize is None else (None,):
        tried = new_engine(dataclasses.replace(config, rank=rank, **fields), StandIn(), lambda: part, device)
        rounds = [_time_steps(tried, gradients, device, scratch) for _ in range(1 + ROUNDS)]
        seconds.append(min(rounds[1:]) * _numel(whole) / _numel(part))
    return ComputeTime(tuple(seconds * (len(RANKS) // len(seconds))))


def sample(matrices: Mapping[str, tuple[int, ...]], largest: int) -> Mapping[str, tuple[int, ...]]:
    """Return all matrices, or as many of each shape, or rows of one of each, as have ``largest`` elements together."""
    if _numel(matrices) <= largest:
        return matrices
    names: dict[tuple[int, ...], list[str]] = {}
    for name, shape in matrices.items():
        names.setdefault(shape, []).append(name)
    elements = sum(math.prod(shape) for shape in names)
    if elements <= largest:
        return {name: shape for shape, own in names.items() for name in own[: largest // elements]}
    found: dict[str, tuple[int, ...]] = {}
    for shape, own in names.items():
        share, first = largest // len(names), math.prod(shape[1:])
        found[own[0]] = (min(shape[0], max(1, share // first)), *shape[1:])
        if first > share and len(shape) > 2:
            # Rows of one expert.
            found[own[0]] = (1, max(1, share // math.prod(shape[2:])), *shape[2:])
    return found


def _numel(tensors: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in tensors.values())


def _time_steps(engine: Engine, buckets: Sequence[dict[str, Tensor]], device: torch.device, scratch: Tensor) -> float:
    """Return the mean seconds of two steps, in which the alternating algorithm computes both of its products."""

    def step() -> None:
        for number, gradients in enumerate(buckets, start=1):
            shapes = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
            bucket = engine.begin(number, functools.partial(dict, shapes), device, last=number == len(buckets))
            engine.average(bucket, gradients, join=True)

    seconds = 0.0
    for _ in range(2):
        # In training, a backward pass and an optimizer have used the caches since the last step.
        scratch.add_(1)
        seconds += seconds_of(step, device)
    return seconds / 2


def seconds_of(act: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a function takes on a device."""
    synchronize(device)
    begin = time.perf_counter()
    act()
    synchronize(device)
    return time.perf_counter() - begin


def synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_network(communicator: Communicator, device: torch.device) -> Network:
    """Measure the network of a group by all-reduces of several sizes. Collective. The host waits for the device.

    All workers return the same: of their times, the longest counts.
    """
    workers = communicator.world_size
    if workers == 1:
        return Network(1)
    if communicator.inside is not None:
        nodes = workers // communicator.inside.world_size
    else:
        _, firsts, _, sizes = communicator.gather(own_place(), device).unbind(1)
        # Sizes are 0 where nodes are not known.
        nodes = len(firsts.unique()) if bool((sizes > 0).all()) else workers
        nodes = nodes if workers % nodes == 0 else workers
    travels = travel_device(communicator.group, device)

    def time_sum(probe: Tensor) -> float:
        # So that all workers begin together.
        communicator.gather(torch.zeros(1, device="cpu"), device)
        return seconds_of(lambda: wait(communicator.all_reduce(probe)), travels)

    probes = [torch.zeros(numel, dtype=torch.float32, device=travels) for numel in PROBES]
    seconds = [min(time_sum(probe) for _ in range(PROBE_ROUNDS)) for probe in probes]
    found = communicator.gather(torch.tensor(seconds, dtype=torch.float64, device="cpu"), device).amax(dim=0).tolist()
    # Bytes that the ring passes through a card.
    small, middle, large = (2 * 4 * numel * (workers - 1) / workers for numel in PROBES)
    bandwidth = (large - middle) / max(found[2] - found[1], 1e-9)
    latency = max(0.0, found[0] - small / bandwidth) / (2 * (workers - 1))
    if nodes == 1:
        return Network(1, workers, inside=bandwidth, inside_latency=latency)
    return Network(nodes, workers // nodes, card=bandwidth, latency=latency)
