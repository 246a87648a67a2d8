"""DistributedDataParallel: a drop-in replacement for torch's ``powerSGD_hook`` module. Change one import."""

from powersgd_triton.integrations.ddp.hooks import batched_powerSGD_hook, powerSGD_hook
from powersgd_triton.integrations.ddp.state import PowerSGDState

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
