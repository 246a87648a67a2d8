"""θ, the parameters that all workers share, their outer optimizer, and what of it a worker's own parameters get."""

import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from powersgd_triton.comm.agreement import Facts
from powersgd_triton.core.engine import Engine
from powersgd_triton.integrations.common import broadcast_from_first, check_closure
from powersgd_triton.integrations.local_steps.exact import ExactAverages
from powersgd_triton.integrations.local_steps.local_tensors import LocalTensors, kind, local, unpadded
from powersgd_triton.ops.local_steps import subtract
from powersgd_triton.ops.reference import known
from powersgd_triton.ops.step import HostCopy

logger = logging.getLogger("powersgd_triton.integrations.local_steps")

Outer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Returns the outer optimizer, of the shared parameters. Their gradient is the mean of the pseudo-gradients."""

Tensors = dict[str, Tensor]

LARGEST = 1e30
"""Magnitude of changes from which on they count as not finite, since sums of them might not be."""


class OuterState:
    """The shared parameters θ, in at least fp32, beside this worker's own and the states of its ``inner`` optimizer."""

    def __init__(
        self, local: LocalTensors, outer: Outer | None, engine: Engine, device: torch.device, inner: Any
    ) -> None:
        self.local, self.engine, self.device = local, engine, device
        self.exact = ExactAverages(local, engine, device, inner)
        self.shared = self._new(dict(local.tensors()))
        parameters = list(self.shared.values())
        if outer is not None and not callable(outer):
            raise TypeError(
                f"outer must be a function that returns an optimizer; got one of type {type(outer).__name__}"
            )
        # By default, θ becomes the mean of the local parameters.
        self.optimizer = torch.optim.SGD(parameters, lr=1.0) if outer is None else outer(parameters)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(f"outer must return a torch.optim.Optimizer; got {type(self.optimizer).__name__}")
        check_closure(self.optimizer, "outer must return")
        given = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if given != {id(p) for p in parameters}:
            raise ValueError("outer must return an optimizer of all parameters that it is given, and of no others")
        self._finite: HostCopy | None = None
        # What local parameters in 16 bits have changed since the last exchange counts from here, unless from θ.
        self._starts: Tensors = {}
        # Both, while the local parameters are θ.
        self._apart: tuple[Tensors, Tensors] | None = None
        # The parameters that were frozen at the start, and were equal on all workers then.
        self._frozen: set[str] = set()

    def settings(self) -> Facts:
        """Return the kind and the settings of the outer optimizer, which must be equal on all workers."""
        names, plain = {id(p): name for name, p in self.shared.items()}, self.rate() is not None
        facts = {"outer": type(self.optimizer).__name__, "outer adds a multiple of the mean": plain}
        for index, group in enumerate(self.optimizer.param_groups):
            for key, value in {**group, "params": [names.get(id(p)) for p in group["params"]]}.items():
                text = json.dumps(value, default=lambda v: v.tolist() if hasattr(v, "tolist") else type(v).__name__)
                facts[f"{key!r} of outer group {index}"] = text
        return facts

    def check(self) -> Facts:
        """Return what must be equal before an exchange. ValueError if the model no longer has what is exchanged."""
        found = dict(self.local.tensors())
        for name, theta in self.shared.items():
            expected, got = (t if t is None else (tuple(t.shape), str(t.device)) for t in (theta, found.get(name)))
            if got != expected:
                raise ValueError(f"{name!r} is exchanged as (shape, device) {expected}; got {got}: make new LocalSteps")
        parameters = itertools.chain(found.items(), self.local.frozen())
        return {**{f"parameter {name!r}": kind(tensor) for name, tensor in parameters}, **self.exact.agree()}

    def take_in(self, new: Mapping[str, Tensor]) -> None:
        """Exchange parameters of ``local.unfrozen`` from now on. Collective."""
        new = {name: parameter for name, parameter in new.items() if name not in self.shared}
        self.local.take_in(new)
        try:
            added = self._new({name: local(parameter) for name, parameter in new.items()})
            theta = {name: parameter.detach() for name, parameter in added.items()}
            for name, tensor in theta.items():
                if name in self._frozen:
                    # The workers have changed it since they were equal, and nothing must be lost.
                    self.exact.mean([tensor], tensor.isfinite().all())
                else:
                    broadcast_from_first([tensor], self.engine.communicator)
        except BaseException:
            # The next exchange takes them in.
            for name in new:
                del self.local.shapes[name]
            raise
        self.shared |= added
        self.write(theta.items())
        self.optimizer.param_groups[0]["params"] += added.values()

    def rate(self) -> float | None:
        """Return r if the outer optimizer does θ ← θ − r · mean with all tensors. None if it does anything else."""
        found, groups = self.optimizer, self.optimizer.param_groups
        hooks = (*found._optimizer_step_pre_hooks, *found._optimizer_step_post_hooks)
        if type(found) is not torch.optim.SGD or hooks or len(self.names()) < len(self.shared):
            return None
        more = any(group[key] for group in groups for key in ("momentum", "weight_decay", "maximize"))
        rates = {None if isinstance(group["lr"], Tensor) else group["lr"] for group in groups}
        return rates.pop() if len(rates) == 1 and not more else None

    def names(self) -> list[str]:
        """Return the names of the shared parameters in the order of the optimizer."""
        names = {id(parameter): name for name, parameter in self.shared.items()}
        return [names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def theta(self) -> Tensors:
        """Return {name: θ} without gradients. They are not copies."""
        return {name: parameter.detach() for name, parameter in self.shared.items()}

    @torch.no_grad()
    def begin_equal(self) -> None:
        """Give all workers the parameters and buffers of the first one. Collective."""
        found = itertools.chain(self.theta().items(), self.local.buffers(), self.local.frozen())
        broadcast_from_first((tensor for _, tensor in found), self.engine.communicator)
        self.write(self.theta().items())
        self._frozen = {name for name, _ in self.local.frozen()}
        self.exact.hold({name for name, _ in self.local.buffers()})

    def forget(self) -> None:
        """Begin anew from the first worker's parameters. Collective."""
        self.optimizer.state.clear()
        theta = self.theta()
        for name, tensor in self.local.tensors():
            theta[name].copy_(tensor)
        self.begin_equal()

    def write(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite the local parameters by (name, value). Rounding them to 16 bits counts as no change."""
        found = dict(self.local.tensors())
        for name, value in values:
            if name in found:
                tensor, theta = found[name], self.shared[name].detach()
                tensor.copy_(value)
                self._starts.pop(name, None)
                if tensor.dtype != theta.dtype and value.data_ptr() != theta.data_ptr():
                    self._starts[name] = theta - (value - tensor)
        self.local.refresh()

    def pseudo_gradients(
        self, finite: Tensor | None = None, begun: Mapping[str, Tensor] = {}, copies: Mapping[str, Tensor] = {}
    ) -> tuple[Tensors, Tensor]:
        """Return {name: θ − local parameters}, padded, and whether this worker is finite. If not, they are zero.

        Collective on the other shards, unless ``finite`` is known. ``begun``: local parameters as the exchange began.
        ``copies``: memory for those of now.
        """
        found, parameters = self.local.memory(self.shared, self.device), []
        for name, tensor in self.local.tensors():
            start = self._starts[name] if name in self._starts else self.rounded(name, tensor)
            own, gradient = begun.get(name, start) if begun else tensor, unpadded(found[name], start)
            if gradient.shape != found[name].shape:
                found[name].zero_()
            parameters.append((start, own, gradient, copies.get(name)))
        extremes = subtract(parameters)
        if finite is None:
            finite = self._is_finite(extremes)
        if not known(finite):
            for gradient in found.values():
                torch.where(finite, gradient, gradient.new_zeros(()), out=gradient)
        return found, finite

    def no_gradients(self) -> Tensors:
        """Return {name: zeros} in the place of pseudo-gradients, of a worker whose parameters have other shapes now."""
        return {name: memory.zero_() for name, memory in self.local.memory(self.shared, self.device).items()}

    def begin(self, finite: Tensor | None = None) -> tuple[Tensors, Tensor, Tensors]:
        """Do as ``pseudo_gradients``, and copy the local parameters. If not finite, they and their copies become θ."""
        copies = {name: unpadded(padded, self.shared[name]) for name, padded in self.local.memory(self.shared).items()}
        gradients, finite = self.pseudo_gradients(finite, copies=copies)
        if known(finite):
            return gradients, finite, copies
        for name, tensor in self.local.tensors():
            theta, here = self.rounded(name, tensor), finite.to(tensor.device)
            tensor.copy_(torch.where(here, copies[name], theta, out=copies[name]))
            if name in self._starts:
                self._starts[name] = torch.where(here, self._starts[name], theta)
        self.local.refresh()
        return gradients, finite, copies

    @contextlib.contextmanager
    def holding(self, *, theta: bool) -> Iterator[None]:
        """Within the block, the local parameters are θ, or this worker's own. A block may be within another one."""
        before = self._apart is not None
        self._hold(theta)
        try:
            yield
        finally:
            self._hold(before)

    @torch.no_grad()
    def _hold(self, theta: bool) -> None:
        if theta and self._apart is None:
            self._apart = {name: tensor.clone() for name, tensor in self.local.tensors()}, dict(self._starts)
            self.write(self.theta().items())
        elif not theta and self._apart is not None:
            own, starts = self._apart
            for name, tensor in self.local.tensors():
                tensor.copy_(own[name])
            self.local.refresh()
            self._starts, self._apart = starts, None

    def differs(self) -> bool:
        """Return whether this worker's own parameters differ from θ as they have it."""
        return any(not x.equal(self.rounded(n, x).to(x.dtype)) for n, x in self.local.tensors())

    def has_begun(self) -> bool:
        """Return whether this worker has more than θ to save: its own parameters, or what their changes count from."""
        return bool(self._starts) or self.differs()

    def parts(self, *, begun: bool) -> dict[str, Tensors]:
        """Return what a saved state has of each tensor: see ``saved.pack``. Collective if a round has begun."""
        parts = {name: {"shared": theta.clone()} for name, theta in self.theta().items()}
        if begun:
            gradients, _, copies = self.begin()
            for name, tensor in self.local.tensors():
                changes = unpadded(self.engine.communicator.mean(gradients[name]), tensor).to(tensor.device)
                parts[name] |= {"own": copies[name].to(tensor.dtype), "changes": changes}
            for name, start in self._starts.items():
                parts[name]["own_start"] = start.clone()
        return parts

    def load(self, parts: Mapping[str, Tensors], *, own: bool) -> None:
        """Continue from what ``parts`` has returned: from the worker's ``own`` parameters, or from θ − changes."""
        values = self.theta()
        for name, theta in values.items():
            theta.copy_(parts[name]["shared"])
            if own and "own" in parts[name]:
                values[name] = parts[name]["own"].to(theta)
            elif "changes" in parts[name]:
                values[name] = theta - parts[name]["changes"].to(theta)
        self.write(values.items())
        if own:
            found = {name: saved["own_start"] for name, saved in parts.items() if "own_start" in saved}
            self._starts = {name: start.to(self.shared[name], copy=True) for name, start in found.items()}

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """Return θ as a local parameter has it."""
        shared = self.shared[name].detach()
        return shared.to(tensor.dtype).to(shared.dtype)

    def _is_finite(self, extremes: list[Tensor]) -> Tensor:
        """Return whether all shards of this worker's model are finite, as a bool scalar on the device."""
        # A shard may have no elements.
        extremes.append(torch.zeros((), device=self.device))
        flag = (torch.stack([each.double() for each in extremes]).abs() < LARGEST).all().int()
        for shards in self.engine.communicator.others:
            shards.minimum(flag)
        finite = flag > 0
        self.warn()
        # Read in the next exchange, so that the host does not wait for the device now.
        self._finite = HostCopy(finite)
        return finite

    def warn(self) -> None:
        """Log a warning if this worker was not finite in the last exchange."""
        finite, self._finite = self._finite, None
        if finite is not None and not finite.numbers():
            logger.warning("this worker's parameters were not finite, so that it went on from the shared parameters")

    def _new(self, tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """Return {name: θ}, copies in at least fp32."""
        memory = self.local.memory(tensors)
        # Contiguous, as optimizers expect it. With padding, that is another copy.
        return {n: nn.Parameter(unpadded(memory[n], t).copy_(t).contiguous()) for n, t in tensors.items()}
