"""Whether the kernels can be used, and if not, why."""

import importlib
import importlib.util
import os
from collections.abc import Collection

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients that the kernels take."""
MAX_RANK = 256
OLDEST_TRITON = (3, 5)
"""Before, tl.dot refuses fp64, in which Gram matrices are summed."""
OLDEST_TRITON_ON_ROCM = (3, 9)
"""Triton 3.7 cannot compile this product for AMD's devices. 3.8 was not tried."""
DIRECT = (3, 6), (3, 9)
"""Oldest and newest version of Triton whose compiled kernels are launched without Triton's inspection of arguments."""


def triton_version() -> str:
    """Return the version of Triton."""
    # The installed distribution has another name for ROCm.
    return str(importlib.import_module("triton").__version__)


def why_inspected(version: str) -> str | None:
    """Return why this version of Triton inspects all arguments in each launch. None if it does not."""
    if torch.version.hip is not None:
        return "on ROCm"
    known = DIRECT[0] <= tuple(map(int, version.split(".")[:2])) <= DIRECT[1]
    return None if known else f"known versions are {'.'.join(map(str, DIRECT[0]))} to {'.'.join(map(str, DIRECT[1]))}"


def why_not_triton(device: torch.device, dtypes: Collection[torch.dtype] = (), rank: int = 1) -> str | None:
    """Return why the kernels cannot be used for gradients of these dtypes on ``device``. None if they can.

    On the CPU they run only in Triton's interpreter (TRITON_INTERPRET=1), for tests.
    """
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "the kernels run on CUDA and ROCm devices; these gradients are on the CPU"
    elif device.type != "cuda":
        return f"the kernels run on CUDA and ROCm devices; these gradients are on {device.type}"
    elif torch.version.hip is None and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"the kernels need compute capability 8.0; this device has {capability[0]}.{capability[1]}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    version = triton_version()
    oldest, where = (OLDEST_TRITON, "") if torch.version.hip is None else (OLDEST_TRITON_ON_ROCM, " on ROCm")
    if tuple(int(number) for number in version.split(".")[:2]) < oldest:
        return f"the kernels need triton {oldest[0]}.{oldest[1]} or newer{where}; this is {version}"
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"the kernels take float32, bfloat16 and float16 gradients; these are {dtype}"
    if len(set(dtypes)) > 1:
        return f"gradients of one bucket must be of one dtype; these are {', '.join(sorted(map(str, set(dtypes))))}"
    if rank > MAX_RANK:
        return f"the kernels take ranks up to {MAX_RANK}; this one is {rank}"
    return None
