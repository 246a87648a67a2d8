"""The sparse format: what is sent of each chunk, and its bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.network.stand_ins import CountedWorker
from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.demo.measure import Call
from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.sparse_format import CHUNK, SparseFormat
from powersgd_triton.ops.host import apply_host, encode_host
from powersgd_triton.ops.sparse import apply_sparse_reference, encode_sparse_reference
from powersgd_triton.schemes.quantized_mean import Exchange, summed
from tests.support.kernel_cases import INF, NAN, UNWRITTEN

BOTH = (encode_sparse_reference, apply_sparse_reference), (encode_host, apply_host)
COMPRESSIONS = (16, 50, 1000)


def expected(x: Tensor, kept: int) -> Tensor:
    """What one chunk's message stands for, in plain Python."""
    order = sorted((i for i in range(len(x)) if x[i] != 0), key=lambda i: (-abs(float(x[i])), i))
    sent = order[: -(-kept * len(x) // CHUNK)]
    scale = torch.tensor(sum(abs(float(x[i])) for i in sent) / max(1, len(sent))).bfloat16().float()
    decoded = torch.zeros(len(x))
    for i in sent:
        decoded[i] = scale.copysign(x[i])
    return decoded


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("numel", [1, 100, CHUNK, CHUNK + 1, 2 * CHUNK + 700])
def test_the_largest_are_sent(compression: float, numel: int):
    """Of equal magnitudes the first, and no zeros. A message has its size whatever is sent, and no other byte."""
    torch.manual_seed(numel)
    width = SparseFormat.of(compression)
    # Whole numbers, of which many are equal, and their sums exact.
    for x in (torch.randn(numel).mul(9).round(), torch.zeros(numel), -torch.ones(numel)):
        x[7:9] = 0
        content, left = torch.full((width.difference_bytes(numel)[1] + 1,), UNWRITTEN, dtype=torch.uint8), x.clone()
        encode_sparse_reference(Encoding(left, None, width, content[:-1], subtract=True))
        decoded = torch.cat([expected(chunk, width.kept) for chunk in x.split(CHUNK)])
        assert torch.equal(left, x - decoded)
        out = torch.full((1, numel), 2.0)
        apply_sparse_reference(Decoding(content[None, :-1], width, out))
        assert torch.equal(out[0], 2 + decoded)
        chunks, offset = -(-numel // CHUNK), width.difference_bytes(numel)[0]
        unwritten = content[offset + chunks * width.chunk_bytes :]
        assert bool((unwritten == UNWRITTEN).all())
    assert 4 * CHUNK / (width.chunk_bytes + 2) >= compression


def test_no_elements():
    """As the part of a worker, if there are fewer chunks than workers."""
    width = SparseFormat.of(50)
    for encode, _ in BOTH:
        for dtype in (torch.float32, torch.bfloat16):
            content = torch.full((1, width.difference_bytes(CHUNK)[1]), UNWRITTEN, dtype=torch.uint8)
            encode(Encoding(torch.zeros(0, dtype=dtype), None, width, content[1:], subtract=True, each=CHUNK))
            encode(Encoding(torch.zeros(0, dtype=dtype), None, width, content, subtract=True, each=CHUNK))


def test_what_is_not_finite_spoils_its_chunk():
    width = SparseFormat.of(50)
    for encode, apply in BOTH:
        for value in (NAN, INF, -INF):
            x, out = torch.randn(3 * CHUNK), torch.zeros(1, 3 * CHUNK)
            x[CHUNK + 3] = value
            content = torch.zeros(width.difference_bytes(len(x))[1], dtype=torch.uint8)
            encode(Encoding(x, None, width, content))
            apply(Decoding(content[None], width, out))
            spoiled = out[0].isnan().view(3, CHUNK)
            assert spoiled.all(1).tolist() == spoiled.any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_bytes_of_a_worker(workers: int):
    """As many times fewer as asked for than an all-reduce in fp32, whatever the number of workers."""
    numel, calls = 64 * 16 * CHUNK, list[tuple[bool, Call]]()
    config = PowerSGDConfig(quantize="sparse", compression=100)
    for _ in summed(torch.randn(numel), Exchange(config, CountedWorker(0, workers, calls))):
        pass
    exact = 2 * (workers - 1) / workers * 4 * numel
    assert 100 <= exact / sum(call.sent for _, call in calls) <= 103


def test_it_is_for_local_steps():
    with pytest.raises(ValueError, match="is for LocalSteps"):
        Compressor(PowerSGDConfig(quantize="sparse"), {"w": (8, 8)})
