"""The messages: sums of the parts of P or Q, followed by the bypass tensors."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels.configurations import NUMERICS
from powersgd_triton.kernels.table import COPY_BLOCK, BucketTable, Pointers
from powersgd_triton.kernels.table_device import ELEMENTS, pack_entry, tensor_start


@triton.jit(do_not_specialize=["workers"])
def _pack_kernel(
    parts, G_at, own, message, bypass, finite, entries, workers,
    G_TYPE: tl.constexpr, COPY: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a message: a sum of parts, or a piece of a bypass tensor, copied or averaged. Grid: blocks."""
    program = tl.program_id(0)
    source, distance, splits, target, numel, tensor = pack_entry(entries, program)
    i = tl.arange(0, BLOCK)
    ok = i < numel
    if splits > 0:
        total = tl.zeros([BLOCK], tl.float32)
        # In the order of the splits, which atomics would leave to chance: all workers must get the same bits.
        for split in range(splits):
            total += tl.load(parts + source + split * distance + i, ok, 0.0)
        tl.store(message + target + i, total, ok)
        if OWN:
            tl.store(own + target + i, total, ok)
    elif COPY:
        # Bypass tensors start anywhere: nothing is known to divide their offsets.
        G = tensor_start(G_at, tensor, G_TYPE, 1) + source
        tl.store(bypass + target + i, tl.load(G + i, ok, 0.0).to(tl.float32), ok)
    else:
        total = tl.load(bypass + target + i, ok, 0.0)
        bad = tl.where(tl.abs(total) < float("inf"), 0, 1)
        if tl.max(bad, axis=0) > 0:
            tl.store(finite, 0)
        # div_rn rounds as torch does; plain division is an approximation on GPUs.
        tl.store(bypass + target + i, tl.div_rn(total, workers + tl.zeros([BLOCK], tl.float32)), ok)
    # One program declares the step finite; kernels launched later take it back.
    if COPY and program == 0:
        tl.store(finite, 1)


def pack_triton(
    entries: Tensor, parts: Tensor, G: Pointers, finite: Tensor, *, own: Tensor | None, message: Tensor
) -> None:
    """message = [sum of the parts | bypass tensors], own = the sum of the parts, finite = 1.

    Args:
        entries: ``pack_P`` or ``pack_left`` of the bucket's table.
        parts: of P or Q, fp32.
        G: matrices and bypass tensors.
        finite: int32 scalar on the device.
        own, message: fp32.
    """
    if len(entries):
        _pack_kernel[(len(entries),)](
            parts,
            G.addresses,
            message if own is None else own,
            message,
            message,
            finite,
            entries,
            1.0,
            G_TYPE=ELEMENTS[G.dtype],
            COPY=True,
            OWN=own is not None,
            BLOCK=COPY_BLOCK,
            **NUMERICS,
        )
    else:
        finite.fill_(1)


def pack_and_average_triton(
    table: BucketTable, parts: Tensor, first: Tensor, workers: int, finite: Tensor, *, own: Tensor, message: Tensor
) -> None:
    """message = own = the sum of the parts of Q; the bypass tensors in the first message become means.

    Args:
        table: the bucket's.
        parts: of Q, fp32.
        first: the first message, summed over the workers.
        workers: their number.
        finite: int32 scalar on the device, becomes 0 where a bypass tensor's sum is not finite.
        own, message: fp32.
    """
    _average(table.pack_Q, len(table.pack_Q), parts, first, workers, finite, own, message)


def average_triton(table: BucketTable, entries: Tensor, message: Tensor, workers: int, finite: Tensor) -> None:
    """The bypass tensors in a message become means.

    Args:
        table, message, workers, finite: as for ``pack_and_average_triton``.
        entries: as for ``pack_triton``.
    """
    _average(entries, table.bypass_programs, message, message, workers, finite, message, message)


def _average(
    entries: Tensor,
    programs: int,
    parts: Tensor,
    bypass: Tensor,
    workers: int,
    finite: Tensor,
    own: Tensor,
    message: Tensor,
) -> None:
    if programs:
        _pack_kernel[(programs,)](
            parts,
            entries,
            own,
            message,
            bypass,
            finite,
            entries,
            float(workers),
            # Nothing is read through addresses.
            G_TYPE=ELEMENTS[message.dtype],
            COPY=False,
            OWN=True,
            BLOCK=COPY_BLOCK,
            **NUMERICS,
        )
