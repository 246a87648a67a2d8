"""The reference's iteration over lists of matrices, in blocks that stay in cache, and its products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from powersgd_triton.ops.precision import full_precision

BLOCK_BYTES = {"cpu": 3 << 18}
"""Bytes of a block for each thread. Cores have a second-level cache of 1 or 2 MiB, which holds a block and more."""
DEVICE_BLOCK_BYTES = 64 << 20
FEWEST_ROWS = 8
"""Rows of a block of wide matrices, since products with fewer rows take longer."""


def blocks(rank: int, *lists: Sequence[Tensor]) -> Iterator[tuple[slice, slice, list[Tensor]]]:
    """Yield (slice of the matrices, slice of their rows, a view of this block for each list) of lists of B [n, m].

    Blocks [b, rows, m] have ``block_bytes`` in fp32. Small matrices at equal distances in memory share a block. At rank
    1 each block has one: on the CPU, batched products with one row or column take five times as long as single ones.
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
    return BLOCK_BYTES["cpu"] * torch.get_num_threads() if device.type == "cpu" else DEVICE_BLOCK_BYTES


def warm(block: Tensor) -> None:
    """Read a block on the CPU, so that a product finds it in the cache.

    Products of few columns read memory in an order in which processors do not fetch ahead, and take longer than both.
    """
    if block.device.type == "cpu" and block.shape[0] == 1:
        block.sum()


def _distance(one: Tensor, following: Tensor) -> int:
    """Return how far two matrices lie apart in one storage, or 0 if they do not, or overlap."""
    distance = int(following.storage_offset() - one.storage_offset())
    same = following.untyped_storage().data_ptr() == one.untyped_storage().data_ptr()
    return distance if same and distance >= one.numel() else 0


def _run_length(matrices: Sequence[Tensor], first: int, longest: int) -> int:
    """Return how many matrices from ``first`` on lie in one storage at equal distances without overlap."""
    length, longest = 1, min(longest, len(matrices) - first)
    distance = _distance(matrices[first], matrices[first + 1]) if longest > 1 else 0
    while distance and length < longest and _distance(*matrices[first + length - 1 : first + length + 1]) == distance:
        length += 1
    return length


def _run(matrices: Sequence[Tensor], first: int, length: int) -> Tensor:
    """Return a view [length, n, m] of a run of matrices."""
    start = matrices[first]
    if length == 1:
        return start.unsqueeze(0)
    return start.as_strided((length, *start.shape), (_distance(start, matrices[first + 1]), *start.stride()))


# All products of fp32 values are computed by the functions below, and never in TF32 or bf16: autocast does not change
# operations that write to a given tensor, and the setting that does is suspended.


def multiply(A: Tensor, B: Tensor, *, out: Tensor) -> None:
    """Compute out = A B for batches. A batch of one is computed as a plain product, which uses all threads."""
    with full_precision(out.device):
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
    with full_precision(out.device):
        if len(A) == 1:
            out[0].addmm_(A[0], B[0], alpha=alpha)
        else:
            out.baddbmm_(A, B, alpha=alpha)
