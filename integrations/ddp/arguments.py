"""The arguments of ``PowerSGDState``: torch's hyperparameters, or one ``PowerSGDConfig`` in place of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from powersgd_triton.config import PowerSGDConfig

FIELDS = {
    "matrix_approximation_rank": "rank",
    "start_powerSGD_iter": "start_iter",
    "min_compression_rate": "min_compression_rate",
    "use_error_feedback": "error_feedback",
    "warm_start": "warm_start",
    "orthogonalization_epsilon": "orthogonalization_epsilon",
    "random_seed": "seed",
    "batch_tensors_with_same_shape": "batch_by_shape",
}
"""torch's hyperparameters, and the fields of the configuration that they set."""
OTHERS = ("process_group", "compression_stats_logging_frequency", "module", "node_group")
"""The arguments that are no hyperparameters. They can be given together with a configuration."""


def setting(name: str) -> Any:
    """Return a property that reads a hyperparameter of torch's from the configuration."""
    return property(lambda state: getattr(state.config, FIELDS[name]))


def configured(init: Callable[..., None]) -> Callable[..., None]:
    """Make one configuration of the hyperparameters before a constructor is called.

    Callers see the constructor's own arguments, which are torch's, and may give a configuration as the first argument,
    or as the second one after the process group. The constructor gets the configuration as ``config=``, and its values
    as torch's arguments.

    Raises:
        TypeError: Hyperparameters are given beside a configuration, or an argument has the wrong type.
    """
    signature = inspect.signature(init)
    defaults = {name: signature.parameters[name].default for name in FIELDS}

    @functools.wraps(init)
    def configured_init(state: Any, *positional: Any, **keywords: Any) -> None:
        if isinstance(keywords.get("config"), PowerSGDConfig):
            positional = (keywords.pop("config"), *positional)
        if positional and isinstance(positional[0], PowerSGDConfig):
            if len(positional) > 1:
                raise TypeError(
                    f"after a PowerSGDConfig, arguments need names, e.g. process_group=; got {positional[1]!r}"
                )
            positional = (keywords.pop("process_group", None), *positional)
        given = signature.bind(state, *positional, **keywords).arguments
        options = given.pop("options", {})
        others = {name: given[name] for name in OTHERS if name in given}
        settings = {name: given[name] for name in FIELDS if name in given}
        group = others.pop("process_group")
        check_group(group)
        config = settings.get("matrix_approximation_rank")
        if not isinstance(config, PowerSGDConfig):
            config = _from_torchs(defaults, settings, options)
        elif len(settings) > 1 or options:
            beside = [*list(settings)[1:], *options]
            raise TypeError(
                "a PowerSGDConfig was given, which holds all hyperparameters: give it "
                + ", ".join(f"{FIELDS.get(name, name)}=" for name in beside)
                + f" instead of giving {', '.join(beside)} to PowerSGDState"
            )
        values = {name: getattr(config, field) for name, field in FIELDS.items()}
        init(state, group, **values, **others, config=config)

    return configured_init


def _from_torchs(defaults: dict[str, Any], settings: dict[str, Any], options: dict[str, Any]) -> PowerSGDConfig:
    for name in settings:
        if FIELDS[name] in options:
            raise TypeError(f"{name} and {FIELDS[name]} are the same hyperparameter; give one of them")
    fields = {FIELDS[name]: value for name, value in {**defaults, **settings}.items()}
    budget = any(options.get(key) is not None for key in ("compression", "bytes_per_step"))
    # torch's default rank is no rank that the user gives together with a budget.
    if budget and "matrix_approximation_rank" not in settings:
        del fields["rank"]
    return PowerSGDConfig.from_dict({**fields, **options})


def check_group(group: Any) -> None:
    """Check the type of a process group.

    Raises:
        TypeError: It is neither a process group nor None.
    """
    # torch.distributed.new_group returns this to workers that are not in the group; ``Communicator`` refuses it.
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        return
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup or None; got {group!r}")
