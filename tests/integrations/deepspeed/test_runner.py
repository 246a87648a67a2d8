"""Programs without a changed line: the DeepSpeed runner, and what it says if ``deepspeed.initialize`` is not called."""

import contextlib
import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import deepspeed

from powersgd_triton import autoload
from powersgd_triton.integrations import deepspeed as adapter
from powersgd_triton.integrations.deepspeed.__main__ import main
from tests.support.distributed import HUNG
from tests.support.programs import ROOT, output_of

NAME = "powersgd_triton.integrations.deepspeed"
# (program, what it ends with, whether it calls ``initialize``)
PROGRAMS: dict[str, tuple[str, Any, bool]] = {
    "ends": ("import deepspeed", None, False),
    "raises": ("raise RuntimeError('broken')", RuntimeError, False),
    "exits": ("import sys; sys.exit(3)", SystemExit, False),
    "import deepspeed": ("import deepspeed; deepspeed.initialize(model=1)", None, True),
    "from deepspeed": ("from deepspeed import initialize; initialize(model=1)", None, True),
    "the adapter": ("from powersgd_triton.integrations import deepspeed; deepspeed.initialize(model=1)", None, True),
    "from the adapter": (f"from {NAME} import initialize; initialize(model=1)", None, True),
    "fails after it": ("import deepspeed; deepspeed.initialize(model=1); raise SystemExit(1)", SystemExit, True),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_worker_0_says_that_nothing_was_compressed(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, error, calls = PROGRAMS[case]
    path = tmp_path / "train.py"
    path.write_text(program)
    for rank in (None, "0", "1"):
        with monkeypatch.context() as patch:
            models: list[Any] = []
            patch.setattr(adapter, "initialize", lambda *, model, models=models: models.append(model))
            # What the runner replaces is restored.
            patch.setattr(deepspeed, "initialize", deepspeed.initialize)
            patch.setattr(sys, "argv", sys.argv)
            patch.setattr(sys, "path", list(sys.path))
            patch.delenv("RANK", raising=False)
            if rank is not None:
                patch.setenv("RANK", rank)
            with contextlib.nullcontext() if error is None else pytest.raises(error):
                main([str(path)])
        assert models == [1] * calls
        said = "powersgd: off, nothing was compressed: the program did not call deepspeed.initialize\n"
        assert capsys.readouterr().out == ("" if calls or rank == "1" else said)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, part in (([], "usage: deepspeed"), (["nowhere.py"], "no file 'nowhere.py'")):
        monkeypatch.setattr(sys, "argv", ["runner", "--local_rank=0", *arguments])
        monkeypatch.delitem(sys.modules, f"{NAME}.__main__", raising=False)
        with pytest.raises(SystemExit, match=part):
            runpy.run_module(NAME, run_name="__main__")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.delitem(sys.modules, NAME)
    with pytest.raises(ImportError, match=r"in a clone, run pip install '\.\[deepspeed\]'"):
        importlib.import_module(NAME)


PROGRAM = """
import argparse, sys, torch, deepspeed
from helper import NUMBER
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not compiled for a test
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for step in range(3):
    x = torch.randn(8, 32)
    engine.backward((engine(x) - x.flip(1)).square().mean())
    engine.step()
assert __name__ == "__main__" and sys.argv[0].endswith("train.py"), sys.argv
if torch.distributed.get_rank() == 0:
    print("done", engine.powersgd.compression_stats()[0] > 1, args.local_rank, NUMBER)
torch.distributed.destroy_process_group()
"""
CONFIGURATION = """{"train_micro_batch_size_per_gpu": 8, "powersgd": {"rank": 2}, "zero_optimization": {"stage": 1},
"optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": true}}}"""
PORT = ["--master_port", str(20000 + os.getpid() % 20000)]
LAUNCHERS = {
    "deepspeed alone": ["deepspeed.launcher.runner", *PORT, "--num_gpus", "2"],
    "deepspeed": ["deepspeed.launcher.runner", *PORT, "--num_gpus", "2", "--module", NAME],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", NAME],
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
    arguments = ["src/train.py", "--deepspeed_config", "ds_config.json"]
    said = output_of("-m", *LAUNCHERS[launcher], *arguments, cwd=tmp_path, DS_ACCELERATOR="cpu")
    assert "powersgd: on at ZeRO stage 1" in said
    assert "done True 0 42" in said


AUTOLOADED = """
import IMPORTS, importlib.util, sys, types
assert importlib.util.find_spec("deepspeed")  # as frameworks ask whether it is installed
import deepspeed
from deepspeed import initialize
from powersgd_triton.autoload import is_active
sys.modules["powersgd_triton.integrations.deepspeed"] = types.SimpleNamespace(enable_from_section=print)
for section in ("powersgd", "PowerSGD", "power_sgd", "zero_optimization"):
    print(section, is_active(), flush=True)
    (deepspeed.initialize if section == "powersgd" else initialize)({section: {"rank": 4}})
"""
STUB = """
import torch

class initialize(list):
    def __init__(self, content):
        self._param_dict, self._config = content, self
        self.append(self)

    def __str__(self):
        return "enabled"
"""


@pytest.mark.parametrize(
    ("imports", "off"), [("deepspeed", False), ("torch", True), pytest.param("torch", False, marks=pytest.mark.slow)]
)
def test_importing_torch_lets_a_section_work(imports: str, off: bool, tmp_path: Path) -> None:
    """Whichever is imported first: DeepSpeed itself imports torch, before it has ``initialize``."""
    (tmp_path / "deepspeed.py").write_text(STUB)
    (tmp_path / "train.py").write_text(AUTOLOADED.replace("IMPORTS", imports))
    said = output_of("train.py", cwd=tmp_path, **{autoload.VARIABLE: str(int(not off))}).split()
    known = "powersgd True enabled PowerSGD True enabled power_sgd True enabled zero_optimization True"
    assert said == (known.replace("True", "False").replace("enabled ", "") if off else known).split()


def test_finders_without_the_method_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python does."""
    monkeypatch.setattr(sys, "meta_path", [object()])
    assert autoload._Finder().find_spec("deepspeed", None) is None


# DeepSpeed compiles its operation for CPUs, where that was not done on this machine before.
@pytest.mark.slow
@pytest.mark.timeout(2 * HUNG)
def test_the_command_of_the_readme() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (command,) = [line for line in lines if line.startswith("deepspeed --num_gpus 2")]
    said = output_of("-m", "deepspeed.launcher.runner", *command.split()[1:], DS_ACCELERATOR="cpu")
    assert "powersgd: on at ZeRO stage 2" in said
    assert "step 20: loss" in said
