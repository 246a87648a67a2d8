"""Plan ranks under a byte budget. Plain numbers only, so that all workers compute the same plan."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

from powersgd_triton.comm.exchange import SMALL_PART
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.layout import compressed_rank, factors_sent, matrix_bytes, matrix_shape, wire_format
from powersgd_triton.layout.wire_format import ALIGNMENT

Tensors = Mapping[str, Sequence[int]]
"""{name: shape}."""


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """Energies of a matrix in one step, averaged over W workers.

    Attributes:
        columns: Energy of Ĝ in each direction: ‖q̄_k‖² of the averaged factor whose partner is orthonormal.
        total: mean_w ‖M_w‖².
    """

    columns: tuple[float, ...]
    total: float

    @property
    def share(self) -> float:
        """Share of ‖M‖² that the factors contain."""
        return sum(self.columns) / self.total if self.total else 0.0

    @property
    def demand(self) -> float:
        """Value of more columns: with r columns, one more reduces ‖M‖² / φ by about demand / (r (r + 1)).

        With error feedback, a step sends a share φ of ‖M‖², and the rest waits for about 1/φ steps. The planner
        minimizes ‖M‖² / φ, the energy that waits times the number of steps that it waits. One more column increases φ
        by about as much as the average of the weakest quarter of the columns. The demand of a zero gradient is 0; that
        of a step that was not finite is not finite.
        """
        sent, rank = sum(self.columns), len(self.columns)
        if not sent:
            return math.nan if self.total else 0.0
        wait = self.total / sent
        weakest = sorted(self.columns)[: -(-rank // 4)]
        return sum(weakest) / len(weakest) * wait * wait * rank * rank


def budget(tensors: Tensors, config: PowerSGDConfig) -> float:
    """Return the bytes that a step may send for tensors {name: shape}."""
    if config.bytes_per_step is not None:
        return float(config.bytes_per_step)
    assert isinstance(config.compression, (int, float))
    return 4 * sum(math.prod(shape) for shape in tensors.values()) / config.compression


def sent_bytes(
    tensors: Tensors, ranks: Mapping[str, int], config: PowerSGDConfig, workers: int = 1, buckets: int | None = None
) -> float:
    """Return the bytes that a step sends for tensors {name: shape}, of which those in ``ranks`` are compressed.

    With more than two ``workers`` this includes the most that cutting the messages into parts may add. ``buckets`` is
    the number of buckets of a step; None if they are joined.
    """
    whole = sum(
        matrix_bytes(*matrix_shape(shape), ranks[name], config) if name in ranks else 4 * math.prod(shape)
        for name, shape in tensors.items()
    )
    return whole + _cut_bytes(whole, max(ranks.values(), default=0), config, workers, buckets)


def _cut_bytes(whole: float, rank: int, config: PowerSGDConfig, workers: int, buckets: int | None) -> float:
    """Return the most bytes that cuts add to messages: scales, rows that do not fit a part, and alignment."""
    width = wire_format(config)
    if width.bits == 32 or workers < 3 or not rank:
        return 0.0
    messages = workers * 2 * factors_sent(config)
    # Buckets are joined until parts have ``SMALL_PART`` bytes, which limits the number of cuts.
    cuts = messages * buckets if buckets is not None else messages + whole / SMALL_PART
    return cuts * (width.factor_bytes(2, rank) + ALIGNMENT)


def starting_ranks(
    tensors: Tensors, config: PowerSGDConfig, workers: int = 1, buckets: int | None = None
) -> dict[str, int]:
    """Return the first plan, {name: rank} of all compressed matrices: the largest common rank that the budget allows.

    The remaining bytes give one more column each to the first matrices that they suffice for. The arguments are those
    of ``sent_bytes``.

    Raises:
        ValueError: The budget is too small.
    """
    largest = largest_ranks(tensors, config)
    total = budget(tensors, config)

    def sent(rank: int) -> float:
        return sent_bytes(tensors, {name: min(rank, most) for name, most in largest.items()}, config, workers, buckets)

    if sent(1) > total:
        exact = sent_bytes({name: shape for name, shape in tensors.items() if name not in largest}, {}, config)
        whole = 4 * sum(math.prod(shape) for shape in tensors.values())
        raise ValueError(
            f"the budget is {total:,.0f} bytes a step, but at rank 1 this model sends {sent(1):,.0f}, {exact:,.0f} of "
            f"them for tensors that are averaged exactly; expected bytes_per_step of at least that, or a compression "
            f"of at most {whole / sent(1):.1f}; a narrower wire_dtype sends fewer bytes"
        )
    common = 1
    while common < max(largest.values(), default=1) and sent(common + 1) <= total:
        common += 1
    ranks = {name: min(common, most) for name, most in largest.items()}
    # Cuts count as if all matrices had the highest rank.
    spare = total - sent_bytes(tensors, ranks, config) - _cut_bytes(total, common + 1, config, workers, buckets)
    for name, most in largest.items():
        column = matrix_bytes(*matrix_shape(tensors[name]), 1, config)
        if ranks[name] < most and column <= spare:
            ranks[name] += 1
            spare -= column
    return ranks


def allot(
    tensors: Tensors,
    ranks: Mapping[str, int],
    demands: Mapping[str, float],
    config: PowerSGDConfig,
    workers: int = 1,
    buckets: int | None = None,
) -> dict[str, int]:
    """Return {name: rank} of all compressed matrices: the ranks that minimize the sum of ‖M‖² / φ under the budget.

    Columns are allotted one by one, each to the matrix that gains the most for its bytes. Measurements of a matrix are
    valid near its current rank only, so a plan changes a rank by at most a third (rounded), or by one column if that is
    more.

    Args:
        ranks: Current ranks. A matrix without a measurement keeps its rank.
        demands: {name: ``Spectrum.demand``} of the measured matrices.
        tensors, config, workers, buckets: As in ``sent_bytes``.
    """
    largest = largest_ranks(tensors, config)
    columns = {name: matrix_bytes(*matrix_shape(tensors[name]), 1, config) for name in largest}
    now = {name: min(ranks.get(name, 1), most) for name, most in largest.items()}
    known = [name for name in largest if name in demands]
    limits = {name: min(max(now[name] + 1, now[name] * 4 // 3), largest[name]) for name in known}
    # New tensors may exceed the budget; then ranks may fall by more than a third.
    for least in ({name: max(1, now[name] * 2 // 3) for name in known}, dict.fromkeys(known, 1)):
        planned = now | least
        total, highest = budget(tensors, config), max([*limits.values(), *planned.values()], default=0)
        spare = total - sent_bytes(tensors, planned, config) - _cut_bytes(total, highest, config, workers, buckets)
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


def largest_ranks(tensors: Tensors, config: PowerSGDConfig) -> dict[str, int]:
    """Return {name: largest rank} of the matrices that are worth compressing."""
    largest = {name: compressed_rank(shape, config, name) for name, shape in tensors.items()}
    return {name: rank for name, rank in largest.items() if rank}
