"""Checkpoints of the FSDP adapters through torch.distributed.checkpoint: saved on one mesh, loaded on another."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.fsdp2 import apply_powersgd
from powersgd_triton.integrations.sharded import ShardedHandle
from powersgd_triton.layout.layout import compressed_rank
from tests.support.distributed import folder
from tests.support.fsdp1_training import compressed, train_fsdp1
from tests.support.sharded_training import (
    RANK_2,
    STEPS,
    Net,
    batch,
    compare,
    full_mesh,
    full_shard,
    hybrid,
    hybrid_mesh,
    in_one_group,
    outcome,
    replica_mesh,
    replicated,
    sharded,
    train,
    two_dimensional,
    whole,
)
from tests.support.small import complaint
from tests.support.training import flat, relative

# Replicas × shards: where they are loaded that were saved there.
LOADS = {(2, 2): [(2, 2), (1, 2), (2, 1), (1, 3), (4, 1)], (4, 1): [(2, 2), (1, 3)]}


def errors_of(state: Any) -> dict[str, Tensor]:
    """The mean errors as whole tensors."""
    return {name: whole(error) for name, error in state.state_dict()["error"].items()}


def save(path: str, module: Any, optimizer: torch.optim.Optimizer, state: Any) -> None:
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp_save({"model": model_state, "optimizer": optimizer_state, "powersgd": state}, checkpoint_id=path)


def load(path: str, module: Any, optimizer: torch.optim.Optimizer, state: Any, group: Any = None) -> None:
    model_state, optimizer_state = get_state_dict(module, optimizer)
    saved = {"model": model_state, "optimizer": optimizer_state, "powersgd": state}
    dcp_load(saved, checkpoint_id=path, process_group=group)
    set_state_dict(module, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


def save_fsdp1(path: str, module: Any, _optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Without an optimizer's state, which has none without momentum."""
    dcp_save({"model": get_model_state_dict(module), "powersgd": state}, checkpoint_id=path)


def load_fsdp1(path: str, module: Any, _optimizer: torch.optim.Optimizer, state: Any) -> None:
    saved = {"model": get_model_state_dict(module), "powersgd": state}
    dcp_load(saved, checkpoint_id=path)
    set_model_state_dict(module, saved["model"])


def sgd(module: Any, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=momentum)


def gradients(module: Any, worker: int, step: int) -> dict[str, Tensor]:
    """The averaged gradients of one step, whole."""
    module.zero_grad()
    tokens, targets = batch(worker, step)
    F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten()).backward()
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def group_of(mesh: DeviceMesh) -> Any:
    """A group of all workers of a mesh."""
    workers = mesh.mesh.flatten().tolist()
    return dist.new_group(workers)


def hybrid_meshes(worker: int, world_size: int) -> dict[str, Any]:
    """Saved on 2 × 2 and on 4 × 1, loaded on every mesh."""
    found: dict[str, Any] = {}
    meshes = {shape: hybrid_mesh(*shape) for shape in LOADS[2, 2]}
    groups = {shape: group_of(mesh) for shape, mesh in meshes.items()}
    for saved_on, shapes in LOADS.items():
        module, state = hybrid(Net(), meshes[saved_on], RANK_2)
        optimizer = sgd(module)
        train(module, worker, steps=range(4), optimizer=optimizer)
        reference, iteration = errors_of(state), state.iteration
        parameters = {name: whole(p) for name, p in module.named_parameters()}
        with folder(worker) as path:
            save(path, module, optimizer, state)
            for shape in shapes:
                mesh = meshes[shape]
                if worker < mesh.size():
                    found[f"{saved_on} {shape}"] = after_loading(
                        path, worker, mesh, groups[shape], reference, parameters, iteration
                    )
                dist.barrier()
    return found


def after_loading(
    path: str, worker: int, mesh: DeviceMesh, group: Any, reference: Any, parameters: Any, iteration: int
) -> dict[str, Any]:
    module, state = hybrid(Net(seed=9), mesh, RANK_2)
    load(path, module, sgd(module), state, group)
    state.check_replicas()
    loaded = errors_of(state)
    # What exact averaging gives at the same parameters.
    exact_module = sharded(Net(seed=9), mesh)
    copy_parameters(module, exact_module)
    exact = gradients(exact_module, worker, 50)
    compressed_gradients = gradients(module, worker, 50)
    after = errors_of(state)
    total = {name: compressed_gradients[name] + after[name] for name in loaded}
    expected = {name: exact[name] + loaded[name] for name in loaded}
    return {
        "errors": max(float((loaded[name] - reference[name]).abs().max()) for name in reference),
        "size": float(flat(reference).norm()),
        "parameters": max(float((whole(p) - parameters[n]).abs().max()) for n, p in module.named_parameters()),
        "iteration": state.iteration - 1 - iteration,
        "conserved": relative(flat(total), flat(expected)),
        "lossy": relative(flat(compressed_gradients), flat(exact)),
    }


