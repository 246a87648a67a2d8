"""FSDP2 with experts and dense layers on meshes of their own, as training programs have them, on gloo workers."""

import contextlib
import functools
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from powersgd_triton import attach
from powersgd_triton.config import PowerSGDConfig
from tests.support.checks import same_bits
from tests.support.distributed import folder, make_test
from tests.support.sharded_training import FULL_RANK, mesh_of, whole_errors
from tests.support.training import LIMIT, complaint
from tests.support.wrappers import local

# Older versions of torch have one mesh a unit, and no reduce-scatter of parameters that some workers do not use.
pytestmark = pytest.mark.skipif(not hasattr(_fsdp_common, "ShardPlacementResult"), reason="needs a newer torch")
EXPERTS = 8
WIDTH = 24
HIDDEN = 16


class Experts(nn.Module):
    """Each worker applies the experts that it has: all, or its part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 5)
        self.gate = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.first, self.use_gate = 0, True

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        up, gate, down = map(local, (self.up, self.gate, self.down))
        hidden = torch.tanh(torch.einsum("ti,ehi->eth", x, up))
        if self.use_gate:
            hidden = hidden * torch.einsum("ti,ehi->eth", x, gate)
        outputs = torch.einsum("eth,eih->eti", hidden, down)
        return torch.einsum("te,eti->ti", weights[:, self.first : self.first + len(up)], outputs).clone()


class Block(nn.Module):
    """A dense layer, and experts among which a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        # The experts that get tokens.
        self.busy = torch.ones(EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.dense(x))
        outputs: Tensor = x + self.experts(x, self.router(x).softmax(-1) * self.busy)
        return outputs


class Mixture(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)
        # What the gradient of the head's weight is multiplied by.
        self.spoiled = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        weight = self.head.weight.clone()
        weight.register_hook(functools.partial(torch.mul, self.spoiled))
        return F.linear(x, weight, self.head.bias)


def sharded(
    model: Mixture,
    mesh: DeviceMesh,
    experts: DeviceMesh | None = None,
    dim: int = 0,
    parallel: DeviceMesh | None = None,
    by_module: bool = False,
) -> Any:
    """``fully_shard`` as torchtitan applies it: experts on a mesh of their own, in each block's second parameter group.

    ``dim`` is that on which experts are sharded, and ``parallel`` distributes whole experts before. With ``by_module``
    experts are a unit.
    """
    for block in (child for child in model.blocks if isinstance(child, Block)):
        if parallel is not None:
            for name, parameter in list(block.experts.named_parameters()):
                setattr(block.experts, name, nn.Parameter(distribute_tensor(parameter.data, parallel, [Shard(0)])))
            block.experts.first = parallel.get_local_rank() * EXPERTS // parallel.size()
        place: Callable[[nn.Parameter], Any] | None = None
        if by_module:
            fully_shard(block.experts, mesh=experts, shard_placement_fn=lambda _: Shard(dim))
        else:
            own, rest = (each and _fsdp_init._get_mesh_info(each, None) for each in (experts, mesh))
            place = functools.partial(placed, {*block.experts.parameters()}, Shard(dim), own, rest)
        fully_shard(block, mesh=mesh, shard_placement_fn=place)
    return fully_shard(model, mesh=mesh)


def placed(experts: set[nn.Parameter], placement: Shard, own: Any, rest: Any, parameter: nn.Parameter) -> Any:
    """Where FSDP puts a parameter of a block: experts on their ``own`` mesh, if they have one."""
    if own is None:
        return placement if parameter in experts else None
    place, info = (placement, own) if parameter in experts else (Shard(0), rest)
    return _fsdp_common.ShardPlacementResult(placement=place, mesh_info=info)


def backward(model: Any, worker: int, step: int) -> None:
    """Gradients of a step with a worker's data."""
    model.zero_grad()
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(100 * step + worker))
    F.mse_loss(model(x), x.roll(1, dims=1).sin()).backward()


def gradients(model: Any) -> dict[str, Tensor]:
    """This worker's parts of all gradients."""
    return {name: p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None}


STEPS = 3
QUICK = ("1-D, expert parallel", "alone")
"""The layouts of ``make test``."""
RANK_1 = PowerSGDConfig(rank=1, min_compression_rate=1)


@functools.cache
def layouts() -> dict[str, dict[str, Any]]:
    """Meshes of the dense layers and of the experts; ``parallel`` distributes experts before."""
    dense, line = mesh_of(replicate=2, shard=2), mesh_of(shard=4)
    crossed = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("replicate", "shard"))
    flat, four = mesh_of(efsdp=2, ep=2), mesh_of(efsdp=1, ep=4)
    sparse = mesh_of(replicate=2, efsdp=1, ep=2)
    return {
        "HSDP on dim 1": {"mesh": dense, "dim": 1},
        "1-D on dim 2": {"mesh": line, "dim": 2},
        "other replicas": {"mesh": dense, "experts": crossed, "dim": 1},
        "module": {"mesh": dense, "experts": crossed, "by_module": True},
        "HSDP, expert parallel": {"mesh": dense, "experts": sparse["replicate", "efsdp"], "parallel": sparse["ep"]},
        "1-D, expert parallel": {"mesh": line, "experts": flat["efsdp"], "parallel": flat["ep"], "dim": 1},
        "alone": {"mesh": line, "experts": four["efsdp"], "parallel": four["ep"]},
    }


