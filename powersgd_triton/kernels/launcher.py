"""Launching kernels with little work on the host.

In each launch, Triton inspects all arguments to find out whether the kernel is compiled for such. Here, that follows
from the constants and from the dtypes of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from powersgd_triton.layout.wire_format import ALIGNMENT

OLDEST, NEWEST = (3, 6), (3, 9)
"""Versions of Triton whose compiled kernels are launched as they are here."""

KNOWN = torch.version.hip is None and OLDEST <= tuple(map(int, triton.__version__.split(".")[:2])) <= NEWEST
"""Whether all is known that kernels are compiled for. On AMD, that includes whether a tensor is larger than 2 GiB."""

HAS_DEVICE = torch.cuda.is_available()


ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Types of the elements that kernels read and write through addresses."""


def vector_of(*dtypes: torch.dtype) -> int:
    """Return the elements of the narrowest of these dtypes in the widest access."""
    return ALIGNMENT // min(dtype.itemsize for dtype in dtypes)


class _Known(NamedTuple):
    """What was found out in the first launch of a kernel: all of its constants, in the order of its parameters.

    ``pointers`` are indices of arguments that are tensors at multiples of 16 bytes, ``scalars`` those of other tensors.
    """

    compiled: Any
    options: Mapping[str, Any]
    constants: tuple[Any, ...]
    pointers: tuple[int, ...]
    scalars: tuple[int, ...]


_known: dict[tuple[Any, ...], _Known] = {}


def run(kernel: Any, grid: tuple[int, ...], options: Mapping[str, Any], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel, like ``kernel[grid](*arguments, **constants, **options)`` in less time.

    Triton launches a kernel itself for the first time with these constants and dtypes on a device, if a tensor does not
    start at a multiple of 16 bytes, if a profiler has set hooks, while a CUDA graph is captured, on AMD, and in
    versions other than 3.6 to 3.9. What its knobs say about compiling counts when a kernel is launched first.

    Args:
        kernel: Function whose parameters are the arguments and then the constants. Numbers among the arguments, and
            tensors that may start anywhere, are named in ``do_not_specialize``. Integers of 64 bits are annotated.
        grid: Number of programs, along one or two axes.
        options: Triton's options, and constants. The same object for the same values.
        constants: The other constants, in the same order in all launches.

    TypeError: Triton would compile the kernel for the value of a number.
    """
    if not KNOWN or type(kernel) is not JITFunction:
        # For example in the interpreter.
        kernel[grid](*arguments, **constants, **options)
        return
    driver = triton.runtime.driver.active
    device = driver.get_current_device()
    dtypes = [value.dtype for value in arguments if isinstance(value, Tensor)]
    key = (id(kernel), id(options), device, *dtypes, *constants.values())
    known = _known.get(key)
    if known is not None and known.options is options and not _observed(kernel):
        values, bits = list(arguments), 0
        for index in known.pointers:
            values[index] = address = arguments[index].data_ptr()
            bits |= address
        if bits % ALIGNMENT == 0:
            for index in known.scalars:
                values[index] = arguments[index].data_ptr()
            stream, compiled = driver.get_current_stream(device), known.compiled
            compiled.run(
                grid[0], grid[1] if len(grid) > 1 else 1, 1, stream, compiled.function, compiled.packed_metadata,
                None, None, None, *values, *known.constants,
            )  # fmt: skip
            return
    compiled = kernel[grid](*arguments, **constants, **options)
    if isinstance(compiled, CompiledKernel) and known is None:
        found = _find(kernel, compiled, options, arguments, constants)
        if found is not None:
            _known[key] = found


def _find(
    kernel: Any, compiled: Any, options: Mapping[str, Any], arguments: tuple[Any, ...], constants: Mapping[str, Any]
) -> _Known | None:
    """Return what the next launches need to know. None if a tensor does not start at a multiple of 16 bytes."""
    pointers: list[int] = []
    scalars: list[int] = []
    for index, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=False)):
        if isinstance(value, Tensor):
            (scalars if parameter.do_not_specialize else pointers).append(index)
        elif not parameter.do_not_specialize:
            raise TypeError(f"{kernel.__name__}: name {parameter.name} in do_not_specialize, since it is a number")
    if any(arguments[index].data_ptr() % ALIGNMENT for index in pointers):
        return None
    every = {**options, **constants}
    values = tuple(every[parameter.name] for parameter in kernel.params[len(arguments) :])
    return _Known(compiled, options, values, tuple(pointers), tuple(scalars))


def _observed(kernel: Any) -> bool:
    """Return whether something wants to know of launches that only Triton's own tell it."""
    hooks = triton.knobs.runtime
    if kernel.pre_run_hooks or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        return True
    if getattr(hooks, "add_stages_inspection_hook", None) is not None:
        return True
    return HAS_DEVICE and torch.cuda.is_current_stream_capturing()
