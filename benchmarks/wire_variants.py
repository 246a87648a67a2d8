"""Other ways of writing 8- and 4-bit factors: how many entries share a scale, and stochastic rounding beside nearest.

python -m benchmarks.wire_variants streams [--steps 300] [--ranks 16 32]
python -m benchmarks.wire_variants text [--steps 600] [--seed 0]
python -m benchmarks.wire_variants report

``streams`` compresses made gradients with workers that are simulated in this process: low rank and noise, the same with
row norms as of an embedding (Zipf's law), with few rows a step, and both transposed, so that Q is the factor with the
heavy tail. ``text`` trains the demo's model. Both add to benchmarks/results/wire-variants.json. ``report`` prints
tables. What a variant says travels as fp32 numbers here, its bytes are calculated.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import loss_per_byte
from benchmarks.rounding import Record, Variant, payload, wires
from powersgd_triton import PowerSGDConfig
from powersgd_triton.demo.model import GPT
from powersgd_triton.demo.train import Arm, Result, Settings, train_worker
from powersgd_triton.demo.workers import run_workers
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.wire_format import BLOCK
from powersgd_triton.ops import torch_backend
from powersgd_triton.ops.wire import TorchWire
from tests.support.lockstep import Fleet, Values

FILE = Path(__file__).parent / "results" / "wire-variants.json"
WORKERS = 2
ROWS, COLUMNS = 2048, 128
TEXT_WIDTH, TEXT_RANKS = "int4", (32, 8)
WINDOW = 50
"""Steps over which the errors' size is averaged, before the middle and before the end."""
GROWING = 1.2
"""An error that is so many times as large at the end as in the middle counts as one that diverges."""

VARIANTS = [Variant(block, stochastic) for block in (32, 64, BLOCK, None) for stochastic in (False, True)]
TEXT_VARIANTS = [Variant(None, False), Variant(BLOCK, True), Variant(None, True)]


# Made gradients -----------------------------------------------------------------------------------------------------


class Streams:
    """Each step's gradients of each worker. A slowly turning signal of falling spectrum, and each worker's own noise.

    Args:
        n, m: shape of a gradient; transposed ones are m × n.
        seed: of all draws.
    """

    def __init__(self, n: int, m: int, seed: int, rank: int = 24) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._U, self._V = self._randn(n, rank), self._randn(m, rank)
        spectrum = 1 / torch.arange(1.0, rank + 1)
        self._spectrum = spectrum / spectrum.norm()
        # Frequent tokens lie anywhere in a vocabulary.
        self._zipf = 1 / (1 + torch.randperm(n, generator=self._generator).float())
        self.shapes = {
            "gaussian": (n, m), "Zipf rows": (n, m), "Zipf columns": (m, n), "few rows": (n, m), "few columns": (m, n)
        }  # fmt: skip

    def draw(self, workers: int, turn: float = 0.99) -> list[Values]:
        for factor in (self._U, self._V):
            factor.mul_(turn).add_(self._randn(*factor.shape), alpha=(1 - turn**2) ** 0.5)
        signal = (self._U * self._spectrum) @ self._V.mT
        return [self._worker(signal + 0.5 * self._randn(*signal.shape)) for _ in range(workers)]

    def _worker(self, G: Tensor) -> Values:
        n = len(G)
        tokens = torch.multinomial(self._zipf, n // 8, replacement=True, generator=self._generator)
        zipf, few = self._zipf[:, None] * G, torch.bincount(tokens, minlength=n)[:, None] * G
        values = G, zipf, zipf.mT.contiguous(), few, few.mT.contiguous()
        return dict(zip(self.shapes, values, strict=True))

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)


