"""Ranks under a byte budget: how many columns each matrix gets. Numbers only, the same on every worker."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import os
from collections.abc import Mapping, Sequence

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout import compressed_rank, matrix_bytes, matrix_shape

POWER = float(os.environ.get("POWER", "0.5"))


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

    def usable(self) -> bool:
        """Whether it is of a step that was finite, and not of a zero gradient."""
        return math.isfinite(self.total) and all(map(math.isfinite, self.columns)) and sum(self.columns) > 0

    def energies(self, columns: int) -> list[float]:
        """Energy in the first so many directions, largest first.

        Behind those that were measured it is taken to decay geometrically, such that all of it makes what the measured
        ones have left over.
        """
        measured = sorted(self.columns, reverse=True)[:columns]
        rest = max(0.0, self.total - sum(self.columns))
        last = measured[-1]
        ratio = rest / (rest + last) if rest else 0.0
        while len(measured) < columns:
            last *= ratio
            measured.append(last)
        return measured


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
    largest = _largest_ranks(tensors, config)
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
    tensors: Mapping[str, Sequence[int]],
    ranks: Mapping[str, int],
    spectra: Mapping[str, Spectrum],
    config: PowerSGDConfig,
) -> dict[str, int]:
    """The ranks that send most, under the budget.

    Columns are given out one by one, each to the matrix that gains most by it for its bytes.

    Args:
        tensors: {name: shape} of all the model's tensors.
        ranks: those in force, which a matrix without a usable spectrum keeps.
        spectra: what is known.
        config: with a budget.

    Returns:
        {name: rank} of all that are compressed.
    """
    largest = _largest_ranks(tensors, config)
    measured = {name: spectra[name] for name in largest if name in spectra and spectra[name].usable()}
    planned = {name: 1 if name in measured else min(ranks.get(name, 1), most) for name, most in largest.items()}
    spare = budget(tensors, config) - sent_bytes(tensors, planned, config)
    gains: dict[str, list[float]] = {}
    waiting: list[tuple[float, str]] = []
    for name, spectrum in measured.items():
        n, m = matrix_shape(tensors[name])
        flow = sum(spectrum.columns)
        weight = flow * (n * m / flow) ** POWER / matrix_bytes(n, m, 1, config)
        held = [spectrum.total / sent for sent in itertools.accumulate(spectrum.energies(largest[name]))]
        gains[name] = [weight * (after - before) for before, after in itertools.pairwise(held)]
        waiting += [(gain, name) for gain in gains[name][:1]]
    heapq.heapify(waiting)
    while waiting:
        _, name = heapq.heappop(waiting)
        column = matrix_bytes(*matrix_shape(tensors[name]), 1, config)
        if column > spare:
            continue
        spare -= column
        planned[name] += 1
        if planned[name] < largest[name]:
            heapq.heappush(waiting, (gains[name][planned[name] - 1], name))
    return planned


def _largest_ranks(tensors: Mapping[str, Sequence[int]], config: PowerSGDConfig) -> dict[str, int]:
    """Those of matrices that are worth compressing."""
    largest = {name: compressed_rank(shape, config, name) for name, shape in tensors.items()}
    return {name: rank for name, rank in largest.items() if rank}
