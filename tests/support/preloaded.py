"""What workers import, sooner or later: imported once, in the process that all workers are copies of.

A worker that has to do it by itself spends up to two seconds on it, and most cases take less.
"""

import contextlib
import importlib
import os
import warnings

MODULES = [
    "torchft",
    "hypothesis",
    "pytest",
    "torch._dynamo",
    # FSDP2 and DeepSpeed import these when they are used first.
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.profiler._cupti_monitor",
    "powersgd_triton.integrations.deepspeed",
    "tests.support.deepspeed_training",
    "tests.support.device",
    "tests.support.local_steps",
    "tests.support.lockstep",
    "tests.support.properties",
    "tests.support.training",
]

# DeepSpeed chooses when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in MODULES:
        # DeepSpeed may be missing.
        with contextlib.suppress(ImportError):
            importlib.import_module(_name)
