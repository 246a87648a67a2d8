"""The demo's model with Muon for the matrices of its blocks, and AdamW for all else."""

from __future__ import annotations

import torch

from benchmarks import arms
from powersgd_triton.demo.arms import distribute
from powersgd_triton.demo.measure import HookTimer
from powersgd_triton.demo.model import GPT
from powersgd_triton.demo.train import WEIGHT_DECAY, Prepared, Settings, stepping


def prepare(model: GPT, settings: Settings, timer: HookTimer, arm: str) -> Prepared:
    """Make the demo's model ready for training in an arm's way, as ``train.train`` wants it."""
    gradients = arms.of_demo(arm)
    if gradients is None:
        raise ValueError(f"expected an arm that averages gradients; got {arm!r}")
    replica, _ = distribute(model, settings, timer, gradients)
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
    those = set(matrices)
    others = [parameter for parameter in model.parameters() if parameter not in those]
    # "match_rms_adamw" makes steps as large as AdamW's, so that both have one learning rate.
    rate = settings.learning_rate
    muon = torch.optim.Muon(matrices, rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, rate, weight_decay=WEIGHT_DECAY)
    return replica, stepping(settings, muon, adamw)
