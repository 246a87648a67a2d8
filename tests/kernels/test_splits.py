"""Programs of one launch end together on GPUs of any number of multiprocessors, and parts add little traffic."""

from __future__ import annotations

import math
import time
from collections import Counter

import pytest

from powersgd_triton import plan
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.kernels.configurations import select_configuration
from powersgd_triton.kernels.splits import busy_share, part_lengths, parts
from powersgd_triton.layout.layout import Layout
from powersgd_triton.shapes import MODELS, llama

MULTIPROCESSORS = (108, 132, 144, 148)
LEAST_BUSY = {6: 0.9, 3: 0.85}
"""Share of the time, if all sums in as many parts as they may have make so many programs for each multiprocessor."""

MOST_TRAFFIC = 1 / 8
"""Elements of parts that are written and read, for each element of M that is read."""


def matrices(name: str, rank: int) -> list[list[tuple[int, int, int]]]:
    """(n, m, r) of what is compressed in each bucket that DDP makes of a model; only different buckets."""
    shapes = llama(layers=2, width=4096, hidden=11008) if name == "llama" else MODELS[name]
    buckets = plan.ddp_buckets({str(number): shape for number, shape in enumerate(shapes)})
    layouts = [Layout.build(bucket, PowerSGDConfig(rank=rank)) for bucket in buckets]
    found = [[(g.n, g.m, g.rank) for g in layout.groups for _ in g.segments] for layout in layouts]
    return [list(bucket) for bucket in dict.fromkeys(map(tuple, found)) if bucket]


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("rank", [4, 16, 32])
@pytest.mark.parametrize("model", ["gpt2", "resnet-50", "vit-l-16", "llama"])
def test_programs_fill_whole_waves(model: str, rank: int, rows: bool):
    configuration = select_configuration("sm_90", rank)
    launch = configuration.compensate_project if rows else configuration.backproject
    checked = 0
    for bucket in matrices(model, rank):
        # What is split where programs walk along rows or columns, and the block in which they walk.
        if rows:
            split, block = [(math.ceil(n / launch.rows), m, r) for n, m, r in bucket], launch.columns
        else:
            split, block = [(math.ceil(m / launch.columns), n, r) for n, m, r in bucket], launch.rows
        most = sum(tiles * max(1, size // max(block, 16 * r)) for tiles, size, r in split)
        for multiprocessors in MULTIPROCESSORS:
            programs: Counter[int] = Counter()
            for (tiles, size, r), length in zip(split, part_lengths(split, block, multiprocessors), strict=True):
                lengths = [end - start for start, end, _ in parts(size, length)]
                assert sum(lengths) == size
                assert len(lengths) == 1 or 2 * len(lengths) * r / size <= MOST_TRAFFIC
                for length in lengths:
                    programs[math.ceil(length / block)] += tiles
            enough = [least for programs_each, least in LEAST_BUSY.items() if most >= programs_each * multiprocessors]
            checked += bool(enough)
            assert busy_share(programs, multiprocessors) >= max(enough, default=0), (bucket, multiprocessors)
    assert checked


def test_small_cases():
    # Of equal programs the share is of whole waves. Short ones run where the long ones leave time.
    for count in (1, 263, 264, 265, 1000):
        assert busy_share({7: count}, 264) == count / (math.ceil(count / 264) * 264)
    assert busy_share({4: 3, 2: 2}, 4) == 1
    assert part_lengths([], 64, 132) == []
    assert part_lengths([(1, 1, 1)], 64, 132) == [64]
    # 300 matrices of different shapes, and 10⁹ elements.
    start = time.process_time()
    part_lengths([(26 + i, 4096 - 8 * i, 32) for i in range(300)], 64, 132)
    part_lengths([(1000, 10**6, 4)], 64, 132)
    assert time.process_time() - start < 1
