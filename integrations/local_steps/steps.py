"""Local steps: workers train apart for some steps, and then exchange what they have changed."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from powersgd_triton.checkpoint import StateDict, opened
from powersgd_triton.comm.agreement import Facts, found, together
from powersgd_triton.comm.communicator import Communicator, travel_device
from powersgd_triton.comm.nodes import NodeGroup, check_groups
from powersgd_triton.config import PowerSGDConfig, whole_number
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.facts import common_facts, replicated_facts
from powersgd_triton.core.loading import save, settle
from powersgd_triton.core.saved_state import LoadReport
from powersgd_triton.handle import Folder, Handle
from powersgd_triton.integrations.local_steps.local_tensors import chosen_config, local_tensors
from powersgd_triton.integrations.local_steps.outer_state import Outer, OuterState, Tensors
from powersgd_triton.integrations.local_steps.rounds import Rounds, length
from powersgd_triton.integrations.local_steps.saved import SavedRound, file_name, joined, pack, replace, write
from powersgd_triton.ranks.report import RankReport
from powersgd_triton.schemes import new_engine

F = TypeVar("F", bound=Callable[..., Any])


def _with_own_parameters(method: F) -> F:
    """Let a method find this worker's own parameters in the model, also within ``shared_parameters``."""

    @functools.wraps(method)
    @torch.no_grad()
    def call(self: "LocalSteps", *args: Any, **options: Any) -> Any:
        with self._outer.holding(theta=False):
            return method(self, *args, **options)

    return call  # type: ignore[return-value]


