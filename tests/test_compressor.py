"""A compressor's steps in one process: what is conserved, and what each mode keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from powersgd_triton import Compressor, PowerSGDConfig
from tests.support.checks import COMPRESSED, DTYPES, SHAPES, everything, gradients, poisoned, same_bits, step, trained
from tests.support.orthonormal import ORTHONORMAL, departure

NAN = float("nan")


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

        # Inputs are read only, unless they are the output. Both may be non-contiguous. New tensors have their dtype.
        strided = {name: g.movedim(0, -1).contiguous().movedim(-1, 0) if g.dim() else g for name, g in given.items()}
        compressed = elsewhere.compress(strided)
        assert same_bits(given, copies)
        assert same_bits(strided, copies)
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
def test_factors_are_orthonormal_and_views_of_memory_that_stays(batch: bool):
    compressor = Compressor(everything(batch_by_shape=batch), SHAPES)
    places = []
    for seed in range(3):
        compressed = compressor.compress(gradients(seed))
        factors = compressed.factors()
        assert set(factors) == set(COMPRESSED)
        for segment in compressor.layout.compressed:
            P, Q = factors[segment.name]
            assert (P.shape, Q.shape) == ((segment.n, segment.rank), (segment.m, segment.rank))
            assert departure(P) <= ORTHONORMAL
        places.append([tensor.data_ptr() for pair in factors.values() for tensor in pair])
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
