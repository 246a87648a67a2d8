"""Parameter names without the parts that wrappers add."""

from __future__ import annotations

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add, as in ``torch.distributed.checkpoint``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
