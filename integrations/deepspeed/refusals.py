"""DeepSpeed: settings of the section or of the engine that compression does not support, all listed in one error."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch.distributed as dist
from packaging.version import Version

from powersgd_triton.autoload import SECTION, is_section
from powersgd_triton.comm.nodes import AUTO
from powersgd_triton.config import RANK_LIMITS, PowerSGDConfig, unknown
from powersgd_triton.integrations.common import UNSAID, unlike
from powersgd_triton.integrations.deepspeed.engines import averaging_group, is_bf16_optimizer
from powersgd_triton.integrations.deepspeed.overrides import averaging_method
from powersgd_triton.integrations.deepspeed.parameters import why_not_differences
from powersgd_triton.layout.wire_format import DIFFERENCES
from powersgd_triton.planning.tuning import refuse_auto

OWN_KEYS = ENABLED, PARAMETERS, NODE_GROUP = "enabled", "parameters", "node_group"
"""Keys of the section that are no fields of ``PowerSGDConfig``."""
# In ternary codes, a bf16 copy can stop following: the scale may be too small to change the block's largest elements.
PARAMETER_FORMATS = [name for name, width in DIFFERENCES.items() if not width.ternary]
OLDEST = Version("0.16")
FP16_UNSCALED_AT_STAGE_0 = Version("0.18.3")
WRONG_AT_STAGE_2 = (Version("0.17.6"), Version("0.18.2"))


class PowerSGDConfigError(ValueError):
    """The section 'powersgd' cannot be used with the rest of the DeepSpeed configuration."""


def section_of(engine: Any) -> Any:
    """Return the section of an engine's configuration, or None. PowerSGDConfigError: Its name is spelled otherwise."""
    keys = engine._config._param_dict
    others = [key for key in keys if key != SECTION and is_section(key)]
    if others:
        raise refusal([f"the section's name is {SECTION!r}; got {others[0]!r}"])
    return keys.get(SECTION)


@dataclasses.dataclass(frozen=True)
class Section:
    """Content of the section. ``config`` is None without fields of it. ``parameters_given``: whether the key is."""

    config: PowerSGDConfig | None = None
    enabled: bool = True
    parameters: str | None = "int2"
    parameters_given: bool = False
    node_group: str | None = None
    problems: tuple[str, ...] = ()


def read_section(section: Any) -> Section:
    """Check a section and return its content."""
    if not isinstance(section, Mapping):
        return Section(problems=(f'"{SECTION}" must be an object like {{"compression": 20}}; got {section!r}',))
    keys = [*OWN_KEYS, *(field.name for field in dataclasses.fields(PowerSGDConfig))]
    problems: list[str] = []
    valid: dict[str, Any] = {}
    for key, value in section.items():
        if key not in keys:
            problems.append(unknown(key, keys))
        elif key not in OWN_KEYS:
            # Check each key alone. Conflicts between keys, such as alternating without warm_start, are found below.
            try:
                PowerSGDConfig(**{key: value, **({"compression": 1} if key in RANK_LIMITS else {})})
                valid[key] = value
            except (TypeError, ValueError) as error:
                problems.append(str(error))
    enabled = section.get(ENABLED, True)
    if not isinstance(enabled, bool):
        problems.append(f"{ENABLED} must be true or false; got {enabled!r}")
    parameters = section.get(PARAMETERS, Section.parameters)
    if parameters not in (None, *PARAMETER_FORMATS):
        problems.append(f"{PARAMETERS} must be null or one of {', '.join(PARAMETER_FORMATS)}; got {parameters!r}")
    node_group = section.get(NODE_GROUP)
    if node_group is True:
        # Accelerate takes each "auto" in the file as its own.
        node_group = AUTO
    if node_group not in (None, AUTO):
        problems.append(f'{NODE_GROUP} must be null, true or "{AUTO}"; got {node_group!r}')
    try:
        config = PowerSGDConfig(**valid)
        refuse_auto(config, "DeepSpeed's step")
    except (TypeError, ValueError) as error:
        problems.append(str(error))
    if problems:
        return Section(enabled=enabled is not False, problems=tuple(problems))
    return Section(config if valid else None, enabled, parameters, PARAMETERS in section, node_group)


def engine_problems(engine: Any, section: Section) -> list[str]:
    """Return the features of the engine that compression does not support, each with a remedy."""
    stage = int(engine.zero_optimization_stage())
    settings = _problems_of_settings(engine, stage, section)
    return [*_problems_of_versions(engine, stage), *_problems_of_optimizers(engine, stage), *settings]


def _problems_of_versions(engine: Any, stage: int) -> Iterator[str]:
    version = Version(Version(deepspeed.__version__).base_version)
    if version < OLDEST:
        yield f"DeepSpeed {deepspeed.__version__} is too old: install 0.16 or a newer version"
    if stage == 2 and WRONG_AT_STAGE_2[0] <= version <= WRONG_AT_STAGE_2[1]:
        yield (
            f"DeepSpeed {deepspeed.__version__} computes wrong gradients at ZeRO stage 2 (its issue #7718, versions "
            f"{WRONG_AT_STAGE_2[0]} to {WRONG_AT_STAGE_2[1]}): install a newer version, or use stage 1 or 3"
        )
    if stage == 0 and engine.optimizer is not None and engine.fp16_enabled() and version >= FP16_UNSCALED_AT_STAGE_0:
        yield (
            f"fp16 at ZeRO stage 0: DeepSpeed {deepspeed.__version__} does not scale the loss there (from "
            f"{FP16_UNSCALED_AT_STAGE_0} on, see its pull request #8393): use stage 1, bf16 or torch_autocast"
        )


