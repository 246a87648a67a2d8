"""What a compiled kernel needs and does, read from its machine code without a GPU."""

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU of an architecture, as its vendor describes it.

    Attributes:
        target: Triton's name of the architecture.
        name, multiprocessors: of the GPU; AMD calls a multiprocessor a compute unit.
        bandwidth: bytes a second that a copy reaches, 86% of the data sheet's.
        clock: cycles a second under load.
        fp64_cycles: cycles between two fp64 instructions of one scheduler, of which a multiprocessor has four.
        l2: bytes of its cache that hold what a kernel reads again: half, since the rest has what it writes.
        shared: bytes of shared memory on a multiprocessor; a block may have 1 KiB less on NVIDIA.
        warps, blocks: the most that are resident on a multiprocessor.
    """

    target: GPUTarget
    name: str
    multiprocessors: int
    bandwidth: float
    clock: float
    fp64_cycles: int
    l2: float
    shared: int
    warps: int
    blocks: int

    @property
    def is_amd(self) -> bool:
        return str(self.target.backend) == "hip"

    def resident_blocks(self, registers: int, shared: int, num_warps: int) -> int:
        """Blocks that a multiprocessor runs at once, by the scarcest of registers, shared memory, warps and slots."""
        if self.is_amd:
            # Four schedulers with 512 registers a lane each, given out in groups of 8; at most 8 warps each.
            by_registers = 4 * min(8, 512 // max(8, -(-registers // 8) * 8))
            used = shared
        else:
            # 65,536 registers, given out by the warp in groups of 256, to four schedulers alike.
            by_registers = 65536 // 4 // (-(-max(registers, 1) * 32 // 256) * 256) * 4
            # The system keeps 1 KiB of each block.
            used = shared + 1024
        limits = [self.blocks, min(self.warps, by_registers) // num_warps]
        if used:
            limits.append(self.shared // used)
        return min(limits)


KIB = 1024
GPUS = {
    "sm_80": Gpu(GPUTarget("cuda", 80, 32), "A100", 108, 1.75e12, 1.41e9, 4, 20e6, 164 * KIB, 64, 32),
    "sm_89": Gpu(GPUTarget("cuda", 89, 32), "RTX 4090", 128, 0.87e12, 2.52e9, 64, 36e6, 100 * KIB, 48, 24),
    "sm_90": Gpu(GPUTarget("cuda", 90, 32), "H100", 132, 2.88e12, 1.75e9, 2, 25e6, 228 * KIB, 64, 32),
    "sm_100": Gpu(GPUTarget("cuda", 100, 32), "B200", 148, 6.9e12, 1.85e9, 2, 63e6, 228 * KIB, 64, 32),
    "sm_120": Gpu(GPUTarget("cuda", 120, 32), "RTX 5090", 170, 1.54e12, 2.41e9, 64, 48e6, 100 * KIB, 48, 24),
    "gfx942": Gpu(GPUTarget("hip", "gfx942", 64), "MI300X", 304, 4.5e12, 2.1e9, 2, 128e6, 64 * KIB, 32, 32),
}
"""One GPU for each architecture. sm_86 has the limits of sm_89, but for 16 blocks."""

COUNTED = {
    # Not the barriers of warps (WARPSYNC), nor those that only wait for an asynchronous copy.
    "cuda": {"barriers": r"BAR\.", "shuffles": r"SHFL", "fp64": r"(DMMA|DFMA|DADD|DMUL|DSETP)"},
    "hip": {"barriers": r"s_barrier", "shuffles": r"ds_(b?permute|swizzle)|.*_dpp", "fp64": r"v_\w+_f64"},
}
MULTIPLIES = r"HMMA|DMMA|HGMMA|IMMA|UTC\w*MMA|v_mfma_"
"""Instructions of tensor cores."""

ROOT = "RSQ"
"""Part of the name of an instruction that computes 1 / √x."""

BARRIER_CYCLES, SHUFFLE_CYCLES, INSTRUCTION_CYCLES = 30, 25, 2
"""How long a warp waits for each, roughly: a loop of dependent instructions takes the sum."""


class Driver:
    """What Triton asks of a driver in order to compile a launch without running it."""

    def __init__(self, arch: str) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUS[self._arch].target

    def get_current_device(self) -> str:
        # Triton keeps compiled kernels by device.
        return self._arch

    def get_current_stream(self, device: str) -> int:  # noqa: ARG002
        return 0


def compile_launch(kernel: Any, arguments: dict[str, Any], options: dict[str, Any], arch: str) -> dict[str, Any]:
    """Compile a kernel for a launch with these arguments, and describe the result."""
    triton.runtime.driver.set_active(Driver(arch))
    # What Triton assumes of each argument is its own decision here, as in a launch: it depends on the argument's
    # address, value and size, and differs between NVIDIA and AMD.
    compiled = kernel.warmup(grid=(1,), **arguments, **options)
    gpu = GPUS[arch]
    found = _read_amd(compiled) if gpu.is_amd else _read_nvidia(compiled)
    code = found.pop("code")
    ttir = compiled.asm["ttir"]
    # The one that takes roots: where one column after another is eliminated.
    stepwise = next((loop for loop in _innermost(loops(code)) if any(ROOT in x.name.upper() for x in loop)), [])
    return {
        **found,
        **count(code, gpu),
        "loop_cycles": _cycles(count(stepwise, gpu), gpu),
        "short_loop": min(map(len, loops(code)), default=0),
        **_walk(code),
        "blocks": gpu.resident_blocks(found["registers"], compiled.metadata.shared, options.get("num_warps", 4)),
        "aligned_arguments": len(re.findall(r"%\w+: [^%]*tt.divisibility = 16", ttir)),
        "small_arguments": len(re.findall(r"%\w+: [^%]*tt.pointer_range = 32", ttir)),
    }


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its address, its name, and the address that it jumps to, if it does."""

    address: int
    name: str
    target: int | None = None


