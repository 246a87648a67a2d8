"""Tensors without factors in few bits, beside factors: what they change, and what they leave as it is."""

from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.demo.measure import Call, counting
from tests.support.balance import check_same
from tests.support.checks import everything, gradients, same_bits, step
from tests.support.device import EMULATED, INTERPRETED
from tests.support.distributed import make_test, on_workers
from tests.support.training import relative
from tests.support.wrappers import means

SHAPES = {"weight": (24, 20), "twin": (24, 20), "conv": (8, 3, 3, 3), "bias": (300,), "empty": (0,), "scalar": ()}
VECTORS = {"bias": (300,), "empty": (0,), "scalar": ()}
ROUNDED = {"int8": 0.02, "bf16": 0.006}
"""More than the relative error of an average, rounded once or twice."""
FACTORS: dict[str, Any] = {"wire_dtype": "int4", "backend": "torch"}


def matrices_as_ever_and_vectors_rounded(worker: int, world_size: int) -> None:
    """At full rank matrices are exact. Averages of vectors are unbiased, and the same on all workers."""
    given = gradients(worker, SHAPES)
    exact = means(given)
    expected = torch.cat([exact[name].view(-1) for name in VECTORS])
    for bypass, limit in ROUNDED.items():
        compressor, found = Compressor(everything(999, bypass=bypass, backend="torch"), SHAPES), list[Tensor]()
        for _ in range(24):
            averages = step(compressor, given)
            check_same(averages.values())
            assert all(relative(averages[name], exact[name]) < 1e-5 for name in SHAPES.keys() - VECTORS.keys())
            found.append(torch.cat([averages[name].view(-1) for name in VECTORS]).double())
        largest = max(relative(one, expected) for one in found)
        assert largest < limit
        # By chance, the mean of 24 has a fifth of the error.
        assert 0 < relative(torch.stack(found).mean(0), expected) < largest / 3
        assert compressor.error().keys() == SHAPES.keys() - VECTORS.keys()


def nothing_of_matrices_is_lost(worker: int, world_size: int) -> None:
    """Also in steps in which one worker's vector is not finite: they do not count, and are carried."""
    compressor = Compressor(everything(bypass="int8", **FACTORS), SHAPES)
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    sent = {name: tensor.clone() for name, tensor in total.items()}
    for number in range(6):
        given, spoiled = gradients(10 * number + worker, SHAPES), 0 < number <= world_size
        for name, mean in means(given).items():
            total[name] += mean
        if spoiled and number == worker + 1:
            given["bias"][7] = torch.nan
        compressed = compressor.compress(given)
        averages = compressor.decompress(compressed)
        assert isinstance(averages, dict)
        assert bool(compressed.verdict) != spoiled
        assert averages["bias"].isfinite().all() != spoiled
        for name, average in averages.items():
            sent[name] += 0 if spoiled else average
    for name, error in means(compressor.error()).items():
        assert relative(sent[name] + error, total[name]) < 1e-6, name
    # Runs that go on from a saved state round alike.
    saved, runs = compressor.state_dict(), list[dict[str, Tensor]]()
    for _ in range(2):
        other = Compressor(compressor.config, SHAPES)
        other.load_state_dict(saved)
        runs.append(step(other, gradients(worker, SHAPES)))
    assert same_bits(*runs)
    check_same(runs[0].values())


def bytes_and_collectives(worker: int, world_size: int) -> None:
    """As the statistics count them. Vectors take one all-gather, or two collectives; without any, there are none."""
    for shapes in (SHAPES, VECTORS, {"weight": (24, 20), "empty": (0,)}, {"weight": (24, 20)}):
        counts = {}
        for bypass in (None, "int8"):
            compressor, calls = Compressor(everything(bypass=bypass, **FACTORS), shapes), list[Call]()
            step(compressor, gradients(worker, shapes))
            with counting(calls.append):
                step(compressor, gradients(worker, shapes))
            calls = [call for call in calls if call.sent]
            counts[bypass] = len(calls)
            found = sum(call.as_all_reduce for call in calls)
            counted = 4 * compressor.compression_stats()[2] / 2
            # Parts have whole blocks, and scales take a multiple of 16 bytes.
            padding = 128 + 16
            assert counted / 1.05 <= found <= counted + world_size * padding, (shapes, bypass, found, counted)
            assert counted - padding <= compressor.report().bytes_per_step <= counted
        more = world_size - 1 if "bias" in shapes else 0
        exact = 0 if shapes is VECTORS else counts[None]
        assert counts["int8"] == exact + more, (shapes, counts)


def test_errors_of_what_has_no_factors_any_more() -> None:
    """They are added once. One worker sends nothing, so that nothing is rounded."""
    before = Compressor(everything(1), SHAPES)
    after = Compressor(PowerSGDConfig(rank=lambda *_: 0, bypass="int8"), SHAPES)
    step(before, gradients(0, SHAPES))
    after.load_state_dict(before.state_dict())
    errors, given = before.error(), gradients(1, SHAPES)
    for extra in (1, 0):
        for name, average in step(after, given).items():
            expected = given[name] + extra * errors[name] if name in errors else given[name]
            assert torch.allclose(average, expected, atol=1e-6), name


def the_first_steps_are_exact(worker: int, world_size: int) -> None:
    """Also of gradients that are all quantized."""
    exact: dict[str, Any] = {"start_iter": 1, "backend": "torch"}
    given = gradients(worker, SHAPES)
    for config in (everything(bypass="int8", **exact), PowerSGDConfig(quantize="int8", **exact)):
        compressor, found = Compressor(config, SHAPES), list[tuple[float, float]]()
        for _ in range(2):
            error = relative(step(compressor, given)["bias"], means(given)["bias"])
            found.append((error, compressor.compression_stats()[0]))
        (before, rate), (after, _) = found
        assert before < 1e-6 < after
        assert rate == 1


TOGETHER = (matrices_as_ever_and_vectors_rounded, nothing_of_matrices_is_lost, bytes_and_collectives)
test_two_workers = make_test((*TOGETHER, the_first_steps_are_exact), 2)
test_three_workers = make_test(TOGETHER, 3)


@pytest.mark.skipif(not (INTERPRETED or EMULATED), reason="kernels are compiled for the GPU")
@on_workers(2)
def test_kernels_do_the_same(worker: int, world_size: int) -> None:
    """With the same bits of what is rounded, also where all tensors are."""
    for shapes in (SHAPES, VECTORS):
        runs = [Compressor(everything(bypass="int8", backend=name), shapes) for name in ("triton", "torch")]
        for number in range(2):
            ours, reference = (step(run, gradients(10 * number + worker, shapes)) for run in runs)
            assert all(torch.equal(ours[name], reference[name]) for name in VECTORS)
            assert all(relative(ours[name], reference[name]) < 1e-4 for name in shapes)
