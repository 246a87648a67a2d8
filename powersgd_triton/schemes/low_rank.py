"""PowerSGD: averages of low rank (Vogels et al. 2019, Algorithms 1 and 2), and the other tensors exactly."""

from collections.abc import Generator

import torch

from powersgd_triton.comm.communicator import Communicator, Work
from powersgd_triton.comm.exchange import Collectives, share_of_sum, sum_over_workers
from powersgd_triton.core.scheme import Task
from powersgd_triton.layout.matrices import products
from powersgd_triton.ops.backend import Backend, Message, Workspace
from powersgd_triton.schemes.factors import move_rows, new_backend, take_over


class LowRank:
    """The scheme of gradients: M = G + E is sent as P̂ Q̄ᵀ."""

    def __init__(self) -> None:
        # Scratch memory of the kernels of all buckets.
        self._workspace = Workspace()

    def prepare(self, task: Task) -> Backend:
        """Return the backend of the bucket, with its factors and error buffers."""
        backend = new_backend(task, self._workspace)
        take_over(task.residuals, backend, task.step)
        return backend

    def average(self, task: Task) -> Generator[Work, None, Backend]:
        step, config, communicator = task.step, task.config, task.communicator
        backend: Backend = task.memory
        self._workspace.captured |= step.captured
        # A tensor that is no longer compressed is averaged exactly. Its remaining error is added to its gradient once.
        gradients = task.residuals.whole.add_remaining(task.layout, task.gradients, step)
        yield from move_rows(task.residuals, backend.bucket, communicator)
        # In a hierarchical all-reduce, each worker of a node compresses its rows of the node's sum.
        gradients = yield from share_of_sum(backend.bucket, gradients, communicator)
        if not config.warm_start:
            backend.orthogonalize_bases(step, redraw=True)
        for repetition in range(config.iterations):
            # The standard algorithm computes both products. The alternating algorithm computes one of them by turns.
            projects, backprojects = products(config, step.iteration, repetition)
            if projects:
                # M = G + E, P = M Q. The error buffer still holds the last step's M. Subtracting that step's P̂ Qᵀ and
                # adding G takes one pass over memory. Then P ← Σ P over the workers, with the bypass tensors.
                message = backend.project(gradients, step, repetition)
                yield from _sum(backend, message, communicator)
            if backprojects:
                # P̂ = orthogonalize(P), Q = Mᵀ P̂. All workers compute the same bits of P̂ from the same sum, so P̂ is
                # not sent. (In the alternating algorithm P̂ comes from the turn before, and this product compensates M.)
                # Then Q̄ = mean of Q. Each worker keeps its own Q: it has sent P̂ Qᵀ, so its error must lose P̂ Qᵀ.
                message = backend.backproject(gradients, step, repetition)
                yield from _sum(backend, message, communicator)
            # Orthonormalize Q̄ as the basis of the next projection. If a sum is not finite, which is the same on all
            # workers, M gets back what it had, the basis stays, and the step's verdict becomes 0.
            backend.commit(gradients, step, repetition)
        # Ĝ = P̂ Q̄ᵀ is not computed before it is written.
        return backend


def _sum(backend: Backend, message: Message, communicator: Communicator) -> Collectives:
    """Sum a message in place. With copies of its matrices elsewhere, it becomes NaN unless it is finite there too.

    Else an overflow in a tensor that differs there would drop a gradient from one of the copies' errors alone.
    """
    yield from sum_over_workers(backend, message, communicator)
    if communicator.copies.intersection(segment.name for segment in backend.bucket.layout.compressed):
        finite = message.content.isfinite().all().float()
        for others in communicator.others:
            others.minimum(finite)
        message.content.mul_(torch.where(finite > 0, 1.0, torch.nan))
