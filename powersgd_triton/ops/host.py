"""The codecs of flat tensors on the CPU: ``differences.c`` and ``sparse.c``, built when the package is installed."""

import contextlib
import ctypes
import functools
import itertools
import mmap
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.layout.codec import Decoding, Encoding
from powersgd_triton.layout.sparse_format import SparseFormat
from powersgd_triton.layout.wire_format import WireFormat
from powersgd_triton.ops.differences import apply_reference, encode_reference, first_span
from powersgd_triton.ops.sparse import apply_sparse_reference, encode_sparse_reference

FORMATS = ("int4", "int8", "fp8", "bf16")
"""Formats with blocks that the library has, in its order. It has the sparse format too."""

INTERFACE = "powersgd_interface_3"
"""What a library has that takes the arguments of this version."""

LARGE = 1 << 20
"""Bytes from which on memory is in large pages, of 2 MiB each, and is used again."""

MADV_FREE = 8
"""Advice to Linux on every processor. Python has it only if the system that it was compiled on did."""

_spare: dict[int, list[mmap.mmap]] = {}
"""{bytes: free memory}. The system may take its pages. Any thread, or the collector, frees: use atomic operations."""


def fields(**names: str) -> Sequence[tuple[str, Any]]:
    """Return the fields of a structure in C, from {type: their names}, in the order in which they lie in memory."""
    return [(name, getattr(ctypes, f"c_{kind}")) for kind, several in names.items() for name in several.split()]


class _Encoding(ctypes.Structure):
    _fields_ = fields(
        void_p="target base term other content", int64="numel codes", uint32="seed span",
        int32="random format subtract kept",
    )  # fmt: skip


class _Decoding(ctypes.Structure):
    _fields_ = fields(
        void_p="out content", int64="numel codes size messages", float="weight", int32="format fresh kept"
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None where it was not built: without a C compiler, or beside another OpenMP than torch's.

    One that was built for other arguments is not used. The library's threads are torch's: it is linked with the OpenMP
    that torch has loaded, so that there is one pool.
    """
    for path in Path(__file__).parent.glob("_host*.so"):
        # On some processors, nothing else finds torch's OpenMP before it is loaded for all.
        for openmp in (None, *_openmp()):
            with contextlib.suppress(OSError):
                if openmp is not None:
                    ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
                code = ctypes.CDLL(str(path))
                if hasattr(code, INTERFACE):
                    return code
    return None


def _openmp() -> list[str]:
    """Return the files of OpenMP that this process has loaded: torch's first, then those of other packages."""
    with contextlib.suppress(OSError):
        loaded = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        found = (file for file in loaded if re.match("lib[gi]?omp", Path(file).name))
        return sorted(found, key=lambda file: "/torch" not in file)
    return []


def encode_host(task: Encoding) -> None:
    """out ← scales and codes of target − base, with the bits of the reference, which does what the library does not."""
    target, base, width, out, subtract, each, seed, terms = task
    code = library()
    if code is None or not all(_can_read(x, width) for x in (target, base, *(terms or ())) if x is not None):
        (encode_sparse_reference if width.name == "sparse" else encode_reference)(task)
        return
    seed = seed if width.stochastic else None
    step = each or max(1, len(target))
    codes, _ = width.difference_bytes(step)
    rows = [itertools.repeat(None) if x is None else x.split(step) for x in (base, *(terms or (None, None)))]
    contents = out[None] if each is None else out
    for part, (own, content, *others) in enumerate(zip(target.split(step), contents, *rows, strict=False)):
        pointers = (None if x is None else x.data_ptr() for x in (own, *others, content))
        kind, form, kept = _form(width)
        random = seed or 0, first_span(part), seed is not None
        arguments = _Encoding(*pointers, len(own), codes, *random, form, subtract, kept)
        code[f"powersgd_encode{kind}"](ctypes.byref(arguments), torch.get_num_threads())


def apply_host(task: Decoding) -> None:
    """base ← base + codes · (scales · weight), with the bits of the reference; see ``encode_host``."""
    _, width, base, weight, each, fresh = task
    code = library()
    if code is None or not _can_read(base[:1], width):
        (apply_sparse_reference if width.name == "sparse" else apply_reference)(task)
        return
    codes, _ = width.difference_bytes(each or base.shape[1])
    for row, messages in task.rows():
        places = row.data_ptr(), messages.data_ptr(), len(row), codes, messages.stride(0), len(messages)
        kind, form, kept = _form(width)
        arguments = _Decoding(*places, weight, form, fresh, kept)
        code[f"powersgd_decode{kind}"](ctypes.byref(arguments), torch.get_num_threads())


def new_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory, on the CPU of Linux in large pages, and again what was freed last of this size.

    The first access to new memory takes longer than ten passes over it in small pages, and several in large ones.
    """
    size = numel * dtype.itemsize
    if device.type != "cpu" or size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numel, dtype=dtype, device=device)
    try:
        pages = _spare[size].pop()
    except (KeyError, IndexError):
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            # Other sizes may hold the addresses that are missing.
            _spare.clear()
            return torch.empty(numel, dtype=dtype, device=device)
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    # The tensor holds it, and it holds the memory.
    handle = (ctypes.c_char * size).from_buffer(pages)
    weakref.finalize(handle, _free, pages).atexit = False
    return torch.frombuffer(handle, dtype=dtype)


def _free(pages: mmap.mmap) -> None:
    """Use memory again, unless the system needs it first."""
    with contextlib.suppress(OSError):
        pages.madvise(MADV_FREE)
        _spare.setdefault(len(pages), []).append(pages)


def _form(width: WireFormat | SparseFormat) -> tuple[str, int, int]:
    return ("_sparse", 0, width.kept) if isinstance(width, SparseFormat) else ("", FORMATS.index(width.name), 0)


def _can_read(x: Tensor, width: WireFormat | SparseFormat) -> bool:
    """Return whether the library takes a tensor and a format."""
    return width.name in (*FORMATS, "sparse") and x.dtype == torch.float32 and x.is_cpu and x.stride(-1) == 1
