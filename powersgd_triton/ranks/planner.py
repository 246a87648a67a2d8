"""Ranks under a byte budget: how many columns each matrix gets. Numbers only, the same on every worker."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.layout import compressed_rank, matrix_bytes, matrix_shape


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """What one step's factors tell of a matrix M, averaged over W workers.

    Attributes:
        columns: ‖q̄_k‖² for each column of the averaged factor whose partner is orthonormal: the energy of Ĝ in each
            direction.
        total: mean_w ‖M_w‖².
    """

    columns: tuple[float, ...]
    total: float

    @property
    def share(self) -> float:
        """How much of ‖M‖² the factors hold."""
        return sum(self.columns) / self.total if self.total else 0.0

    @property
    def demand(self) -> float:
        """What more columns are worth: of r columns one more saves about demand / (r (r + 1)).

        With error feedback a share φ of ‖M‖² is sent in a step, so that the rest waits for about 1/φ steps. What is to
        be kept small is ‖M‖² / φ: how much waits, times how long. One more column adds to φ about what the weakest
        quarter of the columns do. 0 for a gradient of zeros, not finite where the step was not.
        """
        sent, rank = sum(self.columns), len(self.columns)
        if not sent:
            return math.nan if self.total else 0.0
        wait = self.total / sent
        weakest = sorted(self.columns)[: -(-rank // 4)]
        return sum(weakest) / len(weakest) * wait * wait * rank * rank


def budget(tensors: Mapping[str, Sequence[int]], config: PowerSGDConfig) -> float:
    """Bytes a step for tensors {name: shape}."""
    if config.bytes_per_step is not None:
        return float(config.bytes_per_step)
    assert config.compression is not None
    return 4 * sum(math.prod(shape) for shape in tensors.values()) / config.compression


def sent_bytes(tensors: Mapping[str, Sequence[int]], ranks: Mapping[str, int], config: PowerSGDConfig) -> float:
    """Bytes a step of tensors {name: shape}, of which those in ``ranks`` are compressed."""
    return sum(
        matrix_bytes(*matrix_shape(shape), ranks[name], config) if name in ranks else 4 * math.prod(shape)
        for name, shape in tensors.items()
    )


def starting_ranks(tensors: Mapping[str, Sequence[int]], config: PowerSGDConfig) -> dict[str, int]:
    """The first plan: one rank for all matrices, as large as the budget allows, and what it leaves over in turn.

    Args:
        tensors: {name: shape} of all the model's tensors.
        config: with a budget.

    Returns:
        {name: rank} of all that are compressed.

    Raises:
        ValueError: the budget is too small.
    """
    largest = largest_ranks(tensors, config)
    total = budget(tensors, config)

    def sent(rank: int) -> float:
        return sent_bytes(tensors, {name: min(rank, most) for name, most in largest.items()}, config)

    if sent(1) > total:
        exact = sent_bytes({name: shape for name, shape in tensors.items() if name not in largest}, {}, config)
        whole = 4 * sum(math.prod(shape) for shape in tensors.values())
        raise ValueError(
            f"the budget is {total:,.0f} bytes a step, but at rank 1 this model sends {sent(1):,.0f}, {exact:,.0f} of "
            f"them for tensors that are averaged exactly: expected bytes_per_step of at least that, or a compression "
            f"of at most {whole / sent(1):.1f}; a narrower wire_dtype sends less"
        )
    common = 1
    while common < max(largest.values(), default=1) and sent(common + 1) <= total:
        common += 1
    ranks = {name: min(common, most) for name, most in largest.items()}
    spare = total - sent(common)
    for name, most in largest.items():
        column = matrix_bytes(*matrix_shape(tensors[name]), 1, config)
        if ranks[name] < most and column <= spare:
            ranks[name] += 1
            spare -= column
    return ranks


def allot(
    tensors: Mapping[str, Sequence[int]], ranks: Mapping[str, int], demands: Mapping[str, float], config: PowerSGDConfig
) -> dict[str, int]:
    """The ranks with which least waits for least time, under the budget.

    Columns are given out one by one, each to the matrix that gains most by it for its bytes. What is known of a matrix
    holds near its rank, so that this grows or falls by a third (rounded, but by a column where that is more).

    Args:
        tensors: {name: shape} of all the model's tensors.
        ranks: those in force, which a matrix keeps of which nothing is known.
        demands: {name: ``Spectrum.demand``}.
        config: with a budget.

    Returns:
        {name: rank} of all that are compressed.
    """
    largest = largest_ranks(tensors, config)
    columns = {name: matrix_bytes(*matrix_shape(tensors[name]), 1, config) for name in largest}
    now = {name: min(ranks.get(name, 1), most) for name, most in largest.items()}
    known = [name for name in largest if name in demands]
    limits = {name: min(max(now[name] + 1, now[name] * 4 // 3), largest[name]) for name in known}
    # More than a third where new tensors have made it necessary.
    for least in ({name: max(1, now[name] * 2 // 3) for name in known}, dict.fromkeys(known, 1)):
        planned = now | least
        spare = budget(tensors, config) - sent_bytes(tensors, planned, config)
        if spare >= 0:
            break

    def bid(name: str) -> tuple[float, str]:
        return -demands[name] / (planned[name] * (planned[name] + 1)) / columns[name], name

    waiting = [bid(name) for name in known if planned[name] < limits[name]]
    heapq.heapify(waiting)
    while waiting:
        _, name = heapq.heappop(waiting)
        if columns[name] <= spare:
            spare -= columns[name]
            planned[name] += 1
            if planned[name] < limits[name]:
                heapq.heappush(waiting, bid(name))
    return planned


def largest_ranks(tensors: Mapping[str, Sequence[int]], config: PowerSGDConfig) -> dict[str, int]:
    """Those of matrices that are worth compressing."""
    largest = {name: compressed_rank(shape, config, name) for name, shape in tensors.items()}
    return {name: rank for name, rank in largest.items() if rank}
