"""Saved states: what goes on from them, at which rank and in which mode, and which are refused without a trace."""

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from powersgd_triton import Compressor, checkpoint
from powersgd_triton.ops.backends import make_backend
from powersgd_triton.schemes import factors
from tests.support.checks import (
    DTYPES,
    GONE,
    MODES,
    SHAPES,
    assert_equal_states,
    everything,
    gradients,
    put,
    same_bits,
    step,
    trained,
    trajectory,
)
from tests.support.distributed import on_workers
from tests.support.training import complaint

OTHERS = ("twice", "alternating", "alternating twice")
Saved = dict[str, Any]


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        *((fields, torch.float32) for fields in (*MODES.values(), {"start_iter": 3})),
        *(({}, dtype) for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_a_run_goes_on_with_the_same_bits(fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path):
    """In a new compressor and in one that has run, which the state replaces. Saving does not disturb the run."""
    for number, (steps, running, name) in enumerate([(0, 3, "pt"), (2, 3, "safetensors"), (5, 0, "by hand")]):
        source, untouched = (trained(steps, dtype=dtype, **fields) for _ in range(2))
        saved = source.state_dict()
        path = str(tmp_path / f"{number}.{name}")
        if name == "by hand":
            torch.save(saved, path)
            loaded: Saved = torch.load(path, weights_only=True)
        else:
            checkpoint.save(saved, path)
            loaded = checkpoint.load(path)
        assert_equal_states(saved, loaded)
        resumed = trained(running, dtype=dtype, **fields)
        resumed.load_state_dict(loaded)
        assert resumed.iteration == steps
        # What was loaded and not used yet is saved again.
        again = resumed.state_dict()
        assert_equal_states(saved, again)
        # States share no memory with compressors.
        for state in (saved, loaded, again):
            for tensor in (tensor for parts in state["matrices"].values() for tensor in parts.values()):
                tensor.fill_(7)
        expected = trajectory(source, dtype=dtype)
        assert same_bits(trajectory(resumed, dtype=dtype), expected)
        # Saving writes an error of 16 bits down, which rounds it.
        if "error_dtype" not in fields:
            assert same_bits(trajectory(untouched, dtype=dtype), expected)


@pytest.mark.parametrize("running", [0, 2])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(({}, {"rank": rank}) for rank in (1, 2, 1000)),
        *(({}, {"rank": 5, **MODES[mode]}) for mode in OTHERS),
        *((MODES[mode], {"rank": 5}) for mode in OTHERS),
    ],
    ids=str,
)
def test_another_rank_or_mode_keeps_the_error(before: dict[str, Any], after: dict[str, Any], running: int):
    saved = trained(rank=3, **before).state_dict()
    resumed = trained(running, **after)
    resumed.load_state_dict(saved)
    owed = resumed.error()
    assert resumed.iteration == 5
    assert same_bits({name: parts["error"].view(SHAPES[name]) for name, parts in saved["matrices"].items()}, owed)
    # The next gradient is zero: what arrives and what is left is the error that was saved.
    got = step(resumed, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    for name, left in resumed.error().items():
        n, m = saved["matrices"][name]["error"].shape
        # P̂ Q̄ᵀ of r terms rounded twice, and the subtraction; columns of P̂ Q̄ᵀ are no longer than the error's.
        bound = 2.0**-24 * (2 * min(after["rank"], n, m) + 6) * after.get("iterations", 1) * owed[name].norm()
        assert (got[name].double() + left.double() - owed[name].double()).norm() <= bound, name
    for seed in range(3):
        for P, _ in resumed.compress(gradients(seed)).factors().values() if after.keys() == {"rank"} else ():
            assert (P.double().mT @ P.double() - torch.eye(P.shape[1])).abs().max() <= 1e-5


def test_states_are_taken_as_they_come():
    """Without error feedback, errors are ignored. Parts may require gradients and have strides."""
    saved = trained(steps=3).state_dict()
    spread = copy.deepcopy(saved)
    for parts in spread["matrices"].values():
        for key, part in parts.items():
            parts[key] = part.mT.contiguous().mT.requires_grad_()
    ours, theirs, forgetful = trained(0), trained(0), trained(0, error_feedback=False)
    ours.load_state_dict(spread)
    for compressor in (theirs, forgetful):
        compressor.load_state_dict(saved)
    assert same_bits(trajectory(ours), trajectory(theirs))
    assert not any(part.requires_grad for parts in ours.state_dict()["matrices"].values() for part in parts.values())
    step(forgetful, gradients(5))
    assert forgetful.error() == {}


# (place in a saved state, what it must not be)
CORRUPTIONS: list[tuple[str, Any]] = [
    ("format_version", 99),
    ("format_version", GONE),
    ("iteration", "x"),
    ("iteration", 2.5),
    ("matrices", GONE),
    ("matrices", None),
    ("matrices/linear", GONE),
    ("matrices/linear", None),
    ("matrices/other", {"basis": torch.ones(18, 2), "error": torch.zeros(24, 18)}),
    ("matrices/linear/basis", GONE),
    ("matrices/linear/error", GONE),
    ("matrices/twin/basis", [1.0]),
    ("matrices/twin/basis", torch.zeros(18)),
    ("matrices/twin/basis", torch.zeros(18, 0)),
    ("matrices/twin/basis", torch.ones(18, 2, dtype=torch.int64)),
    ("matrices/twin/basis", torch.full((18, 2), float("nan"))),
    ("matrices/twin/basis", torch.ones(18, 2).to(torch.float8_e5m2)),
    ("matrices/twin/basis", torch.ones(18, 2).to_sparse()),
    ("matrices/twin/basis", torch.ones(18, 2, device="meta")),
    ("matrices/twin/basis", torch.ones(1, 2).expand(18, 2)),
    ("matrices/twin/error", torch.ones(()).expand(24, 18)),
    # Rows that overlap, other rows, and what would broadcast.
    ("matrices/twin/error", torch.ones(60).as_strided((24, 18), (1, 1))),
    ("matrices/twin/error", torch.zeros(23, 18)),
    ("matrices/twin/error", torch.ones(24, 1)),
    ("matrices/twin/error", torch.ones(24, 18, dtype=torch.int64)),
    ("matrices/twin/error", torch.full((24, 18), float("inf"))),
    # Sizes of another fingerprint.
    ("tensors/bias", [1, 19, 0]),
]
FOREIGN: dict[str, Any] = {"nothing": {}, "a model": {"model": {"w": torch.zeros(2)}}, "a list": [1], "None": None}


def test_corrupted_and_foreign_states_are_refused_without_a_trace():
    saved = trained(steps=3).state_dict()
    states = FOREIGN | {f"{n}, {place}": put(saved, place, junk) for n, (place, junk) in enumerate(CORRUPTIONS)}
    without, linear = put(saved, "matrices/linear", GONE), saved["matrices"]["linear"]
    states["a matrix is renamed"] = put(without, "matrices/other", linear)
    states["sizes have numbers as names"] = put(saved, "tensors", {**saved["tensors"], 3: [1, 1, 0]})
    for steps in (0, 5):
        compressor = trained(steps)
        for name, state in states.items():
            said = complaint(compressor.load_state_dict, state)
            assert said.startswith("ValueError") or (name in FOREIGN and said.startswith("TypeError")), (name, said)
        assert compressor.iteration == steps
        assert same_bits(trajectory(compressor), trajectory(trained(steps)))


def test_a_state_of_another_model_names_the_difference():
    for others, said in (({"head": (9, 18)}, r"'conv'.*'head'"), ({**SHAPES, "linear": (20, 18)}, "24 × 18.*20 × 18")):
        other = Compressor(everything(), others)
        step(other, gradients(0, others))
        with pytest.raises(ValueError, match=said):
            trained().load_state_dict(other.state_dict())


@on_workers(2)
def test_a_worker_without_memory_for_a_new_bucket(worker: int, world_size: int):
    """The others hold its matrices already, whose errors a saved state averages. All workers are told."""
    compressor = Compressor(everything(2), SHAPES)
    with mock.patch.object(factors, "make_backend", side_effect=torch.OutOfMemoryError if worker else make_backend):
        assert complaint(compressor.compress, gradients(worker))
    assert "'linear' was compressed: none instead of True" in complaint(compressor.state_dict)
    compressor.compress(gradients(worker))
    assert compressor.state_dict()["matrices"]
