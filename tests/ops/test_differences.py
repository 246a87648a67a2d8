"""Differences in few bits: how far a copy is from its original, how it recovers, and what is added and subtracted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from powersgd_triton import PowerSGDConfig, config
from powersgd_triton.kernels.differences import apply_triton, encode_triton
from powersgd_triton.layout import wire_format
from powersgd_triton.layout.constants import PERIOD
from powersgd_triton.layout.wire_format import (
    ALIGNMENT,
    BLOCK,
    DIFFERENCES,
    LARGEST_BF16,
    QUANTIZED,
    SCALE_BYTES,
    WireFormat,
)
from powersgd_triton.ops import differences
from powersgd_triton.ops.backends import difference_codec
from powersgd_triton.ops.differences import apply_reference, encode_reference, random_numbers
from powersgd_triton.ops.host import apply_host, encode_host
from tests.support.kernel_cases import GRADIENTS, INF, NAN, UNWRITTEN, over_dtypes

# Around a block, and around the five blocks that share ternary codes' bytes.
SIZES = [1, 127, 128, 129, 639, 640, 641, 5000]
CPU = torch.device("cpu")
TERNARY = DIFFERENCES["ternary"]
LINEAR = {name: width for name, width in DIFFERENCES.items() if width != TERNARY}
SCALED = {name: width for name, width in QUANTIZED.items() if width.scaled}
STOCHASTIC = {name: width for name, width in QUANTIZED.items() if width.stochastic}
BF16, FP8 = QUANTIZED["bf16"], QUANTIZED["fp8"]
widths = pytest.mark.parametrize("width", QUANTIZED.values(), ids=QUANTIZED)
scaled = pytest.mark.parametrize("width", SCALED.values(), ids=SCALED)
stochastic = pytest.mark.parametrize("width", STOCHASTIC.values(), ids=STOCHASTIC)
seeds = pytest.mark.parametrize("seed", [None, 3])
linear = pytest.mark.parametrize("width", LINEAR.values(), ids=LINEAR)
"""Formats whose codes are as far apart as their scales, so that a copy follows within a scale."""


def follow(target: Tensor, copies: Tensor, width: WireFormat, steps: int = 1) -> Tensor:
    """Let all rows of ``copies`` follow the target; return the last scales, one for each element."""
    numel = len(target)
    content = torch.full((len(copies), width.difference_bytes(numel)[1]), UNWRITTEN, dtype=torch.uint8)
    for _ in range(steps):
        for row, copy in zip(content, copies, strict=True):
            encode_reference(target, copy, width, row)
        apply_reference(content, width, copies)
    return scales_of(content[0], numel)


def scales_of(content: Tensor, numel: int) -> Tensor:
    """The scale of each element, in fp64."""
    scales = content[: SCALE_BYTES * -(-numel // BLOCK)].view(torch.bfloat16)
    return scales.double().repeat_interleave(BLOCK)[:numel]


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


def heavy_tailed(numel: int, seed: int = 0) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return x * x.abs() ** 3


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
    encode_reference(heavy_tailed(numel), None, width, content[:size])
    written = torch.zeros(size + 1, dtype=torch.bool)
    written[:scale_bytes] = written[offset : offset + code_bytes] = True
    assert bool((content[~written] == UNWRITTEN).all())


def test_ternary_codes_of_each_block():
    """Against fp64: elements near the border between 0 and ±1 may have either code."""
    for numel in SIZES:
        target, content = heavy_tailed(numel), torch.zeros(TERNARY.difference_bytes(numel)[1], dtype=torch.uint8)
        decoded = torch.zeros(1, numel)
        encode_reference(target, None, TERNARY, content)
        apply_reference(content[None], TERNARY, decoded)
        parts = (target.double(), decoded[0], scales_of(content, numel))
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
    contents = torch.zeros(3, width.difference_bytes(numel)[1], dtype=torch.uint8)
    encode_reference(target, None, width, contents[0], seed=seed)
    encode_reference(target, torch.zeros(numel), width, contents[1], seed=seed)
    encode_reference(left, None, width, contents[2], subtract=True, seed=seed)
    assert torch.equal(contents[0], contents[1])
    assert torch.equal(contents[0], contents[2])
    content, decoded = contents[:1], torch.zeros(1, numel)
    apply_reference(content, width, decoded)
    apply_reference(content, width, expected[None], -1.0)
    assert torch.equal(left, expected)
    whole = left.double() + decoded[0].double()
    assert bool(((whole - target.double()).abs() <= rounding(left, target)).all())
    # The sum is rounded to fp32, then to the base's dtype. Products with this weight are exact.
    apply_reference(content, width, got[None], weight)
    assert torch.equal(got, (base.float() + decoded[0] * torch.tensor(weight)).to(dtype))


def decoded(content: Tensor, width: WireFormat, numel: int) -> Tensor:
    """What a message stands for, in fp32."""
    out = torch.zeros(1, numel)
    apply_reference(content[None], width, out)
    return out[0]


def sent(target: Tensor, width: WireFormat, seed: int | None) -> Tensor:
    """A message."""
    content = torch.zeros(width.difference_bytes(len(target))[1], dtype=torch.uint8)
    encode_reference(target, None, width, content, seed=seed)
    return content


def neighbours(x: Tensor, width: WireFormat) -> Tensor:
    """How far the numbers are apart that floating-point formats have around these, or integers, in fp64."""
    if not width.mantissa:
        return torch.ones_like(x, dtype=torch.float64)
    smallest = 2.0**-6 if width is FP8 else 2.0**-126
    return torch.frexp(x.abs().double().clamp(min=smallest)).exponent.double().sub(1 + width.mantissa).exp2()


@stochastic
def test_the_mean_over_seeds_is_exact(width: WireFormat):
    """Each element is sent as one of both neighbours, with the probabilities that make its mean exact."""
    count, target = 400, heavy_tailed(5 * BLOCK + 9)
    numbers = torch.stack([decoded(sent(target, width, seed), width, len(target)) for seed in range(count)]).double()
    unit = torch.ones(len(target), dtype=torch.float64)
    if width.scaled:
        unit = scales_of(sent(target, width, 0), len(target))
    apart = neighbours(target.double() / unit, width) * unit
    assert bool(((numbers - target.double()).abs() < apart).all())
    error = (numbers.mean(0) - target.double()) / apart
    share = (target.double() / apart) % 1
    # Five standard deviations, and what a few rare events add to them.
    bound = 5 * (share * (1 - share) / count).sqrt() + 5 / count
    assert bool((error.abs() <= bound).all())
    # The elements of a message have different random numbers: all together are far nearer.
    assert abs(float(error.mean())) <= 5 * 0.5 / (count * len(target)) ** 0.5
    # The nearest number would be wrong by as much as always.
    nearest = decoded(sent(target, width, None), width, len(target)).double()
    assert bool((((nearest - target.double()) / apart).abs() > bound).any())


@stochastic
def test_random_numbers_depend_on_seed_part_and_span(width: WireFormat):
    """The same bytes with the same seed. With another one, and elsewhere, the same values are rounded otherwise."""
    each, values = 2 * PERIOD, torch.full((BLOCK,), 1.0 + 2.0**-9)
    # So that the scale is 1.
    values[0] = width.levels
    target = values.repeat(2 * each // BLOCK)
    offset, size = width.difference_bytes(each)
    contents = torch.zeros(3, 2, size, dtype=torch.uint8)
    for content, seed in zip(contents, (1, 1, 2), strict=True):
        encode_reference(target, None, width, content, each=each, seed=seed)
    assert torch.equal(contents[0], contents[1])
    codes = contents[[0, 2], :, offset : offset + each * width.bits // 8].reshape(8, -1)
    for one in range(8):
        for other in range(one):
            assert not torch.equal(codes[one], codes[other])
    # A span uses each of the numbers below 2¹⁶ once.
    assert torch.equal(random_numbers(CPU, True)[7 : PERIOD + 7].sort().values, torch.arange(PERIOD).int())
    rounded = decoded(sent(torch.full((PERIOD,), 1.0 + 2.0**-9), BF16, 1), BF16, PERIOD)
    assert int((rounded > 1).sum()) == PERIOD // 4


@scaled
@seeds
def test_codes_stay_within_the_levels(width: WireFormat, seed: int | None):
    """Also where scales are below bf16's normal numbers, so that they are rounded coarsely."""
    generator, levels = torch.Generator().manual_seed(0), 3 if width.bits == 2 else width.levels
    random = torch.rand(64 * BLOCK, generator=generator)
    # In units of the smallest number. The quotients by the first of the scales are rounded down by the division, and
    # PERIOD elements have all random numbers.
    coarse = torch.tensor([2**16 + 0.4, 1.49 * 2**16]).repeat_interleave(PERIOD) * (width.levels * 2.0**-149)
    for target in (coarse, *(random * 2.0**exponent for exponent in (0, 100, -100, -120, -126, -133))):
        content = sent(target, width, seed)
        scales = scales_of(content, len(target))
        assert bool((decoded(content, width, len(target)).double().abs() <= scales * levels).all())
        if seed is not None and width.stochastic:
            rounded_down = target.double() > scales * levels * (1 + 2.0**-22)
            assert not (rounded_down & (scales >= 2.0**-126)).any()


