"""What local steps do to parameters: in plain torch, and on the CPU in C, ``local_steps.c``, in one pass over them."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from powersgd_triton.ops.host import library
from powersgd_triton.ops.reference import on_host

Parameter = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Tensors of one shape that belong to a parameter."""


class _Piece(ctypes.Structure):
    _fields_ = (("arrays", ctypes.c_void_p * 4), ("numel", ctypes.c_int64))


def subtract(parameters: Iterable[tuple[Tensor, Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
    """out ← start − own, and copy ← own, for each (start, own, out, copy).

    Return extremes of all ``out``, not finite if one of their elements is not. ``out`` may lie on another device.
    """
    pieces, extremes = list[_Piece](), list[Tensor]()
    for start, own, out, copy in parameters:
        if piece := _piece(start, own, out, copy):
            pieces.append(piece)
            continue
        if start.device == out.device:
            torch.sub(start, own, out=out)
        else:
            out.copy_(start - own)
        if copy is not None:
            copy.copy_(own)
        # Several times as fast on the CPU as a norm.
        extremes += torch.aminmax(out) if out.numel() else ()
    code, largest = library(), torch.empty((), dtype=torch.float32, device="cpu")
    if code is None or not pieces:
        return extremes
    many, count = (_Piece * len(pieces))(*pieces), ctypes.c_int64(len(pieces))
    code.powersgd_subtract(many, count, ctypes.c_void_p(largest.data_ptr()), torch.get_num_threads())
    return [*extremes, largest]


def go_on(parameters: Mapping[str, Parameter], keep: float) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, own − begun + shared − keep · error) for each {name: (own, shared, begun, error)}, in any order.

    Without ``begun``, this is shared − keep · error, and without an error, leave that out. If ``own`` has the dtype of
    ``shared``, this overwrites it. ``shared`` and ``begun`` have one dtype.
    """
    pieces = dict[str, _Piece]()
    for name, (own, shared, begun, error) in parameters.items():
        changed = begun is not None or error is not None
        if changed and (piece := _piece(own, shared, begun, error)):
            pieces[name] = piece
            continue
        # In memory that is there, since new pages are slow on the CPU.
        memory, value = own.to(shared.dtype), shared
        if begun is not None:
            value = memory.sub_(begun).add_(shared)
        yield name, value if error is None else torch.sub(value, error.to(value), alpha=keep, out=memory)
    code = library()
    if code is not None and pieces:
        many, count = (_Piece * len(pieces))(*pieces.values()), ctypes.c_int64(len(pieces))
        code.powersgd_go_on(many, count, ctypes.c_float(keep), torch.get_num_threads())
    yield from ((name, parameters[name][0]) for name in pieces)


def _piece(*tensors: Tensor | None) -> _Piece | None:
    """Return where the tensors lie, if the library takes them. Torch says what is wrong if shapes differ."""
    given = [x for x in tensors if x is not None]
    shape = given[0].shape
    if library() is None or not all(
        x.dtype == torch.float32 and on_host(x) and x.is_contiguous() and x.shape == shape for x in given
    ):
        return None
    return _Piece((ctypes.c_void_p * 4)(*(None if x is None else x.data_ptr() for x in tensors)), shape.numel())
