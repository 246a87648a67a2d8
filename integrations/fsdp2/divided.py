"""FSDP2: one state for a model whose parameters are averaged over different workers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powersgd_triton.checkpoint import StateDict
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.integrations.fsdp2.states import HybridShardState, refuse_unequal
from powersgd_triton.integrations.saved_shards import join
from powersgd_triton.integrations.several import Several, merged_loads
from powersgd_triton.integrations.sharded import ShardedHandle


class DividedState(Several, ShardedHandle):
    """The compression of a model by several states. It saves them as one, which loads on any mesh.

    Each parameter is in the state of those workers that average it, which are others on another mesh.
    """

    def __init__(self, config: PowerSGDConfig, states: Mapping[str, ShardedHandle]) -> None:
        super().__init__(config, states)
        self._parts = list(states.values())
        # What all workers do together, they do in the groups of the first state, which reach all.
        self._engine = self._parts[0]._engine

    def check_replicas(self) -> None:
        """Compare the parameters of all replicas. Collective. See ``HybridShardState.check_replicas``."""
        # All of them before an error, which only the workers of some shards may raise.
        refuse_unequal([n for state in self._parts if isinstance(state, HybridShardState) for n in state.unequal()])

    def state_dict(self) -> dict[str, Any]:
        return join([state.state_dict() for state in self._parts])

    def load_state_dict(self, state_dict: StateDict, *, rename: Mapping[str, str] | None = None) -> LoadReport:
        return merged_loads(state.load_state_dict(state_dict, rename=rename) for state in self._parts)

    def renamed(self, names: Mapping[str, str]) -> ShardedHandle:
        view = copy.copy(self)
        view._parts = [
            state.renamed({old: new for old, new in names.items() if new in state._matrices()}) for state in self._parts
        ]
        return view

    save, load = ShardedHandle.save, ShardedHandle.load

    def _begin_without(self, path: Path, missing_ok: bool) -> None:
        for state in self._parts:
            state._engine.finish()
        super()._begin_without(path, missing_ok)
