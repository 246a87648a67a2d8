"""Local steps (DiLoCo): workers train apart, and exchange in few bits what they have changed. See ``LocalSteps``."""

from powersgd_triton.integrations.local_steps.local_tensors import node_mpu
from powersgd_triton.integrations.local_steps.steps import LocalSteps

__all__ = ["LocalSteps", "node_mpu"]
