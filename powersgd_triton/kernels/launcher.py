"""Launching kernels with little work on the host.

In each launch, Triton inspects all arguments to find out whether the kernel is compiled for such. Here, that follows
from the constants and from the dtypes of tensors.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from powersgd_triton.kernels.availability import why_inspected
from powersgd_triton.layout.wire_format import ALIGNMENT

KNOWN = why_inspected(triton.__version__) is None
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

_thread = threading.local()
"""``launches`` are those that this thread notes, to repeat them in later steps."""


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
    noted = getattr(_thread, "launches", None)
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
            launch = [
                grid[0], grid[1] if len(grid) > 1 else 1, 1, stream, compiled.function, compiled.packed_metadata,
                None, None, None, *values, *known.constants,
            ]  # fmt: skip
            compiled.run(*launch)
            if noted is not None:
                noted.append((device, known.pointers, arguments, kernel, compiled.run, launch))
            return
    if noted is not None:
        noted.append(None)
    compiled = kernel[grid](*arguments, **constants, **options)
    if isinstance(compiled, CompiledKernel) and known is None:
        found = _find(kernel, compiled, options, arguments, constants)
        if found is not None:
            _known[key] = found


STREAM, FIRST = 3, 9
"""Indices of the stream and of a kernel's first argument among what Triton's launcher takes."""


class Launches:
    """What a part of a step launches. Later steps repeat it without inspecting the arguments again."""

    def __init__(self) -> None:
        # What the launches depend on, and (kernel, Triton's launcher, what that takes, places of what moves there).
        self._fixed: tuple[Any, ...] = ()
        self._noted: list[tuple[Any, Callable[..., None], list[Any], list[tuple[int, int]]]] = []
        self._device = 0
        # Which of the moving arguments start at multiples of 16 bytes, and the tensors that do not move.
        self._aligned: set[int] = set()
        self._kept: list[Tensor] = []

    def run(self, launch: Callable[[], None], fixed: tuple[Any, ...], moving: Sequence[int | Tensor]) -> None:
        """Call ``launch``, which does nothing but launch kernels, or repeat what it launched in an earlier step.

        It is called again if ``fixed`` changes, on which the launches depend. ``moving`` are the arguments that may be
        others in each step: addresses, and tensors. No other argument may be the same object as one of them.
        """
        if not (self._noted and fixed == self._fixed and self._repeat(moving)):
            noted: list[Any] = []
            self._noted, self._fixed, _thread.launches = [], fixed, noted
            try:
                launch()
            finally:
                _thread.launches = None
            if None not in noted:
                self._note(noted, moving)

    def _repeat(self, moving: Sequence[int | Tensor]) -> bool:
        """Launch again, with other values of what moves. Return False if Triton must do it."""
        driver = triton.runtime.driver.active
        if not KNOWN or driver.get_current_device() != self._device:
            return False
        if _observed(*[kernel for kernel, *_ in self._noted]):
            return False
        values = [value if isinstance(value, int) else value.data_ptr() for value in moving]
        if any(values[number] % ALIGNMENT for number in self._aligned):
            return False
        stream = driver.get_current_stream(self._device)
        for _, start, taken, places in self._noted:
            taken[STREAM] = stream
            for index, number in places:
                taken[index] = values[number]
            start(*taken)
        return True

    def _note(self, noted: Sequence[tuple[Any, ...]], moving: Sequence[int | Tensor]) -> None:
        """Note direct launches (device, indices of aligned arguments, arguments, kernel, Triton's launcher, …)."""
        self._aligned, self._kept = set(), []
        for self._device, aligned, arguments, kernel, start, taken in noted:
            places = [(i, n) for i, value in enumerate(arguments) for n, moved in enumerate(moving) if value is moved]
            moved = {index for index, _ in places}
            self._aligned |= {number for index, number in places if index in aligned}
            self._kept += [v for i, v in enumerate(arguments) if isinstance(v, Tensor) and i not in moved]
            self._noted.append((kernel, start, taken, [(FIRST + index, number) for index, number in places]))


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


def _observed(*kernels: Any) -> bool:
    """Return whether something wants to know of launches that only Triton's own tell it."""
    hooks = triton.knobs.runtime
    # Chains of hooks, or a hook itself, or None.
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return True
    if getattr(hooks, "add_stages_inspection_hook", None) is not None:
        return True
    if any([kernel.pre_run_hooks for kernel in kernels]):  # noqa: C419 — a generator takes longer
        return True
    return HAS_DEVICE and torch.cuda.is_current_stream_capturing()
