"""Quantization: differences between a flat tensor and a copy of it, or whole tensors, in few bits an element.

A copy v follows its original w by v ← v + decode(encode(w − v)). The rounding error remains in w − v, and is part of
the next difference: the copy needs no error buffer and cannot drift away. Whole tensors are sent as their differences
from 0. With error feedback, what was encoded is then subtracted from them, so that they keep the rounding error.
Without it, rounding is stochastic.

128 adjacent elements are a block. They share a bf16 scale: in 8, 4 and 2 bits their largest difference divided by the
format's levels, in ternary codes the mean magnitude of the elements that are not 0. bf16 has no scales.
"""

import functools

import torch
from torch import Tensor

from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.constants import BF16_NAN, E4M3_EXPONENT, E4M3_MULTIPLES, E4M3_SHIFT, INFINITE_BF16, PERIOD
from powersgd_triton.layout.wire_format import BLOCK, LARGEST_BF16, SCALE_BYTES, TERNARY_ZERO, WireFormat
from powersgd_triton.ops.orthogonalize import mix
from powersgd_triton.ops.reference import on_host

SPAN = 160 * 5 * BLOCK
"""Elements that a thread of the CPU works on at a time, so that they stay in its cache. Whole groups of blocks."""
ORDINARY = 2.0**-100
"""Scales above are normal numbers."""


def encode_reference(task: Encoding) -> None:
    """out ← scales and codes of target − base; see ``Encoding``.

    8 and 4 bits: round((target − base) / scale), ties to even; fp8 and bf16: the nearest number. 2 bits: the nearest of
    −3, −1, 1 and 3 times the scale. Ternary: 0 for magnitudes up to 0.7 of the block's mean, and ±1 for others, whose
    mean magnitude is the scale. With a ``seed``, formats of 4 bits and more round stochastically instead: to
    the number above with the probability of its share, so that the mean is exact. Scales are then rounded up.
    An element of ``base`` that is not finite counts as 0, so that it recovers. If a difference is not finite, the scale
    of its block is NaN; bf16 has NaN for this one alone, and for larger numbers its largest.
    """
    width, seed = task.width, task.seed if task.width.stochastic else None
    for part, (target, base, out) in enumerate(task.messages()):
        spans = _spans(target, out, width, task.each or len(target), None if seed is None else PERIOD)
        copies = [None] * len(spans) if base is None else base.split([len(own) for own, _, _ in spans])
        starts = [0] * len(spans)
        if seed is not None:
            # Where the random numbers of each span begin.
            numbers = torch.arange(len(spans), device="cpu") + first_span(part)
            starts = (mix(mix(numbers) ^ seed) % PERIOD).tolist()
        for (own, scales, codes), copy, start in zip(spans, copies, starts, strict=True):
            difference = own.float() if copy is None else own.float() - _finite(copy)
            if padding := len(codes) * width.blocks * BLOCK - len(own):
                difference = torch.nn.functional.pad(difference, (0, padding))
            noise = None
            if seed is not None:
                noise = random_numbers(own.device, bool(width.mantissa))[start:][: len(difference)].view(-1, BLOCK)
            values = _encode(difference.view(-1, BLOCK), len(own), width, scales, noise)
            _pack(values, width, codes)
            if task.subtract:
                if scales is not None:
                    values.mul_(scales.float())
                own.sub_(values.view(-1)[: len(own)])


def apply_reference(task: Decoding) -> None:
    """base ← base + codes · (scales · weight), computed in fp32 and rounded once to the dtype of ``base``.

    Elements of ``base`` that are not finite count as 0. A message that is not finite is added as it is.
    """
    width, weight = task.width, task.weight
    for row, contents in task.rows():
        each = task.each or len(row)
        for messages in zip(*(_spans(row, content, width, each) for content in contents), strict=True):
            # All messages of a span while it is in the cache.
            own = messages[0][0]
            total = None if task.fresh else _finite(own)
            for _, scales, codes in messages:
                added = _unpack(codes, width).mul_(weight if scales is None else scales.float() * weight)
                total = added.view(-1)[: len(own)] if total is None else total.add_(added.view(-1)[: len(own)])
                # Each sum is rounded to the dtype of the base.
                total = total.to(own.dtype).float()
            own.copy_(total)


def note_infinite_reference(bits: Tensor, verdict: Tensor) -> None:
    """Set an int64 scalar to 0 if one of bf16 numbers, int16 [rows, numbers], is not finite.

    Encoders write BF16_NAN for what is not, which has no sign: bits of other negative numbers need no look.
    """
    if bits.numel():
        verdict.mul_(bits.amax() < INFINITE_BF16)


