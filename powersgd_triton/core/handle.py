"""The methods that the state of every adapter and ``Compressor`` share. They forward to an engine."""

from __future__ import annotations

from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.ops.step import LossScale, LossScaleSource
from powersgd_triton.ranks.report import RankReport


class Handle:
    """Access to the compression of one model.

    Args:
        engine: Engine that averages the model's gradients.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def config(self) -> PowerSGDConfig:
        """Configuration of the compression."""
        return self._engine.config

    @property
    def iteration(self) -> int:
        """Number of finished steps. Each average of the same gradients is one step."""
        step = self._engine.step
        # If an adapter does not know which bucket is the last one, the step stays open until the next step begins.
        return step.iteration + (bool(step.keys) and step.last is None)

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before, elements after) over the steps so far. The rate is 0 before the first.

        The first ``start_iter`` steps, which average exactly, count in ``Compressor`` only. The states of the other
        adapters count from the first compressed step on.
        """
        before, after = self._engine.numel
        return (before / after if after else 0.0, before, after)

    def report(self) -> RankReport:
        """Return which tensors are compressed, at which rank, and the bytes of a step. ``print`` shows a table.

        If shards of parameters are compressed, the report describes this worker's shard.
        """
        engine = self._engine
        return RankReport.of(engine.layout(), engine.config, engine.plan.spectra)

    def attach(self, scaler: LossScaleSource) -> None:
        """Make the error follow the loss scale of a ``torch.amp.GradScaler``, or a scale that a function returns.

        Call it once, before training. It does not synchronize with the device.

        Raises:
            TypeError: ``scaler`` is neither a scaler nor a function.
        """
        self._engine.step.loss_scale = LossScale(scaler)

    def error(self) -> dict[str, Tensor]:
        """Return copies {name: E as a matrix [n, m]} of this worker's errors, without the loss scale.

        E is what this worker has not sent yet. The result is empty without error feedback. Collective if the parameters
        are sharded.
        """
        self._engine.finish()
        return self._engine.memory.error(self._engine.step)
