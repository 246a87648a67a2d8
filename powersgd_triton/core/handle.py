"""What every adapter's state and the Compressor offer, forwarded to the engine that they hold."""

from __future__ import annotations

from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.engine import Engine
from powersgd_triton.ops.step import LossScale, LossScaleSource
from powersgd_triton.ranks.report import RankReport


class Handle:
    """A user's hold on the compression of one model.

    Args:
        engine: what does the work.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def config(self) -> PowerSGDConfig:
        """What is compressed and how."""
        return self._engine.config

    @property
    def iteration(self) -> int:
        """Number of steps done. A step is what lies between two averages of the same gradients."""
        step = self._engine.step
        # Where an adapter cannot tell which bucket is the last one, a step stays open until the next one begins.
        return step.iteration + (bool(step.names) and step.last is None)

    def compression_stats(self) -> tuple[float, int, int]:
        """(rate, elements before, elements after) over all compressed steps so far; rate 0 before the first."""
        before, after = self._engine.numel
        return (before / after if after else 0.0, before, after)

    def report(self) -> RankReport:
        """Which tensors are compressed, at which rank, and the bytes of a step; ``print`` it.

        Where parameters are sharded and shards are compressed, the report is on this worker's shard.
        """
        engine = self._engine
        return RankReport.of(engine.layout(), engine.config, engine.plan.spectra)

    def attach(self, scaler: LossScaleSource) -> None:
        """Let the error follow the loss scale of a ``torch.amp.GradScaler``, or one that a function returns.

        Call it once, before training. Nothing waits for the device.

        Raises:
            TypeError: it is neither.
        """
        self._engine.step.loss_scale = LossScale(scaler)

    def error(self) -> dict[str, Tensor]:
        """{name: E as a matrix [n, m]}: what this worker has not sent yet, without loss scale; copies.

        Collective where the parameters are sharded. Empty without error feedback.
        """
        self._engine.finish()
        return self._engine.memory.error(self._engine.step)
