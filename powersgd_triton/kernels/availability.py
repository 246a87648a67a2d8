"""Whether the kernels can be used, and if not, why."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Collection

import torch

from powersgd_triton.kernels.table import MAX_RANK

OLDEST_TRITON = (3, 5)
"""Before, tl.dot refuses fp64, in which Gram matrices are summed."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_triton(device: torch.device, dtypes: Collection[torch.dtype] = (), rank: int = 1) -> str | None:
    """Reason why the kernels cannot be used for gradients of these dtypes on ``device``; None where they can.

    On the CPU they run only in Triton's interpreter (TRITON_INTERPRET=1), for tests.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "the kernels run on CUDA and ROCm devices; these gradients are on the CPU"
    elif device.type != "cuda":
        return f"the kernels run on CUDA and ROCm devices; these gradients are on {device.type}"
    elif torch.version.hip is None and (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"the kernels need compute capability 8.0; this device has {capability[0]}.{capability[1]}"
    # Not asked of the installed distribution, whose name is another one for ROCm.
    version: str = importlib.import_module("triton").__version__
    if tuple(int(number) for number in version.split(".")[:2]) < OLDEST_TRITON:
        return f"the kernels need triton {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or newer; this is {version}"
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"the kernels take float32, bfloat16 and float16 gradients; these are {dtype}"
    if len(set(dtypes)) > 1:
        return f"gradients of one bucket must be of one dtype; these are {', '.join(sorted(map(str, set(dtypes))))}"
    if rank > MAX_RANK:
        return f"the kernels take ranks up to {MAX_RANK}; this one is {rank}"
    return None
