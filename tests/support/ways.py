"""Ways of training, each of which a wrapper that has it takes in ``properties.full_rank``."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

from tests.support.sharded_training import Net, checkpoint, freeze
from tests.support.training import LIMIT


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of training.

    ``prepare`` changes the model before it is wrapped with ``options``, which go by a wrapper's first word, ``after``
    the wrapped one. If ``unused``, a layer is used in every second step only. ``quick`` names wrappers; with ``only``,
    wrappers that ``options`` does not name do not have this way.
    """

    micro: int = 1
    step: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Net], None] = lambda _: None
    unused: bool = False
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    after: Callable[[Any], None] = lambda _: None
    only: bool = False
    quick: tuple[str, ...] = ()
    limit: float = LIMIT

    def fits(self, wrapper: str) -> bool:
        return not self.only or wrapper.split()[0] in self.options


def for_fsdp2(**options: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(("FSDP2", "HSDP", "replicate"), options)


def compiled(net: Net) -> None:
    for block in net.blocks:
        block.compile(backend="eager")


def sums(module: Any, factor: float | None = None) -> None:
    """Sums in place of averages, or what is divided by a factor."""
    for child in [module, *module.blocks]:
        if factor is not None:
            child.set_gradient_divide_factor(factor)
        child.set_force_sum_reduction_for_comms(True)


def reduces_unused(module: Any) -> None:
    # torch 2.9 lacks it.
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True)


BF16 = torch.bfloat16
WAYS = {
    "plain": Way(),
    "several backwards": Way(2, {"sync_each": True}, quick=("FSDP1 SHARD_GRAD_OP",)),
    "no sync": Way(2, quick=("FSDP1", "FSDP2")),
    "clipping": Way(step={"clip": 0.1}, quick=("FSDP2",)),
    "frozen": Way(prepare=freeze, quick=("DDP", "FSDP2", "local steps")),
    "checkpointing": Way(prepare=checkpoint, quick=("FSDP2",)),
    "unused": Way(
        unused=True, options={"DDP": {"find_unused_parameters": True}}, quick=("DDP", "Compressor", "optimizer")
    ),
    "mixed precision": Way(
        options={
            "FSDP1": {"mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)},
            **for_fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)),
        },
        only=True,
        quick=("FSDP1",),
        # Parameters that differ in their last bit may be rounded to different bf16 numbers.
        limit=1e-3,
    ),
    # What torch sums in bf16 is rounded once more or less often than our averages.
    "bf16": Way(
        options=for_fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)),
        only=True,
        quick=("replicate",),
        limit=2**-6,
    ),
    "no all-reduce": Way(2, {"all_reduce_last": True}, options={"HSDP": {}}, only=True, quick=("HSDP",)),
    "divide factor": Way(options=for_fsdp2(), after=functools.partial(sums, factor=8.0), only=True, quick=("FSDP2",)),
    "sums": Way(options=for_fsdp2(), after=sums, only=True, quick=("replicate",)),
    "unused, reduced": Way(unused=True, options=for_fsdp2(), after=reduces_unused, only=True, quick=("FSDP2",)),
    "no reshard": Way(
        options={name: {"reshard_after_forward": False} for name in ("FSDP2", "HSDP")}, only=True, quick=("FSDP2",)
    ),
    "reshard to two": Way(options={"HSDP": {"reshard_after_forward": 2}}, only=True),
    "offload": Way(
        options=for_fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)), only=True, quick=("replicate",)
    ),
    "compiled": Way(prepare=compiled, options=for_fsdp2(), only=True, quick=("replicate",)),
    "bucket view": Way(options={"DDP": {"gradient_as_bucket_view": True}}, only=True, quick=("DDP",)),
    "static graph": Way(options={"DDP": {"static_graph": True}}, only=True, quick=("DDP",)),
    "unused, bucket view": Way(
        unused=True,
        options={"DDP": {"find_unused_parameters": True, "gradient_as_bucket_view": True}},
        only=True,
        quick=("DDP",),
    ),
    "flat parameters": Way(options={"FSDP1": {"use_orig_params": False}}, only=True, quick=("FSDP1",)),
    "reentrant checkpointing": Way(
        prepare=functools.partial(checkpoint, use_reentrant=True), options={"FSDP1": {}}, only=True, quick=("FSDP1",)
    ),
}
