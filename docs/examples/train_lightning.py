"""Train with Lightning and compressed gradients: torchrun --nproc-per-node 2 train_lightning.py."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from powersgd_triton.integrations.lightning import PowerSGD


class Classifier(pl.LightningModule):
    """Names the largest of ten numbers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        self.losses = []

    def training_step(self, batch):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.net(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(epochs):
    """Make a trainer with compressed gradients."""
    return pl.Trainer(
        callbacks=[PowerSGD(compression=20), ModelCheckpoint("output", "{epoch}", save_top_k=-1)],
        accelerator="cpu",  # leave this out on GPUs
        strategy="ddp",
        devices=2,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


pl.seed_everything(0, verbose=False)
inputs = torch.randn(1024, 64)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :10].argmax(1))
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)

module = Classifier()
training = trainer(epochs=8)
training.fit(module, loader)
# Weights, optimizer, and what the compression had not sent yet.
again = Classifier()
trainer(epochs=8).fit(again, loader, ckpt_path="output/epoch=3.ckpt")
if training.is_global_zero:
    # An epoch has 16 steps on each of 2 workers.
    print("losses after 4 and 8 epochs:", *(f"{sum(module.losses[end - 16 : end]) / 16:.2f}" for end in (64, 128)))
    print("resumed after 4 epochs:", f"{sum(again.losses[-16:]) / 16:.2f}")
torch.distributed.destroy_process_group()
