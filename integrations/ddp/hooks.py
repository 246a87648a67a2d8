"""The communication hooks, which DDP calls with each bucket of gradients."""

import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from powersgd_triton.core.buckets import BucketState, Shapes
from powersgd_triton.integrations.ddp.arguments import torchs_logger
from powersgd_triton.integrations.ddp.parameters import shape_of
from powersgd_triton.integrations.ddp.state import PowerSGDState
from powersgd_triton.integrations.ddp.views import views_of
from powersgd_triton.ops.gradients import as_real, check_dense, write_back

SQUARE, REST = "bucket {}", "rest of bucket {}"
"""Names of the matrix that ``batched_powerSGD_hook`` makes of a bucket, and of its remaining elements."""
FIRST = "first"
"""What the first bucket of each backward pass has, so that it ends an interrupted step."""


def powerSGD_hook(
    state: PowerSGDState,
    bucket: GradBucket,
    *others: object,  # noqa: ARG001 - what only FSDP1 gives, which is refused
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients in compressed form. Register it with ``ddp_model.register_comm_hook(state, …)``.

    A bucket's Future is completed when a later bucket is processed. The last bucket completes all.

    On CUDA, everything is enqueued on a side stream, and the host waits only to find out how gradients of four or five
    dimensions lie in the bucket: until they are not zero for the first time, and in every step if a parameter's memory
    format was changed after DDP had built its buckets.

    Raises:
        TypeError: The bucket is not a dense floating-point tensor, DDP uses its Python reducer without buckets, or the
            model is not DDP's.
        RuntimeError: A loaded checkpoint does not fit, a gradient is not in its bucket, or a collective failed.
    """
    _check(state, bucket)
    parameters = bucket.parameters()

    def shapes() -> dict[str, tuple[int, ...]]:
        names = state._names.of(bucket.index(), parameters)
        return dict(zip(names, map(shape_of, parameters), strict=True))

    # The state keeps the parameters, so that no other tensor gets the address of one of them.
    return _average(state, bucket, tuple(map(id, parameters)), shapes)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a whole bucket as one square matrix, like torch's hook of the same name.

    Use ``powerSGD_hook`` unless the model has many tiny tensors: rows across tensors are less accurate at every rank.

    A bucket of L elements is viewed as a matrix with rows of ⌈√L⌉ elements. An incomplete last row, which torch pads
    with zeros, is averaged exactly. Error and basis belong to the bucket, so its boundaries must not change. But DDP
    rebuilds its buckets after a wrapper's first backward pass: a bucket that is not that of the last step is averaged
    exactly.

    Raises:
        TypeError: The bucket is not a dense floating-point tensor, or DDP uses its Python reducer without buckets.
        ValueError: ``start_powerSGD_iter`` is below 2, or ranks are given for each parameter.
        RuntimeError: A bucket with an error has other parameters now, or a collective failed.
    """
    _check(state, bucket)
    if state.config.start_iter < 2:
        raise ValueError(
            "batched_powerSGD_hook keeps errors by bucket, and DDP rebuilds its buckets after the first iteration: "
            f"start_powerSGD_iter must be at least 2; got {state.config.start_iter}"
        )
    if state.config.planned or callable(state.config.rank):
        raise ValueError("batched_powerSGD_hook has one matrix a bucket: give one rank, not ranks for each parameter")
    index, numel, parameters = bucket.index(), as_real(bucket.buffer()).numel(), bucket.parameters()
    settled = _same(parameters, state._whole.get(index))
    state._whole[index] = parameters
    columns = math.isqrt(max(0, numel - 1)) + 1
    rows = numel // columns
    shapes = {SQUARE.format(index): (rows, columns), REST.format(index): (numel - rows * columns,)}
    if settled and state._engine.compressing:
        saved = state._residuals.loaded.tensors.get(SQUARE.format(index))
        other = saved is not None and (saved.n, saved.m) != (rows, columns)
        if other or not _same(parameters, state._compressed.setdefault(index, parameters)):
            raise RuntimeError(
                f"bucket {index} has other parameters than those of its error, now {numel} elements: use "
                "powerSGD_hook, or the same model and bucket_cap_mb"
            )
    return _average(state, bucket, (index, numel), lambda: shapes, whole=True, exact=not settled)


def _same(parameters: Sequence[Tensor], others: Sequence[Tensor] | None) -> bool:
    """Return whether these are the same tensors in the same order."""
    return others is not None and len(parameters) == len(others) and all(map(operator.is_, parameters, others))


def _check(state: object, bucket: Any) -> None:
    """Refuse other states and gradients, also what DDP's Python reducer gives: pairs of gradient and parameter."""
    if isinstance(bucket, Tensor):
        raise TypeError(
            "this powerSGD_hook is for DistributedDataParallel. For FullyShardedDataParallel, import PowerSGDState and "
            "powerSGD_hook from powersgd_triton.integrations.fsdp1"
        )
    if not isinstance(state, PowerSGDState):
        got = f"got one of {type(state).__module__}: take state and hook of one module"
        raise TypeError(f"expected a PowerSGDState of powersgd_triton.integrations.ddp; {got}")
    # It does not say which parameter is a step's last, and leaves out those without a gradient on this worker.
    if isinstance(bucket, tuple):
        raise TypeError(
            'with torch._dynamo.config.optimize_ddp = "python_reducer", DDP gives communication hooks single gradients '
            "instead of buckets, and does not say where a step ends. Set torch._dynamo.config.optimize_ddp = "
            '"ddp_optimizer" before DistributedDataParallel wraps the model; torch.compile works with it'
        )
    check_dense(f"bucket {bucket.index()}", bucket.buffer())


def _average(
    state: PowerSGDState, bucket: GradBucket, key: Hashable, shapes: Shapes, *, whole: bool = False, exact: bool = False
) -> torch.futures.Future[torch.Tensor]:
    """Pass a bucket to the engine, as its parameters or as a ``whole``. ``exact`` averages it exactly in this step."""
    engine, given, parameters = state._engine, bucket.buffer(), bucket.parameters()
    last, keys = bucket.is_last(), set[Hashable](map(id, parameters))
    again = False
    if bucket.index() == 0:
        # In the first step of a static graph, DDP says of all buckets, one for each dtype, that they are the first one.
        # Those of another backward pass follow one that was interrupted.
        before, state._pass = state._pass, torch._C._current_graph_task_id()
        again = not last and before == state._pass and bool(state._step.keys) and state._step.keys.isdisjoint(keys)
        keys |= set() if again else {FIRST}
    # Of complex parameters, older versions of torch give complex ones.
    buffer = as_real(given)
    state._check_owner()
    # Before the engine's stream waits for the gradients, so that ``begin`` can enqueue what does not need them.
    begun = engine.begin(key, shapes, buffer.device, keys=keys, last=None if again else last)
    # DDP waits for the Future instead of the stream.
    with state._residuals.streams.on(buffer.device, join=False):
        # Created inside, because a Future with devices synchronizes with the stream on which its result is set.
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        if buffer.is_cuda:
            # The allocator must not reuse the buffer's memory before this stream is done with it.
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        strides = [parameter.stride() for parameter in parameters]
        # (name, shape, strides, offset) of gradients that an earlier step found contiguous, if that still holds.
        forms = begun.known[1] if begun.known is not None and begun.known[0] == strides else None
        views = views_of(buffer, parameters, state._places) if forms is None else []

        def finish() -> None:
            for held, read in views:
                if read is not held:
                    read.copy_(held.clone())
            future.set_result(given)

        step = state.iter
        if step == state.config.start_iter and bucket.index() == 0:
            torchs_logger.info("Start to apply PowerSGD after %s iterations.", step)
        if exact or not engine.compressing:
            engine.average_exactly(buffer, done=finish)
        else:
            held, segments, start = [place for place, _ in views], begun.layout.segments, buffer.storage_offset()
            if forms is not None:
                gradients = {name: buffer.as_strided(shape, form, start + at) for name, shape, form, at in forms}
                held = list(gradients.values())
            if state._unused is not None:
                state._unused.note_views(held, parameters)
                if last:
                    state._unused.end_pass()
            if whole:
                held = [buffer[s.span].view(s.shape) for s in segments]
            if forms is None:
                # This copies a gradient that is not contiguous, such as one in channels_last.
                gradients = {s.name: place.contiguous().view(s.shape) for s, place in zip(segments, held, strict=True)}
                plain = not whole and all(place is read and place.is_contiguous() for place, read in views)
                if plain and all(state._places[parameter].final for parameter in parameters):
                    begun.known = strides, [(s.name, s.shape, gradients[s.name].stride(), s.offset) for s in segments]

            def done() -> None:
                if forms is None:
                    for gradient, place in zip(gradients.values(), held, strict=True):
                        write_back(gradient, place)
                finish()

            engine.average(begun, gradients, done=done, join=not again)
            _log(state, begun, bucket, step)
    return future


def _log(state: PowerSGDState, begun: BucketState, bucket: GradBucket, step: int) -> None:
    """Log what torch's hook logs: a bucket's memory when it is compressed for the first time, and statistics."""
    index, layout = bucket.index(), state._layout(begun.layout)
    new = index not in state._logged
    state._logged.add(index)
    if new and state.config.error_feedback:
        length = sum(segment.numel for segment in layout.compressed)
        torchs_logger.info("A zero tensor of length %s that represents local error is created.", length)
    if bucket.is_last() and step >= state.next_stats_report:
        rate, before, after = state.compression_stats()
        message = "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s"
        torchs_logger.info(message, step, before, after, rate)
        state.next_stats_report = step + state.compression_stats_logging_frequency
    if new and state.config.warm_start:
        square = layout.segments[0]
        if square.name == SQUARE.format(index):
            message = "Initializing low-rank tensors P and Q, each of which has a shape of %s x %s."
            torchs_logger.info(message, square.m, square.rank)
        else:
            message = "Allocating contiguous memory of length %s for Ps, and of length %s for Qs, respectively."
            torchs_logger.info(message, layout.p_numel, layout.q_numel)
