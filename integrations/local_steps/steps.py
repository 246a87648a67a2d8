"""Local steps: workers train apart for some steps, and then exchange what they have changed."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from powersgd_triton.checkpoint import StateDict, opened
from powersgd_triton.checkpoint import save as save_file
from powersgd_triton.comm.agreement import Facts, fingerprint, together
from powersgd_triton.comm.communicator import Communicator, travel_device
from powersgd_triton.comm.nodes import NodeGroup, check_groups
from powersgd_triton.config import PowerSGDConfig, whole_number
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.facts import common_facts, replicated_facts, saved_facts
from powersgd_triton.core.handle import FOUND, Folder, Handle
from powersgd_triton.core.saved_state import LoadReport, SavedState
from powersgd_triton.core.tuning import refuse_auto
from powersgd_triton.integrations.local_steps.held import Held, held, levels, local
from powersgd_triton.integrations.local_steps.saved import (
    COMMON,
    OWN,
    SavedRound,
    joined,
    pack,
    start,
    unpack,
    with_errors,
    without,
)
from powersgd_triton.layout.layout import sizes
from powersgd_triton.ops.host_copy import HostCopy
from powersgd_triton.ops.step import LossScaleSource
from powersgd_triton.ranks.report import RankReport

logger = logging.getLogger("powersgd_triton.integrations.local_steps")

Outer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Returns an optimizer of the shared parameters. Their gradient is the mean of shared − local parameters."""

FRAGMENT = 1 << 25
"""Elements of the model that are exchanged at a time, since an exchange needs memory for several copies of them."""

LARGEST = 1e30
"""Magnitude of changes from which on they count as not finite, since sums of them might not be."""

T = TypeVar("T")
Tensors = dict[str, Tensor]


