"""What the DeepSpeed adapter refuses, all problems at once, and what it says when it is on."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("deepspeed")

import deepspeed

from powersgd_triton import attach
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations import deepspeed as adapter
from powersgd_triton.integrations.deepspeed import refusals
from powersgd_triton.integrations.deepspeed.parameters import why_not_differences
from tests.support.deepspeed_jobs import Job, parametrized
from tests.support.deepspeed_training import RANK_4, Case, configuration, engine_for
from tests.support.sharded_training import Net
from tests.support.small import complaint


class Stage1Optimizer(SimpleNamespace):
    """As far as the checks look."""

    def gradient_reduction_w_predivide(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """The seam."""


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of one worker."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def engine(group: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine with which nothing is wrong, at stage 1."""
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    zero = SimpleNamespace(zero_quantized_gradients=False, zenflow=None, offload_optimizer=None, mics_shard_size=-1)
    made = SimpleNamespace(
        _config=SimpleNamespace(zero_config=zero, compile_config=SimpleNamespace(deepcompile=False)),
        optimizer=Stage1Optimizer(contiguous_gradients=True),
        basic_optimizer=torch.optim.AdamW([torch.zeros(1)]),
        module=torch.nn.Sequential(torch.nn.Linear(2, 2)),
        stage=1,
        fp16=False,
        has_moe_layers=False,
        pipeline_parallelism=False,
        seq_data_parallel_group=group,
        allreduce_no_retain=print,
        mpu=None,
    )
    made.zero_optimization_stage = lambda: made.stage
    made.fp16_enabled = lambda: made.fp16
    return made


def spoil(engine: Any, changes: dict[str, Any]) -> None:
    """Set attributes, which may be those of a part: "a.b"."""
    for path, value in changes.items():
        *parts, name = path.split(".")
        setattr(functools.reduce(getattr, parts, engine), name, value)


def problems_of(engine: Any, section: Any = None) -> list[str]:
    return refusals.engine_problems(engine, refusals.read_section(section or {}))


class Muon(torch.optim.SGD):
    """Another one of that name."""


