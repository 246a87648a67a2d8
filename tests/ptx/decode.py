"""PTX, parsed and decoded for ``engine.c``, which executes it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SOURCE = Path(__file__).with_name("engine.c")
COMPILER = shutil.which(os.environ.get("CC", "cc"))
CACHE = Path(tempfile.gettempdir(), f"powersgd_triton-ptx-{os.getuid()}")
"""The engine and the kernels that were compiled, which take longer than running them."""

POISON = 0xFFA7
"""What two bytes of fresh memory hold: NaN in every dtype. Loading it is reading what was never written."""

ACQUIRE, RELEASE, STRONG, ALL_LANES = 1, 2, 4, 8
ORDERS = {"relaxed": 0, "acquire": ACQUIRE, "release": RELEASE, "acq_rel": ACQUIRE | RELEASE}
SHUFFLES = ("bfly", "idx", "up", "down")
SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%nctaid.x", "%nctaid.y")
"""The first registers."""

KINDS = (
    *("race in shared memory", "race in global memory", "race between programs", "race within a warp"),
    *("access to a copy in flight", "out of bounds", "misaligned", "read of what was never written"),
    *("not all lanes take part", "deadlock", "endless"),
)
"""Of findings, in the engine's order."""

MODIFIERS = {"rn", "ftz", "full", "approx", "rna", "rzi"}
ROUNDED = re.compile(r"cvt\.(rn\.(ftz\.)?(f|bf)|rna\.tf32\.f32$|rzi\.s|(?!r))")
"""Conversions whose rounding is the engine's."""

s32, s64, u64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p


class Instruction(ctypes.Structure):
    _fields_ = [
        *((name, s32) for name in ("op", "guard", "negated", "nd", "ns")), ("d", s32 * 8), ("s", s32 * 16),
        *((name, s32) for name in ("size", "flags", "target")), ("offset", s64), ("offset2", s64),
    ]  # fmt: skip


class Found(ctypes.Structure):
    _fields_ = [
        *((n, s32) for n in ("kind", "at", "other", "program", "thread", "other_program", "other_thread", "count")),
        ("address", u64),
    ]


class Segment(ctypes.Structure):
    _fields_ = [
        *(("base", u64), ("size", u64), ("data", pointer), ("latest", pointer), ("shadow", pointer)),
        *(("changed", s32), ("unused", s32)),
    ]


class Launch(ctypes.Structure):
    _fields_ = [
        *((name, pointer) for name in ("code", "constants", "segments", "findings", "hits")),
        *((name, u64) for name in ("random", "steps", "most_steps", "poison")),
        *((name, s32) for name in ("registers", "warps", "shared_bytes", "programs", "columns", "rows", "resident")),
        *((name, s32) for name in ("global_granule", "shared_granule", "segments_number", "findings_number")),
        *((name, s32) for name in ("most_findings", "counters_number", "releases_number")),
        *(("counters", pointer), ("releases", pointer)),
    ]


@functools.cache
def engine() -> Any:
    """The engine, compiled once for each version of its source."""
    options = ["-O2", "-march=native", "-ffp-contract=off", "-shared", "-fPIC"]
    CACHE.mkdir(mode=0o700, exist_ok=True)
    library = CACHE / f"{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        assert COMPILER is not None
        part = library.with_suffix(f".{os.getpid()}")
        subprocess.run([COMPILER, *options, "-o", str(part), str(SOURCE), "-lm"], check=True)
        part.replace(library)
    return ctypes.CDLL(str(library))


@functools.cache
def operations() -> dict[str, int]:
    """Numbers of the engine's operations by name."""
    names = (ctypes.c_char_p * engine().number_of_names()).in_dll(engine(), "names")
    return {name.decode(): number for number, name in enumerate(names)}


class NotExecutedError(Exception):
    """An instruction that the engine does not know."""


class Finding(NamedTuple):
    """What is wrong, and where: the line of the PTX, and the line of the source it was compiled from."""

    kind: str
    here: str
    there: str
    threads: str
    address: int
    times: int

    def __str__(self) -> str:
        after = f"\n    after {self.there}" if self.there else ""
        return f"{self.threads}, address {self.address:#x}, {self.times} times\n    {self.here}{after}"


class Place(NamedTuple):
    """Memory of a launch: its address, its bytes, and the address where they are now."""

    address: int
    size: int
    data: int


