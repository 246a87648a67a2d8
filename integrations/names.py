"""Parameters' names without what wrappers add to them."""

from __future__ import annotations

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it, as ``torch.distributed.checkpoint`` has it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