COMPLEX = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
OFFLOADED = SimpleNamespace(super_offload=True)
# {attributes: what is said}
PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "qgZ": ({"_config.zero_config.zero_quantized_gradients": True}, "qgZ.*take it out"),
    "deepcompile": ({"_config.compile_config.deepcompile": True}, "deepcompile.*set"),
    "zenflow": ({"_config.zero_config.zenflow": object()}, "zenflow.*take the section"),
    "contiguous": ({"optimizer.contiguous_gradients": False}, "contiguous_gradients.*true"),
    "fp16": ({"stage": 0, "fp16": True}, "fp16 at ZeRO stage 0.*stage 1, bf16"),
    "complex": ({"module": torch.nn.ParameterDict({"weight": COMPLEX})}, "'weight' is complex.*view_as_real"),
    "MoE": ({"has_moe_layers": True}, "mixture-of-experts"),
    "Muon": ({"basic_optimizer": Muon([torch.zeros(1)], lr=1.0)}, "Muon.*another optimizer"),
    "no optimizer": ({"optimizer": None}, "no optimizer.*give one"),
    "super_offload": ({"_config.zero_config.offload_optimizer": OFFLOADED}, "super_offload.*false"),
    "no seam": ({"optimizer": SimpleNamespace()}, "gradient_reduction_w_predivide.*README"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_is_named_with_a_remedy(engine: Any, name: str) -> None:
    assert refusals.engine_problems(engine, refusals.Section()) == []
    changes, said = PROBLEMS[name]
    spoil(engine, changes)
    (problem,) = refusals.engine_problems(engine, refusals.Section())
    assert re.search(said, problem), problem


def test_one_worker_is_refused(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda _: 1)
    (problem,) = problems_of(engine)
    assert re.search('one worker.*"enabled": false', problem)


@pytest.mark.parametrize(
    ("version", "changes", "bad"),
    [
        ("0.15.4", {}, True),
        ("0.16.0", {"stage": 2}, False),
        ("0.17.5", {"stage": 2}, False),
        ("0.17.6", {"stage": 2}, True),
        ("0.18.2", {"stage": 2}, True),
        ("0.18.2+cu12", {}, False),
        ("0.18.3", {"stage": 2}, False),
        ("0.19.8", {"stage": 2}, False),
        # The loss is scaled there.
        ("0.18.2", {"stage": 0, "fp16": True}, False),
    ],
)
def test_known_bad_versions(
    engine: Any, version: str, changes: dict[str, Any], bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    spoil(engine, changes)
    problems = refusals.engine_problems(engine, refusals.Section())
    assert [version in problem for problem in problems] == [True] * bad


def test_all_problems_come_at_once(engine: Any) -> None:
    for name in ("qgZ", "MoE", "Muon", "contiguous"):
        spoil(engine, PROBLEMS[name][0])
    section = refusals.read_section({"rnk": 4, "rank": 0, "seed": "x", "enabled": 1, "min_compresion_rate": 2})
    with pytest.raises(refusals.PowerSGDConfigError) as raised:
        refusals.refuse([*section.problems, *refusals.engine_problems(engine, section)])
    message = str(raised.value)
    assert "9 problems" in message
    for part in (
        "'rnk'; did you mean 'rank'",
        "'min_compresion_rate'; did you mean 'min_compression_rate'",
        "rank must be at least 1; got 0",
        "seed must be an int",
        "enabled must be true or false",
        "qgZ",
        "Muon",
    ):
        assert part in message
    assert [line.split(".")[0].strip() for line in message.splitlines()[1:]] == [str(n) for n in range(1, 10)]


def test_every_field_goes_into_the_section() -> None:
    wanted = PowerSGDConfig(rank=7, start_iter=3, algorithm="alternating", iterations=2, error_dtype="bf16", seed=5)
    section = refusals.read_section({"enabled": True, "parameters": "int8", **wanted.to_dict()})
    assert section == refusals.Section(wanted, True, "int8", parameters_given=True, configures=True)
    section = refusals.read_section({"compression": 20, "max_rank": 8, "max_overhead": 0.1})
    assert not section.problems
    assert (section.config.max_rank, section.config.max_overhead) == (8, 0.1)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        *[(section, "must be an object") for section in (True, 4, [1], "rank")],
        *[
            ({"parameters": value}, f"null or one of int8, int4, int2.*{re.escape(repr(value))}")
            for value in ("int3", "ternary", 2, True, ["int2"])
        ],
        ({"rank": 4, "max_rank": 8}, "max_rank limits planned ranks"),
        ({"compression": "auto"}, "DeepSpeed's step does not: choose a number"),
        ({"algorithm": "alternating", "warm_start": False}, "warm_start"),
    ],
)
def test_a_section_with_one_problem(section: Any, said: str) -> None:
    (problem,) = refusals.read_section(section).problems
    assert re.search(said, problem), problem


class TiedLayerSpec:
    """As far as the checks look."""


CANNOT_BE_DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "stage 0": ({"optimizer": torch.optim.AdamW([torch.zeros(1)])}, "after a step"),
    "stage 3": ({"stage": 3}, "every pass"),
    "tensor parallelism": ({"autotp_size": lambda: 2}, "with tensor parallelism"),
    "tied stages": ({"module._layer_specs": [TiedLayerSpec()]}, "tied parameters"),
    "max_norm": ({"module": torch.nn.ModuleDict({"e": torch.nn.Embedding(2, 2, max_norm=1.0)})}, "'e' has max_norm"),
}


