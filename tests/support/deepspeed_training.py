"""Engines and steps that the tests of the DeepSpeed adapter share. All of it runs inside a worker."""

import contextlib
import copy
import dataclasses
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.distributed import Worker
from tests.support.programs import output_of
from tests.support.sharded_training import RATE, TOKENS, WIDTH, Block, Net, batch, token_loss
from tests.support.training import total

# With DeepSpeed's own all-gather of parameters, except where it is what is tested.
FULL_RANK = {"rank": 999, "min_compression_rate": 0, "parameters": None}
RANK_4 = {"rank": 4, "parameters": None}
FP32_LIMIT, BF16_LIMIT = 5e-6, 3e-3
"""How far losses may be from those with the same gradients, summed in another order."""


def zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": options}


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
BF16_OPTIMIZER: dict[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"zero_force_ds_cpu_optimizer": False, **zero(offload_optimizer={"device": "cpu"})}
LOGGED = {"comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False}}
ACCUMULATE = {"gradient_accumulation_steps": 2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of training with DeepSpeed: ``options`` of the configuration by section, and ``way``, see ``losses``.

    ``optimizer`` is "" for the configuration's AdamW, else the program's own. The embedding's gradient may be
    ``sparse``, and a layer ``unused`` in every second step.
    """

    name: str
    stage: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    way: str = ""
    optimizer: str = ""
    sparse: bool = False
    unused: bool = False
    pipeline_stages: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def limit(self) -> float:
        """How far losses at full rank may be from plain DeepSpeed's."""
        in_16_bits = self.options.keys() & {"bf16", "fp16", "torch_autocast", "communication_data_type"}
        return BF16_LIMIT if in_16_bits else FP32_LIMIT


def ready(worker: int, world_size: int, body: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> None:
    """A case that needs DeepSpeed: a function with assertions, which all workers call."""
    prepare(worker, world_size)
    body(*arguments)


def each(body: Callable[..., None], *arguments: Any) -> dict[str, Worker]:
    """A case for each argument, or one without; by a name for each. Those of a tuple go together."""
    cases: dict[str, Worker] = {}
    for one in arguments or [()]:
        given = one if isinstance(one, tuple) else (one,)
        name = "-".join(map(str, (body.__name__, *given)))
        cases[name] = functools.partial(ready, body=body, arguments=given)
    return cases


def configuration(stage: int, section: Mapping[str, Any] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
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
    """Say what a launcher would say, choose the CPU, keep quiet. What would have to be compiled is left out."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(worker), LOCAL_RANK=str(worker), WORLD_SIZE=str(world_size))
    warnings.filterwarnings("ignore")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")


@contextlib.contextmanager
def engine_for(case: Case, section: Mapping[str, Any] | None = None, model: Any = None) -> Iterator[Any]:
    """An engine for a case, compressing where a section is given."""
    import deepspeed

    if model is None:
        model = pipeline(case.pipeline_stages) if case.pipeline_stages else Net()
        model.alternates = case.unused
        if case.sparse:
            model.tokens.sparse = True
    # The CPU computes in fp16 all the same, slowly.
    accelerator = type(deepspeed.accelerator.get_accelerator())
    with mock.patch.object(accelerator, "is_fp16_supported", return_value=True):
        engine = new_engine(case, section, model)
        try:
            yield engine
        finally:
            engine.destroy()


def new_engine(case: Case, section: Mapping[str, Any] | None, model: Any) -> Any:
    from powersgd_triton.integrations import deepspeed

    config = configuration(case.stage, section, case.options)
    if case.pipeline_stages:
        config["pipeline"] = {"activation_checkpoint_interval": 0}
    groups = getattr(model, "groups", lambda: list(model.parameters()))()
    given: dict[str, Any] = {}
    if case.optimizer:
        config.pop("optimizer")
        config["zero_allow_untested_optimizer"] = True
        kind, rate = (torch.optim.SGD, RATE) if case.optimizer == "sgd" else (torch.optim.AdamW, 3e-3)
        given["optimizer"] = kind(groups, lr=rate)
    with contextlib.redirect_stdout(None):
        return deepspeed.initialize(model=model, model_parameters=groups, config=config, **given)[0]


def pipeline(stages: int) -> Any:
    """The same kind of model as pipeline stages."""
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(0)
    layers = [nn.Embedding(TOKENS, WIDTH), Block(), Block(), nn.Linear(WIDTH, TOKENS)]
    return PipelineModule(layers=layers, num_stages=stages, loss_fn=token_loss, partition_method="uniform")


def weights(engine: Any) -> dict[str, Tensor]:
    """Whole parameters of any stage, by name."""
    import deepspeed

    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().float().clone()
    return found


def halving_scale() -> Any:
    """A dynamic loss scale, which halves at each overflow."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    return DynamicLossScaler(2.0**8, scale_window=1000, min_scale=1, delayed_shift=1, consecutive_hysteresis=False)


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


def losses(engine: Any, steps: Sequence[int], way: str = "") -> list[float]:
    """Train as DeepSpeed's documentation does, or with a pipeline's engine. Losses are means over all workers.

    Way "coalesced" reduces once for several micro-batches, by DeepSpeed's own means; with "unmanaged" the program
    decides when the step is taken.
    """
    found = []
    accumulated = 3 if way == "coalesced" else 2 if way == "unmanaged" else engine.gradient_accumulation_steps()
    for step in steps:
        if engine.pipeline_parallelism:
            worker = engine.mpu.get_data_parallel_rank()
            found.append(float(engine.train_batch(batch(worker, step, micro) for micro in range(accumulated))))
            continue
        if getattr(engine.module, "alternates", False):
            engine.module.use = step % 2 == 0
        mean = 0.0
        with engine.coalesce_grad_reduction() if way == "coalesced" else contextlib.nullcontext():
            for micro in range(accumulated):
                tokens, targets = batch(dist.get_rank(), step, micro)
                loss = token_loss(engine(tokens), targets)
                engine.backward(loss)
                mean += float(loss.detach()) / accumulated
                if not way:
                    engine.step()
        if way:
            engine.step()
        found.append(mean)
    return (total(torch.tensor(found).double()) / dist.get_world_size()).tolist()


def logged_bytes(engine: Any, above: int = 0) -> dict[str, float]:
    """Bytes a step of messages above a size, by DeepSpeed's own logger, which the configuration must switch on."""
    from deepspeed.comm.comm import comms_logger

    losses(engine, range(1))
    comms_logger.comms_dict.clear()
    losses(engine, range(1, 3))
    comms_logger.enabled = False
    return {
        name: sum(size * record[0] for size, record in sizes.items() if size > above) / 2
        for name, sizes in comms_logger.comms_dict.items()
    }


def convert(saved: Path, universal: Path) -> Path:
    """A checkpoint's universal form, which any number of workers loads. Without the compression's state."""
    arguments: list[str | Path] = ["--input_folder", saved, "--output_folder", universal, "--inject_missing_state"]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    output_of("-m", "deepspeed.checkpoint.ds_to_universal", *arguments, *workers, DS_ACCELERATOR="cpu")
    return universal
