"""The kernels of the sparse format: the reference's bits, and nothing written beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from powersgd_triton.kernels.sparse import apply_sparse_triton, encode_sparse_triton
from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.sparse_format import CHUNK, SparseFormat
from powersgd_triton.ops.sparse import apply_sparse_reference, encode_sparse_reference
from tests.support.kernel_cases import GRADIENTS, INF, NAN, Bytes, Memory
from tests.support.thinned import thinned

CODECS = (encode_sparse_triton, apply_sparse_triton), (encode_sparse_reference, apply_sparse_reference)


def inputs(numel: int) -> dict[str, Tensor]:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    place = torch.arange(numel)
    return {
        "ordinary": x**3,
        "ties": x.mul(2).round(),
        "zeros": -torch.zeros(numel),
        "largest": x.sign() * 3.4e38,
        "smallest": x * 2.0**-140,
        "not finite": x.masked_fill(place % 5000 == 7, NAN).masked_fill(place == numel - 1, -INF),
    }


@thinned("compression, dtype, values, each", (16, 50, 1000), GRADIENTS, list(inputs(1)), (None, CHUNK), together=1)
def test_same_bits_as_the_reference(
    compression: float, dtype: torch.dtype, values: str, each: int | None, device: torch.device
):
    for numel in (1, CHUNK, CHUNK + 100):
        width, target, results = SparseFormat.of(compression), inputs(numel)[values].to(dtype), []
        parts, length = -(-numel // (each or numel)), each or numel
        for (encode, apply), where in zip(CODECS, (device, torch.device("cpu")), strict=True):
            left = Memory([3, numel], dtype, where).fill([torch.zeros(3), target])
            content = Bytes((parts, width.difference_bytes(length)[1]), where)
            encode(Encoding(left.views[1], None, width, content.view if each else content.view[0], True, each))
            sums = Memory([length], dtype, where).fill([torch.linspace(-3, 3, length)])
            sums.views[0][::7] = INF
            apply(Decoding(content.view[:1].expand(3, -1).contiguous(), width, sums.views[0].expand(3, -1), 1 / 3))
            fresh = Memory([length] * parts, dtype, where)
            rows = fresh.flat.as_strided((parts, length), (length, 1), fresh.flat.storage_offset())
            apply(Decoding(content.view, width, rows, -0.7, fresh=True))
            assert all(memory.guarded() for memory in (left, content, sums, fresh))
            results.append([x.cpu() for x in (content.view, left.views[1], sums.views[0], rows)])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one.isnan(), other.isnan())
            assert torch.equal(*(x.nan_to_num().contiguous().view(torch.uint8) for x in (one, other))), (numel, values)


def test_nothing_of_nothing(device: torch.device):
    width, empty = SparseFormat.of(50), torch.empty(1, 0, device=device)
    content = torch.empty(1, 0, dtype=torch.uint8, device=device)
    encode_sparse_triton(Encoding(empty[0], None, width, content[0]))
    apply_sparse_triton(Decoding(content, width, empty))


def test_a_shorter_last_part_leaves_the_other_bytes(device: torch.device):
    width, x = SparseFormat.of(50), torch.randn(2 * CHUNK + 5)
    found = []
    for (encode, apply), where in zip(CODECS, (device, torch.device("cpu")), strict=True):
        content = torch.zeros(2, width.difference_bytes(2 * CHUNK)[1], dtype=torch.uint8, device=where)
        encode(Encoding(x.to(where), None, width, content, each=2 * CHUNK))
        out = torch.zeros(1, 5, device=where)
        apply(Decoding(content[1:], width, out, each=2 * CHUNK))
        found.append((content.cpu(), out.cpu()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][1].count_nonzero() == 1
