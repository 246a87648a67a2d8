"""The state of DDP's hooks: torch's class of that name, with its arguments."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.config import PowerSGDConfig, RankFunction
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.handle import Handle
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.integrations.ddp import pickles
from powersgd_triton.integrations.ddp.names import ParameterNames
from powersgd_triton.layout.layout import Layout

logger = logging.getLogger("powersgd_triton.integrations.ddp")


class _TorchsDefault(int):
    """torch's default rank, which can be told apart from the same number given beside a budget."""


def _setting(field: str) -> Any:
    """A constructor argument under torch's name, read from the configuration."""
    return property(lambda state: getattr(state.config, field))


class PowerSGDState(Handle):
    """Hyperparameters and memory of one model's compression: torch's class of that name, with its arguments.

    Differences from ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``:

    * ``start_powerSGD_iter`` may be 0 or 1: what is remembered belongs to parameters, not to buckets, and survives
      DDP's rebuilding of the buckets. Hyperparameters cannot be assigned after construction.
    * Any number of buckets works on gloo: no collective is issued from a Future's callback.
    * Two all-reduces a bucket instead of three; tensors that are not compressed are averaged exactly and have no error.
    * Factors are fp32 (fp64 for fp64 gradients) whatever the gradients' dtype, and so is the error buffer, which has
      the compressed tensors only.
    * A non-finite gradient reaches the optimizer as non-finite, and is forgotten afterwards.
    * ``orthogonalization_epsilon`` is not added to norms: a column of which at most that share of its norm (and at
      least 2⁻²²) is left after projection is replaced by a random direction. 0 is safe for every input.
    * Each worker's error is its own, M − P̂ Qᵀ with its own Q; averaged over workers it is torch's.
    * ``state_dict()`` and ``load_state_dict()``; and there are no ``error_dict``, ``p_memory_dict``, ``q_memory_dict``,
      ``rng``. torch's global random state is not touched.

    Args:
        process_group: group to average over; None for the default group. Can be set between steps.
        matrix_approximation_rank: columns of the factors, or a function (name, shape) → rank. Left out where
            ``compression=`` or ``bytes_per_step=`` is among the options.
        start_powerSGD_iter: number of first steps with exact averaging.
        min_compression_rate: compress a tensor only if it shrinks by more than this factor.
        use_error_feedback: add what a step lost to the next gradient.
        warm_start: start from the last step's Q.
        orthogonalization_epsilon: see above.
        random_seed: seed of the first Q and of replacement directions.
        compression_stats_logging_frequency: steps between two log messages with statistics.
        batch_tensors_with_same_shape: treat tensors of the same shape in batched operations; nothing is copied for it.
        module: the model, to key what is remembered by parameters' names. Without it parameters are numbered in the
            order of the first backward pass, and a checkpoint fits only the same bucket boundaries.
        options: further fields of ``PowerSGDConfig``.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range.
    """

    matrix_approximation_rank = _setting("rank")
    start_powerSGD_iter = _setting("start_iter")
    min_compression_rate = _setting("min_compression_rate")
    use_error_feedback = _setting("error_feedback")
    warm_start = _setting("warm_start")
    orthogonalization_epsilon = _setting("orthogonalization_epsilon")
    batch_tensors_with_same_shape = _setting("batch_by_shape")

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int | RankFunction = _TorchsDefault(1),  # noqa: B008
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        *,
        module: nn.Module | None = None,
        **options: Any,
    ) -> None:
        budget = any(options.get(key) is not None for key in ("compression", "bytes_per_step"))
        rank: int | RankFunction | None = matrix_approximation_rank
        if isinstance(rank, _TorchsDefault):
            rank = None if budget else int(rank)
        config = PowerSGDConfig.from_dict(
            {
                "rank": rank,
                "start_iter": start_powerSGD_iter,
                "min_compression_rate": min_compression_rate,
                "error_feedback": use_error_feedback,
                "warm_start": warm_start,
                "orthogonalization_epsilon": orthogonalization_epsilon,
                "seed": random_seed,
                "batch_by_shape": batch_tensors_with_same_shape,
                **options,
            }
        )
        logger.info(
            "PowerSGD config: matrix_approximation_rank = %s; start_powerSGD_iter = %s; "
            "min_compression_rate = %s; orthogonalization_epsilon = %s; use_error_feedback = %s; warm_start = %s; "
            "random_seed = %s; compression_stats_logging_frequency = %s; batch_tensors_with_same_shape = %s",
            config.rank,
            start_powerSGD_iter,
            min_compression_rate,
            orthogonalization_epsilon,
            use_error_feedback,
            warm_start,
            random_seed,
            compression_stats_logging_frequency,
            batch_tensors_with_same_shape,
        )
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.next_stats_report = 0
        names = ParameterNames(module)
        if config.planned and names.shapes() is None:
            raise ValueError(
                "a budget (compression or bytes_per_step) is shared out over the whole model: "
                "give PowerSGDState the model as module="
            )
        self._set_up(config, names, process_group)

    def _set_up(self, config: PowerSGDConfig, names: ParameterNames, process_group: dist.ProcessGroup | None) -> None:
        self._names = names
        self._layouts: dict[tuple[str, ...], Layout] = {}
        super().__init__(Engine(config, Communicator(process_group), self._tensors))
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def _tensors(self) -> dict[str, tuple[int, ...]]:
        """The parameters that are known; of ``batched_powerSGD_hook`` the matrices that it makes of buckets."""
        squares = {s.name: s.shape for layout in self._layouts.values() for s in layout.segments}
        return self._names.known() or squares

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group to average over; None for the default group. Can be set between steps."""
        return self._engine.communicator.group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        if group is not self.process_group:
            self._engine.connect(Communicator(group))

    @property
    def iter(self) -> int:
        """Number of steps done."""
        return self._engine.step.iteration

    @iter.setter
    def iter(self, value: int) -> None:
        self._engine.step.iteration = value

    @property
    def total_numel_before_compression(self) -> int:
        """Elements of the gradients that were compressed so far."""
        return self._engine.numel[0]

    @property
    def total_numel_after_compression(self) -> int:
        """Elements that were sent for them."""
        return self._engine.numel[1]

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers: the mean error over workers, Q, the step. Collective: all workers call it.

        Any worker's result can be loaded on all workers of any world size: only the mean error enters the trajectory.
        Statistics are not part of it.
        """
        pickles.check_owner(self._engine)
        return {**self._engine.state_dict(), "buckets": self._names.record()}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> LoadReport:
        """Go on from a saved state, of any world size, bucket size and rank.

        When a parameter is no longer compressed, its remaining error is added to its next gradient.

        Args:
            state_dict: from ``state_dict``.
            strict: refuse a state that has errors of other parameters, or lacks matrices of these. Otherwise what fits
                is taken over.
            rename: {parameter's name in the state: name in the module given as ``module=``}.

        Returns:
            What was and what was not used. Without ``module=`` the rest is matched in the first step.

        Raises:
            ValueError: it is of another model or format. Nothing was changed.
        """
        if not isinstance(state_dict, Mapping) or "buckets" not in state_dict:
            raise ValueError("expected what state_dict() of a PowerSGDState gave; the key 'buckets' is missing")
        record = self._names.check(state_dict["buckets"], strict=strict, rename=rename)
        # Without a record it is batched_powerSGD_hook's, which knows no parameters.
        sizes = self._names.sizes(self.config) if record or not state_dict.get("matrices") else None
        report = self._engine.load_state_dict(state_dict, sizes, strict=strict, rename=rename)
        self._names.expect(record)
        return report

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: everything but the process group, with this worker's own error. Prefer ``state_dict``."""
        return {
            **pickles.saved(self._engine, self._names.record()),
            "compression_stats_logging_frequency": self.compression_stats_logging_frequency,
            "next_stats_report": self.next_stats_report,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        names = ParameterNames(None)
        names.expect(saved["buckets"])
        self._set_up(saved["config"], names, None)
        pickles.restore(self._engine, saved)
        self.compression_stats_logging_frequency = saved["compression_stats_logging_frequency"]
        self.next_stats_report = saved["next_stats_report"]


# The public name, which pickles keep.
PowerSGDState.__module__ = "powersgd_triton.integrations.ddp"
