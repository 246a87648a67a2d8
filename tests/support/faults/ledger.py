"""What all workers together must still owe after each step, in fp64, and how far rounding may take them from it."""

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from powersgd_triton import PowerSGDConfig
from powersgd_triton.layout.matrices import compressed_rank, matrix_size

Named = Mapping[str, Tensor]

U = 2.0**-24
UNITS: dict[Any, float] = {None: U, "bfloat16": 2.0**-8}
"""Unit roundoffs by the dtype of error buffers, which are rounded to it on every write: None for fp32."""

TINY: dict[Any, float] = {None: 2.0**-149, "bfloat16": 2.0**-133}
"""The least number of either: what an operation may lose where its result is no normal number."""

SECOND_ORDER = 1.01


class Fate(enum.Enum):
    """What becomes of a parameter's gradient in a step."""

    APPLIED = "Σ E grows by Σ G − W · Ĝ"
    CARRIED = "Σ E grows by Σ G"
    DROPPED = "Σ E stays"


class Ledger:
    """Σ_w E for every parameter. What is not compressed owes nothing, so that Σ G = W · Ĝ is asked of it.

    Rounding is bounded by the sizes of what is rounded. One applied step of a worker, with M = G + E:

        M = fl(E + G)         u ‖M‖
        E = fl(M − P̂ Qᵀ)      (r + 1) u (‖M‖ + √r ‖M‖), since ‖P̂‖ = √r and ‖Q‖ ≤ ‖M‖
        Q̄ = fl(Σ Q / W)       W u Σ‖M‖ / W, times W ‖P̂‖: W √r u Σ‖M‖
        Ĝ = fl(P̂ Q̄ᵀ)          r u √r Σ‖M‖ / W, times W

    which in sum is ``(1 + (r + 1)(1 + √r) + (W + r) √r) u Σ_w ‖M‖``, where all but the 1 counts once an iteration; the
    alternating algorithm's is the same with sides exchanged. A gradient that is taken back again costs u |M| twice,
    element by element, since it may be huge in one.

    Args:
        shapes: {parameter's name: shape}.
        workers: W.
        config: rank, and what is compressed.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], workers: int, config: PowerSGDConfig) -> None:
        self._shapes = shapes
        self._adopt(config, workers)
        sizes = {name: matrix_size(shape, config, name) for name, shape in shapes.items()}
        self._owed = {name: torch.zeros(size.rows, size.m, dtype=torch.float64) for name, size in sizes.items()}
        self._size = dict.fromkeys(shapes, 0.0)
        self._slack = dict.fromkeys(shapes, 0.0)
        self._slack_of_elements = {name: torch.zeros_like(owed) for name, owed in self._owed.items()}
        self._amplified: list[str] = []

    def enter(self, name: str, fate: Fate, given: Sequence[Tensor], average: Tensor) -> None:
        """One step of a parameter, its ``fate``, every worker's G in fp64 without loss scale, and Ĝ likewise."""
        given = [torch.where(gradient.isfinite(), gradient, 0).view_as(self._owed[name]) for gradient in given]
        norms = sum(float(gradient.norm()) for gradient in given)
        size, rank = self._size[name] + norms, self.ranks[name]
        # Two buffers are written in a step.
        unit, rounds = self._unit if rank else U, 2.0
        if fate is Fate.APPLIED:
            before, applied = self._owed[name] + sum(given), self.workers * average.view_as(self._owed[name])
            self._owed[name] = before - applied
            root = math.sqrt(rank)
            constant = 1 + self.iterations * ((rank + 1) * (1 + root) + (self.workers + rank) * max(1.0, root))
            self._slack[name] += SECOND_ORDER * (constant * U + rounds * (unit - U)) * size
            # An average is M projected on orthonormal columns, which enlarges nothing.
            excess = float(applied.norm() - before.norm() - self._slack_of_elements[name].norm())
            # Means of denormals are rounded to multiples of the smallest number.
            excess -= self.workers * TINY[None] * math.sqrt(applied.numel())
            if excess > self._slack[name] + 1e-5 * float(before.norm()):
                self._amplified.append(f"{name}: W · Ĝ is larger than Σ M by {excess:.3g}")
        elif fate is Fate.CARRIED:
            self._owed[name] += sum(given)
            self._slack[name] += SECOND_ORDER * rounds * unit * size
        else:
            self._slack[name] += SECOND_ORDER * rounds * unit * self._size[name]
            magnitude = torch.stack([gradient.abs() for gradient in given]).sum(dim=0)
            self._slack_of_elements[name] += SECOND_ORDER * rounds * unit * magnitude
        if fate is not Fate.DROPPED:
            self._size[name] = size
        operations, writes = (rank + 1) * (2 + self.workers) * self.workers, rounds * self.workers
        tiny = operations * TINY[None] + writes * (self._tiny if rank else TINY[None])
        self._slack[name] += tiny * math.sqrt(self._owed[name].numel())

    def enter_void(self, begun: Iterable[Iterable[str]], given: Sequence[Named]) -> None:
        """A step that will never be applied. What was in buckets that were begun, and compressed, is carried."""
        names = {name for bucket in begun for name in bucket}
        for name, shape in self._shapes.items():
            fate = Fate.CARRIED if name in names and self.ranks[name] else Fate.DROPPED
            self.enter(name, fate, [gradients[name] for gradients in given], torch.zeros(shape, dtype=torch.float64))

    def load(self, config: PowerSGDConfig, workers: int) -> None:
        """Every worker goes on from the mean error, as ``state_dict`` saved it, perhaps at another rank or number."""
        for name, size in self._size.items():
            # The mean is rounded in fp32, then to the buffer.
            self._slack[name] += SECOND_ORDER * (self.workers * U + UNITS[config.error_dtype]) * size
            for tensor in (self._owed[name], self._slack_of_elements[name]):
                tensor.mul_(workers / self.workers)
        self._adopt(config, workers)

    def _adopt(self, config: PowerSGDConfig, workers: int) -> None:
        self.workers, self.iterations = workers, config.iterations
        self.ranks = {name: compressed_rank(shape, config) for name, shape in self._shapes.items()}
        self._unit, self._tiny = UNITS[config.error_dtype], TINY[config.error_dtype]

    def differences(self, errors: Sequence[Named]) -> list[str]:
        """Parameters whose Σ E is not what it must be, or whose averages were too large; from here on Σ E is given.

        ``errors`` are every worker's E in fp64; zeros for what it owes nothing for."""
        found, self._amplified = self._amplified, []
        for name, owed in self._owed.items():
            matrices = [error[name].view_as(owed) for error in errors]
            total = torch.stack(matrices).sum(dim=0)
            excess = ((total - owed).abs() - self._slack_of_elements[name]).clamp(min=0)
            if not float(excess.norm()) <= self._slack[name]:
                found.append(f"{name}: Σ E is off by {float(excess.norm()):.3g}, allowed {self._slack[name]:.3g}")
            self._owed[name], self._size[name] = total, sum(float(matrix.norm()) for matrix in matrices)
            self._slack[name] = 0.0
            self._slack_of_elements[name] = torch.zeros_like(owed)
        return found
