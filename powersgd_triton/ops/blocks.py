"""Batches of matrices of equal shape, wherever they lie, the blocks in which they are processed, and their products."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from powersgd_triton.ops.precision import full_precision

Matrices = Tensor | Sequence[Tensor]
"""B matrices: a tensor [B, n, m], or a list of contiguous [n, m]."""

ALL = slice(None)
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
DEVICE_BLOCK_BYTES = 64 << 20
MANY_COLUMNS = 16
"""Columns that fill registers. Libraries take several times as long for a product with few, transposed or not."""
VECTOR = 8
"""Columns of which libraries compute several at once. For a product with a rest they take up to twice as long."""
FEWEST_ROWS = 64
"""Rows of a block of wide matrices. With fewer, the bases are a large share of what a product reads."""


def dtypes_of(matrices: Matrices) -> set[torch.dtype]:
    """Return the dtypes of matrices. Gradients of a bucket may have several."""
    return {matrices.dtype} if isinstance(matrices, Tensor) else {matrix.dtype for matrix in matrices}


def dtype_of(matrices: Matrices) -> torch.dtype:
    """Return the narrowest dtype that holds all matrices."""
    return functools.reduce(torch.promote_types, dtypes_of(matrices))


def together(tensors: Sequence[Tensor], n: int, m: int) -> Matrices:
    """Return contiguous tensors as n × m matrices, one or several each: one view if they lie at equal distances."""
    first, numel = tensors[0], n * m
    if len(tensors) == 1:
        return first.view(-1, n, m)
    if any(tensor.numel() != numel for tensor in tensors):
        tensors = [matrix for tensor in tensors for matrix in tensor.view(-1, n, m).unbind()]
    itemsize, storage, places = first.itemsize, first.untyped_storage(), [tensor.data_ptr() for tensor in tensors]
    distance, end = places[1] - places[0], storage.data_ptr() + storage.nbytes()
    equal = distance >= numel * itemsize and places == list(range(places[0], places[-1] + 1, distance))
    # What lies in one storage is aligned, but may have several dtypes.
    if equal and places[-1] + numel * itemsize <= end and all(tensor.dtype == first.dtype for tensor in tensors):
        return first.as_strided((len(tensors), n, m), (distance // itemsize, m, 1))
    return [tensor.view(n, m) for tensor in tensors]


def blocks(matrices: Matrices, dtype: torch.dtype, *, once: bool = False) -> Iterator[tuple[slice, slice]]:
    """Yield (slice of the matrices, slice of their rows) of blocks that stay in the cache in ``dtype``.

    With ``once``, nothing is used twice, so one block contains all matrices, unless a block has to be copied.
    """
    first = matrices if isinstance(matrices, Tensor) else matrices[0]
    count, (n, m), device = len(matrices), first.shape[-2:], first.device
    if once and first is matrices and first.dtype == dtype:
        yield ALL, ALL
        return
    capacity = block_bytes(device) // dtype.itemsize
    each = max(1, capacity // (n * m))
    height = n if n * m <= capacity else max(FEWEST_ROWS, capacity // m)
    for i in range(0, count, each):
        for start in range(0, n, height):
            yield (ALL if each >= count else slice(i, i + each)), (ALL if height >= n else slice(start, start + height))


def block_bytes(device: torch.device) -> int:
    """Return how many bytes a block has, if FEWEST_ROWS of a matrix have no more."""
    if device.type != "cpu":
        return DEVICE_BLOCK_BYTES
    return 2 * own_cache_bytes() * torch.get_num_threads()


def own_cache_bytes() -> int:
    """Return the bytes of a core's cache of level 2, but at least 1 MiB: calls for smaller blocks take longer."""
    return max(cache_bytes(2), 1 << 20)


@functools.cache
def cache_bytes(level: int) -> int:
    """Return the bytes of a core's cache of level 2, or of the shared one of level 3, as Linux says; else 0."""
    with contextlib.suppress(OSError, ValueError):
        return int((CACHES / f"index{level}" / "size").read_text().strip().removesuffix("K")) << 10
    return 0


