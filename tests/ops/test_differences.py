"""Differences in few bits: how far a copy is from its original, how it recovers, and what is added and subtracted."""

import pytest
import torch
from torch import Tensor

from benchmarks.network.stand_ins import CountedWorker
from powersgd_triton import Compressor, PowerSGDConfig, config
from powersgd_triton.demo.measure import Call
from powersgd_triton.kernels.differences import apply_triton, encode_triton
from powersgd_triton.layout import wire_format
from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.constants import PERIOD
from powersgd_triton.layout.sparse_format import CHUNK, SparseFormat
from powersgd_triton.layout.wire_format import ALIGNMENT, BLOCK, DIFFERENCES, SCALE_BYTES, WireFormat
from powersgd_triton.ops import host
from powersgd_triton.ops.backends import difference_codec
from powersgd_triton.ops.differences import apply_reference, encode_reference
from powersgd_triton.ops.host import apply_host, encode_host
from powersgd_triton.ops.sparse import apply_sparse_reference, encode_sparse_reference
from powersgd_triton.schemes.quantized_mean import Exchange, summed
from tests.support.checks import CPU, on_threads
from tests.support.differences import decoded, heavy_tailed, scaled, scales_of, seeds, sent, widths
from tests.support.kernel_cases import GRADIENTS, INF, NAN, UNWRITTEN, over_dtypes

# Around a block, and around the five blocks that share ternary codes' bytes.
SIZES = [1, 127, 128, 129, 639, 640, 641, 5000]
TERNARY = DIFFERENCES["ternary"]
LINEAR = {name: width for name, width in DIFFERENCES.items() if width != TERNARY}
linear = pytest.mark.parametrize("width", LINEAR.values(), ids=LINEAR)
"""Formats whose codes are as far apart as their scales, so that a copy follows within a scale."""


def follow(target: Tensor, copies: Tensor, width: WireFormat, steps: int = 1) -> Tensor:
    """Let all rows of ``copies`` follow the target; return the last scales, one for each element."""
    numel = len(target)
    content = torch.full((len(copies), width.difference_bytes(numel)[1]), UNWRITTEN, dtype=torch.uint8)
    for _ in range(steps):
        for row, copy in zip(content, copies, strict=True):
            encode_reference(Encoding(target, copy, width, row))
        apply_reference(Decoding(content, width, copies))
    return scales_of(content[0], numel)


def step(width: WireFormat) -> float:
    """The largest distance from a difference to its code, in scales.

    Half the distance of two codes, which is 2 in 2 bits and 1 otherwise; or what is beyond the largest code, by the
    levels and by the rounding of the scale to bf16.
    """
    half, largest = (1.0, 3) if width.bits == 2 else (0.5, width.levels)
    return max(half, width.levels * (1 + 2.0**-8) - largest)


def rounding(copy: Tensor, target: Tensor) -> Tensor:
    """Half a unit of the copy's last place, and some roundings of fp32."""
    info = torch.finfo(copy.dtype)
    half = torch.maximum(copy.double().abs() * info.eps, torch.tensor(info.tiny * info.eps).double()) / 2
    return half + 2.0**-22 * (copy.double().abs() + target.double().abs())


@linear
@over_dtypes("dtype", GRADIENTS)
def test_steps_end_within_a_code_and_repeated_ones_at_the_copys_rounding(width: WireFormat, dtype: torch.dtype):
    """A step leaves at most step / levels of a block's largest difference, and adds a rounding of the copy."""
    for numel in SIZES:
        target, copies = heavy_tailed(numel), heavy_tailed(numel, 1).to(dtype)[None]
        scales = follow(target, copies, width)
        left = (target.double() - copies[0].double()).abs()
        assert bool((left <= step(width) * scales + rounding(copies[0], target)).all()), numel
    copies.zero_()
    follow(target, copies, width, 40)
    blocks = torch.zeros(2, 40 * BLOCK, dtype=torch.float64)
    blocks[0, :5000] = (target.double() - copies[0].double()).abs()
    blocks[1, :5000] = rounding(copies[0], target)
    left, rounded = blocks.view(2, 40, BLOCK).amax(2)
    shrink = step(width) / width.levels * (1 + 2.0**-7)
    assert bool((left <= rounded * 1.01 / (1 - shrink)).all())


