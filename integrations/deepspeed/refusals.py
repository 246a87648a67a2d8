"""DeepSpeed: what a section or an engine has that compression cannot be combined with, all of it in one error."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch.distributed as dist
from packaging.version import Version

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.deepspeed.seams import averaging_group, is_bf16_optimizer, seam_class

SECTION = "powersgd"
ENABLED = "enabled"
OLDEST = Version("0.16")
FP16_UNSCALED_AT_STAGE_0 = Version("0.18.3")
WRONG_AT_STAGE_2 = (Version("0.17.6"), Version("0.18.2"))
OWN_COMPRESSION = ("onebitadam", "onebitlamb", "zerooneadam")


class PowerSGDConfigError(ValueError):
    """The section 'powersgd' and the rest of the DeepSpeed configuration do not go together."""


def section_of(engine: Any) -> Any:
    """The section of the engine's configuration, which DeepSpeed itself ignores; None where there is none."""
    return engine._config._param_dict.get(SECTION)


def read_section(section: Any) -> tuple[PowerSGDConfig, bool, list[str]]:
    """(configuration, whether it is on, problems). Where there are problems the configuration is the default one."""
    if not isinstance(section, Mapping):
        return PowerSGDConfig(), True, [f'"{SECTION}" must be an object like {{"rank": 4}}; got {section!r}']
    fields = [field.name for field in dataclasses.fields(PowerSGDConfig)]
    problems: list[str] = []
    valid: dict[str, Any] = {}
    for key, value in section.items():
        if key == ENABLED:
            continue
        if key not in fields:
            nearest = difflib.get_close_matches(str(key), [ENABLED, *fields], n=1, cutoff=0.0)[0]
            valid_keys = ", ".join([ENABLED, *fields])
            problems.append(f"unknown key {key!r}; did you mean {nearest!r}? Valid keys: {valid_keys}")
            continue
        # Alternating needs warm_start: that is said of both keys together, below.
        try:
            PowerSGDConfig(**{key: value})
        except (TypeError, ValueError) as error:
            problems.append(str(error))
        else:
            valid[key] = value
    enabled = section.get(ENABLED, True)
    if not isinstance(enabled, bool):
        problems.append(f"{ENABLED} must be true or false; got {enabled!r}")
    try:
        config = PowerSGDConfig(**valid)
    except (TypeError, ValueError) as error:
        problems.append(str(error))
    return (PowerSGDConfig() if problems else config), enabled is not False, problems


def engine_problems(engine: Any) -> list[str]:
    """What the engine has that its gradients' compression cannot be combined with, each with what to do about it."""
    stage = int(engine.zero_optimization_stage())
    problems = _version_problems(stage)
    problems += _optimizer_problems(engine, stage)
    problems += _configuration_problems(engine, stage)
    group = averaging_group(engine)
    if dist.get_world_size(group) < 2:
        problems.append(
            "one worker averages with nobody: there is nothing to compress. Start two or more data-parallel workers, "
            f'or set "{ENABLED}": false'
        )
    return problems


def _version_problems(stage: int) -> list[str]:
    version = Version(Version(deepspeed.__version__).base_version)
    if version < OLDEST:
        return [f"DeepSpeed {deepspeed.__version__} is too old: install 0.16 or newer"]
    if stage == 2 and WRONG_AT_STAGE_2[0] <= version <= WRONG_AT_STAGE_2[1]:
        return [
            f"DeepSpeed {deepspeed.__version__} computes wrong gradients at ZeRO stage 2 (its issue #7718, versions "
            f"{WRONG_AT_STAGE_2[0]} to {WRONG_AT_STAGE_2[1]}): install a newer one or use stage 1 or 3"
        ]
    return []


