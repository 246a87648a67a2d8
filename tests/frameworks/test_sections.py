"""A section "powersgd" of DeepSpeed's configuration, in programs for frameworks that say nothing of compression."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.programs import output_of

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
state = getattr(engine, "powersgd", None)
print(f"compressed: {state is not None and state.compression_stats()[0] > 1}\\n", end="", flush=True)
torch.distributed.destroy_process_group()
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
