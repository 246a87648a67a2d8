"""What wrappers add to a model, and to the names of its parameters."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add, as in ``torch.distributed.checkpoint``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def uncompiled(model: Any) -> Any:
    """Return a model without what ``torch.compile`` wraps around it."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


def is_deepspeed(model: object) -> bool:
    """Return whether a model is a DeepSpeed engine, without importing DeepSpeed."""
    engine: Any = sys.modules.get("deepspeed.runtime.engine")
    return engine is not None and isinstance(model, engine.DeepSpeedEngine)
