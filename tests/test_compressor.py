"""A compressor's steps in one process: what is conserved, what arrives, and what each mode keeps."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from tests.support.checks import COMPRESSED, SHAPES, everything, gradients, poisoned, same_bits, step

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NAN = float("nan")
# Unit roundoff of fp32 arithmetic.
U = 2.0**-24


def recovery_bound(n: int, m: int, r: int, u: float = U) -> float:
    """Error of P̂ P̂ᵀ M where P = M Q spans all of M, relative to ‖M‖_F.

    Rounding: of P (m terms), of P̂ to its dtype, of Q = Mᵀ P̂ (n terms), of P̂ Qᵀ (r terms), and of the bases' and
    M's own entries; each u per term against factors of norm √r.
    """
    return u * math.sqrt(r) * (n + m + 2 * r + 8)


# Conservation -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tensors:
    """Shapes, dtypes and whether each is handed over non-contiguous."""

    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    transposed: list[bool]


@st.composite
def tensors(draw: st.DrawFn) -> Tensors:
    shape = st.one_of(
        st.lists(st.integers(0, 7), max_size=4).map(tuple),
        st.sampled_from([(), (5,), (1, 9), (9, 1), (6, 3, 2, 2), (12, 10), (30, 20), (0, 3)]),
    )
    shapes = draw(st.lists(shape, min_size=1, max_size=6))
    count = len(shapes)
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=count, max_size=count))
    return Tensors(shapes, dtypes, draw(st.lists(st.booleans(), min_size=count, max_size=count)))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    case=tensors(),
    rank=st.integers(1, 5),
    batch=st.booleans(),
    warm=st.booleans(),
    look=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 100),
)
def test_nothing_is_lost(case: Tensors, rank: int, batch: bool, warm: bool, look: bool, scale: float, seed: int):
    """Σ E + Σ Ĝ = Σ G, element by element, within the rounding of each step.

    A step rounds M = G + (E) twice, the product P̂ Q̄ᵀ of r terms once in E and once in Ĝ, and E itself.
    """
    shapes = {str(i): shape for i, shape in enumerate(case.shapes)}
    compressor = Compressor(everything(rank, batch_by_shape=batch, warm_start=warm, seed=seed), shapes)
    compute = torch.float64 if torch.float64 in case.dtypes else torch.float32
    u = torch.finfo(compute).eps / 2
    generator = torch.Generator().manual_seed(seed)
    owed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    bound = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for index in range(4):
        now: dict[str, Tensor] = {}
        for (name, shape), dtype, transposed in zip(shapes.items(), case.dtypes, case.transposed, strict=True):
            # One step in four has no gradient at all.
            G = (torch.randn(shape, generator=generator) * scale * (index != 2)).to(dtype)
            now[name] = G.movedim(0, -1).contiguous().movedim(-1, 0) if transposed and G.dim() > 1 else G
        compressed = compressor.compress(now)
        out = poisoned(shapes, compute)
        compressor.decompress(compressed, out=out)
        factors = compressed.factors()
        for name, G in now.items():
            size = G.double().abs() + owed[name].abs()
            if name in factors:
                P, Q = factors[name]
                product = (P.double().abs() @ Q.double().abs().mT).view(shapes[name])
                bound[name] += u * (3 * size + 2 * (P.shape[1] + 2) * product)
            owed[name] += G.double() - out[name].double()
        if look:
            compressor.error()
    error = compressor.error()
    compressed_names = {segment.name for segment in compressor.layout.compressed}
    assert error.keys() == compressed_names
    for name, rest in owed.items():
        difference = (rest - (error[name].double() if name in error else 0)).abs()
        assert (difference <= bound[name]).all(), (name, float((difference - bound[name]).max()))


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dict_list_and_flat_buffer_agree(dtype: torch.dtype, batch: bool):
    by_name, by_order, flat = (Compressor(everything(batch_by_shape=batch), SHAPES) for _ in range(3))
    for seed in range(4):
        given = gradients(seed, dtype=dtype)
        copies = {name: tensor.clone() for name, tensor in given.items()}
        expected = poisoned(dtype=dtype)
        assert by_name.decompress(by_name.compress(given), out=expected) is expected

        order = list(poisoned(dtype=dtype).values())
        by_order.decompress(by_order.compress(list(given.values())), out=order)
        assert same_bits(dict(zip(SHAPES, order, strict=True)), expected)

        buffer = torch.cat([tensor.reshape(-1) for tensor in given.values()])
        out = torch.full_like(buffer, NAN)
        flat.decompress(flat.compress(buffer), out=out)
        assert torch.equal(out, torch.cat([tensor.reshape(-1) for tensor in expected.values()]))

        # Inputs are read only, and new tensors are of the gradients' dtype.
        assert same_bits(given, copies)
        fresh = by_order.decompress(by_order.compress(list(gradients(99, dtype=dtype).values())))
        assert isinstance(fresh, dict)
        assert {tensor.dtype for tensor in fresh.values()} == {dtype}
        by_name.compress(gradients(99, dtype=dtype))
        flat.compress(torch.cat([tensor.reshape(-1) for tensor in gradients(99, dtype=dtype).values()]))


def test_decompress_into_gradients_and_into_non_contiguous_tensors():
    one, other = (Compressor(everything(), SHAPES) for _ in range(2))
    for seed in range(3):
        given = gradients(seed)
        expected = step(one, given)
        odd = {name: torch.full((*shape, 2), NAN)[..., 0] for name, shape in SHAPES.items()}
        compressed = other.compress(given)
        other.decompress(compressed, out=odd)
        assert same_bits(odd, expected)
        other.decompress(compressed, out=given)
        assert same_bits(given, expected)


def test_batching_changes_no_more_than_rounding():
    """The yardstick is what rounding does anyhow: gradients off by 2⁻⁵⁰, an eighth of which fp64 rounding is."""
    runs: list[list[Tensor]] = []
    for batch, noise in ((True, 0.0), (False, 0.0), (True, 2.0**-50)):
        compressor = Compressor(everything(batch_by_shape=batch), SHAPES)
        results: list[Tensor] = []
        for seed in range(6):
            now = {name: G + noise * G.abs() for name, G in gradients(seed, dtype=torch.float64).items()}
            results += step(compressor, now, torch.float64).values()
        runs.append(results)

    def distance(one: list[Tensor], other: list[Tensor]) -> float:
        return max(float((a - b).norm()) for a, b in zip(one, other, strict=True))

    assert distance(runs[0], runs[1]) <= 10 * distance(runs[0], runs[2])


# What arrives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_rank_is_exact(dtype: torch.dtype, batch: bool):
    compressor = Compressor(everything(rank=1000, batch_by_shape=batch), SHAPES)
    u = torch.finfo(dtype).eps / 2
    for seed in range(5):
        now = gradients(seed, dtype=dtype)
        got = step(compressor, now, dtype)
        for segment in compressor.layout.segments:
            G = now[segment.name]
            # Twice: what the last step lost arrives in this one.
            bound = 2 * recovery_bound(segment.n, segment.m, segment.rank, u) * G.norm() if segment.rank else 0.0
            assert (got[segment.name] - G).norm() <= bound, segment.name


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_low_rank_gradient_is_recovered(rank: int):
    """A gradient of equal singular values and rank k ≤ r, whose row space stays, after the basis has found it."""
    for k in range(1, rank + 1):
        generator = torch.Generator().manual_seed(k)
        U_, V = (torch.linalg.qr(torch.randn(size, k, generator=generator))[0] for size in (50, 30))
        compressor = Compressor(everything(rank), {"w": (50, 30)})
        for index in range(8):
            G = U_ @ V.mT * (index + 1)
            got = step(compressor, {"w": G})["w"]
            if index >= 2:
                assert (got - G).norm() <= 2 * recovery_bound(50, 30, rank) * G.norm()


@pytest.mark.parametrize("quiet", [1, 5])
@pytest.mark.parametrize("rank", [1, 4])
def test_layer_with_zero_gradient_wakes_up(rank: int, quiet: int):
    compressor = Compressor(everything(rank, orthogonalization_epsilon=0.0), SHAPES)
    for _ in range(quiet):
        for name, tensor in step(compressor, {n: torch.zeros(s) for n, s in SHAPES.items()}).items():
            assert torch.equal(tensor, torch.zeros(SHAPES[name]))
    generator = torch.Generator().manual_seed(0)
    now = {}
    for name, shape in SHAPES.items():
        n, m = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        k = min(rank, n, m)
        now[name] = (torch.randn(n, k, generator=generator) @ torch.randn(k, m, generator=generator)).view(shape)
    got = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for index in range(100):
        for name, tensor in step(compressor, now).items():
            assert tensor.isfinite().all()
            got[name] += tensor.double()
            assert index < 2 or now[name].numel() == 0 or got[name].any(), f"{name} is frozen"
    for name, total in got.items():
        owed = 100 * now[name].double()
        # The tolerance is the issue's.
        assert (total - owed).norm() <= 1e-4 * owed.norm(), name


def test_one_matrix_alone_may_be_zero():
    compressor = Compressor(everything(), SHAPES)
    for index in range(6):
        now = gradients(index)
        now["twin"].mul_(index >= 3)
        got = step(compressor, now)
        assert all(tensor.isfinite().all() for tensor in got.values())
        assert bool(got["twin"].any()) == (index >= 3)


@pytest.mark.parametrize("rank", [1, 4])
def test_every_direction_arrives_in_the_long_run(rank: int):
    """A constant gradient of full rank: what is still owed does not grow with the number of steps."""
    compressor = Compressor(everything(rank), {"w": (30, 20)})
    G = gradients(0, {"w": (30, 20)})["w"]
    errors = []
    for _ in range(300):
        step(compressor, {"w": G})
        errors.append(float(compressor.error()["w"].norm()))
    # It is some steps' worth of gradient and no more; without feedback it would be up to 300.
    assert max(errors[150:]) <= 1.5 * max(errors[:150])


# Modes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_first_steps_are_exact(dtype: torch.dtype):
    compressor = Compressor(everything(start_iter=3), SHAPES)
    for seed in range(3):
        now = gradients(seed, dtype=dtype)
        assert same_bits(step(compressor, now, dtype), now)
        assert compressor.iteration == seed + 1
        assert not any(error.any() for error in compressor.error().values())
    # Then nothing is owed from before, as in a compressor that starts with it.
    now = gradients(3, dtype=dtype)
    got = step(compressor, now, dtype)
    assert not torch.equal(got["linear"], now["linear"])
    assert compressor.compression_stats()[1] == 4 * compressor.layout.numel


def test_without_error_feedback_nothing_is_kept():
    compressor = Compressor(everything(error_feedback=False), SHAPES)
    step(compressor, gradients(0))
    assert compressor.error() == {}
    for tensor in step(compressor, {name: torch.zeros(shape) for name, shape in SHAPES.items()}).values():
        assert not tensor.any()
    # With feedback, what the first step lost arrives.
    keeper = Compressor(everything(), SHAPES)
    step(keeper, gradients(0))
    assert step(keeper, {name: torch.zeros(shape) for name, shape in SHAPES.items()})["linear"].any()


def test_without_warm_start_each_step_draws_anew():
    compressor = Compressor(everything(warm_start=False, error_feedback=False), SHAPES)
    one = step(compressor, gradients(0))["linear"]
    assert not torch.equal(one, step(compressor, gradients(0))["linear"])
    again = Compressor(everything(warm_start=False, error_feedback=False), SHAPES)
    assert torch.equal(one, step(again, gradients(0))["linear"])


def test_warm_start_approaches_the_best_approximation():
    """Power iteration: by step 40 the error of a constant gradient is the truncated SVD's to 1%."""
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(60, 40, generator=generator) * torch.logspace(0, -2, 40)
    best = float(torch.linalg.svdvals(G)[4:].norm())
    lost = {}
    for warm in (True, False):
        compressor = Compressor(everything(4, warm_start=warm, error_feedback=False), {"w": (60, 40)})
        for _ in range(40):
            got = step(compressor, {"w": G})["w"]
        lost[warm] = float((got - G).norm())
    assert best * (1 - 1e-5) <= lost[True] <= 1.01 * best < lost[False]