def _encode(difference: Tensor, numel: int, width: WireFormat, scales: Tensor | None, noise: Tensor | None) -> Tensor:
    """Write the scales of blocks [blocks, 128]. Return the codes as numbers, in units of the scales, in fp32.

    They are made in fp32, since torch on the CPU is slow with bools. ``noise`` is of ``random_numbers``.
    """
    if scales is None:
        return _rounded(difference, width, noise)
    if width.ternary:
        size, values = _ternary(difference, numel)
    else:
        size = torch.maximum(difference.amax(1, keepdim=True), -difference.amin(1, keepdim=True)).abs_()
        # Not by a number: torch on CUDA would multiply by its reciprocal, which has other bits.
        size = size / torch.full((), width.levels, dtype=size.dtype, device=size.device)
    scale = scales.copy_(size if noise is None else _up(size)).float()
    # On other devices the host would have to wait to know.
    if on_host(size):
        least, most = map(float, torch.aminmax(size))
        if not width.ternary and width.bits > 2 and least > ORDINARY and most < width.largest_scale / 2:
            return _rounded(difference / scale, width, noise)
    finite = size.isfinite()
    # Not larger by rounding: what a code stands for must be finite.
    scales.clamp_(max=width.largest_scale)
    # One of the many NaNs, so that all backends write the same bytes.
    scales.view(torch.int16).masked_fill_(~finite, BF16_NAN)
    scale = scales.float()
    if width.bits == 2:
        values = difference.clone().ge_(-2 * scale)
        for border in (torch.zeros_like(scale), 2 * scale):
            values.add_(difference.clone().ge_(border))
        values.mul_(2).sub_(3)
    elif not width.ternary:
        # Differences in a block with scale 0, or with scale NaN, get the code 0.
        values = difference / torch.where(scale > 0, scale, torch.inf)
        # Scales below bf16's normal numbers are rounded coarsely: a quotient may exceed the levels.
        values = _rounded(values.nan_to_num_().clamp_(-width.levels, width.levels), width, noise)
    # All backends write the same bytes of a block whose scale is NaN.
    lowest = 0 if width.mantissa else -3 if width.bits == 2 else -(width.numbers // 2)
    return torch.where(finite, values, lowest)


def _rounded(values: Tensor, width: WireFormat, noise: Tensor | None) -> Tensor:
    """Return values that the format has: the nearest, or with random numbers one of both neighbours.

    It may overwrite values in units of a scale. bf16 has NaN for what is not finite.
    """
    if not width.scaled:
        rounded = values.bfloat16().float() if noise is None else _cut(values.view(torch.int32).add(noise), width)
        if not on_host(values) or not max(map(abs, torch.aminmax(values))) <= LARGEST_BF16:
            # What rounds to an infinity is as near to the largest number.
            rounded = torch.where(values.isfinite(), rounded.clamp_(-LARGEST_BF16, LARGEST_BF16), torch.nan)
        return rounded
    if not width.mantissa:
        # 0 in the place of −0.
        return values.round_().add_(0.0) if noise is None else values.add_(noise).floor_().sub_(128)
    if noise is None:
        # A number of 1.5 · 2²³ units in the last place of the format: only its multiples remain in the sum.
        exponent = values.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=E4M3_EXPONENT)
        unit = exponent.add_(E4M3_MULTIPLES).view(torch.float32)
        return values.add_(unit).sub_(unit)
    # Random bits are added to those that the format lacks. Its subnormal numbers become those of fp32. A difference −0
    # counts as 0.
    bits = values.add_(0.0).mul_(E4M3_SHIFT).view(torch.int32).add_(noise, alpha=16)
    return _cut(bits, width).mul_(1 / E4M3_SHIFT)


def _up(size: Tensor) -> Tensor:
    """Return fp32 numbers rounded up to bf16, so that no element is larger than a scale's levels."""
    return size.view(torch.int32).add(0xFFFF).bitwise_and_(-0x10000).view(torch.float32)


def _cut(bits: Tensor, width: WireFormat) -> Tensor:
    """Return fp32 numbers without the bits of the mantissa that the format lacks. Overwrites."""
    return bits.bitwise_and_(-1 << (23 - width.mantissa)).view(torch.float32)


