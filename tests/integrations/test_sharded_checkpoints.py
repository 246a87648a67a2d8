"""Checkpoints of the FSDP adapters through torch.distributed.checkpoint.

The table saves and loads by ``save(folder)``, on other meshes too, and damages what is saved on one worker.
"""

import dataclasses
import functools
import io
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import ShardingStrategy, fully_shard

from powersgd_triton import PowerSGDConfig, attach
from powersgd_triton.checkpoint import pickled, unpickled
from powersgd_triton.planning import tuning
from powersgd_triton.planning.cost import ComputeTime, Network
from tests.support.balance import Ledger, check_close, train
from tests.support.checks import same_bits, set_times
from tests.support.distributed import folder, make_test
from tests.support.sharded_training import RANK_2, Net, mesh_of, whole_errors
from tests.support.training import complaint
from tests.support.wrappers import FSDP1, FSDP2, HSDP, Replicate, WithReplicateGroup, Wrapped

Gradients = dict[str, Tensor]
KINDS = (WithReplicateGroup, FSDP2, FSDP1)
AUTO = PowerSGDConfig(compression="auto")


def checkpoint_of(made: Wrapped) -> dict[str, Any]:
    model, optimizer = get_state_dict(made.module, made.optimizer)
    return {"model": model, "optimizer": optimizer, "powersgd": made.state}


def between_adapters(worker: int, _world_size: int) -> None:
    """Errors saved by one adapter are loaded by others, and by a model whose parameters have other names now.

    HSDP with a mesh of both dimensions goes on, with its optimizer, where HSDP with a group was saved.
    """
    made, goes_on = WithReplicateGroup(Older(), RANK_2), HSDP(Older(), RANK_2)
    for one in (made, goes_on):
        one.optimizer = torch.optim.SGD(one.module.parameters(), lr=0.05, momentum=0.9)
    train(range(2), made)
    errors = whole_errors(made.state)
    errors["head.weight"] = errors.pop("top.weight")
    assert errors["head.weight"].any()
    with folder(worker) as path:
        dcp_save(checkpoint_of(made), checkpoint_id=path)
        saved = checkpoint_of(goes_on)
        dcp_load(saved, checkpoint_id=path)
        model_and_optimizer = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
        set_state_dict(goes_on.module, goes_on.optimizer, **model_and_optimizer)
        for kind in KINDS:
            state = kind(Net(), RANK_2).state
            dcp_load({"powersgd": state.renamed({"top.weight": "head.weight"})}, checkpoint_id=path)
            assert same_bits(whole_errors(state), errors), kind
            assert state.iteration == 2
    assert "'neck.weight' is not a trainable parameter" in complaint(state.renamed, {"top.weight": "neck.weight"})
    start = made.parameters()
    train(range(2, 4), made, goes_on)
    check_close(goes_on.parameters(), made.parameters(), start, limit=1e-4)


class Older(Net):
    """The model when its head had another name."""

    def __init__(self) -> None:
        super().__init__()
        self.top = self.head
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        self.__dict__["head"] = self.top
        return super().forward(tokens)


def refuses(worker: int, _world_size: int) -> None:
    """States of something else, or that are damaged."""
    state = WithReplicateGroup(Net(), RANK_2).state
    saved = state.state_dict()
    without = {name: error for name, error in saved["error"].items() if name != "head.weight"}
    basis = {"head.weight": {"basis": torch.ones(1, 1).expand(20_000, 20_000)}}
    factors = [
        b"garbage",
        pickled([1]),
        *(pickled({"version": 3, "shards": shards}) for shards in ([], ["a", "b"], [basis] * 2)),
        pickled({"version": 3, "shards": [{"head.weight": {"basis": torch.ones(3)}}] * 2}),
        pickled({"version": [3], "shards": [{}] * 2}),
        pickled({"version": 3, "shards": [{}] * 2, "plans": 3}),
    ]
    for bad, pattern in (
        ({"iteration": 3}, "'error', 'factors'"),
        ({**saved, "error": without}, "no error of 'head.weight'"),
        ({**saved, "error": None}, ""),
        *(({**saved, "factors": content}, "") for content in factors),
    ):
        said = complaint(state.load_state_dict, bad)
        assert said.startswith("ValueError"), (bad, said)
        assert pattern in said
    state.load_state_dict(saved)


