"""Names of the parameters in DDP's buckets, by which the state is keyed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.core.saved_state import Size
from powersgd_triton.integrations.names import plain_name
from powersgd_triton.layout.layout import sizes
from powersgd_triton.ops.gradients import real_shape

Record = list[list[tuple[str, tuple[int, ...]]]]
"""Names and shapes of the parameters in each bucket of the first backward pass."""


class ParameterNames:
    """Names parameters as the module does, or numbers them in the order of the first backward pass."""

    def __init__(self, module: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        self._module = module
        self._names: dict[Tensor, str] = {}
        if module is not None:
            self._names = {parameter: plain_name(name) for name, parameter in module.named_parameters()}
        self._seen: set[str] = set()
        self._buckets: Record = []
        self._expected: Record = []

    def copy(self) -> ParameterNames:
        """Return names of the same module, or of the same buckets if parameters are numbered."""
        copied = ParameterNames(self._module)
        copied.expect(self.record())
        return copied

    @property
    def device(self) -> torch.device | None:
        """Device of the parameters. None if they are numbered."""
        return next((parameter.device for parameter in self._names), None) if self._module is not None else None

    def of(self, index: int, parameters: Iterable[Tensor]) -> tuple[str, ...]:
        """Return the names of a bucket's parameters."""
        parameters = list(parameters)
        if self._module is None and any(parameter not in self._names for parameter in parameters):
            self._number(index, parameters)
        try:
            names = tuple(self._names[parameter] for parameter in parameters)
        except KeyError:
            raise self._unknown(parameters) from None
        if not self._seen.issuperset(names):
            self._seen.update(names)
            self._buckets.append([(n, shape_of(p)) for n, p in zip(names, parameters, strict=True)])
        return names

    def _unknown(self, parameters: list[Tensor]) -> RuntimeError:
        """Return the error for a bucket with a parameter that the module did not have when the state was made."""
        assert self._module is not None
        now: dict[Tensor, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        added = [now[parameter] for parameter in parameters if parameter in now and parameter not in self._names]
        if added:
            return RuntimeError(
                f"the parameter {added[0]!r} was added to the model after PowerSGDState was created; create the state "
                "and wrap the model in DistributedDataParallel when the model is complete"
            )
        return RuntimeError(
            "a bucket has a parameter that the module given to PowerSGDState as module= does not have; "
            "give the model that DistributedDataParallel wraps"
        )

    def _number(self, index: int, parameters: list[Tensor]) -> None:
        names = [str(len(self._names) + position) for position in range(len(parameters))]
        if self._expected:
            shapes = [shape_of(parameter) for parameter in parameters]
            saved = self._expected[index] if index < len(self._expected) else []
            if [shape for _, shape in saved] != shapes:
                raise RuntimeError(
                    f"the loaded state was saved with other bucket boundaries: bucket {index} held shapes "
                    f"{[shape for _, shape in saved]} and now holds {shapes}. Give PowerSGDState module= when saving "
                    "and when loading, so that parameters have names"
                )
            names = [name for name, _ in saved]
        self._names.update(zip(parameters, names, strict=True))

    def shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of all trainable parameters by name. None if parameters are numbered."""
        if self._module is None:
            return None
        return {name: shape_of(parameter) for parameter, name in self._names.items() if parameter.requires_grad}

    def sizes(self, config: PowerSGDConfig) -> dict[str, Size] | None:
        """Return (n, m, rank) of the same parameters."""
        shapes = self.shapes()
        return None if shapes is None else sizes(shapes, config)

    def known(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all trainable parameters, or of the parameters seen so far if they are numbered."""
        shapes = self.shapes()
        return self.seen() if shapes is None else shapes

    def seen(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of parameters whose gradients have come so far, here or before a loaded state was saved."""
        return {name: shape for bucket in self.record() for name, shape in bucket}

    def record(self) -> Record:
        """Return the buckets of the first backward pass."""
        return self._buckets or self._expected

    def check(
        self, state: Mapping[str, Any], *, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> Record:
        """Compare the record in a saved state with this model. Arguments as for ``PowerSGDState.load_state_dict``.

        Returns:
            The record with this model's names.

        Raises:
            ValueError: It is not a record, or it does not fit the model.
        """
        buckets = parsed(state["buckets"])
        if self._module is None:
            if rename:
                raise ValueError("rename maps parameter names, which PowerSGDState knows only with module=")
            if self._buckets and buckets != self._buckets:
                raise ValueError(
                    "the state was saved with other bucket boundaries or with parameter names; give PowerSGDState "
                    "module= when saving and when loading"
                )
            return buckets
        buckets = [[((rename or {}).get(name, name), shape) for name, shape in bucket] for bucket in buckets]
        known = {name: shape_of(parameter) for parameter, name in self._names.items()}
        saved = {name: shape for bucket in buckets for name, shape in bucket}
        if strict and not saved.keys() <= known.keys():
            raise ValueError(
                f"the saved state has parameters {sorted(saved.keys() - known.keys())[:3]}, which the module given as "
                "module= does not have. Was it saved without module=? load_state_dict(…, rename={saved name: new "
                "name}) maps names, strict=False loads what fits"
            )
        other = sorted(name for name, shape in saved.items() if name in known and shape != known[name])
        if strict and other:
            raise ValueError(
                f"parameter {other[0]!r} has the shape {known[other[0]]}, but {saved[other[0]]} in the saved state"
            )
        return [[(name, shape) for name, shape in bucket if known.get(name) == shape] for bucket in buckets]

    def by_parameter(self) -> dict[Tensor, str]:
        """Return {parameter: name}, so far if parameters are numbered."""
        return self._names

    def expect(self, record: Record) -> None:
        """Number the parameters as in a saved record."""
        if not self._buckets:
            self._expected = record


def parsed(record: Any) -> Record:
    """Check a record, and restore tuples that a file may have turned into lists.

    Raises:
        ValueError: It is not a record.
    """
    try:
        parsed: Record = [[(name, tuple(shape)) for name, shape in bucket] for bucket in record]
        if all(_is_parameter(*parameter) for bucket in parsed for parameter in bucket):
            return parsed
    except (TypeError, ValueError):
        pass
    raise ValueError(f"'buckets' of a saved state must be lists of (name, shape); got {str(record)[:80]}")


def _is_parameter(name: Any, shape: tuple[Any, ...]) -> bool:
    return isinstance(name, str) and all(isinstance(size, int) and size >= 0 for size in shape)


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape as which a parameter's gradient is compressed or averaged."""
    return real_shape(parameter.shape, parameter.dtype)
