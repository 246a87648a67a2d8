"""Codecs of differences and of the sparse format in kernels and in C: the reference's bits, and nothing beside them."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from powersgd_triton.kernels.differences import apply_triton, encode_triton, note_infinite_triton
from powersgd_triton.kernels.sparse import apply_sparse_triton, encode_sparse_triton
from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.constants import BF16_NAN, PERIOD
from powersgd_triton.layout.sparse_format import CHUNK, SparseFormat
from powersgd_triton.layout.wire_format import BLOCK, QUANTIZED, WireFormat
from powersgd_triton.ops import differences
from powersgd_triton.ops.differences import apply_reference, encode_reference, note_infinite_reference
from powersgd_triton.ops.host import apply_host, encode_host
from powersgd_triton.ops.sparse import apply_sparse_reference, encode_sparse_reference
from tests.support.kernel_cases import GRADIENTS, INF, NAN, Bytes, Memory
from tests.support.thinned import thinned

CPU = torch.device("cpu")
CODECS = (encode_triton, apply_triton), (encode_host, apply_host), (encode_reference, apply_reference)
COPIES = 3
SEEDS = [None, 2**32 - 5]
# Within a block and one more; five blocks, which share ternary codes' bytes; whole programs of 16 blocks, and one
# element more; more than a program of ternary codes.
SIZES = [1, 128, 640, 641, 2048, 2049, 5121]


def assert_same(
    target: Tensor,
    values: Tensor,
    width: WireFormat,
    seed: int | None,
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool = True,
) -> None:
    """All codecs write the same bytes, and make the same copies of them; but a NaN is a NaN.

    They also send the same of a tensor, leave the same of it, and add the same to another one.
    """
    numel, gap, first, size = len(target), 0 if aligned else 3, int(not aligned), width.difference_bytes(len(target))[1]
    results = []
    for (encode, apply), where in zip(CODECS, (device, CPU, CPU), strict=True):
        given = Memory([first, numel], torch.float32, where).fill([torch.zeros(first), target])
        memory = Memory([numel] * COPIES, dtype, where, gap).fill(list(values))
        copies = memory.flat.as_strided((COPIES, numel), (numel + gap, 1), memory.flat.storage_offset())
        content, whole = Bytes((COPIES, size), where), Bytes((1, size), where)
        for out, copy in zip(content.view, copies, strict=True):
            encode(Encoding(given.views[1], copy, width, out, seed=seed))
        sent = content.view.cpu().clone()
        apply(Decoding(content.view, width, copies))
        assert torch.equal(content.view.cpu(), sent)
        left = Memory([numel], dtype if aligned else torch.float32, where).fill([target])
        total = Memory([numel], torch.float32, where).fill([torch.linspace(-1, 1, numel)])
        encode(Encoding(left.views[0], None, width, whole.view[0], subtract=True, seed=seed))
        apply(Decoding(whole.view, width, total.views[0][None], 1 / 3))
        assert all(used.guarded() for used in (given, memory, content, whole, left, total))
        results.append([x.cpu() for x in (sent, whole.view, copies, left.views[0], total.views[0])])
    assert_equal(results)


def assert_equal(results: Sequence[Sequence[Tensor]]) -> None:
    """Each codec's results have the bits of the last one's; but a NaN is a NaN."""
    for got, expected in zip(results, itertools.repeat(results[-1])):
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one.isnan(), other.isnan())
            one, other = (x.masked_fill(x.isnan(), 0).contiguous().view(torch.uint8) for x in (one, other))
            assert torch.equal(one, other)


def random(numel: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator), torch.randn(COPIES, numel, generator=generator)


@thinned("width, seed, dtype, aligned", list(QUANTIZED), SEEDS, GRADIENTS, [True, False], together=1)
def test_same_bits_as_the_reference(
    width: str, seed: int | None, dtype: torch.dtype, aligned: bool, device: torch.device
):
    for numel in SIZES:
        assert_same(*random(numel), QUANTIZED[width], seed, dtype, device, aligned)
    assert QUANTIZED[width].difference_bytes(0) == (0, 0)
    empty, content = torch.zeros(1, 0, device=device), torch.zeros(1, 0, dtype=torch.uint8, device=device)
    for encode, apply in CODECS:
        encode(Encoding(empty[0], empty[0], QUANTIZED[width], content[0]))
        encode(Encoding(empty[0], None, QUANTIZED[width], content[0], subtract=True, seed=seed))
        apply(Decoding(content, QUANTIZED[width], empty))


@thinned("width, seed", list(QUANTIZED), SEEDS, together=1)
def test_same_bits_in_parts_of_several_spans(
    width: str, seed: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """Random numbers depend on an element's part and on its span of 2¹⁶ elements; the last part is short.

    What is encoded is a sum. The reference walks in shorter spans where it draws no random numbers.
    """
    monkeypatch.setattr(differences, "SPAN", 10 * 640)
    # In C, all tensors are fp32.
    dtype = torch.bfloat16 if seed is None else torch.float32
    form, each, target = QUANTIZED[width], PERIOD + 3000, random(PERIOD + 9000)[0]
    results: list[list[Tensor]] = []
    for (encode, apply), where in zip(CODECS, (device, CPU, CPU), strict=True):
        content = Bytes((2, form.difference_bytes(each)[1]), where)
        left, total = torch.full_like(target, NAN, device=where), torch.zeros(1, each, device=where)
        terms = target.to(where, dtype), (target * 1e-4).to(where)
        encode(Encoding(left, None, form, content.view, True, each, seed, terms))
        # Both messages are added to the same tensor, to what it contains and not.
        apply(Decoding(content.view, form, total[:, :2500].expand(2, -1), 0.3, each))
        fresh = torch.full((1, 2500), 7.0, dtype=dtype, device=where)
        apply(Decoding(content.view, form, fresh.expand(2, -1), 0.3, each, fresh=True))
        assert content.guarded()
        results.append([x.cpu() for x in (content.view, left, total, fresh)])
    assert_equal(results)


@thinned("width, fresh", list(QUANTIZED), [True, False], together=1)
def test_a_message_that_is_not_finite_spoils_the_sum(width: str, fresh: bool, device: torch.device):
    """Also if other messages are added behind it; what the tensor had that was not finite does not."""
    form, numel = QUANTIZED[width], 6 * BLOCK
    results = []
    for (encode, apply), where in zip(CODECS, (device, CPU, CPU), strict=True):
        content = torch.zeros(3, form.difference_bytes(numel)[1], dtype=torch.uint8, device=where)
        total = torch.full((1, numel), NAN, device=where)
        for number, row in enumerate(content):
            target = torch.ones(numel, device=where)
            target[number * BLOCK : (number + 1) * BLOCK] = NAN
            encode(Encoding(target, None, form, row))
        apply(Decoding(content, form, total.expand(3, -1), 1 / 3, fresh=fresh))
        results.append(total[0].isnan().cpu())
    assert all(torch.equal(spoiled, torch.arange(numel) < 3 * BLOCK) for spoiled in results)


def heavy_tailed(target: Tensor, copies: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Most differences far below a few."""
    return target * target.abs() ** 5, copies * 2.0**-7


