"""What the DeepSpeed adapter refuses, all problems at once, and what it says when it is on."""

import contextlib
import functools
import io
import re
import sys
from collections.abc import Callable
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
from tests.support.deepspeed_training import RANK_4, Case, configuration, each, engine_for
from tests.support.distributed import make_test
from tests.support.sharded_training import Net
from tests.support.training import complaint


class Stage1Optimizer(SimpleNamespace):
    """As far as the checks look."""

    def gradient_reduction_w_predivide(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """What is overridden."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine with which nothing is wrong, at stage 1."""
    # Experts need all workers in one data-parallel group.
    monkeypatch.setattr(dist, "get_world_size", lambda *group: 2 if group else 4)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
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
        seq_data_parallel_group=None,
        allreduce_no_retain=print,
        mpu=None,
    )
    made.zero_optimization_stage = lambda: made.stage
    made.fp16_enabled = lambda: made.fp16
    return made


def problems_of(engine: Any, section: Any = None, **changes: Any) -> list[str]:
    """Of an engine whose attributes are set, which may be those of a part: "a.b"."""
    for path, value in changes.items():
        *parts, name = path.split(".")
        setattr(functools.reduce(getattr, parts, engine), name, value)
    return refusals.engine_problems(engine, refusals.read_section(section or {}))


class Muon(torch.optim.SGD):
    """Another one of that name."""


COMPLEX = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
OFFLOADED = SimpleNamespace(super_offload=True)
# (attributes, what is said)
PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"_config.zero_config.zero_quantized_gradients": True}, "qgZ.*take it out"),
    ({"_config.compile_config.deepcompile": True}, "deepcompile.*set"),
    ({"_config.zero_config.zenflow": object()}, "zenflow.*take the section"),
    ({"optimizer.contiguous_gradients": False}, "contiguous_gradients.*true"),
    ({"stage": 0, "fp16": True}, "fp16 at ZeRO stage 0.*stage 1, bf16"),
    ({"module": torch.nn.ParameterDict({"weight": COMPLEX})}, "'weight' is complex.*view_as_real"),
    ({"has_moe_layers": True}, "mixture-of-experts.*parallelism"),
    ({"basic_optimizer": Muon([torch.zeros(1)], lr=1.0)}, "Muon.*another optimizer"),
    ({"optimizer": None}, "no optimizer.*give one"),
    ({"_config.zero_config.offload_optimizer": OFFLOADED}, "super_offload.*false"),
    ({"optimizer": SimpleNamespace()}, "gradient_reduction_w_predivide.*docs/index.md"),
    ({"workers": 1}, 'one worker.*"enabled": false'),
    *[({"version": version, "stage": 2}, f"{version}.*wrong gradients") for version in ("0.17.6", "0.18.2")],
    ({"version": "0.15.4"}, "0.15.4 is too old"),
    ({"use_node_local_storage": lambda: True}, "use_node_local_storage.*false"),
]
FINE: list[dict[str, Any]] = [{"version": version, "stage": 2} for version in ("0.16.0", "0.17.5", "0.18.3", "0.19.8")]
# In that version the loss is scaled at stage 0.
FINE += [{}, {"version": "0.18.2+cu12"}, {"version": "0.18.2", "stage": 0, "fp16": True}]


@pytest.mark.parametrize(("changes", "said"), [*PROBLEMS, *((changes, "") for changes in FINE)])
def test_each_problem_is_named_with_a_remedy(
    engine: Any, changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", changes.get("version", deepspeed.__version__))
    monkeypatch.setattr(dist, "get_world_size", lambda *group: changes.get("workers", 2) if group else 4)
    problems = problems_of(engine, **changes)
    assert len(problems) == (said != ""), problems
    assert all(re.search(said, problem) for problem in problems), problems


CANNOT_BE_DIFFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": torch.optim.AdamW([torch.zeros(1)])}, "after a step"),
    ({"stage": 3}, "every pass"),
    ({"autotp_size": lambda: 2}, "with tensor parallelism"),
    ({"module._layer_specs": [type("TiedLayerSpec", (), {})()]}, "tied parameters"),
    ({"module": torch.nn.ModuleDict({"e": torch.nn.Embedding(2, 2, max_norm=1.0)})}, "'e' has max_norm"),
]


