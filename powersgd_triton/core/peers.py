"""What the workers tell each other, so that none waits for a worker that differs or has raised an exception."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from powersgd_triton.comm.agreement import Facts, together
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.comm.nodes import AUTO, check_groups, check_places, given_groups, place_of
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.facts import Tensors, common_facts, factor_facts, layout_facts, replicated_facts, saved_facts
from powersgd_triton.core.memory import Memory
from powersgd_triton.core.saved_state import LoadReport, SavedState, Size
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops.backend import Backend
from powersgd_triton.ops.step import Step
from powersgd_triton.ranks.plan import RankPlan

T = TypeVar("T")
Shapes = Callable[[], Mapping[str, Sequence[int]]]
"""Returns {name: shape}."""

Read = Callable[[], tuple[Any, Mapping[str, Size] | None]]
"""Returns a saved state, and the size of every tensor, or None if not all are known."""


class Peers:
    """Comparisons with the other workers that compress the same model.

    ``layout``, ``bind``, ``check`` and ``read`` run code that may fail on one worker only, and compare what it did.
    Unless all workers agree, all raise an error, and nothing has changed.

    Args:
        plan, memory, step: See ``Engine``.
        communicator: Collectives of the workers that average with each other.
        tensors: Returns {name: shape} of all tensors that are known so far.
        device: Device of the gradients. None if it is not known before they come.
    """

    def __init__(
        self,
        communicator: Communicator,
        tensors: Callable[[], Tensors],
        plan: RankPlan,
        memory: Memory,
        step: Step,
        device: torch.device | None,
    ) -> None:
        self._tensors, self._plan, self._memory, self._step = tensors, plan, memory, step
        self.communicator, self.device = communicator, device
        # The tensors whose facts were compared; None before the first step.
        self._compared: Tensors | None = None
        # The layouts of buckets by key, and those for which all workers have allocated memory.
        self._layouts: dict[Hashable, Layout] = {}
        self._bound: set[Layout] = set()

    @property
    def _config(self) -> PowerSGDConfig:
        return self._plan.config

    def together(self, call: str, act: Callable[[], tuple[T, Facts, Facts]]) -> T:
        """Run ``act`` on all workers. Collective. See ``agreement.together``."""
        return together(call, act, self.communicator, self.device)

    def connect(self, communicator: Communicator) -> None:
        """Go on with other workers. They are compared before the next step."""
        self.communicator, self._compared = communicator, None
        self._bound.clear()
        self._memory.regroup()

    # A step ----------------------------------------------------------------------------------------------------------

    def layout(self, key: Hashable, shapes: Shapes, device: torch.device) -> Layout:
        """Return the layout of a bucket. Collective when the bucket comes for the first time.

        The first call also compares configuration, tensors and step.
        """
        self.device = device
        if self.communicator.lost_nodes():
            self.connect(self.communicator)
        layout = self._layouts.get(key)
        if layout is not None and self._compared is not None:
            return layout

        def introduce() -> tuple[Layout, Facts, Facts]:
            introduced = layout or Layout.build(shapes(), self._config)
            common: Facts = {}
            replicated: Facts = layout_facts(self._config, introduced)
            if self._compared is None:
                self._plan.connect(self.communicator.world_size)
                if self.communicator.world_size > 1:
                    check_groups(self.communicator.group, self.communicator.node_group)
                all_common, all_replicated = self._facts(self._tensors() or introduced.shapes)
                # Workers that load a state compare it then. Those that unpickle one have not.
                with self._memory.streams.everywhere():
                    saved = saved_facts(self._memory.loaded)
                common, replicated = all_common, {**replicated, **all_replicated, **saved}
            return introduced, common, replicated

        layout = self._layouts[key] = self.together("a step", introduce)
        if self._compared is None:
            self._form_nodes(device)
            self._compared = self._tensors() or layout.shapes
        return layout

    def _form_nodes(self, device: torch.device) -> None:
        """Find the nodes, and check that groups that were given fit together on all workers. Collective."""
        communicator = self.communicator
        communicator.form_nodes(device)
        groups = given_groups(communicator.node_group)
        if communicator.inside is not None and groups is not None:
            places = communicator.gather(place_of(groups), device)
            self.together("a step", lambda: (check_places(communicator.group, groups, places), {}, {}))

    def bind(self, layout: Layout, gradients: Mapping[str, Tensor]) -> Backend:
        """Return the backend of a bucket. Collective when the bucket comes for the first time.

        It is not collective if a bucket is new because ranks were planned again, since the host of a GPU must not wait.
        """

        def allocate() -> tuple[Backend, Facts, Facts]:
            # Planned ranks enter a layout only here. A new plan makes a new layout and therefore a new bucket, which
            # takes over the errors and the columns of the bases that fit.
            share = self.communicator.share
            backend = self._memory.bind(self._plan.layout(layout), gradients, self._step, share)
            # Moving an error is collective, and the workers of a node exchange gradients as they are.
            dtypes = sorted({str(gradient.dtype) for gradient in gradients.values()}) if share[1] > 1 else []
            return backend, {}, {"errors to move": self._memory.moving(), "dtypes of gradients": dtypes}

        if layout in self._bound:
            return allocate()[0]
        backend = self.together("the allocation for a bucket", allocate)
        self._bound.add(layout)
        return backend

    def check(self) -> None:
        """Compare configuration, tensors, step and the bits of the factors. Collective, if there was a step."""
        tensors = self._compared
        if tensors is None:
            return

        def facts() -> tuple[None, Facts, Facts]:
            common, replicated = self._facts(tensors)
            return None, common, {**replicated, **factor_facts(self._memory.buckets())}

        self.together("a check", facts)

    def _facts(self, tensors: Tensors) -> tuple[Facts, Facts]:
        """Return common and replicated facts."""
        node_group = self.communicator.node_group
        levels = node_group if node_group in (None, AUTO) else "given"
        common = {**common_facts(self._config, self._step.iteration), "node_group": levels}
        return common, replicated_facts(self._config, tensors, self._plan)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def read(
        self, read: Read, *, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> tuple[SavedState, LoadReport]:
        """Check a saved state, and compare what the workers are about to load. Collective.

        Arguments and errors are those of ``Engine.load_state_dict``. ``Engine.adopt`` takes the result.
        """

        def check() -> tuple[tuple[SavedState, LoadReport], Facts, Facts]:
            saved, report = self.parsed(*read(), strict=strict, rename=rename)
            with self._memory.streams.everywhere():
                return (saved, report), {}, saved_facts(saved)

        return self.together("load_state_dict", check)

    def parsed(
        self,
        state_dict: Any,
        tensors: Mapping[str, Size] | None,
        *,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        owner: tuple[int, int] | None = None,
    ) -> tuple[SavedState, LoadReport]:
        """Check this worker's saved state. Return copies of the parts that fit."""
        known, feedback = self._memory.sizes if tensors is None else tensors, self._config.error_feedback
        saved = SavedState.parse(state_dict, needs_errors=feedback, rename=rename)
        report = saved.compare(known, complete=tensors is not None, strict=strict, feedback=feedback)
        with self._memory.streams.on(*{part.device for parts in saved.matrices.values() for part in parts.values()}):
            return saved.used(report, strict=strict, owner=owner), report

    def forget(self) -> None:
        """Note that all buckets have to be laid out and their memory allocated again."""
        self._layouts.clear()
        self._bound.clear()