def equal(target: Tensor, copies: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Differences 0 of both signs; zeros of both signs."""
    target = target.half().bfloat16().float()
    target[:BLOCK] = torch.copysign(torch.zeros(()), target[:BLOCK])
    copies = target.expand_as(copies).clone()
    copies[1, :BLOCK] *= -1
    return target, copies


def ties(target: Tensor, copies: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Differences halfway between codes: multiples of half a scale, which is 2⁻⁶ where a block has all its levels."""
    target = (target * levels).round().clamp(-2 * levels, 2 * levels) * 2.0**-7
    target[::BLOCK] = levels * 2.0**-6
    return target, torch.zeros_like(copies)


def denormal(target: Tensor, copies: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Around the smallest scales: some have few bits, some are 0."""
    exponents = -(118 + torch.arange(len(target)) // BLOCK % 29).double()
    return (target * 2.0**exponents).float(), torch.zeros_like(copies)


def huge(target: Tensor, copies: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Up to the largest of the dtypes; some differences are beyond it, and so are some sums."""
    largest = torch.finfo(torch.float32).max
    target, copies = target / target.abs().max() * largest, copies / copies.abs().max() * largest
    target[BLOCK : 2 * BLOCK] = target[BLOCK : 2 * BLOCK] / largest * 65504
    copies[:, BLOCK : 2 * BLOCK] = copies[:, BLOCK : 2 * BLOCK] / largest * 65504
    return target, copies


def not_finite(target: Tensor, copies: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """In the target, in copies, in both, and at the last element."""
    target[5], target[BLOCK + 1], target[-1] = NAN, INF, -INF
    copies[0, 5], copies[1, BLOCK + 1], copies[2, 2 * BLOCK] = NAN, INF, -INF
    copies[1, 3 * BLOCK : 4 * BLOCK] = NAN
    # Both NaNs that become numbers or infinities if anything is added to their bits.
    target.view(torch.int32)[4 * BLOCK], target.view(torch.int32)[5 * BLOCK] = 0x7FFFFFFF, -1
    return target, copies


VALUES = {values.__name__: values for values in (heavy_tailed, equal, ties, denormal, huge, not_finite)}


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@thinned("width, seed, dtype, values", list(QUANTIZED), SEEDS, GRADIENTS, list(VALUES), together=1)
def test_same_bits_of_all_kinds_of_values(
    width: str, seed: int | None, dtype: torch.dtype, values: str, device: torch.device
):
    if values == "denormal" and dtype == torch.bfloat16 and device.type == "cpu":
        # Triton's interpreter converts bf16's subnormal numbers to other ones, in both directions.
        dtype = torch.float32
    target, copies = VALUES[values](*random(29 * BLOCK + 3), QUANTIZED[width].levels)
    assert_same(target, copies, QUANTIZED[width], seed, dtype, device, aligned=False)


@pytest.mark.parametrize("note", [note_infinite_triton, note_infinite_reference])
def test_numbers_that_are_not_finite_are_noted(note: Callable[..., None], device: torch.device):
    """Wherever they are in the rows, and only there."""
    largest = torch.finfo(torch.bfloat16).max
    for numel in (1, 1024, 2500):
        for row, place in ((0, 0), (1, numel - 1), (1, numel), (None, 0)):
            numbers = torch.full((2, numel + 8), -largest, dtype=torch.bfloat16, device=device)
            numbers[:, ::2] = largest
            bits, verdict = numbers.view(torch.int16), torch.ones((), dtype=torch.int64, device=device)
            if row is not None:
                bits[row, place] = BF16_NAN
            note(bits[:, :numel], verdict)
            assert int(verdict) == (row is None or place == numel)


SPARSE_CODECS = (
    *((encode_sparse_triton, apply_sparse_triton), (encode_host, apply_host)),
    (encode_sparse_reference, apply_sparse_reference),
)


def inputs(numel: int) -> dict[str, Tensor]:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    place = torch.arange(numel)
    return {
        # The second chunk has few elements that are not 0.
        "ordinary": x**3 * (place < CHUNK) + x * (place >= CHUNK) * (x > 2.5),
        "ties": x.mul(2).round(),
        "equal but for the lowest bits": 1 + x.abs() * 2.0**-18,
        "zeros": -torch.zeros(numel),
        "largest": x.sign() * 3.4e38,
        "smallest": x * 2.0**-140,
        "not finite": x.masked_fill(place % 5000 == 7, NAN).masked_fill(place == numel - 1, -INF),
    }


@thinned("compression, dtype, values, each", (16, 50, 1000), GRADIENTS, list(inputs(1)), (None, CHUNK), together=1)
def test_sparse_messages_have_the_same_bits(
    compression: float, dtype: torch.dtype, values: str, each: int | None, device: torch.device
):
    for numel in (1, CHUNK, CHUNK + 100):
        width, target, results = SparseFormat.of(compression), inputs(numel)[values].to(dtype), []
        parts, length = -(-numel // (each or numel)), each or numel
        for (encode, apply), where in zip(SPARSE_CODECS, (device, CPU, CPU), strict=True):
            left = Memory([3, numel], dtype, where).fill([torch.zeros(3), target])
            content = Bytes((parts, width.difference_bytes(length)[1]), where)
            encode(Encoding(left.views[1], None, width, content.view if each else content.view[0], True, each))
            sums = Memory([length], dtype, where).fill([torch.linspace(-3, 3, length)])
            sums.views[0][::7] = INF
            apply(Decoding(content.view[:1].expand(3, -1).contiguous(), width, sums.views[0].expand(3, -1), 1 / 3))
            fresh = Memory([length] * parts, dtype, where).fill([torch.ones(length)] * parts)
            rows = fresh.flat.as_strided((parts, length), (length, 1), fresh.flat.storage_offset())
            apply(Decoding(content.view, width, rows, -0.7, fresh=True))
            assert all(memory.guarded() for memory in (left, content, sums, fresh))
            results.append([x.cpu() for x in (content.view, left.views[1], sums.views[0], rows)])
        assert_equal(results)


@pytest.mark.parametrize("compression", [16, 50, 1000])
def test_sparse_messages_of_any_content_write_to_their_own_chunks_only(compression: float, device: torch.device):
    """A single unary bit at the end, which is a place behind the chunk. And random bytes, of which several lanes of a
    kernel would write the same place."""
    width = SparseFormat.of(compression)
    for numel in (100, CHUNK, CHUNK + 100):
        offset, size = width.difference_bytes(numel)
        random, behind = torch.randint(0, 256, (3, size), dtype=torch.uint8), torch.zeros(3, size, dtype=torch.uint8)
        behind[:, offset + width.chunk_bytes - 1 :: width.chunk_bytes] = 128
        behind[:, : width.checked_bytes(numel)].view(torch.bfloat16).fill_(1)
        for (_, apply), where in zip(SPARSE_CODECS, (device, CPU, CPU), strict=True):
            for messages in (behind,) if apply is apply_sparse_triton else (behind, random):
                memory = Memory([numel, 2 * CHUNK], torch.float32, where).fill(
                    [torch.zeros(numel), torch.ones(2 * CHUNK)]
                )
                apply(Decoding(messages.to(where), width, memory.views[0].expand(3, -1)))
                assert bool((memory.views[1] == 1).all())
                assert messages is random or not memory.views[0].any()


def test_a_shorter_last_part_and_one_without_elements_leave_the_other_bytes(device: torch.device):
    width, x = SparseFormat.of(50), torch.randn(2 * CHUNK + 5)
    found = []
    for (encode, apply), where in zip(SPARSE_CODECS, (device, CPU, CPU), strict=True):
        content = torch.zeros(2, width.difference_bytes(2 * CHUNK)[1], dtype=torch.uint8, device=where)
        encode(Encoding(x.to(where), None, width, content, each=2 * CHUNK))
        out = torch.zeros(1, 5, device=where)
        apply(Decoding(content[1:], width, out, each=2 * CHUNK))
        found.append([content.cpu(), out.cpu()])
        # As the part of a worker, if there are fewer chunks than workers.
        none = torch.empty(1, 0, device=where)
        for parts, each in ((content[:0], CHUNK), (content, 2 * CHUNK), (none[0].to(torch.uint8), None)):
            before = parts.clone()
            encode(Encoding(none[0], None, width, parts, subtract=True, each=each))
            assert torch.equal(parts, before)
        apply(Decoding(torch.empty(2, 0, dtype=torch.uint8, device=where), width, none.expand(2, -1)))
    assert_equal(found)
    assert found[0][1].count_nonzero() == 1
