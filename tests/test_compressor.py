"""A compressor's steps in one process: what is conserved, and what each mode keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from tests.support.checks import COMPRESSED, DTYPES, SHAPES, everything, gradients, poisoned, same_bits, step, trained

NAN = float("nan")
# Unit roundoff of fp32 arithmetic.
U = 2.0**-24


drawn_shapes = st.one_of(
    st.lists(st.integers(0, 7), max_size=4).map(tuple),
    st.sampled_from([(), (5,), (1, 9), (9, 1), (6, 3, 2, 2), (12, 10), (30, 20), (0, 3)]),
)
Tensors = list[tuple[tuple[int, ...], torch.dtype, bool]]
"""Shapes, dtypes and whether each is handed over non-contiguous."""


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    case=st.lists(st.tuples(drawn_shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=6),
    rank=st.sampled_from([1, 2, 3, 5, 64]),
    batch=st.booleans(),
    warm=st.booleans(),
    look=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 100),
)
def test_nothing_is_lost(case: Tensors, rank: int, batch: bool, warm: bool, look: bool, scale: float, seed: int):
    """Σ E + Σ Ĝ = Σ G, element by element, within the rounding of each step.

    A step rounds M = G + (E) twice, the product P̂ Q̄ᵀ of r terms once in E and once in Ĝ, and E itself.
    """
    shapes = {str(i): shape for i, (shape, _, _) in enumerate(case)}
    compressor = Compressor(everything(rank, batch_by_shape=batch, warm_start=warm, seed=seed), shapes)
    compute = torch.float64 if torch.float64 in {dtype for _, dtype, _ in case} else torch.float32
    u = torch.finfo(compute).eps / 2
    generator = torch.Generator().manual_seed(seed)
    owed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    bound = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for index in range(4):
        now: dict[str, Tensor] = {}
        for name, (shape, dtype, transposed) in zip(shapes, case, strict=True):
            # One step in four has no gradient at all.
            G = (torch.randn(shape, generator=generator) * scale * (index != 2)).to(dtype)
            now[name] = G.movedim(0, -1).contiguous().movedim(-1, 0) if transposed and G.dim() > 1 else G
        compressed = compressor.compress(now)
        out = poisoned(shapes, compute)
        compressor.decompress(compressed, out=out)
        factors = compressed.factors()
        for name, G in now.items():
            size = G.double().abs() + owed[name].abs()
            if name in factors:
                P, Q = factors[name]
                assert (P.mT @ P - torch.eye(P.shape[1])).abs().max() < 1e-5
                product = (P.double().abs() @ Q.double().abs().mT).view(shapes[name])
                bound[name] += u * (3 * size + 2 * (P.shape[1] + 2) * product)
            owed[name] += G.double() - out[name].double()
        if look:
            compressor.error()
    error = compressor.error()
    compressed_names = {segment.name for segment in compressor.layout.compressed}
    assert error.keys() == compressed_names
    for name, rest in owed.items():
        difference = (rest - (error[name].double() if name in error else 0)).abs()
        assert (difference <= bound[name]).all(), (name, float((difference - bound[name]).max()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dict_list_and_flat_buffer_agree(dtype: torch.dtype):
    by_name, by_order, flat, elsewhere = (Compressor(everything(), SHAPES) for _ in range(4))
    for seed in range(4):
        given = gradients(seed, dtype=dtype)
        copies = {name: tensor.clone() for name, tensor in given.items()}
        expected = poisoned(dtype=dtype)
        assert by_name.decompress(by_name.compress(given), out=expected) is expected

        order = list(poisoned(dtype=dtype).values())
        by_order.decompress(by_order.compress(list(given.values())), out=order)
        assert same_bits(dict(zip(SHAPES, order, strict=True)), expected)

        buffer = torch.cat([tensor.reshape(-1) for tensor in given.values()])
        out = torch.full_like(buffer, NAN)
        flat.decompress(flat.compress(buffer), out=out)
        assert torch.equal(out, torch.cat([tensor.reshape(-1) for tensor in expected.values()]))

        # Inputs are read only, unless they are the output, which may be non-contiguous. New tensors have their dtype.
        compressed = elsewhere.compress(given)
        assert same_bits(given, copies)
        odd = {name: torch.full((*shape, 2), NAN, dtype=dtype)[..., 0] for name, shape in SHAPES.items()}
        fresh = elsewhere.decompress(compressed)
        assert isinstance(fresh, dict)
        for output in (odd, given):
            elsewhere.decompress(compressed, out=output)
        assert all(same_bits(result, expected) for result in (fresh, odd, given))


def test_seed_decides_the_first_basis_and_without_warm_start_the_next_ones():
    cold: dict[str, Any] = {"warm_start": False, "error_feedback": False}
    compressors = [trained(0, seed=seed, **fields) for fields in ({}, cold) for seed in (0, 0, 2**32 - 1)]
    warm, same, other, one, again, others = (step(each, gradients(0))["linear"] for each in compressors)
    assert torch.equal(warm, same)
    assert torch.equal(one, again)
    assert not torch.equal(warm, other)
    assert not torch.equal(one, others)
    assert not torch.equal(one, step(compressors[3], gradients(0))["linear"])


def test_a_matrix_does_not_depend_on_its_company():
    """State goes by name: alone, in another order or place, a tensor gets the same basis and the same result."""
    config = everything(batch_by_shape=False)
    together, turned = Compressor(config, SHAPES), Compressor(config, dict(reversed(SHAPES.items())))
    alone = Compressor(config, {"conv": SHAPES["conv"]})
    for seed in range(4):
        now = gradients(seed)
        expected = step(together, now)
        assert same_bits(step(turned, now), expected)
        assert torch.equal(step(alone, {"conv": now["conv"]})["conv"], expected["conv"])


@pytest.mark.parametrize("batch", [True, False])
def test_factors_are_orthonormal_views_that_give_the_result(batch: bool):
    compressor = Compressor(everything(batch_by_shape=batch), SHAPES)
    places = []
    for seed in range(3):
        compressed = compressor.compress(gradients(seed))
        out = poisoned()
        compressor.decompress(compressed, out=out)
        factors = compressed.factors()
        assert set(factors) == set(COMPRESSED)
        for segment in compressor.layout.compressed:
            P, Q = factors[segment.name]
            assert (P.shape, Q.shape) == ((segment.n, segment.rank), (segment.m, segment.rank))
            # The design's bound.
            assert (P.double().mT @ P.double() - torch.eye(segment.rank)).abs().max() <= 1e-5
            bound = segment.rank * U * (P.abs() @ Q.abs().mT) * 1.01
            truth = P.double() @ Q.double().mT
            assert ((out[segment.name].view(segment.n, segment.m) - truth).abs() <= bound).all()
        places.append([tensor.data_ptr() for pair in factors.values() for tensor in pair])
    # Views of memory that stays.
    assert places[0] == places[1] == places[2]


def test_compression_stats_count_what_travels_if_anything():
    """Of compressed steps, and of the exact one before them, whose averages are the gradients."""
    shapes = {"w": (40, 30), "b": (30,), "s": (3, 3)}
    compressor = Compressor(PowerSGDConfig(rank=2, min_compression_rate=2, start_iter=1), shapes)
    assert compressor.compression_stats() == (0.0, 0, 0)
    assert same_bits(step(compressor, gradients(0, shapes)), gradients(0, shapes))
    before, after = 40 * 30 + 30 + 9, (40 + 30) * 2 + 30 + 9
    assert compressor.compression_stats() == (1.0, before, before)
    for index in range(1, 4):
        step(compressor, gradients(index, shapes))
        now, sent = (1 + index) * before, before + index * after
        assert compressor.compression_stats() == (now / sent, now, sent)
    nothing = Compressor(PowerSGDConfig(), {})
    assert nothing.decompress(nothing.compress({})) == {}
    empty = Compressor(everything(), {"e": (0, 3), "f": (4, 0)})
    assert step(empty, {"e": torch.zeros(0, 3), "f": torch.zeros(4, 0)})["f"].shape == (4, 0)
    assert empty.error() == {}
