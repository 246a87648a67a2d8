"""What a compressor refuses: the right exception, what was expected and what came, and no trace in its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import Compressor, PowerSGDConfig
from tests.support.checks import SHAPES, everything, gradients, poisoned, same_bits, step

Named = dict[str, Any]
TOTAL = sum(tensor.numel() for tensor in poisoned().values())


def with_one(name: str, tensor: Any) -> Callable[[Named], Any]:
    return lambda given: {**given, name: tensor}


def without(name: str) -> Callable[[Named], Any]:
    return lambda given: {key: tensor for key, tensor in given.items() if key != name}


def flat(given: Named) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in given.values()])


@dataclasses.dataclass
class Bad:
    """A wrong set of gradients, and what the message must name: what was expected, and what came."""

    make: Callable[[Named], Any]
    error: type[Exception]
    says: tuple[str, ...]


BAD = {
    "integers": Bad(with_one("linear", torch.ones(24, 18, dtype=torch.int64)), TypeError, ("linear", "float", "int64")),
    "booleans": Bad(with_one("bias", torch.ones(18, dtype=torch.bool)), TypeError, ("bias", "float", "bool")),
    "complex": Bad(with_one("bias", torch.ones(18, dtype=torch.complex64)), TypeError, ("bias", "float", "complex64")),
    "other shape": Bad(with_one("linear", torch.ones(24, 17)), ValueError, ("linear", "(24, 18)", "(24, 17)")),
    "transposed": Bad(with_one("linear", torch.ones(18, 24)), ValueError, ("linear", "(24, 18)", "(18, 24)")),
    "other shape, same size": Bad(with_one("conv", torch.ones(8, 27)), ValueError, ("conv", "(8, 3, 3, 3)", "(8, 27)")),
    "other dtype": Bad(with_one("linear", torch.ones(24, 18).half()), TypeError, ("linear", "float32", "float16")),
    "other device": Bad(with_one("twin", torch.ones(24, 18, device="meta")), ValueError, ("twin", "cpu", "meta")),
    "all on another device": Bad(
        lambda given: {name: tensor.to("meta") for name, tensor in given.items()}, ValueError, ("cpu", "meta")
    ),
    "sparse": Bad(with_one("linear", torch.ones(24, 18).to_sparse()), TypeError, ("linear", "dense", "sparse")),
    "not a tensor": Bad(with_one("linear", [1.0]), TypeError, ("linear", "tensor", "list")),
    "None": Bad(with_one("linear", None), TypeError, ("linear", "tensor", "NoneType")),
    "name missing": Bad(without("conv"), ValueError, ("conv",)),
    "all names missing": Bad(lambda _: {}, ValueError, ("linear", f"{len(SHAPES)} of {len(SHAPES)}")),
    "name unknown": Bad(with_one("other", torch.ones(2)), ValueError, ("other",)),
    "name misspelt": Bad(
        lambda given: {"lineal" if name == "linear" else name: t for name, t in given.items()}, ValueError, ("linear",)
    ),
    "list too short": Bad(lambda given: list(given.values())[:-1], ValueError, ("8", "7")),
    "list too long": Bad(lambda given: [*given.values(), torch.ones(1)], ValueError, ("8", "9")),
    "list in another order": Bad(
        lambda given: list(given.values())[::-1], ValueError, ("linear", "(24, 18)", "(0, 5)")
    ),
    "empty list": Bad(lambda _: [], ValueError, ("8", "0")),
    "flat buffer too short": Bad(lambda given: flat(given)[1:], ValueError, (str(TOTAL), str(TOTAL - 1))),
    "flat buffer of two dimensions": Bad(lambda given: flat(given)[None], ValueError, (str(TOTAL), f"(1, {TOTAL})")),
    "flat buffer with strides": Bad(
        lambda given: flat(given).repeat_interleave(2)[::2], ValueError, ("contiguous", "(2,)")
    ),
    "flat buffer of integers": Bad(lambda given: flat(given).long(), TypeError, ("float", "int64")),
    "flat buffer of another dtype": Bad(lambda given: flat(given).bfloat16(), TypeError, ("float32", "bfloat16")),
    "flat buffer elsewhere": Bad(lambda given: flat(given).to("meta"), ValueError, ("cpu", "meta")),
    "nothing": Bad(lambda _: None, TypeError, ()),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_gradients_are_refused_without_a_trace(name: str):
    bad = BAD[name]
    one, other = Compressor(everything(), gradients(0)), Compressor(everything(), gradients(0))
    for seed in range(4):
        with pytest.raises(bad.error) as caught:
            one.compress(bad.make(gradients(seed)))
        for word in bad.says:
            assert word in str(caught.value)
        assert one.iteration == seed
        assert same_bits(step(one, gradients(seed)), step(other, gradients(seed)))
    assert same_bits(one.error(), other.error())
    assert one.compression_stats() == other.compression_stats()


@pytest.mark.parametrize("name", [name for name, bad in BAD.items() if "dtype" not in name])
def test_bad_outputs_are_refused_without_a_trace(name: str):
    bad = BAD[name]
    compressor = Compressor(everything(), gradients(0))
    compressed = compressor.compress(gradients(0))
    if name == "nothing":
        assert isinstance(compressor.decompress(compressed, out=None), dict)
        return
    expected, given = poisoned(), gradients(1)
    compressor.decompress(compressed, out=expected)
    copies = {key: tensor.clone() for key, tensor in given.items()}
    with pytest.raises(bad.error) as caught:
        compressor.decompress(compressed, out=bad.make(given))
    for word in bad.says:
        assert word in str(caught.value)
    assert same_bits(given, copies)
    again = poisoned()
    compressor.decompress(compressed, out=again)
    assert same_bits(again, expected)


def test_expanded_tensors_are_compressed_but_not_written():
    compressor = Compressor(everything(), gradients(0))
    expanded = torch.ones(1, 18).expand(24, 18)
    compressed = compressor.compress({**gradients(0), "linear": expanded})
    for write in (compressor.decompress, compressor.leave_error):
        given = poisoned()
        with pytest.raises(ValueError, match="'linear' share memory"):
            write(compressed, {**given, "linear": expanded})
        assert all(tensor.isnan().all() for tensor in given.values())


def test_dtype_and_device_are_those_of_the_first_step_where_shapes_were_given():
    compressor = Compressor(everything(), SHAPES)
    step(compressor, gradients(0, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="bfloat16") as caught:
        compressor.compress(gradients(1))
    assert "float32" in str(caught.value)
    assert compressor.iteration == 1


def test_gradients_on_two_devices_are_refused_at_the_first_step():
    compressor = Compressor(everything(), SHAPES)
    with pytest.raises(ValueError, match="'twin' must be on cpu; got meta"):
        compressor.compress({**gradients(0), "twin": torch.ones(24, 18, device="meta")})
    assert compressor.iteration == 0


def test_refused_first_step_does_not_fix_the_dtype():
    compressor = Compressor(everything(), SHAPES)
    with pytest.raises(ValueError, match="shape"):
        compressor.compress({**gradients(0, dtype=torch.float64), "bias": torch.ones(3)})
    step(compressor, gradients(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_outputs_may_be_of_any_floating_dtype(dtype: torch.dtype):
    compressor = Compressor(everything(), SHAPES)
    compressed = compressor.compress(gradients(0))
    exact, out = poisoned(), poisoned(dtype=dtype)
    compressor.decompress(compressed, out=exact)
    compressor.decompress(compressed, out=out)
    assert same_bits(out, {name: tensor.to(dtype) for name, tensor in exact.items()})


def test_factors_of_an_earlier_step_are_refused():
    compressor = Compressor(everything(), SHAPES)
    old = compressor.compress(gradients(0))
    new = compressor.compress(gradients(1))
    out = gradients(2)
    copies = {name: tensor.clone() for name, tensor in out.items()}
    with pytest.raises(RuntimeError, match="step 1") as caught:
        compressor.decompress(old, out=out)
    assert "2" in str(caught.value)
    assert same_bits(out, copies)
    compressor.decompress(new, out=out)


@pytest.mark.parametrize("config", [None, {"rank": 4}, 4, PowerSGDConfig])
def test_config_must_be_one(config: Any):
    with pytest.raises(TypeError, match="PowerSGDConfig"):
        Compressor(config, SHAPES)


@pytest.mark.parametrize(
    ("tensors", "error", "says"),
    [
        ({"w": (4, -1)}, ValueError, ("'w'", "(4, -1)")),
        ({"w": torch.ones(4, 4, dtype=torch.int32)}, TypeError, ("'w'", "float", "int32")),
        ({"w": torch.ones(4, 4).to_sparse()}, TypeError, ("'w'", "dense")),
    ],
)
def test_bad_tensors_at_construction(tensors: Any, error: type[Exception], says: tuple[str, ...]):
    with pytest.raises(error) as caught:
        Compressor(PowerSGDConfig(), tensors)
    for word in says:
        assert word in str(caught.value)


@pytest.mark.parametrize("seed", [2**31, 2**32, 2**63 - 1, 2**63, 2**100])
def test_every_seed_that_the_config_accepts_works(seed: int):
    try:
        config = everything(seed=seed)
    except ValueError as caught:
        assert str(seed) in str(caught)  # noqa: PT017
        return
    assert all(tensor.isfinite().all() for tensor in step(Compressor(config, SHAPES), gradients(0)).values())


def test_group_without_initialised_process_group():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="init_process_group"):
        Compressor(PowerSGDConfig(), SHAPES, group=object())  # type: ignore[arg-type]


def test_gradients_that_require_grad_are_only_read():
    compressor, plain = Compressor(everything(), SHAPES), Compressor(everything(), SHAPES)
    given = {name: tensor.requires_grad_() for name, tensor in gradients(0).items()}
    assert same_bits(step(compressor, given), step(plain, gradients(0)))
    assert not any(tensor.requires_grad for tensor in compressor.error().values())
