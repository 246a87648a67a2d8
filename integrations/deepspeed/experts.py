"""DeepSpeed: mixtures of experts, whose gradients are averaged over fewer workers than those of other parameters.

Workers of an expert-parallel group have different experts. Those of an expert-data group have the same ones, and
average their gradients.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from powersgd_triton.checkpoint import StateDict
from powersgd_triton.comm.nodes import NodeGroup
from powersgd_triton.config import PowerSGDConfig, logger
from powersgd_triton.core.saved_state import LoadReport, listing
from powersgd_triton.handle import Folder
from powersgd_triton.integrations.common import plain_name
from powersgd_triton.integrations.deepspeed.engines import Traffic, experts_group
from powersgd_triton.integrations.deepspeed.parameters import ParameterOverride
from powersgd_triton.integrations.deepspeed.state import EXPERTS, DeepSpeedState, Gradients, Parts
from powersgd_triton.integrations.several import Several, check_shared, merged_loads

DENSE = "dense"
"""Label of the state of all parameters that are no experts. Other labels are DeepSpeed's names of groups."""


class MixtureState(Several[DeepSpeedState]):
    """The compression of an engine with experts: a state for each expert-data group, and one for other parameters.

    Attributes:
        group: Process group that averages the other parameters.
        left_out: Names of experts that only this worker has, so that there is nothing to average.
    """

    def __init__(self, config: PowerSGDConfig, engine: Any, node_group: NodeGroup = None) -> None:
        check_shared(config)
        groups = dict.fromkeys(map(experts_group, engine.module.parameters()))
        shared = [g for g in groups if g and dist.get_world_size(engine.expert_data_parallel_group[g]) > 1]
        self._dense = DeepSpeedState(config, engine, node_group)
        self._experts = {group: DeepSpeedState(config, engine, experts=group) for group in shared}
        super().__init__({DENSE: self._dense, **self._experts})
        self.group = self._dense.group
        owners: dict[int, DeepSpeedState | None] = {identity: state for state in self for identity in state.names}
        alone = {id(p): plain_name(name) for name, p in engine.module.named_parameters() if id(p) not in owners}
        self._owners = owners | dict.fromkeys(alone)
        self.left_out = self._dense.left_out = tuple(alone.values())

    @property
    def parameters(self) -> ParameterOverride | None:
        """What sends parameters as differences. None if DeepSpeed gathers them."""
        return self._dense.parameters

    @parameters.setter
    def parameters(self, override: ParameterOverride | None) -> None:
        for state in self:
            state.parameters = override

    def compressing(self) -> bool:
        # Each one notes the call.
        compressing = [state.compressing() for state in self]
        return all(compressing)

    def averages(self, group: Any) -> bool:
        return any(state.averages(group) for state in self)

    def average(self, gradients: Gradients, parts: Parts = None, divisor: float | None = None) -> None:
        """See ``DeepSpeedState.average``. The sum over one worker is its gradient."""
        # In one order on all workers. A parameter that is not known is an error of the state for all workers.
        owners = {parameter: self._owners.get(id(parameter), self._dense) for parameter in gradients}
        for state in self:
            own = [parameter for parameter, owner in owners.items() if owner is state]
            kept = None if parts is None else {parameter: parts[parameter] for parameter in own}
            state.average({parameter: gradients[parameter] for parameter in own}, kept, divisor)
        for parameter, owner in owners.items():
            if owner is None and divisor is not None:
                (gradients[parameter] if parts is None else parts[parameter][1]).div_(divisor)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        with contextlib.ExitStack() as steps:
            for state in self:
                steps.enter_context(state.step())
            yield

    def traffic(self) -> Traffic:
        """See ``DeepSpeedState.traffic``."""
        parts = [dataclasses.astuple(state.traffic()) for state in self]
        return Traffic(*map(sum, zip(*parts, strict=True)))

    def exact_parameters(self) -> contextlib.AbstractContextManager[None]:
        """See ``DeepSpeedState.exact_parameters``."""
        return self._dense.exact_parameters()

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return {label: state} of all states. Collective."""
        return {label: state.state_dict() for label, state in self.states.items()}

    def load_state_dict(self, state_dict: StateDict) -> LoadReport:
        """Continue from the result of ``state_dict``. Collective. ValueError: It does not fit; nothing was changed."""

        def parts() -> Mapping[str, StateDict]:
            found = state_dict.keys() if isinstance(state_dict, Mapping) else {type(state_dict).__name__}
            if not isinstance(state_dict, Mapping) or found != self.states.keys():
                raise ValueError(f"expected a saved state with the parts {listing(self.states)}; got {listing(found)}")
            return state_dict

        saved = self._dense._together("load_state_dict", parts)
        loading = [state._loading(saved[label]) for label, state in self.states.items()]
        return merged_loads(go_on() for go_on in loading)

    def save(self, folder: Folder) -> None:
        # Their files have different names.
        for state in self:
            state.save(folder)

    def _reading(self, find: Callable[[], Path | None]) -> Callable[[], LoadReport] | None:
        """See ``Handle``. Experts without a state start without errors. ValueError: They were distributed otherwise."""

        def saved_in() -> Path | None:
            # The one folder of all states: older states of experts do not belong to newer ones of the rest.
            return self._dense.saved_in(find())

        self._dense._together("load", lambda: self._check_experts(saved_in()))
        found = {state: state._read_folder(saved_in) for state in self}
        if not any(found.values()):
            return None

        def go_on() -> LoadReport:
            reports = []
            for state, load in found.items():
                if load is None:
                    logger.warning("powersgd: there is no PowerSGD state of some experts; their errors start at zero")
                    state.forget()
                else:
                    reports.append(load())
            return merged_loads(reports)

        return go_on

    def _check_experts(self, folder: Path | None) -> None:
        saved = sorted(folder.glob(EXPERTS.format(group="ep_size_*", index=0))) if folder is not None else []
        known = {EXPERTS.format(group=group, index=0) for group in self._experts}
        others = [file.name for file in saved if file.name not in known]
        if others:
            raise ValueError(
                f"{folder} has {', '.join(others)}: errors of experts that were distributed otherwise. This engine "
                f"compresses those of {', '.join(self._experts) or 'no group'}. Continue with the ep_size and workers "
                "that saved it, or remove powersgd_ep_size_*_state.pt to start experts with errors of zero"
            )


State = DeepSpeedState | MixtureState
