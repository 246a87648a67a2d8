"""Lightning's Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from powersgd_triton.integrations.lightning import PowerSGD
from tests.support.frameworks.job import (
    ADAM,
    CLIP,
    DDP,
    FSDP1,
    HSDP,
    MICRO_BATCHES,
    REPLICATE,
    SAVED,
    STEPS,
    ZERO2,
    Job,
    batches,
    deepspeed_configuration,
    whole,
)

CHECKPOINT = f"step={SAVED}.ckpt"


class PretendGPUs(CUDAAccelerator):  # type: ignore[misc,unused-ignore]
    """CPUs for the strategies that Lightning leaves to GPUs. For tests with gloo only; GPUs need none."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def setup(self, trainer: Any) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def is_available() -> bool:
        return True


class FSDPOnCPUs(FSDPStrategy):  # type: ignore[misc,unused-ignore]
    """FSDP1 needs the device by name on CPUs. Otherwise as Lightning wraps a model."""

    def _setup_model(self, model: Any) -> Any:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            return super()._setup_model(model)
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


class Module(pl.LightningModule):  # type: ignore[misc,unused-ignore]
    """The regression as a user of Lightning writes it."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.net: Any = job.net()
        self.sharded = False

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.net(**batch)["loss"]
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.net(**batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **ADAM)

    def configure_model(self) -> None:
        # Lightning calls this in each fit() and validate().
        if self.job.wrapper in (DDP, FSDP1, ZERO2) or self.sharded:
            return
        self.sharded = True
        mesh = self.device_mesh["data_parallel"]
        if self.job.wrapper == HSDP:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        shard: Any = replicate if self.job.wrapper == REPLICATE else fully_shard
        for block in self.net.blocks:
            shard(block, mesh=mesh)
        shard(self.net, mesh=mesh)


def strategy_for(job: Job) -> Any:
    """The strategy of a wrapper."""
    if job.wrapper == DDP:
        return DDPStrategy(process_group_backend="gloo")
    if job.wrapper == ZERO2:
        os.environ["DS_ACCELERATOR"] = "cpu"
        left_to_lightning = {"gradient_accumulation_steps", "gradient_clipping"}
        configuration = {key: v for key, v in deepspeed_configuration().items() if key not in left_to_lightning}
        return DeepSpeedStrategy(config=configuration, process_group_backend="gloo")
    if job.wrapper == FSDP1:
        return FSDPOnCPUs(process_group_backend="gloo", state_dict_type="sharded")
    return ModelParallelStrategy(dist.get_world_size(), 1, process_group_backend="gloo")


def trainer_for(job: Job, strategy: Any = None, **options: Any) -> pl.Trainer:
    """Make the trainer that a user of this wrapper makes. ``options`` are further arguments, or replace these."""
    callbacks = options.pop("callbacks", [] if job.options is None else [PowerSGD(**job.options)])
    if job.save:
        callbacks = [*callbacks, ModelCheckpoint(job.folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1)]
    settings: dict[str, Any] = {
        "accelerator": PretendGPUs() if job.wrapper in (FSDP1, ZERO2) else "cpu",
        "devices": dist.get_world_size(),
        "strategy": strategy or strategy_for(job),
        "plugins": [LightningEnvironment()],
        "precision": "bf16-mixed" if job.bf16 else "32-true",
        "max_steps": STEPS,
        "accumulate_grad_batches": MICRO_BATCHES,
        # Lightning refuses to clip by the norm with FSDP1.
        "gradient_clip_val": None if job.wrapper == FSDP1 else CLIP,
        "enable_checkpointing": job.save,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**settings, **options, "callbacks": callbacks})


class Loader:
    """This worker's micro-batches of one epoch. It is resumable, as Lightning wants it for resuming in mid-epoch."""

    def __init__(self) -> None:
        self.batches, self.position = batches(), 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


def train(job: Job) -> dict[str, Tensor]:
    """Return the parameters after the last step."""
    module, trainer = Module(job), trainer_for(job)
    trainer.fit(module, Loader(), ckpt_path=job.folder / CHECKPOINT if job.resume else None)
    return parameters(trainer)


def parameters(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Copies of all parameters, whole and by their names in the network. Collective."""
    model: Any = trainer.strategy.model
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            found = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in whole(model).items()}
    else:
        found = whole(model)
    return {name.removeprefix("module.").removeprefix("net."): parameter for name, parameter in found.items()}
