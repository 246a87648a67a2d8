"""Iteration of the reference over lists of matrices: in blocks that stay in cache, without stacking or copying."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = {"cpu": 3 << 18}
"""Bytes of a block for each thread. Cores have a second-level cache of 1 or 2 MiB, which holds a block and more."""
DEVICE_BLOCK_BYTES = 64 << 20
FEWEST_ROWS = 8
"""Rows of a block of wide matrices, since products with fewer rows take longer."""


def blocks(rank: int, *lists: Sequence[Tensor]) -> Iterator[tuple[slice, slice, list[Tensor]]]:
    """Iterate over lists of B matrices [n, m] together, in blocks [b, rows, m] of ``block_bytes`` in fp32.

    Yields a slice of the matrices, a slice of the rows, and a view of the block for each list. Small matrices share a
    block if they lie at equal distances in memory, so nothing is stacked or copied. At rank 1 each block has one
    matrix: on the CPU, batched products with one row or column take five times as long as single products.
    """
    n, m = lists[0][0].shape
    capacity = block_bytes(lists[0][0].device) // 4
    count = len(lists[0])
    if n * m > capacity // 2:
        height = max(FEWEST_ROWS, capacity // m)
        for i in range(count):
            for start in range(0, n, height):
                rows = slice(start, min(n, start + height))
                yield slice(i, i + 1), rows, [matrices[i][rows].unsqueeze(0) for matrices in lists]
        return
    longest = capacity // max(1, n * m) if rank > 1 else 1
    i = 0
    while i < count:
        b = min(_run_length(matrices, i, longest) for matrices in lists)
        yield slice(i, i + b), slice(0, n), [_run(matrices, i, b) for matrices in lists]
        i += b


def block_bytes(device: torch.device) -> int:
    """Return how many bytes a block has in fp32. It has more only if FEWEST_ROWS of a matrix have more."""
    if device.type not in BLOCK_BYTES:
        return DEVICE_BLOCK_BYTES
    return BLOCK_BYTES[device.type] * torch.get_num_threads()


def warm(block: Tensor) -> None:
    """Read a block, so that a product finds it in the cache.

    Products of a few columns read memory in an order in which processors do not fetch ahead. On the CPU, a sum and the
    product together take less time than the product alone.
    """
    if block.device.type == "cpu" and block.shape[0] == 1:
        block.sum()


def _run_length(matrices: Sequence[Tensor], first: int, longest: int) -> int:
    """Return how many matrices from ``first`` on lie in one storage at equal distances without overlap."""
    start = matrices[first]
    distance = None
    length = 1
    while length < longest and first + length < len(matrices):
        last, following = matrices[first + length - 1], matrices[first + length]
        step = following.storage_offset() - last.storage_offset()
        same = following.untyped_storage().data_ptr() == start.untyped_storage().data_ptr()
        if not same or step < start.numel() or (distance is not None and step != distance):
            break
        distance = step
        length += 1
    return length


def _run(matrices: Sequence[Tensor], first: int, length: int) -> Tensor:
    """Return a view [length, n, m] of a run of matrices."""
    start = matrices[first]
    if length == 1:
        return start.unsqueeze(0)
    distance = matrices[first + 1].storage_offset() - start.storage_offset()
    return start.as_strided((length, *start.shape), (distance, *start.stride()))


# All products of fp32 values are computed by the functions below, and never in TF32 or bf16: autocast does not change
# operations that write to a given tensor, and the setting that does is suspended.


def multiply(A: Tensor, B: Tensor, *, out: Tensor) -> None:
    """Compute out = A B for batches. A batch of one is computed as a plain product, which uses all threads."""
    with _full_precision(out.device):
        if len(A) == 1:
            torch.mm(A[0], B[0], out=out[0])
        else:
            torch.bmm(A, B, out=out)


def product(A: Tensor, B: Tensor) -> Tensor:
    """Return A B for batches."""
    out = A.new_empty(len(A), A.shape[1], B.shape[2])
    multiply(A, B, out=out)
    return out


def add_product(out: Tensor, A: Tensor, B: Tensor, *, alpha: float = 1) -> None:
    """Compute out += alpha · A B for batches. A batch of one is a plain product, which uses all threads."""
    with _full_precision(out.device):
        if len(A) == 1:
            out[0].addmm_(A[0], B[0], alpha=alpha)
        else:
            out.baddbmm_(A, B, alpha=alpha)


_AS_IT_IS = contextlib.nullcontext()


def _full_precision(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Compute products of fp32 values in fp32 within this block, whatever ``torch.backends`` allows.

    Factors in TF32 would not be orthonormal, and errors would not contain what was not sent.
    """
    backends: Any = torch.backends
    settings = (backends.cuda if device.type == "cuda" else backends.mkldnn).matmul
    # A generator for each product would take a small model's step a few percent of its time.
    return _AS_IT_IS if settings.fp32_precision in ("none", "ieee") else _suspended(settings)


@contextlib.contextmanager
def _suspended(settings: Any) -> Iterator[None]:
    allowed = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = allowed