@torch.no_grad()
def copy_parameters(source: Any, target: Any) -> None:
    """Both are sharded alike, on meshes of one and two dimensions."""
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        ours.to_local().copy_(theirs.to_local())


def on_replicas(seed: int) -> tuple[Any, Any]:
    """A model without shards, and the compression's state."""
    module = replicated(Net(seed), replica_mesh(4))
    return module, apply_powersgd(module, RANK_2)


RESUMED = {"hybrid": "mesh", "mesh": "hybrid", "replicate": "replicate", "full": "full", "fsdp1": "fsdp1"}
"""Modes of saving and of loading. HSDP with a mesh of both dimensions saves what HSDP with a group loads."""
RESUMED_FAST = ["hybrid", "mesh"]
"""The others are quick with two workers; see ``test_attach.py``."""


def resumed(worker: int, world_size: int, *, chosen: Sequence[str]) -> dict[str, Any]:
    """On the same mesh the run goes on as if it had not been interrupted."""
    found = {}
    modes = {
        "hybrid": lambda seed: hybrid(Net(seed), hybrid_mesh(2, 2), RANK_2),
        "mesh": lambda seed: two_dimensional(Net(seed), hybrid_mesh(2, 2), RANK_2),
        "replicate": on_replicas,
        "full": lambda seed: full_shard(Net(seed), full_mesh(4), RANK_2),
        "fsdp1": lambda seed: compressed(Net(seed), RANK_2),
    }
    for mode in chosen:
        module, state = modes[mode](0)
        step = train_fsdp1 if mode == "fsdp1" else train
        momentum = 0.0 if mode == "fsdp1" else 0.9
        optimizer = sgd(module, momentum)
        step(module, worker, optimizer=optimizer)
        other, other_state = modes[RESUMED[mode]](5)
        other_optimizer = sgd(other, momentum)
        with folder(worker) as path:
            (save_fsdp1 if mode == "fsdp1" else save)(path, module, optimizer, state)
            expected = step(module, worker, optimizer=optimizer)
            (load_fsdp1 if mode == "fsdp1" else load)(path, other, other_optimizer, other_state)
        got = step(other, worker, optimizer=other_optimizer)
        found[mode] = compare(got, expected) | {"iterations": (state.iteration, other_state.iteration)}
    return found


def between_modes(worker: int, world_size: int) -> dict[str, Any]:
    """Errors saved by one adapter, loaded by the others."""
    module, state = hybrid(Net(), hybrid_mesh(2, 2), RANK_2)
    train(module, worker, steps=range(3))
    reference = errors_of(state)
    found = {}
    with folder(worker) as path:
        dcp_save({"powersgd": state}, checkpoint_id=path)
        for name, (_, other) in {
            "full": full_shard(Net(), full_mesh(4), RANK_2),
            "fsdp1": compressed(Net(), RANK_2),
        }.items():
            dcp_load({"powersgd": other}, checkpoint_id=path)
            loaded = errors_of(other)
            found[name] = max(float((loaded[n] - reference[n]).abs().max()) for n in reference)
    return found


class Older(Net):
    """The model when its head had another name."""

    def __init__(self) -> None:
        super().__init__()
        self.top = self.head
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        self.__dict__["head"] = self.top
        return super().forward(tokens)


def renamed(worker: int, world_size: int) -> dict[str, Any]:
    """A checkpoint of a model whose parameters have other names now."""
    module, state = hybrid(Older(), hybrid_mesh(2, 2), RANK_2)
    train(module, worker, steps=range(3))
    reference = errors_of(state)
    _, other = hybrid(Net(), hybrid_mesh(2, 2), RANK_2)
    with folder(worker) as path:
        dcp_save({"powersgd": state}, checkpoint_id=path)
        dcp_load({"powersgd": other.renamed({"top.weight": "head.weight"})}, checkpoint_id=path)
    loaded = errors_of(other)
    return {
        "difference": float((loaded["head.weight"] - reference["top.weight"]).abs().max()),
        "size": float(loaded["head.weight"].abs().max()),
        "iteration": other.iteration,
        "wrong": complaint(other.renamed, {"top.weight": "neck.weight"}),
    }


