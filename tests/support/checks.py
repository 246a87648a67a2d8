"""What several test files measure: steps, bases, states of global random generators, memory."""

import gc
import itertools
import random
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.planning import tuning
from powersgd_triton.planning.cost import Network

SHAPES: dict[str, tuple[int, ...]] = {
    "linear": (24, 18),
    "twin": (24, 18),
    "bias": (18,),
    "conv": (8, 3, 3, 3),
    "scalar": (),
    "row": (1, 40),
    "column": (40, 1),
    "empty": (0, 5),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MODES: dict[str, dict[str, Any]] = {
    "standard": {},
    "without feedback": {"error_feedback": False},
    "cold": {"warm_start": False},
    "twice": {"iterations": 2},
    "alternating": {"algorithm": "alternating"},
    "alternating twice": {"algorithm": "alternating", "iterations": 2},
    "alternating three times": {"algorithm": "alternating", "iterations": 3},
    "16-bit error": {"algorithm": "alternating", "error_dtype": "bf16"},
}
"""Fields of the configuration, by a name for each."""

CPU = torch.device("cpu")
COMPRESSED = ("linear", "twin", "conv", "row", "column")


def everything(rank: int = 2, **fields: Any) -> PowerSGDConfig:
    """A configuration that compresses every matrix."""
    return PowerSGDConfig(rank=rank, min_compression_rate=0, **fields)


def gradients(
    seed: int, shapes: Mapping[str, Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tuple(shape), generator=generator).to(dtype) for name, shape in shapes.items()}


def poisoned(shapes: Mapping[str, Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.full(tuple(shape), float("nan"), dtype=dtype) for name, shape in shapes.items()}


def on(device: torch.device, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def step(
    compressor: Compressor, given: Mapping[str, Tensor], dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> dict[str, Tensor]:
    """Averaged gradients of one step on a device, from outputs that were NaN before; on the CPU."""
    out = on(device, poisoned({name: tensor.shape for name, tensor in given.items()}, dtype))
    compressor.decompress(compressor.compress(on(device, given)), out=out)
    return on(CPU, out)


def trained(steps: int = 5, *, dtype: torch.dtype = torch.float32, **fields: Any) -> Compressor:
    """A compressor after so many steps. Fields are those of the configuration."""
    compressor = Compressor(everything(**fields), SHAPES)
    for seed in range(steps):
        step(compressor, gradients(seed, dtype=dtype))
    return compressor


def trajectory(compressor: Compressor, steps: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Averages of further steps, and the error after them."""
    found = {
        f"{name} in step {seed}": tensor
        for seed in range(compressor.iteration, compressor.iteration + steps)
        for name, tensor in step(compressor, gradients(seed, dtype=dtype)).items()
    }
    return found | {f"error of {name}": error for name, error in compressor.error().items()}


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_equal_states(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """That two saved states are equal, tensors bit by bit."""
    assert one.keys() == other.keys()
    assert all(one[key] == other[key] for key in one.keys() - {"matrices"})
    assert one["matrices"].keys() == other["matrices"].keys()
    assert all(same_bits(parts, other["matrices"][name]) for name, parts in one["matrices"].items())


GONE = object()


def put(value: Any, path: str, junk: Any) -> Any:
    """A copy of nested mappings and lists with something else at "key/index/…", or without it if that is ``GONE``."""
    key, _, rest = path.partition("/")
    if not path:
        return junk
    copied = dict(value) if isinstance(value, Mapping) else dict(enumerate(value))
    found = next((k for k in copied if str(k) == key), key)
    copied[found] = put(copied.get(found), rest, junk)
    if copied[found] is GONE:
        del copied[found]
    return copied if isinstance(value, Mapping) else [*copied.values()]


def bases(compressor: Compressor) -> dict[str, Tensor]:
    return {name: parts["basis"] for name, parts in compressor.state_dict()["matrices"].items()}


def set_times(patch: pytest.MonkeyPatch, network: Network, seconds: float, trial: Any) -> None:
    """Let "auto" measure a network, a clock that moves on by so many seconds when it is read, and trials."""
    patch.setattr(tuning, "measure_network", lambda *_: network)
    patch.setattr(tuning, "time", types.SimpleNamespace(perf_counter=itertools.count(0.0, seconds).__next__))
    patch.setattr(tuning, "time_compute", trial)


def on_threads(*numbers: int) -> Iterator[int]:
    """Each number of torch's threads, while there are as many."""
    before = torch.get_num_threads()
    try:
        for number in numbers:
            torch.set_num_threads(number)
            yield number
    finally:
        torch.set_num_threads(before)


def random_states() -> tuple[Any, ...]:
    """States of all global random generators, comparable."""
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


def live_bytes() -> int:
    """Bytes of all storages that any tensor in the process refers to."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    }
    return sum(storages.values())
