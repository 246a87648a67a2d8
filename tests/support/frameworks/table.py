"""Framework by wrapper: what of each was run, and what came of it. The table in docs/frameworks.md."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import tempfile
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from tests.support.distributed import run
from tests.support.frameworks.job import FULL_RANK, HSDP, RANK_4, WRAPPERS, Job, NotOfferedError, be_launched, loss

PAGE = Path("docs", "frameworks.md")
BEGIN, END = "<!-- frameworks: begin -->", "<!-- frameworks: end -->"
LIMIT = 1e-6
# bf16 rounds 2⁻⁸ off what these models compute. A difference of one rounding changes a parameter by less than a step.
BF16_LIMIT = 5e-3
TIMEOUT = 240.0

FRAMEWORKS = {
    "plain loop": "plain",
    "Accelerate": "accelerate",
    "transformers' Trainer": "transformers",
    "Lightning": "lightning",
}
"""{name: module of this folder, which has ``train(job)``}. Modules other than plain have the name of what they need."""

HEAD = (
    "| framework | wrapper | lines to add | full rank, difference | loss at rank 4 (without) | resumed, difference |\n"
    "|---|---|---|---|---|---|"
)
LINES = 1
"""Lines that a user adds for the compression, in all of these trainings: the call or the callback."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What came of one framework with one wrapper.

    Attributes:
        not_offered: Why the framework does not offer this wrapper, in its own words. Empty if it does.
        full_rank: Largest difference of a parameter from the framework's own training without compression.
        losses: Loss at the beginning, after training without compression, and after training at rank 4.
        resumed: Largest difference of a parameter between a resumed training and one that was not interrupted.
    """

    not_offered: str = ""
    full_rank: float = 0.0
    losses: tuple[float, float, float] = (0.0, 0.0, 0.0)
    resumed: float = 0.0

    def problems(self) -> list[str]:
        """What is not as it has to be."""
        if self.not_offered:
            return []
        start, _, end = self.losses
        found: list[str] = []
        # Written so that NaN is a problem too.
        if not self.full_rank <= LIMIT:
            found.append(f"full rank differs from the framework's own by {self.full_rank:.1e}")
        if not end < 0.9 * start:
            found.append(f"the loss at rank 4 goes from {start:.3f} to {end:.3f}")
        if not self.resumed <= LIMIT:
            found.append(f"a resumed training differs by {self.resumed:.1e}")
        return found

    def text(self) -> str:
        """The columns of the table that show what came of it."""
        if self.not_offered:
            return f"not offered: {self.not_offered} | | | "
        start, native, end = self.losses
        resumed = "equal bits" if self.resumed == 0 else f"{self.resumed:.0e}"
        return f"{LINES} | {self.full_rank:.0e} | {start:.2f} → {end:.2f} ({native:.2f}) | {resumed}"


def measure(framework: str, wrapper: str, *, bf16: bool = False) -> Cell:
    """Run the trainings of one cell in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        workers = 4 if wrapper == HSDP else 2
        cells: list[Cell] = run(_cell, workers, framework, wrapper, folder, bf16, timeout=TIMEOUT)
        return max(cells, key=lambda cell: cell.full_rank)


def _cell(worker: int, workers: int, framework: str, wrapper: str, folder: str, bf16: bool) -> Cell:
    be_launched(worker, workers)
    train = importlib.import_module(f"tests.support.frameworks.{FRAMEWORKS[framework]}").train
    job = Job(wrapper, Path(folder, "without"), bf16=bf16)
    try:
        native = train(job)
    except NotOfferedError as error:
        return Cell(not_offered=str(error).partition(". ")[0])
    full = train(dataclasses.replace(job, folder=Path(folder, "full"), options=FULL_RANK))
    compressed = dataclasses.replace(job, folder=Path(folder, "compressed"), options=RANK_4)
    uninterrupted = train(dataclasses.replace(compressed, save=True))
    dist.barrier()
    resumed = train(dataclasses.replace(compressed, resume=True))
    return Cell(
        full_rank=difference(full, native),
        losses=(loss(), loss(native), loss(uninterrupted)),
        resumed=difference(resumed, uninterrupted),
    )


def difference(ones: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Largest difference of an element."""
    if ones.keys() != others.keys():
        raise ValueError(f"expected parameters {sorted(others)}; got {sorted(ones)}")
    return max((one.float() - others[name].float()).abs().max().item() for name, one in ones.items())


def markdown(cells: dict[tuple[str, str], Cell], command: str) -> str:
    """The table, with a line about how it was made."""
    frameworks = list(dict.fromkeys(framework for framework, _ in cells))
    rows = [
        f"| {framework} | {wrapper} | {cells[framework, wrapper].text()} |"
        for framework in frameworks
        for wrapper in WRAPPERS
        if (framework, wrapper) in cells
    ]
    names = ["torch", *(FRAMEWORKS[framework] for framework in frameworks if framework != "plain loop"), "deepspeed"]
    versions = ", ".join(f"{name} {importlib.metadata.version(name).split('+')[0]}" for name in names)
    made = f"Made by `{command}` with {versions}; 2 gloo workers, 4 for HSDP."
    return "\n".join([HEAD, *rows, "", made])


def replaced(text: str, table: str) -> str:
    """A page's text with another table between the markers.

    Raises:
        ValueError: There are no markers.
    """
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:start]}\n{table}\n{text[end:]}"
