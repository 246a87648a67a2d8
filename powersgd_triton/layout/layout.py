"""Which tensors of a flat buffer are compressed, as which matrices, and where everything lies. Integers only."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.wire_format import FORMATS, WireFormat

LARGEST_PLANNED_RANK = 256
"""What the Triton kernels can do."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """View of a tensor as a matrix: dim 0 × the rest. Tensors of fewer than two dimensions are one row."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def compressed_rank(shape: Sequence[int], config: PowerSGDConfig, name: str = "") -> int:
    """Rank r = min(rank, n, m) if compressing is worth it, else 0 (bypass).

    Worth it means that the bytes of its factors in a step, scales included, times min_compression_rate are fewer than
    the 4 n m bytes that it has as an fp32 tensor. Without ``wire_dtype`` that is (n + m) · r · min_compression_rate <
    n · m for each time that both factors travel. Where ranks are planned this is the largest one that is worth it.

    Args:
        shape: the tensor's.
        config: with the rank.
        name: the tensor's, for a configuration whose rank is a function.

    Raises:
        TypeError, ValueError: that function's result is not a rank.
    """
    if len(shape) < 2:
        return 0
    n, m = matrix_shape(shape)
    if config.planned:
        return _largest_rank(n, m, config)
    wanted = config.rank
    if callable(wanted):
        wanted = wanted(name, tuple(shape))
        if isinstance(wanted, bool) or not isinstance(wanted, int):
            raise TypeError(f"the rank of {name!r}, {tuple(shape)}, must be an int; the function gave {wanted!r}")
        if wanted < 0:
            raise ValueError(f"the rank of {name!r}, {tuple(shape)}, must be at least 0; the function gave {wanted}")
    assert wanted is not None
    r = min(wanted, n, m)
    return r if _is_worth_it(n, m, r, config) else 0


def sizes(shapes: Mapping[str, Sequence[int]], config: PowerSGDConfig) -> dict[str, tuple[int, int, int]]:
    """{name: (n, m, rank)} of tensors {name: shape}; rank 0 where a tensor is not compressed."""
    return {name: (*matrix_shape(shape), compressed_rank(shape, config, name)) for name, shape in shapes.items()}


def _largest_rank(n: int, m: int, config: PowerSGDConfig) -> int:
    """Bisection, since a factor's bytes grow with its rank."""
    low, high = 0, min(n, m, LARGEST_PLANNED_RANK)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _is_worth_it(n, m, middle, config) else (low, middle - 1)
    return low


def _is_worth_it(n: int, m: int, r: int, config: PowerSGDConfig) -> bool:
    return matrix_bytes(n, m, r, config) * config.min_compression_rate < 4 * n * m


def matrix_bytes(n: int, m: int, rank: int, config: PowerSGDConfig) -> float:
    """Bytes of a matrix's factors in a step, scales included, on average."""
    width = wire_format(config)
    return (width.factor_bytes(n, rank) + width.factor_bytes(m, rank)) * factors_sent(config)


def wire_format(config: PowerSGDConfig) -> WireFormat:
    """How factors are written into messages."""
    return FORMATS[str(config.wire_dtype or "float32")]


def factors_sent(config: PowerSGDConfig) -> float:
    """How often a step sends both factors of a matrix, on average."""
    return config.iterations * (0.5 if config.algorithm == "alternating" else 1.0)


def products(config: PowerSGDConfig, iteration: int, repetition: int) -> tuple[bool, bool]:
    """(whether P = M Q, whether Q = Mᵀ P̂ is computed and sent) in a repetition of a step.

    Both in the standard algorithm. In the alternating one they take turns, from the first compressed step on.
    """
    if config.algorithm == "standard":
        return True, True
    turn = (iteration - config.start_iter) * config.iterations + repetition
    return turn % 2 == 1, turn % 2 == 0


