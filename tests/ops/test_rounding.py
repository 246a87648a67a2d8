"""How single numbers are rounded to few bits: by chance or to the nearest, the largest ones, and what is no number."""

import pytest
import torch
from torch import Tensor

from powersgd_triton.layout.codec import Encoding
from powersgd_triton.layout.constants import PERIOD
from powersgd_triton.layout.wire_format import BLOCK, LARGEST_BF16, WireFormat
from powersgd_triton.ops.differences import encode_reference, random_numbers
from tests.support.differences import BF16, FP8, decoded, heavy_tailed, scaled, scales_of, seeds, sent, stochastic
from tests.support.kernel_cases import INF


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
        encode_reference(Encoding(target, None, width, content, each=each, seed=seed))
    assert torch.equal(contents[0], contents[1])
    codes = contents[[0, 2], :, offset : offset + each * width.bits // 8].reshape(8, -1)
    for one in range(8):
        for other in range(one):
            assert not torch.equal(codes[one], codes[other])
    # A span uses each of the numbers below 2¹⁶ once.
    assert torch.equal(
        random_numbers(torch.device("cpu"), True)[7 : PERIOD + 7].sort().values, torch.arange(PERIOD).int()
    )
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
        left = target.clone()
        content = sent(left, width, seed, subtract=True)
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