def count(code: Sequence[Instruction], gpu: Gpu) -> dict[str, int]:
    """Return the number of instructions, and of those of each counted kind."""
    counted = COUNTED[gpu.target.backend].items()
    numbers = {name: sum(bool(re.match(pattern, x.name)) for x in code) for name, pattern in counted}
    return {"instructions": len(code), **numbers}


def loops(code: Sequence[Instruction]) -> list[Sequence[Instruction]]:
    """Return the bodies of all loops: what lies between a jump backwards and its target."""
    return [
        [x for x in code if jump.target <= x.address <= jump.address]
        for jump in code
        # A kernel ends with a jump to itself.
        if jump.target is not None and jump.target < jump.address
    ]


def _contains(outer: Sequence[Instruction], inner: Sequence[Instruction]) -> bool:
    """Return whether a loop contains another one."""
    same = (outer[0], outer[-1]) == (inner[0], inner[-1])
    return not same and outer[0].address <= inner[0].address and inner[-1].address <= outer[-1].address


def _outermost(bodies: Sequence[Sequence[Instruction]]) -> list[Sequence[Instruction]]:
    """Return the loops that are in no other one."""
    return [body for body in bodies if not any(_contains(other, body) for other in bodies)]


def _innermost(bodies: Sequence[Sequence[Instruction]]) -> list[Sequence[Instruction]]:
    """Return the loops in which there is no other one."""
    return [body for body in bodies if not any(_contains(body, other) for other in bodies)]


def _walk(code: Sequence[Instruction]) -> dict[str, int]:
    """Return the instructions of a pass of the loop over tiles of an aligned matrix, of a loop in it, and of others.

    That loop multiplies, and is the shortest of those that do. The loop in it is over further panels of columns. Other
    instructions are outside of all such loops, shared out among them, since each loop has its own. (On ``sm_100``,
    waiting for a tensor core is a loop too, so that these numbers mean little there.)
    """
    outer = [loop for loop in _outermost(loops(code)) if _multiplies(loop)]
    if not outer:
        return {"tile_instructions": 0, "panel_instructions": 0, "other_instructions": len(code)}
    walk = min(outer, key=len)
    inner = sum(len(loop) for loop in _innermost(loops(code)) if _multiplies(loop) and _contains(walk, loop))
    within = {x.address for loop in outer for x in loop}
    others = (len(code) - len(within)) // len(outer)
    return {"tile_instructions": len(walk) - inner, "panel_instructions": inner, "other_instructions": others}


