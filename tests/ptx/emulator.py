"""A GPU for Triton whose kernels run as PTX on the CPU, in random schedules, and what is found in them."""

import collections
import ctypes
import gc
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

# Before kernels are defined: else Triton interprets them.
os.environ.pop("TRITON_INTERPRET", None)
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler

from tests.ptx.decode import CACHE, POISON, Finding, Kernel, NotExecutedError, Place

EXECUTED = 80
"""Compute capability whose instructions are all executed."""

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
SHARED = 232448
"""Bytes of shared memory of a program, at most."""


class Emulator:
    """What Triton asks of a driver.

    Attributes:
        schedules: In how many each launch runs. Its results are those of the first.
        label: What runs, for findings.
    """

    def __init__(self) -> None:
        self.capability, self.schedules, self.seed, self.label = EXECUTED, 1, 0, ""
        self.launches = self.runs = self.steps = 0
        self.kernels: dict[str, Kernel] = {}
        self.found: dict[tuple[str, str, str], str] = {}
        self.not_executed: collections.Counter[tuple[str, str]] = collections.Counter()

    # What Triton calls. A compiled kernel's machine code is its PTX, and the function to launch is its ``Kernel``.

    utils = property(lambda self: self)
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_device_properties = staticmethod(lambda _: {"max_shared_mem": SHARED})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def load_binary(self, name: str, code: bytes, shared: int, _: int) -> tuple[int, Any, int, int, int]:
        try:
            return 1, self._kernel(name, code.decode(), shared), 0, 0, 1024
        except NotExecutedError as error:
            return 1, error, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        kinds = list(source.signature.values())
        other: list[Kernel] = []

        def launch(x: int, y: int, z: int, stream: int, kernel: Kernel | NotExecutedError, *rest: Any) -> None:
            assert z == 1
            given = rest[4:]
            if isinstance(kernel, NotExecutedError):
                self.not_executed[metadata.name, str(kernel)] += 1
                if not other:
                    options = {name: getattr(metadata, name) for name in OPTIONS}
                    made = triton.compile(source, target=GPUTarget("cuda", EXECUTED, 32), options=options)
                    other.append(self._kernel(metadata.name, made.asm["cubin"].decode(), made.metadata.shared))
                kernel = other[0]
            values = [bits(value, kind) for value, kind in zip(given, kinds, strict=True) if kind != "constexpr"]
            sizes = [8 if kind.startswith("*") else int(kind[-2:]) // 8 for kind in kinds if kind != "constexpr"]
            # Two pointers to scratch memory follow, which no kernel uses.
            if kernel.sizes != [*sizes, 8, 8] or kernel.warps != metadata.num_warps:
                self.add(metadata.name, Finding("other parameters", f"declared {kernel.sizes}, passed {sizes}", ""))
            self.launch(kernel, (x, y), [*values, 0, 0])

        return launch

    def _kernel(self, name: str, text: str, shared: int) -> Kernel:
        self.kernels[text] = self.kernels.get(text) or Kernel(name, text, shared)
        return self.kernels[text]

    def launch(self, kernel: Kernel, grid: tuple[int, int], values: list[int]) -> None:
        self.launches += 1
        memory, first = storages(), None
        for schedule in range(self.schedules):
            seed = (self.seed * 2**20 + self.launches) * 2**10 + schedule
            findings, changed, steps = kernel.run(grid, values, memory, seed)
            self.runs, self.steps = self.runs + 1, self.steps + steps
            first = changed if first is None else first
            if not same(first, changed):
                findings.append(Finding("other results", f"of schedule {schedule} than of the first", ""))
            for finding in findings:
                self.add(kernel.name, finding)
        for address, data in (first or {}).items():
            ctypes.memmove(address, data.ctypes.data, data.size)

    def add(self, name: str, what: Finding) -> None:
        """Note a finding. Those at the same lines of the source, whatever the kernel is compiled for, count as one."""
        self.found.setdefault((what.kind, name, what.sources), f"{what.kind} in {name}, {self.label}: {what.text}")

    def summary(self) -> Iterator[str]:
        """What ran, what was found, how much of each kernel was executed, and of which lines most of the rest is."""
        yield (
            f"sm_{self.capability}: {self.launches} launches, {self.runs} runs in random schedules, "
            f"{self.steps / 1e6:.1f} million instructions of warps, {len(self.found)} findings"
        )
        yield from self.found.values()
        for (name, instructions), count in sorted(self.not_executed.items()):
            yield f"{name}: {count} launches ran as sm_{EXECUTED}, since not executed: {instructions}"
        for name in sorted({kernel.name for kernel in self.kernels.values()}):
            kernels = [kernel for kernel in self.kernels.values() if kernel.name == name]
            every = [place for kernel in kernels for place in zip(kernel.places, kernel.hits, strict=True)]
            missed = collections.Counter(place.partition("<")[2].partition(" ")[0] for place, hits in every if not hits)
            share, rest = 1 - missed.total() / len(every), ", ".join(f"{n} of {x}" for x, n in missed.most_common(6))
            yield f"{name}: compiled {len(kernels)} times, {share:.1%} of {len(every)} executed; not {rest}"


def bits(value: Any, kind: str) -> int:
    """A parameter's value as the launcher packs it."""
    if isinstance(value, Tensor):
        return int(value.data_ptr())
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value) & ((1 << (64 if kind.startswith("*") else int(kind[1:]))) - 1)


def same(one: dict[int, np.ndarray], other: dict[int, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(data, other[at]) for at, data in one.items())


def storages() -> list[Place]:
    """The memory of all tensors on the CPU that are alive."""
    tensors = (x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter))
    storages = (x.untyped_storage() for x in tensors if x.device.type == "cpu" and x.numel())
    sizes = {x.data_ptr(): x.nbytes() for x in storages}
    return [(address, size, address) for address, size in sizes.items()]


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes a tensor, whose memory is filled with ``POISON``."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        if tensor.device.type == "cpu" and tensor.numel():
            storage = tensor.untyped_storage()
            pattern = np.full(storage.nbytes() // 2, POISON, np.uint16)
            ctypes.memmove(storage.data_ptr(), pattern.ctypes.data, pattern.nbytes)
        return tensor

    return made


def install(emulator: Emulator) -> None:
    """Compile and launch kernels for this device from now on, with tensors on the CPU; fresh memory is poisoned."""
    from powersgd_triton.kernels import configurations
    from powersgd_triton.kernels import differences as _differences  # noqa: F401
    from powersgd_triton.kernels import sparse as _sparse  # noqa: F401
    from powersgd_triton.ops import triton_backend

    triton.knobs.cache.dir = str(CACHE / "triton")
    compiler.CUDABackend.make_cubin = lambda _, source, *rest: source.encode()  # noqa: ARG005
    triton.runtime.driver.set_active(emulator)
    for module in (configurations, triton_backend):
        module.architecture = lambda _: f"sm_{emulator.capability}"  # type: ignore[attr-defined]
    torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)
    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)  # type: ignore[method-assign]
    # All kernels are defined by now. With this the package takes tensors on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"
