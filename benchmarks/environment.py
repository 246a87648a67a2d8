"""What a benchmark ran on: device, versions, commit, and the process group of one."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from powersgd_triton.ops.blocks import cache_bytes

ROOT = Path(__file__).resolve().parents[1]


def device_under_test() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def choose_interpreter() -> None:
    """Without a GPU the kernels run in Triton's interpreter. To be called before triton is imported."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


@contextlib.contextmanager
def process_group() -> Iterator[str]:
    """A default group of one worker, since hooks need some group; gives the backend's name.

    On CUDA it is NCCL's, or gloo's where NCCL cannot be started: then torch's hook sends its factors through the host.
    """
    backends = ["cpu:gloo,cuda:nccl", "nccl"] if torch.cuda.is_available() and dist.is_nccl_available() else []
    with tempfile.TemporaryDirectory() as folder:
        for number, backend in enumerate([*backends, "gloo"]):
            try:
                dist.init_process_group(
                    backend,
                    init_method=f"file://{folder}/{number}",
                    rank=0,
                    world_size=1,
                    timeout=datetime.timedelta(seconds=300),
                )
                if torch.cuda.is_available():
                    dist.all_reduce(torch.ones(1, device=device_under_test()))
                    torch.cuda.synchronize()
                break
            except RuntimeError as error:
                if dist.is_initialized():
                    dist.destroy_process_group()
                if backend == "gloo":
                    raise
                print(f"process group {backend}: {error}")
        try:
            yield backend
        finally:
            dist.destroy_process_group()


def describe_cpu() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1] for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": cpu.strip(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "caches": {f"L{level}": cache_bytes(level) for level in (2, 3)},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """The same and the device, "none" where it is the CPU."""
    found: dict[str, Any] = {"gpu": "none", **describe_cpu(), "triton": _version("triton")}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "driver": _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
            "cuda": torch.version.cuda or torch.version.hip,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "l2_mib": getattr(properties, "L2_cache_size", 0) / 2**20,
        }
    return found


def commit() -> str:
    """The checkout's commit; "unknown" without git."""
    return _command("git", "rev-parse", "HEAD")


def _command(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
