"""Averages and errors have the same bits whatever the program's default dtype and device are, and within autocast."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig, attach
from powersgd_triton.config import QUANTIZED
from powersgd_triton.integrations.local_steps import LocalSteps
from powersgd_triton.ops import differences
from tests.support.checks import gradients, same_bits
from tests.support.distributed import folder, on_workers
from tests.support.local_steps import model
from tests.support.sharded_training import Net, mesh_of, sharded, train
from tests.support.thinned import slow

DEFAULTS = (torch.bfloat16, "cpu"), (torch.float16, "meta"), (torch.float64, "meta")
"""A tensor on the device "meta" has no values, so that using it fails."""
CONFIGS: list[dict[str, Any]] = [
    {"rank": 2},
    {"rank": 2, "algorithm": "alternating", "wire_dtype": "int4", "iterations": 2},
    {"compression": 2, "replan_every": 2, "bypass": "int8"},
    {"quantize": "int8"},
    *({"quantize": width, "error_feedback": True} for width in QUANTIZED),
]


@contextlib.contextmanager
def default(dtype: torch.dtype, device: str = "cpu") -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def check_any(run: Callable[[], dict[str, Tensor]], device: str | None = None) -> dict[str, Tensor]:
    """Check the bits with other defaults, or only with the other dtypes and one device. Return what was compared."""
    expected = run()
    for dtype, other in DEFAULTS:
        differences.random_numbers.cache_clear()
        with default(dtype, device or other):
            assert same_bits(run(), expected), (dtype, run)
    return expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow([torch.float32])], ids=str)
@on_workers(2, *slow([3]))
def test_compressor(worker: int, world_size: int, dtype: torch.dtype) -> None:
    """With a loss scale that 16 bits do not hold."""
    given = [gradients(10 * seed + worker, dtype=dtype) for seed in range(3)]
    # Random directions take the place of zeros.
    given[1]["linear"].zero_()

    def run(config: PowerSGDConfig) -> dict[str, Tensor]:
        compressor, found = Compressor(config, given[0]), dict[str, Tensor]()
        compressor.attach(lambda: 70000.0)
        for number, own in enumerate(given):
            averages: Any = compressor.decompress(compressor.compress(own))
            found |= {f"{name} {number}": average for name, average in averages.items()}
        return found | {f"error of {name}": error for name, error in compressor.error().items()}

    for fields in CONFIGS:
        config = PowerSGDConfig(min_compression_rate=0, **fields)
        expected = check_any(functools.partial(run, config))
        for width in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=width):
                assert same_bits(run(config), expected), f"{fields}, autocast to {width}"


@on_workers(2, *slow([3]))
def test_local_steps(worker: int, world_size: int) -> None:
    changes = [torch.randn(20, 12, generator=torch.Generator().manual_seed(10 * n + worker)) for n in range(4)]

    def run(quantize: str) -> dict[str, Tensor]:
        with default(torch.float32):
            net = model()
        sync = LocalSteps(net, PowerSGDConfig(quantize=quantize), every=2, delay=1, keep=0.9)
        for change in changes:
            with torch.no_grad():
                net.get_parameter("0.weight").add_(change)
            sync.step()
        return sync.shared() | {f"error of {name}": error for name, error in sync.error().items()}

    for quantize in ("ternary", "sparse"):
        check_any(functools.partial(run, quantize))


@pytest.mark.parametrize("fields", [{"rank": 2}, *slow([{"quantize": "int8"}, {"quantize": "int4"}])], ids=str)
@on_workers(2)
def test_fsdp2(worker: int, world_size: int, fields: dict[str, Any]) -> None:
    """Also of a run that goes on from a checkpoint."""

    def run() -> dict[str, Tensor]:
        with default(torch.float32):
            nets = [sharded(Net(), mesh_of(shard=world_size)) for _ in range(2)]
        first, second = (attach(net, **fields) for net in nets)
        before = train(nets[0], worker)
        with folder(worker) as place:
            first.save(place)
            second.load(place)
        return before | {f"{name}, later": value for name, value in train(nets[1], worker).items()}

    # The model makes tensors on the default device.
    check_any(run, "cpu")
