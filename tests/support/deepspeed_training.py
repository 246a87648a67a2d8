"""A model, engines and steps that the tests of the DeepSpeed adapter share. All of it runs inside a worker."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.distributed import Failure

WIDTH, HIDDEN, TOKENS, LENGTH, BATCH = 33, 49, 37, 8, 8
STEPS = 10
# With DeepSpeed's own all-gather of parameters, except where it is what is tested.
FULL_RANK = {"rank": 999, "min_compression_rate": 0, "parameters": None}
RANK_4 = {"rank": 4, "parameters": None}
FP32_LIMIT, BF16_LIMIT = 5e-6, 3e-3
WORLD = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
"""What follows each token."""


class Block(nn.Module):
    """A residual perceptron; its sizes divide by none of the numbers of workers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return outputs


class Net(nn.Module):
    """Predicts each token's successor. With ``unused``, a layer is used in every second step only."""

    def __init__(self, *, sparse: bool = False, unused: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(TOKENS, WIDTH, sparse=sparse)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, TOKENS)
        if unused:
            self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.use = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.tokens(tokens))
        if self.use:
            x = x + self.sometimes(x)
        logits: Tensor = self.head(x)
        return logits


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of training with DeepSpeed.

    Attributes:
        options: what is added to the configuration, section by section.
        limit: how far losses at full rank may be from plain DeepSpeed's.
        train: name of a function ``(engine, steps) -> losses`` in this module.
        sgd: train with SGD of the program instead of AdamW of the configuration.
        own_adamw: train with AdamW of the program.
    """

    name: str
    stage: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    limit: float = FP32_LIMIT
    train: str = "losses"
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sgd: bool = False
    own_adamw: bool = False
    pipeline_stages: int = 0
    fp16: bool = False

    def __str__(self) -> str:
        return self.name


def configuration(stage: int, section: Mapping[str, Any] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    for key, value in options.items():
        made[key] = {**made[key], **value} if isinstance(made.get(key), dict) else copy.deepcopy(value)
    if section is not None:
        made["powersgd"] = dict(section)
    return made


def prepare(worker: int, world_size: int) -> None:
    """Say what a launcher would say, choose the CPU, keep quiet.

    DeepSpeed's own C++ operation for it is left out, since it would have to be compiled first.
    """
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(worker), LOCAL_RANK=str(worker), WORLD_SIZE=str(world_size))
    warnings.filterwarnings("ignore")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")


def new_engine(case: Case, section: Mapping[str, Any] | None = None, model: nn.Module | None = None) -> Any:
    """An engine for a case, compressing where a section is given."""
    from powersgd_triton.integrations import deepspeed

    options = {**case.options, **({"pipeline": {"activation_checkpoint_interval": 0}} if case.pipeline_stages else {})}
    config = configuration(case.stage, section, options)
    if model is None:
        model = pipeline(case.pipeline_stages) if case.pipeline_stages else Net(**case.model)
    given: dict[str, Any] = {}
    if case.sgd or case.own_adamw:
        config.pop("optimizer")
        config["zero_allow_untested_optimizer"] = True
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        given["optimizer"] = torch.optim.SGD(trained, lr=0.5) if case.sgd else torch.optim.AdamW(trained, lr=3e-3)
    groups = getattr(model, "groups", lambda: list(model.parameters()))()
    with contextlib.redirect_stdout(None):
        return deepspeed.initialize(model=model, model_parameters=groups, config=config, **given)[0]


@contextlib.contextmanager
def engine_for(
    case: Case, section: Mapping[str, Any] | None = None, model: nn.Module | None = None
) -> Iterator[Any]:  # fmt: skip
    """``new_engine``, for a while."""
    import deepspeed

    accelerator = type(deepspeed.accelerator.get_accelerator())
    supported = accelerator.is_fp16_supported
    if case.fp16:
        # The CPU computes with it all the same, slowly.
        accelerator.is_fp16_supported = lambda _: True
    engine = new_engine(case, section, model)
    try:
        yield engine
    finally:
        engine.destroy()
        accelerator.is_fp16_supported = supported


def weights(engine: Any) -> dict[str, Tensor]:
    """Copies in fp32, also of those that ZeRO 3 has partitioned."""
    import deepspeed

    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().float().clone()
    return found


class StubScaler:
    """A dynamic loss scale as DeepSpeed's, which halves at each overflow."""

    dynamic = True

    def __init__(self) -> None:
        self.cur_scale = 2.0**8

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale /= 2