class Kernel:
    """A compiled kernel. ``hits`` counts how often each instruction was executed."""

    def __init__(self, text: str, shared: int) -> None:
        self.text, self.shared = text, shared
        body = text.partition("\t.section")[0]
        header, body = body[: body.index("\n{")], body[body.index("\n{") :]
        self.parameters = re.findall(r"\.param \.(\w+) .*?(\w+_param_\d+)", header)
        self.warps = int(re.findall(r"\.reqntid (\d+)", header)[0]) // 32
        self._names = [name for _, name in self.parameters]
        self._registers = {
            name: number for number, name in enumerate(dict.fromkeys((*SPECIAL, *re.findall(r"%[\w.]+", body))))
        }
        self._literals: dict[int, int] = {}
        self._granules = {"global": 4, "shared": 4}
        self._labels: dict[str, int] = {}
        statements: list[tuple[str, str]] = []
        self.places: list[str] = []
        place, first = "", header.count("\n") + 1
        for number, line in enumerate(body.splitlines(), first):
            code, _, comment = (part.strip() for part in line.partition("//"))
            if code.startswith(".loc"):
                place = comment
            elif label := re.fullmatch(r"(\$\w+):", code):
                self._labels[label[1]] = len(statements)
            elif code.endswith(";") and not code.startswith("."):
                guard, statement = re.fullmatch(r"(?:@(!?%p\d+)\s+)?(.*);", code).groups()  # type: ignore[union-attr]
                statements.append((guard or "", statement.replace("\t", " ")))
                self.places.append(f"line {number}: {code}  <{place}>")
        self._code = (Instruction * len(statements))()
        unknown: set[str] = set()
        for row, (guard, statement) in zip(self._code, statements, strict=True):
            row.guard = self._registers[guard.lstrip("!")] if guard else -1
            row.negated = guard.startswith("!")
            try:
                self._decode(row, statement)
            except NotExecutedError as error:
                unknown.add(str(error))
        if unknown:
            raise NotExecutedError(", ".join(sorted(unknown)))
        self.hits = np.zeros(len(statements), np.uint64)

    def _slot(self, text: str, size: int = 8) -> int:
        """Where the engine finds an operand: registers, then parameters, then literals, of so many bytes."""
        if text in self._registers:
            return self._registers[text]
        if text in self._names:
            return len(self._registers) + self._names.index(text)
        if text == "_":
            return -1
        if text == "global_smem":
            text = "0"
        if found := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
            value = int(found[1], 16)
        elif re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            value = int(text.rstrip("U"), 0) % 256**size
        else:
            raise NotExecutedError(f"operand {text}")
        number = self._literals.setdefault(value, len(self._literals))
        return len(self._registers) + len(self._names) + number

    def _slots(self, *texts: str) -> list[int]:
        return [self._slot(name.strip()) for text in texts for name in text.strip("{} ").split(",")]

    def _address(self, text: str) -> tuple[int, int]:
        found = re.fullmatch(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+)\s*)?\]", text)
        if not found:
            raise NotExecutedError(f"address {text}")
        return self._slot(found[1]), int(found[2] or 0)

    def _decode(self, row: Instruction, statement: str) -> None:
        name, _, rest = statement.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,{}\[\]]+", rest)
        parts = name.split(".")
        head, kind = parts[0], parts[-1]
        size = int(re.findall(r"\d+$", kind)[0]) // 8 if re.search(r"[busf]\d+$", kind) else 0

        def put(operation: str, d: Sequence[int] = (), s: Sequence[int] = (), **fields: int) -> None:
            if operation not in operations():
                raise NotExecutedError(name)
            row.op, row.nd, row.ns = operations()[operation], len(d), len(s)
            row.d[: len(d)], row.s[: len(s)] = d, s
            for field, value in fields.items():
                setattr(row, field, value)

        if head == "bra":
            put("branch", target=self._labels[operands[0]])
        elif head == "ret":
            put("end")
        elif name == "bar.sync" and operands == ["0"]:
            put("barrier", flags=ALL_LANES)
        elif name == "bar.warp.sync":
            put("warp_barrier", flags=ALL_LANES)
        elif name == "cp.async.commit_group":
            put("commit", flags=ALL_LANES)
        elif name == "cp.async.wait_group":
            put("wait", flags=ALL_LANES, offset=int(operands[0], 0))
        elif name.startswith(("cp.async.ca.shared.global", "cp.async.cg.shared.global")):
            (to, offset), (source, distance) = map(self._address, operands[:2])
            put(
                "copy_async",
                (),
                (to, source, *self._slots(*operands[3:])),
                offset=offset,
                offset2=distance,
                size=int(operands[2], 0),
            )
        elif head == "ld" and parts[1] == "param":
            put("mov_b64", self._slots(operands[0]), self._slots(operands[1].strip("[]")))
        elif head in ("ld", "st") and parts[1].split("::")[0] in self._granules:
            space, load = parts[1].split("::")[0], head == "ld"
            if {*parts[2:-1]} - {"v2", "v4", "cg", "L1::evict_first", "L1::evict_last"} or (
                kind[0] == "s" and size < 4
            ):
                raise NotExecutedError(name)
            (at, offset), values = self._address(operands[load]), self._slots(operands[not load])
            self._granules[space] = min(self._granules[space], size)
            d, s = (values, [at]) if load else ([], [at, *values])
            put(
                f"{'load' if load else 'store'}_{space}", d, s, offset=offset, size=size, flags=STRONG * ("cg" in parts)
            )
        elif head == "atom" and parts[1:3] == ["global", "gpu"] and parts[4:] == ["add", "u32"]:
            at, offset = self._address(operands[1])
            put(
                "atomic_add",
                self._slots(operands[0]),
                (at, self._slot(operands[2])),
                offset=offset,
                flags=ORDERS[parts[3]],
            )
        elif head in ("ldmatrix", "stmatrix") and kind == "b16" and "m8n8" in parts:
            load = head == "ldmatrix"
            (at, offset), values = self._address(operands[load]), self._slots(operands[not load])
            d, s = (values, [at]) if load else ([], [at, *values])
            put(head, d, s, offset=offset, target="trans" in parts, flags=ALL_LANES)
        elif head == "mma" and {*parts[-4:]} in ({"f64"}, {"f32", "tf32"}):
            put(
                "mma_f64" if kind == "f64" else "mma_tf32",
                self._slots(operands[0]),
                self._slots(*operands[1:]),
                flags=ALL_LANES,
            )
        elif head == "shfl":
            put(
                "shuffle",
                self._slots(operands[0]),
                self._slots(*operands[1:4]),
                target=SHUFFLES.index(parts[2]),
                flags=ALL_LANES,
            )
        elif head == "redux":
            operation = self._operation([parts[2], kind])
            put(
                "reduce",
                self._slots(operands[0]),
                self._slots(operands[1]),
                target=operations()[operation],
                flags=ALL_LANES,
            )
        elif head == "mov" and "{" in operands[1]:
            put(
                "pack",
                self._slots(operands[0]),
                self._slots(operands[1]),
                size=8 * size // (operands[1].count(",") + 1),
            )
        elif head == "mov" and "{" in operands[0]:
            put(
                "unpack",
                self._slots(operands[0]),
                self._slots(operands[1]),
                size=8 * size // (operands[0].count(",") + 1),
            )
        elif head == "setp" and kind.endswith("x2"):
            compare = operations()[self._operation([*parts[:-1], kind.removesuffix("x2")])]
            put("compare_pair", self._slots(*operands[0].split("|")), self._slots(*operands[1:]), target=compare)
        elif head == "cvt" and not ROUNDED.match(name):
            raise NotExecutedError(name)
        else:
            # What is added to a wide product is wide.
            sizes = [size or 8] * 3 if "wide" not in parts else [size, size, 2 * size]
            sources = [self._slot(text, width) for text, width in zip(operands[1:], sizes, strict=False)]
            put(self._operation(parts), self._slots(operands[0]), sources)

    def _operation(self, parts: Sequence[str]) -> str:
        """The engine's name of an operation on values: the same, or one for any type of this size."""
        names = [part for part in parts if part not in MODIFIERS]
        for first, last in ((False, False), (False, True), (True, False), (True, True)):
            tried = list(names)
            for index in [1] * first + [-1] * last:
                tried[index] = re.sub(r"^[usf](\d+)$", r"b\1", tried[index])
            if "_".join(tried) in operations():
                return "_".join(tried)
        raise NotExecutedError(".".join(parts))

    def run(
        self, grid: tuple[int, int], values: Sequence[int], memory: Sequence[Place], seed: int, most_steps: int = 10**9
    ) -> tuple[list[Finding], dict[int, np.ndarray], int]:
        """Execute all programs in a schedule that the seed decides: what was found, what changed, and the steps it took.

        ``values`` are the bits of the parameters, ``memory`` is what may be accessed. It stays as it is.
        """
        constants = np.array([*values, *self._literals], np.uint64)[:, None].repeat(32, axis=1)
        segments = (Segment * len(memory))(*[Segment(*place) for place in sorted(memory)])
        found, random = (Found * 64)(), np.random.default_rng(seed)
        launch = Launch(
            code=ctypes.addressof(self._code), constants=constants.ctypes.data, segments=ctypes.addressof(segments),
            findings=ctypes.addressof(found), hits=self.hits.ctypes.data, random=int(random.integers(1, 2**63)),
            most_steps=most_steps, poison=POISON * 0x1_0001_0001_0001, registers=len(self._registers), warps=self.warps,
            shared_bytes=self.shared, programs=grid[0] * grid[1], columns=grid[0], rows=grid[1],
            resident=int(random.integers(1, 9)), global_granule=self._granules["global"],
            shared_granule=self._granules["shared"], segments_number=len(segments), most_findings=len(found),
        )  # fmt: skip
        engine().run(ctypes.byref(launch))
        changed = {x.base: np.frombuffer(ctypes.string_at(x.data, x.size), np.uint8) for x in segments if x.changed}
        engine().forget(ctypes.byref(launch))
        return [self._finding(x) for x in found[: launch.findings_number]], changed, launch.steps

    def _finding(self, x: Found) -> Finding:
        threads, there = f"program {x.program} thread {x.thread}", ""
        if x.other >= 0:
            threads, there = f"{threads} and program {x.other_program} thread {x.other_thread}", self.places[x.other]
        return Finding(KINDS[x.kind], self.places[x.at], there, threads, x.address, x.count)
