"""Saved states: their format, their checks, and how they compare with the model that loads them."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.layout.matrices import Size
from powersgd_triton.ops.gradients import DTYPES
from powersgd_triton.ranks.plan import Plan, checked_plan, is_count

FORMAT_VERSION = 3

Parts = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """How a loaded state was used: names of matrices.

    Attributes:
        loaded: Matrices that continue with their error and basis.
        carried: Matrices that are no longer compressed. Their error is added once, to their next gradient.
        reviewed: Tensors that are viewed as other matrices than in the saved state. They continue with their error, and
            their basis starts again.
        dropped: Matrices whose error is not used, because error feedback is off, or the framework averages them itself.
        unused: Matrices that only the saved state has.
        added: Matrices that only this model has. They start without an error.
        waiting: Matrices whose parameters are not known yet. They are loaded when their gradients come first.
    """

    loaded: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    reviewed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()

    def __str__(self) -> str:
        fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return "; ".join(f"{len(names)} {what} ({listing(names)})" for what, names in fields if names) or "nothing"


@dataclasses.dataclass(frozen=True)
class SavedState:
    """Content of a checkpoint, the same for all adapters.

    Attributes:
        iteration: Number of finished steps.
        tensors: {name: size} of all tensors that were known.
        matrices: {name: {"error": E [n, m], "basis": [m, r], "left_basis": [n, r]}}, for several matrices one after the
            other. Matrices that are not compressed have only an error. Without error feedback there are no errors.
        plan: State of ``RankPlan``. Empty if ranks are not planned.
        strict: Whether matrices that come later must be in it, since the model's tensors were not known at loading.
        own: Whether the errors are those of one worker instead of the mean over the workers.
        owner: (index, world size) of that worker. None after it was checked.
    """

    iteration: int = 0
    tensors: dict[str, Size] = dataclasses.field(default_factory=dict)
    matrices: dict[str, Parts] = dataclasses.field(default_factory=dict)
    plan: Plan = dataclasses.field(default_factory=dict)
    strict: bool = False
    own: bool = False
    owner: tuple[int, int] | None = None

    def to_dict(self, config: PowerSGDConfig) -> dict[str, Any]:
        """Return plain numbers and tensors, which ``parse`` reads."""
        return {
            "format_version": FORMAT_VERSION,
            "iteration": self.iteration,
            "config": config.to_dict(),
            "fingerprint": sizes_digest({name: plain(size) for name, size in self.tensors.items()}),
            "tensors": {name: plain(size) for name, size in sorted(self.tensors.items())},
            "matrices": self.matrices,
            **({"plan": self.plan} if self.plan else {}),
        }

    @classmethod
    def parse(cls, state: Any, *, needs_errors: bool, rename: Mapping[str, str] | None = None) -> "SavedState":
        """Check the result of ``to_dict`` and convert it. ``rename`` is {saved name: name in this model}.

        ValueError: It is not a saved state, it is inconsistent, it lacks a name in ``rename``, or, with
        ``needs_errors``, the error of a compressed matrix.
        """
        keys = {"format_version", "iteration", "tensors", "matrices"}
        if not isinstance(state, Mapping) or "format_version" not in state:
            raise ValueError(f"expected a saved PowerSGD state with the keys {', '.join(sorted(keys))}")
        check_version(state["format_version"])
        if not keys <= state.keys():
            raise ValueError(f"the saved state lacks {', '.join(sorted(keys - state.keys()))}")
        iteration, tensors, matrices = state["iteration"], state["tensors"], state["matrices"]
        if not is_count(iteration):
            raise ValueError(f"expected a non-negative number of steps as iteration; got {iteration!r}")
        if not isinstance(tensors, Mapping) or not all(isinstance(k, str) and _is_size(v) for k, v in tensors.items()):
            raise ValueError("expected tensors as {name: [n, m, rank]}, or [n, m, rank, count]")
        if not isinstance(matrices, Mapping) or not all(isinstance(parts, Mapping) for parts in matrices.values()):
            raise ValueError(f"expected matrices as {{name: {{part: tensor}}}}; got {type(matrices).__name__}")
        if "fingerprint" in state and state["fingerprint"] != sizes_digest(tensors):
            raise ValueError("the saved state's tensors do not match its fingerprint")
        sizes = {name: Size(*size) for name, size in tensors.items()}
        compressed = {name for name, size in sizes.items() if size.rank}
        if not compressed <= matrices.keys() <= tensors.keys():
            raise ValueError(f"the saved state's tensors and matrices differ in {listing({*matrices} ^ compressed)}")
        # All sizes are checked before any value is looked at.
        for name, parts in matrices.items():
            needed = {"basis"} if name in compressed else {"error"}
            _check_sizes(name, sizes[name], parts, needed | ({"error"} if needs_errors else set()))
        for name, parts in matrices.items():
            for key, part in sorted(parts.items()):
                if not is_finite(part):
                    raise ValueError(f"{key!r} of matrix {name!r} in the saved state is not finite")
        names = rename or {}
        _check_renaming(names, tensors)
        plan = {key: renamed(part, names) for key, part in checked_plan(state.get("plan", {})).items()}
        return cls(
            iteration,
            renamed(sizes, names),
            renamed({name: dict(parts) for name, parts in matrices.items()}, names),
            plan,
        )

    def compare(self, tensors: Mapping[str, Size], *, complete: bool, strict: bool, feedback: bool) -> LoadReport:
        """Return how a model with these tensors would use this state. Raise ValueError if it does not fit.

        ``complete`` says whether these are all tensors of the model, ``strict`` whether the state and the model must
        have the same matrices, and ``feedback`` whether the model uses error feedback.
        """
        known = {name: self.tensors[name] for name in tensors.keys() & self.tensors.keys()}
        other = {name for name, size in known.items() if not _same_elements(size, tensors[name])}
        for name in sorted(other) if strict else ():
            if name in self.matrices or tensors[name].rank:
                own, saved = tensors[name], known[name]
                raise ValueError(f"matrix {name!r} is {own.n} × {own.m}, but {saved.n} × {saved.m} in the saved state")
        fitting = {name for name in known if name in self.matrices} - other
        added = {name for name, size in tensors.items() if size.rank and (name not in known or name in other)}
        unused = self.matrices.keys() - fitting
        # A state that was saved before compression began has no matrices.
        if strict and self.matrices and (added or (complete and unused)):
            raise ValueError(
                "the saved state belongs to another model or configuration; "
                f"matrices missing from it: {listing(added)}; only in it: {listing(unused)}. "
                "load_state_dict(…, rename={saved name: new name}) maps names, strict=False loads what fits"
            )
        carried = {name for name in fitting if tensors[name].rank == 0}
        reviewed = {name for name in fitting - carried if not _same_view(tensors[name], known[name])}
        with_error = {name for name in fitting if "error" in self.matrices[name]}
        return LoadReport(
            loaded=tuple(sorted(fitting - carried - reviewed)),
            carried=tuple(sorted(carried & with_error if feedback else ())),
            reviewed=tuple(sorted(reviewed)),
            dropped=tuple(sorted(() if feedback else with_error)),
            unused=tuple(sorted(unused if complete else unused & other)),
            added=tuple(sorted(added if self.matrices else ())),
            waiting=tuple(sorted(() if complete else unused - other)),
        )

    def used(self, report: LoadReport, *, strict: bool, owner: tuple[int, int] | None) -> "SavedState":
        """Return a copy of this state without the matrices that ``report`` lists as unused or added."""
        left_out = {*report.unused, *report.added}
        return dataclasses.replace(
            self,
            tensors={name: size for name, size in self.tensors.items() if name not in left_out},
            matrices={
                # Detached, since a part may require a gradient.
                name: {key: part.detach().clone() for key, part in parts.items()}
                for name, parts in self.matrices.items()
                if name not in left_out
            },
            strict=strict and bool(self.matrices),
            own=owner is not None,
            owner=owner,
        )


def check_version(version: Any) -> None:
    """Raise ValueError if a saved state has another format."""
    if not isinstance(version, int) or version != FORMAT_VERSION:
        raise ValueError(f"expected format_version {FORMAT_VERSION}; got {version!r}")


def plain(size: Size) -> list[int]:
    """Return a size as saved states have it. Without a count it is that of one matrix."""
    return list(size if size.batch != 1 else size[:3])


def _same_view(size: Size, other: Size) -> bool:
    return size._replace(rank=0) == other._replace(rank=0)


def _same_elements(size: Size, other: Size) -> bool:
    """Return whether these may be views of one tensor. A transposed matrix is another one."""
    batched = size.batch != other.batch or 1 in (size.n, other.n)
    return _same_view(size, other) or (batched and size.rows * size.m == other.rows * other.m)


def viewed(parts: Parts, size: Size) -> Parts:
    """Return the parts of a saved tensor that is viewed as matrices of this size: bases only if they fit."""
    rows = {"error": size.rows, "basis": size.batch * size.m, "left_basis": size.rows}
    found = {key: part for key, part in parts.items() if key == "error" or len(part) == rows[key]}
    return found | ({"error": found["error"].reshape(size.rows, size.m)} if "error" in found else {})


def sizes_digest(tensors: Mapping[str, Iterable[int]]) -> str:
    """Return a digest of {name: size} that does not depend on the order."""
    text = json.dumps({name: list(size) for name, size in tensors.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def listing(names: Iterable[str]) -> str:
    """Return the first few names, quoted."""
    ordered = sorted(names)
    shown = ", ".join(repr(name) for name in ordered[:5])
    return f"{shown} and {len(ordered) - 5} more" if len(ordered) > 5 else shown or "none"


def renamed(named: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return {name: value} with other names, given {old name: new name}."""
    return {names.get(name, name): value for name, value in named.items()}


