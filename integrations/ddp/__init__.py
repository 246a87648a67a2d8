"""DistributedDataParallel: the communication hook of torch's ``powerSGD_hook`` module, by changing one import.

from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=0, module=model)
ddp_model.register_comm_hook(state, powerSGD_hook)
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.compressor import GRADIENT_DTYPES
from powersgd_triton.config import PowerSGDConfig, RankFunction
from powersgd_triton.core.loss_scale import LossScaleSource
from powersgd_triton.core.reducer import Reducer
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.core.state import State
from powersgd_triton.integrations.ddp.names import ParameterNames, memory_shape
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ranks.report import RankReport

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger(__name__)

SQUARE, REST = "bucket {}", "rest of bucket {}"
"""Names of the matrix that ``batched_powerSGD_hook`` makes of a bucket, and of what is left over."""


def _setting(field: str) -> Any:
    """A constructor argument under torch's name, read from the configuration."""
    return property(lambda state: getattr(state.config, field))


class PowerSGDState:
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
        matrix_approximation_rank: int | RankFunction = 1,
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
        # With a budget there is no rank; torch's default stands for one that was not given.
        budget = any(options.get(key) is not None for key in ("compression", "bytes_per_step"))
        planned = budget and matrix_approximation_rank == 1
        config = PowerSGDConfig.from_dict(
            {
                "rank": None if planned else matrix_approximation_rank,
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
        self.process_group = process_group
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.next_stats_report = 0
        names = ParameterNames(module)
        self._set_up(config, names)
        if config.planned:
            tensors = names.shapes()
            if tensors is None:
                raise ValueError(
                    "a budget (compression or bytes_per_step) is shared out over the whole model: "
                    "give PowerSGDState the model as module="
                )
            self._core.plan.begin(tensors)

    def _set_up(self, config: PowerSGDConfig, names: ParameterNames) -> None:
        self.config = config
        self._names = names
        self._core = State(config)
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._reducer: Reducer | None = None
        self._reducer_group: dist.ProcessGroup | None = None
        self._pickled_on: tuple[int, int] | None = None

    @property
    def iter(self) -> int:
        """Number of steps done."""
        return self._core.iteration

    @iter.setter
    def iter(self, value: int) -> None:
        self._core.iteration = value

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count the step when its last bucket is done, and say in the log when compression begins."""
        if bucket.is_last():
            self._prepare().end_step()
            if self.iter == self.config.start_iter:
                logger.info("Start to apply PowerSGD after %s iterations.", self.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """(rate, elements before, elements after) over all compressed steps so far; rate 0 before the first."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0, before, after)

    def report(self) -> RankReport:
        """Which parameters are compressed, at which rank, and the bytes of a step; ``print`` it.

        Without ``module=`` it has those whose gradients have come so far.
        """
        shapes = self._names.shapes()
        return self._core.report(self._names.seen() if shapes is None else shapes)

    def attach(self, scaler: LossScaleSource) -> None:
        """Let the error follow the loss scale of a ``torch.amp.GradScaler``, or one that a function returns.

        Call it once, before training. Nothing waits for the device.

        Raises:
            TypeError: it is neither.
        """
        self._core.attach(scaler)

    def error(self) -> dict[str, Tensor]:
        """{parameter's name: E [n, m]}: what this worker still owes, without loss scale; copies.

        Empty without error feedback.
        """
        return self._core.error()

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers: the mean error over workers, Q, the step. Collective: all workers call it.

        Any worker's result can be loaded on all workers of any world size: only the mean error enters the trajectory.
        Statistics are not part of it.
        """
        communicator = self._communicator()
        self._drop_foreign_errors(communicator)
        return {**self._core.state_dict(communicator.mean), "buckets": self._names.record()}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> LoadReport:
        """Go on from a saved state, of any world size, bucket size and rank.

        A parameter that is compressed no longer gets what it is owed with its next gradient.

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
        report = self._core.load_state_dict(state_dict, sizes, strict=strict, rename=rename)
        self._names.expect(record)
        self._pickled_on = None
        return report

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: everything but the process group, with this worker's own error. Prefer ``state_dict``."""
        if self.config.planned and not self._names.record():
            raise ValueError(
                "a PowerSGDState with a budget can be pickled after its first step, when it knows its buckets"
            )
        logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        communicator = self._communicator()
        return {
            "config": self.config,
            "core": self._core.state_dict(lambda error: error),
            "buckets": self._names.record(),
            "worker": self._pickled_on or (communicator.rank, communicator.world_size),
            "total_numel_before_compression": self.total_numel_before_compression,
            "total_numel_after_compression": self.total_numel_after_compression,
            "compression_stats_logging_frequency": self.compression_stats_logging_frequency,
            "next_stats_report": self.next_stats_report,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        logger.warning(
            "NOTE: Process group will be set to a default group (i.e. the world size). "
            "If a different group is desired, please set `self.process_group` after PowerSGD state is loaded."
        )
        self.process_group = None
        self._set_up(saved["config"], ParameterNames(None))
        self._names.expect(saved["buckets"])
        self._core.plan.begin(self._names.seen())
        self._core.load_state_dict(saved["core"], own=True)
        self._pickled_on = saved["worker"]
        for name in (
            "total_numel_before_compression",
            "total_numel_after_compression",
            "compression_stats_logging_frequency",
            "next_stats_report",
        ):
            setattr(self, name, saved[name])

    def _communicator(self) -> Communicator:
        return Communicator(self.process_group)

    def _prepare(self) -> Reducer:
        """The reducer for the current process group, made at the first bucket after the group was set."""
        if self._reducer is None or self._reducer_group is not self.process_group:
            communicator = self._communicator()
            self._drop_foreign_errors(communicator)
            self._reducer, self._reducer_group = Reducer(self._core, communicator), self.process_group
        return self._reducer

    def _drop_foreign_errors(self, communicator: Communicator) -> None:
        """Before a pickle's error is used for the first time: only the worker that pickled it may go on with it."""
        here = (communicator.rank, communicator.world_size)
        if self._pickled_on is not None and self._pickled_on != here:
            logger.warning(
                "This PowerSGDState was pickled by worker %s of %s and is used by worker %s of %s: its error is "
                "dropped, since it is only that worker's. Save state_dict() instead, which keeps the mean error.",
                *self._pickled_on,
                *here,
            )
            self._core.forget_errors()
        self._pickled_on = None

    def _layout(self, bucket: GradBucket) -> Layout:
        parameters = bucket.parameters()
        names = self._names.of(bucket.index(), parameters)
        if names not in self._layouts:
            shapes = zip(names, (memory_shape(parameter) for parameter in parameters), strict=True)
            self._layouts[names] = Layout.build(shapes, self.config)
        return self._core.plan.layout(self._layouts[names])

    def _square_layout(self, bucket: GradBucket) -> Layout:
        """A bucket as a matrix of ⌈√L⌉ columns, and the rest of its L elements."""
        numel = bucket.buffer().numel()
        names = (SQUARE.format(bucket.index()), REST.format(bucket.index()))
        layout = self._layouts.get(names)
        if layout is not None and layout.numel != numel and self.iter >= self.config.start_iter:
            raise RuntimeError(
                f"bucket {bucket.index()} had {layout.numel} elements and now has {numel}; batched_powerSGD_hook needs "
                "buckets that stay, powerSGD_hook does not"
            )
        if layout is None or layout.numel != numel:
            columns = math.isqrt(max(0, numel - 1)) + 1
            rows = numel // columns
            shapes = zip(names, ((rows, columns), (numel - rows * columns,)), strict=True)
            layout = self._layouts[names] = Layout.build(shapes, self.config)
        return layout

    def _count(self, layout: Layout, bucket: GradBucket) -> None:
        """Add a bucket to the statistics, and report them when they are due."""
        self.total_numel_before_compression += layout.numel
        self.total_numel_after_compression += layout.sent_numel(self.config, self.iter)
        if bucket.is_last() and self.iter >= self.next_stats_report:
            rate, before, after = self.compression_stats()
            logger.info(
                "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
                self.iter,
                before,
                after,
                rate,
            )
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients in compressed form; register it with ``ddp_model.register_comm_hook(state, …)``.

    On the CPU a bucket's Future may be completed while a later bucket is handled; the last bucket completes all. On
    CUDA everything is enqueued on a side stream and the host waits for nothing.

    Raises:
        TypeError: the bucket is not a dense floating-point tensor.
        RuntimeError: a loaded checkpoint does not fit the model, or a collective failed.
    """
    layout = state._layout(bucket)

    def gradients(buffer: Tensor) -> dict[str, Tensor]:  # noqa: ARG001
        return {
            segment.name: gradient.view(segment.shape)
            for segment, gradient in zip(layout.segments, bucket.gradients(), strict=True)
        }

    return _on_stream(state, bucket, layout, gradients)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as one square matrix, whatever tensors it holds: torch's hook of that name.

    Use ``powerSGD_hook`` unless a model consists of so many tiny tensors that its bucket has to be one matrix: rows
    that cut across tensors have no low-rank structure, and accuracy is much lower at ranks above 1 and at rank 1.
    Biases and norms are compressed with everything else.

    Of L elements, rows of ⌈√L⌉ make a matrix; where torch pads the last row with zeros, its elements are averaged
    exactly here, and nothing is copied. Error and basis belong to the bucket, so its boundaries must stay.

    Raises:
        TypeError: the bucket is not a dense floating-point tensor.
        ValueError: ``start_powerSGD_iter`` is below 2, before DDP has settled its buckets; or ranks are by parameter.
        RuntimeError: a bucket has another size than before, or a collective failed.
    """
    if state.config.start_iter < 2:
        raise ValueError(
            "batched_powerSGD_hook remembers errors by bucket, and DDP settles its buckets after the first iteration: "
            f"start_powerSGD_iter must be at least 2; got {state.config.start_iter}"
        )
    if state.config.planned or callable(state.config.rank):
        raise ValueError("batched_powerSGD_hook has one matrix a bucket: it needs one rank, not ranks by parameter")
    layout = state._square_layout(bucket)

    def gradients(buffer: Tensor) -> dict[str, Tensor]:
        return {
            segment.name: buffer[segment.offset : segment.offset + segment.numel].view(segment.shape)
            for segment in layout.segments
        }

    return _on_stream(state, bucket, layout, gradients)


def _on_stream(
    state: PowerSGDState, bucket: GradBucket, layout: Layout, gradients: Callable[[Tensor], dict[str, Tensor]]
) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket, on CUDA on a stream of its own."""
    buffer = bucket.buffer()
    if buffer.dtype not in GRADIENT_DTYPES or buffer.layout != torch.strided:
        raise TypeError(f"gradients must be dense and of a floating-point dtype; got {buffer.dtype}, {buffer.layout}")
    if not buffer.is_cuda:
        return _reduce(state, bucket, layout, gradients, torch.futures.Future())
    stream = state._streams.setdefault(buffer.device, torch.cuda.Stream(buffer.device))
    stream.wait_stream(torch.cuda.current_stream(buffer.device))
    buffer.record_stream(stream)
    with torch.cuda.stream(stream):
        return _reduce(state, bucket, layout, gradients, torch.futures.Future(devices=[buffer.device]))


def _reduce(
    state: PowerSGDState,
    bucket: GradBucket,
    layout: Layout,
    gradients: Callable[[Tensor], dict[str, Tensor]],
    future: torch.futures.Future[torch.Tensor],
) -> torch.futures.Future[torch.Tensor]:
    reducer, buffer = state._prepare(), bucket.buffer()
    if not reducer.checked:
        known = state._names.shapes() or {segment.name: segment.shape for segment in layout.segments}
        reducer.check(known, buffer.device)
    if bucket.index() == 0:
        reducer.begin_step()
    if state.iter < state.config.start_iter:
        reducer.average(buffer, last=bucket.is_last(), done=lambda: future.set_result(buffer))
    else:
        if state.iter == state.config.start_iter == bucket.index() == 0:
            logger.info("Start to apply PowerSGD after %s iterations.", state.iter)
        state._count(layout, bucket)
        reducer.reduce(layout, gradients(buffer), last=bucket.is_last(), done=lambda: future.set_result(buffer))
    state.maybe_increase_iter(bucket)
    return future
