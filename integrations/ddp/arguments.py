"""The arguments of ``PowerSGDState``: torch's hyperparameters, or one ``PowerSGDConfig`` in place of them."""

import inspect
import logging
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from powersgd_triton.config import PowerSGDConfig

torchs_logger = logging.getLogger("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
"""Logger of torch's class and hooks. What they log is logged there too, so that a program's filters still apply."""

TORCHS: dict[str, tuple[Any, str | None]] = {
    "matrix_approximation_rank": (1, "rank"),
    "start_powerSGD_iter": (1_000, "start_iter"),
    "min_compression_rate": (2, "min_compression_rate"),
    "use_error_feedback": (True, "error_feedback"),
    "warm_start": (True, "warm_start"),
    "orthogonalization_epsilon": (0, "orthogonalization_epsilon"),
    "random_seed": (0, "seed"),
    "compression_stats_logging_frequency": (10_000, None),
    "batch_tensors_with_same_shape": (False, "batch_by_shape"),
}
"""torch's arguments in torch's order: their defaults, and the fields of the configuration that they set."""

OWN_DEFAULTS = {
    ("compression", "bytes_per_step"): {"matrix_approximation_rank"},
    ("quantize", "codes"): {"matrix_approximation_rank", "start_powerSGD_iter", "use_error_feedback"},
}
"""{fields of which one is given: the arguments whose defaults are then those of the configuration}."""

FIELDS = {name: field for name, (_, field) in TORCHS.items() if field is not None}
_PLACED, _NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
SIGNATURE = inspect.Signature(
    [
        inspect.Parameter("process_group", _PLACED),
        *(inspect.Parameter(name, _PLACED, default=default) for name, (default, _) in TORCHS.items()),
        *(inspect.Parameter(name, _NAMED, default=None) for name in ("module", "node_group")),
        inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD),
    ]
)


def setting(name: str) -> Any:
    """Return a property that reads a hyperparameter of torch's from the configuration."""
    return property(lambda state: getattr(state.config, FIELDS[name]))


def of_torchs_hook(state: object) -> NoReturn:  # noqa: ARG001
    """Refuse to be read by torch's hook."""
    raise AttributeError("torch's hook cannot use this state: register powersgd_triton.integrations.ddp.powerSGD_hook")


def parsed(positional: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[PowerSGDConfig, dict[str, Any]]:
    """Return the configuration, and all arguments. TypeError: One is beside a configuration, or has a wrong type."""
    # A configuration may be the first argument, the second one after the process group, or ``config=``.
    if isinstance(keywords.get("config"), PowerSGDConfig):
        positional = (keywords.pop("config"), *positional)
    if positional and isinstance(positional[0], PowerSGDConfig):
        if len(positional) > 1:
            raise TypeError(f"after a PowerSGDConfig, arguments need names, e.g. process_group=; got {positional[1]!r}")
        positional = (keywords.pop("process_group", None), *positional)
    bound = SIGNATURE.bind(*positional, **keywords)
    settings = [name for name in bound.arguments if name in FIELDS]
    bound.apply_defaults()
    given = bound.arguments
    config, options, group = given["matrix_approximation_rank"], given["options"], given["process_group"]
    if isinstance(group, nn.Module):
        raise TypeError(f"process_group must be a process group; got a {type(group).__name__}: give it as module=")
    if isinstance(config, PowerSGDConfig):
        beside = [*settings[1:], *options]
        if beside:
            raise TypeError(
                "a PowerSGDConfig was given, which holds all hyperparameters: give it "
                + ", ".join(f"{FIELDS.get(name, name)}=" for name in beside)
                + f" instead of giving {', '.join(beside)} to PowerSGDState"
            )
        return config, given
    for name in settings:
        if FIELDS[name] in options:
            raise TypeError(f"{name} and {FIELDS[name]} are the same hyperparameter; give one of them")
    fields = {field: given[name] for name, field in FIELDS.items()}
    # torch's defaults are nothing that the user gives together with a budget or a format.
    for keys, names in OWN_DEFAULTS.items():
        if any(options.get(key) is not None for key in keys):
            for name in names - set(settings):
                fields.pop(FIELDS[name], None)
    return PowerSGDConfig.from_dict({**fields, **options}), given


def log(config: PowerSGDConfig, given: Mapping[str, Any]) -> None:
    """Log torch's arguments as torch does, in its order."""
    values = {**given, **{name: getattr(config, field) for name, field in FIELDS.items()}}
    epsilon = "orthogonalization_epsilon"
    names = [name for name in TORCHS if name != epsilon]
    names.insert(names.index("use_error_feedback"), epsilon)
    torchs_logger.info("PowerSGD config: %s", "; ".join(f"{name} = {values[name]}" for name in names))
