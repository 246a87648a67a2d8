"""What local steps do to a parameter: in plain torch, and on the CPU in C, ``local_steps.c``, in one pass over it."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from powersgd_triton.ops.host import library
from powersgd_triton.ops.reference import on_host


def subtract(start: Tensor, own: Tensor, *, out: Tensor, copy: Tensor | None = None) -> list[Tensor]:
    """out ← start − own, and copy ← own. Return extremes of ``out``, not finite if one of its elements is not.

    All have the same shape. ``out`` may lie on another device than the others.
    """
    code = _library(start, own, out, copy)
    if code is not None:
        largest = torch.empty((), dtype=torch.float32)
        pointers = (None if x is None else ctypes.c_void_p(x.data_ptr()) for x in (start, own, out, copy, largest))
        code.powersgd_subtract(*pointers, ctypes.c_int64(out.numel()), torch.get_num_threads())
        return [largest]
    if start.device == out.device:
        torch.sub(start, own, out=out)
    else:
        out.copy_(start - own)
    if copy is not None:
        copy.copy_(own)
    # Several times as fast on the CPU as a norm.
    return [*torch.aminmax(out)] if out.numel() else []


def go_on(own: Tensor, shared: Tensor, begun: Tensor | None, error: Tensor | None, keep: float) -> Tensor:
    """Return own − begun + shared − keep · error. If ``own`` has the dtype of ``shared``, this overwrites it.

    Without ``begun``, return shared − keep · error, and without an error, leave that out. All have the same shape, and
    ``shared`` and ``begun`` the same dtype.
    """
    code = None if begun is None and error is None else _library(own, shared, begun, error)
    if code is not None:
        pointers = (None if x is None else ctypes.c_void_p(x.data_ptr()) for x in (own, shared, begun, error))
        numbers = ctypes.c_float(keep), ctypes.c_int64(own.numel()), torch.get_num_threads()
        code.powersgd_go_on(*pointers, *numbers)
        return own
    # In memory that is there, since new pages are slow on the CPU.
    memory, value = own.to(shared.dtype), shared
    if begun is not None:
        value = memory.sub_(begun).add_(shared)
    return value if error is None else torch.sub(value, error.to(value), alpha=keep, out=memory)


def _library(*tensors: Tensor | None) -> ctypes.CDLL | None:
    """Return the library in C if it takes these tensors. Torch says what is wrong with those of different shapes."""
    given = [x for x in tensors if x is not None]
    takes = all(x.dtype == torch.float32 and on_host(x) and x.is_contiguous() for x in given)
    return library() if takes and len({x.shape for x in given}) == 1 else None
