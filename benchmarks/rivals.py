"""Other methods that send little, each written from its paper: DiLoCo, SparseLoCo and DeMo.

They send real messages, packed as tightly as a message of fixed size allows, so that their bytes can be counted at the
collectives. For this comparison only: they know no checkpoints, no dead peers and no CUDA streams.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.packing import TopK, float_codes, from_float_codes

SIDE = 64
"""Matrices are cut into chunks of SIDE × SIDE entries."""
BLOCK = 128
"""Entries that share a scale in floats of 4 bits."""

Mean = Callable[[list[Tensor]], list[Tensor]]
"""This worker's tensors → what the workers agree on as their mean."""


class Rounds:
    """Local steps: every ``every`` steps the workers send how far they have come, and go on from the same parameters.

    The mean change is the gradient of an outer SGD optimizer (Nesterov, if it has momentum), as in DiLoCo (Douillard et
    al. 2023, arXiv:2311.08105) and SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706).

    Args:
        model: This worker's model. Its parameters are the same on all workers.
        every: Number of steps of a round.
        mean: Sends the changes.
        rate, momentum: Of the outer optimizer.
    """

    def __init__(self, model: nn.Module, every: int, mean: Mean, rate: float, momentum: float = 0.0) -> None:
        self._own = list(model.parameters())
        self._shared = [parameter.detach().clone() for parameter in self._own]
        self._every, self._mean = every, mean
        self._outer = torch.optim.SGD(self._shared, lr=rate, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def __call__(self, steps: int) -> None:
        """Exchange if this number of steps ends a round."""
        if steps % self._every:
            return
        changes = [shared - own for shared, own in zip(self._shared, self._own, strict=True)]
        for shared, change in zip(self._shared, self._mean(changes), strict=True):
            shared.grad = change
        self._outer.step()
        for shared, own in zip(self._shared, self._own, strict=True):
            own.copy_(shared)


def exact_mean(tensors: list[Tensor]) -> list[Tensor]:
    """Return the mean over the workers, by one all-reduce in fp32."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    return _split(flat / dist.get_world_size(), tensors)


def mean_in_4_bits(tensors: list[Tensor]) -> list[Tensor]:
    """Return the mean of what the workers send: floats of 4 bits, without error feedback, summed in fp32.

    As in Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512), with a sign, three bits of an exponent and a scale
    for each block of entries.
    """
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    numel = len(flat)
    blocks = nn.functional.pad(flat, (0, -numel % BLOCK)).view(-1, BLOCK)
    messages = _gather(float_codes(blocks))
    total = torch.stack([from_float_codes(message, blocks.shape) for message in messages]).mean(0)
    return _split(total.view(-1)[:numel], tensors)


class SparseMean:
    """The k largest of each chunk of 4096 entries with error feedback, as SparseLoCo sends them.

    What is not sent decays and is sent later. All vectors are chunks of 4096 entries too.

    Args:
        k: Entries of a chunk that are sent, in 2 bits and their indices.
        decay: Of what was not sent.
        senders: Whether an entry is the mean over those workers that have sent it, as in the released program, and not
            over all. That program multiplies changes by the outer rate before the error is added to them, which is the
            same at a constant rate.
    """

    def __init__(self, k: int, decay: float, *, senders: bool = False) -> None:
        self._message = TopK(SIDE * SIDE, k, two_bits=True)
        self._decay, self._senders = decay, senders
        self._error: Tensor | None = None

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        matrices, vectors = to_chunks(tensors)
        chunks = torch.cat([matrices, _padded(vectors.view(-1), SIDE * SIDE)])
        if self._error is not None:
            chunks += self._decay * self._error
        own = self._message.encode(chunks)
        self._error = chunks - self._message.decode(own, len(chunks))
        decoded = torch.stack([self._message.decode(message, len(chunks)) for message in _gather(own)])
        mean = decoded.sum(0) / ((decoded != 0).sum(0).clamp_(min=1) if self._senders else len(decoded))
        flat = mean[len(matrices) :].view(-1)[: vectors.numel()]
        return from_chunks(mean[: len(matrices)], flat.view_as(vectors), tensors)


class DeMo(torch.optim.Optimizer):
    """Decoupled momentum (Peng et al. 2024, arXiv:2411.19870): each worker keeps its own, and all apply signs.

    A step adds the gradient to the momentum m, cuts m into chunks of 64 × 64 (64 of a vector), sends the k largest
    coefficients of each chunk's discrete cosine transform in bf16, subtracts from m what was sent, and moves the
    parameters by the sign of the mean of what was sent.

    Args:
        parameters: Of the model.
        rate: Learning rate.
        k: Coefficients of a chunk that are sent.
        decay: Of the momentum.
        weight_decay: Decoupled, as AdamW's.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], rate: float, k: int, decay: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": rate, "weight_decay": weight_decay})
        self._momenta = [torch.zeros_like(parameter) for parameter in parameters]
        self._decay = decay
        self._messages = TopK(SIDE * SIDE, k, two_bits=False), TopK(SIDE, min(k, SIDE), two_bits=False)
        self._basis = cosines(SIDE)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        group = self.param_groups[0]
        parameters = group["params"]
        for momentum, parameter in zip(self._momenta, parameters, strict=True):
            momentum.mul_(self._decay).add_(parameter.grad)
        coefficients = self._transform(self._momenta)
        own = [message.encode(chunks) for message, chunks in zip(self._messages, coefficients, strict=True)]
        sizes = [len(message) for message in own]
        gathered = [message.split(sizes) for message in _gather(torch.cat(own))]
        sent, mean = (
            self._inverse([torch.stack(each).mean(0) for each in zip(*decoded, strict=True)])
            for decoded in (
                [self._decode(own, coefficients)],
                [self._decode(messages, coefficients) for messages in gathered],
            )
        )
        for parameter, momentum, own_part, update in zip(parameters, self._momenta, sent, mean, strict=True):
            momentum.sub_(own_part)
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.sign(), alpha=group["lr"])

    def _decode(self, messages: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        return [
            kind.decode(message, len(chunks))
            for kind, message, chunks in zip(self._messages, messages, like, strict=True)
        ]

    def _transform(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        matrices, vectors = to_chunks(tensors)
        basis = self._basis
        return (basis @ matrices.view(-1, SIDE, SIDE) @ basis.mT).flatten(1), vectors @ basis.mT

    def _inverse(self, coefficients: Sequence[Tensor]) -> list[Tensor]:
        matrices, vectors = coefficients
        basis = self._basis
        tiles = basis.mT @ matrices.view(-1, SIDE, SIDE) @ basis
        return from_chunks(tiles.flatten(1), vectors @ basis, self._momenta)


def cosines(n: int) -> Tensor:
    """Return the orthonormal basis [n, n] of the discrete cosine transform, one function a row."""
    frequency, place = torch.arange(n)[:, None], torch.arange(n)
    basis = torch.cos(math.pi / n * (place + 0.5) * frequency) * math.sqrt(2 / n)
    basis[0] /= math.sqrt(2)
    return basis


def to_chunks(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return (chunks of all matrices [C, SIDE²], chunks of all vectors [D, SIDE]). All sizes are multiples of SIDE.

    Raises:
        ValueError: A size is not a multiple of SIDE.
    """
    if bad := [tuple(tensor.shape) for tensor in tensors if tensor.dim() > 2 or any(n % SIDE for n in tensor.shape)]:
        raise ValueError(f"expected matrices and vectors with multiples of {SIDE} rows and columns; got {bad[0]}")
    tiles = [
        tensor.unflatten(1, (-1, SIDE)).unflatten(0, (-1, SIDE)).transpose(1, 2).reshape(-1, SIDE * SIDE)
        for tensor in tensors
        if tensor.dim() == 2
    ]
    return torch.cat(tiles), torch.cat([tensor.view(-1, SIDE) for tensor in tensors if tensor.dim() == 1])


def from_chunks(matrices: Tensor, vectors: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo ``to_chunks``."""
    tiles = iter(matrices.split([t.numel() // SIDE**2 for t in like if t.dim() == 2]))
    runs = iter(vectors.split([t.numel() // SIDE for t in like if t.dim() == 1]))
    return [
        next(runs).reshape(t.shape)
        if t.dim() == 1
        else next(tiles).view(-1, t.shape[1] // SIDE, SIDE, SIDE).transpose(1, 2).reshape(t.shape)
        for t in like
    ]


def _padded(flat: Tensor, size: int) -> Tensor:
    return nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def _gather(message: Tensor) -> list[Tensor]:
    messages = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    dist.all_gather(messages, message)
    return messages
