"""The layout of a flat buffer: which tensors are compressed, their matrix shapes, and the offsets of their factors."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.matrices import Size, Tensors, flat_format, products, sizes, wire_format


@dataclasses.dataclass(frozen=True)
class Segment:
    """One tensor in the flat buffer, as ``batch`` n × m matrices from ``offset`` on. A bypass tensor has rank 0."""

    name: str
    shape: tuple[int, ...]
    offset: int
    n: int
    m: int
    rank: int
    batch: int

    @property
    def size(self) -> Size:
        return Size(self.n, self.m, self.rank, self.batch)

    @property
    def rows(self) -> int:
        return self.batch * self.n

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.numel)


@dataclasses.dataclass(frozen=True)
class ShapeGroup:
    """Tensors of B matrices of equal n × m and rank. Their factors, P [B, n, r] and Q [B, m, r], begin there."""

    n: int
    m: int
    rank: int
    segments: tuple[Segment, ...]
    p_offset: int
    q_offset: int

    @property
    def counts(self) -> list[int]:
        return [segment.batch for segment in self.segments]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Tensors in the order of a flat buffer, and the offsets of their factors.

    The messages are [P of all groups | bypass tensors] and [Q of all groups]. A step of the alternating algorithm sends
    one of them, followed by the bypass tensors. Matrices of equal shape are one group. If it ``rounds`` the tensors
    without factors, they are not in these messages: they are ``rounded`` and not ``bypass``.
    """

    segments: tuple[Segment, ...]
    rounds: bool = False

    @classmethod
    def build(cls, shapes: Tensors, config: PowerSGDConfig, *, compress: bool = True) -> "Layout":
        """Lay out tensors {name: shape} contiguously in this order. With ``compress=False`` all are bypass tensors."""
        # A user's functions, which may fail on one worker, are called only for what is compressed.
        found = sizes(shapes, config) if compress else {n: Size(1, math.prod(shape)) for n, shape in shapes.items()}
        segments = [Segment(name, tuple(shapes[name]), 0, *size) for name, size in found.items()]
        return cls(_contiguous(segments), rounds=compress and config.whole_format is not None)

    @classmethod
    def joined(cls, layouts: Sequence["Layout"]) -> "Layout":
        """Lay out the tensors of several layouts one after the other."""
        segments = [segment for layout in layouts for segment in layout.segments]
        return cls(_contiguous(segments), layouts[0].rounds)

    def with_ranks(self, ranks: Callable[[Segment], int]) -> "Layout":
        """Return the layout with other ranks for its matrices, or this layout if no rank changes."""
        segments = tuple(dataclasses.replace(s, rank=ranks(s)) if s.rank else s for s in self.segments)
        return self if segments == self.segments else dataclasses.replace(self, segments=segments)

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
        return () if self.rounds else tuple(segment for segment in self.segments if not segment.rank)

    @functools.cached_property
    def rounded(self) -> "Layout":
        """The tensors without factors if they are quantized; see ``PowerSGDConfig.whole_format``."""
        found = [segment for segment in self.segments if self.rounds and not segment.rank]
        return Layout(_contiguous(found))

    @functools.cached_property
    def groups(self) -> tuple[ShapeGroup, ...]:
        """Compressed matrices grouped by shape and rank, in order of appearance."""
        members: dict[tuple[int, ...], list[Segment]] = {}
        for segment in self.compressed:
            members.setdefault((segment.n, segment.m, segment.rank), []).append(segment)
        groups, p_offset, q_offset = list[ShapeGroup](), 0, 0
        for segments in members.values():
            n, m, rank = segments[0].n, segments[0].m, segments[0].rank
            groups.append(ShapeGroup(n, m, rank, tuple(segments), p_offset, q_offset))
            count = sum(groups[-1].counts)
            p_offset += count * n * rank
            q_offset += count * m * rank
        return tuple(groups)

    @functools.cached_property
    def p_numel(self) -> int:
        return sum(map(math.prod, self.factor_shapes(left=True)))

    @functools.cached_property
    def q_numel(self) -> int:
        return sum(map(math.prod, self.factor_shapes(left=False)))

    @functools.cached_property
    def bypass_numel(self) -> int:
        return sum(segment.numel for segment in self.bypass)

    def bypass_offsets(self, start: int) -> tuple[int, ...]:
        """Return the offsets of the bypass tensors in a message in which they begin at ``start``."""
        return tuple(itertools.accumulate((segment.numel for segment in self.bypass), initial=start))[:-1]

    def sent_numel(self, config: PowerSGDConfig, iteration: int) -> int:
        """Return the elements sent in step ``iteration``. Narrow factors count as the fp32 elements of equal bytes."""
        left, right = (self.factor_bytes(config, left=left) for left in (True, False))
        sent = [products(config, iteration, repetition) for repetition in range(config.iterations)]
        width = flat_format(config) if self.rounds else None
        rounded = width.difference_bytes(self.rounded.numel)[1] if width else 0
        return -(-(sum(P * left + Q * right for P, Q in sent) + rounded) // 4) + self.bypass_numel

    def factor_shapes(self, *, left: bool) -> list[tuple[int, int, int]]:
        """Return (matrices, rows, rank) of the left or right factors of each group."""
        return [(sum(g.counts), g.n if left else g.m, g.rank) for g in self.groups]

    def factor_bytes(self, config: PowerSGDConfig, *, left: bool) -> int:
        """Return the bytes of the left or right factors of all groups in a message, with their scales."""
        known = self._factor_bytes.get((config.wire_dtype, left))
        if known is None:
            width = wire_format(config)
            known = sum(count * width.factor_bytes(rows, rank) for count, rows, rank in self.factor_shapes(left=left))
            self._factor_bytes[config.wire_dtype, left] = known
        return known

    @functools.cached_property
    def _factor_bytes(self) -> dict[tuple[Any, bool], int]:
        """Results of ``factor_bytes``, which each step asks for."""
        return {}


def _contiguous(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    offsets = itertools.accumulate((segment.numel for segment in segments), initial=0)
    return tuple(dataclasses.replace(s, offset=offset) for s, offset in zip(segments, offsets, strict=False))


@dataclasses.dataclass(frozen=True, eq=False)
class RowPartition:
    """A layout's rows, divided among workers into consecutive parts with about equal numbers of elements.

    A matrix that lies on a cut stays one matrix with one pair of factors: each worker multiplies its own rows. A batch
    of matrices is cut between them. ``cuts`` are the offsets of the rows at which parts begin, from the first matrix
    on, and the end of the last matrix.
    """

    layout: Layout
    cuts: tuple[int, ...]

    @classmethod
    def build(cls, layout: Layout, workers: int) -> "RowPartition":
        """Cut a layout at the rows that are nearest to equal parts of its compressed elements."""
        total, before = sum(segment.numel for segment in layout.compressed), 0
        if not total:
            return cls(layout, (0,) * (workers + 1))
        cuts = [layout.compressed[0].offset]
        for segment in layout.compressed:
            while len(cuts) < workers and total * len(cuts) <= workers * (before + segment.numel):
                unit = segment.m * (segment.n if segment.batch > 1 else 1)
                cuts.append(segment.offset + unit * round((total * len(cuts) / workers - before) / unit))
            before += segment.numel
        end = layout.compressed[-1].offset + layout.compressed[-1].numel
        return cls(layout, (*cuts, *[end] * (workers + 1 - len(cuts))))

    @property
    def workers(self) -> int:
        return len(self.cuts) - 1

    def rows(self, segment: Segment) -> tuple[tuple[int, int], ...]:
        """Return the (first row, row after the last) of a tensor's matrices that each worker has."""
        edges = [min(max((cut - segment.offset) // segment.m, 0), segment.rows) for cut in self.cuts]
        edges[0], edges[-1] = 0, segment.rows
        return tuple(itertools.pairwise(edges))

    def groups(self, worker: int) -> tuple[ShapeGroup, ...]:
        """Return a worker's rows as matrices, grouped by shape, with the places of their factors in the layout's."""
        found: list[ShapeGroup] = []
        for group in self.layout.groups:
            continues, index = False, 0
            for segment in group.segments:
                first, end = self.rows(segment)[worker]
                if first < end:
                    whole, height = end - first == segment.rows, group.n if segment.batch > 1 else end - first
                    place = (end - first, group.m), segment.offset + first * group.m
                    piece = Segment(segment.name, *place, height, group.m, group.rank, (end - first) // height)
                    if whole and continues:
                        found[-1] = dataclasses.replace(found[-1], segments=(*found[-1].segments, piece))
                    else:
                        p_offset = group.p_offset + (index * group.n + first) * group.rank
                        q_offset = group.q_offset + (index + first // group.n) * group.m * group.rank
                        found.append(ShapeGroup(height, group.m, group.rank, (piece,), p_offset, q_offset))
                    continues = whole
                index += segment.batch
        return tuple(found)
