"""FSDP2: one state for a model whose parameters are averaged over different workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from powersgd_triton.checkpoint import StateDict
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.handle import Folder
from powersgd_triton.integrations.fsdp2.states import HybridShardState, refuse_unequal
from powersgd_triton.integrations.saved_shards import join
from powersgd_triton.integrations.several import Several, merged_loads
from powersgd_triton.integrations.sharded import ShardedHandle


class DividedState(Several[ShardedHandle], ShardedHandle):
    """The compression of a model by several states. It saves them as one, which loads on any mesh.

    Each parameter is in the state of those workers that average it, which are others on another mesh.
    """

    def __init__(self, config: PowerSGDConfig, states: Mapping[str, ShardedHandle]) -> None:
        super().__init__(config, states)
        # What all workers do together, they do in the groups of the first state, which reach all.
        self._engine = next(iter(self))._engine

    def check_replicas(self) -> None:
        """Compare the parameters of all replicas. Collective. See ``HybridShardState.check_replicas``."""
        # All of them before an error, which only the workers of some shards may raise.
        refuse_unequal([n for state in self if isinstance(state, HybridShardState) for n in state.unequal()])

    def state_dict(self) -> dict[str, Any]:
        return join([state.state_dict() for state in self])

    def _loading(self, state_dict: StateDict, **options: Any) -> Callable[[], LoadReport]:
        # What one part refuses, no other loads.
        loading = [state._loading(state_dict, **options) for state in self]
        return lambda: merged_loads(go_on() for go_on in loading)

    def renamed(self, names: Mapping[str, str]) -> ShardedHandle:
        view = super().renamed(names)
        assert isinstance(view, DividedState)
        view.states = {
            label: state.renamed({old: new for old, new in names.items() if new in state._matrices()})
            for label, state in self.states.items()
        }
        return view

    def _matrices(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for state in self for name, shape in state._matrices().items()}

    def _begin_without(self, folder: Folder, missing_ok: bool) -> None:
        for state in self:
            state._engine.finish()
        super()._begin_without(folder, missing_ok)
