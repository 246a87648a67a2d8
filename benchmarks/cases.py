"""What the GPU benchmarks go through: the default selection, everything (``--full``), and a dry run (``--dry``)."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import torch

from benchmarks.buckets import FilledBucket
from benchmarks.launches import PHASES
from benchmarks.shapes import GPU_GRADIENT_SETS, GRADIENT_SETS, ONE_BUCKET, SINGLE_MATRICES, TINY_GRADIENT_SETS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALLOWED_DISTANCE = {"fp32": 1e-4, "bf16": 2.0**-7}
"""How far from the reference a step's result may be, ‖ours − reference‖ / ‖reference‖: some rounding errors of fp32 and
their growth in an orthogonalization; in bf16, to which results are rounded, one unit in the last place."""

RANKS = (4, 16, 1, 32, 64)
"""The most important first: a run that is short of time ends with the others."""

BUCKET_RANKS = (4, 16, 32, 64)
"""For which kernels of one bucket are timed beside what was predicted."""

FACTORS = {False: (64, 4096), True: (2, 64)}
"""How many factors of how many rows are orthogonalized; the second in a dry run."""

ORTHOGONALIZATIONS = ("triton", "reference", "torch.linalg.qr", "geqrf + orgqr")

REFERENCE_PHASES = ("compensate_project", "orthogonalize P", "backproject", "reconstruct")
"""What the reference is timed on."""

COMPILED_PHASES = ("compensate_project", "backproject", "reconstruct")
"""Of these, what torch.compile can be asked for: orthogonalization unrolls into thousands of operations."""

# Here and not beside their providers, which import kernels: before that, a dry run must choose the interpreter.
WIRE_PHASES = ("encode", "reduce", "decode")
DIFFERENCE_PHASES = ("encode_difference", "apply_difference")


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement. ``rank`` is 0 where it does not matter; ``phase`` is a kernel's, empty for a whole step."""

    gradients: str
    rank: int
    dtype: str
    provider: str
    phase: str = ""

    @property
    def id(self) -> str:
        parts = [self.gradients, f"r{self.rank}", self.dtype, self.phase, self.provider]
        return "-".join(part.replace(" ", "").replace("×", "x") for part in parts if part)

    def labels(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def bucket(self, device: torch.device) -> FilledBucket:
        return _bucket(self.gradients, self.dtype, device)


@functools.lru_cache(maxsize=1)
def _bucket(gradients: str, dtype: str, device: torch.device) -> FilledBucket:
    return FilledBucket(GRADIENT_SETS[gradients], device, DTYPES[dtype])


def step_cases(full: bool, dry: bool) -> list[Case]:
    """Whole hook steps."""
    sets = TINY_GRADIENT_SETS if dry else GPU_GRADIENT_SETS
    cases = [Case(gradients, 0, dtype, "copy") for gradients, dtype in itertools.product(sets, DTYPES)]
    for rank, dtype, gradients in itertools.product((4,) if dry else RANKS, DTYPES, sets):
        if dry and dtype == "bf16":
            cases.append(Case(gradients, rank, dtype, "ours"))
            continue
        if dtype == "fp32" or full or rank in (4, 16):
            cases += [Case(gradients, rank, dtype, provider) for provider in ("ours", "torch", "torch batched")]
        if (dtype == "fp32" and rank in (4, 16)) or full:
            cases.append(Case(gradients, rank, dtype, "reference"))
    return cases


def orthogonalize_cases(full: bool, dry: bool) -> list[Case]:
    """A batch of factors, by everyone who can orthogonalize one."""
    count, rows = FACTORS[dry]
    ranks = (4,) if dry else (16, 4, 32, 64, 1) if full else (16, 4, 32)
    return [
        Case(f"{count} × ({rows}, r)", rank, "fp32", provider, "orthogonalize")
        for rank, provider in itertools.product(ranks, ORTHOGONALIZATIONS)
    ]


def kernel_cases(full: bool, dry: bool) -> list[Case]:
    """Each kernel by itself."""
    return list(_kernel_cases(full, dry))


def _kernel_cases(full: bool, dry: bool) -> Iterator[Case]:
    for rank, gradients, phase in itertools.product(() if dry else BUCKET_RANKS, ONE_BUCKET, PHASES):
        yield Case(gradients, rank, "fp32", "triton", phase)
    sets = TINY_GRADIENT_SETS if dry else GPU_GRADIENT_SETS | SINGLE_MATRICES
    default = {("fp32", 4)} if dry else {("fp32", 4), ("fp32", 16), ("fp32", 32), ("bf16", 16)}
    for rank, dtype, gradients in itertools.product((4, 16, 32, 64, 1), DTYPES, sets):
        if (dtype, rank) not in default and (dry or not full):
            continue
        yield from (Case(gradients, rank, dtype, "triton", phase) for phase in PHASES)
        yield from (Case(gradients, rank, dtype, "reference", phase) for phase in REFERENCE_PHASES)
        # One matrix compiles in seconds, a model's list of them in minutes.
        if dry or (gradients in SINGLE_MATRICES and (full or (rank, dtype) == (16, "fp32"))):
            yield from (Case(gradients, rank, dtype, "compiled", phase) for phase in COMPILED_PHASES)


def wire_cases(full: bool, dry: bool) -> list[Case]:
    """The kernels that write and read narrow factors; beside ``Case.phase`` stands the width."""
    sets = TINY_GRADIENT_SETS if dry else GPU_GRADIENT_SETS
    widths = ("bfloat16", "float16", "int8", "int4") if full else ("bfloat16", "int8", "int4")
    return [
        Case(gradients, rank, "fp32", provider, f"{phase} {width}")
        for rank, gradients, width, phase, provider in itertools.product(
            (4,) if dry else (4, 16, 32, 64, 1) if full else (32,), sets, widths, WIRE_PHASES, ("triton", "reference")
        )
    ]


def difference_cases(full: bool, dry: bool) -> list[Case]:
    """The kernels that encode and apply differences of parameters, beside a plain copy of as many bytes."""
    sets = TINY_GRADIENT_SETS if dry else GPU_GRADIENT_SETS
    widths = ("int8", "int4", "int2", "ternary") if full else ("int2", "int8", "ternary")
    dtypes = tuple(DTYPES) if full else ("bf16",)
    return [
        Case(gradients, 0, dtype, provider, f"{phase} {width}")
        for gradients, dtype, width, phase, provider in itertools.product(
            sets, dtypes, widths, DIFFERENCE_PHASES, ("triton", "copy", "reference")
        )
    ]


def launch_cases(full: bool, dry: bool) -> list[Case]:
    """Steps whose launches are counted."""
    cases = [case for case in step_cases(full, dry) if case.dtype == "fp32" and case.provider != "copy"]
    return [case for case in cases if full or case.provider == "ours" or case.rank == 4]


def replay_cases(full: bool, dry: bool) -> list[Case]:
    """Steps that are replayed as CUDA graphs: torch's hook waits for the device, hence cannot be."""
    return [case for case in step_cases(full, dry) if case.provider in ("ours", *(["reference"] if full else []))]