class Simulation:
    """All workers of one variant, and what became of the gradients.

    Args:
        width: of factors, "float32" or one of integers.
        variant: how factors are written; None for what the package does.
    """

    def __init__(self, rank: int, width: str, variant: Variant | None, streams: Streams, seed: int) -> None:
        config = PowerSGDConfig(rank=rank, wire_dtype=width, backend="torch", seed=seed)
        self.fleet = Fleet(config, streams.shapes, WORKERS)
        self.errors: dict[str, list[float]] = {name: [] for name in streams.shapes}
        self.sums = {name: torch.zeros(shape) for name, shape in streams.shapes.items()}
        self._wires = TorchWire if variant is None else wires(variant, seed)
        self.labels = {"rank": rank, "width": width, **({} if variant is None else variant.record)}

    def step(self, given: Sequence[Values], measured: bool) -> None:
        with mock.patch.object(torch_backend, "TorchWire", self._wires):
            (passage,) = self.fleet.step(given, [list(self.sums)])
        if not all(passage.verdicts):
            raise RuntimeError(f"a step was not finite: {self.labels}")
        for name, total in self.sums.items():
            total += passage.averages[0][name]
        if measured:
            owed = self.owed()
            for name, sizes in self.errors.items():
                G = torch.stack([values[name] for values in given]).mean(dim=0)
                sizes.append(float(owed[name].norm() / G.norm()))

    def owed(self) -> Values:
        """Means of the workers' errors."""
        errors = [state.error() for state in self.fleet.states]
        return {name: torch.stack([error[name] for error in errors]).mean(dim=0) for name in self.sums}


