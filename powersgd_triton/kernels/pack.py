"""The messages: sums of the parts of P or Q, followed by the bypass tensors."""

import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels import table_device as tables
from powersgd_triton.kernels.configurations import NUMERICS
from powersgd_triton.kernels.launcher import ELEMENTS, run
from powersgd_triton.kernels.table import COPY_BLOCK, Pointers


@triton.jit(do_not_specialize=["G_base", "has_own", "averages", "workers"])
def _pack_kernel(
    parts, G_base: tl.int64, G_at, own, message, bypass, finite, entries, has_own, averages, workers,
    G_TYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a message: a sum of parts, or a piece of a bypass tensor, copied or averaged. Grid: blocks."""
    program = tl.program_id(0)
    source, distance, splits, target, numel, tensor = tables.pack_entry(entries, program)
    i = tl.arange(0, BLOCK)
    ok = i < numel
    if splits > 0:
        total = tl.zeros([BLOCK], tl.float32)
        # In the order of the splits, which atomics would leave to chance: all workers must get the same bits.
        for split in range(splits):
            total += tl.load(parts + source + split * distance + i, ok, 0.0)
        tl.store(message + target + i, total, ok)
        if has_own > 0:
            tl.store(own + target + i, total, ok)
    elif averages == 0:
        # Bypass tensors start anywhere: nothing is known to divide their offsets.
        G = tables.pointer_to(tables.tensor_address(G_base, G_at, tensor), G_TYPE, 1) + source
        tl.store(bypass + target + i, tl.load(G + i, ok, 0.0).to(tl.float32), ok)
    else:
        total = tl.load(bypass + target + i, ok, 0.0)
        bad = tl.where(tl.abs(total) < float("inf"), 0, 1)
        if tl.max(bad, axis=0) > 0:
            tl.store(finite, 0)
        # div_rn rounds as torch does; plain division is an approximation on GPUs.
        tl.store(bypass + target + i, tl.div_rn(total, workers + tl.zeros([BLOCK], tl.float32)), ok)
    # One program declares the step finite; kernels launched later take it back.
    if (averages == 0) & (program == 0):
        tl.store(finite, 1)


def pack_triton(
    entries: Tensor, parts: Tensor, G: Pointers, finite: Tensor, *, own: Tensor | None, message: Tensor,
    bypass: Tensor | None = None, workers: int = 0,
) -> None:  # fmt: skip
    """message = [sums of the parts | bypass tensors], own = the sums of the parts, finite = 1.

    ``entries`` is the table ``pack_P`` or ``pack_left``, and G has matrices and bypass tensors. Others are fp32, but
    ``finite`` is an int32 scalar on the device.

    With ``workers``, the bypass tensors were packed before, and are those of ``bypass`` (default: of the message),
    summed over so many workers. They become means, and ``finite`` becomes 0 if one is not finite. G is not read.
    ``pack_Q`` has the bypass tensors of the message of P.
    """
    if len(entries):
        target, flags = message if own is None else own, (int(own is not None), int(workers > 0), float(workers))
        run(
            _pack_kernel, (len(entries),), NUMERICS, parts, G.base, G.distances, target, message,
            message if bypass is None else bypass, finite, entries, *flags, G_TYPE=ELEMENTS[G.dtype], BLOCK=COPY_BLOCK,
        )  # fmt: skip
    elif not workers:
        finite.fill_(1)