def _optimizer_problems(engine: Any, stage: int) -> list[str]:
    optimizer = engine.optimizer
    if optimizer is None or type(optimizer).__name__ in ("DeepSpeedZeRoOffload", "DummyOptim", "NoneType"):
        return ['no optimizer, so no gradients are averaged: give one, or the section "optimizer"']
    problems: list[str] = []
    names = {type(candidate).__name__.lower() for candidate in (optimizer, engine.basic_optimizer)}
    if any("muon" in name for name in names):
        problems.append(
            "the Muon optimizer: it orthogonalises whole averaged matrices on each owner; use another optimizer"
        )
    for name in sorted(names.intersection(OWN_COMPRESSION)):
        problems.append(f"the optimizer {name} compresses by itself: use one that does not, such as AdamW")
    if (
        engine.fp16_enabled()
        and stage == 0
        and Version(Version(deepspeed.__version__).base_version) >= FP16_UNSCALED_AT_STAGE_0
    ):
        problems.append(
            f"fp16 at ZeRO stage 0: DeepSpeed {deepspeed.__version__} does not scale the loss there (from "
            f"{FP16_UNSCALED_AT_STAGE_0} on, see its pull request #8393); use stage 1, bf16 or torch_autocast"
        )
    kind = seam_class(engine)
    owner = kind.owner(engine)
    if not callable(getattr(owner, kind.method, None)):
        problems.append(
            f"DeepSpeed {deepspeed.__version__} has no {type(owner).__name__}.{kind.method}, "
            "through which gradients go in the versions that the README lists: install one of these"
        )
    elif stage in (1, 2) and not is_bf16_optimizer(optimizer) and not optimizer.contiguous_gradients:
        problems.append(
            '"contiguous_gradients": false at ZeRO stages 1 and 2 takes gradients out of the buckets that are '
            "compressed: set it to true, DeepSpeed's default"
        )
    return problems


def _configuration_problems(engine: Any, stage: int) -> list[str]:
    problems: list[str] = []
    zero = engine._config.zero_config
    if getattr(zero, "zero_quantized_gradients", False):
        problems.append(
            '"zero_quantized_gradients" (qgZ) compresses the same gradients: take it out; '
            '"zero_quantized_weights" may stay'
        )
    if getattr(getattr(engine._config, "compile_config", None), "deepcompile", False):
        problems.append(
            '"deepcompile" reduces gradients inside the compiled graph, where powersgd never sees them: set '
            '"compile": {"deepcompile": false}; engine.compile() without it may stay'
        )
    if getattr(zero, "zenflow", None) is not None:
        problems.append('"zenflow" picks its own gradients to send: take the section out of "zero_optimization"')
    if getattr(engine, "has_moe_layers", False):
        problems.append(
            "mixture-of-experts layers average some gradients in groups of their own: use powersgd without them"
        )
    if getattr(getattr(zero, "offload_optimizer", None), "super_offload", False):
        problems.append('"super_offload" has its own way of moving gradients: set it to false')
    if stage == 3 and (getattr(zero, "mics_shard_size", -1) or -1) > 0:
        problems.append('"mics_shard_size" (MiCS) reduces gradients twice: take it out')
    elif stage == 3 and engine.optimizer is not None:
        groups = {
            tuple(dist.get_process_group_ranks(parameter.ds_process_group))
            for parameter in engine.module.parameters()
            if parameter.requires_grad and getattr(parameter, "ds_process_group", None) is not None
        }
        if groups - {tuple(dist.get_process_group_ranks(averaging_group(engine)))}:
            problems.append(
                "some parameters are partitioned over other workers than those that average gradients: call "
                "deepspeed.zero.Init with the data-parallel group, or without data_parallel_group"
            )
    return problems


def refuse(problems: list[str]) -> None:
    """Raises: PowerSGDConfigError: there are problems; it lists them all."""
    if problems:
        raise refusal(problems)


def refusal(problems: list[str]) -> PowerSGDConfigError:
    """The error that lists problems."""
    listing = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return PowerSGDConfigError(
        f'the section "{SECTION}" cannot be used with this DeepSpeed configuration '
        f"({len(problems)} problem{'s' if len(problems) > 1 else ''}):\n{listing}"
    )
