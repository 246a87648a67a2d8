"""Factors in 16, 8 and 4 bits: what is written, what arrives, and that nothing is lost."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import PowerSGDConfig
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.matrices import compressed_rank
from powersgd_triton.layout.wire_format import ALIGNMENT, BLOCK, FORMATS, LARGE_CHUNK, WirePlan
from powersgd_triton.ops.wire import TorchWire
from tests.support.checks import CPU, everything, gradients, same_bits
from tests.support.kernel_checks import exchange
from tests.support.lockstep import Fleet
from tests.support.thinned import thinned

NARROW = ["bfloat16", "float16", "int8", "int4"]
WIDTHS = ["float32", *NARROW]
FACTORS = [(3, 300, 4), (1, 5, 2), (2, 128, 3), (5, 27, 1), (1, 129, 7), (2, 1, 1), (1, 257, 33)]
BYPASS = 37
# Largest distance from a value to its code, in units of what the block's largest magnitude is: half a unit in the last
# place of 8 and 11 bits of mantissa, half a step of 127 and 7 steps, and what a bf16 scale is off by.
COARSE = {"bfloat16": 2.0**-8, "float16": 2.0**-11 + 2.0**-9, "int8": 0.5 / 127 + 2.0**-9, "int4": 0.5 / 7 + 2.0**-9}


def numel(factors: list[tuple[int, int, int]]) -> int:
    return sum(count * rows * rank for count, rows, rank in factors)


def plan_of(name: str, workers: int, messages: list[Tensor], factors: list[tuple[int, int, int]] = FACTORS) -> WirePlan:
    exact = len(messages[0]) - numel(factors)
    return WirePlan.build(FORMATS[name], factors, exact, messages[0].element_size(), workers)


def random_messages(workers: int, dtype: torch.dtype = torch.float32, tail: float = 4) -> list[Tensor]:
    """Heavy-tailed: entries of one column differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(workers)
    shape = numel(FACTORS) + BYPASS
    return [
        torch.randn(shape, dtype=dtype, generator=generator)
        * torch.rand(shape, dtype=dtype, generator=generator).pow(tail)
        for _ in range(workers)
    ]


def column_blocks(flat: Tensor, plan: WirePlan) -> list[Tensor]:
    """[rows, rank] of each block of at most 128 rows that shares scales, in their order."""
    pieces = [piece for chunk in plan.chunks for piece in chunk.pieces]
    parts = [flat[piece.element :][: piece.numel].view(piece.count, piece.rows, piece.rank) for piece in pieces]
    return [block for part in parts for matrix in part for block in matrix.split(BLOCK)]


def exchanged(
    name: str, owners: int, messages: list[Tensor], factors: list[tuple[int, int, int]] = FACTORS
) -> tuple[Tensor, Tensor]:
    """What arrives of one message of each worker, and what each contributed [workers, numel]."""
    wire = TorchWire(plan_of(name, owners, messages, factors), messages[0].dtype, torch.device("cpu"))
    result = exchange(wire, messages, numel(factors), torch.device("cpu"))
    return result.out, result.own


@thinned("name, workers, dtype", NARROW, [1, 2, 3, 4, 7], [torch.float32, torch.float64], together=1)
def test_what_arrives_is_near_the_sum_and_all_of_it_was_contributed(name: str, workers: int, dtype: torch.dtype):
    messages = random_messages(workers, dtype)
    arrived, contributed = exchanged(name, workers, messages)
    many, true = numel(FACTORS), torch.stack(messages).double().sum(dim=0)
    unit = torch.finfo(dtype).eps / 2
    # Sums of so many terms, in another order than here.
    size = torch.stack(messages).double().abs().sum(dim=0)
    assert ((arrived[many:] - true[many:]).abs() <= workers * unit * size[many:]).all()
    off, largest = (arrived - true)[:many].abs(), [message[:many].abs() for message in messages]
    plan = plan_of(name, workers, messages)
    for block, *sizes in zip(*(column_blocks(each, plan) for each in [off, *largest, true[:many].abs()]), strict=True):
        # Each worker's rounding, and that of the sum, which is at most what the workers' and the roundings add up to.
        bound = COARSE[name] * (1 + COARSE[name]) * sum(each.amax(dim=0) for each in sizes[:-1])
        assert (block <= bound + COARSE[name] * (sizes[-1].amax(dim=0) + bound)).all()
    # The owner's correction is exact but for the subtraction from its own part, which is rounded once.
    slack = 4 * workers * unit * (arrived[:many].double().abs() + contributed.double().abs().sum(dim=0))
    assert ((contributed.double().sum(dim=0) - arrived[:many].double()).abs() <= slack).all()


