"""FSDP and DeepSpeed under Accelerate on CPUs with gloo, where it ignores them. For tests only; GPUs need none."""

from __future__ import annotations

import os

from accelerate.state import PartialState
from accelerate.utils import DistributedType


def pretend_gpus(*, deepspeed: bool = False) -> None:
    """Make Accelerate believe that the workers have GPUs. Call it before an ``Accelerator`` is made."""
    PartialState(cpu=True)
    shared = PartialState._shared_state
    shared["distributed_type"] = DistributedType.MULTI_GPU
    if deepspeed:
        import deepspeed as framework

        framework.init_distributed(dist_backend="gloo", verbose=False)
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        # Accelerate leaves DeepSpeed to GPUs.
        shared["_cpu"] = False
