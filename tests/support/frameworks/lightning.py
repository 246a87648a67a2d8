"""Lightning's Trainer."""

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from powersgd_triton.integrations.lightning import PowerSGD
from tests.support.frameworks.job import DDP, FSDP1, HSDP, REPLICATE, SAMPLES, ZERO2, Data, Job, growing_scale, whole

CHECKPOINT = f"step={Job.SAVED}.ckpt"


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
        return torch.optim.AdamW(self.parameters(), **Job.ADAM)

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


class Scaled(MixedPrecision):  # type: ignore[misc,unused-ignore]
    """fp32 with a loss scale."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", growing_scale())

    def autocast_context_manager(self) -> Any:
        return contextlib.nullcontext()


class Loader:
    """This worker's micro-batches of one epoch. It is resumable, as Lightning wants it for resuming in mid-epoch."""

    def __init__(self) -> None:
        data, count, workers = Data(), Job.STEPS * Job.MICRO_BATCHES, dist.get_world_size()
        index = torch.arange(count * workers * Job.BATCH).view(count, workers, Job.BATCH)[:, dist.get_rank()] % SAMPLES
        self.batches = [{"inputs": data.inputs[i], "labels": data.labels[i]} for i in index]
        self.position = 0

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


def strategy_for(job: Job) -> Any:
    if job.wrapper == DDP:
        return DDPStrategy(process_group_backend="gloo")
    if job.wrapper == ZERO2:
        left_to_lightning = {"gradient_accumulation_steps", "gradient_clipping"}
        configuration = {key: value for key, value in job.deepspeed().items() if key not in left_to_lightning}
        return DeepSpeedStrategy(config=configuration, process_group_backend="gloo")
    if job.wrapper == FSDP1:
        return FSDPOnCPUs(process_group_backend="gloo", state_dict_type="sharded")
    return ModelParallelStrategy(dist.get_world_size(), 1, process_group_backend="gloo")


def trainer_for(job: Job, strategy: Any = None, **options: Any) -> Any:
    """Make the trainer that a user of this wrapper makes. ``options`` are further arguments, or replace these."""
    callbacks = options.pop("callbacks", [] if job.options is None else [PowerSGD(**job.options)])
    if job.save:
        callbacks = [*callbacks, ModelCheckpoint(job.folder, "{step}", every_n_train_steps=Job.SAVED, save_top_k=-1)]
    settings: dict[str, Any] = {
        "accelerator": PretendGPUs() if job.wrapper in (FSDP1, ZERO2) else "cpu",
        "devices": dist.get_world_size(),
        "strategy": strategy or strategy_for(job),
        "plugins": [LightningEnvironment(), *([Scaled()] if job.scaled else [])],
        "precision": "bf16-mixed" if job.bf16 else None,
        "max_steps": Job.STEPS,
        "accumulate_grad_batches": Job.MICRO_BATCHES,
        # Lightning refuses to clip by the norm with FSDP1.
        "gradient_clip_val": None if job.wrapper == FSDP1 else job.clip,
        "enable_checkpointing": job.save,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**settings, **options, "callbacks": callbacks})


def train(job: Job, strategy: Any = None) -> dict[str, Tensor]:
    """Return the parameters after the last step, whole and by their names in the network. Collective."""
    trainer = trainer_for(job, strategy)
    trainer.fit(Module(job), Loader(), ckpt_path=job.folder / CHECKPOINT if job.resume else None)
    model: Any = trainer.strategy.model
    with FullyShardedDataParallel.summon_full_params(model):
        return {name.removeprefix("net."): parameter for name, parameter in whole(model).items()}