def _multiplies(code: Sequence[Instruction]) -> bool:
    return any(re.match(MULTIPLIES, x.name) for x in code)


def _cycles(counts: dict[str, int], gpu: Gpu) -> int:
    """Return how long one pass of a loop takes one warp a scheduler, if every instruction waits for the last."""
    return (
        INSTRUCTION_CYCLES * counts["instructions"]
        + BARRIER_CYCLES * counts["barriers"]
        + SHUFFLE_CYCLES * counts["shuffles"]
        + gpu.fp64_cycles * counts["fp64"]
    )


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _read_nvidia(compiled: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([_tool("cuobjdump"), option, file.name], capture_output=True, text=True, check=True)
            for option in ("-res-usage", "-sass")
        )
    numbers = {
        key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage.stdout + usage.stderr)
    }
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]*)([^;]*);", sass.stdout)
    code = []
    for address, name, operands in lines:
        target = re.search(r"\b0x([0-9a-f]+)\s*$", operands) if name.startswith("BRA") else None
        code.append(Instruction(int(address, 16), name, int(target.group(1), 16) if target else None))
    names = [x.name for x in code]
    accesses = [name for name in names if re.match(r"(LDG|STG|LDGSTS)\.", name)]
    matrix = [name for name in names if re.match(MULTIPLIES, name)]
    return {
        "code": code,
        "registers": numbers["REG"],
        "spill_bytes": numbers["STACK"] + numbers["LOCAL"],
        "shared_bytes": compiled.metadata.shared,
        "accesses": len(accesses),
        "accesses_128_bit": sum(access.endswith("128") or ".128." in access for access in accesses),
        "loads_128_bit": sum("128" in access and access.startswith("LDG") for access in accesses),
        "stores_128_bit": sum("128" in access and access.startswith("STG") for access in accesses),
        "tensor_core_instructions": len(matrix),
        "tensor_core_kinds": sorted({name.split(".")[0] for name in matrix}),
    }


def _read_amd(compiled: Any) -> dict[str, Any]:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found.group(1)) if found else 0

    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for label, name, operand in re.findall(r"^(?:(\.L\w+):|\t([a-z]\w+)(?:[ \t]+(\S+))?)", text, re.MULTILINE):
        if label:
            labels[label] = len(code)
        elif re.match(r"[sv]_|ds_|global_|buffer_|flat_|scratch_", name):
            code.append(Instruction(len(code), name, labels.get(operand) if "branch" in name else None))
    names = [x.name for x in code]
    accesses = [
        found.groups() for name in names if (found := re.match(r"(?:global|buffer|flat)_(load|store)_(\S+)", name))
    ]
    matrix = [name for name in names if re.match(MULTIPLIES, name)]
    return {
        "code": code,
        "registers": number("vgpr_count"),
        # Scalar registers are not spilled to memory, but to lanes of vector registers, of which some are left.
        "spill_bytes": 4 * number("vgpr_spill_count") + number("private_segment_fixed_size"),
        "shared_bytes": compiled.metadata.shared,
        "accesses": len(accesses),
        "accesses_128_bit": sum("x4" in width for _, width in accesses),
        "loads_128_bit": sum(kind == "load" and "x4" in width for kind, width in accesses),
        "stores_128_bit": sum(kind == "store" and "x4" in width for kind, width in accesses),
        "tensor_core_instructions": len(matrix),
        "tensor_core_kinds": sorted({re.sub(r"_\d.*", "", name) for name in matrix}),
    }