class LocalSteps(Handle):
    """Averages what workers have changed in ``every`` steps of their own, in compressed form. Collective.

    Each worker trains with an optimizer of its own. The workers share a copy of the parameters, θ. After ``every``
    steps each worker sends its pseudo-gradient, the difference of θ and its own parameters. The outer optimizer updates
    θ by their mean (DiLoCo, Douillard et al. 2023, arXiv:2311.08105), and all workers go on from θ. What compression
    does not send is added to the worker's next pseudo-gradient. Buffers are averaged exactly. If a worker's parameters
    are not finite, its pseudo-gradient is zero. At the start, all workers get the first one's parameters and buffers.

    Call ``step`` after each ``optimizer.step()``, and ``finish`` after the last one.

    Args:
        model: A module, a DistributedDataParallel over the workers of a node, an FSDP2 model that is sharded over
            ``mesh["shard"]``, or a DeepSpeed engine with ZeRO stage 1 or 2 inside a node. Parameters that do not
            require gradients are left out until they do.
        config: How pseudo-gradients are compressed: with ``quantize``, or with factors as gradients are. Budgets and
            all fields that count steps count exchanges. None sends them in fp32.
        every: Number of steps from one exchange to the next, or a function of the number of steps so far that returns
            it, for rounds that grow as the learning rate falls. It must be the same on all workers.
        outer: Returns the outer optimizer, for example ``lambda p: torch.optim.SGD(p, lr=0.8)``. Default: rate 1, so
            that θ becomes the mean of the workers' parameters.
        group: The workers that exchange pseudo-gradients. None for all. If the model is wrapped, these are the workers
            with this worker's place in each replica.
        node_group: Sum pseudo-gradients within a node first; see docs/cluster.md. A DistributedDataParallel over a node
            does so by itself.
        delay: Number of steps for which an exchange travels while the next steps are computed. What arrives is then
            added to the local parameters. 0 waits for it.
        keep: Share of the error E that stays in this worker's own parameters, which then are θ − keep · E. 1 loses
            nothing; less lets old errors decay. Default: all of E stays, apart from the parameters.
        optimizer: This worker's optimizer, if its states are to be averaged too, in fp64. By default they stay local.
        manager: A ``torchft.Manager``, over whose quorums exchanges average. The first one comes at once, and gives all
            workers the same parameters. Only for a plain module. See docs/guides/torchft.md.

    Raises:
        TypeError, ValueError, DisagreementError: An argument has the wrong type or value, the model is not supported or
            communicates with ``group`` in every step, another worker refuses, or workers differ. Nothing was changed.

    Attributes:
        every: Number of steps of the round under way.
        outer: The outer optimizer, for example for a schedule of its learning rate.
        steps, since: Number of steps so far, and since the last exchange began. ``finish`` makes them equal.
    """

    no_loss_scale = "local steps send differences of parameters, which have no loss scale"

    def __init__(
        self,
        model: nn.Module,
        config: PowerSGDConfig | None,
        every: int | Callable[[int], int] = 10,
        outer: Outer | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        node_group: NodeGroup = None,
        delay: int = 0,
        keep: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        manager: Any = None,
    ) -> None:
        workers = found("LocalSteps", lambda: Communicator(group))
        local, communicator = together("LocalSteps", lambda: (local_tensors(model, group, node_group), {}, {}), workers)

        def prepare() -> tuple[Engine, Facts, Facts]:
            if manager is not None and (communicator.world_size > 1 or communicator.others):
                raise ValueError("manager= is for a plain module of this process alone, without a process group")
            if manager is not None and optimizer is not None:
                raise ValueError(
                    "manager= needs states that stay local, since a worker that joins has none: no optimizer="
                )
            first = length(every, 0)
            if whole_number("delay", delay) >= first:
                raise ValueError(f"delay must be below every={first}, so that exchanges do not meet; got {delay}")
            chosen = chosen_config(config, local, optimizer, keep, node_group)
            if communicator.world_size > 1:
                check_groups(communicator.group, communicator.node_group)
            engine = new_engine(chosen, communicator, lambda: local.shapes, rounds=True)
            self._outer = OuterState(local, outer, engine, device, optimizer)
            own = {"every": first, "delay": delay, "keep": keep and float(keep), **common_facts(chosen, 0)}
            own["states"] = optimizer is not None
            replicated = {**replicated_facts(local.shapes, engine.plan), **self._outer.check()}
            return engine, {**own, **self._outer.settings()}, replicated

        device = next((tensor.device for _, tensor in local.tensors()), torch.device("cpu"))
        if device.type == "cpu" and dist.is_initialized():
            # Offloaded parameters are exchanged from the GPU, if the group is one of GPUs.
            device = travel_device(communicator.group)
        super().__init__(together("LocalSteps", prepare, communicator, device))
        self.outer = self._outer.optimizer
        self._outer.begin_equal()
        self._rounds = Rounds(self._outer, manager, every, delay, keep or 0.0)
        self._managed = self._rounds.quorums
        if manager is not None:
            with torch.no_grad():
                self._rounds.exchange()
                self._rounds.advance(finish=True)

    @property
    def every(self) -> int:
        return self._rounds.every

    @property
    def steps(self) -> int:
        return self._rounds.steps

    @property
    def since(self) -> int:
        return self._rounds.since

    @_with_own_parameters
    def step(self) -> None:
        """Count a step of the local optimizer. Every ``every`` steps, exchange pseudo-gradients; then collective.

        Raises:
            RuntimeError: A worker was lost. The local and the shared parameters and the errors stay as they are, unless
                only buffers were left to be averaged: then all of them have the exchange.
            ValueError, DisagreementError: What is exchanged has changed, or differs between workers. They stay as well.
                With a delay, it may come one step later.
        """
        self._rounds.step()

    @_with_own_parameters
    def finish(self) -> None:
        """Exchange what was changed since the last exchange, so that all workers have θ. Collective.

        The workers may have taken different numbers of steps since the last exchange.
        """
        self._rounds.finish()

    def shared_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Return a context within which the model's parameters are θ, for example to evaluate or export it.

        The methods work within it as they do outside.
        """
        return self._outer.holding(theta=True)

    def shared(self) -> Tensors:
        """Return copies {name: θ} of the shared parameters, in at least fp32, with the same bits on all workers."""
        return {name: theta.clone() for name, theta in self._outer.theta().items()}

    def error(self) -> Tensors:
        """See ``Handle.error``. {name: E as θ is shaped}, without tensors of which nothing was sent."""
        return self._rounds.errors()

    def report(self) -> RankReport:
        """Return how tensors are sent, and the bytes of an exchange. ``print`` shows a table."""
        found = super().report()
        apart = not (self._rounds.keep and self.config.quantize)
        return dataclasses.replace(found, every=self.every, error_bytes=found.error_bytes if apart else 0.0)

    @_with_own_parameters
    def state_dict(self) -> dict[str, Any]:
        """Return θ, the outer optimizer's state, the errors, and this worker's own parameters. Collective.

        If each worker loads its own result, training goes on with the same bits, also in the middle of a round. For
        that, each worker must save and load its local optimizer, too. Any worker's result can be loaded on any number
        of workers: all then start from the mean of what the workers had. An exchange under way is finished.

        ``save`` writes one file with what all workers share, and one of each worker's own. They replace earlier ones
        when all are written. If a worker is killed then, files may not fit together, which ``load`` notices.
        """
        self._rounds.advance(finish=True)
        self._rounds.meet("state_dict")
        engine = save(self._engine)
        settle(self._engine)
        errors = super().error()
        parts = self._outer.parts(begun=self._rounds.most(self.since + self._outer.has_begun()) > 0)
        for name, error in errors.items():
            parts[name]["own_error"] = error
        rest = {"steps": self.steps, "since": self.since, "worker": list(self._communicator.place)}
        return pack(engine, parts, self._outer, **rest)

    @_with_own_parameters
    def load_state_dict(self, state_dict: StateDict) -> LoadReport:
        """See ``Handle.load_state_dict``. Overwrites the model's parameters."""

        def read() -> tuple[tuple[SavedRound, int], Facts, Facts]:
            saved = SavedRound.parse(opened(state_dict), self._outer)
            every = self._rounds.length(before := saved.steps - saved.since)
            return (saved, every), {"steps before the saved round": before, "every": every}, saved.facts()

        self._rounds.meet("load_state_dict")
        saved, every = together("load_state_dict", read, self._communicator, self._outer.device)
        # A worker's own parts are of use only if all workers have theirs.
        own = not self._rounds.most(saved.worker != self._communicator.place)
        owner = self._communicator.place if own else None
        go_on = self._loading(saved.of_engine(own=own), strict=False, owner=owner)
        self.outer.load_state_dict(saved.outer)
        report = go_on()
        self._outer.load(saved.parts, own=own)
        self._rounds.resume(saved.steps, saved.since, every)
        if self.config.quantize is None:
            return report
        # Errors of quantized tensors are added to the next differences, as those of tensors without factors are.
        return dataclasses.replace(report, loaded=report.carried, carried=())

    def save(self, folder: Folder) -> None:
        super().save(folder)
        self._together("save", lambda: replace(Path(folder), self._communicator))

    def _write(self, state: Mapping[str, Any], folder: Path) -> None:
        write(state, folder, self._communicator)

    def _read(self, path: Path) -> StateDict:
        return self._together("load", lambda: joined(path, path.with_name(file_name(self._communicator, own=True))))

    @_with_own_parameters
    def forget(self) -> None:
        """Set all errors to zero and begin a new round from the first worker's parameters. Collective."""
        self._rounds.advance(finish=True)
        self._rounds.catch_up("forget")
        self._rounds.resume(self.steps, 0, self._rounds.meet("forget", begins=True))
        super().forget()
        self._outer.forget()

    def _file(self) -> str:
        return file_name(self._communicator)
