"""Train with Ray Train: python train_ray.py. One of two workers is killed, and Ray starts both from a checkpoint."""

import os
import signal
import tempfile
from pathlib import Path

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # one machine: Ray listens on 127.0.0.1 only

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

from powersgd_triton import attach

STEPS, EVERY = 60, 20


def train(config: dict) -> None:
    """Train as one of the workers, from the last checkpoint on."""
    worker = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    powersgd = attach(model, rank=4)
    begin = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            powersgd.load(folder)  # on all workers
            state = torch.load(Path(folder, "model.pt"))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    for step in range(begin, STEPS):
        if begin == 0 and worker == 1 and step == config["fatal"]:
            ray.train.get_all_reported_checkpoints()  # returns when Ray has the last one
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(2 * step + worker)
        inputs = torch.randn(16, 32)
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                powersgd.save(folder)  # on all workers; the first one writes
                if worker == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, Path(folder, "model.pt"))
                saved = Checkpoint.from_directory(folder) if worker == 0 else None
                ray.train.report({"begin": begin, "loss": loss.item()}, checkpoint=saved)


if __name__ == "__main__":
    local = {"env_vars": {"GLOO_SOCKET_IFNAME": "lo"}}
    ray.init(
        num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False,
        runtime_env=local,
    )  # fmt: skip
    for fatal in (None, 50):
        with tempfile.TemporaryDirectory() as folder:
            trainer = TorchTrainer(
                train,
                train_loop_config={"fatal": fatal},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
            )
            last = trainer.fit().metrics
        print(f"killed before step {fatal}: from step {last['begin']} to {STEPS}, loss {last['loss']:.6f}")
    ray.shutdown()