def averaging(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that sets the shared parameters to the mean of the local ones."""
    return torch.optim.SGD(parameters, lr=1.0)


class LocalSteps(Handle):
    """Averages what workers have changed in ``every`` steps of their own, in compressed form. Collective.

    Each worker trains with an optimizer of its own. The workers share a copy of the parameters, θ. After ``every``
    steps each worker sends the difference of θ and its own parameters, and the mean difference is the gradient with
    which ``outer`` updates θ (Douillard et al. 2023, arXiv:2311.08105). All workers then go on from θ. What compression
    does not send is added to the worker's next difference. At the start, all workers get the parameters and buffers of
    the first one.

    Call ``step`` after each ``optimizer.step()``, and ``finish`` after the last one.

    In an exchange, buffers are averaged exactly. If a worker's parameters are not finite, it contributes no changes of
    its own, and goes on from θ like the others.

    Args:
        model: A module, a DistributedDataParallel over the workers of a node, an FSDP2 model that is sharded over
            ``mesh["shard"]``, or a DeepSpeed engine with ZeRO stage 1 or 2 inside a node. Parameters that do not
            require gradients are left out.
        config: How differences are compressed: with ``codes``, or with factors as gradients are. Budgets and all fields
            that count steps count exchanges. None sends differences in fp32.
        every: Number of steps from one exchange to the next.
        outer: Returns the optimizer of θ, for example ``lambda p: torch.optim.SGD(p, lr=0.8)``. Default: rate 1, so
            that θ becomes the mean of the workers' parameters.
        group: The workers that exchange differences. None for all. If the model is wrapped, these are the workers with
            this worker's place in each replica.
        node_group: Sum differences within a node first; see docs/cluster.md. A DistributedDataParallel over a node does
            so by itself.
        delay: Number of steps for which an exchange travels while the next steps are computed. What arrives is then
            added to the local parameters. 0 waits for it.
        optimizer: This worker's optimizer, if its states are to be averaged too, in fp32. By default they stay local.

    Raises:
        TypeError: An argument has the wrong type, or the model is not supported.
        ValueError: An argument is out of range, the model communicates with ``group`` in every step, or workers refuse
            something. Nothing was changed.
        DisagreementError: Workers differ in their arguments or tensors. Nothing was changed.

    Attributes:
        every: Number of steps from one exchange to the next. Change it at the same step on all workers.
    """

    def __init__(
        self,
        model: nn.Module,
        config: PowerSGDConfig | None,
        every: int = 10,
        outer: Outer | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        node_group: NodeGroup = None,
        delay: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        def find() -> tuple[tuple[Held, Communicator], Facts, Facts]:
            found = held(model, group)
            nodes = levels(found, group, node_group)
            whole = None if nodes is not None and found.node is not None else group
            return (found, Communicator(whole, found.shards, node_group=nodes)), {}, {}

        # The other workers would wait for one that has refused its model.
        self._held, communicator = together("LocalSteps", find, Communicator(group))

        def prepare() -> tuple[Engine, Facts, Facts]:
            self.every, self.delay = whole_number("every", every, 1), whole_number("delay", delay)
            if self.delay >= self.every:
                raise ValueError(f"delay must be below every={self.every}, so that exchanges do not meet; got {delay}")
            chosen = PowerSGDConfig(rank=_no_rank) if config is None else config
            if isinstance(chosen, PowerSGDConfig) and chosen.measures:
                refuse_auto(chosen, "an exchange of local steps")
                raise ValueError("max_overhead is a share of a step, and local steps have none: give max_rank")
            if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
            if self._held.flat and config is not None and chosen.codes is None:
                raise ValueError(
                    "DeepSpeed's workers own parts of several parameters in a row, which are no matrices of low rank: "
                    f'give codes, for example PowerSGDConfig(codes="ternary"), or None; got rank={config.rank}, '
                    f"compression={config.compression}, bytes_per_step={config.bytes_per_step}"
                )
            tensors = dict(self._held.tensors())
            if not any(map(math.prod, self._shapes.values())):
                raise ValueError("the model has no parameters that require gradients")
            if communicator.world_size > 1:
                check_groups(communicator.group, communicator.node_group)
            engine = Engine(chosen, communicator, lambda: self._shapes, codes=True)
            self._shared = {
                name: nn.Parameter(tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True).contiguous())
                for name, tensor in tensors.items()
            }
            self.outer = (outer or averaging)(list(self._shared.values()))
            if not isinstance(self.outer, torch.optim.Optimizer):
                raise TypeError(f"outer must return a torch.optim.Optimizer; got {type(self.outer).__name__}")
            own = {"every": self.every, "delay": self.delay, "outer": repr(self.outer), "states": optimizer is not None}
            dtypes = {f"dtype of {name!r}": str(tensor.dtype) for name, tensor in tensors.items()}
            return engine, own | common_facts(chosen, 0), dtypes | replicated_facts(chosen, self._shapes, engine.plan)

        self._shapes = self._held.shapes
        self._device = next((tensor.device for _, tensor in self._held.tensors()), torch.device("cpu"))
        if self._device.type == "cpu" and dist.is_initialized():
            # Offloaded parameters are exchanged from the GPU, if the group is one of GPUs.
            self._device = travel_device(communicator.group)
        super().__init__(together("LocalSteps", prepare, communicator, self._device))
        self._optimizer = optimizer
        # Steps since the last exchange began, and steps in all.
        self.since = self.steps = 0
        # The exchange under way.
        self._flight: Flight | None = None
        self._finite: HostCopy | None = None
        self._begin_equal()

    # Steps -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Count a step of the local optimizer. Every ``every`` steps, exchange what was changed; then collective.

        Raises:
            RuntimeError: A worker was lost. The local and the shared parameters and what is owed stay as they are.
            DisagreementError: Workers differ; see ``PowerSGDConfig.check_every``.
        """
        self.steps += 1
        self.since += 1
        if self._flight is not None:
            self._travel()
        if self.since >= self.every:
            self._exchange()

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange what was changed since the last exchange, so that all workers have θ. Collective."""
        self._land()
        if self.since:
            self._exchange()
            self._land()

    def _exchange(self) -> None:
        """Begin an exchange. Without a delay, finish it."""
        self._land()
        flight = self._differences()
        self._average_exactly(flight.finite)
        self._flight = flight
        self.since = 0
        if self.delay:
            self._send(flight, flight.fragments[:1])
        else:
            self._land()

    def _travel(self) -> None:
        """Advance the exchange under way by one step."""
        flight = self._flight
        assert flight is not None
        flight.steps += 1
        if flight.steps >= self.delay:
            self._land()
        else:
            self._send(flight, flight.fragments[flight.sent : flight.sent + 1])

    def _land(self) -> None:
        """Finish the exchange under way, if there is one, and go on from what it has changed."""
        flight = self._flight
        if flight is None:
            return
        self._send(flight, flight.fragments[flight.sent :], finish=True)
        self._flight = None
        for name, parameter in self._shared.items():
            parameter.grad = _without_padding(flight.differences[name], parameter).to(parameter.device)
        self.outer.step()
        self.outer.zero_grad()
        for name, tensor in self._held.tensors():
            shared = self._shared[name].detach()
            if flight.begun is not None:
                # Keep what was changed since.
                shared = shared + (tensor.to(shared.dtype) - flight.begun[name])
            tensor.copy_(shared)
        self._held.refresh()
        self._check()

    def _differences(self) -> Flight:
        """Return θ − local parameters, with zeros if this worker's are not finite; it then gets θ."""
        differences: Tensors = {}
        for name, tensor in self._held.tensors():
            start = self._start(name, tensor)
            difference = (start - tensor.to(start.dtype)).to(self._device)
            differences[name] = _padded(difference, self._shapes[name])
        finite = self._is_finite(differences.values())
        begun: Tensors | None = {} if self.delay else None
        for name, tensor in self._held.tensors():
            difference = differences[name]
            difference.copy_(torch.where(finite, difference, 0))
            if begun is not None:
                start = self._start(name, tensor)
                begun[name] = torch.where(finite.to(tensor.device), tensor.to(start.dtype), start)
                tensor.copy_(begun[name])
        # A step that fails leaves factors' errors with the differences in them. Errors of codes stay as they were.
        before = None if self.config.codes else self._engine.memory.save(self._engine.step, lambda error: error)
        return Flight(differences, self._fragments(), finite, begun, before, steps_before=self.since)

    def _start(self, name: str, tensor: Tensor) -> Tensor:
        """Return θ as it was rounded into the local parameters."""
        shared = self._shared[name].detach()
        return shared.to(tensor.dtype).to(shared.dtype)

    def _is_finite(self, differences: Iterable[Tensor]) -> Tensor:
        """Return whether this worker's replica is finite, as a bool scalar on the device."""
        largest = [torch.linalg.vector_norm(each, math.inf) for each in differences if each.numel()]
        finite = torch.ones((), dtype=torch.bool, device=self._device)
        if largest:
            finite = (torch.stack([each.double() for each in largest]) < LARGEST).all()
        if self._engine.communicator.others:
            flag = finite.int()
            for shards in self._engine.communicator.others:
                shards.minimum(flag)
            finite = flag > 0
        if self._finite is not None and not self._finite.numbers():
            logger.warning("this worker's parameters were not finite, so that it went on from the shared parameters")
        # Read in the next exchange, so that the host does not wait for the device now.
        self._finite = HostCopy(finite)
        return finite

    def _fragments(self) -> list[list[str]]:
        """Divide the tensors into fragments that travel one after the other."""
        sizes = {name: math.prod(shape) for name, shape in self._shapes.items()}
        # With a delay, the next one leaves in the next step, so that the host never waits for the one before.
        most = -(-sum(sizes.values()) // max(1, self.delay - 1)) if self.delay else FRAGMENT
        fragments: list[list[str]] = [[]]
        filled = 0
        for name, size in sizes.items():
            if not size:
                continue
            if fragments[-1] and filled + size > most:
                fragments.append([])
                filled = 0
            fragments[-1].append(name)
            filled += size
        return fragments

    def _send(self, flight: Flight, fragments: Sequence[list[str]], *, finish: bool = False) -> None:
        """Start averaging fragments of the differences in place, or advance those under way. With ``finish``, do all.

        If that fails, the exchange has not been: the local parameters still have all changes, and the next one sends
        them.
        """
        try:
            self._start_fragments(flight, fragments)
            if finish or not fragments:
                self._engine.advance(finish=finish)
        except BaseException:
            self._flight, self.since = None, self.since + flight.steps_before
            if flight.before is not None:
                self._engine.adopt(flight.before, LoadReport())
            raise

    def _start_fragments(self, flight: Flight, fragments: Sequence[list[str]]) -> None:
        engine = self._engine
        for names in fragments:
            flight.sent += 1
            shapes = {name: self._shapes[name] for name in names}
            layout = engine.begin(tuple(names), shapes.copy, self._device, last=False)
            differences = {name: flight.differences[name] for name in names}
            if engine.compressing:
                engine.average(layout, differences)
                continue
            buffer = torch.cat([difference.view(-1) for difference in differences.values()])
            engine.average_exactly(buffer, done=functools.partial(_split, buffer, differences))

    def _average_exactly(self, finite: Tensor) -> None:
        """Average buffers, and the optimizer's states if asked, over the workers that are finite."""
        tensors = [buffer for _, buffer in self._held.buffers()]
        if self._optimizer is not None:
            # Frozen parameters have none.
            known = self._optimizer.state
            states = [known[p] for group in self._optimizer.param_groups for p in group["params"] if p in known]
            # The step of Adam, for example, is equal on all workers.
            tensors += [local(t) for state in states for t in state.values() if isinstance(t, Tensor) and t.dim()]
        if not tensors or self._engine.communicator.world_size == 1:
            return
        # Integers and fp32 keep their values in fp64.
        whole = torch.cat([tensor.detach().double().reshape(-1).to(self._device) for tensor in tensors])
        whole = torch.cat([torch.where(finite, whole, 0), finite.double().view(1)])
        self._engine.communicator.mean(whole)
        share = whole[-1]
        averages = (whole[:-1] / share).split([tensor.numel() for tensor in tensors])
        for tensor, average in zip(tensors, averages, strict=True):
            average = average if tensor.is_floating_point() else average.round()
            # If no worker is finite, nothing changes.
            tensor.copy_(torch.where(share > 0, average.view(tensor.shape), tensor.to(self._device)))

    def _check(self) -> None:
        """Compare θ over the workers after each ``check_every`` exchanges."""
        every = self.config.check_every
        if every and self._engine.step.ended % every == 0:
            prints = {f"shared {name!r}": parameter.detach() for name, parameter in self._shared.items()}
            self._compare("a check", lambda: (None, {}, {key: int(fingerprint(p)) for key, p in prints.items()}))

    def _compare(self, call: str, act: Callable[[], tuple[T, Facts, Facts]]) -> T:
        return together(call, act, self._engine.communicator, self._device)

    @torch.no_grad()
    def _begin_equal(self) -> None:
        """Give all workers the parameters and buffers of the first one. Collective."""
        tensors = [parameter.detach() for parameter in self._shared.values()]
        others = (self._held.buffers(), self._held.frozen())
        for tensor in (*tensors, *(tensor for found in others for _, tensor in found)):
            sent = tensor.to(self._device).contiguous()
            self._engine.communicator.broadcast(sent)
            tensor.copy_(sent)
        self._write({name: parameter.detach() for name, parameter in self._shared.items()})

    def _write(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the local parameters."""
        for name, tensor in self._held.tensors():
            tensor.copy_(values[name])
        self._held.refresh()

    # What a user asks ------------------------------------------------------------------------------------------------

    def shared(self) -> Tensors:
        """Return copies {name: θ} of the shared parameters, in at least fp32, with the same bits on all workers."""
        return {name: parameter.detach().clone() for name, parameter in self._shared.items()}

    def report(self) -> RankReport:
        """Return how tensors are sent, and the bytes of an exchange. ``print`` shows a table."""
        return dataclasses.replace(super().report(), every=self.every)

    def attach(self, scaler: LossScaleSource) -> None:
        """Refuse a loss scale: what local steps send are differences of parameters.

        Raises:
            TypeError: Always.
        """
        raise TypeError(f"local steps send differences of parameters, which have no loss scale; got {scaler!r}")

    # Checkpoints -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return θ, the outer optimizer's state, what is owed, and this worker's own parameters. Collective.

        If each worker loads its own result, training goes on with the same bits, also in the middle of a round. For
        that, each worker must save and load its local optimizer, too. Any worker's result can be loaded on any number
        of workers: all then start from the mean of what the workers had. An exchange under way is finished.
        """
        self._land()
        engine = self._engine
        engine.memory.materialize(engine.step, engine.memory.buckets())
        errors, saved = engine.memory.error(engine.step), engine.state_dict()
        parts = {name: {"shared": shared} for name, shared in self.shared().items()}
        for name, error in errors.items():
            parts[name]["own_error"] = error
        if self.since:
            differences = self._differences().differences
            for name, tensor in self._held.tensors():
                changes = _without_padding(engine.communicator.mean(differences[name]), tensor)
                parts[name] |= {"own": tensor.clone(), "changes": changes}
        mark = sum(int(fingerprint(part)) for each in parts.values() for key, part in each.items() if key in COMMON)
        this = SavedRound(self.steps, self.since, self._place, mark, parts, self.outer.state_dict())
        return pack(saved, this)

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> LoadReport:
        """Continue from a saved state of any number of workers. Overwrites the model's parameters. Collective.

        Raises:
            ValueError: A worker's state belongs to another model, or has another format. Nothing was changed.
            DisagreementError: Workers load different states, or do not all load one. Nothing was changed.
        """
        engine = self._engine

        def read() -> tuple[tuple[dict[str, Any], SavedRound], Facts, Facts]:
            content, this = unpack(opened(state_dict), {n: tuple(p.shape) for n, p in self._shared.items()})
            shared = {f"saved {name!r}": int(fingerprint(parts["shared"])) for name, parts in this.parts.items()}
            return (content, this), {"steps": this.steps, "since": this.since}, shared

        content, this = self._compare("load_state_dict", read)
        # A worker's own parts are of use only if all workers have theirs.
        flag = torch.tensor(int(this.worker == self._place), device=self._device)
        for workers in (engine.communicator, *engine.communicator.others):
            workers.minimum(flag)
        own = bool(flag)

        def check() -> tuple[tuple[SavedState, LoadReport], Facts, Facts]:
            found = engine.peers.parsed(
                with_errors(content, this) if own else content,
                sizes(self._shapes, self.config),
                owner=self._place if own else None,
            )
            return found, {}, saved_facts(found[0])

        saved, report = self._compare("load_state_dict", check)
        self._flight = None
        engine.adopt(saved, report)
        self.outer.load_state_dict(this.outer)
        for name, parameter in self._shared.items():
            parameter.copy_(this.parts[name]["shared"])
        self._write({n: start(this, n, tensor.dtype, own=own) for n, tensor in self._held.tensors()})
        self.steps, self.since = this.steps, this.since
        return report

    def save(self, folder: Folder) -> None:
        """Write the state into a checkpoint's folder, which all workers can read. Collective.

        One file has what all workers share, and each worker writes a file of its own. An interrupted call leaves what
        an earlier call has written, or files that do not fit together, which ``load`` notices.

        Raises:
            OSError: The folder cannot be written. On the other workers this is a ``DisagreementError``.
        """
        state = self.state_dict()

        def write() -> None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            save_file(without(state, COMMON), Path(folder) / self._file(own=True))
            if self._place[0] == 0:
                save_file(without(state, OWN), Path(folder) / self._file())

        self._together("save", write)

    def load(self, folder: Folder, *, missing_ok: bool = False) -> LoadReport | None:
        """Continue from what ``save`` wrote, with any number of workers. Collective. See ``load_state_dict``.

        Args:
            folder: The checkpoint's folder.
            missing_ok: Whether the folder may have been written without local steps. θ is then the first worker's
                parameters, as at the start, and nothing is owed.

        Raises:
            FileNotFoundError: The folder has no state. Nothing was changed.
            ValueError: A worker's state belongs to another model, or the files do not fit together, or have another
                format. Nothing was changed.
            DisagreementError: Workers load different states, or only some of them find one. Nothing was changed.
        """
        path, own = Path(folder) / self._file(), Path(folder) / self._file(own=True)
        if not self._together("load", path.exists, FOUND):
            self._begin_without(path, missing_ok)
            return None
        return self.load_state_dict(self._together("load", lambda: joined(path, own)))

    def forget(self) -> None:
        """Set all errors to zero and begin a new round from the first worker's parameters. Collective."""
        self._flight, self.since = None, 0
        super().forget()
        for name, tensor in self._held.tensors():
            self._shared[name].data.copy_(tensor)
        self._begin_equal()

    @property
    def _place(self) -> tuple[int, int]:
        """(index, number) of this worker."""
        return self._engine.communicator.index, self._engine.communicator.world_size

    def _file(self, *, own: bool = False) -> str:
        shard, shards = 0, 1
        for workers in self._engine.communicator.others:
            shard, shards = shard * workers.world_size + workers.index, shards * workers.world_size
        worker, workers_ = self._place
        return f"powersgd-local-{shard}-of-{shards}" + (f"-worker-{worker}-of-{workers_}" if own else "") + ".pt"


@dataclasses.dataclass
class Flight:
    """An exchange under way.

    Attributes:
        differences: {name: θ − local parameters}, which the exchange replaces by their means.
        fragments: Names of the tensors that travel together, in order.
        finite: Whether this worker's parameters were finite, as a scalar on the device.
        begun: With a delay, {name: local parameters when the exchange began}.
        before: State of the engine before the exchange, if a failed exchange would change it.
        steps_before: Steps of the round.
        steps: Steps since the exchange began.
        sent: Number of fragments that were sent so far.
    """

    differences: Tensors
    fragments: list[list[str]]
    finite: Tensor
    begun: Tensors | None
    before: SavedState | None
    steps_before: int
    steps: int = 0
    sent: int = 0


def _no_rank(_name: str, _shape: tuple[int, ...]) -> int:
    """Return the rank of tensors that are averaged exactly."""
    return 0


def _padded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor with zeros at the ends of its dimensions, contiguous. The result may be ``tensor`` itself."""
    if tensor.shape == shape:
        return tensor.contiguous()
    padded = tensor.new_zeros(shape)
    _without_padding(padded, tensor).copy_(tensor)
    return padded


def _without_padding(padded: Tensor, tensor: Tensor) -> Tensor:
    """Return a view of the elements that ``_padded(tensor, shape)`` has from ``tensor``."""
    return padded[tuple(slice(size) for size in tensor.shape)]


def _split(buffer: Tensor, out: Mapping[str, Tensor]) -> None:
    """Copy a flat buffer to tensors."""
    for tensor, part in zip(out.values(), buffer.split([t.numel() for t in out.values()]), strict=True):
        tensor.view(-1).copy_(part)