@pytest.mark.parametrize(("changes", "said"), CANNOT_BE_DIFFERENCES)
def test_parameters_that_cannot_be_differences(
    engine: Any, changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in the modules of DeepSpeed's optimizers.
    monkeypatch.setattr(sys.modules[__name__], "all_gather_dp_groups", print, raising=False)
    assert why_not_differences(engine) is None
    (problem,) = [one for one in problems_of(engine, {"parameters": "int8"}, **changes) if "int8" in one]
    assert said in problem
    # What is only the default is not used there.
    for given in ({}, {"parameters": None}):
        assert not any("leave the key out" in problem for problem in problems_of(engine, given))


def test_all_problems_come_at_once(engine: Any) -> None:
    given = {"rnk": 4, "rank": 0, "seed": "x", "enabled": 1, "min_compresion_rate": 2}
    changes = {path: value for index in (0, 3, 6, 7) for path, value in PROBLEMS[index][0].items()}
    section = refusals.read_section(given)
    with pytest.raises(refusals.PowerSGDConfigError, match="9 problems") as raised:
        raise refusals.refusal([*section.problems, *problems_of(engine, **changes)])
    message = str(raised.value)
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


SECTIONS: list[tuple[Any, str]] = [
    (True, "must be an object"),
    ({"parameters": "int3"}, "null or one of int8, int4, int2.*'int3'"),
    ({"parameters": ["int2"]}, r"null or one of int8, int4, int2.*\['int2'\]"),
    ({"node_group": 2}, 'null, true or "auto"; got 2'),
    ({"rank": 4, "max_rank": 8}, "max_rank limits planned ranks"),
    ({"compression": "auto"}, "DeepSpeed's step does not: choose a number"),
    ({"algorithm": "alternating", "warm_start": False}, "warm_start"),
]


def test_sections() -> None:
    for given, said in SECTIONS:
        (problem,) = refusals.read_section(given).problems
        assert re.search(said, problem), problem
    wanted = PowerSGDConfig(rank=7, start_iter=3, algorithm="alternating", iterations=2, error_dtype="bf16", seed=5)
    section = refusals.read_section({"enabled": True, "parameters": "int8", **wanted.to_dict()})
    assert section == refusals.Section(wanted, True, "int8", parameters_given=True)
    section = refusals.read_section({"compression": 20, "max_rank": 8, "max_overhead": 0.1})
    assert section == refusals.Section(PowerSGDConfig(compression=20, max_rank=8, max_overhead=0.1))


# With real engines ----------------------------------------------------------------------------------------------------


def spoken(make: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, str]:
    """What a call returns, and what this worker says in it."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        found = make(*arguments, **options)
    return found, "\n".join(line for line in output.getvalue().splitlines() if line.startswith("powersgd:"))


def made(section: Any, initialize: Any = adapter.initialize, **options: Any) -> tuple[Any, str]:
    """An engine, and what this worker says."""
    model = Net()
    config = configuration(2, section, options)
    found, said = spoken(initialize, model=model, model_parameters=list(model.parameters()), config=config)
    return found[0], said


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
    # The original, which ``autoload`` has wrapped.
    by_hand, _ = made(RANK_4, vars(deepspeed)["initialize"])
    assert not hasattr(by_hand, "powersgd")
    state, line = spoken(adapter.enable, by_hand)
    says(line, "powersgd: on at ZeRO stage 2")
    assert adapter.enable(by_hand) is state is by_hand.powersgd
    assert 'add "powersgd": {"compression": 20}' in complaint(adapter.enable, off)
    off._config._param_dict["powersgd"] = {"parameters": "int3"}
    assert "null or one of int8, int4, int2; got 'int3'" in complaint(adapter.enable_from_section, off)
    off._config._param_dict["powersgd"] = {"parameters": "int4"}
    _, line = spoken(adapter.enable_from_section, off)
    says(line, 'powersgd: off until the program switches it on: the section has only "parameters"')
    attached, line = spoken(attach, off, rank=3)
    says(line, "powersgd: on at ZeRO stage 2", "rank 3")
    assert attach(off) is adapter.enable(off) is attached is off.powersgd
    assert attach(on) is on.powersgd
    assert "the engine is compressed with" in complaint(adapter.enable, off, PowerSGDConfig(rank=2))
    assert "is compressed with rank=2, start_iter=3 already; got rank=5, start_iter=0" in complaint(attach, on, rank=5)
    assert '"enabled": false' in complaint(attach, disabled)
    for one in (on, off, disabled, by_hand):
        one.destroy()


def is_refused_with_all_reasons() -> None:
    """By all workers, also where one of them alone has a reason."""
    options = {"zero_optimization": {"contiguous_gradients": False}, "compile": {"deepcompile": True}}
    said = complaint(made, {"rnk": 4}, **options)
    assert all(part in said for part in ("3 problems", "rnk", "contiguous_gradients", "deepcompile")), said
    with engine_for(Case("", 2)) as engine:
        for call in (adapter.enable, attach):
            said = complaint(call, None if dist.get_rank() == 1 else engine, PowerSGDConfig())
            assert dist.get_rank() == 1 or "failed on worker 1" in said, said
        said = complaint(attach, engine, bytes_per_step=10 if dist.get_rank() == 1 else 10**6)
        assert "at rank 1 this model sends" in said
        engine._config._param_dict["powersgd"] = {"bytes_per_step": 10}
        said = complaint(adapter.enable, engine)
        assert "1 problem" in said
        assert "at rank 1 this model sends" in said
        assert not hasattr(engine, "powersgd")


test_an_engine = make_test(each(is_switched_on_and_off, ()) | each(is_refused_with_all_reasons, ()), 2)