def torn_apart(worker: int, world_size: int) -> None:
    """States that went through torch.save: of another worker, this one's own, of another replica, and whole ones."""
    for kind in (WithReplicateGroup, FSDP1):
        made = kind(Net(), RANK_2)
        state: Any = made.state
        train(range(2), made)
        before = whole_errors(state)
        files: list[Any] = [None] * world_size
        dist.all_gather_object(files, pickled(state.state_dict()))
        loaded = [torch.load(io.BytesIO(file), weights_only=False) for file in files]
        whole_state = {**state.state_dict(), "error": before}
        part = {**whole_state, "error": {name: error[:1] for name, error in before.items()}}
        through_save = r"torch.save\(\).*save\(folder\)"
        # Worker ^ 1 has the next shard. Replicas have equal shards, and process groups of their own.
        for bad, pattern in (
            (loaded[0], through_save),
            (loaded[worker ^ 1], through_save),
            (part, "must be a tensor of shape"),
        ):
            assert re.search(f"^ValueError.*{pattern}", complaint(state.load_state_dict, bad), re.DOTALL)
        for good in (loaded[worker], whole_state, *([loaded[worker ^ 2]] if kind is WithReplicateGroup else [])):
            state.load_state_dict(good)
        assert same_bits(whole_errors(state), before), kind
        assert state.iteration == 2
        keeps_none = kind(Net(), dataclasses.replace(RANK_2, error_feedback=False)).state
        dropped = keeps_none.load_state_dict(state.state_dict()).dropped
        assert {*dropped} == {name for name, error in before.items() if error.any()}
        # Factors leave errors of vectors nowhere to go, and there are none for quantized vectors.
        quantized = kind(Net(), PowerSGDConfig(quantize="int4"))
        train(range(1), quantized)
        with folder(worker) as path:
            quantized.state.save(path)
            assert {*made.state.load(path).dropped} == {n for n, p in quantized.parameters().items() if p.dim() < 2}
            made.state.save(path)
            said = complaint(quantized.state.load, path)
            assert "cannot be read: Missing key in checkpoint state_dict: error." in said
            assert "Traceback" not in said
    # All shards have the same shape, so that only the values tell whose they are.
    model: Any = fully_shard(nn.Linear(64, 64, bias=False), mesh=mesh_of(shard=world_size))
    state = attach(model, rank=2)
    model(torch.randn(8, 64, generator=torch.Generator().manual_seed(worker))).square().sum().backward()
    own = state.state_dict()
    dist.all_gather_object(files, pickled(own))
    for other in (0, worker ^ 1):
        said = complaint(state.load_state_dict, torch.load(io.BytesIO(files[other]), weights_only=False))
        assert said.startswith("ValueError: the saved errors of 'weight' are neither whole nor this worker's own"), said
    state.load_state_dict(own)


def before_compression(worker: int, _world_size: int) -> None:
    """A state that is saved in the exact first steps changes nothing, not even the first bases."""
    config = dataclasses.replace(RANK_2, start_iter=1)
    for kind in KINDS:
        made, resumed = kind(Net(), config), kind(Net(), config)
        train(range(1), made, resumed)
        resumed.state.load_state_dict(made.state.state_dict())
        train(range(1, 3), made, resumed)
        assert same_bits(resumed.parameters(), made.parameters()), kind


def all_errors(state: Any) -> Gradients:
    return {**whole_errors(state), **unpickled(state.state_dict()["factors"])["vectors"]}


def at(parameters: Gradients) -> Net:
    net = Net()
    net.load_state_dict(parameters)
    return net


def chosen(worker: int, _world_size: int) -> None:
    """The format of gradients that "auto" has chosen, and all errors, come back with a saved state, on any mesh."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WARM_UP", "MEASURED"):
            patch.setattr(tuning, name, 1)
        network = Network(2, card=4.0 * sum(parameter.numel() for parameter in Net().parameters()))
        for name in ("int8", "int4"):
            set_times(patch, network, 1.0, lambda k, *_, n=name: ComputeTime((1e3 * (k.quantize != n),) * 3))
            made: Wrapped = WithReplicateGroup(Net(), AUTO)
            train(range(5), made)
            start, errors = made.parameters(), all_errors(made.state)
            assert made.state.config.quantize == name
            vectors = {key for key, error in errors.items() if error.dim() == 1}
            assert all(error.any() == (name == "int4") for error in errors.values())
            assert len(vectors) == (8 if name == "int4" else 0)
            others: list[Wrapped] = [kind(at(start), AUTO) for kind in (WithReplicateGroup, Replicate)]
            others.append(FSDP1(at(start), AUTO, sharding_strategy=ShardingStrategy.NO_SHARD))
            with folder(worker) as path:
                made.save(path)
                for other in others:
                    other.load(path)
                    assert (other.state.config, other.state.iteration) == (made.state.config, 5)
                    assert same_bits(all_errors(other.state), errors)
                # Where nothing may be quantized, steps are measured again. Nothing is lost, as with other fields.
                for config, measures in ((AUTO, True), (RANK_2, False)):
                    other = WithReplicateGroup(at(start), config)
                    other.state._engine.plan.copies = frozenset({"elsewhere"})
                    other.load(path)
                    assert (other.state.config, other.state._engine.plan.measures) == (config, measures)
                    assert vectors <= other.state.error().keys()
            train(range(5, 7), made)
            for other in others:
                patch.setattr(other, "mean_error", functools.partial(all_errors, other.state))
                ledger = Ledger(other)
                ledger.train(range(5, 7))
                if name == "int4":
                    ledger.check()
            if name == "int8":
                check_close(others[0].parameters(), made.parameters(), start, limit=1e-6)


test_checkpoints = make_test([between_adapters, refuses, torn_apart], 4)
test_choices = pytest.mark.slow(make_test([before_compression, chosen], 4))