def test_seed_decides_the_first_basis():
    results = [step(Compressor(everything(seed=seed), SHAPES), gradients(0))["linear"] for seed in (0, 0, 1)]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_a_matrix_does_not_depend_on_its_company():
    """State goes by name: alone, in another order or place, a tensor gets the same basis and the same result."""
    together = Compressor(everything(batch_by_shape=False), SHAPES)
    turned = Compressor(everything(batch_by_shape=False), dict(reversed(SHAPES.items())))
    alone = Compressor(everything(batch_by_shape=False), {"conv": SHAPES["conv"]})
    for seed in range(4):
        now = gradients(seed)
        expected = step(together, now)
        assert same_bits(step(turned, now), expected)
        assert torch.equal(step(alone, {"conv": now["conv"]})["conv"], expected["conv"])


# Factors and statistics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [True, False])
def test_factors_are_orthonormal_views_that_give_the_result(batch: bool):
    compressor = Compressor(everything(batch_by_shape=batch), SHAPES)
    places = []
    for seed in range(3):
        compressed = compressor.compress(gradients(seed))
        out = poisoned()
        compressor.decompress(compressed, out=out)
        factors = compressed.factors()
        assert tuple(factors) == tuple(name for name in factors if name in COMPRESSED)
        assert set(factors) == set(COMPRESSED)
        for segment in compressor.layout.compressed:
            P, Q = factors[segment.name]
            assert P.shape == (segment.n, segment.rank)
            assert Q.shape == (segment.m, segment.rank)
            # The design's bound.
            assert (P.double().mT @ P.double() - torch.eye(segment.rank)).abs().max() <= 1e-5
            bound = segment.rank * U * (P.abs() @ Q.abs().mT) * 1.01
            truth = P.double() @ Q.double().mT
            assert ((out[segment.name].view(segment.n, segment.m) - truth).abs() <= bound).all()
        places.append([tensor.data_ptr() for pair in compressed.factors().values() for tensor in pair])
    # Views of memory that stays.
    assert places[0] == places[1] == places[2]


def test_compression_stats_count_what_travels():
    compressor = Compressor(PowerSGDConfig(rank=2, min_compression_rate=2), {"w": (40, 30), "b": (30,), "s": (3, 3)})
    assert compressor.compression_stats() == (0.0, 0, 0)
    shapes = {"w": (40, 30), "b": (30,), "s": (3, 3)}
    before, after = 40 * 30 + 30 + 9, (40 + 30) * 2 + 30 + 9
    for index in range(1, 4):
        step(compressor, gradients(index, shapes))
        assert compressor.compression_stats() == (before / after, index * before, index * after)


def test_no_tensors_and_only_empty_tensors():
    nothing = Compressor(PowerSGDConfig(), {})
    assert nothing.decompress(nothing.compress({})) == {}
    empty = Compressor(everything(), {"e": (0, 3), "f": (4, 0)})
    assert step(empty, {"e": torch.zeros(0, 3), "f": torch.zeros(4, 0)})["f"].shape == (4, 0)
    assert empty.error() == {}
