"""Trainings of ``loss_per_byte`` on scikit-learn's handwritten digits: a perceptron or a ResNet, DDP, SGD."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import arms
from powersgd_triton.demo.arms import communication
from powersgd_triton.demo.measure import Traffic
from powersgd_triton.demo.train import run_workers

WIDTHS = (64, 256, 256, 256, 256, 10)
# Falls linearly to 0. With one layer less at this rate, or two less at 0.03, rank 1 ends close to all-reduce.
LEARNING_RATE = 0.05
MOMENTUM = 0.9
VALIDATION_IMAGES = 597


@dataclasses.dataclass(frozen=True)
class Network:
    """What is trained, and on how many images a step and worker."""

    make: Callable[[], nn.Module]
    batch_per_worker: int


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one training.

    Attributes:
        loss: mean cross-entropy of the validation images, in nats.
        accuracy: share of them that is recognised, in percent.
        bytes_per_step: that a worker hands to collectives, mean over all steps.
    """

    loss: float
    accuracy: float
    bytes_per_step: float


class Block(nn.Module):
    """Two convolutions with a residual connection (He et al. 2015), which halve the image if ``stride`` is 2."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = convolution(into, out, 3, stride), convolution(out, out, 3)
        self.shortcut = nn.Identity() if into == out else convolution(into, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu())
        return (y + self.shortcut(x)).relu()  # type: ignore[no-any-return]


def convolution(into: int, out: int, size: int, stride: int = 1) -> nn.Sequential:
    kernels = nn.Conv2d(into, out, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(kernels, nn.BatchNorm2d(out))


def resnet() -> nn.Sequential:
    """ResNet-18 with a quarter of its channels, for images upsampled from 8 × 8 to 32 × 32."""
    blocks = [Block(16, 16, 1), Block(16, 16, 1)]
    for into in (16, 32, 64):
        blocks += [Block(into, 2 * into, 2), Block(2 * into, 2 * into, 1)]
    image = nn.Unflatten(1, (1, 8, 8)), nn.Upsample(scale_factor=4, mode="bilinear")
    stem = convolution(1, 16, 7, 2), nn.ReLU()
    return nn.Sequential(*image, *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def perceptron() -> nn.Sequential:
    first, *others = (nn.Linear(n, m) for n, m in itertools.pairwise(WIDTHS))
    return nn.Sequential(first, *(module for layer in others for module in (nn.ReLU(), layer)))


PERCEPTRON, CONVOLUTIONS = Network(perceptron, 32), Network(resnet, 16)


def train_arms(
    chosen: Sequence[str], seed: int, steps: int, workers: int, network: Network = PERCEPTRON
) -> list[Figures]:
    """Train each arm, one after the other in the same fresh processes.

    Args:
        chosen: arms.
        seed: of the model and the batches. Which images are for validation does not depend on it.
        steps: of each training.
        workers: processes.
        network: what is trained.

    Raises:
        TimeoutError: the workers did not finish in a generous time.
        torch.multiprocessing.ProcessException: a worker failed.
    """
    task = functools.partial(_train_all, chosen=chosen, seed=seed, steps=steps, network=network)
    return run_workers(task, workers, timeout=900 + 0.5 * steps * len(chosen))[0]


def _train_all(worker: int, chosen: Sequence[str], seed: int, steps: int, network: Network) -> list[Figures]:
    return [_train(worker, arm, seed, steps, network) for arm in chosen]


def _train(worker: int, arm: str, seed: int, steps: int, network: Network) -> Figures:
    images, labels = images_and_labels()
    torch.manual_seed(seed)
    model = network.make()
    replica: nn.Module = model
    then = None
    gradients = arms.of_demo(arm)
    if gradients is None:
        then = arms.between_steps(model, arms.Arm.parse(arm), steps)
    else:
        # One bucket, since torch's hook cannot do more on gloo.
        replica = DistributedDataParallel(model, bucket_cap_mb=1024)
        replica.register_comm_hook(*communication(gradients, model))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * arms.inner(arm), momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    generator = torch.Generator().manual_seed(seed + 1 + worker)
    traffic = Traffic()
    with traffic.counting():
        for _ in range(steps):
            batch = torch.randint(VALIDATION_IMAGES, len(labels), (network.batch_per_worker,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(replica(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
            if then is not None:
                then(schedule.last_epoch)
    return Figures(**validate(model, images, labels), bytes_per_step=traffic.as_all_reduces / steps)


def validate(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Return loss and accuracy on the validation images, as in ``Figures``."""
    images, labels = images[:VALIDATION_IMAGES], labels[:VALIDATION_IMAGES]
    with torch.no_grad():
        scores = model.eval()(images)
    return {
        "loss": nn.functional.cross_entropy(scores, labels).item(),
        "accuracy": 100 * (scores.argmax(1) == labels).double().mean().item(),
    }


def images_and_labels() -> tuple[Tensor, Tensor]:
    """(images [N, 64] from 0 to 1, labels [N]), shuffled, always in the same order."""
    # Takes seconds to import.
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