def _problems_of_optimizers(engine: Any, stage: int) -> Iterator[str]:
    optimizer = engine.optimizer
    if optimizer is None or type(optimizer).__name__ in ("DeepSpeedZeRoOffload", "DummyOptim", "NoneType"):
        yield 'there is no optimizer, so no gradients are averaged: give one, or add the section "optimizer"'
        return
    names = {type(candidate).__name__.lower() for candidate in (optimizer, engine.basic_optimizer)}
    if any("muon" in name for name in names):
        yield "the Muon optimizer orthogonalizes whole averaged matrices on each owner: use another optimizer"
    for name in sorted(names & {"onebitadam", "onebitlamb", "zerooneadam"}):
        yield f"the optimizer {name} compresses gradients itself: use another one, such as AdamW"
    owner, method, _ = averaging_method(engine)
    if not callable(getattr(owner, method, None)):
        needed = f"{type(owner).__name__}.{method}, which averages gradients"
        yield f"DeepSpeed {deepspeed.__version__} has no {needed}: install a version that docs/index.md lists"
    elif stage in (1, 2) and not is_bf16_optimizer(optimizer) and not optimizer.contiguous_gradients:
        yield '"contiguous_gradients": false moves gradients out of the buckets that are compressed: set it to true'


def _problems_of_settings(engine: Any, stage: int, section: Section) -> Iterator[str]:
    zero, workers = engine._config.zero_config, averaging_group(engine)
    obstacle = why_not_differences(engine)
    if section.parameters_given and section.parameters is not None and obstacle is not None:
        yield f'"{PARAMETERS}": "{section.parameters}": {obstacle}'
    if getattr(zero, "zero_quantized_gradients", False):
        yield '"zero_quantized_gradients" (qgZ) compresses the same gradients: take it out. Quantized weights may stay'
    if getattr(getattr(engine._config, "compile_config", None), "deepcompile", False):
        yield (
            '"deepcompile" reduces gradients inside the compiled graph, where powersgd does not see them: set '
            '"compile": {"deepcompile": false}. engine.compile() without it may stay'
        )
    if getattr(zero, "zenflow", None) is not None:
        yield '"zenflow" selects the gradients to send itself: take the section out of "zero_optimization"'
    if getattr(engine, "use_node_local_storage", bool)():
        yield '"use_node_local_storage" has a folder on each node, but one worker saves for all: set it to false'
    pairs = [name for name, parameter in engine.module.named_parameters() if parameter.is_complex()]
    if pairs:
        yield (
            f"the parameter {pairs[0]!r} is complex: DeepSpeed does not reduce complex gradients at ZeRO stage 0 and "
            "keeps only their real parts at the others. Make it real, with torch.view_as_real"
        )
    if getattr(engine, "has_moe_layers", False):
        if stage == 3:
            yield "mixture-of-experts layers at ZeRO stage 3: use stage 1 or 2"
        if dist.get_world_size(workers) < dist.get_world_size():
            yield "mixture-of-experts layers with tensor or pipeline parallelism: use one of both"
    if getattr(getattr(zero, "offload_optimizer", None), "super_offload", False):
        yield '"super_offload" moves gradients in its own way: set it to false'
    if stage == 3 and (getattr(zero, "mics_shard_size", -1) or -1) > 0:
        yield '"mics_shard_size" (MiCS) reduces gradients twice: take it out'
    elif stage == 3 and engine.optimizer is not None:
        groups = {
            tuple(dist.get_process_group_ranks(parameter.ds_process_group))
            for parameter in engine.module.parameters()
            if parameter.requires_grad and getattr(parameter, "ds_process_group", None) is not None
        }
        if groups - {tuple(dist.get_process_group_ranks(workers))}:
            yield (
                "some parameters are partitioned over other workers than the ones that average gradients: call "
                "deepspeed.zero.Init with the data-parallel group, or without data_parallel_group"
            )
    if dist.get_world_size(workers) < 2:
        yield f'only one worker has nothing to average: start more data-parallel workers, or set "{ENABLED}": false'


def chosen(engine: Any, config: PowerSGDConfig | None) -> tuple[PowerSGDConfig, Section] | None:
    """Return the section's configuration, or else the program's, and the section. None if that is switched off."""
    given = section_of(engine)
    if given is None and config is None:
        raise refusal([f'the configuration has no section "{SECTION}": add "{SECTION}": {{"compression": 20}}'])
    section = read_section({} if given is None else given)
    problems = list(section.problems)
    if not section.enabled and not problems:
        return None
    wanted = section.config or config or UNSAID
    if config is not None and config != wanted and not problems:
        values = unlike(wanted, config)
        problems = ['the section "{}" gives {}, and the program {}: leave out one of them'.format(SECTION, *values)]
    problems += engine_problems(engine, section)
    if problems:
        raise refusal(problems)
    return wanted, section


def refusal(problems: Sequence[str]) -> PowerSGDConfigError:
    """Return an error that lists the problems."""
    listing = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
    return PowerSGDConfigError(
        f'the section "{SECTION}" cannot be used with this DeepSpeed configuration '
        f"({len(problems)} problem{'s' if len(problems) > 1 else ''}):\n{listing}"
    )
