"""One protocol of a framework's job: what is trained, and what must come of it. All of it runs inside a worker."""

import contextlib
import dataclasses
import importlib
import io
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.checks import same_bits
from tests.support.sharded_training import parameters
from tests.support.training import logged, warnings
from tests.support.wrappers import plain

WIDTH, TARGETS, SAMPLES = 32, 8, 64
LIMIT = 1e-6
# bf16 rounds 2⁻⁸ off what these models compute. A difference of one rounding changes a parameter by less than a step.
BF16_LIMIT = 5e-3

DDP, FSDP2, HSDP, REPLICATE, ZERO2 = "DDP", "FSDP2 1-D", "HSDP 2 × 2", "`replicate()`", "DeepSpeed ZeRO 2"
FSDP1 = "FSDP1"
"""Only with frameworks that still offer it, and not in the table."""
WRAPPERS = [DDP, FSDP2, HSDP, REPLICATE, ZERO2]
FRAMEWORKS = {"Accelerate": "accelerate", "transformers' Trainer": "transformers", "Lightning": "lightning"}
"""{name: package, and module of this folder, which has ``train(job)``}."""
# The others refuse replicate(): FSDP without a dimension to shard across.
CELLS = [(name, wrapper) for name in FRAMEWORKS for wrapper in WRAPPERS if wrapper != REPLICATE or name == "Lightning"]
FULL_RANK: dict[str, Any] = {"rank": 999, "min_compression_rate": 0}
RANK_4: dict[str, Any] = {"rank": 4, "min_compression_rate": 1}


@dataclasses.dataclass(frozen=True)
class Job:
    """One training, with ``options`` of the compression's configuration, or without it.

    It may ``save`` a checkpoint into all workers' ``folder`` after half of the steps, or ``resume`` from there with
    other weights; use the framework's mixed precision (``bf16``), or fp32 with a loss scale that doubles in every step
    (``scaled``); and clip gradients to a norm.
    """

    BATCH: ClassVar[int] = 4
    MICRO_BATCHES: ClassVar[int] = 2
    STEPS: ClassVar[int] = 6
    SAVED: ClassVar[int] = 3
    # A larger epsilon than usual, so that rounding is not amplified where second moments are still close to zero.
    ADAM: ClassVar[dict[str, Any]] = {"lr": 5e-3, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.0}

    wrapper: str
    folder: Path = Path()
    options: dict[str, Any] | None = None
    save: bool = False
    resume: bool = False
    bf16: bool = False
    scaled: bool = False
    clip: float | None = 0.5

    def net(self) -> "Net":
        """The model before it is wrapped."""
        return Net(seed=1 if self.resume else 0)

    def resumed(self) -> "Job":
        return dataclasses.replace(self, save=False, resume=True)

    def deepspeed(self) -> dict[str, Any]:
        os.environ["DS_ACCELERATOR"] = "cpu"
        return {
            "train_micro_batch_size_per_gpu": self.BATCH,
            "gradient_accumulation_steps": self.MICRO_BATCHES,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": 2},
            # By itself, it switches nothing on.
            "powersgd": {"parameters": None},
        }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.down(torch.tanh(self.up(x)))
        return outputs


class Net(nn.Module):
    """A regression, with the loss among its outputs, as transformers' Trainer expects it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, TARGETS)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = inputs
        for block in self.blocks:
            x = block(x)
        outputs = self.head(x)
        return {"loss": (outputs.float() - labels).square().mean(), "logits": outputs}


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples that are equal in every process."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7))
        self.labels = self.inputs[:, :TARGETS] * 2 - self.inputs[:, TARGETS : 2 * TARGETS]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def be_launched(worker: int, workers: int) -> None:
    """Set what a launcher such as torchrun sets. The process group exists already."""
    if workers == 1:
        return
    ranks = {"RANK": worker, "LOCAL_RANK": worker, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    # DeepSpeed asks for the address too, and does not connect to it.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} | {name: str(n) for name, n in ranks.items()}


def trainings(framework: str) -> Callable[[Job], dict[str, Tensor]]:
    """Trains a job with a framework, and returns its parameters after the last step."""
    train: Callable[[Job], dict[str, Tensor]]
    train = importlib.import_module(f"tests.support.frameworks.{FRAMEWORKS[framework]}").train
    return train


def growing_scale() -> torch.amp.GradScaler:
    """Its powers of two leave all bits as they are."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, whole and by their names before the model was wrapped. Collective."""
    return {plain(name): parameter for name, parameter in parameters(model).items()}