def refused(worker: int, world_size: int) -> dict[str, str]:
    _, state = hybrid(Net(), hybrid_mesh(2, 2), RANK_2)
    saved = state.state_dict()
    without = {**saved, "error": {n: e for n, e in saved["error"].items() if n != "head.weight"}}
    basis = {"head.weight": {"basis": torch.ones(1, 1).expand(20_000, 20_000)}}
    factors: dict[str, Any] = {
        "a number": 3,
        "garbage": b"garbage",
        "a list": written([1]),
        "no shards": written({"version": 3, "shards": []}),
        "shards of text": written({"version": 3, "shards": ["a", "b"]}),
        "a vector": written({"version": 3, "shards": [{"head.weight": {"basis": torch.ones(3)}}] * 2}),
        "expanded": written({"version": 3, "shards": [basis] * 2}),
        "another version": written({"version": [3], "shards": [{}] * 2}),
        "another plan": written({"version": 3, "shards": [{}] * 2, "plans": 3}),
    }
    return {
        "keys": complaint(state.load_state_dict, {"iteration": 3}),
        "another model": complaint(state.load_state_dict, without),
        "no errors": complaint(state.load_state_dict, {**saved, "error": None}),
        **{name: complaint(state.load_state_dict, {**saved, "factors": bad}) for name, bad in factors.items()},
        "unchanged": complaint(state.load_state_dict, saved),
    }


def refused_by_one(worker: int, world_size: int) -> dict[str, dict[str, Any]]:
    """The file of one worker is damaged, in mid-run. All are told, and go on as if there had been no attempt."""
    config = PowerSGDConfig(rank=2, min_compression_rate=1, algorithm="alternating")
    builds: dict[str, Callable[[], tuple[Any, Any]]] = {
        "hybrid": lambda: hybrid(Net(), hybrid_mesh(2, 2), config),
        "full": lambda: full_shard(Net(), full_mesh(4), config),
        "fsdp1": lambda: compressed(Net(), config),
    }
    original = ShardedHandle._checked

    def damaged(self: Any, *args: Any) -> Any:
        if worker == 1:
            raise ValueError("the file is damaged")
        return original(self, *args)

    found = {}
    for mode, build in builds.items():
        (module, state), (other, untouched) = build(), build()
        with folder(worker) as path:
            gradients(module, worker, 0)
            gradients(other, worker, 0)
            dcp_save({"powersgd": state}, checkpoint_id=path)
            gradients(module, worker, 1)
            gradients(other, worker, 1)
            with mock.patch.object(ShardedHandle, "_checked", damaged):
                said = complaint(dcp_load, {"powersgd": state}, checkpoint_id=path)
        difference = [
            float((ours - theirs).abs().max())
            for step in range(2, 4)
            for ours, theirs in zip(
                gradients(module, worker, step).values(), gradients(other, worker, step).values(), strict=True
            )
        ]
        found[mode] = {"said": said, "difference": max(difference), "iteration": state.iteration - untouched.iteration}
        other_step = {**state.state_dict(), "iteration": state.iteration + (worker == 1)}
        found[mode]["different"] = complaint(state.load_state_dict, other_step)
    return found


def of_one_worker(worker: int, world_size: int) -> dict[str, dict[str, Any]]:
    """States that went through torch.save: written by worker 0 for all, by each for itself, for another; and whole."""
    builds: dict[str, Callable[[], tuple[Any, Any]]] = {
        "hybrid": lambda: hybrid(Net(), hybrid_mesh(2, 2), RANK_2),
        "full": lambda: full_shard(Net(), full_mesh(4), RANK_2),
        "fsdp1": lambda: compressed(Net(), RANK_2),
    }
    found = {}
    for mode, build in builds.items():
        module, state = build()
        for step in range(2):
            gradients(module, worker, step)
        before = errors_of(state)
        files: list[Any] = [None] * world_size
        dist.all_gather_object(files, written(state.state_dict()))
        # The worker that has the next shard. Replicas have equal shards.
        other = worker ^ 1
        said = {
            name: complaint(state.load_state_dict, torch.load(io.BytesIO(files[writer]), weights_only=False))
            for name, writer in {"first": 0, "other": other, "own": worker}.items()
        }
        whole_errors = {**state.state_dict(), "error": before}
        said["whole"] = complaint(state.load_state_dict, whole_errors)
        said["part"] = complaint(
            state.load_state_dict, {**whole_errors, "error": {name: error[:1] for name, error in before.items()}}
        )
        after = errors_of(state)
        found[mode] = {
            **said, "iteration": state.iteration,
            "difference": max(float((after[name] - before[name]).abs().max()) for name in before),
        }  # fmt: skip
    return found


