"""A compressor's steps in one process: what is conserved, what each mode keeps, and what is refused without a trace."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from tests.support.checks import COMPRESSED, DTYPES, SHAPES, everything, gradients, poisoned, same_bits, step, trained
from tests.support.orthonormal import ORTHONORMAL, departure

NAN = float("nan")


@pytest.mark.parametrize("dtype", DTYPES)
def test_dict_list_and_flat_buffer_agree(dtype: torch.dtype):
    by_name, by_order, flat, elsewhere = (Compressor(everything(), SHAPES) for _ in range(4))
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

        # Inputs are read only, unless they are the output. Both may be non-contiguous. New tensors have their dtype.
        strided = {name: g.movedim(0, -1).contiguous().movedim(-1, 0) if g.dim() else g for name, g in given.items()}
        compressed = elsewhere.compress(strided)
        assert same_bits(given, copies)
        assert same_bits(strided, copies)
        odd = {name: torch.full((*shape, 2), NAN, dtype=dtype)[..., 0] for name, shape in SHAPES.items()}
        fresh = elsewhere.decompress(compressed)
        assert isinstance(fresh, dict)
        for output in (odd, given):
            elsewhere.decompress(compressed, out=output)
        assert all(same_bits(result, expected) for result in (fresh, odd, given))


@pytest.mark.parametrize("shape", [(16, 5), (8, 8)])
def test_new_tensors_of_several_dtypes(shape: tuple[int, ...]):
    """They lie in one piece of memory, at equal distances where matrices of two dtypes take turns."""
    for dtypes in itertools.permutations(DTYPES, 2):
        given = {str(index): torch.randn(shape).to(dtypes[index % 2]) for index in range(3)}
        compressor = Compressor(PowerSGDConfig(rank=1), given)
        compressed, out = compressor.compress(given), {name: torch.zeros_like(G) for name, G in given.items()}
        compressor.decompress(compressed, out=out)
        fresh = compressor.decompress(compressed)
        assert isinstance(fresh, dict)
        assert same_bits(fresh, out), dtypes


def test_seed_decides_the_first_basis_and_without_warm_start_the_next_ones():
    cold: dict[str, Any] = {"warm_start": False, "error_feedback": False}
    compressors = [trained(0, seed=seed, **fields) for fields in ({}, cold) for seed in (0, 0, 2**32 - 1)]
    warm, same, other, one, again, others = (step(each, gradients(0))["linear"] for each in compressors)
    assert torch.equal(warm, same)
    assert torch.equal(one, again)
    assert not torch.equal(warm, other)
    assert not torch.equal(one, others)
    assert not torch.equal(one, step(compressors[3], gradients(0))["linear"])


def test_a_matrix_does_not_depend_on_its_company():
    """State goes by name: alone, in another order or place, a tensor gets the same basis and the same result."""
    config = everything()
    together, turned = Compressor(config, SHAPES), Compressor(config, dict(reversed(SHAPES.items())))
    alone = Compressor(config, {"conv": SHAPES["conv"]})
    for seed in range(4):
        now = gradients(seed)
        expected = step(together, now)
        assert same_bits(step(turned, now), expected)
        assert torch.equal(step(alone, {"conv": now["conv"]})["conv"], expected["conv"])


def test_factors_are_orthonormal_and_views_of_memory_that_stays():
    compressor = Compressor(everything(), SHAPES)
    places = []
    for seed in range(3):
        compressed = compressor.compress(gradients(seed))
        factors = compressed.factors()
        assert set(factors) == set(COMPRESSED)
        for segment in compressor.layout.compressed:
            P, Q = factors[segment.name]
            assert (P.shape, Q.shape) == ((segment.n, segment.rank), (segment.m, segment.rank))
            assert departure(P) <= ORTHONORMAL
        places.append([tensor.data_ptr() for pair in factors.values() for tensor in pair])
    assert places[0] == places[1] == places[2]


def test_compression_stats_count_what_travels_if_anything():
    """Of compressed steps, and of the exact one before them, whose averages are the gradients."""
    shapes = {"w": (40, 30), "b": (30,), "s": (3, 3)}
    compressor = Compressor(PowerSGDConfig(rank=2, min_compression_rate=2, start_iter=1), shapes)
    assert compressor.compression_stats() == (0.0, 0, 0)
    assert same_bits(step(compressor, gradients(0, shapes)), gradients(0, shapes))
    before, after = 40 * 30 + 30 + 9, (40 + 30) * 2 + 30 + 9
    assert compressor.compression_stats() == (1.0, before, before)
    for index in range(1, 4):
        step(compressor, gradients(index, shapes))
        now, sent = (1 + index) * before, before + index * after
        assert compressor.compression_stats() == (now / sent, now, sent)
    nothing = Compressor(PowerSGDConfig(), {})
    assert nothing.decompress(nothing.compress({})) == {}
    empty = Compressor(everything(), {"e": (0, 3), "f": (4, 0)})
    assert step(empty, {"e": torch.zeros(0, 3), "f": torch.zeros(4, 0)})["f"].shape == (4, 0)
    assert empty.error() == {}


Named = dict[str, Any]
TOTAL = sum(tensor.numel() for tensor in poisoned().values())


def with_one(name: str, tensor: Any) -> Callable[[Named], Any]:
    return lambda given: {**given, name: tensor}


def flat(given: Named) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in given.values()])


# Wrong gradients, the exception, and what its message must name: what was expected, and what came.
BAD: dict[str, tuple[Callable[[Named], Any], type[Exception], tuple[str, ...]]] = {
    "integers": (with_one("linear", torch.ones(24, 18, dtype=torch.int64)), TypeError, ("linear", "float", "int64")),
    "complex": (with_one("bias", torch.ones(18, dtype=torch.complex64)), TypeError, ("bias", "float", "complex64")),
    "other shape": (with_one("linear", torch.ones(24, 17)), ValueError, ("linear", "(24, 18)", "(24, 17)")),
    "other shape, same size": (with_one("conv", torch.ones(8, 27)), ValueError, ("conv", "(8, 3, 3, 3)", "(8, 27)")),
    "other dtype": (with_one("linear", torch.ones(24, 18).half()), TypeError, ("linear", "float32", "float16")),
    "other device": (with_one("twin", torch.ones(24, 18, device="meta")), ValueError, ("twin", "cpu", "meta")),
    "sparse": (with_one("linear", torch.ones(24, 18).to_sparse()), TypeError, ("linear", "dense", "sparse")),
    "not a tensor": (with_one("linear", [1.0]), TypeError, ("linear", "tensor", "list")),
    "None": (with_one("linear", None), TypeError, ("linear", "tensor", "NoneType")),
    "name missing": (lambda given: {key: given[key] for key in given if key != "conv"}, ValueError, ("conv",)),
    "all names missing": (lambda _: {}, ValueError, ("linear", f"{len(SHAPES)} of {len(SHAPES)}")),
    "name unknown": (with_one("other", torch.ones(2)), ValueError, ("other",)),
    "list too short": (lambda given: list(given.values())[:-1], ValueError, ("8", "7")),
    "list in another order": (lambda given: list(given.values())[::-1], ValueError, ("linear", "(24, 18)", "(0, 5)")),
    "flat buffer too short": (lambda given: flat(given)[1:], ValueError, (str(TOTAL), str(TOTAL - 1))),
    "flat buffer of two dimensions": (lambda given: flat(given)[None], ValueError, (str(TOTAL), f"(1, {TOTAL})")),
    "flat buffer with strides": (lambda given: flat(given).repeat(2)[::2], ValueError, ("contiguous", "(2,)")),
    "flat buffer of integers": (lambda given: flat(given).long(), TypeError, ("float", "int64")),
    "flat buffer of another dtype": (lambda given: flat(given).bfloat16(), TypeError, ("float32", "bfloat16")),
    "flat buffer elsewhere": (lambda given: flat(given).to("meta"), ValueError, ("cpu", "meta")),
    "nothing": (lambda _: None, TypeError, ()),
}


def assert_refused(name: str, function: Callable[..., Any], *args: Any) -> None:
    _, kind, says = BAD[name]
    with pytest.raises(kind) as caught:
        function(*args)
    assert all(word in str(caught.value) for word in says), (name, caught.value)


def test_bad_gradients_are_refused_without_a_trace():
    one, other = Compressor(everything(), gradients(0)), Compressor(everything(), gradients(0))
    for seed in range(3):
        for name, (make, *_) in BAD.items():
            assert_refused(name, one.compress, make(gradients(seed)))
            assert one.iteration == seed
        assert same_bits(step(one, gradients(seed)), step(other, gradients(seed)))
    assert same_bits(one.error(), other.error())
    assert one.compression_stats() == other.compression_stats()


def test_bad_outputs_are_refused_without_a_trace():
    compressor = Compressor(everything(), gradients(0))
    compressed = compressor.compress(gradients(0))
    expected, given = poisoned(), gradients(1)
    compressor.decompress(compressed, out=expected)
    copies = {key: tensor.clone() for key, tensor in given.items()}
    for name, (make, *_) in BAD.items():
        # An output may have another dtype, and be left out.
        if "dtype" not in name and name != "nothing":
            assert_refused(name, compressor.decompress, compressed, make(given))
            assert same_bits(given, copies), name
    again = poisoned()
    compressor.decompress(compressed, out=again)
    assert same_bits(again, expected)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        other = poisoned(dtype=dtype)
        compressor.decompress(compressed, out=other)
        assert same_bits(other, {name: tensor.to(dtype) for name, tensor in expected.items()})
    # Factors of an earlier step.
    new = compressor.compress(gradients(1))
    with pytest.raises(RuntimeError, match=r"step 1.*2"):
        compressor.decompress(compressed, out=given)
    with pytest.raises(TypeError, match=r"the result of compress\(\); got dict"):
        compressor.decompress(given)  # type: ignore[arg-type]
    assert same_bits(given, copies)
    compressor.decompress(new, out=given)


def test_an_error_is_left_to_one_place():
    compressor = Compressor(everything(), gradients(0))
    compressed = compressor.compress(given := gradients(0))
    with pytest.raises(ValueError, match="error_feedback=False"):
        compressor.leave_error(compressed, given)


def test_expanded_tensors_are_compressed_but_not_written():
    compressor = Compressor(everything(error_feedback=False), gradients(0))
    expanded = torch.ones(1, 18).expand(24, 18)
    compressed = compressor.compress({**gradients(0), "linear": expanded})
    for write in (compressor.decompress, compressor.leave_error):
        given = poisoned()
        with pytest.raises(ValueError, match="'linear' share memory"):
            write(compressed, {**given, "linear": expanded})
        assert all(tensor.isnan().all() for tensor in given.values())


def test_the_first_step_decides_the_dtype_unless_it_is_refused():
    compressor = Compressor(everything(), SHAPES)
    with pytest.raises(ValueError, match="shape"):
        compressor.compress({**gradients(0, dtype=torch.float64), "bias": torch.ones(3)})
    with pytest.raises(ValueError, match="'twin' must be on cpu; got meta"):
        compressor.compress({**gradients(0), "twin": torch.ones(24, 18, device="meta")})
    assert compressor.iteration == 0
    step(compressor, gradients(0, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"bfloat16.*float32"):
        compressor.compress(gradients(1))
    assert compressor.iteration == 1


def test_bad_arguments_at_construction():
    cases: list[tuple[Any, Any, Any, type[Exception], str]] = [
        *((config, SHAPES, None, TypeError, "PowerSGDConfig") for config in (None, {"rank": 4}, 4, PowerSGDConfig)),
        (PowerSGDConfig(), {"w": (4, -1)}, None, ValueError, "a size of 'w' must be at least 0; got -1"),
        (PowerSGDConfig(), {"w": (4.0, 4)}, None, TypeError, "a size of 'w' must be an int; got 4.0"),
        (PowerSGDConfig(), {0: (4, 4)}, None, TypeError, "names of tensors as strings; got 0"),
        (PowerSGDConfig(), {"w": torch.ones(4, 4, dtype=torch.int32)}, None, TypeError, "'w'.*float.*int32"),
        (PowerSGDConfig(), {"w": torch.ones(4, 4).to_sparse()}, None, TypeError, "'w'.*dense"),
        (PowerSGDConfig(), [("w", (4, 4))], None, TypeError, "tensors must be .*; got a list"),
        (PowerSGDConfig(), SHAPES, object(), TypeError, "a group must be a .*ProcessGroup or None; got object"),
        (PowerSGDConfig(), SHAPES, dist.GroupMember.NON_GROUP_MEMBER, RuntimeError, "init_process_group"),
    ]
    for config, tensors, group, error, says in cases:
        with pytest.raises(error, match=says):
            Compressor(config, tensors, group=group)


def test_gradients_that_require_grad_are_only_read():
    compressor, plain = Compressor(everything(), SHAPES), Compressor(everything(), SHAPES)
    given = {name: tensor.requires_grad_() for name, tensor in gradients(0).items()}
    assert same_bits(step(compressor, given), step(plain, gradients(0)))
    assert not any(tensor.requires_grad for tensor in compressor.error().values())


def test_a_worker_without_a_process_group_is_told_that_it_is_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for workers in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", workers)
        compressor = Compressor(PowerSGDConfig(rank=2), SHAPES)
        for number in range(2):
            compressor.compress(gradients(number))
    (said,) = (message for message in caplog.messages if "alone" in message)
    assert said == (
        "this worker, one of WORLD_SIZE=2 workers, averages alone: call torch.distributed.init_process_group first"
    )


@pytest.mark.parametrize("look", [Compressor.error, Compressor.state_dict])
@pytest.mark.parametrize(
    "config", [PowerSGDConfig(quantize="int4"), PowerSGDConfig(rank=lambda *_: 0)], ids=["int4", "carried"]
)
def test_looking_at_errors_does_not_decide_about_a_step(config: PowerSGDConfig, look: Callable[[Compressor], Any]):
    """The average does not fit fp16, which only ``decompress`` finds out."""
    given = {"weight": torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).mul(1e4)}
    other = Compressor(PowerSGDConfig(rank=1), {"weight": (64, 64)})
    other.compress(given)
    compressor = Compressor(config, {"weight": torch.zeros(64, 64, dtype=torch.float16)})
    compressor.attach(lambda: 2.0)
    compressor.load_state_dict(other.state_dict())
    before = compressor.error()["weight"]
    compressed = compressor.compress({"weight": torch.full((64, 64), 60000.0, dtype=torch.float16)})
    look(compressor)
    compressor.decompress(compressed)
    assert compressed.verdict == 0
    assert torch.equal(compressor.error()["weight"], before)
