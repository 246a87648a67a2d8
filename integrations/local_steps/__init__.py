"""Local steps: workers train apart, and exchange in few bits what they have changed.

from powersgd_triton.integrations.local_steps import LocalSteps
sync = LocalSteps(model, PowerSGDConfig(codes="ternary"), every=10)
for batch in batches:
    ...
    optimizer.step()
    sync.step()
sync.finish()
"""

from powersgd_triton.integrations.local_steps.local_tensors import node_mpu
from powersgd_triton.integrations.local_steps.steps import LocalSteps

__all__ = ["LocalSteps", "node_mpu"]