def simulate(rank: int, steps: int, n: int, m: int, seed: int, widths: Sequence[str]) -> list[Record]:
    """One record for each variant, width and stream; fp32 has one variant."""
    streams = Streams(n, m, seed)
    pairs: list[tuple[str, Variant | None]] = [("float32", None), *itertools.product(widths, VARIANTS)]
    simulations = [Simulation(rank, width, variant, streams, seed) for width, variant in pairs]
    sums = {name: torch.zeros(shape) for name, shape in streams.shapes.items()}
    window = min(WINDOW, steps // 2)
    for step in range(steps):
        given = streams.draw(WORKERS)
        for name, total in sums.items():
            total += torch.stack([values[name] for values in given]).mean(dim=0)
        for simulation in simulations:
            simulation.step(given, step >= steps - window or steps // 2 - window <= step < steps // 2)
    records = []
    for simulation, name in itertools.product(simulations, streams.shapes):
        sizes, (rows, columns) = simulation.errors[name], streams.shapes[name]
        end = statistics.fmean(sizes[window:])
        records.append(
            {
                **{"study": "streams", "stream": name, "steps": steps, "seed": seed, **simulation.labels},
                **payload([(1, side, rank) for side in (rows, columns)], simulation.labels["width"],
                          simulation.labels.get("block")),
                "error": end,
                "growth": end / statistics.fmean(sizes[:window]),
                "sum_error": float((simulation.sums[name] - sums[name]).norm() / sums[name].norm()),
            }
        )  # fmt: skip
    return records


# The demo's text model ----------------------------------------------------------------------------------------------


def train(variant: Variant, rank: int, steps: int, seed: int) -> Record:
    """Train and give back a record."""
    arm, settings = Arm.parse(f"ours:{rank}+{TEXT_WIDTH}", rank), Settings(steps, WORKERS, "cpu", seed)
    results = run_workers(functools.partial(_train, variant, settings, arm), WORKERS, timeout=120 + 3 * steps)
    labels = {"study": "text", "rank": rank, "width": TEXT_WIDTH, "steps": steps, "seed": seed, **variant.record}
    return {**labels, "loss": results[0].validation_loss}


def _train(variant: Variant, settings: Settings, arm: Arm, worker: int, store_path: str) -> Result:
    """In a process of its own."""
    with mock.patch.object(torch_backend, "TorchWire", wires(variant, settings.seed, worker)):
        return train_worker(worker, settings, arm, store_path)


def text_payload(rank: int, width: str, block: int | None) -> Record:
    """Bytes of the model's factors, with what travels exactly, without what evens out the workers' parts."""
    config = PowerSGDConfig(rank=rank, wire_dtype=width)
    layout = Layout.build([(name, parameter.shape) for name, parameter in GPT().named_parameters()], config)
    factors = [shape for left in (True, False) for shape in layout.factor_shapes(left=left)]
    exact = sum(segment.numel for segment in layout.bypass) * torch.float32.itemsize
    found = payload(factors, width, block)
    return {**found, "bytes": found["bytes"] + exact}


# Results ------------------------------------------------------------------------------------------------------------


def read() -> list[Record]:
    """All records so far."""
    records: list[Record] = json.loads(FILE.read_text()) if FILE.exists() else []
    return records


def add(records: Sequence[Record]) -> None:
    """Write them behind those that are there."""
    where = {"torch": torch.__version__, "machine": platform.machine()}
    FILE.write_text(json.dumps([*read(), *({**record, **where} for record in records)], indent=1) + "\n")


def streams_table(records: Sequence[Record]) -> str:
    """Markdown: a line for each rank and variant; errors that grow are marked."""
    lines: dict[tuple[Any, ...], list[Record]] = {}
    for record in sorted(records, key=lambda one: (one["rank"], one["width"] == "int4")):
        keys = "rank", "width", "block", "rounding"
        lines.setdefault(tuple(record.get(key, "") for key in keys), []).append(record)
    rows = [
        [*_labels(line[0]), *(f"{one['error']:.3f}{' ↑' * (one['growth'] > GROWING)}" for one in line),
         *(f"{100 * one['sum_error']:.2f}%" for one in line)]
        for line in lines.values()
    ]  # fmt: skip
    names = list(dict.fromkeys(record["stream"] for record in records))
    return _markdown([*TITLES, *names, *(f"{name}, sum" for name in names)], rows)


def text_table(records: Sequence[Record]) -> str:
    """Markdown, with what ``loss_per_byte`` has measured of the package's own variant at equal steps and seeds."""
    own, found = {"width": TEXT_WIDTH, **Variant(BLOCK, False).record}, list(records)
    same = {(one["rank"], one["steps"], one["seed"]) for one in records}
    for rank in TEXT_RANKS:
        known = [{**one, **own, "rank": rank} for one in loss_per_byte.read() if one["arm"] == f"ours:{rank}+int4"]
        found += [one for one in known if (rank, one["steps"], one["seed"]) in same]
    found.sort(key=lambda one: (-one["rank"], one["block"] is None, one["rounding"], one["seed"]))
    sized = [{**one, **text_payload(one["rank"], one["width"], one["block"])} for one in found]
    rows = [[*_labels(one), str(one["seed"]), str(one["steps"]), f"{one['loss']:.4f}"] for one in sized]
    return _markdown([*TITLES, "seed", "steps", "validation loss"], rows)


TITLES = ["rank", "width", "a scale for", "rounding", "bytes a step", "of them scales"]


def _labels(record: Record) -> list[str]:
    block = record.get("block", "–")
    sizes = [f"{record[key]:,}" for key in ("bytes", "scale_bytes")]
    rounding = record.get("rounding", "–")
    return [str(record["rank"]), record["width"], "column" if block is None else str(block), rounding, *sizes]


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["streams", "text", "report"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 32], help="of streams")
    parser.add_argument("--steps", type=int, help="300 of streams, 600 of text")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    steps, seed = arguments.steps, arguments.seed
    if arguments.command == "streams":
        for rank in arguments.ranks:
            add(simulate(rank, steps or 300, ROWS, COLUMNS, seed, ["int8", "int4"]))
    elif arguments.command == "text":
        for rank, variant in itertools.product(TEXT_RANKS, TEXT_VARIANTS):
            add([train(variant, rank, steps or 600, seed)])
    else:
        for study, show in (("streams", streams_table), ("text", text_table)):
            print(show([record for record in read() if record["study"] == study]) + "\n")


if __name__ == "__main__":
    main()
