"""Products are computed in fp32, whatever the user allows for the model's own."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from powersgd_triton import Compressor
from powersgd_triton.ops import blocks
from powersgd_triton.ops.orthogonalize import orthogonalize_groups, orthogonalize_reference
from powersgd_triton.ops.ranges import reconstruct_ranges
from tests.support.checks import everything, same_bits

SHAPES = {"weight": (48, 40), "other": (48, 40), "odd": (33, 29), "bias": (7,)}
PACKAGE = Path(__file__).resolve().parents[2] / "powersgd_triton"


def averages(dtype: torch.dtype, device: torch.device, **fields: Any) -> dict[str, Tensor]:
    """Averages, a part of one, and errors after some steps."""
    compressor = Compressor(everything(3, **{"backend": "torch", **fields}), SHAPES)
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for step in range(3):
        gradients = {n: torch.randn(shape, generator=generator).to(device, dtype) for n, shape in SHAPES.items()}
        compressed = compressor.compress(gradients)
        part = torch.empty(700, dtype=dtype, device=device)
        reconstruct_ranges(compressed.backend.bucket, {"weight": (13, part)}, None)
        rows = torch.empty(800, device=device)
        reconstruct_ranges(compressed.backend.bucket, {"weight": (40, rows)}, None)
        averaged = compressor.decompress(compressed)
        assert isinstance(averaged, dict)
        found |= {f"{name} {step}": tensor for name, tensor in averaged.items()}
        found |= {f"part {step}": part, f"rows {step}": rows}
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


@pytest.mark.parametrize("allowed", ["tf32", "none", "ieee"])
def test_tf32_is_off_in_products_only(allowed: str):
    """On a CUDA device, whose settings exist without one."""
    seen = []
    settings: Any = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, allowed
    try:
        with contextlib.suppress(KeyError), blocks._full_precision(torch.device("cuda", 0)):
            seen.append(settings.fp32_precision)
            raise KeyError
        seen.append(settings.fp32_precision)
    finally:
        settings.fp32_precision = before
    assert seen == ["ieee" if allowed == "tf32" else allowed, allowed]


def test_products_are_computed_in_one_module():
    """The functions of ``ops.blocks`` and, on fp64 values, the orthogonalization compute all products."""
    names = {"mm", "bmm", "matmul", "addmm", "addmm_", "baddbmm", "baddbmm_", "einsum", "addbmm", "mv", "dot", "linear"}
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name in ("kernels", "demo") or path.name in ("blocks.py", "doctor.py"):
            continue
        tree = ast.parse(path.read_text())
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            for node in ast.walk(function):
                product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
                if product or (isinstance(node, ast.Attribute) and node.attr in names):
                    found.add(function.name)
    assert found == {"householder_qr", "_cholesky_qr"}


def test_orthogonalization_has_fp64_products_only():
    products = {"mm", "bmm", "linalg_qr", "linalg_cholesky_ex", "linalg_solve_triangular"}

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in products:
                dtypes.update(arg.dtype for arg in args if isinstance(arg, Tensor))
            return func(*args, **(kwargs or {}))

    dtypes: set[torch.dtype] = set()
    with Noting():
        for A in (torch.randn(2, 9, 3), torch.zeros(2, 9, 3)):
            orthogonalize_reference(A, keys=torch.arange(2), step=0, out=A)
            orthogonalize_groups([A], keys=[torch.arange(2)], step=0, out=[A])
    assert dtypes == {torch.float64}
