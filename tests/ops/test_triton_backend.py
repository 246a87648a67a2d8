"""The backend of Triton kernels as a compressor uses it, against the torch backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.ops.reference import reconstruct_reference
from powersgd_triton.ops.triton_backend import TritonBackend
from tests.support.bounds import assert_within
from tests.support.checks import COMPRESSED, SHAPES, bases, everything, gradients, poisoned, same_bits
from tests.support.kernel_cases import GRADIENTS, INF, NAN, rounding, stored
from tests.support.orthonormal import ORTHONORMAL, departure
from tests.support.thinned import thinned

U = 2.0**-24
FEW = {name: SHAPES[name] for name in ("linear", "bias", "scalar", "column", "empty")}
Values = dict[str, Tensor]


@pytest.fixture(autouse=True)
def poisoned_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a stage finds in the memory that stages share is NaN."""
    get = TritonBackend._get
    monkeypatch.setattr(TritonBackend, "_get", lambda *args: get(*args).fill_(NAN))


def triton(shapes: Mapping[str, Sequence[int]], config: PowerSGDConfig | None = None, **fields: Any) -> Compressor:
    config = config or everything(**fields)
    return Compressor(PowerSGDConfig.from_dict({**config.to_dict(), "backend": "triton"}), shapes)


def on(device: torch.device, tensors: Mapping[str, Tensor]) -> Values:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def step(compressor: Compressor, given: Mapping[str, Tensor], device: torch.device | None = None) -> Values:
    """Averaged gradients of one step in fp32 (fp64 for fp64 gradients), from outputs that were NaN; on the CPU."""
    device = device or torch.device("cpu")
    wide = torch.float64 if next(iter(given.values())).dtype == torch.float64 else torch.float32
    out = on(device, poisoned({name: tensor.shape for name, tensor in given.items()}, wide))
    compressor.decompress(compressor.compress(on(device, given)), out=out)
    return on(torch.device("cpu"), out)


def uses_triton(compressor: Compressor) -> bool:
    return all(isinstance(backend, TritonBackend) for backend in compressor._engine.memory._backends.values())


def wide(tensors: Mapping[str, Tensor]) -> Values:
    return {name: tensor.double() for name, tensor in tensors.items()}


def disturbed(tensor: Tensor, share: float, seed: int) -> Tensor:
    random = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)).double()
    return tensor.double() * (1 + share * (2 * random - 1))


