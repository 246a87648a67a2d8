"""One handle for a model whose parameters are averaged over different workers, as experts and dense layers are."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor

from powersgd_triton.config import AUTO, PowerSGDConfig
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.core.telemetry import Callback
from powersgd_triton.handle import Folder, Handle
from powersgd_triton.ops.step import LossScaleSource
from powersgd_triton.ranks.report import RankReport

S = TypeVar("S", bound=Handle)


class Several(Handle, Generic[S]):
    """The compression of one model by several states, each with its own parameters and workers.

    Args:
        states: {label: state}. No parameter is in two of them. The workers of each state's communicator and of its
            ``others`` must be the same, so that all hear of an error.
    """

    def __init__(self, states: Mapping[str, S]) -> None:
        self.states = dict(states)
        # What all workers do together, they do in the groups of the first state, which reach all.
        self._engine = next(iter(self))._engine
        self.saved_with_model = all(state.saved_with_model for state in self)
        self.replaces_reduce_scatter = any(state.replaces_reduce_scatter for state in self)

    def __iter__(self) -> Iterator[S]:
        return iter(self.states.values())

    @property
    def iteration(self) -> int:
        # A step may leave out the parameters of a state.
        return max(state.iteration for state in self)

    def compression_stats(self) -> tuple[float, int, int]:
        before, after = (sum(numbers) for numbers in zip(*(s.compression_stats()[1:] for s in self), strict=True))
        return (before / after if after else 0.0, before, after)

    def report(self) -> RankReport:
        reports = [state.report() for state in self]
        messages = sum((collections.Counter(report.exchanges) for report in reports), collections.Counter[str]())
        steps = [report.whole_step for report in reports if report.whole_step is not None]
        budgets = [report.budget for report in reports if report.budget is not None]
        return dataclasses.replace(
            reports[0],
            tensors=tuple(tensor for report in reports for tensor in report.tensors),
            exchanges=dict(messages),
            node_workers=max(report.node_workers for report in reports),
            whole_step=(sum(plain for plain, _ in steps), sum(sent for _, sent in steps)) if steps else None,
            budget=sum(budgets) if budgets else None,
            error_bytes=sum(report.error_bytes for report in reports),
            zeroed=sum(report.zeroed for report in reports),
            left_out=tuple(dict.fromkeys(name for report in reports for name in report.left_out)),
        )

    def attach(self, scaler: LossScaleSource) -> None:
        for state in self:
            state.attach(scaler)

    def telemetry(self, callback: Callback | None = None, *, writer: Any = None, every: int = 50) -> None:
        for state in self:
            state.telemetry(callback, writer=writer, every=every)

    def error(self) -> dict[str, Tensor]:
        return {name: error for state in self for name, error in state.error().items()}

    def forget(self) -> None:
        for state in self:
            state.forget()

    def _begin_without(self, folder: Folder, missing_ok: bool) -> None:
        for state in self:
            state._begin_without(folder, missing_ok)


def check_shared(config: PowerSGDConfig) -> None:
    """Refuse a configuration that several states cannot follow together: ValueError."""
    fields = {"compression": config.compression == AUTO, "max_overhead": config.max_overhead is not None}
    fields["bytes_per_step"] = config.bytes_per_step is not None
    for field in (name for name, given in fields.items() if given):
        raise ValueError(
            f"{field}={getattr(config, field)!r} is chosen for a whole step, but this model's parameters are averaged "
            "over different workers, each kind by itself: give a number as compression, or a rank"
        )


def merged_loads(reports: Iterable[LoadReport]) -> LoadReport:
    """Return one report of what was loaded. No matrix is in two of them."""
    found = [dataclasses.asdict(report) for report in reports]
    return LoadReport(**{field: tuple(sorted(name for each in found for name in each[field])) for field in found[0]})
