"""What a user can watch in training: the energy that steps capture, their errors, bytes and times."""

import collections
import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from powersgd_triton.config import logger
from powersgd_triton.core import clock
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.scheme import Listener, Task, watched
from powersgd_triton.ops.blocks import Matrices, add_product, blocks, load
from powersgd_triton.ops.bucket import Bucket
from powersgd_triton.ops.step import HostCopy, Step

PHASES_OF = {
    "orthogonalize_bases": (clock.PROJECT, clock.PROJECT),
    "project": (clock.PROJECT, clock.MESSAGES),
    "backproject": (clock.BACKPROJECT, clock.MESSAGES),
    clock.COMMIT: (clock.COMMIT, clock.RECONSTRUCT),
    "reconstruct": (clock.RECONSTRUCT, None),
}
"""The phases that begin with a backend's stage, and after it."""


@dataclasses.dataclass(frozen=True)
class LayerRecord:
    """What a step did to one compressed tensor, as this worker sees it. Norms are without the loss scale.

    Attributes:
        rank: Rank of the approximation.
        gradient_norm: ‖M‖ of this worker's compensated gradient M = G + E.
        error_norm: ‖E‖ of what the step left of it, E = M − P̂ Q_wᵀ. Without error feedback, E is lost.
    """

    rank: int
    gradient_norm: float
    error_norm: float

    @property
    def captured(self) -> float:
        """Share of ‖M‖² that the step has sent, 1 − ‖E‖² / ‖M‖²; 0 for a gradient of zeros, or with a NaN."""
        return 1 - (self.error_norm / self.gradient_norm) ** 2 if self.gradient_norm > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One measured step of this worker, in plain numbers. ``print`` shows one line.

    Attributes:
        step: Number of the step. The first one is 1.
        applied: Whether the step counts. If it does not, for example because a gradient was not finite, nothing was
            sent, and errors are whole gradients.
        bytes: Bytes of gradients in the step's messages, counted as in ``report()``, with the padding of quantized
            ones. 0 for exact steps in which the framework averages.
        milliseconds: {phase: milliseconds of all buckets together}: "project", "backproject", "commit", "reconstruct",
            "messages", "exchange" and "telemetry"; and "step", the time since the end of the step before.
        layers: {name: record} of the tensors that are compressed. Empty in an exact step.
    """

    step: int
    applied: bool
    bytes: float
    milliseconds: Mapping[str, float]
    layers: Mapping[str, LayerRecord]

    @property
    def captured(self) -> float:
        """Share of the energy of all layers that the step has sent."""
        total = sum(layer.gradient_norm**2 for layer in self.layers.values())
        return 1 - sum(layer.error_norm**2 for layer in self.layers.values()) / total if total > 0 else 0.0

    @property
    def compute(self) -> float:
        """Milliseconds of the compression's own work: all phases but "exchange" and "telemetry"."""
        return sum(self.milliseconds[phase] for phase in clock.COMPUTE)

    def __str__(self) -> str:
        error = math.sqrt(sum(layer.error_norm**2 for layer in self.layers.values()))
        layers = f"captured {100 * self.captured:.1f}% of the energy, error norm {error:.3g}, " if self.layers else ""
        times = f"compute {self.compute:.2f} ms, exchange {self.milliseconds[clock.EXCHANGE]:.2f} ms"
        skipped = "" if self.applied else " (not applied)"
        return (
            f"PowerSGD step {self.step}{skipped}: {layers}{self.bytes:,.0f} bytes, "
            f"{times} of {self.milliseconds[clock.STEP]:.2f} ms"
        )


Callback = Callable[[StepRecord], object]


class Telemetry(Listener):
    """Measures each ``every``-th step, and reports it when the device has reached its end; see ``Handle.telemetry``."""

    def __init__(self, engine: Engine, callback: Callback | None, writer: Any, every: int) -> None:
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be a function of a StepRecord; got {type(callback).__name__}")
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"writer must have add_scalar, as a SummaryWriter has; got {type(writer).__name__}")
        self._writer, self._every = writer, every
        self._reports = [*([] if writer is None else [self._write]), *([] if callback is None else [callback])]
        # Not a cycle, so that errors on a device are freed with the engine.
        self._engine: Engine = weakref.proxy(engine)
        engine.schedule.mark = self._mark
        # The open step, if it is measured. Its reports are completed in order.
        self._open: _MeasuredStep | None = None
        self._interrupted = False
        self._pending: collections.deque[_MeasuredStep] = collections.deque()

    def obstacle(self) -> str | None:
        return "telemetry is on, and the host does not see replays; call telemetry(every=0)"

    def watch(self, task: Task) -> Task:
        if self._open is not None:
            self._open.verdict = task.step.verdict(task.device)

        def after(stage: str, *arguments: Any) -> None:
            if stage == clock.COMMIT and arguments[-1] == task.config.iterations - 1:
                # Now M and what is subtracted from it are known. Without error feedback M is still in the gradients.
                self._mark(clock.TELEMETRY)
                if self._open is not None and task.layout.compressed:
                    self._open.add(task.memory.bucket, *arguments[:2])
            self._mark(PHASES_OF[stage][1])

        return watched(task, lambda stage: self._mark(PHASES_OF[stage][0]), after)

    def _mark(self, phase: str | None) -> None:
        if self._open is not None:
            self._open.mark(phase)

    def void(self) -> None:
        # A measured step that was interrupted is followed by another one.
        self._interrupted |= self._open is not None
        self._open = None

    def end_step(self) -> None:
        """Report what has arrived, and begin to measure the next step if it is time."""
        step, sent = self._engine.step.iteration, self._engine.sent
        self._mark(None)
        measured, self._open = self._open, None
        if measured is not None:
            measured.end(step, sent)
            self._pending.append(measured)
        while self._pending and self._pending[0].ready:
            self._report(self._pending.popleft().record())
        if (step + 1) % self._every == 0 or self._interrupted:
            self._open, self._interrupted = _MeasuredStep(sent, self._engine.buckets.device), False

    def _report(self, record: StepRecord) -> None:
        logger.info("%s", record)
        for report in list(self._reports):
            try:
                report(record)
            except Exception:
                # The other workers go on with the step, and so must this one.
                self._reports.remove(report)
                logger.warning("PowerSGD telemetry stops calling %r, which has failed:", report, exc_info=True)

    def _write(self, record: StepRecord) -> None:
        numbers = {f"layers/{name}/captured": layer.captured for name, layer in record.layers.items()}
        numbers |= {f"layers/{name}/error_norm": layer.error_norm for name, layer in record.layers.items()}
        numbers |= {f"milliseconds/{phase}": time for phase, time in record.milliseconds.items()}
        if record.layers:
            numbers["captured"] = record.captured
        for tag, number in {**numbers, "bytes": record.bytes}.items():
            self._writer.add_scalar(f"powersgd/{tag}", number, record.step)


