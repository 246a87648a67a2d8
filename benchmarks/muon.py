"""The demo's model with Muon for the matrices of its blocks, and AdamW for all else."""

import functools
from collections.abc import Sequence

import torch

from benchmarks import arms
from powersgd_triton.demo.model import GPT
from powersgd_triton.demo.train import WEIGHT_DECAY, Settings


def optimizers(model: GPT, settings: Settings) -> Sequence[torch.optim.Optimizer]:
    """Return both optimizers of a model."""
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
    those = set(matrices)
    others = [parameter for parameter in model.parameters() if parameter not in those]
    # "match_rms_adamw" makes steps as large as AdamW's, so that both have one learning rate.
    rate = settings.learning_rate
    muon = torch.optim.Muon(matrices, rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return muon, torch.optim.AdamW(others, rate, weight_decay=WEIGHT_DECAY)


prepare = functools.partial(arms.prepare, optimizers=optimizers)
