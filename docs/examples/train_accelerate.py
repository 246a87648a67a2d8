"""Train with Accelerate and compressed gradients, and resume: torchrun --nproc-per-node 2 train_accelerate.py."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from powersgd_triton.integrations.accelerate import compress

torch.manual_seed(0)
inputs = torch.randn(512, 64)
loader = DataLoader(TensorDataset(inputs, inputs.flip(1)), batch_size=16)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

accelerator = Accelerator(cpu=True)  # on GPUs: Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
compress(accelerator, model, compression=20)


def train_epoch() -> float:
    """Train on all samples once, and return the last loss, averaged over workers."""
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.reduce(loss.detach(), "mean").item()


for epoch in range(4):
    loss = train_epoch()
    accelerator.print(f"epoch {epoch}: loss {loss:.2f}")
    if epoch == 1:
        accelerator.save_state("checkpoint")

accelerator.load_state("checkpoint")  # weights, optimizer, and what the compression has not sent yet
for epoch in (2, 3):
    loss = train_epoch()
    accelerator.print(f"epoch {epoch} again: loss {loss:.2f}")
accelerator.end_training()
