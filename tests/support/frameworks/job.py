"""What every framework trains, and how a training is described. All of it runs inside a worker."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WIDTH, TARGETS, SAMPLES = 32, 8, 64
BATCH, MICRO_BATCHES, STEPS, SAVED = 4, 2, 6, 3
CLIP = 0.5
# A larger epsilon than usual, so that rounding is not amplified where second moments are still close to zero.
ADAM: dict[str, Any] = {"lr": 5e-3, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.0}

DDP, FSDP2, HSDP, REPLICATE, ZERO2 = "DDP", "FSDP2 1-D", "HSDP 2 × 2", "`replicate()`", "DeepSpeed ZeRO 2"
FSDP1 = "FSDP1"
"""Only with frameworks that still offer it, and not in the table."""
WRAPPERS = [DDP, FSDP2, HSDP, REPLICATE, ZERO2]
FULL_RANK: dict[str, Any] = {"rank": 999, "min_compression_rate": 0}
RANK_4: dict[str, Any] = {"rank": 4, "min_compression_rate": 1}


class NotOfferedError(Exception):
    """The framework refuses to wrap a model in this way. The message is the framework's own."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        wrapper: One of ``WRAPPERS``.
        folder: Where to save checkpoints. All workers use the same one.
        options: Fields of the compression's configuration. None trains without it.
        save: Save a checkpoint after ``SAVED`` steps.
        resume: Start with other weights, and continue from that checkpoint.
        bf16: Train with the framework's mixed precision.
        parameters: How DeepSpeed's parameters are sent. None gathers them as they are.
    """

    wrapper: str
    folder: Path
    options: dict[str, Any] | None = None
    save: bool = False
    resume: bool = False
    bf16: bool = False
    parameters: str | None = None

    @property
    def steps(self) -> range:
        return range(SAVED if self.resume else 0, STEPS)

    def net(self) -> Net:
        """The model before it is wrapped."""
        return Net(seed=1 if self.resume else 0)


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.down(torch.tanh(self.up(x)))
        return outputs


class Net(nn.Module):
    """A regression, with the loss among its outputs, as transformers' Trainer expects it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, TARGETS)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = inputs
        for block in self.blocks:
            x = block(x)
        outputs = self.head(x)
        return {"loss": (outputs.float() - labels).square().mean(), "logits": outputs}


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples that are equal in every process."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7))
        self.labels = self.inputs[:, :TARGETS] * 2 - self.inputs[:, TARGETS : 2 * TARGETS]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def be_launched(worker: int, workers: int) -> None:
    """Set what a launcher such as torchrun sets. The process group exists already."""
    # DeepSpeed asks for the address too, and does not connect to it.
    os.environ |= {
        "RANK": str(worker),
        "LOCAL_RANK": str(worker),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def deepspeed_configuration(parameters: str | None = None) -> dict[str, Any]:
    """DeepSpeed's configuration of these trainings, with parameters sent in a format, or gathered as they are."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 2},
        # DeepSpeed and Accelerate ignore the section.
        "powersgd": {"parameters": parameters},
    }


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, whole and by their names before the model was wrapped. Collective."""
    return {
        name.replace("_orig_mod.", "").removeprefix("module."): (
            parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        )
        .detach()
        .clone()
        for name, parameter in model.named_parameters()
    }


def loss(parameters: dict[str, Tensor] | None = None) -> float:
    """The loss over all samples, with these parameters or those that a training begins with."""
    net, data = Net(), Data()
    if parameters is not None:
        net.load_state_dict(parameters)
    with torch.no_grad():
        return float(net(data.inputs, data.labels)["loss"])


def batches(first: int = 0) -> list[dict[str, Tensor]]:
    """This worker's micro-batches in the order of a loop without a framework, from a step on."""
    data, worker, workers = Data(), dist.get_rank(), dist.get_world_size()
    count = STEPS * MICRO_BATCHES
    index = torch.arange(count * workers * BATCH).view(count, workers, BATCH)[:, worker] % SAMPLES
    found = [{"inputs": data.inputs[i], "labels": data.labels[i]} for i in index]
    return found[first * MICRO_BATCHES :]