@thinned("name, dtype", NARROW, [torch.float32, torch.float64], together=2)
def test_whole_messages_are_added_without_a_second_rounding(name: str, dtype: torch.dtype):
    messages = random_messages(2, dtype)
    arrived, contributed = exchanged(name, 1, messages)
    assert torch.equal(arrived[: numel(FACTORS)], contributed[0] + contributed[1])
    assert torch.equal(arrived[numel(FACTORS) :], (messages[0] + messages[1])[numel(FACTORS) :])


@pytest.mark.parametrize("name", NARROW)
def test_zeros_denormals_and_the_largest_values(name: str):
    factors = [(1, 6, 4)]
    values = torch.zeros(6, 4)
    values[:, 1] = 1e-42
    values[:, 2] = torch.finfo(torch.float32).max / 4
    values[3, 3] = -1e-7
    arrived, contributed = exchanged(name, 2, [values.flatten(), values.flatten()], factors)
    arrived = arrived.view(6, 4)
    assert not arrived[:, 0].any()
    assert arrived.isfinite().all()
    assert torch.allclose(arrived[:, 2], 2 * values[:, 2], rtol=2 * COARSE[name], atol=0)
    assert abs(float(arrived[3, 3]) / -2e-7 - 1) <= 2 * COARSE[name]
    assert not arrived[:3, 3].any()
    assert torch.equal(contributed.sum(dim=0).view(6, 4), arrived)


@pytest.mark.parametrize("name", NARROW)
def test_threads_that_flush_denormals_write_and_read_the_same(name: str):
    # Codes whose fp16 number is subnormal are ordinary numbers in fp32.
    values = (1e-5 * random_messages(1, tail=0)[0]).index_fill(0, torch.arange(0, numel(FACTORS), 100), 1)
    expected = exchanged(name, 2, [values, values])
    torch.set_flush_denormal(True)
    try:
        found = exchanged(name, 2, [values, values])
    finally:
        torch.set_flush_denormal(False)
    assert all(map(torch.equal, found, expected))


