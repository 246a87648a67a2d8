"""The communication hooks, which DDP calls with each bucket of gradients."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.
import logging
import math
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from powersgd_triton.compressor import GRADIENT_DTYPES
from powersgd_triton.core.peers import Shapes
from powersgd_triton.integrations.ddp.names import memory_shape
from powersgd_triton.integrations.ddp.pickles import check_owner
from powersgd_triton.integrations.ddp.state import PowerSGDState
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.backend import Backend

logger = logging.getLogger("powersgd_triton.integrations.ddp")

SQUARE, REST = "bucket {}", "rest of bucket {}"
"""Names of the matrix that ``batched_powerSGD_hook`` makes of a bucket, and of the remaining elements."""


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients in compressed form. Register it with ``ddp_model.register_comm_hook(state, …)``.

    On the CPU, a bucket's Future may be completed while a later bucket is processed. The last bucket completes all
    Futures. On CUDA, everything is enqueued on a side stream, and the host does not wait.

    Raises:
        TypeError: The bucket is not a dense floating-point tensor.
        RuntimeError: A loaded checkpoint does not fit the model, or a collective failed.
    """
    parameters = bucket.parameters()

    def shapes() -> dict[str, tuple[int, ...]]:
        names = state._names.of(bucket.index(), parameters)
        return {name: memory_shape(parameter) for name, parameter in zip(names, parameters, strict=True)}

    def gradients(layout: Layout) -> dict[str, Tensor]:
        return {s.name: g.view(s.shape) for s, g in zip(layout.segments, bucket.gradients(), strict=True)}

    # The state keeps the parameters, so that no other tensor gets the address of one of them.
    return _average(state, bucket, tuple(map(id, parameters)), shapes, gradients)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a whole bucket as one square matrix, like torch's hook of the same name.

    Use ``powerSGD_hook`` unless the model consists of many tiny tensors. Rows that cut across tensors have no low-rank
    structure, so accuracy is much lower at every rank. Biases and norms are compressed with everything else.

    A bucket of L elements is viewed as a matrix with rows of ⌈√L⌉ elements. torch pads an incomplete last row with
    zeros. This hook averages it exactly instead, and copies nothing. Error and basis belong to the bucket, so its
    boundaries must not change.

    Raises:
        TypeError: The bucket is not a dense floating-point tensor.
        ValueError: ``start_powerSGD_iter`` is below 2, or ranks are given for each parameter.
        RuntimeError: A bucket's size has changed, or a collective failed.
    """
    if state.config.start_iter < 2:
        raise ValueError(
            "batched_powerSGD_hook keeps errors by bucket, and DDP rebuilds its buckets after the first iteration: "
            f"start_powerSGD_iter must be at least 2; got {state.config.start_iter}"
        )
    if state.config.planned or callable(state.config.rank):
        raise ValueError("batched_powerSGD_hook has one matrix a bucket: give one rank, not ranks for each parameter")
    buffer = bucket.buffer()
    index, numel = bucket.index(), buffer.numel()
    before = state._numels.get(index, numel)
    if before != numel and state.iter >= state.config.start_iter:
        raise RuntimeError(
            f"bucket {index} had {before} elements and now has {numel}; batched_powerSGD_hook needs buckets that stay "
            "the same, powerSGD_hook does not"
        )
    state._numels[index] = numel

    def shapes() -> dict[str, tuple[int, ...]]:
        columns = math.isqrt(max(0, numel - 1)) + 1
        rows = numel // columns
        return {SQUARE.format(index): (rows, columns), REST.format(index): (numel - rows * columns,)}

    def gradients(layout: Layout) -> dict[str, Tensor]:
        return {s.name: buffer[s.offset : s.offset + s.numel].view(s.shape) for s in layout.segments}

    return _average(state, bucket, (index, numel), shapes, gradients)


def _average(
    state: PowerSGDState,
    bucket: GradBucket,
    key: Hashable,
    shapes: Shapes,
    gradients: Callable[[Layout], dict[str, Tensor]],
) -> torch.futures.Future[torch.Tensor]:
    """Pass a bucket to the engine. ``gradients`` returns the gradients of a layout by name, as views of the buffer."""
    engine, buffer, last = state._engine, bucket.buffer(), bucket.is_last()
    if buffer.dtype not in GRADIENT_DTYPES or buffer.layout != torch.strided:
        raise TypeError(f"gradients must be dense and have a floating-point dtype; got {buffer.dtype}, {buffer.layout}")
    check_owner(engine)
    # DDP waits for the Future instead of the stream.
    with engine.memory.streams.on(buffer.device, join=False):
        # Created inside, because a Future with devices synchronizes with the stream on which its result is set.
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        if buffer.is_cuda:
            # The allocator must not reuse the buffer's memory before this stream is done with it.
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        layout = engine.begin(key, shapes, buffer.device, keys=(bucket.index(),), last=last)
        step, first = state.iter, bucket.index() == 0
        if not engine.compressing:
            engine.average_exactly(buffer, done=lambda: future.set_result(buffer))
        else:
            if step == state.config.start_iter == 0 and first:
                logger.info("Start to apply PowerSGD after %s iterations.", step)
            views = gradients(layout)

            def write(backend: Backend) -> None:
                backend.reconstruct(views, engine.step.overflow(buffer.device))
                future.set_result(buffer)

            engine.average(layout, views, write=write)
            if last and step >= state.next_stats_report:
                _log_statistics(state, step)
        if last and state.iter == state.config.start_iter:
            logger.info("Start to apply PowerSGD after %s iterations.", state.iter)
    return future


def _log_statistics(state: PowerSGDState, step: int) -> None:
    rate, before, after = state.compression_stats()
    logger.info(
        "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
        step,
        before,
        after,
        rate,
    )
    state.next_stats_report = step + state.compression_stats_logging_frequency