def attached(layout: str, config: PowerSGDConfig | None = None, *, set_last: bool = False) -> tuple[Any, Any]:
    """A model and its state. What torch lets users set, its newer versions, is set before or after."""
    model = sharded(Mixture(), **layouts()[layout])

    def set_options() -> None:
        getattr(model, "set_reduce_scatter_unused_params", bool)(True)
        getattr(model, "set_reduce_scatter_max_input_buffers", bool)(2)
        getattr(model, "set_separate_reduce_scatter_group", bool)()

    if not set_last:
        set_options()
    with contextlib.redirect_stdout(io.StringIO()):
        state = None if config is None else attach(model, config)
    if set_last:
        set_options()
    return model, state


def step(model: Any, worker: int, number: int) -> dict[str, Tensor]:
    """This worker's parts of the averages. Some experts get no tokens, and some workers do not use a parameter."""
    for block in model.blocks:
        block.busy = torch.arange(EXPERTS) % 3 != number
        block.experts.use_gate = number in (0, worker)
    backward(model, worker, number)
    return gradients(model)


def far(got: Tensor, expected: Tensor, scale: Tensor) -> bool:
    return bool((got - expected).norm() > LIMIT * scale.norm())


def averages(worker: int, _world_size: int, *, quick: bool) -> None:
    """At full rank they are FSDP's own; at rank 1 nothing is lost, also in a step that is skipped."""
    wrong: list[Any] = []
    for layout in [layout for layout in layouts() if (layout in QUICK) == quick]:
        (native, _), (full, _) = attached(layout), attached(layout, FULL_RANK)
        model, state = attached(layout, RANK_1, set_last=True)
        total, sent = dict[str, Tensor](), dict[str, Tensor]()
        for number in range(STEPS):
            expected, got, ours = (step(each, worker, number) for each in (native, full, model))
            assert got.keys() == expected.keys() == ours.keys()
            for name, gradient in expected.items():
                total[name], sent[name] = total.get(name, 0) + gradient, sent.get(name, 0) + ours[name]
                # Where gradients are zero now, what rounding has left of earlier ones is sent.
                wrong += [(layout, name, number)] * far(got[name], gradient, total[name])
        errors = {name: error.to_local() for name, error in state.state_dict()["error"].items()}
        for name, gradient in total.items():
            wrong += [(layout, name)] * far(sent[name] + errors.get(name, 0), gradient, gradient)
        model.spoiled = math.nan if worker else 1.0
        expected = step(native, worker, STEPS)
        step(model, worker, STEPS)
        after = {name: error.to_local() for name, error in state.state_dict()["error"].items()}
        for name in {name for name, error in errors.items() if error.any()} - {"head.weight"}:
            wrong += [(layout, name, "skipped")] * far(after[name], errors[name] + expected[name], expected[name])
        getattr(state, "check_replicas", list)()
        report = state.report()
        kept, experts = {name for name, error in errors.items() if error.any()}, {n for n in total if "experts" in n}
        assert kept == {tensor.name for tensor in report.tensors if tensor.rank}, layout
        assert {*report.left_out} == (experts if layout == "alone" else set()), layout
        assert total.keys() == {*report.left_out, *(tensor.name for tensor in report.tensors)}
        assert report.left_out or experts <= kept, layout
    # Not before, since the others would wait for a worker that fails.
    assert not wrong, wrong


def elsewhere(worker: int, _world_size: int) -> None:
    """A saved state goes on where it was saved, and its errors come back on other meshes."""
    for layout, others in (
        ("1-D, expert parallel", ("HSDP on dim 1", "other replicas")),
        ("HSDP, expert parallel", ("1-D, expert parallel", "alone")),
        ("alone", ("1-D on dim 2",)),
    ):
        model, state = attached(layout, RANK_1)
        for number in range(STEPS):
            step(model, worker, number)
        errors = whole_errors(state)
        with folder(worker) as path:
            state.save(path)
            again, resumed = attached(layout, RANK_1)
            # What one part refuses, no other loads.
            saved = state.state_dict()
            del saved["error"]["head.weight" if state.left_out else "blocks.1.experts.down"]
            assert "has no error of" in complaint(resumed.load_state_dict, saved)
            assert resumed.iteration == 0
            assert "'nothing' is not a trainable parameter" in complaint(resumed.renamed, {"head.weight": "nothing"})
            resumed.load(path)
            for other in others:
                loaded = attached(other, RANK_1)[1]
                report = loaded.load(path)
                found = whole_errors(loaded)
                assert found.keys() == errors.keys()
                assert same_bits(found, {n: errors[n] * (n not in loaded.left_out) for n in found}), (layout, other)
                lost = {name for name in loaded.left_out if errors[name].any()}
                assert {*report.dropped} == lost, (other, report)
                assert bool(lost) == (other == "alone")
        assert all(each.iteration == STEPS for each in (state, resumed, loaded))
        expected, got = (step(each, worker, STEPS) for each in (model, again))
        assert not [name for name, gradient in expected.items() if far(got[name], gradient, gradient)], layout


test_experts = make_test({"averages": functools.partial(averages, quick=True)}, 4)
test_other_meshes = pytest.mark.slow(
    make_test({"averages": functools.partial(averages, quick=False), "elsewhere": elsewhere}, 4)
)
