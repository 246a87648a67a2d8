"""The backend of Triton kernels as a compressor uses it, against the torch backend."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.ops.products import reconstruct
from powersgd_triton.ops.triton_backend import TritonBackend
from tests.support.checks import CPU, SHAPES, bases, everything, gradients, on, poisoned, step
from tests.support.kernel_cases import GRADIENTS, NAN
from tests.support.kernel_checks import Truth, assert_close
from tests.support.orthonormal import ORTHONORMAL, departure
from tests.support.thinned import thinned

U = 2.0**-24
FEW = {name: SHAPES[name] for name in ("linear", "bias", "scalar", "column", "empty")}


@pytest.fixture(autouse=True)
def poisoned_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a stage finds in the memory that stages share is NaN."""
    get = TritonBackend._get
    monkeypatch.setattr(TritonBackend, "_get", lambda *args: get(*args).fill_(NAN))


def triton(shapes: Mapping[str, Sequence[int]], config: PowerSGDConfig | None = None, **fields: Any) -> Compressor:
    config = config or everything(**fields)
    return Compressor(PowerSGDConfig.from_dict({**config.to_dict(), "backend": "triton"}), shapes)


FP32, BF16, FP16 = GRADIENTS
CASES = {
    "all shapes, read after each step": (FP32, everything()),
    "some bypass": (FP32, PowerSGDConfig(rank=2, min_compression_rate=1.5)),
    "all bypass": (FP32, PowerSGDConfig(rank=8, min_compression_rate=20)),
    "exact first": (FP32, everything(start_iter=1)),
    "slow: without warm start": (FP32, everything(warm_start=False)),
    "without error feedback": (FP16, everything(error_feedback=False)),
    "slow: alternating": (FP16, everything(algorithm="alternating")),
    "slow: alternating, all shapes, rank 3": (FP32, everything(3, algorithm="alternating")),
    "slow: all shapes": (FP32, everything()),
    "errors in bf16": (BF16, everything(error_dtype="bf16")),
    "slow: alternating without error feedback": (FP32, everything(algorithm="alternating", error_feedback=False)),
    "slow: alternating with errors in bf16": (FP32, everything(algorithm="alternating", error_dtype="bf16")),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("slow")) for name in CASES]
)
def test_steps(name: str, device: torch.device):
    """Reading the error between steps changes when the product is subtracted, and by whom, but not what is owed."""
    dtype, config = CASES[name]
    shapes = SHAPES if "all shapes" in name else FEW
    kernels, truth = triton(shapes, config), Truth(shapes, config, device)
    reference = Compressor(PowerSGDConfig.from_dict({**config.to_dict(), "backend": "torch"}), shapes)
    for seed in range(4 if config.algorithm == "alternating" else 3):
        given = gradients(seed, shapes, dtype)
        expected, bounds = truth.step(given)
        got, other = step(kernels, given, device=device), step(reference, given)
        assert_close(got, expected, bounds)
        assert_close(other, expected, bounds)
        layout = kernels.layout if seed >= config.start_iter else kernels._exact
        for segment in layout.bypass:
            assert torch.equal(got[segment.name], given[segment.name].float())
        if "read" in name:
            kernels.error()
    assert all(isinstance(b.memory, TritonBackend) for b in kernels._engine.buckets._buckets.values() if b.memory)
    if not config.warm_start:
        # Redrawn from the keys and the step in fp64, and rounded once by each backend.
        expected, got = bases(reference), on(CPU, bases(kernels))
        assert all((got[name] - basis).abs().max() <= 2 * U for name, basis in expected.items())
    for P_hat, Q in kernels.compress(on(device, gradients(9, shapes, dtype))).factors().values():
        assert P_hat.dtype == Q.dtype == torch.float32
        # The alternating algorithm makes one side orthonormal at a time.
        assert min(departure(P_hat[None].cpu()), departure(Q[None].cpu())) <= ORTHONORMAL