@scaled
@over_dtypes("dtype", GRADIENTS)
def test_what_is_not_finite_makes_its_block_nan_until_it_recovers(width: WireFormat, dtype: torch.dtype):
    for value in (NAN, INF, -INF):
        target, copies = heavy_tailed(3 * BLOCK + 5), heavy_tailed(3 * BLOCK + 5, 1).to(dtype)[None]
        broken = target.clone()
        broken[BLOCK + 7] = broken[-1] = value
        follow(broken, copies, width)
        spoiled = copies[0].isnan()
        assert bool(spoiled[BLOCK : 2 * BLOCK].all())
        assert bool(spoiled[3 * BLOCK :].all())
        assert int(spoiled.sum()) == BLOCK + 5
        follow(target, copies, width)
        # Blocks that were NaN follow from 0.
        expected = torch.zeros_like(copies)
        follow(target, expected, width)
        assert torch.equal(copies[0, spoiled], expected[0, spoiled])
    # A difference beyond fp32 makes the block NaN, too.
    target, copies = torch.full((BLOCK,), 2.0**127), torch.full((1, BLOCK), -(2.0**127))
    follow(target, copies, width)
    assert bool(copies.isnan().all())
    # A copy that is not finite counts as 0. Equal tensors stay equal, beside others of the same block or not.
    copies, zeros = torch.zeros(2, 1, len(target), dtype=dtype)
    copies[0, :3] = torch.tensor([INF, -INF, NAN])
    follow(target, copies, width)
    follow(target, zeros, width)
    assert torch.equal(copies, zeros)
    follow(torch.empty(0), torch.empty(2, 0, dtype=dtype), width)


@pytest.mark.parametrize("numel", [127, 641, 5000])
@widths
def test_message_is_scales_then_codes(width: WireFormat, numel: int):
    """Each in whole blocks and aligned; what aligns them is not written. bf16 has no scales."""
    blocks = (numel + 639) // 640 * 5 if width == TERNARY else -(-numel // BLOCK)
    offset, size = width.difference_bytes(numel)
    assert offset % ALIGNMENT == size % ALIGNMENT == 0
    scale_bytes = SCALE_BYTES * blocks * width.scaled
    assert scale_bytes <= offset < scale_bytes + ALIGNMENT
    code_bytes = blocks // 5 * BLOCK if width == TERNARY else blocks * BLOCK * width.bits // 8
    assert code_bytes <= size - offset < code_bytes + ALIGNMENT
    content = torch.full((size + 1,), UNWRITTEN, dtype=torch.uint8)
    encode_reference(Encoding(heavy_tailed(numel), None, width, content[:size]))
    written = torch.zeros(size + 1, dtype=torch.bool)
    written[:scale_bytes] = written[offset : offset + code_bytes] = True
    assert bool((content[~written] == UNWRITTEN).all())


