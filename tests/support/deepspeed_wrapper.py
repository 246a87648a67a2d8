"""DeepSpeed as a row of the table, at each ZeRO stage. See ``wrappers.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from powersgd_triton import PowerSGDConfig
from tests.support.deepspeed_training import Case, StubScaler, new_engine, prepare, whole_parameters
from tests.support.sharded_training import Gradients, Net
from tests.support.wrappers import Batch, Wrapped, loss_of


class InDeepSpeed(Wrapped):
    """An engine with SGD of the program. From stage 1 on it scales the loss, and so finds gradients that overflow.

    Parameters are gathered as DeepSpeed does: how they follow in differences is in ``deepspeed/test_parameters.py``.
    """

    def __init__(self, net: Net, config: PowerSGDConfig | None, *, stage: int, **options: Any) -> None:
        prepare(dist.get_rank(), dist.get_world_size())
        self.net, self.stage = net, stage
        section = None if config is None else {**config.to_dict(), "parameters": None}
        self.module = new_engine(Case("", stage, options, sgd=True), section, net)
        if stage:
            self.module.optimizer.loss_scaler = StubScaler()
        self.state = getattr(self.module, "powersgd", None)

    def step(self, batches: Sequence[Batch], *, sync_each: bool = False, clip: float | None = None) -> None:
        """DeepSpeed itself reduces in each micro-batch from stage 2 on; with its own means, once."""
        coalesced = self.stage > 0 and len(batches) > 1 and not sync_each
        with self.module.coalesce_grad_reduction() if coalesced else contextlib.nullcontext():
            for index, batch in enumerate(batches):
                if not coalesced:
                    self.module.set_gradient_accumulation_boundary(index == len(batches) - 1)
                self.module.backward(loss_of(self.module, batch) / len(batches))
                if not coalesced:
                    self.module.step()
        if coalesced:
            self.module.set_gradient_accumulation_boundary(True)
            self.module.step()

    def parameters(self) -> Gradients:
        return whole_parameters(self.module)

    def save(self, folder: str) -> None:
        self.module.save_checkpoint(folder, "saved")

    def load(self, folder: str) -> None:
        """DeepSpeed loads ZeRO's own files only on as many workers as wrote them."""
        written = len(list(Path(folder, "saved").glob("*_optim_states.pt")))
        if written in (0, dist.get_world_size()):
            self.module.load_checkpoint(folder, "saved")
        else:
            self.state.load(f"{folder}/saved")

