"""The codec in C: its bits are the reference's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.constants import PERIOD
from powersgd_triton.layout.sparse_format import CHUNK, SparseFormat
from powersgd_triton.layout.wire_format import QUANTIZED, WireFormat
from powersgd_triton.ops import host
from powersgd_triton.ops.differences import apply_reference, encode_reference
from powersgd_triton.ops.host import apply_host, encode_host, reference
from tests.support.kernel_cases import INF, NAN

widths = pytest.mark.parametrize("width", QUANTIZED.values(), ids=QUANTIZED)
BOTH = (encode_reference, apply_reference), (encode_host, apply_host)


def inputs(numel: int) -> Iterator[Tensor]:
    """Of all magnitudes, and with what is not finite."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    yield from (x, x**3 * 1e20, -torch.zeros(numel))
    # Scales that are rounded coarsely, and so large that they would be rounded to too much.
    yield from (x * 2.0**exponent for exponent in (-120, -133, -145))
    yield from (x.sign() * size for size in (3.395e38, torch.finfo(torch.float32).max))
    yield x.masked_fill(torch.arange(numel) % 300 == 7, NAN).masked_fill(torch.arange(numel) == numel - 1, -INF)


def assert_same(one: Tensor, other: Tensor) -> None:
    """Equal bits, but for which NaN it is."""
    if one.dtype == torch.float32:
        assert torch.equal(one.isnan(), other.isnan())
        one, other = (x.nan_to_num(0.0, INF, -INF).view(torch.int32) for x in (one, other))
    assert torch.equal(one, other)


@widths
@pytest.mark.parametrize("numel", [1, 129, 5000, PERIOD + 129])
def test_same_bits_as_the_reference(width: WireFormat, numel: int):
    for target, seed, each in itertools.product(inputs(numel), (None, 5), (None, 1280)):
        results = []
        for encode, apply in BOTH:
            left, base = target.clone(), target.flip(0) * 0.7
            contents = torch.zeros(
                3, -(-numel // (each or numel)), width.difference_bytes(each or numel)[1], dtype=torch.uint8
            )
            ways = ((base, False, None), (None, True, None), (None, True, (base, target)))
            for content, (copy, subtract, terms) in zip(contents, ways, strict=True):
                encode(Encoding(left, copy, width, content if each else content[0], subtract, each, seed, terms))
            parts = [left, contents]
            for weight, fresh, shared in ((0.5, True, True), (1 / 3, False, True), (-1.0, False, False)):
                out = torch.linspace(-3, 3, numel).repeat(2, 1).contiguous()
                out[:, numel // 2] = NAN
                if shared:
                    out = out[0].expand(2, -1)
                if not each:
                    apply(Decoding(contents[1:, 0], width, out, weight, fresh=fresh))
                parts.append(out.clone())
            results.append(parts)
        for one, other in zip(*results, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("compression", [16, 50, 1000])
def test_sparse_messages_have_the_same_bits(compression: float):
    width, numel = SparseFormat.of(compression), 3 * CHUNK + 700
    x, chunk = next(inputs(numel)), torch.arange(numel) // CHUNK
    # Chunks that are not alike, ties, few elements that are not 0, and some that differ in their lowest bits only.
    more = x * 1e-20 ** (chunk % 2), x.mul(2).round(), x * (chunk > 1) * (x > 2.5), 1 + x.abs() * 2.0**-18
    for x, each in itertools.product([*inputs(numel), *more], (None, CHUNK)):
        results = []
        for encode, apply in (reference(width), (encode_host, apply_host)):
            left = x.clone()
            rows = -(-numel // each) if each else 1
            content = torch.zeros(rows, width.difference_bytes(each or numel)[1], dtype=torch.uint8)
            encode(Encoding(left, None, width, content if each else content[0], True, each))
            out = torch.linspace(-3, 3, each or numel).repeat(len(content), 1).contiguous()
            out[:, 5] = NAN
            apply(Decoding(content, width, out.expand_as(out) if each else out, 1 / 3))
            fresh = torch.full((1, each or numel), NAN).expand(2, -1)
            apply(Decoding(content[:1].expand(2, -1), width, fresh, -0.5, fresh=True))
            results.append([left, content, out, fresh[0]])
        for one, other in zip(*results, strict=True):
            assert_same(one, other)


def test_several_threads_have_the_same_bits():
    target, width = next(inputs(PERIOD)), QUANTIZED["int8"]
    contents = torch.zeros(2, width.difference_bytes(PERIOD)[1], dtype=torch.uint8)
    before = torch.get_num_threads()
    try:
        for threads, content in zip((1, 3), contents, strict=True):
            torch.set_num_threads(threads)
            encode_host(Encoding(target, None, width, content, seed=1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*contents)


def test_without_the_library_the_reference_computes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "library", lambda: None)
    target, width = next(inputs(1000)), QUANTIZED["int8"]
    content, out = torch.zeros(width.difference_bytes(1000)[1], dtype=torch.uint8), torch.zeros(1, 1000)
    encode_host(Encoding(target, None, width, content))
    apply_host(Decoding(content[None], width, out))
    assert float((out[0] - target).abs().max()) <= float(target.abs().max()) / 127
