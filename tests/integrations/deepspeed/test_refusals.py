"""What the DeepSpeed adapter refuses, all problems at once, and what it says when it is on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("deepspeed")

import deepspeed

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.deepspeed import refusals
from powersgd_triton.integrations.deepspeed.parameters import why_not_differences
from tests.support import deepspeed_jobs as jobs
from tests.support.deepspeed_training import result, run_all
from tests.support.distributed import HUNG, run

ROOT = Path(__file__).resolve().parents[3]


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
        module=torch.nn.Linear(2, 2),
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


class Muon(torch.optim.SGD):
    """Another one of that name."""


def set_fp16_at_stage_0(engine: Any) -> None:
    engine.stage, engine.fp16 = 0, True


PROBLEMS: dict[str, tuple[Any, list[str]]] = {
    "qgZ": (lambda e: setattr(e._config.zero_config, "zero_quantized_gradients", True), ["qgZ", "take it out"]),
    "deepcompile": (lambda e: setattr(e._config.compile_config, "deepcompile", True), ["deepcompile", "set"]),
    "zenflow": (lambda e: setattr(e._config.zero_config, "zenflow", object()), ["zenflow", "take the section"]),
    "contiguous": (lambda e: setattr(e.optimizer, "contiguous_gradients", False), ["contiguous_gradients", "true"]),
    "fp16": (set_fp16_at_stage_0, ["fp16 at ZeRO stage 0", "stage 1, bf16"]),
    "complex": (
        lambda e: setattr(e.module, "weight", torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))),
        ["'weight' is complex", "view_as_real"],
    ),
    "MoE": (lambda e: setattr(e, "has_moe_layers", True), ["mixture-of-experts"]),
    "Muon": (lambda e: setattr(e, "basic_optimizer", Muon([torch.zeros(1)], lr=1.0)), ["Muon", "another optimizer"]),
    "no optimizer": (lambda e: setattr(e, "optimizer", None), ["no optimizer", "give one"]),
    "super_offload": (
        lambda e: setattr(e._config.zero_config, "offload_optimizer", SimpleNamespace(super_offload=True)),
        ["super_offload", "false"],
    ),
    "no seam": (lambda e: setattr(e, "optimizer", SimpleNamespace()), ["gradient_reduction_w_predivide", "README"]),
}


def test_nothing_is_wrong_with_an_ordinary_engine(engine: Any) -> None:
    assert refusals.engine_problems(engine, refusals.Section()) == []


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_each_problem_is_named_with_a_remedy(engine: Any, name: str) -> None:
    spoil, parts = PROBLEMS[name]
    spoil(engine)
    (problem,) = refusals.engine_problems(engine, refusals.Section())
    assert all(part in problem for part in parts), problem


def test_one_worker_is_refused(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda _: 1)
    (problem,) = refusals.engine_problems(engine, refusals.Section())
    assert "one worker" in problem
    assert '"enabled": false' in problem


@pytest.mark.parametrize(
    ("version", "stage", "bad"),
    [
        ("0.15.4", 1, True),
        ("0.16.0", 2, False),
        ("0.17.5", 2, False),
        ("0.17.6", 2, True),
        ("0.18.2", 2, True),
        ("0.18.2+cu12", 1, False),
        ("0.18.3", 2, False),
        ("0.19.8", 2, False),
    ],
)
def test_known_bad_versions(engine: Any, version: str, stage: int, bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    engine.stage = stage
    problems = refusals.engine_problems(engine, refusals.Section())
    assert bool(problems) == bad
    assert not bad or version in problems[0]


def test_fp16_at_stage_0_where_the_loss_is_scaled(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "__version__", "0.18.2")
    set_fp16_at_stage_0(engine)
    assert refusals.engine_problems(engine, refusals.Section()) == []


def test_all_problems_come_at_once(engine: Any) -> None:
    for name in ("qgZ", "MoE", "Muon", "contiguous"):
        PROBLEMS[name][0](engine)
    section = refusals.read_section({"rnk": 4, "rank": 0, "seed": "x", "enabled": 1, "min_compresion_rate": 2})
    with pytest.raises(refusals.PowerSGDConfigError) as raised:
        refusals.refuse([*section.problems, *refusals.engine_problems(engine, section)])
    message = str(raised.value)
    assert "9 problems" in message
    for part in ("'rnk'; did you mean 'rank'", "'min_compresion_rate'; did you mean 'min_compression_rate'"):
        assert part in message
    for part in (
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


class TiedLayerSpec:
    """As far as the checks look."""


CANNOT_BE_DIFFERENCES: dict[str, tuple[Any, str]] = {
    "stage 0": (lambda e: setattr(e, "optimizer", torch.optim.AdamW([torch.zeros(1)])), "after a step"),
    "stage 3": (lambda e: setattr(e, "stage", 3), "every pass"),
    "tensor parallelism": (lambda e: setattr(e, "autotp_size", lambda: 2), "with tensor parallelism"),
    "tied stages": (lambda e: setattr(e.module, "_layer_specs", [TiedLayerSpec()]), "tied parameters"),
    "max_norm": (lambda e: e.module.append(torch.nn.Embedding(2, 2, max_norm=1.0)), "'1' has max_norm"),
}


@pytest.mark.parametrize("case", CANNOT_BE_DIFFERENCES)
def test_parameters_that_cannot_be_differences(engine: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in the modules of DeepSpeed's optimizers.
    monkeypatch.setattr(sys.modules[__name__], "all_gather_dp_groups", print, raising=False)
    engine.module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert why_not_differences(engine) is None
    spoil, said = CANNOT_BE_DIFFERENCES[case]
    spoil(engine)
    problems = refusals.engine_problems(engine, refusals.read_section({"parameters": "int8"}))
    (problem,) = [problem for problem in problems if "int8" in problem]
    assert said in problem
    # What is only the default is not used there.
    for given in ({}, {"parameters": None}):
        problems = refusals.engine_problems(engine, refusals.read_section(given))
        assert not any("leave the key out" in problem for problem in problems)


@pytest.mark.parametrize("section", [True, 4, [1], "rank"])
def test_a_section_is_an_object(section: Any) -> None:
    assert "must be an object" in refusals.read_section(section).problems[0]


def test_limits_of_ranks_go_with_a_budget() -> None:
    section = refusals.read_section({"compression": 20, "max_rank": 8, "max_overhead": 0.1})
    assert not section.problems
    assert (section.config.max_rank, section.config.max_overhead) == (8, 0.1)
    (problem,) = refusals.read_section({"rank": 4, "max_rank": 8}).problems
    assert "max_rank limits planned ranks" in problem
    (problem,) = refusals.read_section({"compression": "auto"}).problems
    assert "DeepSpeed's step does not: choose a number" in problem


def test_fields_that_do_not_go_together() -> None:
    (problem,) = refusals.read_section({"algorithm": "alternating", "warm_start": False}).problems
    assert "warm_start" in problem


@pytest.mark.parametrize("value", ["int3", "ternary", 2, True, ["int2"]])
def test_formats_of_parameters(value: Any) -> None:
    (problem,) = refusals.read_section({"parameters": value}).problems
    assert "null or one of int8, int4, int2" in problem
    assert repr(value) in problem


# With real engines ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Any:
    options = {"zero_optimization": {"stage": 2, "contiguous_gradients": False}, "compile": {"deepcompile": True}}
    work: list[Any] = [("messages", jobs.messages, ()), ("refused", jobs.refused, (2, {"rnk": 4}, options))]
    return run(run_all, 2, work)


def test_ways_to_switch_it_on(pair: Any) -> None:
    found = result(pair, "messages")
    first = found[0]
    (on,) = first["on"]
    for part in (
        "on at ZeRO stage 2",
        "rank 2",
        "from step 3 on",
        "% of 9,243 gradient",
        "Parameters are sent in int2",
        "In a whole step each worker sends",
    ):
        assert part in on
    assert first["off"] == ['powersgd: off, the configuration has no section "powersgd"']
    assert first["disabled"] == ['powersgd: off, the section has "enabled": false']
    assert first["by hand"][0].startswith("powersgd: on at ZeRO stage 2")
    assert first["before"] is None
    assert first["again"]
    assert first["forwarded"]
    assert 'add "powersgd": {"rank": 4}' in first["no section"]
    assert first["attached"].startswith("powersgd: on at ZeRO stage 2")
    assert "rank 3" in first["attached"]
    assert first["attached again"]
    assert first["section attached"]
    assert "the engine is compressed with" in first["other rank"]
    assert "is compressed with" in first["other than the section"]
    assert '"enabled": false' in first["disabled attached"]
    assert all(not found[1][name] for name in ("on", "off", "disabled", "by hand")), "only one worker says it"


def test_a_real_engine_is_refused_with_all_reasons(pair: Any) -> None:
    for message in result(pair, "refused"):
        assert "3 problems" in message
        assert all(part in message for part in ("rnk", "contiguous_gradients", "deepcompile"))


def run_python(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )


PROGRAM = """
import argparse, sys, pathlib, torch, deepspeed
from helper import NUMBER
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not compiled for a test
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step in range(3):
    x = torch.randn(8, 32)
    loss = (engine(x) - x.flip(1)).square().mean()
    engine.backward(loss)
    engine.step()