@scaled
@seeds
def test_what_stands_for_the_largest_numbers_is_finite(width: WireFormat, seed: int | None):
    """Also where a scale would be rounded up so far that its product with the largest code is not."""
    for value in (3.39e38, 3.4e38, torch.finfo(torch.float32).max):
        target = torch.tensor([value, -value, 1.0, 0.0]).repeat(32)
        content, left = sent(target, width, seed), target.clone()
        encode_reference(left, None, width, content, subtract=True, seed=seed)
        assert bool(decoded(content, width, BLOCK).isfinite().all())
        assert bool(left.isfinite().all())


@scaled
@seeds
def test_all_nans_make_their_block_nan(width: WireFormat, seed: int | None):
    """Also those that become numbers if anything is added to their bits."""
    for bits in (0x7FFFFFFF, -1, 0x7F800001):
        target = torch.ones(2 * BLOCK)
        target.view(torch.int32)[3] = bits
        assert decoded(sent(target, width, seed), width, 2 * BLOCK).isnan().view(2, BLOCK).sum(1).tolist() == [BLOCK, 0]


@seeds
def test_fp8_has_the_numbers_of_torch(seed: int | None):
    """All numbers stay themselves. The nearest number is that of a conversion, for all bf16 numbers up to 448."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    beside = torch.cat([every.nextafter(torch.tensor(INF)), every, every.nextafter(torch.tensor(-INF))])
    target = numbers if seed is not None else beside[beside.abs() <= 448]
    # So that all scales are 1.
    target = torch.nn.functional.pad(target, (0, -len(target) % (BLOCK - 1))).view(-1, BLOCK - 1)
    target = torch.nn.functional.pad(target, (1, 0), value=448.0).view(-1)
    got = decoded(sent(target, FP8, seed), FP8, len(target))
    assert torch.equal(got, target.to(torch.float8_e4m3fn).float())


@seeds
@pytest.mark.parametrize("numel", [1, 7, 160, 1000])
def test_bf16_keeps_what_is_finite_and_what_is_not(seed: int | None, numel: int):
    """Large numbers do not become infinite; what is not finite becomes the same NaN anywhere, and nothing beside it."""
    largest = torch.finfo(torch.float32).max
    for value, expected in ((largest, LARGEST_BF16), (-3.4e38, -LARGEST_BF16), (LARGEST_BF16, LARGEST_BF16)):
        target = torch.full((numel,), value)
        assert decoded(sent(target, BF16, seed), BF16, numel).tolist() == [expected] * numel
    for bits in (0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000, 0x7F800000, -0x800000):
        target = torch.ones(numel)
        target.view(torch.int32)[numel // 2 :] = bits
        codes = sent(target, BF16, seed).view(torch.int16)[:numel].tolist()
        assert codes == [0x3F80] * (numel // 2) + [0x7FC0] * (numel - numel // 2)


@widths
@over_dtypes("dtype", GRADIENTS)
def test_spans_do_not_change_a_bit(width: WireFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """A tensor that is worked on in several spans, of which the last one may be shorter."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for numel in (5000, 5120):
        target, base, results = heavy_tailed(numel).to(dtype), heavy_tailed(numel, 1).to(dtype), []
        for span in (8 * 640, 2 * 640):
            monkeypatch.setattr(differences, "SPAN", span)
            left, copies = target.clone(), base.clone()[None]
            contents = torch.zeros(2, width.difference_bytes(numel)[1], dtype=torch.uint8)
            encode_reference(left, None, width, contents[0], subtract=True)
            encode_reference(target, base, width, contents[1])
            apply_reference(contents[1:], width, copies, 1 / 3)
            results.append((contents, left, copies))
        for whole, divided in zip(*results, strict=True):
            assert torch.equal(whole, divided)


def test_the_configuration_knows_all_formats_and_the_backend_decides_who_codes():
    assert {*config.QUANTIZED} == {*wire_format.QUANTIZED} > {*DIFFERENCES}
    choices = {name: difference_codec(PowerSGDConfig(backend=name), CPU, torch.float32) for name in ("torch", "triton")}
    assert {name: codec[:2] for name, codec in choices.items()} == {
        "torch": (encode_host, apply_host),
        "triton": (encode_triton, apply_triton),
    }
