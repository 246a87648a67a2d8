"""Products are computed in fp32, whatever the user allows for the model's own."""

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor
from powersgd_triton.ops.precision import full_precision
from tests.support.checks import everything, same_bits

SHAPES = {"weight": (48, 40), "other": (48, 40), "odd": (33, 29), "bias": (7,)}


def averages(dtype: torch.dtype, device: torch.device, **fields: Any) -> dict[str, Tensor]:
    """Averages, a part of one, and errors after some steps."""
    compressor = Compressor(everything(3, **{"backend": "torch", **fields}), SHAPES)
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for step in range(3):
        gradients = {n: torch.randn(shape, generator=generator).to(device, dtype) for n, shape in SHAPES.items()}
        compressed = compressor.compress(gradients)
        part, rows = torch.empty(700, dtype=dtype, device=device), torch.empty(800, device=device)
        compressed.backend.reconstruct_ranges({"weight": (13, part)}, None)
        compressed.backend.reconstruct_ranges({"weight": (40, rows)}, None)
        averaged = dict(compressor.decompress(compressed), part=part, rows=rows)  # type: ignore[arg-type]
        found |= {f"{name} {step}": tensor for name, tensor in averaged.items()}
    return found | {f"error of {name}": tensor for name, tensor in compressor.error().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, {"algorithm": "alternating"}, {"iterations": 2}, {"backend": "auto"}], ids=str)
def test_bits_do_not_depend_on_what_is_allowed(fields: dict[str, Any], dtype: torch.dtype, device: torch.device):
    expected = averages(dtype, device, **fields)
    with torch.autocast(device.type, torch.bfloat16):
        assert same_bits(averages(dtype, device, **fields), expected)
    # Allows TF32 on a GPU, and bf16 products on a CPU that has them.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert same_bits(averages(dtype, device, **fields), expected)
    finally:
        torch.set_float32_matmul_precision(before)


def settings() -> tuple[Any, ...]:
    """The older settings, which torch refuses to read if they differ from the newer ones, and these."""
    backends: Any = torch.backends
    precisions = [matmul.fp32_precision for matmul in (backends.cuda.matmul, backends.mkldnn.matmul)]
    return torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(), precisions


@pytest.mark.parametrize("allowed", ["high", "medium", "highest"])
def test_tf32_is_off_in_products_only(allowed: str):
    """On a CUDA device, whose settings exist without one."""
    try:
        torch.set_float32_matmul_precision(allowed)
        before = settings()
        with contextlib.suppress(KeyError), full_precision(torch.device("cuda", 0)):
            assert settings()[:2] == (False, "highest")
            assert {*settings()[2]} <= {"none", "ieee"}
            raise KeyError
        assert settings() == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_last_of_several_threads_gives_the_settings_back():
    settings: Any = torch.backends.cuda.matmul
    begun, others = threading.Event(), threading.Event()

    def product() -> None:
        with full_precision(torch.device("cuda", 0)):
            begun.set()
            others.wait(10)

    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    thread = threading.Thread(target=product)
    try:
        with full_precision(torch.device("cuda", 0)):
            thread.start()
            begun.wait(10)
        during = settings.fp32_precision
        others.set()
        thread.join()
        assert (during, settings.fp32_precision) == ("ieee", "tf32")
    finally:
        others.set()
        settings.fp32_precision = before