def test_ternary_codes_of_each_block():
    """Against fp64: elements near the border between 0 and ±1 may have either code."""
    for numel in SIZES:
        target = heavy_tailed(numel)
        content = sent(target, TERNARY)
        parts = (target.double(), decoded(content, TERNARY, numel), scales_of(content, numel))
        for block, got, scale in zip(*(part.split(BLOCK) for part in parts), strict=True):
            border = 0.7 * block.abs().mean()
            assert bool((got[block.abs() <= border * (1 - 2.0**-20)] == 0).all())
            assert bool((got[block.abs() > border * (1 + 2.0**-20)] != 0).all())
            kept = got != 0
            assert torch.equal(got[kept].double(), scale[kept] * block[kept].sign())
            # Rounded to the 8 bits of bf16.
            torch.testing.assert_close(scale[0], block[kept].abs().mean(), rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("largest", [torch.finfo(torch.float32).max, 2.0**-120, 2.0**-149])
def test_ternary_scales_of_the_largest_and_the_smallest_values(largest: float):
    """Neither sums nor scales overflow, and what is too small for a scale in bf16 is 0."""
    for numel in (1, 3, BLOCK):
        scales = follow(torch.full((numel,), largest), torch.zeros(1, numel), TERNARY)
        expected = min(largest, (2 - 2.0**-7) * 2.0**127) if largest >= 2.0**-133 else 0.0
        assert scales.tolist() == [expected] * numel


@widths
@seeds
@over_dtypes("dtype", GRADIENTS)
def test_bases_weights_and_what_is_subtracted(width: WireFormat, seed: int | None, dtype: torch.dtype):
    """No base stands for zeros; what was sent is taken back as with weight −1, and nothing is lost."""
    numel, weight = 700, 0.25
    target, base = heavy_tailed(numel).to(dtype), heavy_tailed(numel, 1).to(dtype)
    left, expected, got = target.clone(), target.clone(), base.clone()
    content = sent(target, width, seed)
    assert torch.equal(content, sent(target, width, seed, base=torch.zeros(numel)))
    assert torch.equal(content, sent(left, width, seed, subtract=True))
    value = decoded(content, width, numel)
    apply_reference(Decoding(content[None], width, expected[None], -1.0))
    assert torch.equal(left, expected)
    whole = left.double() + value.double()
    assert bool(((whole - target.double()).abs() <= rounding(left, target)).all())
    # The sum is rounded to fp32, then to the base's dtype. Products with this weight are exact.
    apply_reference(Decoding(content[None], width, got[None], weight))
    assert torch.equal(got, (base.float() + value * torch.tensor(weight)).to(dtype))


def test_bits_of_c_depend_on_no_threads_and_without_it_the_reference_computes(monkeypatch: pytest.MonkeyPatch):
    width, target = DIFFERENCES["int8"], heavy_tailed(PERIOD)
    contents = [sent(target, width, 1, encode=encode_host) for _ in on_threads(1, 3)]
    monkeypatch.setattr(host, "library", lambda: None)
    content = sent(target, width, 1, encode=encode_host)
    assert all(torch.equal(content, other) for other in contents)
    assert torch.equal(*(decoded(content, width, PERIOD, apply) for apply in (apply_host, apply_reference)))


def test_the_configuration_knows_all_formats_and_the_backend_decides_who_codes():
    assert {*config.QUANTIZED} == {*wire_format.QUANTIZED} > {*DIFFERENCES}
    choices = {name: difference_codec(PowerSGDConfig(backend=name), CPU, torch.float32) for name in ("torch", "triton")}
    assert {name: codec[:2] for name, codec in choices.items()} == {
        "torch": (encode_host, apply_host),
        "triton": (encode_triton, apply_triton),
    }


# The sparse format: what is sent of each chunk, and its bytes --------------------------------------------------------


def expected(x: Tensor, kept: int) -> Tensor:
    """What one chunk's message stands for, in plain Python."""
    order = sorted((i for i in range(len(x)) if x[i] != 0), key=lambda i: (-abs(float(x[i])), i))
    kept_at = order[: -(-kept * len(x) // CHUNK)]
    scale = torch.tensor(sum(abs(float(x[i])) for i in kept_at) / max(1, len(kept_at))).bfloat16().float()
    value = torch.zeros(len(x))
    for i in kept_at:
        value[i] = scale.copysign(x[i])
    return value


@pytest.mark.parametrize("compression", [16, 50, 1000])
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
        value = torch.cat([expected(chunk, width.kept) for chunk in x.split(CHUNK)])
        assert torch.equal(left, x - value)
        out = torch.full((1, numel), 2.0)
        apply_sparse_reference(Decoding(content[None, :-1], width, out))
        assert torch.equal(out[0], 2 + value)
        chunks, offset = -(-numel // CHUNK), width.difference_bytes(numel)[0]
        unwritten = content[offset + chunks * width.chunk_bytes :]
        assert bool((unwritten == UNWRITTEN).all())
    assert 4 * CHUNK / (width.chunk_bytes + 2) >= compression


def test_what_is_not_finite_spoils_its_chunk():
    width = SparseFormat.of(50)
    for value in (NAN, INF, -INF):
        x = torch.randn(3 * CHUNK)
        x[CHUNK + 3] = value
        content = sent(x, width, encode=encode_sparse_reference)
        spoiled = decoded(content, width, len(x), apply_sparse_reference).isnan().view(3, CHUNK)
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
