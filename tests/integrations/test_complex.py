"""Complex parameters: averaged whole at full rank, and nothing lost at low rank, in every adapter that has them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.integrations.ddp import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.integrations.optimizer import AllReduce, Config, PowerSGD
from tests.support.balance import check_same
from tests.support.distributed import make_test
from tests.support.sharded_training import mesh_of
from tests.support.training import LIMIT, relative, total

STEPS = 4
FULL: dict[str, Any] = {"rank": 99, "min_compression_rate": 0}
LOW: dict[str, Any] = {"rank": 2, "min_compression_rate": 1}
INT2: dict[str, Any] = {"quantize": "int2"}
INT4: dict[str, Any] = {"rank": 4, "algorithm": "alternating", "wire_dtype": "int4"}


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


def steps(model: Any, forward: Any, worker: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Averaged gradients of some steps."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + worker)
        forward(torch.randn(6, 9, dtype=dtype, generator=generator)).backward()
        given = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({n: (G.full_tensor() if isinstance(G, DTensor) else G).clone() for n, G in given.items()})
    return found


def check_equal(got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(relative(ours[name], theirs[name]) <= LIMIT for name in theirs)


def in_ddp(worker: int, world_size: int) -> None:
    """At full rank as DDP alone, with the same bits on all workers."""
    for dtype, as_view in ((torch.complex64, False), (torch.complex128, True)):
        expected: list[dict[str, Tensor]] = []
        # The batched hook has a few exact steps first.
        for hook, rank, start in ((None, 0, 0), (powerSGD_hook, 99, 0), (batched_powerSGD_hook, 99, 2)):
            model = Waves(dtype)
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
            if hook is not None:
                wrapped.register_comm_hook(PowerSGDState(None, rank, start, 0, module=model), hook)
            got = steps(model, wrapped, worker, dtype)
            check_same(got[-1].values())
            expected = expected or got
            check_equal(got, expected)


def in_fsdp2(worker: int, world_size: int) -> None:
    """At full rank as FSDP2 alone; a checkpoint of low rank goes on as if nothing had happened."""
    dtype = torch.complex64
    for shape in ((2, 1), (1, 2)):
        mesh = mesh_of(replicate=shape[0], shard=shape[1])
        made: list[tuple[Any, Any]] = []
        for settings in (None, FULL, LOW, LOW, INT2, INT2):
            # FSDP wants one dtype in a unit, and no scalars.
            model = Waves(dtype, scalar=(1,))
            for unit in (model.real, model):
                fully_shard(unit, mesh=mesh["shard"])
            group = mesh["replicate"].get_group() if shape == (2, 1) and settings else None
            made.append((model, apply_powersgd(model, PowerSGDConfig(**settings), group) if settings else None))
        (native, _), (full, _), (first, state), (second, resumed), (third, sent), (_, begun) = made
        if shape == (2, 1):
            native = DistributedDataParallel(Waves(dtype, scalar=(1,)))
        check_equal(steps(full, full, worker, dtype), steps(native, native, worker, dtype))
        steps(first, first, worker, dtype)
        resumed.load_state_dict(state.state_dict())
        check_equal(steps(second, second, worker, dtype), steps(first, first, worker, dtype))
        shapes = {name: tuple(error.shape) for name, error in resumed.state_dict()["error"].items()}
        assert shapes == {"first.weight": (13, 18), "second.weight": (7, 26), "real.weight": (8, 7)}
        # Vectors of an odd number of complex elements have errors too.
        steps(third, third, worker, dtype)
        begun.load_state_dict(sent.state_dict())
        errors = {name: total(error) / 2 for name, error in sent.error().items()}
        assert errors["first.bias"].numel() == 26
        assert all(relative(begun.error()[name], error) <= LIMIT for name, error in errors.items())


def in_a_loop(worker: int, world_size: int) -> None:
    """The plain loop: averages of mixed dtypes, and the error that it leaves in the gradients."""
    matrices = {torch.complex64: (13, 9), torch.float32: (12, 10)}
    # torch views real elements as complex only from an even offset.
    shapes = {**matrices, torch.float16: (3,), torch.complex128: (7,)}
    generator = torch.Generator().manual_seed(worker)
    gradients = [torch.randn(shape, dtype=dtype, generator=generator) for dtype, shape in shapes.items()]
    means = [total(gradient) / 2 for gradient in gradients]
    exact = AllReduce().aggregate([gradient.clone() for gradient in gradients])
    powersgd = PowerSGD(gradients, Config(rank=2, min_compression_rate=1, start_compressing_after_num_steps=0))
    averages = powersgd.aggregate(gradients)
    assert [average.dtype for average in averages] == list(shapes)
    assert gradients[0].any()
    for average, error, exactly, given in zip(averages, gradients, exact, means, strict=True):
        # Most of it in fp16.
        assert relative(exactly, given) <= 1e-3
        assert relative(average + total(error) / 2, given) <= 1e-3


test_two_workers = make_test([in_ddp, in_fsdp2, in_a_loop], 2)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
@pytest.mark.parametrize("fields", [LOW, {**LOW, "error_dtype": "bf16"}, INT4], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_compressor_loses_nothing(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    shapes = {"matrix": (12, 10), "vector": (7,), "scalar": (), "empty": (0, 4)}
    compressor = Compressor(
        PowerSGDConfig(backend="torch", **fields), {n: torch.zeros(s, dtype=dtype) for n, s in shapes.items()}
    )
    missing = {name: torch.zeros(shape, dtype=torch.complex128) for name, shape in shapes.items()}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        gradients = {n: torch.randn(s, dtype=torch.complex64, generator=generator).to(dtype) for n, s in shapes.items()}
        if dtype != torch.complex32:
            # A lazy conjugate whose memory is transposed.
            gradients["matrix"] = gradients["matrix"].mT.contiguous().mH
        averages = compressor.decompress(compressor.compress(gradients))
        assert isinstance(averages, dict)
        for name, average in averages.items():
            assert (average.dtype, average.shape) == (dtype, shapes[name])
            missing[name] += gradients[name].to(torch.complex128) - average.to(torch.complex128)
    errors = compressor.error()
    assert {name: error.shape for name, error in errors.items()} == {"matrix": (12, 10)}
    for name, left in missing.items():
        owed = errors.get(name, torch.zeros(shapes[name])).to(left.dtype)
        # An average is rounded to 16 bits where the gradient has 16 bits, and an error in bf16 to 8.
        atol = 0.1 if "error_dtype" in fields else 2e-3 if dtype == torch.complex32 else 1e-5
        torch.testing.assert_close(owed, left, rtol=0, atol=atol)


def test_compressor_writes_to_lazy_conjugates_and_flat_buffers() -> None:
    config = PowerSGDConfig(rank=99, min_compression_rate=0, backend="torch")
    gradient = torch.randn(5, 4, dtype=torch.complex64)
    compressor = Compressor(config, {"w": gradient})
    out = torch.zeros(4, 5, dtype=torch.complex64).mH
    compressor.decompress(compressor.compress({"w": gradient}), out={"w": out})
    torch.testing.assert_close(out.resolve_conj(), gradient)
    for flat in (gradient.view(-1), torch.view_as_real(gradient).view(-1)):
        torch.testing.assert_close(compressor.decompress(compressor.compress(flat), out=torch.zeros_like(flat)), flat)
    with pytest.raises(ValueError, match="lazy"):
        compressor.compress(gradient.view(-1).conj())
    with pytest.raises(TypeError, match="complex64"):
        compressor.compress({"w": torch.zeros(5, 8)})
    with pytest.raises(ValueError, match=r"must have shape \(5, 4\) real numbers"):
        Compressor(config, {"w": (5, 4)}).compress({"w": gradient})
