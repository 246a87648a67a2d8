"""PowerSGDConfig: what it accepts, refuses, and says when it refuses."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from powersgd_triton import PowerSGDConfig

DEFAULTS = {
    "rank": 4,
    "min_compression_rate": 2.0,
    "start_iter": 0,
    "error_feedback": True,
    "warm_start": True,
    "orthogonalization_epsilon": 0.0,
    "seed": 0,
    "batch_by_shape": True,
    "backend": "auto",
}


def test_defaults_are_the_documented_ones():
    config = PowerSGDConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


def test_a_budget_takes_the_place_of_the_rank():
    config = PowerSGDConfig(compression=20)
    assert (config.rank, config.wire_dtype, config.planned) == (None, "int4", True)
    assert PowerSGDConfig(compression=20, wire_dtype="fp32").wire_dtype == "float32"
    assert PowerSGDConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert not PowerSGDConfig().planned


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"compression": 0.5}, ValueError, "compression must be finite and at least 1; got 0.5"),
        ({"compression": float("inf")}, ValueError, "compression must be finite"),
        ({"compression": "20"}, TypeError, "compression must be a number or .auto.; got '20'"),
        ({"bytes_per_step": 1e5}, TypeError, "bytes_per_step must be an int; got 100000.0"),
        ({"bytes_per_step": 0}, ValueError, "bytes_per_step must be at least 1; got 0"),
        ({"rank": 4, "compression": 20}, ValueError, "expected one of rank, compression and bytes_per_step"),
        ({"compression": 20, "error_feedback": False}, ValueError, "it needs error_feedback=True"),
        ({"compression": 20, "replan_every": -1}, ValueError, "replan_every must be at least 0; got -1"),
        ({"compression": 20, "max_rank": 0}, ValueError, "max_rank must be at least 1; got 0"),
        ({"rank": 8, "max_rank": 16}, ValueError, "max_rank limits planned ranks: give it with compression"),
        ({"rank": "f"}, TypeError, "rank must be an int or a function"),
    ],
    ids=str,
)
def test_budgets_are_checked(fields: dict[str, Any], error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        PowerSGDConfig(**fields)


def test_a_function_in_the_ranks_place_is_kept_as_its_name():
    config = PowerSGDConfig(rank=test_is_frozen_keyword_only_and_hashable)  # type: ignore[arg-type]
    assert config.to_dict()["rank"] == "function test_is_frozen_keyword_only_and_hashable"
    with pytest.raises(TypeError, match="rank must be an int or a function"):
        PowerSGDConfig.from_dict(config.to_dict())


def test_is_frozen_keyword_only_and_hashable():
    config = PowerSGDConfig(rank=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        PowerSGDConfig(2)  # type: ignore[call-arg]
    assert hash(config) == hash(PowerSGDConfig(rank=2))
    assert config == PowerSGDConfig(rank=2) != PowerSGDConfig(rank=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 0),
        ("rank", -1),
        ("start_iter", -1),
        ("seed", -1),
        ("min_compression_rate", -0.5),
        ("min_compression_rate", float("nan")),
        ("min_compression_rate", float("inf")),
        ("orthogonalization_epsilon", -1e-8),
        ("orthogonalization_epsilon", 1.0),
        ("orthogonalization_epsilon", float("nan")),
        ("backend", "cuda"),
    ],
)
def test_value_out_of_range_is_named(field: str, value: Any):
    with pytest.raises(ValueError, match=field) as caught:
        PowerSGDConfig(**{field: value})
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 4.0),
        ("rank", "4"),
        ("rank", True),
        ("start_iter", 1.5),
        ("seed", None),
        ("min_compression_rate", "2"),
        ("min_compression_rate", True),
        ("orthogonalization_epsilon", None),
        ("error_feedback", 1),
        ("warm_start", "yes"),
        ("batch_by_shape", None),
    ],
)
def test_wrong_type_is_named(field: str, value: Any):
    with pytest.raises(TypeError, match=field) as caught:
        PowerSGDConfig(**{field: value})
    assert repr(value) in str(caught.value)


def test_limits_are_accepted():
    PowerSGDConfig(rank=1, min_compression_rate=0, start_iter=0, seed=0, orthogonalization_epsilon=0.5)


def test_from_dict_survives_json():
    config = PowerSGDConfig(rank=7, min_compression_rate=1, warm_start=False, backend="torch")
    assert PowerSGDConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert PowerSGDConfig.from_dict({}) == PowerSGDConfig()


@pytest.mark.parametrize(
    ("key", "nearest"), [("rnak", "rank"), ("startiter", "start_iter"), ("warmstart", "warm_start")]
)
def test_from_dict_names_unknown_and_nearest_key(key: str, nearest: str):
    with pytest.raises(ValueError, match=repr(key)) as caught:
        PowerSGDConfig.from_dict({"seed": 1, key: 1})
    assert f"did you mean {nearest!r}" in str(caught.value)


def test_from_dict_validates():
    with pytest.raises(ValueError, match="rank"):
        PowerSGDConfig.from_dict({"rank": 0})
