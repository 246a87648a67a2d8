"""Train with Ray Train and torchft: python train_ray_torchft.py. One of three workers dies, and Ray replaces it."""

import os
import tempfile
from pathlib import Path

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # one machine: Ray listens on 127.0.0.1 only

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig
from train_torchft import ADDRESS, train

STEPS = 800


def loop(config: dict) -> None:
    """Train as one of the workers."""
    worker = ray.train.get_context().get_world_rank()
    path = Path(config["folder"], f"worker {worker}")
    lives = path.read_text() + "again, " if path.exists() else "started, "
    path.write_text(lives)
    lighthouse = f"http://{ADDRESS}:{os.environ['TORCHFT_LIGHTHOUSE'].rsplit(':', 1)[1]}"
    workers = train(worker, lighthouse, STEPS, dies=worker == 2 and lives == "started, ")
    path.write_text(f"{lives}step {STEPS} with {workers} workers")


if __name__ == "__main__":
    ray.init(
        num_cpus=3, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo"}},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            loop,
            train_loop_config={"folder": folder},
            torch_config=TorchftConfig(
                {"bind": f"{ADDRESS}:0", "min_replicas": 2, "heartbeat_timeout_ms": 1000}, backend="gloo"
            ),
            scaling_config=ScalingConfig(num_workers=3),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        ).fit()
        for path in sorted(Path(folder).glob("worker *")):
            print(f"{path.name}: {path.read_text()}")
    ray.shutdown()
