"""What workers have logged: whether anything was lost, and whether they had equal averages."""

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass
class Outcome:
    """What has come of a scenario.

    Attributes:
        delays: Seconds from each fault to the next step that was applied.
        voids: Attempts of the survivors that were not applied, at most of any one worker.
        lost: Largest error of conservation, relative to what was sent.
        unequal: Steps whose averages or parameters differ between workers.
        split: Steps that some workers applied and another one, which took part, did not.
    """

    delays: list[float]
    voids: int
    lost: float
    unequal: int
    split: int
    hung: bool
    failed: list[str]

    def wrong(self, most: float) -> str:
        """What must not be: that workers fail, hang or differ, or that a step loses more than ``most``."""
        found = {"hung": self.hung, "unequal": self.unequal, f"lost {self.lost}": self.lost > most}
        return "\n".join([*self.failed, *(name for name, value in found.items() if value)])


def checked(
    logs: dict[str, list[dict[str, Any]]],
    sent: list[dict[str, Any]],
    faults: list[float],
    hung: bool,
    failed: list[str],
) -> Outcome:
    """Check what workers have logged. ``sent`` is what those that were killed have sent; ``faults``, when they came."""
    whole = [log for log in logs.values() if log and log[-1]["last"]]
    voids = max((sum(not record.get("applied", True) for record in log) for log in whole), default=0)
    logs = {name: [record for record in log if not record.get("doubt")] for name, log in logs.items()}
    applied: dict[int, list[dict[str, Any]]] = {}
    for log in logs.values():
        for record in log:
            if record.get("applied"):
                applied.setdefault(record["step"], []).append(record)
    unequal = split = 0
    lost = 0.0
    for step, found in applied.items():
        first = found[0]
        same = all(r["quorum"] == first["quorum"] and _equal(r["average"], first["average"]) for r in found)
        unequal += not (same and all(_equal(r["parameters"], first["parameters"]) for r in found))
        # What each worker has sent: its errors and its gradient before, without its errors after.
        parts = [
            _left(record, after)
            for log in logs.values()
            for record, after in itertools.pairwise(log)
            if (record["step"], record["quorum"]) == (step, first["quorum"])
        ]
        parts += [s["sent"] for s in sent if (s["step"], s["quorum"]) == (step, first["quorum"])]
        split += first["workers"] > len(found) + sum(s["step"] == step for s in sent)
        if len(parts) == first["workers"]:
            lost = max(lost, *(_gap(name, parts, first) for name in parts[0]))
        else:
            failed.append(f"step {step} has {first['workers']} workers, and {len(parts)} records")
    # Of some steps it is only known that they count.
    known = {(r["step"], r["quorum"]) for log in logs.values() for r in log if r.get("applied") or r.get("counts")}
    for log in logs.values():
        for record, after in itertools.pairwise(log):
            if (record["step"], record["quorum"]) not in known:
                # Nothing was sent: the error has the gradient, or the step is lost before it was compressed.
                lost = max(lost, *(_kept(name, record, after) for name in record["gradients"]))
    times = sorted(record["time"] for found in applied.values() for record in found)
    delays = [min((t - kill for t in times if t > kill + 0.05), default=float("inf")) for kill in faults]
    return Outcome(delays, voids, lost, unequal, split, hung, failed)


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(tensor.equal(other[name]) for name, tensor in one.items())


def _left(record: dict[str, Any], after: dict[str, Any]) -> dict[str, Tensor]:
    """E + G − E'."""
    gradients = {name: gradient.double() for name, gradient in record["gradients"].items()}
    return {name: g + _error(record, name, g) - _error(after, name, g) for name, g in gradients.items()}


def _error(record: dict[str, Any], name: str, gradient: Tensor) -> Tensor:
    """E of an attempt, in the shape of the gradient. Without a matrix, a tensor has none."""
    error: Tensor = record["before"].get(name, torch.zeros_like(gradient))
    return error.double().view_as(gradient)


def _gap(name: str, parts: list[dict[str, Any]], record: dict[str, Any]) -> float:
    total = sum(part[name] for part in parts)
    scale = sum(part[name].norm() for part in parts)
    return float((total - record["workers"] * record["average"][name].double()).norm() / scale)


def _kept(name: str, record: dict[str, Any], after: dict[str, Any]) -> float:
    left, gradient = _left(record, after)[name], record["gradients"][name].double()
    # The differences of local steps are rounded as the parameters are, whose elements have magnitudes near 1.
    scale = gradient.norm() + _error(record, name, gradient).norm() + gradient.numel() ** 0.5
    nothing = left.norm() if record.get("strict") else min(left.norm(), (left - gradient).norm())
    return float(nothing / scale)