assert __name__ == "__main__" and sys.argv[0].endswith("train.py"), sys.argv
if torch.distributed.get_rank() == 0:
    print("done", engine.powersgd.compression_stats()[0] > 1, args.local_rank, NUMBER)
torch.distributed.destroy_process_group()
"""
CONFIGURATION = """{"train_micro_batch_size_per_gpu": 8, "powersgd": {"rank": 2}, "zero_optimization": {"stage": 1},
"optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": true}}}"""
LAUNCHERS = {
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--module"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"],
}


# Four processes of each launcher import DeepSpeed.
@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_program_runs_without_a_changed_line(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(PROGRAM)
    # Beside the program, where Python looks first.
    (tmp_path / "src" / "helper.py").write_text("NUMBER = 42\n")
    (tmp_path / "ds_config.json").write_text(CONFIGURATION)
    arguments = ["powersgd_triton.integrations.deepspeed", "src/train.py", "--deepspeed_config", "ds_config.json"]
    port = ["--master_port", str(20000 + os.getpid() % 20000)] if launcher == "deepspeed" else []
    head = LAUNCHERS[launcher]
    done = run_python(*head[:2], *port, *head[2:], *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "powersgd: on at ZeRO stage 1" in done.stdout
    assert "done True 0 42" in done.stdout


# DeepSpeed compiles its operation for CPUs, where that was not done on this machine before.
@pytest.mark.slow
@pytest.mark.timeout(2 * HUNG)
def test_the_command_of_the_readme() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (command,) = [line for line in lines if line.startswith("deepspeed --num_gpus 2 --module")]
    done = run_python("-m", "deepspeed.launcher.runner", *command.split()[1:], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "powersgd: on at ZeRO stage 2" in done.stdout
    assert "step 20: loss" in done.stdout


@pytest.mark.parametrize(("arguments", "part"), [([], "usage: deepspeed"), (["nowhere.py"], "no file 'nowhere.py'")])
def test_the_runner_asks_for_a_program(arguments: list[str], part: str, tmp_path: Path) -> None:
    done = run_python("-m", "powersgd_triton.integrations.deepspeed", "--local_rank=0", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert part in done.stderr


def test_without_deepspeed_it_is_said_how_to_get_it(tmp_path: Path) -> None:
    code = "import sys; sys.modules['deepspeed'] = None; import powersgd_triton.integrations.deepspeed"
    done = run_python("-c", code, cwd=tmp_path)
    assert "pip install 'powersgd_triton[deepspeed]'" in done.stderr
