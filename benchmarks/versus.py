"""Loss against bytes on slow links: all-reduce, PowerSGD, local steps, DiLoCo, SparseLoCo and DeMo.

python benchmarks/versus.py run [--arms local:ternary+every5 diloco:fp32+every10+outer0.7+momentum0.9 …]
python benchmarks/versus.py report

``run`` adds the trainings that are missing to benchmarks/results/versus.json and can be interrupted. ``report`` prints
tables and draws the plot. All arms train the demo's text model with AdamW on the same data (DeMo is its own optimizer).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import re
import statistics
import sys
from pathlib import Path
from typing import Any

# By its path Python would look for modules in this folder.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor, nn

from benchmarks import rivals
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.demo import train
from powersgd_triton.demo.measure import HookTimer
from powersgd_triton.demo.model import GPT
from powersgd_triton.demo.run import train as train_in_processes

RESULTS = Path(__file__).parent / "results"
FILE, PICTURE = RESULTS / "versus.json", RESULTS / "versus.png"
Record = dict[str, Any]

OPTIONS: dict[str, set[str]] = {
    "alone": set(),
    "local": {"every", "outer", "delay"},
    "diloco": {"every", "outer", "momentum"},
    "sparseloco": {"every", "outer", "decay"},
    "demo": {"rate", "decay"},
}
"""{method that the demo does not have: its options}. Those that every arm must give are the first of ``DEFAULTS``."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """A method of ``OPTIONS`` with its settings.

    Attributes:
        method: Key of ``OPTIONS``.
        message: What is sent: a kind of message, or how many entries of a chunk.
        options: {name: number}.
    """

    method: str
    message: str
    options: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Parse an arm such as 'local:ternary+every5+outer0.8', 'diloco:fp32+every10+outer0.7+momentum0.9' or
        'demo:8+rate0.001+decay0.999'.

        Raises:
            ValueError: The text is not such an arm.
        """
        found = re.fullmatch(r"([a-z]+)(?::([\w.]+))?((?:\+[a-z]+[\d.]+)*)", text)
        options = dict(re.findall(r"\+([a-z]+)([\d.]+)", found[3])) if found else {}
        if found is None or found[1] not in OPTIONS or not OPTIONS[found[1]] >= options.keys():
            shown = "; ".join(f"{method} with {', '.join(sorted(names))}" for method, names in OPTIONS.items())
            raise ValueError(f"expected METHOD:MESSAGE+OPTIONnumber… ({shown}); got {text!r}")
        return cls(found[1], found[2] or "", {name: float(value) for name, value in options.items()})


def prepare(
    model: GPT, settings: train.Settings, device: torch.device, timer: HookTimer, arm: str
) -> train.Prepared:  # fmt: skip
    """Make a model ready for training in an arm's way, as ``train_worker`` wants it."""
    if arm.split(":")[0].split("+")[0] in train.METHODS:
        return train.distribute(model, settings, device, timer, train.Arm.parse(arm, default_rank=16))
    one = Arm.parse(arm)
    options = one.options
    if one.method == "demo":
        demo = rivals.DeMo(
            list(model.parameters()),
            options["rate"],
            int(one.message),
            options.get("decay", 0.999),
            train.WEIGHT_DECAY,
        )
        return model, model, train.stepping(demo, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=train.WEIGHT_DECAY)
    if one.method == "alone":
        return model, model, train.stepping(optimizer, settings)
    if one.method == "local":
        return model, model, train.stepping(optimizer, settings, _local_steps(model, settings, one))
    mean: rivals.Mean
    if one.method == "sparseloco":
        mean = rivals.SparseMean(int(one.message), options.get("decay", 0.95))
    else:
        mean = {"fp32": rivals.exact_mean, "fp4": rivals.mean_in_4_bits}[one.message]
    rounds = rivals.Rounds(model, int(options["every"]), mean, options.get("outer", 1.0), options.get("momentum", 0.0))
    return model, model, train.stepping(optimizer, settings, rounds)


def _local_steps(model: nn.Module, settings: train.Settings, arm: Arm) -> Any:
    """Return a function that counts a step of ours, and ends the training after the last one."""
    from powersgd_triton.integrations.local_steps import LocalSteps

    outer = None
    if "outer" in arm.options:

        def outer(shared: list[Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(shared, lr=arm.options["outer"])

    config = None
    if arm.message.endswith("x"):
        config = PowerSGDConfig(compression=float(arm.message[:-1]))
    elif arm.message.isdigit():
        config = PowerSGDConfig(rank=int(arm.message))
    elif arm.message != "exact":
        config = PowerSGDConfig.from_dict({"codes": arm.message})
    delay = {"delay": int(arm.options["delay"])} if "delay" in arm.options else {}
    sync = LocalSteps(model, config, every=int(arm.options["every"]), outer=outer, **delay)

    def then(steps: int) -> None:
        sync.step()
        if steps == settings.steps:
            sync.finish()

    return then


def run(arms: list[str], seeds: list[int], steps: int, workers: int) -> None:
    """Train what the file does not have yet."""
    for arm, seed in ((arm, seed) for seed in seeds for arm in arms):
        common = {"arm": arm, "model": "text", "seed": seed, "steps": steps, "workers": workers}
        if any(common.items() <= record.items() for record in read()):
            continue
        settings = train.Settings(steps, workers, "cpu", seed)
        result = train_in_processes(settings, arm, functools.partial(prepare, arm=arm))
        curve = [round(statistics.fmean(result.losses[i : i + 10]), 4) for i in range(0, steps, 10)]
        figures = {
            "loss": result.validation_loss,
            "bytes_per_step": result.bytes_per_step,
            "sent": result.sent,
            "received": result.received,
            "curve": curve,
        }
        versions = {"torch": torch.__version__, "machine": platform.machine()}
        FILE.write_text(json.dumps([*read(), {**common, **figures, **versions}], indent=1) + "\n")
        print(f"{arm}, seed {seed}: loss {result.validation_loss:.4f}, {result.bytes_per_step:,.0f} bytes", flush=True)


def read() -> list[Record]:
    """All trainings so far."""
    records: list[Record] = json.loads(FILE.read_text()) if FILE.exists() else []
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--arms", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    run(arguments.arms, arguments.seeds, arguments.steps, arguments.workers)


if __name__ == "__main__":
    main()