def test_any_fp16_code_of_a_message_is_its_number():
    numbers = torch.arange(-(2**15), 2**15).short().view(torch.float16)
    plan = plan_of("float16", 1, [numbers.float()], [(1, len(numbers), 1)])
    (piece,) = plan.chunks[0].pieces
    message, out = torch.zeros(1, plan.size, dtype=torch.uint8), torch.empty(len(numbers))
    message[0, piece.scale :].view(torch.bfloat16)[: len(numbers) // BLOCK] = 1
    message[0, piece.code :].view(torch.float16)[: len(numbers)] = numbers
    TorchWire(plan, out.dtype, CPU).decode(message, out=out)
    torch.testing.assert_close(out, numbers.float(), rtol=0, atol=0, equal_nan=True)


@thinned("name, value", NARROW, [float("inf"), float("-inf"), float("nan")], together=1)
def test_a_value_that_is_not_finite_spoils_its_blocks_column_only(name: str, value: float):
    messages = random_messages(3)
    messages[1][2 * 4 + 1] = value
    messages[2][numel(FACTORS) + 5] = value
    arrived, _ = exchanged(name, 3, messages)
    many = numel(FACTORS)
    assert arrived[many:].isfinite().sum() == BYPASS - 1
    first, *others = column_blocks(arrived[:many], plan_of(name, 3, messages))
    spoiled = torch.zeros_like(first, dtype=torch.bool)
    spoiled[slice(None) if FORMATS[name].scaled else 2, 1] = True
    assert torch.equal(~first.isfinite(), spoiled)
    assert all(block.isfinite().all() for block in others)


@pytest.mark.parametrize("name", NARROW)
def test_chunks_share_the_message_evenly_and_bytes_are_as_said(name: str):
    width = FORMATS[name]
    for workers in (1, 2, 3, 4, 16, 100):
        plan = WirePlan.build(width, FACTORS, BYPASS, 4, workers)
        assert plan.size % 4 == 0
        covered = sorted(
            (piece.element + i * piece.rows * piece.rank, piece.rows * piece.rank)
            for chunk in plan.chunks
            for piece in chunk.pieces
            for i in range(piece.count)
        )
        sizes = [size for _, size in covered]
        assert [start for start, _ in covered] == list(itertools.accumulate(sizes, initial=0))[:-1]
        assert sum(sizes) == numel(FACTORS)
        assert sum(chunk.bypass_numel for chunk in plan.chunks) == BYPASS
        total = sum(count * width.factor_bytes(rows, rank) for count, rows, rank in FACTORS) + 4 * BYPASS
        # No chunk is longer than its share by more than the scales of a cut, what is left of a row, and alignment.
        rank = max(rank for _, _, rank in FACTORS)
        row = width.code_bytes(2, rank) + (2 * rank if width.scaled else 0)
        assert plan.size <= total / workers + row + (ALIGNMENT if total / workers >= LARGE_CHUNK else 4)


def test_eligibility_counts_bytes():
    for name, rows, rank, expected in (
        ("float32", 300, 4, 4800), ("bfloat16", 300, 4, 2400), ("float16", 300, 4, 2400 + 3 * 4 * 2),
        ("int8", 300, 4, 1200 + 3 * 4 * 2), ("int4", 300, 4, 600 + 3 * 4 * 2), ("int4", 5, 3, 9 + 3 * 2),
    ):  # fmt: skip
        assert FORMATS[name].factor_bytes(rows, rank) == expected
    shape = (64, 64)
    eligible = [
        compressed_rank(shape, PowerSGDConfig(rank=32, min_compression_rate=2, wire_dtype=name)) for name in FORMATS
    ]
    assert eligible == [0, 0, 0, 32, 32]
    layout = Layout.build({"a": shape, "b": (10,)}, PowerSGDConfig(rank=32, wire_dtype="int8"))
    assert layout.sent_numel(PowerSGDConfig(rank=32, wire_dtype="int8"), 0) == 2 * (64 * 32 + 64) // 4 + 10


SHAPES = {"wide": (48, 300), "tall": (260, 20), "twin": (48, 300), "bias": (33,), "small": (5, 7)}
BUCKETS = [["wide", "bias"], ["tall", "twin", "small"]]


@thinned(
    "name, fields, workers", WIDTHS, [{}, {"algorithm": "alternating"}, {"iterations": 2}], [1, 2, 3, 4], together=1
)
def test_conservation(name: str, fields: dict[str, Any], workers: int):
    """Σ_w E_T + W Σ_t Ĝ_t = Σ_w Σ_t G_t; all workers get the same bits (which ``Fleet`` asserts).

    One step is not finite: its bucket forgets the gradients, and the other one carries them. One worker rounds nothing.
    """
    fleet, plain = (Fleet(everything(3, wire_dtype=width, **fields), SHAPES, workers) for width in (name, None))
    owed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    size = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    steps = 15
    for step in range(steps):
        given = [gradients(10 * step + worker, SHAPES) for worker in range(workers)]
        if step == 7:
            given[-1]["tall"][3, 3] = math.inf
        runs = fleet.step(given, BUCKETS)
        for run in runs:
            for key, average in run.averages[0].items():
                if step == 7:
                    assert average.isfinite().all() == (run is runs[0])
                    average = torch.zeros_like(average)
                    if run is runs[1] or key == "bias":
                        continue
                owed[key] += sum(own[key].double() for own in given) - workers * average.double()
                size[key] += sum(own[key].double().abs() for own in given) + workers * average.double().abs()
        if workers == 1:
            for one, other in zip(runs, plain.step(given, BUCKETS), strict=True):
                assert same_bits(one.averages[0], other.averages[0]) or step == 7
    for key, shape in SHAPES.items():
        errors = [error[key].double().view(shape) for error in fleet.errors() if key in error]
        left = sum(errors, torch.zeros(shape, dtype=torch.float64))
        # Some roundings in each step, of what is added up there; they do not pile up in one direction.
        bound = 8 * 2.0**-24 * (size[key].norm() + steps * left.norm())
        assert (owed[key] - left).norm() <= bound, key