@contextlib.contextmanager
def spoiled(parameter: nn.Parameter) -> Iterator[None]:
    """A gradient with one infinite element, on the last worker only."""

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[3] = torch.inf
        return gradient

    handle = parameter.register_hook(spoil) if dist.get_rank() == dist.get_world_size() - 1 else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def pipeline(stages: int) -> nn.Module:
    """The same kind of model as pipeline stages."""
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(0)
    layers = [nn.Embedding(TOKENS, WIDTH), Block(), Block(), nn.Linear(WIDTH, TOKENS)]
    module: nn.Module = PipelineModule(
        layers=layers, num_stages=stages, loss_fn=token_loss, partition_method="uniform"
    )  # fmt: skip
    return module


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch(step: int, micro: int = 0, worker: int | None = None) -> Tensor:
    """Tokens of one worker."""
    worker = dist.get_rank() if worker is None else worker
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + worker)
    return torch.randint(0, TOKENS, (BATCH, LENGTH), generator=generator)


def mean(values: Sequence[float]) -> list[float]:
    """Averages over the workers."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(value) for value in total / dist.get_world_size()]


def micro_batch(engine: Any, step: int, micro: int = 0) -> float:
    """Forward and backward passes."""
    tokens = batch(step, micro)
    loss = token_loss(engine(tokens), WORLD[tokens])
    engine.backward(loss)
    return float(loss.detach())


def losses(engine: Any, steps: Sequence[int]) -> list[float]:
    """Train as DeepSpeed's documentation does."""
    found = []
    for step in steps:
        if hasattr(engine.module, "sometimes"):
            engine.module.use = step % 2 == 0
        total = 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            total += micro_batch(engine, step, micro)
            engine.step()
        found.append(total / engine.gradient_accumulation_steps())
    return mean(found)


def coalesced_losses(engine: Any, steps: Sequence[int]) -> list[float]:
    """Train with one reduction a step, by DeepSpeed's own means."""
    found = []
    for step in steps:
        with engine.coalesce_grad_reduction():
            total = sum(micro_batch(engine, step, micro) for micro in range(3))
        engine.step()
        found.append(total / 3)
    return mean(found)


def unmanaged_losses(engine: Any, steps: Sequence[int]) -> list[float]:
    """Train with ``managed_gradient_accumulation`` off: the program decides when the step is taken."""
    found = []
    for step in steps:
        found.append(sum(micro_batch(engine, step, micro) for micro in range(2)) / 2)
        engine.step()
    return mean(found)


def pipeline_losses(engine: Any, steps: Sequence[int]) -> list[float]:
    """Train with a pipeline engine."""
    found = []
    worker = engine.mpu.get_data_parallel_rank()
    for step in steps:
        micro = iter([batch(step, micro, worker) for micro in range(engine.gradient_accumulation_steps())])
        found.append(float(engine.train_batch((tokens, WORLD[tokens]) for tokens in micro)))
    return mean(found)


TRAINING: dict[str, Callable[[Any, Sequence[int]], list[float]]] = {
    function.__name__: function for function in (losses, coalesced_losses, unmanaged_losses, pipeline_losses)
}


def train(case: Case, section: Mapping[str, Any] | None, steps: int = STEPS) -> list[float]:
    """Losses of each step, averaged over workers."""
    with engine_for(case, section) as engine:
        return TRAINING[case.train](engine, range(steps))


def logged_bytes(engine: Any, steps: int, above: int = 0) -> dict[str, float]:
    """Bytes a step of messages above a size, by DeepSpeed's own logger, which the configuration must switch on."""
    from deepspeed.comm.comm import comms_logger

    losses(engine, range(1))
    comms_logger.comms_dict.clear()
    losses(engine, range(1, 1 + steps))
    comms_logger.enabled = False
    return {
        name: sum(size * record[0] for size, record in sizes.items() if size > above) / steps
        for name, sizes in comms_logger.comms_dict.items()
    }


def run_all(worker: int, world_size: int, jobs: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]]) -> Any:
    """Run jobs (name, function, arguments) one after the other in one set of workers: {name: result or Failure}.

    DeepSpeed keeps process groups for a process's life, so that one set of workers must do with one.
    """
    prepare(worker, world_size)
    results: dict[str, Any] = {}
    for name, function, arguments in jobs:
        try:
            results[name] = function(*arguments)
        except Exception:
            results[name] = Failure(traceback.format_exc())
    return results


def result(results: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """One job's results in the workers' order.

    Raises:
        RuntimeError: it failed on a worker; the message holds the traceback.
    """
    for worker, found in enumerate(results):
        if isinstance(found[name], Failure):
            raise RuntimeError(f"{name} failed on worker {worker}:\n{found[name]}")
    return [found[name] for found in results]


def largest_difference(got: Sequence[float], expected: Sequence[float]) -> float:
    """Largest absolute difference; infinite where something is not a number."""
    return max(
        abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in zip(got, expected, strict=True)
    )
