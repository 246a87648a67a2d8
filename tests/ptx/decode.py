"""PTX, parsed and decoded for ``engine.c``, which executes it."""

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

WHOLE = {"ret": "end", "bar.sync 0": "barrier", "bar.warp.sync -1": "warp_barrier", "cp.async.commit_group": "commit"}
"""Statements without operands, and the engine's operations."""

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


def members(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Instruction(ctypes.Structure):
    _fields_ = [*members(s32, "op guard negated nd ns"), ("d", s32 * 8), ("s", s32 * 16),
                *members(s32, "size flags target"), *members(s64, "offset offset2")]  # fmt: skip


class Found(ctypes.Structure):
    _fields_ = [*members(s32, "kind at other program thread other_program other_thread count"), ("address", u64)]


class Segment(ctypes.Structure):
    _fields_ = [*members(u64, "base size"), *members(pointer, "data latest shadow"), *members(s32, "changed unused")]


class Launch(ctypes.Structure):
    _fields_ = [
        *members(pointer, "code constants segments findings hits"),
        *members(u64, "random steps most_steps poison"),
        *members(s32, "registers warps shared_bytes programs columns rows resident global_granule shared_granule"),
        *members(s32, "segments_number findings_number most_findings counters_number releases_number"),
        *members(pointer, "counters releases"),
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
    """What is wrong; where, for a person: lines of the PTX with those of the source; and only the latter."""

    kind: str
    text: str
    sources: str


Place = tuple[int, int, int]
"""Memory of a launch: its address, its bytes, and the address where they are now."""


class Kernel:
    """A compiled kernel. ``hits`` counts how often each instruction was executed."""

    def __init__(self, name: str, text: str, shared: int) -> None:
        self.name, self.text, self.shared = name, text, shared
        body = text.partition("\t.section")[0]
        header, body = body[: body.index("\n{")], body[body.index("\n{") :]
        self._names = re.findall(r"\w+_param_\d+", header)
        self.sizes = [int(size) // 8 for size in re.findall(r"\.param \.\w(\d+)", header)]
        self.warps = int(re.findall(r"\.reqntid (\d+)", header)[0]) // 32
        registers = dict.fromkeys((*SPECIAL, *re.findall(r"%[\w.]+", body)))
        self._registers = {name: number for number, name in enumerate(registers)}
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
                statements.append((guard or "", " ".join(statement.split())))
                self.places.append(f"line {number}: {code}  <{place}>")
        self._code = (Instruction * len(statements))()
        for row, (guard, statement) in zip(self._code, statements, strict=True):
            row.guard = self._registers[guard.lstrip("!")] if guard else -1
            row.negated = guard.startswith("!")
            self._decode(row, statement)
        self.hits = np.zeros(len(statements), np.uint64)

    def _slot(self, text: str, size: int = 8) -> int:
        """Where the engine finds an operand: registers, then parameters, then literals, of so many bytes."""
        text = text.strip()
        if text in self._registers:
            return self._registers[text]
        if text in self._names:
            return len(self._registers) + self._names.index(text)
        if text == "_":
            return -1
        if found := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
            value = int(found[1], 16)
        elif re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?|global_smem", text):
            value = int(text.replace("global_smem", "0").rstrip("U"), 0) % 256**size
        else:
            raise NotExecutedError(f"operand {text}")
        return len(self._registers) + len(self._names) + self._literals.setdefault(value, len(self._literals))

    def _slots(self, texts: Sequence[str], sizes: Sequence[int] = (8,) * 16) -> list[int]:
        names = [name for text in texts for name in re.split("[,|]", text.strip("{} "))]
        return [self._slot(name, size) for name, size in zip(names, sizes, strict=False)]

    def _decode(self, row: Instruction, statement: str) -> None:
        name, _, rest = statement.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,{}\[\]]+", rest)
        parts = name.split(".")
        head, kind, load = parts[0], parts[-1], parts[0].startswith("ld")
        size = int(re.findall(r"\d+$", kind)[0]) // 8 if re.search(r"[busf]\d+$", kind) else 0
        addresses: list[str] = []
        for index, text in enumerate(operands):
            if text.startswith("[") and parts[1:2] != ["param"]:
                found = re.fullmatch(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+)\s*)?\]", text)
                if not found:
                    raise NotExecutedError(f"address {text}")
                operands[index] = found[1]
                setattr(row, "offset2" if addresses else "offset", int(found[2] or 0))
                addresses.append(found[1])

        def put(operation: str, d: Sequence[str] = (), s: Sequence[str] = (), **fields: int) -> None:
            if operation not in operations():
                raise NotExecutedError(name)
            targets, sources = self._slots(d), self._slots(s, fields.pop("sizes", (8,) * 16))  # type: ignore[arg-type]
            row.op, row.nd, row.ns = operations()[operation], len(targets), len(sources)
            row.d[: row.nd], row.s[: row.ns] = targets, sources
            for field, value in fields.items():
                setattr(row, field, value)

        first, others = operands[:1], operands[1:]
        if head == "bra":
            put("branch", target=self._labels[operands[0]])
        elif statement in WHOLE:
            put(WHOLE[statement], flags=ALL_LANES if statement != "ret" else 0)
        elif name == "cp.async.wait_group":
            put("wait", flags=ALL_LANES, offset=int(operands[0], 0))
        elif name in ("cp.async.ca.shared.global", "cp.async.cg.shared.global"):
            put("copy_async", (), [*addresses, *operands[3:]], size=int(operands[2], 0))
        elif head == "ld" and parts[1] == "param":
            put("mov_b64", first, [others[0].strip("[]")])
        elif head in ("ld", "st") and parts[1] in self._granules:
            if {*parts[2:-1]} - {"v2", "v4", "cg"} or (kind[0] == "s" and size < 4):
                raise NotExecutedError(name)
            self._granules[parts[1]] = min(self._granules[parts[1]], size)
            flags = STRONG * ("cg" in parts)
            put(f"{head}_{parts[1]}", first if load else (), others if load else operands, size=size, flags=flags)
        elif head == "atom" and parts[1:3] == ["global", "gpu"] and parts[4:] == ["add", "u32"]:
            put("atomic_add", first, others, flags=ORDERS[parts[3]])
        elif head in ("ldmatrix", "stmatrix") and kind == "b16" and "m8n8" in parts:
            put(head, first if load else (), others if load else operands, target="trans" in parts, flags=ALL_LANES)
        elif head == "mma" and {*parts[-4:]} in ({"f64"}, {"f32", "tf32"}):
            put("mma_f64" if kind == "f64" else "mma_tf32", first, others, flags=ALL_LANES)
        elif head == "shfl":
            put("shuffle", first, others[:3], target=SHUFFLES.index(parts[2]), flags=ALL_LANES)
        elif head == "redux":
            put("reduce", first, others[:1], target=operations()[self._operation([parts[2], kind])], flags=ALL_LANES)
        elif head == "mov" and "{" in rest:
            pack = "{" in others[0]
            count = operands[pack].count(",") + 1
            put("pack" if pack else "unpack", first, others, size=8 * size // count)
        elif head == "setp" and kind.endswith("x2"):
            put("compare_pair", first, others, target=operations()[self._operation([*parts[:-1], kind[:-2]])])
        elif head == "cvt" and not ROUNDED.match(name):
            raise NotExecutedError(name)
        else:
            # What is added to a wide product is wide.
            sizes = [size or 8] * 3 if "wide" not in parts else [size, size, 2 * size]
            put(self._operation(parts), first, others, sizes=sizes)  # type: ignore[arg-type]

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
        """Execute all programs in a schedule that the seed decides: findings, what changed, and the number of steps.

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
        text = (
            f"program {x.program} thread {x.thread}, address {x.address:#x}, {x.count} times\n    {self.places[x.at]}"
        )
        if x.other >= 0:
            text += f"\n    after program {x.other_program} thread {x.other_thread}, {self.places[x.other]}"
        return Finding(KINDS[x.kind], text, "".join(re.findall(r"<.*?>", text)))
