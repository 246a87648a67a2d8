"""DeepSpeed's mixtures of experts: each gradient is averaged over the workers that have the parameter."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("deepspeed")

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import deepspeed_training
from tests.support.deepspeed_training import FULL_RANK, Case, each, engine_for, losses, weights, zero
from tests.support.distributed import folder, make_test
from tests.support.sharded_training import TOKENS, WIDTH, batch
from tests.support.training import complaint

RANK_2 = {"rank": 2, "min_compression_rate": 1, "parameters": None}
EXPERTS = "deepspeed_moe.experts"


class Mixtures(nn.Module):
    """A residual layer of four experts for each ``ep_size``. Experts differ, also in what the constructor copies."""

    def __init__(self, ep_sizes: Sequence[int], seed: int = 0) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        expert = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
        self.layers = nn.ModuleList([MoE(WIDTH, expert, 4, ep_size=size, use_rts=False) for size in ep_sizes])
        layers: Any = self.layers
        for layer in layers:
            first = dist.get_rank() % layer.ep_size * layer.num_local_experts
            for index, local in enumerate(layer.deepspeed_moe.experts.deepspeed_experts, first):
                torch.manual_seed(seed + index)
                for parameter in local.parameters():
                    nn.init.normal_(parameter, std=0.2)

    def groups(self) -> list[dict[str, Any]]:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

        groups: list[dict[str, Any]] = split({"params": list(self.parameters()), "name": "parameters"})
        return groups

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        logits: Tensor = self.head(x)
        return logits


def full_rank(stage: int) -> None:
    """Full rank is plain DeepSpeed, also before compression begins. With SGD, a wrong divisor shows."""
    sizes = {2: (1, 2), 4: (2, 4)}[dist.get_world_size()]
    case, found = Case("", stage, zero(reduce_bucket_size=700) if stage else {}, optimizer="sgd"), []
    for section in (None, {**FULL_RANK, "start_iter": 2}):
        with engine_for(case, section, Mixtures(sizes)) as engine:
            losses(engine, range(4))
            found.append(weights(engine))
            if section is not None:
                groups = {state.group.size() for state in engine.powersgd}
                assert groups == {2: {2}, 4: {2, 4}}[dist.get_world_size()]
                # An expert on one worker alone, and all others by their names.
                left = engine.powersgd.report().left_out
                assert left
                assert all(name.startswith(f"layers.{len(sizes) - 1}.{EXPERTS}") for name in left)
                assert {tensor.name for tensor in engine.powersgd.report().tensors} == found[0].keys() - set(left)
    plain, ours = found
    assert all(torch.allclose(ours[name], plain[name], rtol=0, atol=1e-6) for name in plain)
    assert not all(torch.allclose(ours[name], p, atol=1e-3) for name, p in Mixtures(sizes).named_parameters())


def conserves(stage: int) -> None:
    """mean E + Σ Ĝ = mean Σ G, of experts that get no token too. DeepSpeed divides gradients by all workers."""
    with engine_for(Case("", stage, optimizer="sgd"), RANK_2, Mixtures((2,))) as engine:
        parameters = dict(engine.module.named_parameters())
        before, given = weights(engine), {name: torch.zeros_like(p.data) for name, p in parameters.items()}
        for name, parameter in parameters.items():
            parameter.register_hook(lambda gradient, total=given[name]: (total.add_(gradient), None)[1])
        for step in range(4):
            seen = {name: total.clone() for name, total in given.items() if EXPERTS in name}
            # In every second step all tokens are the same, so that all go to one expert.
            own = batch(dist.get_rank(), step) if step % 2 else (torch.full((8, 6), step),) * 2
            with mock.patch.object(deepspeed_training, "batch", lambda *_, own=own: own):
                losses(engine, [step])
            idle = [torch.equal(total, given[name]) for name, total in seen.items()]
            assert any(idle) == (step % 2 == 0)
        after, errors, state = weights(engine), engine.powersgd.error(), engine.powersgd
        for name, old in before.items():
            group = state.states["ep_size_2" if EXPERTS in name else "dense"].group
            left = given[name] - errors[name].view(old.shape) if name in errors else given[name].clone()
            dist.all_reduce(left, group=group)
            applied = (old - after[name]) / 0.5
            assert torch.allclose(applied, left / dist.get_world_size(), rtol=0, atol=2e-6), name
        assert any(error.any() for name, error in errors.items() if EXPERTS in name)


def continues(stage: int) -> None:
    """From a file for each part of the experts. Other parts are refused before anything changes."""
    case, section = Case("", stage), {**RANK_2, "parameters": "int2" if stage else None, "check_every": 1}
    with folder(dist.get_rank()) as path:
        with engine_for(case, section, Mixtures((2,))) as engine:
            losses(engine, range(3))
            engine.save_checkpoint(path, "a")
            expected = losses(engine, range(3, 6)), weights(engine)
        dist.barrier()
        files = {f"powersgd_{part}_state.pt" for part in ("pp00_tp00", "ep_size_2_00", "ep_size_2_01")}
        assert {file.name for file in Path(path, "a").glob("powersgd*")} == files
        with engine_for(case, section, Mixtures((2,), seed=9)) as engine:
            engine.load_checkpoint(path)
            assert losses(engine, range(3, 6)) == pytest.approx(expected[0], rel=0, abs=1e-6)
            found = weights(engine)
            assert all(torch.allclose(found[name], old, rtol=0, atol=1e-5) for name, old in expected[1].items())
            state, saved = engine.powersgd, engine.powersgd.state_dict()
            kept = {name for name, error in state.error().items() if error.any()}
            assert {*state.load_state_dict(saved).loaded} == kept
            del saved["ep_size_2"]["matrices"]
            assert state.load(path).loaded
            assert state.iteration == 3
            # A folder with a state of its own, of which the experts' is not continued from an older checkpoint.
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.copy(Path(path, "a", "powersgd_pp00_tp00_state.pt"), path)
            dist.barrier()
            assert kept - {name for name in kept if EXPERTS in name} == {*state.load(path).loaded}
            dist.barrier()
            Path(path, "powersgd_pp00_tp00_state.pt").unlink(missing_ok=True)
            assert state.load(f"{path}/a").loaded
            # What one part refuses, no other loads.
            saved["dense"]["iteration"] = 9
            said = complaint(state.load_state_dict, saved)
            assert said.startswith("ValueError"), said
            assert "the parts 'dense', 'ep_size_2'; got 'dense'" in complaint(state.load_state_dict, {"dense": {}})
            assert state.iteration == 3
            assert "no saved PowerSGD state" in complaint(state.load, f"{path}/none")
            assert state.load(f"{path}/none", missing_ok=True) is None
            assert not any(error.any() for error in state.error().values())
        with engine_for(case, section, Mixtures((1,))) as engine:
            assert "compresses those of ep_size_1. Continue" in complaint(engine.load_checkpoint, path)


test_four_workers = make_test(each(full_rank, 2) | each(conserves, 2) | each(continues, 1), 4)
test_two_workers = pytest.mark.slow(make_test(each(full_rank, 0, 1, 2), 2))
test_stage_0 = pytest.mark.slow(make_test(each(full_rank, 0) | each(conserves, 0), 4))
