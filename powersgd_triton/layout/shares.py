"""Shares of a layout: the rows of its matrices that each of several workers compresses. Integers only."""

from __future__ import annotations

import dataclasses
import itertools

from powersgd_triton.layout.layout import Layout, Segment, ShapeGroup


@dataclasses.dataclass(frozen=True, eq=False)
class Shares:
    """A layout cut into shares of consecutive rows with about equal numbers of elements, one for each worker.

    A matrix that lies on a cut stays one matrix with one pair of factors: each worker multiplies its own rows.

    Attributes:
        layout: The whole layout.
        cuts: Offsets of the rows at which shares begin, from the first matrix on, and the end of the last matrix.
    """

    layout: Layout
    cuts: tuple[int, ...]

    @classmethod
    def build(cls, layout: Layout, workers: int) -> Shares:
        """Cut a layout at the rows that are nearest to equal shares of its compressed elements."""
        total, before = sum(segment.numel for segment in layout.compressed), 0
        if not total:
            return cls(layout, (0,) * (workers + 1))
        cuts = [layout.compressed[0].offset]
        for segment in layout.compressed:
            while len(cuts) < workers and total * len(cuts) <= workers * (before + segment.numel):
                row = round((total * len(cuts) / workers - before) / segment.m)
                cuts.append(segment.offset + row * segment.m)
            before += segment.numel
        end = layout.compressed[-1].offset + layout.compressed[-1].numel
        return cls(layout, (*cuts, *[end] * (workers + 1 - len(cuts))))

    @property
    def workers(self) -> int:
        """Number of shares."""
        return len(self.cuts) - 1

    def rows(self, segment: Segment) -> tuple[tuple[int, int], ...]:
        """Return the (first row, row after the last) of a matrix that each worker has."""
        edges = [min(max((cut - segment.offset) // segment.m, 0), segment.n) for cut in self.cuts]
        edges[0], edges[-1] = 0, segment.n
        return tuple(itertools.pairwise(edges))

    def groups(self, worker: int) -> tuple[ShapeGroup, ...]:
        """Return a worker's rows as matrices, grouped by shape, with the places of their factors in the layout's."""
        found: list[ShapeGroup] = []
        for group in self.layout.groups:
            open_group: ShapeGroup | None = None
            for index, segment in enumerate(group.segments):
                first, behind = self.rows(segment)[worker]
                if first == behind:
                    continue
                piece = dataclasses.replace(
                    segment, shape=(behind - first, *segment.shape[1:]), offset=segment.offset + first * group.m
                )
                if open_group is not None and piece.n == open_group.n == group.n:
                    open_group = found[-1] = dataclasses.replace(open_group, segments=(*open_group.segments, piece))
                    continue
                p_offset = group.p_offset + (index * group.n + first) * group.rank
                q_offset = group.q_offset + index * group.m * group.rank
                open_group = ShapeGroup(piece.n, group.m, group.rank, (piece,), p_offset, q_offset)
                found.append(open_group)
        return tuple(found)
