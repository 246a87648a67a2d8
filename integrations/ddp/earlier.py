"""Saved states of format 2, which version 0.1.0 wrote.

They differ from later ones for parameters that are not contiguous, such as those in channels_last: shapes, errors and
bases have the order of DDP's bucket, which is that of the parameter's memory. And the names of parameters of compiled
modules contain ``_orig_mod``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from powersgd_triton.core.saved_state import FORMAT_VERSION, SavedState
from powersgd_triton.integrations.ddp.names import Record, parsed, shape_of
from powersgd_triton.integrations.ddp.views import memory_orders
from powersgd_triton.integrations.names import plain_name
from powersgd_triton.layout.layout import matrix_shape


def upgraded(state: Mapping[str, Any], parameters: Mapping[str, Tensor], rename: Mapping[str, str]) -> dict[str, Any]:
    """Return a state of format 2 as one of the present format.

    The file does not say in which order a parameter was. It is the order that the parameter has now, if the saved shape
    fits; else that of the shape, of channels_last, or of a transposed matrix, whichever fits.

    Args:
        state: Result of ``PowerSGDState.state_dict``.
        parameters: The model's parameters by name.
        rename: {saved name: name in the model}.

    Raises:
        ValueError: It is not a saved state, or two of its parameters would have the same name.
    """
    record = parsed(state["buckets"])
    # What follows relies on the structure and the sizes.
    SavedState.parse(state, needs_errors=False)
    names = {*state["tensors"], *(name for bucket in record for name, _ in bucket)}
    if len(set(map(plain_name, names))) < len(names):
        raise ValueError("two parameters of the saved state have the same name without '_orig_mod'")
    result = {**state, "tensors": _renamed(state["tensors"]), "matrices": _renamed(state["matrices"])}
    if "plan" in state:
        result["plan"] = {key: _renamed(part) for key, part in state["plan"].items()}
    buckets: Record = []
    for bucket in record:
        buckets.append([])
        for saved_name, saved_shape in bucket:
            name, shape = plain_name(saved_name), saved_shape
            parameter = parameters.get(rename.get(name, name))
            order = None if parameter is None else _order(parameter, saved_shape)
            if parameter is not None and order is not None:
                shape = shape_of(parameter)
                _reorder(result, name, saved_shape, order)
            buckets[-1].append((name, shape))
    # The digest is that of the saved names and sizes.
    result.pop("fingerprint", None)
    return {**result, "buckets": buckets, "format_version": FORMAT_VERSION}


def _renamed(part: Mapping[str, Any]) -> dict[str, Any]:
    return {plain_name(name): value for name, value in part.items()}


def _order(parameter: Tensor, saved: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the order of dimensions in which a parameter was saved. None if no order fits."""
    orders = memory_orders(parameter) + [(1, 0)] * (parameter.dim() == 2)
    fitting = (o for o in orders if tuple(parameter.shape[dimension] for dimension in o) == saved)
    return next(fitting, None)


def _reorder(state: dict[str, Any], name: str, saved: tuple[int, ...], order: Sequence[int]) -> None:
    """Put a matrix, which was saved with the shape ``saved``, into the order of its parameter's shape."""
    parts, back = state["matrices"].get(name, {}), sorted(range(len(order)), key=order.__getitem__)
    n, m = matrix_shape(saved)
    # If the record has another size than the matrix, the state is refused later.
    if order == tuple(range(len(order))) or tuple(state["tensors"].get(name, ())[:2]) != (n, m):
        return
    rows, columns = matrix_shape([saved[dimension] for dimension in back])
    turned = dict(parts)
    if "error" in parts:
        turned["error"] = parts["error"].reshape(saved).permute(back).reshape(rows, columns)
    if order[0] != 0:
        # Rows and columns are exchanged, so that the bases do not fit. Without them, only the error is loaded.
        turned = {key: part for key, part in turned.items() if key == "error"}
        state["tensors"] = {**state["tensors"], name: [rows, columns, 0]}
    elif "basis" in parts:
        basis = parts["basis"].reshape(*saved[1:], -1)
        turned["basis"] = basis.permute(*(d - 1 for d in back[1:]), len(saved) - 1).reshape(m, -1)
    matrices = {key: value for key, value in state["matrices"].items() if key != name}
    state["matrices"] = {**matrices, **({name: turned} if turned else {})}