def _is_size(size: Any) -> bool:
    return isinstance(size, (list, tuple)) and len(size) in (3, 4) and all(map(is_count, size))


def is_part(value: Any, size: tuple[int | None, int | None] = (None, None)) -> bool:
    """Return whether a value is a dense real matrix of this size, all of whose elements are in memory."""
    if not is_whole(value) or value.dtype not in DTYPES or value.dim() != 2:
        return False
    return all(expected in (None, found) for expected, found in zip(size, value.shape, strict=True))


def is_whole(value: Any) -> bool:
    """Return whether a value is a dense tensor, all of whose elements are in memory.

    An expanded tensor has one element in memory, however large it is, and copying it takes the memory that it claims.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested or value.is_meta:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite. Unlike isfinite(), this takes no memory."""
    # A NaN is both the smallest and the largest element.
    return not tensor.numel() or all(math.isfinite(extreme) for extreme in tensor.detach().aminmax())


def _check_sizes(name: str, size: Size, parts: Mapping[str, Any], needed: set[str]) -> None:
    """Raise ValueError if a part is missing, or is not a part of a matrix of this size."""
    n, m, _, count = size
    basis = parts.get("basis")
    r = basis.shape[-1] if isinstance(basis, Tensor) and basis.dim() else 1
    expected = {"error": (count * n, m), "basis": (count * m, r), "left_basis": (count * n, r)}
    if not parts.keys() <= expected.keys() or not 1 <= r <= max(1, min(n, m)):
        shapes = {key: tuple(getattr(part, "shape", ())) for key, part in parts.items()}
        raise ValueError(f"matrix {name!r} of the saved state is {n} × {m}; its parts have other sizes: {shapes}")
    for key in sorted(needed | parts.keys()):
        part: Any = parts.get(key)
        if not is_part(part, expected[key]):
            rows, columns = expected[key]
            dense = isinstance(part, Tensor) and part.layout == torch.strided
            what = f"{part.dtype} {tuple(part.shape)} with strides {part.stride()}" if dense else type(part).__name__
            raise ValueError(
                f"matrix {name!r} of the saved state is {n} × {m}: its {key!r} must be a dense tensor of "
                f"{rows} × {columns} real numbers, all of which are in memory; got {what}"
            )


def _check_renaming(rename: Mapping[str, str], tensors: Mapping[str, Any]) -> None:
    absent = rename.keys() - tensors.keys()
    if absent:
        raise ValueError(f"rename has names that the saved state does not have: {listing(absent)}")
    names = [rename.get(name, name) for name in tensors]
    if len(set(names)) < len(names):
        raise ValueError(f"with rename={dict(rename)!r} two tensors of the saved state would have the same name")
