"""DistributedDataParallel: a drop-in replacement for torch's ``powerSGD_hook`` module. Change one import.

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=0, module=model)
ddp_model.register_comm_hook(state, powerSGD_hook)
"""

from powersgd_triton.integrations.ddp.hooks import batched_powerSGD_hook, powerSGD_hook
from powersgd_triton.integrations.ddp.state import PowerSGDState

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
