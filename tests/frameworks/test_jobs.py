"""Each framework with each wrapper, with a section of DeepSpeed's configuration alone, and the guides' examples."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.distributed import run
from tests.support.frameworks import job
from tests.support.frameworks.job import CELLS, DDP, FRAMEWORKS, FSDP1, FSDP2, HSDP, ZERO2
from tests.support.programs import DOCS, ROOT, output_of, snippets

NARROW = [("Lightning", ZERO2), *((framework, wrapper) for framework in FRAMEWORKS for wrapper in (DDP, FSDP2))]


def need(framework: str, wrapper: str = DDP) -> None:
    """Skip what is not installed."""
    pytest.importorskip(FRAMEWORKS[framework])
    if wrapper == ZERO2:
        pytest.importorskip("deepspeed")


WIDE = [(*cell, False) for cell in (*CELLS, ("Lightning", FSDP1))]


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "wrapper", "bf16"), [*WIDE, *((*cell, True) for cell in NARROW)])
def test_trains_and_resumes_as_the_framework_does(framework: str, wrapper: str, bf16: bool, tmp_path: Path):
    need(framework, wrapper)
    run(job.trains_and_resumes, 4 if wrapper == HSDP else 2, framework, wrapper, tmp_path, bf16)


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "wrapper"), NARROW)
def test_quantized_gradients(framework: str, wrapper: str):
    need(framework, wrapper)
    run(job.quantizes, 2, framework, wrapper)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "workers"), [(job.follows_the_loss_scale, 2), (job.is_off_in_one_process, 1)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_loss_scale_and_one_process(framework: str, case: Callable[..., None], workers: int):
    need(framework)
    run(case, workers, framework)


def test_documentation_has_every_cell():
    text = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    assert all(f"| {framework} | {wrapper} |" in text for framework, wrapper in CELLS)


EXAMPLES = {"accelerate": 2, "lightning": 2, "ray": 0, "ray_torchft": 0, "transformers": 2, "torchtitan": 4}
"""The number of workers of each framework's example, or 0 if it starts them itself."""
LOSS = re.compile(r"\b\d+\.\d\d+\b(?! kB)")


def shown(example: str, language: str) -> list[str]:
    return snippets(DOCS / "guides" / f"{example.split('_')[0]}.md", language)


@pytest.mark.parametrize("framework", EXAMPLES)
def test_guide_shows_the_example(framework: str):
    assert (DOCS / "examples" / f"train_{framework}.py").read_text(encoding="utf-8") in shown(framework, "python")


@pytest.mark.slow
@pytest.mark.parametrize("framework", EXAMPLES)
def test_example_prints_what_the_guide_says(framework: str, tmp_path: Path):
    for name in framework.split("_"):
        pytest.importorskip(name)
    expected = shown(framework, "text")["_" in framework].splitlines()
    done = run_example(framework, tmp_path)
    words = {LOSS.sub("", line) for line in expected}
    printed = [line for line in done.splitlines() if LOSS.sub("", line) in words]
    assert [LOSS.sub("", line) for line in printed] == [LOSS.sub("", line) for line in expected], done
    pairs = set(zip(LOSS.findall("\n".join(expected)), LOSS.findall("\n".join(printed)), strict=True))
    # Losses of another processor differ by rounding, but what the guide shows as equal is equal.
    assert len(pairs) == len({shown for shown, _ in pairs}), done
    assert all(abs(float(a) - float(b)) <= 0.02 + 0.02 * float(a) for a, b in pairs), done


@pytest.mark.slow
def test_torchtitan_with_four_replicas(tmp_path: Path):
    pytest.importorskip("torchtitan")
    losses = [float(line.split()[-1]) for line in run_example("torchtitan", tmp_path, "4", "1").splitlines()[-4:]]
    assert losses[-1] < losses[0] - 1


def run_example(framework: str, folder: Path, *arguments: str) -> str:
    workers = EXAMPLES[framework]
    program: list[str | Path] = [DOCS / "examples" / f"train_{framework}.py", *arguments]
    if not workers:
        # Ray writes a token into the home folder, and reports its use.
        return output_of(*program, cwd=folder, HOME=str(folder), RAY_USAGE_STATS_ENABLED="0")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    return output_of(*launcher, *program, cwd=folder)


# On CPUs, the frameworks would ignore DeepSpeed.
ACCELERATE = """
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch import nn
from tests.support.frameworks.accelerate import pretend_gpus

plugin = DeepSpeedPlugin(hf_ds_config="ds_config.json")
pretend_gpus(deepspeed=True)
accelerator = Accelerator(deepspeed_plugin=plugin)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(16, 64), batch_size=4)
engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    accelerator.backward((engine(x) - x.flip(1)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from tests.support.frameworks.accelerate import pretend_gpus

sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
options = dict(use_cpu=True, per_device_train_batch_size=4, max_steps=3, save_strategy="no", report_to=[])
arguments = TrainingArguments("output", deepspeed="ds_config.json", optim="adamw_torch", **options)
pretend_gpus(deepspeed=True)
samples = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 16))]
trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), arguments, train_dataset=samples)
trainer.train()
engine = trainer.model_wrapped
"""
END = """
import os

state = getattr(engine, "powersgd", None)
print(f"compressed: {state is not None and state.compression_stats()[0] > 1}\\n", end="", flush=True)
torch.distributed.destroy_process_group()
# Gloo's threads now and then abort Python's shutdown.
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "said", "compressed"),
    [
        ({"compression": 20}, "powersgd: on at ZeRO stage 2", True),
        ({"parameters": None}, "powersgd: off until the program switches it on", False),
        (None, "", False),
    ],
)
@pytest.mark.parametrize(("framework", "program"), [("accelerate", ACCELERATE), ("transformers", TRAINER)])
def test_a_section_is_enough(
    framework: str, program: str, section: dict | None, said: str, compressed: bool, tmp_path: Path
):
    pytest.importorskip(framework)
    pytest.importorskip("deepspeed")
    content: dict = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    content |= {} if section is None else {"powersgd": section}
    (tmp_path / "ds_config.json").write_text(json.dumps(content))
    (tmp_path / "train.py").write_text(program + END)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    printed = output_of(*launcher, "train.py", cwd=tmp_path, DS_ACCELERATOR="cpu")
    assert printed.count("powersgd:") == (section is not None)
    assert said in printed
    assert printed.count(f"compressed: {compressed}") == 2