@dataclasses.dataclass(frozen=True)
class Segment:
    """One tensor in the flat buffer: elements [offset, offset + n·m). ``rank`` is 0 where it is a bypass tensor."""

    name: str
    shape: tuple[int, ...]
    offset: int
    rank: int

    @property
    def n(self) -> int:
        return matrix_shape(self.shape)[0]

    @property
    def m(self) -> int:
        return matrix_shape(self.shape)[1]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class ShapeGroup:
    """Matrices of one n × m and rank, whose factors lie side by side: P as [B, n, r], Q as [B, m, r].

    ``p_offset`` and ``q_offset`` are in elements, from the start of the layout's P and Q factors.
    """

    n: int
    m: int
    rank: int
    segments: tuple[Segment, ...]
    p_offset: int
    q_offset: int

    @property
    def p_numel(self) -> int:
        return len(self.segments) * self.n * self.rank

    @property
    def q_numel(self) -> int:
        return len(self.segments) * self.m * self.rank


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Tensors in the order in which they lie in a flat buffer, and the places of their factors.

    The messages are [P of all groups | bypass tensors] and [Q of all groups]; an alternating step sends one of them,
    with the bypass tensors behind whichever it is.
    """

    segments: tuple[Segment, ...]
    batch_by_shape: bool = True

    @classmethod
    def build(
        cls,
        shapes: Mapping[str, Sequence[int]] | Iterable[tuple[str, Sequence[int]]],
        config: PowerSGDConfig,
        *,
        compress: bool = True,
    ) -> Layout:
        """Lay out tensors one behind the other. With ``compress=False`` every tensor is a bypass tensor.

        Raises:
            ValueError: a name occurs twice.
        """
        items = shapes.items() if isinstance(shapes, Mapping) else shapes
        segments: list[Segment] = []
        seen: set[str] = set()
        offset = 0
        for name, shape in items:
            if name in seen:
                raise ValueError(f"tensor names must be unique; {name!r} occurs twice")
            seen.add(name)
            rank = compressed_rank(shape, config, name) if compress else 0
            segments.append(Segment(name, tuple(shape), offset, rank))
            offset += segments[-1].numel
        return cls(tuple(segments), config.batch_by_shape)

    def with_ranks(self, ranks: Callable[[Segment], int]) -> Layout:
        """The same tensors, matrices with other ranks; this layout itself where they are the same."""
        segments = tuple(dataclasses.replace(s, rank=ranks(s)) if s.rank else s for s in self.segments)
        return self if segments == self.segments else Layout(segments, self.batch_by_shape)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        return frozenset(segment.name for segment in self.segments)

    @functools.cached_property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    @functools.cached_property
    def compressed(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.rank)

    @functools.cached_property
    def bypass(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if not segment.rank)

    @functools.cached_property
    def groups(self) -> tuple[ShapeGroup, ...]:
        """Compressed matrices by shape and rank, in order of first appearance; one each without batch_by_shape."""
        members: dict[tuple[int, ...], list[Segment]] = {}
        for position, segment in enumerate(self.compressed):
            key = (segment.n, segment.m, segment.rank) if self.batch_by_shape else (position,)
            members.setdefault(key, []).append(segment)
        groups: list[ShapeGroup] = []
        p_offset = q_offset = 0
        for segments in members.values():
            first = segments[0]
            groups.append(ShapeGroup(first.n, first.m, first.rank, tuple(segments), p_offset, q_offset))
            p_offset += groups[-1].p_numel
            q_offset += groups[-1].q_numel
        return tuple(groups)

    @functools.cached_property
    def p_numel(self) -> int:
        return sum(group.p_numel for group in self.groups)

    @functools.cached_property
    def q_numel(self) -> int:
        return sum(group.q_numel for group in self.groups)

    @functools.cached_property
    def bypass_numel(self) -> int:
        return sum(segment.numel for segment in self.bypass)

    def bypass_offsets(self, start: int) -> tuple[int, ...]:
        """Offsets of the bypass tensors in a message in which they begin at ``start``."""
        return tuple(itertools.accumulate((segment.numel for segment in self.bypass), initial=start))[:-1]

    def sent_numel(self, config: PowerSGDConfig, iteration: int) -> int:
        """Elements that travel in the step of that number; narrower factors count as fp32 ones of as many bytes."""
        width = wire_format(config)
        left = sum(len(g.segments) * width.factor_bytes(g.n, g.rank) for g in self.groups)
        right = sum(len(g.segments) * width.factor_bytes(g.m, g.rank) for g in self.groups)
        sent = [products(config, iteration, repetition) for repetition in range(config.iterations)]
        lefts, rights = sum(P for P, _ in sent), sum(Q for _, Q in sent)
        return -(-(lefts * left + rights * right) // 4) + self.bypass_numel

    def factor_shapes(self, *, left: bool) -> list[tuple[int, int, int]]:
        """(matrices, rows, rank) of the factors of each group, in their order."""
        return [(len(g.segments), g.n if left else g.m, g.rank) for g in self.groups]