def _pack(values: Tensor, width: WireFormat, codes: Tensor) -> None:
    """Write the bytes [blocks that share them, bytes] of codes that are given as numbers, which it may overwrite."""
    if width.name == "fp8":
        codes.view(torch.float8_e4m3fn).copy_(values.view(codes.shape))
    elif width.mantissa:
        # Not by a conversion, which would write various NaNs.
        codes.view(torch.int16).copy_(values.view(torch.int32).bitwise_right_shift(16).view(len(codes), -1))
    elif width.bits == 8 and not width.ternary:
        codes.view(torch.int8).copy_(values.view(codes.shape))
        # From 0 on, as the others.
        codes.bitwise_xor_(128)
    else:
        # Byte j holds elements j, j + 32, j + 64 and j + 96 of a block in 2 bits, j and j + 64 in 4 bits, and in
        # ternary codes the elements j of five blocks. All sums are below 256, and int8 has the same bits.
        numbers = ((values + 3) * 0.5 if width.bits == 2 else values + width.numbers // 2).to(torch.int8)
        *others, total = numbers.view(len(codes), width.together, codes.shape[1]).unbind(1)
        for digits in reversed(others):
            total = torch.add(digits, total, alpha=width.numbers)
        codes.view(torch.int8).copy_(total)


def _unpack(codes: Tensor, width: WireFormat) -> Tensor:
    """Return codes as numbers in fp32 [blocks, 128]: the inverse of ``_pack``."""
    if width.name == "fp8":
        # Exponent and mantissa in their places in fp32, since torch on the CPU is slow with fp8.
        bits = codes.view(torch.int8).int().bitwise_left_shift_(20).bitwise_and_(-0x78100000)
        return bits.view(torch.float32).mul_(1 / E4M3_SHIFT).view(-1, BLOCK)
    if width.mantissa:
        return codes.view(torch.bfloat16).float().view(-1, BLOCK)
    if width.bits == 8 and not width.ternary:
        return codes.bitwise_xor(128).view(torch.int8).float().view(-1, BLOCK)
    if not width.ternary:
        parts = [codes.bitwise_right_shift(k * width.bits) for k in range(width.together)]
        numbers = torch.stack(parts, 1).bitwise_and_(width.numbers - 1).view(torch.int8).float().view(-1, BLOCK)
        return numbers.mul_(2).sub_(3) if width.bits == 2 else numbers.sub_(width.numbers // 2)
    # One more than the codes in a byte, since a code is what is left of its quotient by the next one.
    powers = torch.arange(width.together + 1, dtype=torch.float32, device=codes.device)
    shares = (float(width.numbers) ** -powers).unsqueeze(1)
    # Halves keep the quotients away from whole numbers, where a rounding could change their floors.
    quotients = (codes.float().add_(0.5).unsqueeze(1) * shares).floor_()
    return torch.sub(quotients[:, :-1], quotients[:, 1:], alpha=width.numbers).view(-1, BLOCK).sub_(1)


def _ternary(difference: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the scale of each block [blocks, 1], and its codes [blocks, 128]."""
    # Padding must not lower the mean.
    counts = torch.arange(numel, numel - difference.numel(), -BLOCK, device=difference.device).clamp_(1, BLOCK)
    kept = difference.abs()
    # Sums of 128ths cannot overflow.
    magnitude = kept * (1 / BLOCK)
    zero = _sum(magnitude) / counts.unsqueeze(1) * (TERNARY_ZERO * BLOCK)
    kept.gt_(zero)
    scale = _sum(magnitude.mul_(kept)) / kept.sum(1, keepdim=True).clamp_(min=1)
    # A larger mean would be infinite in bf16. NaN stays NaN.
    size = torch.where(zero.isfinite(), (scale * BLOCK).clamp_(max=LARGEST_BF16), zero)
    return size, kept.mul_(difference.sign())


def _sum(x: Tensor) -> Tensor:
    """Return the sums of rows: of neighbours, then of neighbours among these sums, and so on, as all backends do."""
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    return x


def _finite(base: Tensor) -> Tensor:
    """Return fp32 values, a copy, with 0 instead of what is not finite."""
    return base.float().nan_to_num(0.0, 0.0, 0.0)


def _spans(
    flat: Tensor, content: Tensor, width: WireFormat, each: int, span: int | None = None
) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """Return views of ``span`` elements, their scales [blocks, 1] and codes [blocks that share bytes, their bytes]."""
    numel = len(flat)
    if not numel:
        # A row of no bytes may begin anywhere, also where no scale can be.
        return []
    blocks, (codes, _) = width.difference_blocks(numel), width.difference_bytes(each)
    code_bytes = BLOCK * width.bits // 8
    groups = blocks // width.blocks
    packed = content[codes : codes + groups * code_bytes].view(groups, code_bytes)
    if span is None:
        span = SPAN * torch.get_num_threads() if flat.device.type == "cpu" else max(1, groups) * width.blocks * BLOCK
    parts, bytes_ = flat.split(span), packed.split(span // (width.blocks * BLOCK))
    if not width.scaled:
        return [(part, None, codes) for part, codes in zip(parts, bytes_, strict=True)]
    scales = content[: SCALE_BYTES * blocks].view(torch.bfloat16).view(blocks, 1)
    return list(zip(parts, scales.split(span // BLOCK), bytes_, strict=True))


# Random numbers of stochastic rounding: the same ones on all devices.


def first_span(part: int) -> int:
    """Return the number of the first PERIOD elements of a part. Parts have up to 2²⁰ of them."""
    return part % 4096 << 20


@functools.cache
def random_numbers(device: torch.device, mantissa: bool) -> Tensor:
    """Return the numbers below 2¹⁶ in a pseudo-random order, twice, int32; or 2⁻¹⁶ times them from 128 on, fp32."""
    x = torch.arange(PERIOD, dtype=torch.int32, device="cpu")
    # A permutation: each operation is one to one on 16 bits.
    for shift, factor in ((8, 0x88B5), (7, 0xDB2D), (9, 1)):
        x = x.bitwise_xor(x.bitwise_right_shift(shift)).mul_(factor).bitwise_and_(0xFFFF)
    x = torch.cat([x, x]).to(device)
    # Sums with codes have 16 bits behind the point: quotients are rounded to these, not cut.
    return x if mantissa else x.float() * 2.0**-16 + 128