class _MeasuredStep:
    """A step measured from the end of the one before, with ``sent`` bytes so far, and on its way to the host."""

    def __init__(self, sent: int, device: torch.device | None) -> None:
        self._step, self._sent, self._device = 0, sent, device
        # (phase that begins, when) in order. A phase lasts until the next mark. None is, for example, a backward pass.
        self._marks: list[tuple[str | None, clock.Stamp]] = [(None, clock.now(device))]
        # For each bucket: {name: rank}, and [‖M‖², ‖E‖²] of each.
        self._squares: list[tuple[dict[str, int], HostCopy]] = []
        # Says whether the step counts. It is read at the end of the step: a later bucket may change it.
        self.verdict: Tensor | None = None
        self._applied: HostCopy | None = None

    def mark(self, phase: str | None) -> None:
        self._marks.append((phase, clock.now(self._device)))

    def add(self, bucket: Bucket, gradients: Mapping[str, Tensor], step: Step) -> None:
        """Measure a bucket. On two levels: this worker's rows of the node's sum."""
        if not bucket.own:
            # All rows belong to other workers of the node, or nothing is compressed.
            return
        matrices = bucket.matrices(gradients, bucket.own) if bucket.M is None else bucket.M
        groups = zip(bucket.own, matrices, bucket.joined(bucket.product, bucket.own), strict=True)
        found = [part.sum(0) for group, M, (P, Q) in groups for part in _squares(M, P, Q).split(group.counts)]
        squares = torch.stack(found)
        scale = step.scale(squares.device)
        if scale is not None:
            squares /= scale.double().square()
        ranks = {piece.name: group.rank for group in bucket.own for piece in group.segments}
        self._squares.append((ranks, HostCopy(squares)))

    def end(self, step: int, sent: int) -> None:
        """Note what is known at the end of the step."""
        self._step, self._sent = step, sent - self._sent
        if self.verdict is not None:
            self._applied = HostCopy(self.verdict)

    @property
    def ready(self) -> bool:
        copies = [copy for _, copy in self._squares] + ([] if self._applied is None else [self._applied])
        reached = all(isinstance(stamp, float) or stamp.query() for _, stamp in self._marks)
        return reached and all(copy.ready for copy in copies)

    def record(self) -> StepRecord:
        """Return the record. Call it when everything is ``ready``."""
        times = dict.fromkeys(clock.PHASES, 0.0)
        for (phase, start), (_, end) in itertools.pairwise(self._marks):
            if phase is not None:
                times[phase] += clock.between(start, end)
        times[clock.STEP] = clock.between(self._marks[0][1], self._marks[-1][1])
        applied = self._applied is None or bool(self._applied.numbers())
        layers = {
            name: LayerRecord(rank, math.sqrt(whole), math.sqrt(rest if applied else whole))
            for ranks, copy in self._squares
            for (name, rank), (whole, rest) in zip(ranks.items(), copy.numbers(), strict=True)
        }
        return StepRecord(self._step, applied, self._sent, times, layers)


def _squares(matrices: Matrices, P: Tensor, Q: Tensor) -> Tensor:
    """Return [‖M‖², ‖M − P Qᵀ‖²] of each matrix, fp64 [B, 2], without a copy of a whole matrix."""
    found = torch.zeros(len(matrices), 2, dtype=torch.float64, device=P.device)
    for members, rows in blocks(matrices, P.dtype):
        rest = load(matrices, members, rows, P.dtype).clone()
        found[members, 0] += _energies(rest)
        add_product(rest, P[members, rows], Q[members].mT, alpha=-1)
        found[members, 1] += _energies(rest)
    return found


def _energies(block: Tensor) -> Tensor:
    """Return the sum of the squares of each matrix in a block, fp64 [B]."""
    # Row by row in the block's own dtype: on the CPU, a sum of all elements in fp64 takes ten times as long.
    norms: Tensor = torch.linalg.vector_norm(block, dim=2)
    return norms.double().square().sum(dim=1)