def part(x: Tensor, members: slice, rows: slice = ALL) -> Tensor:
    """Return x[members, rows], without a call for all of it."""
    x = x if members is ALL else x[members]
    return x if rows is ALL else x[:, rows]


def load(matrices: Matrices, members: slice, rows: slice, dtype: torch.dtype) -> Tensor:
    """Return a block [b, rows, m] in ``dtype``: a view, or a copy if the dtype differs or matrices lie apart."""
    if isinstance(matrices, Tensor):
        block = part(matrices, members, rows)
        return block if block.dtype == dtype else block.to(dtype)
    chosen = matrices[members]
    return (chosen[0][rows].unsqueeze(0) if len(chosen) == 1 else torch.stack(list(chosen))).to(dtype)


def store(block: Tensor, matrices: Matrices, members: slice, rows: slice) -> None:
    """Write a block to where ``load`` has read it, unless that is a view."""
    if isinstance(matrices, Tensor):
        place = part(matrices, members, rows)
        if place.data_ptr() != block.data_ptr():
            place.copy_(block)
        return
    places = [matrix[rows] for matrix in matrices[members]]
    if places[0].data_ptr() != block.data_ptr():
        torch._foreach_copy_(places, list(block.unbind()))


# All products of fp32 values are computed by the functions below, and never in TF32 or bf16: autocast does not change
# operations that write to a given tensor, and the setting that does is suspended. Their results have few rows and many
# columns, or inner dimensions are short: libraries take several times as long for results of few columns.


def multiply(A: Tensor, B: Tensor, *, out: Tensor) -> None:
    """Compute out = A B for batches."""
    if A.shape[-1] == 1:
        # Batched products of one column by one row take five times as long.
        torch.mul(A, B, out=out)
    else:
        with full_precision(out.device):
            torch.bmm(A, B, out=out)


def product(A: Tensor, B: Tensor) -> Tensor:
    """Return A B for batches."""
    out = torch.empty(A.shape[0], A.shape[1], B.shape[2], dtype=A.dtype, device=A.device)
    multiply(A, B, out=out)
    return out


def add_product(out: Tensor, A: Tensor, B: Tensor, *, alpha: float = 1) -> None:
    """Compute out += alpha · A B for batches."""
    if A.shape[-1] == 1:
        out.addcmul_(A, B, value=alpha)
    else:
        with full_precision(out.device):
            out.baddbmm_(A, B, alpha=alpha)


def project(block: Tensor, Q: Tensor, out: Tensor) -> None:
    """Compute out = block · Q, for a block [b, rows, m], Q [b, m, r] and out [b, rows, r]."""
    if Q.shape[-1] >= MANY_COLUMNS and Q.shape[-1] % VECTOR == 0:
        multiply(block, Q, out=out)
        return
    parts = _parts(block)
    if parts == 1:
        out.copy_(product(Q.transpose(1, 2), block.transpose(1, 2)).transpose(1, 2))
    else:
        Qt = Q.mT.unsqueeze(1).expand(-1, parts, -1, -1).flatten(0, 1)
        found = product(Qt, block.unflatten(1, (parts, -1)).flatten(0, 1).transpose(1, 2))
        out.copy_(found.mT.unflatten(0, (-1, parts)).flatten(1, 2))


def backproject(block: Tensor, P: Tensor) -> Tensor:
    """Return Pᵀ · block, [b, r, m], for a block [b, rows, m] and P [b, rows, r]."""
    parts = _parts(block)
    if parts == 1:
        return product(P.transpose(1, 2), block)
    P, block = (x.unflatten(1, (parts, -1)).flatten(0, 1) for x in (P, block))
    total: Tensor = product(P.mT, block).unflatten(0, (-1, parts)).sum(1)
    return total


def _parts(block: Tensor) -> int:
    """Return in how many parts the rows of a block are divided, since a product with few rows runs on one thread."""
    count, rows, _ = block.shape
    # For small blocks, dividing takes longer.
    several = block.device.type == "cpu" and block.nbytes > own_cache_bytes() // 2
    parts = torch.get_num_threads() // count if several else 1
    return next((k for k in range(parts, 1, -1) if rows % k == 0), 1)
