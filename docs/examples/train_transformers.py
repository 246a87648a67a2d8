"""Train with transformers' Trainer and compressed gradients: torchrun --nproc-per-node 2 train_transformers.py."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from powersgd_triton.integrations.transformers import PowerSGDCallback

set_seed(0)
samples = [{"input_ids": row, "labels": row} for row in (torch.arange(16) + torch.randint(0, 64, (256, 1))) % 64]
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
arguments = TrainingArguments(
    "output",
    use_cpu=True,  # leave this out on GPUs
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    max_steps=40,
    logging_steps=10,
    save_steps=20,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=samples)
trainer.add_callback(PowerSGDCallback(trainer, compression=20))
trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
# Weights, optimizer, and what the compression had not sent yet.
trainer.train(resume_from_checkpoint="output/checkpoint-20")
again = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    print("losses:", *(f"{float(loss):.2f}" for loss in losses))
    print("resumed from step 20:", *(f"{float(loss):.2f}" for loss in again[2:]))
torch.distributed.destroy_process_group()
