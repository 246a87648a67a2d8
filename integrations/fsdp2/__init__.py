"""FSDP2 (``fully_shard``): compression across replicas (HSDP), or across the workers that hold shards (1-D)."""

from powersgd_triton.integrations.fsdp2.apply import DividedState, apply_powersgd
from powersgd_triton.integrations.fsdp2.states import FullShardState, HybridShardState

__all__ = ["DividedState", "FullShardState", "HybridShardState", "apply_powersgd"]