def loss(trained: dict[str, Tensor] | None = None) -> float:
    """The loss over all samples, with these parameters or those that a training begins with."""
    net, data = Net(), Data()
    if trained is not None:
        net.load_state_dict(trained)
    with torch.no_grad():
        return float(net(data.inputs, data.labels)["loss"])


def difference(ones: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Largest difference of an element."""
    assert ones.keys() == others.keys()
    return largest(one.float() - others[name].float() for name, one in ones.items())


def largest(errors: Iterable[Tensor]) -> float:
    return max(error.abs().max().item() for error in errors)


# What is asked of every framework -------------------------------------------------------------------------------------


def trains_and_resumes(worker: int, workers: int, framework: str, wrapper: str, folder: Path, bf16: bool) -> None:
    """Full rank is the framework's own training; a checkpoint goes on where it was saved, but not without our state."""
    be_launched(worker, workers)
    train, limit = trainings(framework), BF16_LIMIT if bf16 else LIMIT
    job = Job(wrapper, folder / "exact", bf16=bf16)
    native = train(job)
    assert difference(train(dataclasses.replace(job, options=FULL_RANK)), native) <= limit
    job = dataclasses.replace(job, folder=folder / "compressed", options=RANK_4, save=True)
    uninterrupted = train(job)
    assert max(loss(native), loss(uninterrupted)) < 0.9 * loss()
    dist.barrier()
    resumed: list[float] = []
    assert warnings_of(lambda: resumed.append(difference(train(job.resumed()), uninterrupted))) == []
    assert resumed[0] <= limit
    if not bf16:
        forget(job.folder)
        (warning,) = warnings_of(lambda: resumed.append(difference(train(job.resumed()), uninterrupted)))
        assert "errors start at zero" in warning
        assert 1e-4 < resumed[1] < 1


def warnings_of(call: Callable[[], object]) -> list[str]:
    """What the package warns of in a call."""
    with logged("powersgd_triton") as messages:
        call()
    return warnings(messages)


def forget(folder: Path, pattern: str = "powersgd*") -> None:
    """Take what the compression saved out of the checkpoints in a folder that all workers know. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        found = [*folder.rglob(pattern)]
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for path in [] if found else folder.glob("*.ckpt"):
            content = torch.load(path)
            del content["callbacks"]["PowerSGD"]
            torch.save(content, path)
    dist.barrier()


def follows_the_loss_scale(worker: int, workers: int, framework: str) -> None:
    """The error is owed in the units of the gradients, whose scale changes from step to step."""
    be_launched(worker, workers)
    # Accelerate clips scaled gradients in fp32.
    train, job = trainings(framework), Job(DDP, options=RANK_4, clip=None)
    assert difference(train(dataclasses.replace(job, scaled=True)), train(job)) < LIMIT


def quantizes(worker: int, workers: int, framework: str, wrapper: str) -> None:
    """Gradients in 8 bits train about as exact ones do: an average is rounded by 1% of it or so."""
    be_launched(worker, workers)
    train, job = trainings(framework), Job(wrapper)
    exact, rounded = train(job), train(dataclasses.replace(job, options={"quantize": "int8"}))
    assert difference(rounded, exact) > LIMIT
    assert abs(loss(rounded) - loss(exact)) < 0.05 * (loss() - loss(exact))


def is_off_in_one_process(worker: int, workers: int, framework: str) -> None:
    train = trainings(framework)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trained = train(Job(DDP, options=RANK_4))
    assert "powersgd: off, since" in printed.getvalue()
    assert "nothing to send" in printed.getvalue()
    assert same_bits(trained, train(Job(DDP)))
    assert difference(trained, whole(Net())) > 1e-3
