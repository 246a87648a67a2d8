"""A peer dies, or says no more, in the middle of a step: the survivor is told in time, and loses nothing."""

import contextlib
import dataclasses
import functools
import gc
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.integrations.ddp import powerSGD_hook
from tests.support.balance import Ledger, batches, build, check_errors, train
from tests.support.distributed import on_workers, regroup, vanish
from tests.support.sharded_training import RANK_2, loss_of
from tests.support.training import at_call, digest
from tests.support.wrappers import Wrapped

TOGETHER, ALONE = 5, 4
"""Steps with the peer before the one in which it dies, and steps without it."""
DEATH, SILENCE = 200.0, 8.0
"""Seconds until the process group gives up, where the peer dies and where it says no more."""
SLACK = 200.0
"""Seconds that a busy machine may take beyond the process group's timeout. Only what hangs takes longer."""
PEER = 1
# {what is interrupted: (wrapper, number of the step's all-reduce, fields of the configuration)}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "exact averaging": ("DDP", 0, {"start_iter": TOGETHER + 1}),
    "first message": ("DDP", 0, {}),
    "second message": ("DDP", 1, {}),
    "the last message of several buckets": ("DDP", 5, {}),
    "left product": ("DDP", 0, {"algorithm": "alternating"}),
    "first message of Compressor": ("Compressor", 0, {}),
    "state_dict": ("DDP", 0, {}),
    "first message of replicate": ("replicate", 0, {}),
    "second message of FSDP1": ("FSDP1", 1, {}),
    "silence in FSDP2": ("FSDP2", 1, {}),
}


@pytest.mark.parametrize("name", CASES)
@on_workers(2, casualties=[PEER])
def test_survivor_is_told_in_time_and_loses_nothing(worker: int, world_size: int, name: str, tmp_path: Path) -> None:
    """Train with a peer until it is gone (in a step, or while the state is saved), then alone.

    Alone in three manners: the interrupted state goes on; it loads a checkpoint from before; another one loads it.
    """
    warnings.filterwarnings("ignore")
    wrapper, message, fields = CASES[name]
    silent, saving = "silence" in name, "state_dict" in name
    # A peer may still be about to connect in the group that goes.
    dist.barrier()
    regroup(tmp_path / "both.store", worker, 2, SILENCE if silent else DEATH)
    config = dataclasses.replace(RANK_2, **fields)
    model = build(wrapper, config)
    train(range(TOGETHER), model)
    parameters, expected = model.parameters(), model.mean_error()
    model.save(str(tmp_path))
    before, twin = dict(model.state.error()), model.net_type()
    twin.load_state_dict(parameters)
    last = batches(model, TOGETHER)
    loss_of(twin, last[0]).backward()
    given = {key: parameter.grad for key, parameter in twin.named_parameters()}
    with interrupted(worker, message, tmp_path, silent):
        model.state.state_dict() if saving else model.step(last)
    # Sharded models cannot go on.
    goes_on = wrapper in ("DDP", "Compressor")
    if goes_on:
        # The step's average never reached the optimizer, so no product may be subtracted. Each element is as it was,
        # or has the gradient too.
        for key, error in model.state.error().items():
            G = torch.zeros_like(error) if saving else given[key].view(error.shape)
            allowed = 1e-6 * (before[key].abs().max() + G.abs().max())
            kept, carried = ((error - E).abs() <= allowed for E in (before[key], before[key] + G))
            assert kept.all() if saving else (kept | carried).all(), key
    start = time.monotonic()
    if wrapper == "DDP":
        # In this order: where the last owner of a broken gloo group is a DistributedDataParallel, with or without a
        # hook, its end often waits for ever for a thread of gloo's that waits for Python's lock (torch 2.13).
        model.module = model.state.process_group = None
        gc.collect()
    regroup(tmp_path / "alone.store", 0, 1, DEATH)
    assert time.monotonic() - start <= SLACK
    new = build(wrapper, config, parameters)
    new.load(str(tmp_path))
    check_errors(new, expected)
    found = go_on(new)
    if goes_on:
        wrapped_again(model)
        go_on(model)
        model.net.load_state_dict(parameters)
        model.load(str(tmp_path))
        wrapped_again(model)
        assert go_on(model) == found, "something of the interrupted step is left behind"
    (tmp_path / "done").touch()


def wrapped_again(model: Wrapped) -> None:
    if model.module is not model.net:
        model.module = DistributedDataParallel(model.net, bucket_cap_mb=0.005)
        model.module.register_comm_hook(model.state, powerSGD_hook)


def go_on(model: Wrapped) -> str:
    """Steps alone, in which nothing is lost. A digest of their bits."""
    ledger = Ledger(model)
    ledger.train(range(TOGETHER, TOGETHER + ALONE))
    ledger.check()
    return digest([*model.parameters().values(), *model.mean_error().values()])


@contextlib.contextmanager
def interrupted(worker: int, message: int, folder: Path, silent: bool) -> Iterator[None]:
    """The peer ends instead of taking part in an all-reduce, the ``message``-th from now on. The survivor is told.

    It is told as soon as the system knows of a death. A silent peer waits until the survivor is done, which is told
    when the timeout is over.
    """
    start, end = time.monotonic(), functools.partial(vanish, folder / "done" if silent else None, SILENCE + SLACK)
    with pytest.raises(RuntimeError), at_call(dist, "all_reduce", message if worker == PEER else -1, end):
        yield
    seconds = time.monotonic() - start
    assert 0.9 * SILENCE <= seconds <= SILENCE + SLACK if silent else seconds <= DEATH
