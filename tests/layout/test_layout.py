"""Layout: matrix views, eligibility, shape groups and offsets."""

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from powersgd_triton import PowerSGDConfig
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.matrices import Size, compressed_rank, matrix_size, products

Shapes = list[tuple[int, ...]]
SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=12)


def build(shapes: Shapes, **fields: Any) -> Layout:
    return Layout.build({f"t{i}": shape for i, shape in enumerate(shapes)}, PowerSGDConfig(**fields))


def test_what_is_a_matrix():
    config = PowerSGDConfig()
    one = {(): (1, 1), (5,): (1, 5), (3, 4): (3, 4), (8, 3, 2, 2): (8, 12), (0, 4): (0, 4), (512, 256, 3): (512, 768)}
    batches = {(128, 1536, 2048): 128, (2, 4096, 64): 2, (1, 197, 768): 1, (2, 4, 64, 32): 8, (512, 2048, 512): 512}
    expected: dict[tuple[int, ...], Size] = {shape: Size(*size) for shape, size in one.items()}
    expected |= {shape: Size(shape[-2], shape[-1], batch=batch) for shape, batch in batches.items()}
    assert {shape: matrix_size(shape, config) for shape in expected} == expected
    # Its factors have 55 times fewer bytes; as 128 × the rest, they would have 8 times fewer.
    experts = {"experts": (128, 1536, 2048)}
    layout = Layout.build(experts, PowerSGDConfig(rank=16))
    assert 4 * layout.numel / (4 * layout.p_numel + 4 * layout.q_numel) > 50


def test_eligibility():
    # (n + m) r rate < n m, strictly: (10 + 10) · 1 · 5 = 100 is not below 100.
    for shape, rank, rate, expected in (
        ((10, 10), 1, 5.0, 0), ((10, 10), 1, 4.9, 1), ((10, 10), 4, 2.0, 0), ((64, 64), 4, 2.0, 4),
        ((64, 64), 100, 0.0, 64), ((64, 3, 3, 3), 100, 0.0, 27), ((1, 7), 4, 0.0, 1), ((7, 1), 4, 0.0, 1),
        ((7,), 4, 0.0, 0), ((), 4, 0.0, 0), ((0, 7), 4, 0.0, 0), ((7, 0), 4, 0.0, 0),
    ):  # fmt: skip
        assert compressed_rank(shape, PowerSGDConfig(rank=rank, min_compression_rate=rate)) == expected
    # Factors of 44 · 4 elements of 4 bytes, or 480 elements in fp32 or fewer bits.
    for bypass, expected in ((None, 4), ("bf16", 4), ("int8", 0)):
        assert compressed_rank((24, 20), PowerSGDConfig(rank=4, min_compression_rate=1, bypass=bypass)) == expected


@settings(deadline=None, derandomize=True, max_examples=100)
@given(SHAPES, st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_everything_has_one_place(shapes: Shapes, rank: int, rate: float):
    layout = build(shapes, rank=rank, min_compression_rate=rate)

    # Segments tile the buffer, factors tile their messages, in order and without gaps.
    end = 0
    for segment, shape in zip(layout.segments, shapes, strict=True):
        assert (segment.offset, segment.shape, segment.numel) == (end, shape, math.prod(shape))
        end += segment.numel
    assert layout.numel == end
    p_end = q_end = 0
    for group in layout.groups:
        assert (group.p_offset, group.q_offset) == (p_end, q_end)
        p_end += sum(group.counts) * group.n * group.rank
        q_end += sum(group.counts) * group.m * group.rank
    assert (layout.p_numel, layout.q_numel) == (p_end, q_end)
    for segment, offset in zip(layout.bypass, layout.bypass_offsets(layout.p_numel), strict=True):
        assert offset == p_end
        p_end += segment.numel
    assert layout.p_numel + layout.bypass_numel == p_end
    sent = sum(s.batch * (s.n + s.m) * s.rank if s.rank else s.numel for s in layout.segments)
    assert layout.sent_numel(PowerSGDConfig(), 0) == p_end + q_end == sent
    turns = [layout.sent_numel(PowerSGDConfig(algorithm="alternating"), iteration) for iteration in (0, 1, 2)]
    assert turns == [layout.bypass_numel + numel for numel in (layout.q_numel, layout.p_numel, layout.q_numel)]
    twice = [layout.sent_numel(PowerSGDConfig(algorithm=name, iterations=2), 1) for name in ("standard", "alternating")]
    assert twice == [layout.bypass_numel + times * (layout.p_numel + layout.q_numel) for times in (2, 1)]

    # Each tensor is compressed in one group or a bypass tensor.
    grouped = [segment for group in layout.groups for segment in group.segments]
    assert sorted(s.name for s in [*grouped, *layout.bypass]) == sorted(s.name for s in layout.segments)
    for group in layout.groups:
        assert {(s.n, s.m, s.rank) for s in group.segments} == {(group.n, group.m, group.rank)}
        assert 1 <= group.rank <= min(rank, group.n, group.m)


def test_groups_and_names():
    """Groups are by matrix shape in order of appearance."""
    shapes: Shapes = [(8, 6), (4, 5), (8, 3, 2), (8,), (4, 5)]
    layout = build(shapes, rank=1, min_compression_rate=0.0)
    assert [[s.name for s in group.segments] for group in layout.groups] == [["t0", "t2"], ["t1", "t4"]]
    layout = Layout.build({"w": (64, 64), "b": (64,)}, PowerSGDConfig(), compress=False)
    assert layout.compressed == ()
    assert layout.sent_numel(PowerSGDConfig(), 0) == layout.numel == 64 * 64 + 64


def test_products_take_turns_from_the_first_compressed_step_on() -> None:
    config = PowerSGDConfig(algorithm="alternating", start_iter=3)
    assert [products(config, iteration, 0) for iteration in (3, 4, 5)] == [(False, True), (True, False), (False, True)]
