"""The layout of a flat buffer: which tensors are compressed, their matrix shapes, and the offsets of their factors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from powersgd_triton.config import PowerSGDConfig, whole_number
from powersgd_triton.layout.wire_format import BLOCK, DIFFERENCES, FORMATS, SCALE_BYTES, WireFormat


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (n, m) of a tensor viewed as a matrix: dim 0 × the rest. Fewer than two dimensions give one row."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def compressed_rank(shape: Sequence[int], config: PowerSGDConfig, name: str = "") -> int:
    """Return the rank r = min(rank, n, m) of a tensor's approximation, or 0 for a bypass tensor.

    A matrix is compressed only if the bytes of its factors in a step, scales included, times ``min_compression_rate``
    are fewer than the 4 n m bytes of an fp32 tensor. For factors sent once in fp32 that is
    (n + m) · r · min_compression_rate < n · m. If ranks are planned, the result is the largest rank that qualifies, at
    most ``max_rank``. A rank function gets the tensor's ``name``.

    Raises:
        TypeError: The rank function returned something other than an int.
        ValueError: The rank function returned a negative number.
    """
    if len(shape) < 2 or config.codes is not None:
        return 0
    n, m = matrix_shape(shape)

    def is_worth_it(r: int) -> bool:
        return matrix_bytes(n, m, r, config) * config.min_compression_rate < 4 * n * m

    if config.planned:
        assert config.max_rank is not None
        # Bisection works because bytes grow with the rank.
        low, high = 0, min(n, m, config.max_rank)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if is_worth_it(middle) else (low, middle - 1)
        return low
    wanted = config.rank
    if callable(wanted):
        wanted = whole_number(f"the rank of {name!r}, {tuple(shape)},", wanted(name, tuple(shape)))
    assert wanted is not None
    r = min(wanted, n, m)
    return r if is_worth_it(r) else 0


def sizes(shapes: Mapping[str, Sequence[int]], config: PowerSGDConfig) -> dict[str, tuple[int, int, int]]:
    """Return {name: (n, m, rank)} for tensors {name: shape}. Rank 0 means that a tensor is not compressed."""
    return {name: (*matrix_shape(shape), compressed_rank(shape, config, name)) for name, shape in shapes.items()}


def matrix_bytes(n: int, m: int, rank: int, config: PowerSGDConfig) -> float:
    """Return the bytes of a matrix's factors, with their scales, in an average step."""
    width = wire_format(config)
    return (width.factor_bytes(n, rank) + width.factor_bytes(m, rank)) * factors_sent(config)


def whole_bytes(numel: int, config: PowerSGDConfig) -> float:
    """Return the bytes of elements that are not compressed as factors: in codes with their scales, or in fp32."""
    if config.codes is None:
        return 4 * numel
    width = DIFFERENCES[config.codes]
    return numel * (width.bits / (8 * width.blocks) + SCALE_BYTES / BLOCK)


def wire_format(config: PowerSGDConfig) -> WireFormat:
    """Return the format of factors in messages."""
    return FORMATS[str(config.wire_dtype or "float32")]


def factors_sent(config: PowerSGDConfig) -> float:
    """Return how often an average step sends both factors of a matrix."""
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
    """One tensor in the flat buffer: elements [offset, offset + n·m). ``rank`` is 0 for a bypass tensor."""

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
    """Matrices of equal n × m and rank. Their factors are adjacent: P as [B, n, r], Q as [B, m, r].

    ``p_offset`` and ``q_offset`` count elements from the start of the layout's P and Q factors.
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
    """Tensors in the order of a flat buffer, and the offsets of their factors.

    The messages are [P of all groups | bypass tensors] and [Q of all groups]. A step of the alternating algorithm sends
    one of them, followed by the bypass tensors.

    Attributes:
        segments: The tensors.
        batch_by_shape: Whether matrices of equal shape are one group.
        parts: The layouts of which this one is made, if it is.
    """

    segments: tuple[Segment, ...]
    batch_by_shape: bool = True
    parts: tuple[Layout, ...] = ()

    @classmethod
    def build(cls, shapes: Mapping[str, Sequence[int]], config: PowerSGDConfig, *, compress: bool = True) -> Layout:
        """Lay out tensors {name: shape} contiguously in this order. With ``compress=False`` all are bypass tensors."""
        segments, offset = list[Segment](), 0
        for name, shape in shapes.items():
            rank = compressed_rank(shape, config, name) if compress else 0
            segments.append(Segment(name, tuple(shape), offset, rank))
            offset += segments[-1].numel
        return cls(tuple(segments), config.batch_by_shape)

    @classmethod
    def joined(cls, layouts: Sequence[Layout]) -> Layout:
        """Lay out the tensors of several layouts one after the other. One layout is returned as it is."""
        if len(layouts) == 1:
            return layouts[0]
        segments, offset = [], 0
        for layout in layouts:
            segments += [dataclasses.replace(s, offset=s.offset + offset) for s in layout.segments]
            offset += layout.numel
        return cls(tuple(segments), layouts[0].batch_by_shape, tuple(layouts))

    def with_ranks(self, ranks: Callable[[Segment], int]) -> Layout:
        """Return the layout with other ranks for its matrices, or this layout if no rank changes."""
        segments = tuple(dataclasses.replace(s, rank=ranks(s)) if s.rank else s for s in self.segments)
        return self if segments == self.segments else dataclasses.replace(self, segments=segments)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        return frozenset(segment.name for segment in self.segments)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {segment.name: segment.shape for segment in self.segments}

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
        """Compressed matrices grouped by shape and rank, in order of appearance; one each without batch_by_shape."""
        members: dict[tuple[int, ...], list[Segment]] = {}
        for position, segment in enumerate(self.compressed):
            key = (segment.n, segment.m, segment.rank) if self.batch_by_shape else (position,)
            members.setdefault(key, []).append(segment)
        groups, p_offset, q_offset = list[ShapeGroup](), 0, 0
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
        """Return the offsets of the bypass tensors in a message in which they begin at ``start``."""
        return tuple(itertools.accumulate((segment.numel for segment in self.bypass), initial=start))[:-1]

    def sent_numel(self, config: PowerSGDConfig, iteration: int) -> int:
        """Return the elements sent in step ``iteration``. Narrow factors count as the fp32 elements of equal bytes."""
        if config.codes is not None:
            return -(-DIFFERENCES[config.codes].difference_bytes(self.numel)[1] // 4)
        width = wire_format(config)
        left = sum(len(g.segments) * width.factor_bytes(g.n, g.rank) for g in self.groups)
        right = sum(len(g.segments) * width.factor_bytes(g.m, g.rank) for g in self.groups)
        sent = [products(config, iteration, repetition) for repetition in range(config.iterations)]
        lefts, rights = sum(P for P, _ in sent), sum(Q for _, Q in sent)
        return -(-(lefts * left + rights * right) // 4) + self.bypass_numel

    def message_bytes(self, config: PowerSGDConfig) -> float:
        """Return the mean bytes of the messages of a step."""
        return 4 * self.sent_numel(config, config.start_iter) / (2 * factors_sent(config))

    def factor_shapes(self, *, left: bool) -> list[tuple[int, int, int]]:
        """Return (matrices, rows, rank) of the left or right factors of each group."""
        return [(len(g.segments), g.n if left else g.m, g.rank) for g in self.groups]
