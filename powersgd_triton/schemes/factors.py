"""The factors and error buffers of a bucket. New ones take over the errors and bases of their matrices by name."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.exchange import Collectives
from powersgd_triton.config import logger
from powersgd_triton.core.residuals import Matrix, Residuals
from powersgd_triton.core.saved_state import Parts, listing, viewed
from powersgd_triton.core.scheme import Task
from powersgd_triton.layout.layout import RowPartition
from powersgd_triton.ops.backend import Backend, Workspace
from powersgd_triton.ops.backends import make_backend, select_backend
from powersgd_triton.ops.blocks import together
from powersgd_triton.ops.bucket import Bucket, error_dtype
from powersgd_triton.ops.step import Step

_log_once = functools.cache(logger.info)


def new_backend(task: Task, workspace: Workspace) -> Backend:
    """Return a backend for a bucket, with the error buffers that are known of its matrices.

    Its factors are fp64 if a gradient is fp64, else fp32. If an allocation fails, no error and no basis is lost.
    RuntimeError: The loaded checkpoint lacks a matrix. ValueError: The configured backend cannot be used.
    """
    layout, config, residuals = task.layout, task.config, task.residuals
    worker, workers = task.communicator.share
    for segment in layout.compressed:
        saved = residuals.loaded.tensors
        if residuals.loaded.strict and segment.name not in saved and segment.name not in residuals.matrices:
            raise RuntimeError(
                f"the loaded state has no matrix named {segment.name!r}; it has {listing(saved)}. "
                "Was it saved for another model or with another configuration?"
            )
    dtypes = {gradient.dtype for gradient in task.gradients.values()}
    device = task.device
    rank = max((group.rank for group in layout.groups), default=1)
    name, reason = select_backend(config, device, dtypes, rank)
    _log_once("PowerSGD backend: %s (%s)", name, reason)
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    partition = RowPartition.build(layout, workers)
    errors = None
    if config.error_feedback:
        errors = _error_buffers(residuals, partition, worker, error_dtype(config, dtype), device)
    bucket = Bucket(layout, dtype, device, config, errors, partition, worker)
    return make_backend(name, bucket, workspace)


def _error_buffers(
    residuals: Residuals, partition: RowPartition, worker: int, dtype: torch.dtype, device: torch.device
) -> Parts:
    """Return the error buffers of a worker's rows, {name: [rows, m]}. They are zero if it did not have these rows."""
    segments = {segment.name: segment for segment in partition.layout.compressed}
    errors: Parts = {}
    for group in partition.groups(worker):
        known = {
            piece.name: matrix.error.to(dtype)
            for piece in group.segments
            if (matrix := residuals.matrices.get(piece.name)) is not None
            and matrix.error is not None
            and matrix.rows == partition.rows(segments[piece.name])
        }
        names = [piece.name for piece in group.segments]
        # Plain torch batches matrices that lie at equal distances, so a group's matrices move to one allocation.
        stay = device.type != "cpu" or (
            len(known) == len(names) and isinstance(together(list(known.values()), group.n, group.m), Tensor)
        )
        rows = [piece.rows for piece in group.segments if not (stay and piece.name in known)]
        zeros = iter(torch.zeros(sum(rows), group.m, dtype=dtype, device=device).split(rows))
        for name in names:
            error = known.get(name)
            if error is None:
                errors[name] = next(zeros)
            else:
                errors[name] = error if stay else next(zeros).copy_(error)
    return errors


def take_over(residuals: Residuals, backend: Backend, step: Step) -> None:
    """Let a new bucket hold its matrices: copy their known bases, and the parts of a loaded state."""
    bucket = backend.bucket
    backend.orthogonalize_bases(step, redraw=True)
    bases = {"basis": bucket.right(bucket.basis)}
    if bucket.config.algorithm == "alternating":
        bases["left_basis"] = bucket.left(bucket.P_hat)
    complete = True
    for position, group in enumerate(bucket.layout.groups):
        split = {key: views[position].split(group.counts) for key, views in bases.items()}
        for index, segment in enumerate(group.segments):
            own = {key: views[index].flatten(0, 1) for key, views in split.items()}
            error, rows = bucket.buffers.get(segment.name), bucket.partition.rows(segment)
            kept = functools.partial(residuals.plan.kept_columns, segment.name)
            earlier, loaded = residuals.matrices.get(segment.name), residuals.loaded.matrices.get(segment.name)
            loaded = loaded and viewed(loaded, segment.size)
            if earlier is not None:
                complete &= _fill(own, earlier.bases, kept)
                if bucket.M is not None and earlier.rows != rows:
                    moved = [] if earlier.error is None else [(earlier.first_row, earlier.error)]
                    residuals.moving[segment.name] = [*residuals.moving.get(segment.name, []), *moved]
            if loaded is not None:
                complete &= _fill(own, loaded, kept)
                if bucket.M is not None and len(rows) > 1:
                    residuals.moving[segment.name] = [(0, loaded["error"])]
                elif error is not None:
                    error.copy_(loaded["error"])
            if error is not None and len(rows) == 1 and (left := residuals.whole.take(segment.name)) is not None:
                # Of a matrix of which the worker from which this one heals has no basis.
                error.add_(left.to(error.device).view_as(error))
            # Last, so that a failed allocation loses nothing.
            residuals.matrices[segment.name] = Matrix(error, rows, rows[bucket.worker][0], own, bucket)
            residuals.loaded.matrices.pop(segment.name, None)
    if not complete:
        backend.orthogonalize_bases(step)
    residuals.enter(bucket.layout, bucket.message_P.device, factors=True)


def _fill(bases: Parts, earlier: Parts, kept_columns: Callable[[int, int], list[int]]) -> bool:
    """Copy the columns that fit from a matrix's earlier bases. Return whether no random column is left."""
    complete = True
    for key, basis in bases.items():
        saved = earlier.get(key, basis[:, :0])
        before, after = saved.shape[1], basis.shape[1]
        if after < before:
            saved = torch.stack([saved[:, k] for k in kept_columns(before, after)], dim=1)
        basis[:, : saved.shape[1]] = saved.to(basis)
        complete &= before >= after
    return complete


def move_rows(residuals: Residuals, bucket: Bucket, communicator: Communicator) -> Collectives:
    """Bring errors to the workers of this node that have their rows now."""
    for segment in bucket.layout.compressed:
        if segment.name not in residuals.moving:
            continue
        matrix, width = residuals.matrices[segment.name], bucket.message_P
        whole = torch.zeros(segment.rows, segment.m, dtype=width.dtype, device=width.device)
        for first, rows in residuals.moving[segment.name]:
            whole[first : first + len(rows)] += rows
        if communicator.inside is not None:
            yield communicator.inside.all_reduce(whole)
        if matrix.error is not None:
            matrix.error += whole[matrix.first_row :][: len(matrix.error)]
        del residuals.moving[segment.name]
