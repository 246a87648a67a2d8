"""What the kernels are meant to reach on a GPU, beside what was measured."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]

SPEED_UP = 5.0
SPEED_UP_SETS = ("resnet-50", "gpt2-124M")
SHARE_OF_COPY = 0.8
LARGE = 64_000_000
ORTHOGONALIZATION_SPEED_UP = 10.0
LAUNCHES = 14
LAUNCHES_UP_TO_RANK = 32
"""Beyond, orthogonalization takes several panels."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One goal, and the measured value, None where it was not measured."""

    goal: str
    what: str
    measured: float | None
    shown: str
    met: bool

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "met" if self.met else "missed"


def find(rows: Sequence[Row], kind: str, **labels: Any) -> list[Row]:
    """Rows of a kind with these labels."""
    return [row for row in rows if row["kind"] == kind and all(row.get(key) == value for key, value in labels.items())]


def milliseconds(rows: Sequence[Row], kind: str, **labels: Any) -> float | None:
    """Device time of a measurement; of the fastest of several."""
    return min((row["device_ms"] for row in find(rows, kind, **labels)), default=None)


def torch_milliseconds(rows: Sequence[Row], **labels: Any) -> float | None:
    """Device time of torch's hook with its faster flag; None unless both were measured."""
    both = [milliseconds(rows, "step", provider=provider, **labels) for provider in ("torch", "torch batched")]
    known = [value for value in both if value is not None]
    return min(known) if len(known) == len(both) else None


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / max(below, 1e-9)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """Every target, measured or not."""
    for gradients in SPEED_UP_SETS:
        labels = {"gradients": gradients, "rank": 4, "dtype": "fp32"}
        value = ratio(torch_milliseconds(rows, **labels), milliseconds(rows, "step", provider="ours", **labels))
        goal = f"hook step ≥ {SPEED_UP:g}× as fast as torch's hook with its better flag"
        yield _target(goal, f"{gradients}, rank 4, fp32", value, "×", lambda x: x >= SPEED_UP)
    goal = f"compensate_project ≥ {SHARE_OF_COPY:.0%} of the copy bandwidth, gradients ≥ {LARGE // 10**6} MB"
    kernels = find(rows, "kernel", phase="compensate_project", provider="triton")
    measured = [row for row in kernels if row["gradient_bytes"] >= LARGE]
    for row in measured:
        what = f"{row['gradients']}, rank {row['rank']}, {row['dtype']}"
        yield _target(goal, what, row["share_of_copy"], "%", lambda x: x >= SHARE_OF_COPY)
    if not measured:
        yield _target(goal, "all gradient sets", None, "%", lambda x: x >= SHARE_OF_COPY)
    labels = {"gradients": "64 × (4096, r)", "rank": 16, "dtype": "fp32"}
    value = ratio(
        milliseconds(rows, "orthogonalize", provider="torch.linalg.qr", **labels),
        milliseconds(rows, "orthogonalize", provider="triton", **labels),
    )
    goal = f"orthogonalization ≥ {ORTHOGONALIZATION_SPEED_UP:g}× as fast as torch.linalg.qr"
    yield _target(goal, "64 × (4096, 16)", value, "×", lambda x: x >= ORTHOGONALIZATION_SPEED_UP)
    goal = f"≤ {LAUNCHES} launches in a hook step of one bucket, everything counted"
    counted = [row for row in find(rows, "launches", provider="ours") if row["rank"] <= LAUNCHES_UP_TO_RANK]
    for row in counted:
        value = row["launches"]
        yield _target(goal, f"{row['gradients']}, rank {row['rank']}", value, "", lambda x: x <= LAUNCHES)
    if not counted:
        yield _target(goal, "all gradient sets", None, "", lambda x: x <= LAUNCHES)


def _target(goal: str, what: str, value: float | None, unit: str, met: Callable[[float], bool]) -> Target:
    if value is None:
        return Target(goal, what, None, "–", False)
    shown = {"%": f"{value:.0%}", "×": f"{value:.2f}×", "": f"{value:g}"}[unit]
    return Target(goal, what, value, shown, met(value))
