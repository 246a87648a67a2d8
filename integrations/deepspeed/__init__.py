"""DeepSpeed: a section ``"powersgd": {"compression": 20}`` of ds_config.json compresses gradients at ZeRO 0 to 3.

At stages 1 and 2 the parameters that workers gather after a step are compressed too.

``powersgd_triton.autoload`` finds the section in an unchanged program. Without it, call ``enable(engine)``, let this
module run the program, or import it in place of ``deepspeed``, to which it forwards; see docs/guides/deepspeed.md.
"""

import functools
from collections.abc import Mapping
from typing import Any

try:
    import deepspeed as _deepspeed
except ImportError as error:
    raise ImportError("DeepSpeed is not installed; in a clone, run pip install '.[deepspeed]'") from error

from powersgd_triton.comm.agreement import Facts, together
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.nodes import NodeGroup
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.integrations.common import announce, unlike
from powersgd_triton.integrations.deepspeed import refusals
from powersgd_triton.integrations.deepspeed.engines import Traffic, describe, loss_scale_source
from powersgd_triton.integrations.deepspeed.experts import MixtureState, State
from powersgd_triton.integrations.deepspeed.overrides import override_methods
from powersgd_triton.integrations.deepspeed.parameters import ParameterOverride, why_not_differences
from powersgd_triton.integrations.deepspeed.refusals import PowerSGDConfigError
from powersgd_triton.integrations.deepspeed.state import DeepSpeedState

__all__ = ["DeepSpeedState", "MixtureState", "PowerSGDConfigError", "enable", "expected_traffic", "initialize"]

# The original, which neither the runner nor ``autoload`` has replaced.
_initialize = vars(_deepspeed)["initialize"]


@functools.wraps(_initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:
    """As ``deepspeed.initialize``. Compresses gradients if the configuration has the section "powersgd".

    Raises:
        PowerSGDConfigError: The section cannot be used with this configuration. The error lists all reasons.
    """
    returned = _initialize(*args, **kwargs)
    engine = returned[0]
    if refusals.section_of(engine) is None:
        announce('powersgd: off, the configuration has no section "powersgd"')
    else:
        enable(engine)
    return returned


def enable_from_section(engine: Any) -> None:
    """Compress an engine's gradients if its configuration says how. Else the program may call ``enable`` later."""
    section = refusals.section_of(engine)
    if isinstance(section, Mapping) and section and {refusals.PARAMETERS, refusals.NODE_GROUP}.issuperset(section):
        if problems := refusals.read_section(section).problems:
            raise refusals.refusal(problems)
        announce(f'powersgd: off until the program switches it on: the section has only "{", ".join(section)}"')
    else:
        enable(engine)


def enable(engine: Any, config: PowerSGDConfig | None = None, *, node_group: NodeGroup = None) -> State | None:
    """Compress an engine's gradients. Collective. Call it before training.

    Args:
        engine: The engine that ``deepspeed.initialize`` returned.
        config: Configuration of the compression. None takes the section "powersgd" of the DeepSpeed configuration.
        node_group: "auto", or groups of the workers that share a node; see docs/cluster.md. None takes the section's.

    Returns:
        The state, new or existing, also available as ``engine.powersgd``. None if the section has ``"enabled": false``.

    Raises:
        PowerSGDConfigError: There is no configuration, two differ, or DeepSpeed's forbids it. It lists all reasons.
    """
    state: State | None = getattr(engine, "powersgd", None)
    if state is not None:
        if config is not None and config != (given := state._engine.given):
            values = unlike(given, config)
            raise refusals.refusal(["the engine is compressed with {} already; got {}".format(*values)])
        return state

    def prepare() -> tuple[tuple[State, str | None] | None, Facts, Facts]:
        found = refusals.chosen(engine, config)
        if found is None:
            return None, {"enabled": False}, {}
        wanted, section = found
        try:
            make = MixtureState if engine.has_moe_layers else DeepSpeedState
            state: State = make(wanted, engine, node_group or section.node_group)
        except (TypeError, ValueError) as error:
            raise refusals.refusal([str(error)]) from None
        parameters = section.parameters if why_not_differences(engine) is None else None
        return (state, parameters), {"enabled": True, "parameters": parameters}, {}

    prepared = together("deepspeed.enable", prepare, Communicator())
    if prepared is None:
        announce('powersgd: off, the section has "enabled": false')
        return None
    state, parameters = prepared
    engine.powersgd = state
    state.attach(loss_scale_source(engine))
    if parameters is not None:
        state.parameters = ParameterOverride(engine, state.config, parameters)
    override_methods(engine, state)
    announce(describe(engine, state.config, state.traffic(), parameters))
    return state


def expected_traffic(engine: Any, state: State) -> Traffic:  # noqa: ARG001
    """Return the bytes that an engine's step sends after ``start_iter``, with and without compression."""
    return state.traffic()


def __getattr__(name: str) -> Any:
    return getattr(_deepspeed, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_deepspeed)})
