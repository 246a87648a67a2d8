"""A manager of torchft, for a worker that is alone in each quorum."""

from types import SimpleNamespace
from typing import Any

from powersgd_triton import PowerSGDConfig

SHAPES = {"weight": (48, 32), "bias": (32,)}
CONFIG = PowerSGDConfig(rank=2)


class Manager:
    """A worker that is alone in each quorum, and votes as it is told."""

    def __init__(self, **options: Any) -> None:
        self._quorum_id, self._step, self._pg = 0, 0, SimpleNamespace(abort=lambda: None, getBackendName=lambda: "gloo")
        self.states: dict[str, tuple[Any, Any]] = {}
        self.votes: list[bool] = []
        self.error: Exception | None = None
        self.__dict__ |= options

    def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None:
        self.states[key] = load, save

    def current_step(self) -> int:
        return self._step

    def participating_rank(self) -> int | None:
        return 0 if self._quorum_id else None

    def num_participants(self) -> int:
        return 1

    def errored(self) -> Exception | None:
        return self.error

    def report_error(self, error: Exception) -> None:
        self.error = error

    def should_commit(self, *, applied: bool = True) -> bool:
        applied = self.votes.pop(0) if self.votes else applied
        self._step += applied
        return applied
