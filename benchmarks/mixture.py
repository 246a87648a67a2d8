"""The demo's model with experts: each perceptron becomes eight, of which a router chooses two for a token."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import arms
from powersgd_triton.demo.measure import HookTimer
from powersgd_triton.demo.model import GPT
from powersgd_triton.demo.train import Prepared, Settings

WIDTH, BATCH_PER_WORKER = 64, 8
EXPERTS, CHOSEN = 8, 2
BALANCE = 0.01
"""Coefficient of the loss that balances experts (Fedus et al. 2021, Switch Transformers)."""


class Experts(nn.Module):
    """Perceptrons, held in one tensor a layer. Of x [..., width], each token passes the two that the router prefers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, width, 2 * width).uniform_(-1, 1) / width**0.5)
        self.down = nn.Parameter(torch.empty(EXPERTS, 2 * width, width).uniform_(-1, 1) / (2 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        shares = self.router(tokens).softmax(-1)
        weights, chosen = shares.topk(CHOSEN)
        weights = weights / weights.sum(-1, keepdim=True)
        # Group the pairs of token and expert by expert.
        experts, order = chosen.flatten().sort(stable=True)
        counts = torch.bincount(experts, minlength=EXPERTS)
        if shares.requires_grad:
            # The gradient of the balancing loss, BALANCE · EXPERTS · Σ_e (share of tokens of e) · (its mean share).
            balance = BALANCE * EXPERTS * counts / (counts.sum() * len(tokens))
            shares.register_hook(lambda gradient: gradient + balance)
        groups = zip(tokens[order // CHOSEN].split(counts.tolist()), self.up.unbind(), self.down.unbind(), strict=True)
        passed = torch.cat([F.gelu(group @ up) @ down for group, up, down in groups])
        mixed = torch.zeros_like(tokens).index_add(0, order // CHOSEN, passed * weights.flatten()[order, None])
        return mixed.view_as(x)


def mixture(model: GPT) -> GPT:
    """Replace the perceptrons of the demo's model, in place."""
    blocks: Any = model.blocks
    for block in blocks:
        norm = block.perceptron[0]
        block.perceptron = nn.Sequential(norm, Experts(*norm.normalized_shape))
    return model


def prepare(model: GPT, settings: Settings, timer: HookTimer, arm: str) -> Prepared:
    """Make the mixture ready for training in an arm's way, as ``train.train`` wants it."""
    return arms.prepare(mixture(model), settings, timer, arm)
