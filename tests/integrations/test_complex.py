"""Complex parameters: averaged whole at full rank, and nothing lost at low rank, in every adapter that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.integrations.ddp import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.integrations.optimizer import AllReduce, Config, PowerSGD
from tests.support.distributed import outcome, run_cases
from tests.support.small import Results
from tests.support.training import LIMIT, digest, local_gradients, relative, total

STEPS = 5
FULL: dict[str, Any] = {"rank": 99, "min_compression_rate": 0}
LOW: dict[str, Any] = {"rank": 2, "min_compression_rate": 1}


class Waves(nn.Module):
    """Complex and real parameters: matrices, vectors of odd sizes and, unless it has a shape, a scalar."""

    def __init__(self, dtype: torch.dtype, scalar: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(9, 13, dtype=dtype)
        self.second = nn.Linear(13, 7, dtype=dtype)
        self.phase = nn.Parameter(torch.ones(scalar, dtype=dtype))
        self.real = nn.Linear(7, 8, dtype=dtype.to_real())

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.real((self.second(self.first(inputs)) * self.phase).abs())
        return outputs.square().mean()


def inputs(worker: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(6, 9, dtype=dtype, generator=torch.Generator().manual_seed(10 * step + worker))


def steps(model: Any, forward: Any, worker: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Averaged gradients of some steps."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        forward(inputs(worker, step, dtype)).backward()
        found.append({name: whole_gradient(p) for name, p in model.named_parameters() if p.grad is not None})
    return found


def whole_gradient(parameter: Any) -> Tensor:
    gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    copied: Tensor = gradient.detach().clone()
    return copied


def worst(got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> float:
    return max(difference(a[name], b[name]) for a, b in zip(got, expected, strict=True) for name in b)


def difference(one: Tensor, other: Tensor) -> float:
    return relative(*(torch.view_as_real(t.to(torch.complex128)) for t in (one, other)))


def replica(dtype: torch.dtype, **options: Any) -> tuple[Waves, DistributedDataParallel]:
    model = Waves(dtype)
    return model, DistributedDataParallel(model, **options)


def ddp(worker: int, world_size: int) -> dict[str, Any]:
    """At full rank as DDP alone; at low rank Σ_w E_T + W Σ_t Ĝ_t = Σ_w Σ_t G_t."""
    found: dict[str, Any] = {}
    for dtype in (torch.complex64, torch.complex128):
        for options in ({}, {"gradient_as_bucket_view": True}):
            expected = steps(*replica(dtype, **options), worker, dtype)
            for hook, settings in ((powerSGD_hook, FULL), (batched_powerSGD_hook, {**FULL, "start": 2})):
                model, wrapped = replica(dtype, **options)
                state = PowerSGDState(None, 99, settings.get("start", 0), 0, module=model)
                wrapped.register_comm_hook(state, hook)
                got = steps(model, wrapped, worker, dtype)
                found[f"{dtype}, {options}, {hook.__name__}"] = worst(got, expected), digest(got[-1].values())
        found[f"{dtype}, low rank"] = conserved(worker, dtype), ""
    return found


def conserved(worker: int, dtype: torch.dtype) -> float:
    model, wrapped = replica(dtype)
    state = PowerSGDState(None, 2, 0, 1, module=model)
    wrapped.register_comm_hook(state, powerSGD_hook)
    own = local_gradients(model)
    given: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    for step in range(STEPS):
        model.zero_grad()
        wrapped(inputs(worker, step, dtype)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            given[name] = given.get(name, 0) + own[name]
            sent[name] = sent.get(name, 0) + parameter.grad
    errors, differences = state.error(), []
    assert {"first.weight", "second.weight"} <= errors.keys()
    assert "first.bias" not in errors
    for name, error in errors.items():
        real = torch.view_as_real if given[name].is_complex() else torch.clone
        G, average = (real(tensor).reshape(error.shape) for tensor in (given[name], sent[name]))
        differences.append(relative(total(error) / 2 + average.double(), total(G) / 2))
    return max(differences)


def fsdp2(worker: int, world_size: int, *, hybrid: bool, dtype: torch.dtype = torch.complex64) -> dict[str, Any]:
    """At full rank as FSDP2 alone; a checkpoint of low rank goes on as if nothing had happened."""
    ranks = init_device_mesh("cpu", (2, 1) if hybrid else (1, 2), mesh_dim_names=("replicate", "shard"))
    group = ranks["replicate"].get_group() if hybrid else None

    def sharded(mesh: Any) -> Any:
        # FSDP wants one dtype in a unit, and no scalars.
        model = Waves(dtype, scalar=(1,))
        fully_shard(model.real, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def make(**settings: Any) -> tuple[Any, Any]:
        model = sharded(ranks["shard"])
        return model, apply_powersgd(model, PowerSGDConfig(**settings), group)

    native = sharded(ranks if hybrid else ranks["shard"])
    expected = steps(native, native, worker, dtype)
    model, _ = make(**FULL)
    got = steps(model, model, worker, dtype)
    first, state = make(**LOW)
    steps(first, first, worker, dtype)
    second, resumed = make(**LOW)
    resumed.load_state_dict(state.state_dict())
    after = [steps(model, model, worker, dtype) for model in (first, second)]
    shapes = {name: tuple(error.shape) for name, error in resumed.state_dict()["error"].items()}
    return {"native": worst(got, expected), "resumed": worst(*after), "shapes": shapes}


def fsdp2_full(worker: int, world_size: int) -> dict[str, Any]:
    return fsdp2(worker, world_size, hybrid=False)


def fsdp2_hybrid(worker: int, world_size: int) -> dict[str, Any]:
    return fsdp2(worker, world_size, hybrid=True)


def loop(worker: int, world_size: int) -> dict[str, float]:
    """The plain loop: averages of mixed dtypes, and the error that it leaves in the gradients."""
    shapes = {torch.complex64: (13, 9), torch.complex128: (7,), torch.float32: (12, 10), torch.float16: (3,)}
    generator = torch.Generator().manual_seed(worker)
    gradients = [torch.randn(shape, dtype=dtype, generator=generator) for dtype, shape in shapes.items()]
    means = [mean(gradient) for gradient in gradients]
    exact = AllReduce().aggregate([gradient.clone() for gradient in gradients])
    powersgd = PowerSGD(gradients, Config(rank=2, min_compression_rate=1, start_compressing_after_num_steps=0))
    averages = powersgd.aggregate(gradients)
    assert [average.dtype for average in averages] == list(shapes)
    lost = [
        difference(average + mean(error), given)
        for average, error, given in zip(averages, gradients, means, strict=True)
    ]
    return {
        "exact": max(difference(average, given) for average, given in zip(exact, means, strict=True)),
        "lost": max(lost),
        "error": float(gradients[0].abs().sum()),
    }


def mean(tensor: Tensor) -> Tensor:
    """Over the two workers."""
    return torch.view_as_complex(total(torch.view_as_real(tensor.to(torch.complex128))) / 2)


CASES: list[Callable[..., Any]] = [ddp, fsdp2_full, fsdp2_hybrid, loop]


@pytest.fixture(scope="module")
def two() -> Results:
    return run_cases(CASES, 2)


def test_ddp(two: Results) -> None:
    first, second = outcome(two, ddp)
    assert first == second
    for case, (wrong, _) in first.items():
        assert wrong <= LIMIT, case


@pytest.mark.parametrize("case", [fsdp2_full, fsdp2_hybrid])
def test_fsdp2(two: Results, case: Callable[..., Any]) -> None:
    for seen in outcome(two, case):
        assert seen["native"] <= LIMIT
        assert seen["resumed"] <= LIMIT
        assert seen["shapes"] == {"first.weight": (13, 18), "second.weight": (7, 26), "real.weight": (8, 7)}


def test_plain_loop(two: Results) -> None:
    for seen in outcome(two, loop):
        assert seen["exact"] <= 1e-3  # fp16
        assert seen["lost"] <= 1e-3
        assert seen["error"] > 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
@pytest.mark.parametrize("fields", [LOW, {"rank": 4, "algorithm": "alternating", "wire_dtype": "int4"}], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_compressor_loses_nothing(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    shapes = {"matrix": (12, 10), "vector": (7,), "scalar": (), "empty": (0, 4)}
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    compressor = Compressor(PowerSGDConfig(backend="torch", **fields), tensors)
    given = {name: torch.zeros(shape, dtype=torch.complex128) for name, shape in shapes.items()}
    sent = {name: torch.zeros(shape, dtype=torch.complex128) for name, shape in shapes.items()}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        gradients = {n: torch.randn(s, dtype=torch.complex64, generator=generator).to(dtype) for n, s in shapes.items()}
        if dtype != torch.complex32:
            # A lazy conjugate whose memory is transposed.
            gradients["matrix"] = gradients["matrix"].mT.contiguous().mH
        averages = compressor.decompress(compressor.compress(gradients))
        assert isinstance(averages, dict)
        for name, average in averages.items():
            assert (average.dtype, average.shape) == (dtype, tensors[name].shape)
            given[name] += gradients[name].to(torch.complex128)
            sent[name] += average.to(torch.complex128)
    errors = compressor.error()
    assert errors.keys() == {"matrix"}
    assert errors["matrix"].shape == (12, 10)
    for name in shapes:
        owed = sent[name] + errors.get(name, torch.zeros(()))
        # An average is rounded to 16 bits where the gradient has 16 bits.
        torch.testing.assert_close(owed, given[name], rtol=0, atol=2e-3 if dtype == torch.complex32 else 1e-5)


def test_compressor_writes_to_lazy_conjugates_and_flat_buffers() -> None:
    config = PowerSGDConfig(rank=99, min_compression_rate=0, backend="torch")
    gradient = torch.randn(5, 4, dtype=torch.complex64)
    compressor = Compressor(config, {"w": gradient})
    out = torch.zeros(4, 5, dtype=torch.complex64).mH
    compressor.decompress(compressor.compress({"w": gradient}), out={"w": out})
    torch.testing.assert_close(out.resolve_conj(), gradient)
    for flat in (gradient.view(-1), torch.view_as_real(gradient).view(-1)):
        found = torch.zeros_like(flat)
        compressor.decompress(compressor.compress(flat), out=found)
        torch.testing.assert_close(found, flat)
    with pytest.raises(ValueError, match="lazy"):
        compressor.compress(gradient.view(-1).conj())
    with pytest.raises(TypeError, match="complex64"):
        compressor.compress({"w": torch.zeros(5, 8)})
    with pytest.raises(ValueError, match=r"must have shape \(5, 4\) real numbers"):
        Compressor(config, {"w": (5, 4)}).compress({"w": gradient})
