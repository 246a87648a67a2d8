"""PowerSGDConfig: what it accepts, refuses, and says when it refuses."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from powersgd_triton import PowerSGDConfig

NAN, INF = float("nan"), float("inf")


def test_values_are_plain_whatever_they_were_given_as():
    """Else torch.load refuses the saved states that they are in."""
    numbers = {"max_overhead": 0.1, "min_compression_rate": 1.5, "orthogonalization_epsilon": 0.5}
    words = {"algorithm": "standard", "wire_dtype": "int4", "backend": "torch", "bypass": "int8"}
    for budget in (np.float64(20), np.float32(20), np.int64(20), np.str_("auto")):
        given = {name: np.float64(value) for name, value in numbers.items()}
        given |= {name: np.str_(word) for name, word in words.items()}
        config = PowerSGDConfig(**given, compression=budget)
        assert {type(value) for value in config.to_dict().values()} <= {bool, float, int, str, type(None)}
        assert config == PowerSGDConfig(**numbers, **words, compression=budget.item())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compression must be finite"):
        PowerSGDConfig(compression=10**400)


def test_is_frozen_keyword_only_and_hashable_and_has_the_documented_defaults():
    """Of what is not in the table of docs/configuration.md, which has its own test."""
    default = PowerSGDConfig()
    assert (default.rank, default.wire_dtype, default.backend, default.planned) == (4, None, "auto", False)
    PowerSGDConfig(rank=1, min_compression_rate=0, start_iter=0, seed=0, orthogonalization_epsilon=0.5)
    config = PowerSGDConfig(rank=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        PowerSGDConfig(2)  # type: ignore[call-arg]
    assert hash(config) == hash(PowerSGDConfig(rank=2))
    assert config == PowerSGDConfig(rank=2) != PowerSGDConfig(rank=3)


def test_what_fields_become():
    planned = PowerSGDConfig(compression=20)
    assert (planned.rank, planned.wire_dtype, planned.planned) == (None, "int4", True)
    assert PowerSGDConfig(compression=20, wire_dtype="fp32").wire_dtype == "float32"
    for name in (torch.bfloat16, "bf16", "bfloat16"):
        assert PowerSGDConfig(error_dtype=name) == PowerSGDConfig(error_dtype="bfloat16")
    assert PowerSGDConfig(codes="int8") == PowerSGDConfig(quantize="int8")
    # A function in the rank's place is kept as its name.
    config = PowerSGDConfig(rank=test_what_fields_become)  # type: ignore[arg-type]
    assert config.to_dict()["rank"] == "function test_what_fields_become"
    with pytest.raises(TypeError, match="rank must be an int or a function"):
        PowerSGDConfig.from_dict(config.to_dict())


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({"rank": value}, ValueError, f"rank.*{value}") for value in (0, -1)),
    *(({"rank": value}, TypeError, f"rank must be an int or a function.*{value!r}") for value in (4.0, "4", True)),
    ({"start_iter": -1}, ValueError, "start_iter.*-1"),
    ({"start_iter": 1.5}, TypeError, "start_iter.*1.5"),
    ({"seed": -1}, ValueError, "seed.*-1"),
    ({"seed": None}, TypeError, "seed.*None"),
    ({"seed": 2**32}, ValueError, f"seed must be below.*{2**32}"),
    ({"explore_every": 2**64}, ValueError, f"explore_every must be below.*{2**64}"),
    *(({"min_compression_rate": v}, ValueError, f"min_compression_rate.*{v}") for v in (-0.5, NAN, INF)),
    *(({"min_compression_rate": v}, TypeError, f"min_compression_rate.*{v!r}") for v in ("2", True)),
    *(({"orthogonalization_epsilon": v}, ValueError, f"orthogonalization_epsilon.*{v}") for v in (-1e-8, 1.0, NAN)),
    ({"orthogonalization_epsilon": None}, TypeError, "orthogonalization_epsilon.*None"),
    ({"error_feedback": 1}, TypeError, "error_feedback.*1"),
    ({"warm_start": "yes"}, TypeError, "warm_start.*'yes'"),
    ({"batch_by_shape": None}, TypeError, "batch_by_shape.*None"),
    ({"backend": "cuda"}, ValueError, "backend must be one of auto, triton, torch; got 'cuda'"),
    ({"error_dtype": "int8"}, ValueError, "error_dtype"),
    ({"algorithm": "alternating", "warm_start": False}, ValueError, "warm_start"),
    ({"compression": 0.5}, ValueError, "compression must be finite and at least 1; got 0.5"),
    ({"compression": INF}, ValueError, "compression must be finite"),
    ({"compression": "20"}, TypeError, "compression must be a number or .auto.; got '20'"),
    ({"bytes_per_step": 1e5}, TypeError, "bytes_per_step must be an int; got 100000.0"),
    ({"bytes_per_step": 0}, ValueError, "bytes_per_step must be at least 1; got 0"),
    ({"rank": 4, "compression": 20}, ValueError, "expected one of rank, compression and bytes_per_step"),
    ({"compression": 20, "error_feedback": False}, ValueError, "it needs error_feedback=True"),
    ({"compression": 20, "replan_every": -1}, ValueError, "replan_every must be at least 0; got -1"),
    ({"compression": 20, "max_rank": 0}, ValueError, "max_rank must be at least 1; got 0"),
    ({"quantize": "int3"}, ValueError, "None or one of bf16, fp8, int8, int4, int2, ternary, sparse; got 'int3'"),
    ({"bypass": "int4"}, ValueError, "bypass must be None or one of bf16, fp8, int8; got 'int4'"),
    ({"bypass": 8}, ValueError, "bypass must be None or one of bf16, fp8, int8; got 8"),
    ({"quantize": "int8", "bypass": "bf16"}, ValueError, "bypass has no use.*quantize='int8' and bypass='bf16'"),
    ({"quantize": "int4", "codes": "int8"}, ValueError, "codes is another name of quantize: give one"),
    *(
        ({"quantize": "int4", **field}, ValueError, f"{next(iter(field))} has no use beside it")
        for field in ({"rank": 4}, {"compression": 20}, {"bytes_per_step": 1000}, {"wire_dtype": "int4"})
    ),
    ({"quantize": "sparse", "compression": 15}, ValueError, "compression must be finite and at least 16; got 15"),
    ({"quantize": "sparse", "compression": "auto"}, TypeError, "compression must be a number; got 'auto'"),
    ({"quantize": "sparse", "error_feedback": False}, ValueError, "up to 1000 and error_feedback=True; got"),
    ({"quantize": "sparse", "rank": 4}, ValueError, "rank has no use beside it"),
    ({"rank": 8, "max_rank": 16}, ValueError, "max_rank limits planned ranks: give it with compression"),
]


@pytest.mark.parametrize(("fields", "error", "said"), REFUSED, ids=str)
def test_what_is_wrong_is_named(fields: dict[str, Any], error: type[Exception], said: str):
    for make in (lambda: PowerSGDConfig(**fields), lambda: PowerSGDConfig.from_dict(fields)):
        with pytest.raises(error, match=said):
            make()


OTHERS = {"rank": 7, "min_compression_rate": 1, "warm_start": False, "backend": "torch", "error_dtype": "bf16"}


@pytest.mark.parametrize("fields", [{}, {"compression": 20}, {"codes": "sparse"}, OTHERS], ids=str)
def test_from_dict_survives_json(fields: dict[str, Any]):
    config = PowerSGDConfig(**fields)
    assert PowerSGDConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert PowerSGDConfig.from_dict(fields) == config


def test_from_dict_names_unknown_and_similar_keys():
    for key, nearest in (("rnak", "rank"), ("startiter", "start_iter"), ("warmstart", "warm_start")):
        with pytest.raises(ValueError, match=f"'{key}'.*did you mean '{nearest}'"):
            PowerSGDConfig.from_dict({"seed": 1, key: 1})
    with pytest.raises(ValueError, match=r"unknown key 'process_group'\. Valid keys: rank, "):
        PowerSGDConfig.from_dict({"process_group": None})
    with pytest.raises(TypeError, match=r"an object like .*; got \[1\]"):
        PowerSGDConfig.from_dict([1])  # type: ignore[arg-type]