@pytest.mark.parametrize("case", CANNOT_BE_DIFFERENCES)
def test_parameters_that_cannot_be_differences(engine: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in the modules of DeepSpeed's optimizers.
    monkeypatch.setattr(sys.modules[__name__], "all_gather_dp_groups", print, raising=False)
    assert why_not_differences(engine) is None
    changes, said = CANNOT_BE_DIFFERENCES[case]
    spoil(engine, changes)
    (problem,) = [problem for problem in problems_of(engine, {"parameters": "int8"}) if "int8" in problem]
    assert said in problem
    # What is only the default is not used there.
    for given in ({}, {"parameters": None}):
        assert not any("leave the key out" in problem for problem in problems_of(engine, given))


# With real engines ----------------------------------------------------------------------------------------------------


def made(section: Any, initialize: Any = adapter.initialize, **options: Any) -> tuple[Any, str]:
    """An engine, and what this worker says."""
    model, spoken = Net(), io.StringIO()
    config = configuration(2, section, options)
    with contextlib.redirect_stdout(spoken):
        engine = initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    return engine, "\n".join(line for line in spoken.getvalue().splitlines() if line.startswith("powersgd:"))


def says(line: str, *parts: str) -> None:
    """Only the first worker says it."""
    assert bool(line) == (dist.get_rank() == 0)
    assert not line or all(part in line for part in parts), line


def is_switched_on_and_off() -> None:
    """By the section, by hand and by ``attach``."""
    assert adapter.zero is deepspeed.zero
    assert "zero" in dir(adapter)
    on, line = made({"rank": 2, "start_iter": 3})
    numel = f"% of {sum(parameter.numel() for parameter in Net().parameters()):,} gradient"
    says(line, "on at ZeRO stage 2", "rank 2", "from step 3 on", numel, "Parameters are sent in int2")
    says(line, "In a whole step each worker sends")
    off, line = made(None)
    says(line, 'powersgd: off, the configuration has no section "powersgd"')
    disabled, line = made({"enabled": False})
    says(line, 'powersgd: off, the section has "enabled": false')
    by_hand, _ = made(RANK_4, deepspeed.initialize)
    assert not hasattr(by_hand, "powersgd")
    spoken = io.StringIO()
    with contextlib.redirect_stdout(spoken):
        state = adapter.enable(by_hand)
    says(spoken.getvalue(), "powersgd: on at ZeRO stage 2")
    assert adapter.enable(by_hand) is state is by_hand.powersgd
    assert 'add "powersgd": {"rank": 4}' in complaint(adapter.enable, off)
    spoken = io.StringIO()
    with contextlib.redirect_stdout(spoken):
        attached = attach(off, rank=3)
    says(spoken.getvalue(), "powersgd: on at ZeRO stage 2", "rank 3")
    assert attach(off) is adapter.enable(off) is attached is off.powersgd
    assert attach(on) is on.powersgd
    assert "the engine is compressed with" in complaint(adapter.enable, off, PowerSGDConfig(rank=2))
    assert "is compressed with" in complaint(attach, on, rank=5)
    assert '"enabled": false' in complaint(attach, disabled)
    for one in (on, off, disabled, by_hand):
        one.destroy()


def is_refused_with_all_reasons() -> None:
    """By all workers, also where one of them alone has a reason."""
    options = {"zero_optimization": {"contiguous_gradients": False}, "compile": {"deepcompile": True}}
    said = complaint(made, {"rnk": 4}, **options)
    assert "3 problems" in said
    assert all(part in said for part in ("rnk", "contiguous_gradients", "deepcompile"))
    with engine_for(Case("", 2)) as engine:
        said = complaint(attach, engine, bytes_per_step=10 if dist.get_rank() == 1 else 10**6)
        assert "at rank 1 this model sends" in said
        engine._config._param_dict["powersgd"] = {"bytes_per_step": 10}
        said = complaint(adapter.enable, engine)
        assert "1 problem" in said
        assert "at rank 1 this model sends" in said
        assert not hasattr(engine, "powersgd")


@parametrized([Job(is_switched_on_and_off), Job(is_refused_with_all_reasons)])
def test_an_engine(job: Job, finish: Callable[[Job], None]) -> None:
    """See the functions above."""
    finish(job)