def written(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@functools.cache
def four() -> dict[str, list[Any]]:
    warnings.filterwarnings("ignore")
    cases: dict[str, Callable[..., Any]] = {
        "meshes": hybrid_meshes,
        "resumed": functools.partial(resumed, chosen=RESUMED_FAST),
        "modes": between_modes,
        "renamed": renamed,
        "refused": refused,
        "refused by one": refused_by_one,
        "of one worker": of_one_worker,
    }
    return in_one_group(cases, 4)


@pytest.mark.parametrize(("saved_on", "shape"), [(saved, shape) for saved, shapes in LOADS.items() for shape in shapes])
def test_nothing_is_lost_on_another_mesh(saved_on: tuple[int, int], shape: tuple[int, int]) -> None:
    for found in outcome(four(), "meshes")[: shape[0] * shape[1]]:
        seen = found[f"{saved_on} {shape}"]
        assert seen["size"] > 0
        assert seen["errors"] == 0
        assert seen["parameters"] == 0
        assert seen["iteration"] == 0
        # Σ Ĝ + E over the step after loading is what exact averaging gives plus the loaded errors.
        assert seen["conserved"] <= 1e-6
        assert seen["lossy"] > 1e-3


def test_meshes_differ_in_what_is_compressed() -> None:
    """So that the test above covers errors of matrices that are no longer compressed, and new ones."""
    ranks = [compressed_rank((-(-3 // shards), 25), RANK_2) for shards in (1, 2, 3)]
    assert ranks == [2, 0, 0]


@pytest.mark.parametrize("mode", RESUMED_FAST)
def test_a_resumed_run_goes_on(mode: str) -> None:
    check_resumed(outcome(four(), "resumed"), mode)


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_every_mode() -> None:
    cases = {"resumed": functools.partial(resumed, chosen=[*RESUMED])}
    results = outcome(in_one_group(cases, 4), "resumed")
    for mode in RESUMED:
        check_resumed(results, mode)


def check_resumed(results: list[Any], mode: str) -> None:
    for found in results:
        assert found[mode]["gradient"] <= 1e-4, found[mode]
        assert found[mode]["parameters"] <= 1e-6, found[mode]
        assert found[mode]["iterations"] == (2 * STEPS, 2 * STEPS)


@pytest.mark.parametrize("mode", ["full", "fsdp1"])
def test_errors_fit_other_modes(mode: str) -> None:
    for found in outcome(four(), "modes"):
        assert found[mode] == 0


def test_parameters_that_were_renamed() -> None:
    for found in outcome(four(), "renamed"):
        assert found["size"] > 0
        assert found["difference"] == 0
        assert found["iteration"] == 3
        assert "'neck.weight' is not a trainable parameter" in found["wrong"]


@pytest.mark.parametrize("mode", ["hybrid", "full", "fsdp1"])
def test_a_state_that_one_worker_refuses_changes_nothing(mode: str) -> None:
    own = "ValueError: the file is damaged"
    for worker, results in enumerate(outcome(four(), "refused by one")):
        found = results[mode]
        assert found["said"] == (own if worker == 1 else f"ValueError: load_state_dict failed on worker 1: {own}")
        assert found["difference"] == 0
        assert found["iteration"] == 0
        assert found["different"].startswith("DisagreementError: workers do not agree: worker 1 differs from worker 0")


def test_foreign_states_are_refused() -> None:
    for found in outcome(four(), "refused"):
        assert found.pop("unchanged") == "nothing"
        assert {name for name, said in found.items() if not said.startswith("ValueError")} == set()
        assert "'error', 'factors'" in found["keys"]
        assert "no error of 'head.weight'" in found["another model"]


@pytest.mark.parametrize("mode", ["hybrid", "full", "fsdp1"])
def test_a_state_with_the_shards_of_another_worker_is_refused(mode: str) -> None:
    for results in outcome(four(), "of one worker"):
        found = results[mode]
        for attempt in ("first", "other"):
            assert found[attempt].startswith("ValueError"), found[attempt]
            assert "torch.save()" in found[attempt]
            assert "save(folder)" in found[attempt]
        assert found["own"] == found["whole"] == "nothing"
        assert "must be a tensor of shape" in found["part"]
        assert found["difference"] == 0
        assert found["iteration"] == 2
