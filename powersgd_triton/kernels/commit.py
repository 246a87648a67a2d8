"""The end of a step, decided on the device: Q̄ and the next bases, or M as it was before if it was not finite."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from powersgd_triton.kernels import table_device as tables
from powersgd_triton.kernels.configurations import NUMERICS
from powersgd_triton.kernels.launcher import ELEMENTS, run
from powersgd_triton.kernels.table import COPY_BLOCK, BucketTable, Pointers
from powersgd_triton.layout.constants import HEADROOM


@triton.jit(do_not_specialize=["G_base", "M_base", "verdict", "factor_programs", "numel", "workers"])
def _commit_kernel(
    G_base: tl.int64, G_at, M_base: tl.int64, M_at, following, basis, message, finite, verdict, blocks,
    factor_programs: tl.int64, numel: tl.int64, workers,
    G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, ADVANCE: tl.constexpr, FEEDBACK: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """message = Q̄ or NaN; basis ← following, or M ← M − finite elements of G. Grid: blocks of factors, then of M."""
    program = tl.program_id(0)
    good = tl.load(finite) > 0
    i = tl.arange(0, BLOCK)
    if program < factor_programs:
        at = program.to(tl.int64) * BLOCK + i
        ok = at < numel
        mean = tl.div_rn(tl.load(message + at, ok, 0.0), workers + tl.zeros([BLOCK], tl.float32))
        tl.store(message + at, tl.where(good, mean, float("nan")), ok)
        if ADVANCE and good:
            tl.store(basis + at, tl.load(following + at, ok, 0.0), ok)
    elif FEEDBACK and not good:
        # After a finite step these programs have nothing to do; the host cannot know, so they are launched anyway.
        matrix, first, end = tables.rollback_block(blocks, program - factor_programs)
        G = tables.pointer_to(tables.tensor_address(G_base, G_at, matrix), G_TYPE, 1)
        M = tables.pointer_to(tables.tensor_address(M_base, M_at, matrix), M_TYPE, 1)
        for start in range(first, end, BLOCK):
            ok = start + i < end
            gradient = tl.load(G + start + i, ok, 0.0).to(tl.float32)
            value = tl.load(M + start + i, ok, 0.0).to(tl.float32)
            # Compensating added the same elements: those that are finite.
            value -= tl.where(tl.abs(gradient) < float("inf"), gradient, 0.0)
            # M itself overflowed when the gradient was added: what it had is lost.
            value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
            # Products of larger errors could make every later step overflow.
            value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
            tl.store(M + start + i, value.to(M.dtype.element_ty), ok)
    if program == 0 and not good:
        tl.store(verdict, 0.0)


def commit_triton(
    table: BucketTable, G: Pointers, M: Pointers | None, following: Tensor | None, workers: int, finite: Tensor, *,
    basis: Tensor, message: Tensor, verdict: Tensor,
) -> None:  # fmt: skip
    """If finite: message ← message / workers, basis ← following. Else: message ← NaN, M ← M − G, verdict ← 0.

    ``M`` is None without error feedback, and ``following`` if the bases stay. These, ``basis`` and ``message`` are
    factors of all matrices, fp32, flat. ``finite``, int32, and ``verdict`` are scalars on the device.
    """
    numel, feedback = message.numel(), M is not None and bool(table.matrices)
    errors = G if M is None else M
    factor_programs = -(-numel // COPY_BLOCK)
    programs = factor_programs + (len(table.rollback) if feedback else 0)
    bases = message if following is None else following
    arguments = bases, basis, message, finite, verdict, table.rollback, factor_programs, numel, float(workers)
    run(
        _commit_kernel, (max(1, programs),), NUMERICS, G.base, G.distances, errors.base, errors.distances, *arguments,
        G_TYPE=ELEMENTS[G.dtype], M_TYPE=ELEMENTS[errors.dtype], ADVANCE=following is not None, FEEDBACK=feedback,
        LARGEST=HEADROOM * torch.finfo(torch.float32).max, BLOCK=COPY_BLOCK,
    )  # fmt: skip
