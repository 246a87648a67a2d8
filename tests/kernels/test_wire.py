"""The kernels that write and read narrow factors: the same bits as the reference, and nothing written beside them."""

import math
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from powersgd_triton.kernels.configurations import architecture, select_configuration
from powersgd_triton.kernels.wire import TritonWire, wire_rows
from powersgd_triton.layout.wire_format import FORMATS, Chunk, Piece, WirePlan
from powersgd_triton.ops import factors as factors_in_messages
from powersgd_triton.ops.wire import TorchWire
from tests.support.kernel_cases import INF, NAN
from tests.support.kernel_checks import exchange
from tests.support.thinned import thinned

WIDTHS = ("bfloat16", "float16", "int8", "int4")
CPU = torch.device("cpu")

Shapes = list[tuple[int, int, int]]
Values = Callable[[Tensor], Tensor]

# Factors (count, rows, rank), exact elements, workers.
CASES: dict[str, tuple[Shapes, int, int]] = {
    "one row": ([(5, 1, 1), (1, 1, 3)], 3, 2),
    "within a block": ([(1, 127, 4), (2, 13, 3)], 0, 3),
    "whole blocks": ([(1, 128, 16), (1, 256, 8)], 5, 2),
    "a row more": ([(1, 129, 3), (2, 129, 1)], 1030, 4),
    "cut between workers": ([(1, 300, 4)], 7, 3),
    "mixed": ([(2, 300, 4), (1, 129, 16), (1, 5, 33), (1, 2, 1)], 1, 4),
    "several panels": ([(1, 131, 33), (1, 7, 64)], 0, 2),
    "the largest rank": ([(1, 3, 256)], 2, 1),
    "one worker": ([(1, 255, 1), (1, 130, 2)], 9, 1),
    "more workers than blocks": ([(1, 3, 2)], 2, 4),
    "two blocks": ([(1, 129, 4), (1, 13, 3)], 6, 2),
    "exact elements only": ([], 3 * 1030, 3),
}


def one_nan(content: Tensor, plan: WirePlan) -> Tensor:
    """Bytes [..., workers, size] in which all NaNs have the same bits, in codes that are conversions to bf16."""
    content = content.clone()
    for number, chunk in enumerate(plan.chunks):
        if chunk.pieces and not plan.width.scaled:
            values = content[..., number, chunk.pieces[0].code :].view(torch.bfloat16)
            values[values.isnan()] = NAN
    return content


def assert_same(
    case: str, width: str, values: Values, device: torch.device, own: bool = True, whole: bool = False
) -> None:
    """Kernels, the library in C and the reference give the same bits, and write all of them; but a NaN is a NaN.

    ``whole`` adds whole messages, without owners of parts.
    """
    factors, bypass, workers = CASES[case]
    plan = WirePlan.build(FORMATS[width], factors, bypass, 4, 1 if whole else workers)
    numel, rank = sum(map(math.prod, factors)), max((rank for _, _, rank in factors), default=1)
    generator = torch.Generator().manual_seed(0)
    messages = [values(torch.randn(numel + bypass, generator=generator)) for _ in range(workers)]
    kernels = TritonWire(plan, select_configuration(architecture(device), rank).wire, rank, device)
    on_host = TorchWire(plan, torch.float32, CPU)
    with mock.patch.object(factors_in_messages, "library", return_value=None):
        expected = exchange(on_host, messages, numel, CPU, own)
    for got in (exchange(kernels, messages, numel, device, own), exchange(on_host, messages, numel, CPU, own)):
        for name in ("sent",) if whole else ("sent", "sums"):
            assert torch.equal(one_nan(getattr(got, name), plan), one_nan(getattr(expected, name), plan))
        for name in ("own", "out"):
            torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)


LARGEST = torch.finfo(torch.float32).max
VALUES: dict[str, Values] = {
    "most entries far below a few": lambda x: x * x.abs() ** 5,
    "blocks of zeros of both signs": lambda x: torch.cat([x[: len(x) // 2] * 0, x[len(x) // 2 :]]),
    "single zeros of both signs": lambda x: x * (x.abs() > 0.5),
    # Of these columns some have a scale of few bits, some 0.
    "around the smallest scales": lambda x: (x * 2.0 ** -(118 + torch.arange(len(x)) % 29).double()).float(),
    "so large that sums stay finite": lambda x: x / x.abs().max() * (LARGEST / 8),
    # Multiples of half a code where the scale is 2⁻⁶, as it is where 127, or 7, codes are reached.
    "ties": lambda x: (x * 8).round().clamp(-14, 14) * 2.0**-7,
    "not finite, among them the first and the last": lambda x: x.index_copy(
        0, torch.tensor([0, len(x) // 2, len(x) - 1, len(x) // 3]), torch.tensor([INF, NAN, -INF, NAN])
    ),
}


@thinned("whole, width, case", (False, True), WIDTHS, list(CASES), together=1)
def test_same_bits_as_the_reference(whole: bool, width: str, case: str, device: torch.device):
    assert_same(case, width, lambda x: x, device, whole=whole)


@pytest.mark.parametrize("width", WIDTHS)
def test_same_bits_of_all_kinds_of_values(width: str, device: torch.device):
    """Without ``own`` the messages are the same, and nothing else is written."""
    for values in VALUES.values():
        with np.errstate(invalid="ignore"):
            assert_same("two blocks", width, values, device)
    assert_same("two blocks", width, lambda x: x, device, own=False)


def test_table_of_places_beyond_32_bits():
    """Nothing of these sizes is allocated."""
    far = 2**33 + 4
    chunks = (Chunk(2 * far, 3, ()), Chunk(3 * far, 5, (Piece(1, 130, 4, far, far + 8, 2 * far),)))
    plan = WirePlan(FORMATS["int8"], chunks, 4 * far)
    expected = [
        (0, 2 * far, 3, 0, 0, 0, 0),
        (1, far, 128, 4, 4, far + 8, 2 * far),
        (1, far + 512, 2, 4, 4, far + 16, 2 * far + 512),
        (1, 3 * far, 5, 0, 0, 0, 0),
    ]
    assert wire_rows(plan, 16) == (expected, [0, 1, 4])
    assert TritonWire(plan, select_configuration("sm_80", 16).wire, 16, CPU)._table.tolist() == [*map(list, expected)]