class Truth:
    """fp64 compressors: one with the gradients as they are, four with what rounding may make of them.

    Products of fp32 values in any order are exact for a matrix of which no element is off by more than γ (backward
    error, as in ``tests/ops/test_reference.py``). So the kernels may be as far from the truth as these are; twice that,
    since four are not all. Where errors are kept in bf16, M is rounded to it (in the interpreter by up to a whole unit
    in the last place), and M may be a few times as large as G.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], config: PowerSGDConfig, device: torch.device) -> None:
        coarse = 4 * torch.finfo(torch.bfloat16).eps if config.error_dtype == "bfloat16" else 0.0
        config = PowerSGDConfig.from_dict({**config.to_dict(), "backend": "torch", "error_dtype": None})
        self.compressors = [Compressor(config, shapes) for _ in range(5)]
        segments = self.compressors[0].layout.segments
        self._share = {s.name: rounding(s.n + s.m + 2 * s.rank, device) + coarse for s in segments}
        self._steps = 0

    def step(self, given: Mapping[str, Tensor]) -> tuple[Values, dict[str, float]]:
        """Ĝ and how far from it, in the Frobenius norm, one may be."""
        self._steps += 1
        exact, *others = self.compressors
        expected = step(exact, wide(given))
        bounds = {name: U * float(tensor.norm()) for name, tensor in expected.items()}
        for index, other in enumerate(others):
            seed = 10 * self._steps + index
            inputs = {name: disturbed(tensor, self._share[name], seed) for name, tensor in given.items()}
            for name, tensor in step(other, inputs).items():
                bounds[name] = max(bounds[name], 2 * float((tensor - expected[name]).norm()))
        return expected, bounds


def assert_close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], bounds: Mapping[str, float]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert tensor.isfinite().all(), name
        assert float((tensor.double() - expected[name]).norm()) <= bounds[name], name


# Steps --------------------------------------------------------------------------------------------------------------

FP32, BF16, FP16 = GRADIENTS
CASES = {
    "all shapes": (FP32, everything()),
    "read after each step": (FP32, everything()),
    "some bypass": (FP32, PowerSGDConfig(rank=2, min_compression_rate=1.5)),
    "all bypass": (FP32, PowerSGDConfig(rank=8, min_compression_rate=20)),
    "exact first": (FP32, everything(start_iter=1)),
    "without warm start": (FP32, everything(warm_start=False)),
    "without error feedback": (FP16, everything(error_feedback=False)),
    "alternating": (FP16, everything(algorithm="alternating")),
    "alternating, all shapes, rank 3": (FP32, everything(3, algorithm="alternating")),
    "errors in bf16": (BF16, everything(error_dtype="bf16")),
}
SLOW = {
    "all shapes, one by one": (FP32, everything(batch_by_shape=False)),
    "alternating without error feedback": (FP32, everything(algorithm="alternating", error_feedback=False)),
    "alternating with errors in bf16": (FP32, everything(algorithm="alternating", error_dtype="bf16")),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_steps(name: str, device: torch.device):
    """Reading the error between steps changes when the product is subtracted, and by whom, but not what is owed."""
    dtype, config = {**CASES, **SLOW}[name]
    shapes = SHAPES if "all shapes" in name else FEW
    kernels, truth = triton(shapes, config), Truth(shapes, config, device)
    reference = Compressor(PowerSGDConfig.from_dict({**config.to_dict(), "backend": "torch"}), shapes)
    for seed in range(4 if config.algorithm == "alternating" else 3):
        given = gradients(seed, shapes, dtype)
        expected, bounds = truth.step(given)
        got, other = step(kernels, given, device), step(reference, given)
        assert_close(got, expected, bounds)
        assert_close(other, expected, bounds)
        layout = kernels.layout if seed >= config.start_iter else kernels._exact
        for segment in layout.bypass:
            assert torch.equal(got[segment.name], given[segment.name].float())
        if "read" in name:
            kernels.error()
    assert uses_triton(kernels)
    if not config.warm_start:
        # Redrawn from the keys and the step in fp64, and rounded once by each backend.
        expected, got = bases(reference), on(torch.device("cpu"), bases(kernels))
        assert all((got[name] - basis).abs().max() <= 2 * U for name, basis in expected.items())
    for P_hat, Q in kernels.compress(on(device, gradients(9, shapes, dtype))).factors().values():
        assert P_hat.dtype == Q.dtype == torch.float32
        # The alternating algorithm makes one side orthonormal at a time.
        assert min(departure(P_hat[None].cpu()), departure(Q[None].cpu())) <= ORTHONORMAL


@pytest.mark.parametrize(
    ("rank", "algorithm"), [(2, "standard"), pytest.param(33, "standard", marks=pytest.mark.slow), (2, "alternating")]
)
def test_nothing_is_lost(rank: int, algorithm: str, device: torch.device):
    """E_T + Σ Ĝ_t = Σ G_t: each step rounds M three times, and Ĝ and P̂ Qᵀ by γ_r of |P̂| |Q|ᵀ each."""
    shapes = {"w": (max(24, rank), max(18, rank))}
    compressor = triton(shapes, rank=rank, algorithm=algorithm)
    owed, bound = torch.zeros(shapes["w"], dtype=torch.float64), torch.zeros(shapes["w"], dtype=torch.float64)
    for seed in range(3):
        given = gradients(seed, shapes)
        before = compressor.error().get("w", torch.zeros(shapes["w"], device=device)).cpu().double()
        compressed = compressor.compress(on(device, given))
        P_hat, Q = (factor.cpu().double().abs() for factor in compressed.factors()["w"])
        out = on(device, poisoned(shapes))
        compressor.decompress(compressed, out=out)
        owed += given["w"].double() - out["w"].cpu().double()
        bound += 3 * U * (before.abs() + given["w"].abs()) + 2 * rounding(rank + 2, device) * (P_hat @ Q.mT)
    assert_within(compressor.error()["w"].cpu(), owed, bound)


# Input that is zero or not finite -----------------------------------------------------------------------------------


def test_zero_gradient_wakes_up(device: torch.device):
    """At the first step that is not zero, a gradient of low rank comes through whole."""
    shapes = {"w": (24, 18), "v": (7, 40)}
    compressor, truth = triton(shapes, rank=3), Truth(shapes, everything(rank=3), device)
    for _ in range(2):
        zero = {name: torch.zeros(shape) for name, shape in shapes.items()}
        truth.step(zero)
        assert all(not tensor.any() for tensor in step(compressor, zero, device).values())
    generator = torch.Generator().manual_seed(0)
    factors = {name: [torch.randint(-3, 4, (size, 2), generator=generator).double() for size in shape]
               for name, shape in shapes.items()}  # fmt: skip
    given = {name: (left @ right.mT).float() for name, (left, right) in factors.items()}
    expected, bounds = truth.step(given)
    assert_close(expected, wide(given), {name: 1e-12 * float(tensor.norm()) for name, tensor in expected.items()})
    assert_close(step(compressor, given, device), expected, bounds)


@pytest.mark.parametrize(
    ("where", "value", "dtype"), [("linear", NAN, FP16), ("column", -INF, BF16), ("bias", INF, FP32)]
)
def test_non_finite_element_spoils_one_step_only(where: str, value: float, dtype: torch.dtype, device: torch.device):
    compressor = triton(FEW)
    compressed = compressor.compress(on(device, gradients(0, FEW, dtype)))
    factors = {name: [factor.cpu().double().abs() for factor in pair] for name, pair in compressed.factors().items()}
    compressor.decompress(compressed)
    error, basis = on(torch.device("cpu"), compressor.error()), bases(compressor)

    now = gradients(3, FEW, dtype)
    now[where].view(-1)[now[where].numel() // 2] = value
    got = step(compressor, now, device)
    assert all(got[name].isnan().all() for name in ("linear", "column"))
    assert not got[where].isfinite().all()
    assert same_bits(bases(compressor), basis)
    for name, after in on(torch.device("cpu"), compressor.error()).items():
        # G was added and subtracted again, each rounded once. The product was subtracted by plain torch, which computes
        # the error, and then by the kernel.
        G = torch.where(now[name].isfinite(), now[name], 0).double()
        P_hat, Q = factors[name]
        product = P_hat @ Q.mT
        bound = U * ((error[name] + G).abs() + 2 * error[name].abs())
        bound += 2 * rounding(Q.shape[1] + 1, device) * (error[name].abs() + product)
        assert ((after.double() - error[name].double()).abs() <= bound).all(), name

    given = gradients(4, FEW, dtype)
    for name, tensor in step(compressor, given, device).items():
        assert tensor.isfinite().all()
        if name not in COMPRESSED:
            assert torch.equal(tensor, given[name].float())


@pytest.mark.parametrize(
    "fields", [{"error_feedback": False}, {"warm_start": False}, {"algorithm": "alternating"}], ids=str
)
def test_non_finite_with_other_settings(fields: dict[str, Any], device: torch.device):
    shapes = {"linear": (35, 34), "bias": (5,)}
    compressor = triton(shapes, **fields)
    step(compressor, gradients(0, shapes), device)
    now = gradients(1, shapes)
    now["linear"][3, 3] = INF
    assert step(compressor, now, device)["linear"].isnan().all()
    assert all(tensor.isfinite().all() for tensor in step(compressor, gradients(2, shapes), device).values())


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")
def test_overflow_spoils_one_step_only(device: torch.device):
    """Finite gradients whose product overflows, and an error that does although both E and G are finite."""
    shapes = {"w": (24, 18)}
    compressor = triton(shapes)
    step(compressor, gradients(0, shapes), device)
    assert step(compressor, {"w": torch.full((24, 18), 3e38)}, device)["w"].isnan().all()
    assert compressor.error()["w"].isfinite().all()
    for _ in range(3):
        step(compressor, {"w": torch.diag(torch.tensor([3e38, -3e38, 1e38, 1.0] + [0.0] * 20))[:, :18]}, device)
    assert compressor.error()["w"].isfinite().all()
    step(compressor, gradients(1, shapes), device)
    assert step(compressor, gradients(2, shapes), device)["w"].isfinite().all()


# Checkpoints and outputs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "rank"), [("torch", 3), ("triton", 2)])
def test_state_goes_from_one_backend_to_the_other(source: str, rank: int, device: torch.device):
    """Also to a higher rank, whose further columns are random."""
    first = Compressor(everything(backend=source), FEW)
    for seed in range(2):
        step(first, gradients(seed, FEW), device if source == "triton" else None)
    saved = first.state_dict()
    reference, kernels = Compressor(everything(rank, backend="torch"), FEW), triton(FEW, rank=rank)
    # The trajectory so far is not this test's: the truth starts from what was saved.
    truth = Truth(FEW, everything(rank), device)
    for compressor in (reference, kernels, *truth.compressors):
        compressor.load_state_dict(saved)
    given = gradients(2, FEW)
    expected, bounds = truth.step(given)
    assert_close(step(reference, given), expected, bounds)
    assert_close(step(kernels, given, device), expected, bounds)
    assert uses_triton(kernels)


@thinned("gradient, dtype", GRADIENTS[:2], [*GRADIENTS, torch.float64], together=1)
def test_decompress_into_any_dtype(gradient: torch.dtype, dtype: torch.dtype, device: torch.device):
    compressor = triton(FEW)
    compressed = compressor.compress(on(device, gradients(0, FEW, gradient)))
    out = on(device, poisoned(FEW, dtype))
    compressor.decompress(compressed, out=out)
    for name, (P_hat, Q) in compressed.factors().items():
        P, Qt = P_hat.cpu().double(), Q.cpu().double().mT
        size = rounding(P.shape[1], device) * (P.abs() @ Qt.abs())
        lost = 0 if dtype == torch.float64 else stored((P @ Qt).abs() + size, dtype, device)
        assert_within(out[name].cpu(), P @ Qt, size + lost)
    G, narrow = gradients(0, FEW, gradient)["bias"].double(), dtype if dtype.itemsize < 4 else FP32
    assert_within(out["bias"].cpu(), G, stored(G.abs(), narrow, device))


def test_decompress_into_several_dtypes_and_into_new_tensors(device: torch.device):
    compressor = triton(FEW)
    given = on(device, gradients(0, FEW, torch.bfloat16))
    compressed = compressor.compress(given)
    out = on(device, poisoned(FEW))
    out["linear"] = out["linear"].half()
    out["column"] = torch.full((1, 40), NAN, device=device).T
    compressor.decompress(compressed, out=out)
    for name, (P_hat, Q) in compressed.factors().items():
        expected = torch.empty(FEW[name], dtype=out[name].dtype, device=device)
        reconstruct_reference(P_hat[None], Q[None], out=[expected])
        assert torch.equal(out[name], expected)
    new = compressor.decompress(compressed)
    assert isinstance(new, dict)
    assert {tensor.dtype for tensor in new.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in new.values())


@thinned("shape, algorithm", [(), (0, 5), (1, 1), (1, 9), (9, 1)], ["standard", "alternating"], together=1)
def test_a_tensor_by_itself(shape: tuple[int, ...], algorithm: str, device: torch.device):
    config = everything(algorithm=algorithm)
    compressor, truth = triton({"w": shape}, config), Truth({"w": shape}, config, device)
    for seed in range(2):
        given = gradients(seed, {"w": shape})
        assert_close(step(compressor, given, device), *truth.step(given))


def test_gradients_that_are_not_contiguous(device: torch.device):
    given = gradients(0, FEW)
    strided = {**given, "linear": given["linear"].T.contiguous().T}
    assert same_bits(*(step(triton(FEW), tensors, device) for tensors in (given, strided)))


def test_compressor_refuses_what_the_kernels_do_not_take(device: torch.device):
    mixed = gradients(0, FEW) | {"bias": torch.zeros(FEW["bias"], dtype=FP16)}
    for given, reason in (
        (gradients(0, FEW, torch.float64), "the kernels take float32"),
        (mixed, "gradients of one bucket must be of one"),
    ):
        with pytest.raises(ValueError, match=f"backend 'triton' cannot be used: {reason}"):
            triton(FEW).compress(on(device, given))
