"""PowerSGD to be read: Algorithms 1 and 2 of Vogels et al. 2019 (arXiv:1905.13727) in plain torch.

torchrun --nproc-per-node 2 powersgd_simple.py

powersgd_triton computes the same averages (with ``explore_every=0``), in fewer passes over memory.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def orthonormal(A: Tensor) -> Tensor:
    """Return orthonormal columns that span those of A."""
    return torch.linalg.qr(A)[0]


def sum_over_workers(tensors: list[Tensor]) -> list[Tensor]:
    """Return the sum of each tensor over all workers, by one all-reduce."""
    message = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(message)
    parts = message.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


class SimplePowerSGD:
    """Averages gradients over all workers by factors of low rank.

    Attributes:
        errors: E of each matrix, [n, m]: what this worker has not sent yet. Other workers have other errors.
        bases: Q of each matrix, [m, rank], with orthonormal columns. They are equal on all workers.
    """

    def __init__(self, matrices: list[tuple[int, int]], rank: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.errors = [torch.zeros(n, m) for n, m in matrices]
        self.bases = [orthonormal(torch.randn(m, min(rank, n, m), generator=generator)) for n, m in matrices]

    def average(self, gradients: list[Tensor], vectors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return averages of this step's gradients, given the matrices and all other tensors, which are exact."""
        workers, count = dist.get_world_size(), len(gradients)
        # Error feedback (Algorithm 2): what earlier steps have not sent is added to the gradient.
        compensated = [G + E for G, E in zip(gradients, self.errors)]
        # One step of power iteration (Algorithm 1), from the last step's Q (warm start). The sum of all workers' M Q is
        # (sum of M) Q, so that factors can be summed by an all-reduce.
        P = [M @ Q for M, Q in zip(compensated, self.bases)]
        summed = sum_over_workers([*P, *vectors])
        P, vectors = [orthonormal(A) for A in summed[:count]], [vector / workers for vector in summed[count:]]
        Q = [M.T @ A for M, A in zip(compensated, P)]
        # This worker sends P Qᵀ with its own Q, which is what its error loses.
        self.errors = [M - A @ B.T for M, A, B in zip(compensated, P, Q)]
        Q = [B / workers for B in sum_over_workers(Q)]
        self.bases = [orthonormal(B) for B in Q]
        return [A @ B.T for A, B in zip(P, Q)], vectors


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    # The smallest sum over the workers of ‖X − A‖², with another A on each, is at the mean of A.
    A, X = torch.randn(60, 40), torch.zeros(60, 40)
    mean = sum_over_workers([A])[0] / dist.get_world_size()
    powersgd = SimplePowerSGD([(60, 40)], rank=2)
    for step in range(201):
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step}: distance to the minimum {(X - mean).norm() / mean.norm():.4f}")
        X -= 0.05 * powersgd.average([X - A], [])[0][0]
    dist.destroy_process_group()
