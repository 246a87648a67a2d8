"""Plan ranks under a byte budget. Plain numbers only, so that all workers compute the same plan."""

import dataclasses
import functools
import heapq
import math
from collections.abc import Mapping

from powersgd_triton.comm.exchange import SMALL_PART
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.matrices import Tensors, compressed_rank, factors_sent, tensor_bytes, wire_format
from powersgd_triton.layout.wire_format import ALIGNMENT


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


def sent_bytes(tensors: Tensors, ranks: Mapping[str, int], config: PowerSGDConfig) -> float:
    """Return the bytes that a step sends for tensors {name: shape}, of which those in ``ranks`` are compressed."""
    return sum(tensor_bytes(shape, ranks.get(name, 0), config, name) for name, shape in tensors.items())


def mean_rank(tensors: Tensors, ranks: Mapping[str, int]) -> float:
    """Return the mean rank of an element of the compressed matrices."""
    numels = {name: math.prod(tensors[name]) for name in ranks}
    return sum(rank * numels[name] for name, rank in ranks.items()) / max(1, sum(numels.values()))


@dataclasses.dataclass(frozen=True)
class Planner:
    """Finds ranks with which a step keeps to its budget. A plan is {name: rank} of all compressed matrices.

    With more than two ``workers`` it leaves room for the most that cutting messages into parts may add. ``buckets`` is
    the number of buckets of a step; None if they are joined.
    """

    tensors: Tensors
    config: PowerSGDConfig
    workers: int = 1
    buckets: int | None = None

    @functools.cached_property
    def largest(self) -> dict[str, int]:
        """{name: largest rank} of the matrices that are worth compressing."""
        found = {name: compressed_rank(shape, self.config, name) for name, shape in self.tensors.items()}
        return {name: rank for name, rank in found.items() if rank}

    @functools.cached_property
    def _columns(self) -> dict[str, float]:
        """{name: bytes of a column}."""
        return {name: tensor_bytes(self.tensors[name], 1, self.config, name) for name in self.largest}

    def fits(self, ranks: Mapping[str, int]) -> bool:
        """Return whether a step with these ranks keeps to the budget."""
        return self._sent(ranks) <= budget(self.tensors, self.config)

    def starting_ranks(self) -> dict[str, int]:
        """Return the first plan: the largest common rank that the budget allows. ValueError: it is too small.

        The remaining bytes give one more column each to the first matrices that they suffice for.
        """
        if not self.fits(self._limited(1)):
            exact = {name: shape for name, shape in self.tensors.items() if name not in self.largest}
            least, whole = self._sent(self._limited(1)), 4 * sum(map(math.prod, self.tensors.values()))
            raise ValueError(
                f"the budget is {budget(self.tensors, self.config):,.0f} bytes a step, but at rank 1 this model sends "
                f"{math.ceil(least):,}, {sent_bytes(exact, {}, self.config):,.0f} of them for tensors without factors; "
                f"expected bytes_per_step of at least that, or a compression of at most "
                f"{math.floor(10 * whole / least) / 10:.1f}; a narrower wire_dtype, or bypass='int8', sends fewer bytes"
            )
        common = 1
        while common < max(self.largest.values(), default=1) and self.fits(self._limited(common + 1)):
            common += 1
        ranks = self._limited(common)
        # Cuts count as if all matrices had the highest rank.
        spare = self._spare(ranks, common + 1)
        for name, most in self.largest.items():
            if ranks[name] < most and self._columns[name] <= spare:
                ranks[name] += 1
                spare -= self._columns[name]
        return ranks

    def allot(self, ranks: Mapping[str, int], demands: Mapping[str, float]) -> dict[str, int]:
        """Return the plan that minimizes the sum of ‖M‖² / φ, given {name: ``Spectrum.demand``} of measured matrices.

        Columns are allotted one by one, each to the matrix that gains the most for its bytes. Measurements of a matrix
        are valid near its current rank only, so a plan changes a rank by at most a third (rounded), or by one column if
        that is more. A matrix without a measurement keeps its rank.
        """
        now = {name: min(ranks.get(name, 1), most) for name, most in self.largest.items()}
        known = [name for name in self.largest if name in demands]
        limits = {name: min(max(now[name] + 1, now[name] * 4 // 3), self.largest[name]) for name in known}
        # New tensors may exceed the budget; then ranks may fall by more than a third.
        for least in ({name: max(1, now[name] * 2 // 3) for name in known}, dict.fromkeys(known, 1)):
            planned = now | least
            spare = self._spare(planned, max([*limits.values(), *planned.values()], default=0))
            if spare >= 0:
                break

        def bid(name: str) -> tuple[float, str]:
            return -demands[name] / (planned[name] * (planned[name] + 1)) / self._columns[name], name

        waiting = [bid(name) for name in known if planned[name] < limits[name]]
        heapq.heapify(waiting)
        while waiting:
            _, name = heapq.heappop(waiting)
            if self._columns[name] <= spare:
                spare -= self._columns[name]
                planned[name] += 1
                if planned[name] < limits[name]:
                    heapq.heappush(waiting, bid(name))
        return planned

    def _limited(self, rank: int) -> dict[str, int]:
        return {name: min(rank, most) for name, most in self.largest.items()}

    def _sent(self, ranks: Mapping[str, int]) -> float:
        whole = sent_bytes(self.tensors, ranks, self.config)
        return whole + self._cut_bytes(whole, max(ranks.values(), default=0))

    def _spare(self, ranks: Mapping[str, int], highest: int) -> float:
        """Return the bytes that a plan leaves if no rank rises above the highest."""
        total = budget(self.tensors, self.config)
        return total - sent_bytes(self.tensors, ranks, self.config) - self._cut_bytes(total, highest)

    def _cut_bytes(self, whole: float, rank: int) -> float:
        """Return the most bytes that cuts add to messages: scales, rows that do not fit a part, and alignment."""
        width = wire_format(self.config)
        if width.bits == 32 or self.workers < 3 or not rank:
            return 0.0
        messages = self.workers * 2 * factors_sent(self.config)
        # Buckets are joined until parts have ``SMALL_PART`` bytes, which limits the number of cuts.
        cuts = messages * self.buckets if self.buckets is not None else messages + whole / SMALL_PART
        return cuts * (width.factor_bytes(2, rank) + ALIGNMENT)
