"""DDP's parameters: their names, by which the state is keyed, and which of them no worker uses in a step."""

import contextlib
import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.core.residuals import Residuals
from powersgd_triton.integrations.common import plain_name
from powersgd_triton.ops.bucket import Product
from powersgd_triton.ops.gradients import real_shape
from powersgd_triton.ops.step import Step
from powersgd_triton.ranks.plan import is_count

Record = list[list[tuple[str, tuple[int, ...]]]]
"""Names and shapes of the parameters in each bucket of the first backward pass."""


class ParameterNames:
    """Names parameters as the module does, or numbers them in the order of the first backward pass."""

    def __init__(self, module: nn.Module | None) -> None:
        if not isinstance(module, nn.Module | None):
            raise TypeError(f"module must be a torch.nn.Module; got {type(module).__name__}")
        self.module: nn.Module | None = module.module if isinstance(module, DistributedDataParallel) else module
        named = () if self.module is None else self.module.named_parameters()
        # A wrapper also knows those that it averages itself, after the backward pass.
        left_to_ddp = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        ignored = getattr(module, "parameters_to_ignore", left_to_ddp)
        # If parameters are numbered, those seen so far.
        self.names: dict[Tensor, str] = {p: plain_name(name) for name, p in named if name not in ignored}
        self._buckets: Record = []
        self._expected: Record = []

    def of(self, index: int, parameters: Sequence[Tensor]) -> list[str]:
        if any(parameter not in self.names for parameter in parameters):
            self._number(index, parameters)
        names = [self.names[parameter] for parameter in parameters]
        if not {name for bucket in self._buckets for name, _ in bucket}.issuperset(names):
            self._buckets.append([(n, shape_of(p)) for n, p in zip(names, parameters, strict=True)])
        return names

    def _number(self, index: int, parameters: Sequence[Tensor]) -> None:
        for name, parameter in () if self.module is None else self.module.named_parameters():
            if parameter not in self.names and any(parameter is other for other in parameters):
                raise RuntimeError(
                    f"the parameter {name!r} was added to the model after PowerSGDState was created; create the state "
                    "and wrap the model in DistributedDataParallel when the model is complete"
                )
        if self.module is not None:
            raise RuntimeError(
                "a bucket has a parameter that module= does not have; give the model that DistributedDataParallel wraps"
            )
        # A bucket of a new wrapper may have known parameters too, which keep their numbers.
        new = [parameter for parameter in parameters if parameter not in self.names]
        given, expected = {*self.names.values()}, {name for bucket in self._expected for name, _ in bucket}
        names = [str(len(given | expected) + position) for position in range(len(new))]
        if expected - given and len(new) == len(parameters):
            shapes = [shape_of(parameter) for parameter in parameters]
            saved = dict(self._expected[index] if index < len(self._expected) else [])
            if [*saved.values()] != shapes:
                raise RuntimeError(
                    f"the loaded state was saved with other bucket boundaries: bucket {index} held shapes "
                    f"{[*saved.values()]} and now holds {shapes}. Give PowerSGDState module= when saving and loading"
                )
            names = [*saved]
        self.names.update(zip(new, names, strict=True))

    def shapes(self, *, frozen: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all trainable parameters by name, or of those in ``record`` if they are numbered.

        With ``frozen``, also of those that are not trainable.
        """
        if self.module is None:
            return {name: shape for bucket in self.record() for name, shape in bucket}
        return {name: shape_of(p) for p, name in self.names.items() if frozen or p.requires_grad}

    def record(self) -> Record:
        """Return the buckets of the first backward pass, here or before a loaded state was saved."""
        return self._buckets or self._expected

    def check(self, record: Any, *, strict: bool, rename: Mapping[str, str]) -> Record:
        """Return the record of a saved state with this model's names. ValueError if it does not fit the model."""
        buckets = parsed(record)
        if self.module is None:
            if rename:
                raise ValueError("rename maps parameter names, which PowerSGDState knows only with module=")
            if self._buckets and buckets != self._buckets:
                raise ValueError("the state has other buckets or names; give PowerSGDState module= to save and to load")
            return buckets
        known = {name: shape_of(parameter) for parameter, name in self.names.items()}
        buckets = [[(rename.get(name, name), shape) for name, shape in bucket] for bucket in buckets]
        other = {name: shape for bucket in buckets for name, shape in bucket if known.get(name) != shape}
        if strict and not other.keys() <= known.keys():
            raise ValueError(
                f"the saved state has parameters {sorted(other.keys() - known.keys())[:3]}, which module= lacks. "
                "Was it saved without? load_state_dict(…, rename={saved: new}) maps names, strict=False loads what fits"
            )
        if strict and other:
            name = min(other)
            raise ValueError(f"parameter {name!r} has the shape {known[name]}, but {other[name]} in the saved state")
        return [[(name, shape) for name, shape in bucket if name not in other] for bucket in buckets]

    def expect(self, record: Record) -> None:
        """Number the parameters as in a saved record."""
        if not self._buckets:
            self._expected = record


def parsed(record: Any) -> Record:
    """Return a record with tuples, which a file may have turned into lists. ValueError if it is not a record."""
    with contextlib.suppress(TypeError, ValueError):
        found = [[(name, tuple(shape)) for name, shape in bucket] for bucket in record]
        if all(isinstance(name, str) and all(map(is_count, shape)) for bucket in found for name, shape in bucket):
            return found
    raise ValueError(f"'buckets' of a saved state must be lists of (name, shape); got {str(record)[:80]}")


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape as which a parameter's gradient is compressed or averaged."""
    return real_shape(parameter.shape, parameter.dtype)


class UnusedParameters:
    """Takes back what a step has sent of parameters that no worker used in it. See ``PowerSGDState``.

    The errors keep what DDP discards. It knows these parameters when the backward pass is done. Its reducer is locked
    while it calls a communication hook, so the counts are read at the end of the pass.
    """

    def __init__(self, residuals: Residuals, step: Step, module: Any, names: Mapping[Tensor, str]) -> None:
        self._residuals, self._step, self._names = residuals, step, names
        # Its reducer holds the state, in C++, where the garbage collector does not look.
        self._module = weakref.ref(module)
        # Products that were looked at. Each belongs to one step, and only the counts of that step decide about it.
        self._seen: list[Product] = []
        # {name: whether the gradient is a view of the bucket}. DDP cannot discard what is written there.
        self._is_view: dict[str, bool] = {}
        # What gradients were like when the pass began, and those that a pass has left as they were: of an earlier pass,
        # but DDP has copied them into the bucket. A pass may begin without a forward pass, as in a GAN of Lightning.
        self._begun = False
        self._before: dict[Tensor, tuple[int, int] | None] = {}
        self._stale: dict[str, Tensor] = {}
        self._places = {names[p]: index for index, p in enumerate(module._build_params_for_reducer()[0])}
        # How many workers use each parameter, in a static graph, and the parameters that a pass may leave unused.
        self._counts: Tensor | None = None
        self._watched = {*names}
        # Not a cycle, so that errors on a device are freed with the state.
        residuals.whole.late, residuals.decide = True, weakref.proxy(self)
        module.register_forward_pre_hook(self)

    def __call__(self, *forward: Any) -> None:
        """Take back what the last step has sent of unused parameters, unless that was done.

        It is called at the end of a backward pass, before errors are read, and before a ``forward`` pass of the module.
        """
        # Whether an open step is applied is not known, and its backward pass may not be done.
        buckets = [b for b in self._residuals.buckets() if b.applied is not None and not self._step.decides(b.applied)]
        fresh = [bucket for bucket in buckets if not any(bucket.product is seen for seen in self._seen)]
        if fresh or self._residuals.whole.is_unsettled(self._step):
            with self._residuals.streams.everywhere():
                module = self._module()
                counts = self._counts
                if counts is None and module is not None:
                    counts = module.reducer._get_local_used_map()
                    if module.static_graph:
                        # The same in all passes, so that the host waits for them once.
                        counts = self._counts = counts.cpu()
                        used = {name for name, place in self._places.items() if counts[place]}
                        self._watched = {p for p, name in self._names.items() if name not in used}
                # On the CPU the host may look. Usually some worker uses each parameter.
                if counts is not None and (counts.device.type != "cpu" or not counts.all()):
                    unused = (counts == 0).unbind()
                    kept = {name: unused[place] for name, place in self._places.items() if not self._is_view.get(name)}
                    for bucket in fresh:
                        bucket.take_back(kept, self._stale)
                    self._residuals.whole.take_back(kept)
                self._residuals.whole.settle(self._step)
        self._seen = [bucket.product for bucket in buckets]
        if forward and not self._begun:
            self._before, self._begun = {}, True
        for parameter in self._watched:
            # Not again if gradients are accumulated without being averaged.
            self._before.setdefault(parameter, _mark(parameter))

    def end_pass(self) -> None:
        """Let the pass be looked at when DDP has ended it. Call it in the hook of its last bucket."""
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def ended() -> None:
            self()
            self._begun = False

        # A worker that has left a Join is in no backward pass.
        if torch._C._current_graph_task_id() >= 0:
            # DDP's own callback is queued after the outer one.
            queue(lambda: queue(ended))

    def note_views(self, places: list[Tensor], parameters: list[Tensor]) -> None:
        """Note which gradients of a bucket are views of it in this step, and which are of an earlier pass."""
        for place, parameter in zip(places, parameters, strict=True):
            if parameter not in self._watched:
                continue
            gradient, name, before = parameter.grad, self._names[parameter], self._before.pop(parameter, None)
            self._is_view[name] = gradient is not None and gradient.data_ptr() == place.data_ptr()
            self._stale.pop(name, None)
            if before is not None and before == _mark(parameter) and not self._is_view[name]:
                self._stale[name] = place.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle or a copy of the DDP model contains this hook. There it does nothing.
        return functools.partial, (_nothing,)


def _mark(parameter: Tensor) -> tuple[int, int] | None:
    """Return what changes when a backward pass adds to a parameter's gradient."""
    gradient = parameter.grad
    return None if gradient is None else (gradient.data_ptr(), gradient._version)


def _nothing(*_: Any) -> None: ...
