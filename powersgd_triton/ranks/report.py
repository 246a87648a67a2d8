"""Report which tensors of a model are compressed, at which ranks, and how many bytes a step sends."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from powersgd_triton.config import AUTO, PowerSGDConfig
from powersgd_triton.layout.layout import Layout
from powersgd_triton.layout.matrices import tensor_bytes
from powersgd_triton.ranks.planner import Spectrum, budget


@dataclasses.dataclass(frozen=True)
class ReportedTensor:
    """One row of a ``RankReport``.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the tensor that is compressed; of this worker's shard if shards are compressed.
        matrices: Its view as (batch, rows, columns).
        rank: Rank of its approximation; 0 if it is averaged exactly, or quantized.
        bytes_per_step: Bytes of its factors with their scales, or of the tensor itself.
        energy_sent: Share of ‖M‖² that the factors contained in the step from which ranks were planned; None before.
    """

    name: str
    shape: tuple[int, ...]
    matrices: tuple[int, int, int]
    rank: int
    bytes_per_step: float
    energy_sent: float | None = None

    @property
    def described(self) -> str:
        """The shape, and the matrices if they are other ones."""
        shape, (batch, n, m) = " × ".join(map(str, self.shape)) or "scalar", self.matrices
        if not self.rank or self.shape == (n, m):
            return shape
        return f"{shape} as {batch} of {n} × {m}" if batch > 1 else f"{shape} as {n} × {m}"


@dataclasses.dataclass(frozen=True)
class RankReport:
    """Ranks and bytes of all tensors, in the model's order. ``print`` shows a table.

    Bytes are counted so that an all-reduce of B bytes counts B. Small messages count as narrow even if they are sent in
    fp32; see ``exchanges``.

    Attributes:
        tensors: The rows.
        exchanges: {how messages are summed over the workers, or over the nodes: number of messages in a step}; see
            ``comm.exchange.exchange_of``. Empty before the first compressed step.
        node_workers: Number of workers of a node that share its messages; 1 if sums take one level.
        whole_step: Bytes that each worker sends in a whole step (without compression, with it), with DeepSpeed.
        budget: Bytes that a step may send. None without a budget.
        max_rank: Largest rank that may be planned. None without a budget.
        quantize: Format of the tensors of rank 0, if they are quantized.
        error_bytes: Bytes of the errors that a worker keeps between steps.
        every: Steps from one exchange to the next. With local steps, bytes are those of an exchange.
        zeroed: Columns of bases, over all steps of the buckets in force, that were set to 0 because they would not have
            been orthonormal. The error keeps what they would have sent. More than 0 shows a fault: please report it.
        left_out: Names of parameters that the framework averages itself, without compression.
    """

    tensors: tuple[ReportedTensor, ...]
    exchanges: Mapping[str, int] = dataclasses.field(default_factory=dict)
    node_workers: int = 1
    whole_step: tuple[float, float] | None = None
    budget: float | None = None
    max_rank: int | None = None
    quantize: str | None = None
    error_bytes: float = 0.0
    every: int = 1
    zeroed: int = 0
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, layout: Layout, config: PowerSGDConfig, spectra: Mapping[str, Spectrum], **further: Any
    ) -> "RankReport":
        """Build the report for a layout's tensors and their measured ``spectra``, {name: spectrum}."""
        rows = []
        for s in layout.segments:
            share = spectra[s.name].share if s.rank and s.name in spectra else None
            size = tensor_bytes(s.shape, s.rank, config, s.name)
            rows.append(ReportedTensor(s.name, s.shape, (s.batch, s.n, s.m), s.rank, size, share))
        further["budget"] = budget(layout.shapes, config) if config.planned and config.compression != AUTO else None
        errors = 0.0
        if config.error_feedback and config.quantize is not None:
            errors = 4.0 * layout.numel
        elif config.error_feedback:
            itemsize = 2 if config.error_dtype == "bfloat16" else 4
            errors = itemsize * sum(s.numel for s in layout.compressed) / further.get("node_workers", 1)
        further |= {"max_rank": config.max_rank, "quantize": config.whole_format, "error_bytes": errors}
        return cls(tuple(rows), **further)

    @property
    def bytes_per_step(self) -> float:
        """Bytes of all tensors in a step."""
        return sum(tensor.bytes_per_step for tensor in self.tensors)

    @property
    def unused(self) -> float:
        """Bytes of the budget that ``max_rank`` leaves unused: 0 if they do not suffice for a column more."""
        limited = [tensor.bytes_per_step / tensor.rank for tensor in self.tensors if tensor.rank == self.max_rank]
        left = 0.0 if self.budget is None else self.budget - self.bytes_per_step
        return left if limited and left >= max(limited) else 0.0

    @property
    def compression(self) -> float:
        """Bytes of all tensors in fp32, divided by the bytes of a step; 1 without tensors."""
        whole = 4 * sum(math.prod(tensor.shape) for tensor in self.tensors)
        return whole / self.bytes_per_step if whole else 1.0

    def __str__(self) -> str:
        sent = "bytes a step" if self.every == 1 else "bytes an exchange"
        header = ("tensor", "shape", "rank", sent, "energy sent")
        rows = [
            (
                tensor.name,
                tensor.described,
                str(tensor.rank or self.quantize or "exact"),
                f"{tensor.bytes_per_step:,.0f}",
                "" if tensor.energy_sent is None else f"{100 * tensor.energy_sent:.0f}%",
            )
            for tensor in self.tensors
        ]
        rows.append(("all", "", "", f"{self.bytes_per_step:,.0f}", fewer(self.compression)))
        lines = aligned([header, *rows], "<<>>>")
        if self.every > 1:
            lines.append(
                f"An exchange comes every {self.every} steps: {self.bytes_per_step / self.every:,.0f} bytes a step "
                f"({fewer(self.compression * self.every)})"
            )
        if self.unused:
            lines.append(
                f"Ranks are limited to {self.max_rank} columns. This leaves {self.unused:,.0f} of the budget's "
                f"{self.budget:,.0f} bytes unused"
            )
        if self.exchanges:
            kinds = ", ".join(f"{count} by {kind}" for kind, count in self.exchanges.items())
            nodes = "" if self.node_workers == 1 else f"; the {self.node_workers} workers of a node share them"
            lines.append(f"Messages in a step: {kinds}{nodes}")
        lines.append(f"Errors take {self.error_bytes:,.0f} bytes on each worker between steps")
        if self.zeroed:
            lines.append(f"{self.zeroed} columns of bases were not orthonormal. The error keeps what they did not send")
        if self.left_out:
            shown = ", ".join(self.left_out[:5]) + (f" and {len(self.left_out) - 5} more" if self.left_out[5:] else "")
            lines.append(f"Averaged by the framework itself: {shown}")
        if self.whole_step is not None:
            before, after = self.whole_step
            change = fewer(before / after) if after else "none"
            lines.append(f"In a whole step each worker sends {after:,.0f} bytes in place of {before:,.0f} ({change})")
        return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return the rows of a table as lines. ``sides`` has "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


def fewer(ratio: float) -> str:
    """Return by how much bytes change if they were ``ratio`` times as many before."""
    return f"{ratio:.1f}x fewer" if ratio >= 1 else f"{1 / ratio:.1f}x more"
