"""DeepSpeed: the state of one engine's compression, for all ZeRO stages."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

import powersgd_triton.integrations.deepspeed.engines as engines
from powersgd_triton.checkpoint import load as load_file
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.nodes import NodeGroup
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.loading import save
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.handle import FOUND, Handle
from powersgd_triton.integrations.common import plain_name
from powersgd_triton.integrations.deepspeed.parameters import ParameterOverride
from powersgd_triton.ranks.report import RankReport
from powersgd_triton.schemes import new_engine

FILE = "powersgd_pp{stage}_tp{part}_state.pt"
"""One file for each pipeline stage and tensor-parallel slice. The prefix differs from those of DeepSpeed's files."""
EXPERTS = "powersgd_{group}_{index:02d}_state.pt"
"""One file for the experts of each index in their expert-parallel group, which DeepSpeed names by its size."""

Gradients = Mapping[Tensor, Tensor]
"""{parameter: gradient}."""
Parts = Mapping[Tensor, tuple[int, Tensor]] | None
"""{parameter: (first element, tensor that takes the result from there on)}, or None for all of each gradient."""


class DeepSpeedState(Handle):
    """The compression of one engine's gradients, available as ``engine.powersgd``. ``enable`` makes it.

    With mixtures of experts it is a ``MixtureState``, of which this is a part. ``experts`` then names the expert-data
    group whose experts these are. It is empty for the other parameters. Other arguments are those of ``enable``.
    """

    saved_with_model = True

    def __init__(self, config: PowerSGDConfig, engine: Any, node_group: NodeGroup = None, experts: str = "") -> None:
        self.group = engine.expert_data_parallel_group[experts] if experts else engines.averaging_group(engine)
        self._framework, self._experts = engine, experts
        own = {name: p for name, p in engine.module.named_parameters() if engines.experts_group(p) == experts}
        self.names = {id(parameter): plain_name(name) for name, parameter in own.items()}
        sparse = {id(module.weight) for module in engine.module.modules() if getattr(module, "sparse", False) is True}
        # Only dense gradients. DeepSpeed averages sparse gradients itself.
        self.shapes = {
            self.names[id(parameter)]: engines.whole_shape(parameter)
            for parameter in own.values()
            if parameter.requires_grad and 0 not in engines.whole_shape(parameter) and id(parameter) not in sparse
        }
        communicator = engines.communicator_of(engine, self.group, node_group)
        super().__init__(new_engine(config, communicator, lambda: self.shapes, torch.device(engine.device)))
        # The engine too must know whether the exact first steps are over.
        self._step.iteration = engine.global_steps
        self._reached = False
        # Set if parameters are sent as differences.
        self.parameters: ParameterOverride | None = None

    def compressing(self) -> bool:
        """Return whether to compress gradients. Note that DeepSpeed has called the override in this step."""
        self._reached = True
        return bool(self._framework.global_steps >= self.config.start_iter)

    def forget(self) -> None:
        super().forget()
        # A checkpoint without a state may have been loaded.
        self._step.iteration = max(self._step.iteration, self._framework.global_steps)

    def averages(self, group: Any) -> bool:
        """Return whether this state averages over the workers of a process group."""
        return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(self.group)

    @torch.no_grad()
    def average(self, gradients: Gradients, parts: Parts = None, divisor: float | None = None) -> None:
        """Sum contiguous gradients over the workers and divide by ``divisor``. None averages."""
        if not gradients:
            return
        unknown = [engines.whole_shape(parameter) for parameter in gradients if id(parameter) not in self.names]
        if unknown:
            raise RuntimeError(
                f"DeepSpeed reduces the gradient of a parameter of shape {unknown[0]} that the module did not have "
                "when powersgd was enabled; change the model before deepspeed.initialize"
            )
        names = {parameter: self.names[id(parameter)] for parameter in gradients}
        shapes = {name: engines.whole_shape(parameter) for parameter, name in names.items()}
        views = {name: gradients[parameter].view(shapes[name]) for parameter, name in names.items()}
        ranges = None if parts is None else {names[p]: part for p, part in parts.items() if part[1].numel()}
        # ZeRO 2 and 3 reduce in every micro-batch. A gradient that comes again begins a new step of the compression.
        bucket = self._engine.begin(tuple(shapes), shapes.copy, next(iter(gradients.values())).device)
        self._engine.average(bucket, views, ranges=ranges)
        factor = 1.0 if divisor is None else self._communicator.world_size / divisor
        if factor != 1.0:
            for out in views.values() if parts is None else [out for _, out in parts.values()]:
                out.mul_(factor)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Check that a step's gradients came through the override. End the step afterwards, applied or skipped."""
        # Fails loudly if a release of DeepSpeed no longer calls the method that is overridden.
        if self.shapes and not self._reached:
            raise RuntimeError(
                f"powersgd is on, but DeepSpeed {deepspeed.__version__} averaged the gradients of step "
                f"{self._framework.global_steps} without it: use a version that docs/index.md lists, or take the "
                "section 'powersgd' out. (Or was deepspeed.enable called between backward() and step()?)"
            )
        yield
        if self._reached:
            self._reached = False
            # DeepSpeed may skip a step because of an overflow that no bucket of this worker contains.
            self._engine.end_step(applied=not getattr(self._framework.optimizer, "overflow", False))

    def report(self) -> RankReport:
        """Return which tensors are compressed, at which rank, their bytes, and the bytes of a whole step."""
        traffic = self.traffic()
        return dataclasses.replace(super().report(), whole_step=(traffic.plain, traffic.sent))

    def traffic(self) -> engines.Traffic:
        """Return the bytes that a step sends after ``start_iter``."""
        engine, optimizer, layout = self._framework, self._framework.optimizer, self._layout()
        stage, bf16_optimizer = int(engine.zero_optimization_stage()), engines.is_bf16_optimizer(optimizer)
        micro_batches = engine.gradient_accumulation_steps() if stage >= 2 else 1
        sender = optimizer if stage else engine
        dtype = optimizer.grad_acc_dtype if bf16_optimizer else sender.communication_data_type
        # At stages 1 and 2 DeepSpeed all-reduces buckets, unless it is configured to send each slice to its owner only.
        once = stage == 3 or (
            stage in (1, 2)
            and not bf16_optimizer
            and engine.zero_reduce_scatter()
            and not getattr(optimizer, "use_multi_rank_bucket_allreduce", True)
        )
        own = [parameter for parameter in engine.module.parameters() if id(parameter) in self.names]
        parameters = 0
        if stage == 3:
            # Frozen parameters too, in each forward and backward pass.
            every = sum(math.prod(engines.whole_shape(p)) * p.element_size() for p in own)
            parameters = 2 * engine.gradient_accumulation_steps() * every
        elif stage or bf16_optimizer:
            parameters = sum(p.nbytes for p in own if p.requires_grad)
        differences = parameters
        if self.parameters is not None:
            parameters, differences = self.parameters.bytes_per_step(self.names)
        # A ring's share of the whole.
        workers, quantized = self._communicator.world_size, self.config.quantize is not None
        share = (workers - 1) / workers
        # Of quantized gradients each worker gets its partition only.
        times = 1 if quantized and (stage or bf16_optimizer) else 2
        return engines.Traffic(
            elements=layout.numel,
            compressed=sum(segment.numel for segment in (layout.segments if quantized else layout.compressed)),
            gradients=share * micro_batches * (1 if once else 2) * layout.numel * dtype.itemsize,
            factors=share * micro_batches * times * RankReport.of(layout, self.config, {}).bytes_per_step,
            parameters=share * parameters,
            differences=share * differences,
        )

    def exact_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Return a context within which the model has the optimizer's parameters, rounded. Collective at both ends.

        Outside it, parameters that are sent as differences differ from them by a rounding error. Leaving it makes them
        equal on all workers. ``engine.save_16bit_model``, Accelerate's and the Trainer's exports use it by themselves.
        """
        return contextlib.nullcontext() if self.parameters is None else self.parameters.exact()

    def state_dict(self) -> dict[str, Any]:
        """Return the mean error, bases and step, as CPU tensors and numbers. Collective. Equal on all workers."""
        saved = save(self._engine, lambda error: self._communicator.mean(error).cpu())
        for parts in saved["matrices"].values():
            parts.update({key: part.cpu() for key, part in parts.items()})
        return saved

    def saved_in(self, folder: Path | None) -> Path | None:
        """Return the folder of the state: this one, or the one of the checkpoint that DeepSpeed would load from it."""
        if folder is None or (folder / self._file()).exists():
            return folder
        return engines.checkpoint_folder(self._framework, folder) or folder

    def _reading(self, find: Callable[[], Path | None]) -> Callable[[], LoadReport] | None:
        """See ``Handle``. Collective on the workers of all pipeline stages. The function is not."""
        return self._read_folder(lambda: self.saved_in(find()))

    def _read_folder(self, find: Callable[[], Path | None]) -> Callable[[], LoadReport] | None:
        """As ``_reading``, of that folder only."""
        saved = self._together("load", lambda: self._files(find()), FOUND)
        # The workers of one pipeline stage compare their states. Then all stages are told.
        return None if saved is None else self._together("load", lambda: self._loading(saved))

    def _files(self, folder: Path | None) -> dict[str, Any] | None:
        """Return the state that a folder has. ValueError if it is damaged, or lost in a universal checkpoint."""
        if folder is None:
            return None
        files = sorted(folder.glob(self._file(stage="*")))
        if not files and self._framework.load_universal_checkpoint():
            raise ValueError(
                f"the universal checkpoint {folder} has no PowerSGD state: ds_to_universal leaves it out. Copy it from "
                f"the checkpoint that was converted: cp CHECKPOINT/powersgd_*_state.pt {folder}/. Or load without the "
                "section 'powersgd', save, and continue from that checkpoint"
            )
        saved = [load_file(file) for file in files]
        if len(saved) < 2 and not self._framework.pipeline_parallelism:
            return saved[0] if saved else None
        # Layers may have been on other pipeline stages, so merge the files of all stages.
        merged: dict[str, Any] = {key: value for one in saved for key, value in one.items()}
        for key in ("tensors", "matrices"):
            entries = {name: entry for one in saved for name, entry in one[key].items()}
            merged[key] = {name: entry for name, entry in entries.items() if name in self.shapes}
        merged.pop("fingerprint", None)
        return merged if saved else None

    def _file(self, stage: str = "") -> str:
        engine = self._framework
        if self._experts:
            index = dist.get_rank(engine.expert_parallel_group[self._experts])
            return EXPERTS.format(group=self._experts, index=index)
        own = engine.mpu.get_stage_id() if engine.pipeline_parallelism else 0
        return FILE.format(stage=stage or f"{own:02d}", part=f"{engine.checkpoint_mp_rank:02d}")

    def _everyone(self) -> Communicator:
        # The workers of all pipeline stages, since DeepSpeed saves and loads with all of them.
        return Communicator()