@pytest.mark.parametrize(("source", "rank"), [("torch", 3), ("triton", 2)])
def test_state_goes_from_one_backend_to_the_other(source: str, rank: int, device: torch.device):
    """Also to a higher rank, whose further columns are random."""
    first = Compressor(everything(backend=source), FEW)
    for seed in range(2):
        step(first, gradients(seed, FEW), device=device if source == "triton" else CPU)
    saved = first.state_dict()
    reference, kernels = Compressor(everything(rank, backend="torch"), FEW), triton(FEW, rank=rank)
    # The trajectory so far is not this test's: the truth starts from what was saved.
    truth = Truth(FEW, everything(rank), device)
    for compressor in (reference, kernels, *truth.compressors):
        compressor.load_state_dict(saved)
    given = gradients(2, FEW)
    expected, bounds = truth.step(given)
    assert_close(step(reference, given), expected, bounds)
    assert_close(step(kernels, given, device=device), expected, bounds)


def test_decompress_into_several_dtypes_and_into_new_tensors(device: torch.device):
    """Of gradients that are not contiguous."""
    compressor = triton(FEW)
    given = on(device, gradients(0, FEW, torch.bfloat16))
    compressed = compressor.compress(given | {"linear": given["linear"].T.contiguous().T})
    for dtypes in ({"linear": torch.float16}, dict.fromkeys(FEW, torch.float64)):
        out = {name: tensor.to(dtypes.get(name, FP32)) for name, tensor in on(device, poisoned(FEW)).items()}
        out["column"] = out["column"].T.contiguous().T
        compressor.decompress(compressed, out=out)
        for name, (P_hat, Q) in compressed.factors().items():
            expected = torch.empty(FEW[name], dtype=out[name].dtype, device=device)
            reconstruct([(P_hat[None], Q[None])], out=[[expected]])
            assert torch.equal(out[name], expected)
        assert torch.equal(out["bias"], given["bias"].to(out["bias"].dtype))
    new = compressor.decompress(compressed)
    assert isinstance(new, dict)
    # The interpreter truncates to bf16.
    assert all((new[name] - out[name]).abs().max() <= 2.0**-7 * out[name].abs().max() for name in ("linear", "bias"))
    assert {tensor.dtype for tensor in new.values()} == {torch.bfloat16}


@thinned("algorithm, dtype", ["standard", "alternating"], GRADIENTS, together=1)
def test_parts_of_averages_have_the_bits_of_whole_ones(algorithm: str, dtype: torch.dtype, device: torch.device):
    """Whole rows, parts of one row or of two, rows with parts around them, also smaller than the rank; and nothing."""
    shapes = {"weight": (37, 40), "odd": (33, 29), "bias": (70,), "twin": (37, 40)}
    compressor = triton(shapes, rank=3, algorithm=algorithm)
    # Of both turns of the alternating algorithm.
    for seed in range(2):
        compressed = compressor.compress(on(device, {n: g.to(dtype) for n, g in gradients(seed, shapes).items()}))
        whole = on(device, poisoned(shapes, dtype))
        compressor.decompress(compressed, whole)
        for places in (
            {"weight": (80, 400), "odd": (0, 33 * 29), "bias": (3, 60)},
            {"weight": (41, 2), "odd": (50, 30), "twin": (39, 1)},
            {"weight": (13, 700), "odd": (29 * 7 + 28, 29 * 5 + 1), "bias": (69, 1), "twin": (40, 0)},
            {"twin": (1479, 1), "bias": (0, 0)},
            {"twin": (5, 0)},
        ):
            out = {
                name: (start, torch.full((n,), NAN, dtype=dtype, device=device)) for name, (start, n) in places.items()
            }
            compressed.backend.reconstruct_ranges(out, None)
            for name, (start, part) in out.items():
                assert torch.equal(part, whole[name].view(-1)[start : start + len(part)]), (name, places)
