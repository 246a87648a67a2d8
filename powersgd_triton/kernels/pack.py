"""The messages: sums of the parts of P or Q, and the bypass tensors in the same buffer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.table import COPY_BLOCK, BucketTable, Pointers


@triton.jit(do_not_specialize=["workers"])
def _pack_kernel(
    parts, G, G_offsets, first, second, Q, finite, entries, workers, P_SIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One block of a message: a sum of parts in their order, or a bypass tensor. Grid: blocks."""
    program = tl.program_id(0)
    entry = entries + program * 6
    source = tl.load(entry)
    distance = tl.load(entry + 1)
    splits = tl.load(entry + 2)
    target = tl.load(entry + 3)
    i = tl.arange(0, BLOCK)
    ok = i < tl.load(entry + 4)
    if splits > 0:
        total = tl.zeros([BLOCK], tl.float32)
        for split in range(splits):
            total += tl.load(parts + source + split * distance + i, ok, 0.0)
        if P_SIDE:
            tl.store(first + target + i, total, ok)
        else:
            tl.store(Q + target + i, total, ok)
            tl.store(second + target + i, total, ok)
    elif P_SIDE:
        at = tl.load(G_offsets + tl.load(entry + 5)) + source
        tl.store(first + target + i, tl.load(G + at + i, ok, 0.0).to(tl.float32), ok)
    else:
        total = tl.load(first + target + i, ok, 0.0)
        bad = tl.where(tl.abs(total) < float("inf"), 0, 1)
        if tl.max(bad, axis=0) > 0:
            tl.store(finite, 0)
        tl.store(first + target + i, tl.div_rn(total, workers + tl.zeros([BLOCK], tl.float32)), ok)
    if P_SIDE and program == 0:
        tl.store(finite, 1)


def pack_first_triton(table: BucketTable, parts: Tensor, G: Pointers, finite: Tensor, *, out: Tensor) -> None:
    """out = [P | bypass tensors], P the sum of its parts; finite = 1.

    Args:
        table: the bucket's.
        parts: from ``compensate_project_triton``.
        G: matrices and bypass tensors.
        finite: int32 scalar on the device.
        out: the first message, fp32.
    """
    if len(table.pack_P):
        _pack_kernel[(len(table.pack_P),)](
            parts, G.anchor, G.offsets, out, out, out, finite, table.pack_P, 1.0, P_SIDE=True, BLOCK=COPY_BLOCK
        )


def pack_second_triton(
    table: BucketTable, parts: Tensor, message: Tensor, workers: int, finite: Tensor, *, Q: Tensor, out: Tensor
) -> None:
    """Q = out = the sum of its parts. The bypass tensors in the first message become means.

    Args:
        table: the bucket's.
        parts: from ``backproject_triton``.
        message: the first message, summed over the workers.
        workers: their number.
        finite: int32 scalar on the device, becomes 0 where a bypass tensor's sum is not finite.
        Q: this worker's own factors, fp32, flat.
        out: the second message, fp32.
    """
    if len(table.pack_Q):
        _pack_kernel[(len(table.pack_Q),)](
            parts,
            message,
            table.records,
            message,
            out,
            Q,
            finite,
            table.pack_Q,
            float(workers),
            P_SIDE=False,
            BLOCK=COPY_BLOCK,
        )
