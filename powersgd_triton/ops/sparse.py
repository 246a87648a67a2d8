"""The sparse format in plain torch, which is its specification: of each chunk, the largest elements by their signs.

The scale of a chunk is the mean magnitude of what is sent of it. Zeros are not sent. Of the last chunk, which may be
shorter, the same share is sent.
"""

import torch
from torch import Tensor

from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.constants import BF16_NAN, INFINITE_BF16
from powersgd_triton.layout.sparse_format import CHUNK, SparseFormat
from powersgd_triton.layout.wire_format import LARGEST_BF16, SCALE_BYTES


def encode_sparse_reference(task: Encoding) -> None:
    """out ← scales, signs and places of the largest elements of the target. There is no base, and no seed.

    Of equal magnitudes, the first are sent. If an element of a chunk is not finite, its scale is NaN, and all of it
    counts as NaN.
    """
    width: SparseFormat = task.width
    for own, _, out in task.messages():
        scales, codes = _views(out, width, len(own), task.each)
        x = torch.nn.functional.pad(own.float(), (0, -len(own) % CHUNK)).view(-1, CHUNK)
        magnitude = x.view(torch.int32) & 0x7FFFFFFF
        finite = magnitude.amax(1, keepdim=True) < INFINITE_BF16 << 16
        # All different, and larger for the first of equal magnitudes.
        keys = magnitude.long() * CHUNK + torch.arange(CHUNK - 1, -1, -1, device=x.device)
        largest = keys.topk(width.kept, dim=1).values
        numel = torch.arange(len(own), len(own) - x.numel(), -CHUNK, device=x.device).clamp_(max=CHUNK)
        most = (width.kept * numel + CHUNK - 1) // CHUNK
        sent = (largest >= CHUNK) & (torch.arange(width.kept, device=x.device) < most[:, None]) & finite
        places = torch.where(sent, CHUNK - 1 - largest % CHUNK, CHUNK).sort(1).values
        values = torch.nn.functional.pad(x, (0, 1)).gather(1, places)
        # Magnitudes are divided first, so that sums do not overflow, and added in an order that all backends have.
        total = _spread(places, values.abs() / CHUNK)
        while total.shape[1] > 1:
            total = total[:, : total.shape[1] // 2] + total[:, total.shape[1] // 2 :]
        scale = (total / sent.sum(1, keepdim=True).clamp_(min=1) * CHUNK).clamp_(max=LARGEST_BF16)
        scales.copy_(scale).view(torch.int16).masked_fill_(~finite, BF16_NAN)
        codes.copy_(_packed(places, values < 0, width))
        if task.subtract:
            what = _spread(places, values.sign() * scales.float()).masked_fill_(~finite, torch.nan)
            own.sub_(what.view(-1)[: len(own)])


def apply_sparse_reference(task: Decoding) -> None:
    """base ← base + signs · (scales · weight) where messages have elements. Else as ``apply_reference``."""
    width: SparseFormat = task.width
    for row, contents in task.rows():
        total = torch.zeros_like(row, dtype=torch.float32) if task.fresh else row.float().nan_to_num(0.0, 0.0, 0.0)
        for content in contents if len(row) else ():
            scales, codes = _views(content, width, len(row), task.each)
            places, signs = _unpacked(codes, width)
            unit = scales.float() * task.weight
            # −0 changes no number that it is added to.
            added = _spread(places, signs * unit, -0.0).masked_fill_(unit.isnan(), torch.nan)
            total = (total + added.view(-1)[: len(row)]).to(row.dtype).float()
        row.copy_(total)


def _views(content: Tensor, width: SparseFormat, numel: int, each: int | None) -> tuple[Tensor, Tensor]:
    """Return the scales [chunks, 1] and chunks [chunks, bytes] of a message of ``numel`` elements, at most ``each``."""
    chunks, (offset, _) = -(-numel // CHUNK), width.difference_bytes(each or numel)
    scales = content[: SCALE_BYTES * chunks].view(torch.bfloat16).view(chunks, 1)
    return scales, content[offset:][: chunks * width.chunk_bytes].view(chunks, width.chunk_bytes)


def _spread(places: Tensor, values: Tensor, fill: float = 0.0) -> Tensor:
    """Return chunks that have the values in their places, of which CHUNK is none."""
    whole = values.new_full((len(places), CHUNK + 1), fill)
    return whole.scatter_(1, places, values)[:, :CHUNK].contiguous()


def _packed(places: Tensor, negative: Tensor, width: SparseFormat) -> Tensor:
    """Return the bytes of chunks."""
    sent = places < CHUNK
    planes = [(places >> bit) % 2 * sent for bit in range(width.low)]
    ones = torch.where(sent, (places >> width.low) + torch.arange(width.kept, device=places.device), width.unary)
    unary = torch.zeros(len(places), width.unary + 1, dtype=torch.long, device=places.device).scatter_(1, ones, 1)
    bits: Tensor = torch.cat([*planes, negative.long(), unary[:, :-1]], 1).unflatten(1, (-1, 8))
    return (bits << torch.arange(8, device=bits.device)).sum(2).to(torch.uint8)


def _unpacked(codes: Tensor, width: SparseFormat) -> tuple[Tensor, Tensor]:
    """Return the place of the element of each unary bit, or CHUNK, and its sign. No message has places beyond CHUNK."""
    bits = (codes[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=codes.device) & 1).flatten(1)
    *planes, unary = bits.long().split([width.kept] * (width.low + 1) + [width.unary], 1)
    number = unary.cumsum(1)
    element = (number - 1).clamp_(0, width.kept - 1)
    places = torch.arange(width.unary, device=codes.device) - element << width.low
    for bit, plane in enumerate(planes[:-1]):
        places += plane.gather(1, element) << bit
    return torch.where(unary > 0, places.clamp_(max=CHUNK), CHUNK), 1.0 - 2.0 * planes[-1].gather(1, element)
