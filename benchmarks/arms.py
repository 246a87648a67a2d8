"""Ways for workers to train together: those of the demo, local steps, and methods of other papers."""

import bisect
import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks import rivals
from powersgd_triton.config import PowerSGDConfig
from powersgd_triton.demo import arms as gradient_arms
from powersgd_triton.demo import train
from powersgd_triton.demo.measure import HookTimer
from powersgd_triton.demo.model import GPT
from powersgd_triton.integrations.local_steps import LocalSteps

DEFAULT_RANK = 16
MESSAGES = {
    "alone": "",
    "local": r"exact|ternary|int[248]|sparse\d+x|[1-9]\d*|\d+(\.\d+)?x",
    "diloco": "fp32|fp4",
    "sparseloco": r"[1-9]\d*",
    "demo": r"[1-9]\d*",
}
"""{method that the demo does not have: pattern of what it sends}: for ``local`` also a rank, or a budget as in 20x, of
ranks or of the sparse format; for the last two how many entries of a chunk."""
OPTIONS: dict[str, dict[str, float | None]] = {
    "alone": {},
    "local": {"every": None, "grow": 0.0, "outer": 1.0, "delay": 0.0, "keep": 0.0, "inner": 1.0},
    "diloco": {"every": None, "outer": 0.7, "momentum": 0.9, "inner": 1.0},
    "sparseloco": {"every": None, "outer": 1.0, "decay": 0.95, "senders": 0.0, "inner": 1.0},
    "demo": {"rate": 1e-3, "decay": 0.999},
}
"""{method: {option: default}}. An option without a default must be given. ``inner`` multiplies the learning rate of the
workers' own optimizer; with ``senders``, an entry is the mean over the workers that have sent it."""
INNER = re.compile(r"\+inner(\d+(?:\.\d+)?)")

Make = Callable[[GPT, train.Settings], Sequence[torch.optim.Optimizer]]
"""Returns the optimizers of a model."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """A method of ``MESSAGES`` with its settings.

    Attributes:
        method: Key of ``MESSAGES``.
        message: What is sent.
        options: {name: number}, defaults included.
    """

    method: str
    message: str
    options: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Parse an arm, for example 'local:ternary+every5+outer0.8', 'diloco:fp4+every10' or 'demo:32+rate0.001'.

        Raises:
            ValueError: The text is not such an arm.
        """
        found = re.fullmatch(r"([a-z]+)(?::(\w+(?:\.\d+x)?))?((?:\+[a-z]+\d+(?:\.\d+)?)*)", text)
        method, message = (found[1], found[2] or "") if found else ("", "")
        options = dict(OPTIONS.get(method, {}))
        options.update((name, float(value)) for name, value in re.findall(r"\+([a-z]+)([\d.]+)", text))
        if (
            method not in MESSAGES
            or not re.fullmatch(MESSAGES[method], message)
            or options.keys() != OPTIONS[method].keys()
            or None in options.values()
        ):
            raise ValueError(f"expected an arm of the demo, or one as {cls.forms()}; got {text!r}")
        return cls(method, message, {name: value for name, value in options.items() if value is not None})

    @staticmethod
    def forms() -> str:
        """Return how arms are written."""
        options = {
            method: "".join(f"+{name}{'H' if value is None else format(value, 'g')}" for name, value in those.items())
            for method, those in OPTIONS.items()
        }
        return ", ".join(f"{method}:({form}){options[method]}" if form else method for method, form in MESSAGES.items())


def of_demo(arm: str) -> gradient_arms.Arm | None:
    """Parse an arm that averages gradients in a way of the demo, also with another learning rate. None for others."""
    ours = re.split("[:+]", arm)[0] in ("allreduce", "torch", "ours")
    return gradient_arms.Arm.parse(INNER.sub("", arm), DEFAULT_RANK) if ours else None


def inner(arm: str) -> float:
    """Return what multiplies the learning rate of an arm's workers."""
    found = INNER.search(arm)
    return float(found[1]) if found else 1.0


def check(arm: str) -> None:
    """Raise ValueError if the text is not an arm."""
    if of_demo(arm) is None:
        Arm.parse(arm)


def adamw(model: nn.Module, settings: train.Settings) -> Sequence[torch.optim.Optimizer]:
    """Return the demo's optimizer of a model."""
    return [torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=train.WEIGHT_DECAY)]


def prepare(
    model: GPT, settings: train.Settings, timer: HookTimer, arm: str, optimizers: Make = adamw
) -> train.Prepared:
    """Make the demo's model ready for training in an arm's way, as ``train.train`` wants it."""
    settings = dataclasses.replace(settings, rate=settings.rate * inner(arm))
    replica: nn.Module = model
    gradients, then = of_demo(arm), None
    if gradients is not None:
        replica, _ = gradient_arms.distribute(model, settings, timer, gradients)
    elif (one := Arm.parse(arm)).method == "demo":
        rate, decay = one.options["rate"], one.options["decay"]
        demo = rivals.DeMo(list(model.parameters()), rate, int(one.message), decay, train.WEIGHT_DECAY)
        return model, train.stepping(settings, demo)
    step = train.stepping(settings, *optimizers(model, settings))
    if gradients is None:
        then = between_steps(model, one, settings.steps)
    done = itertools.count(1)

    def update(loss: Tensor) -> None:
        step(loss)
        if then is not None:
            then(next(done))

    return replica, update


def between_steps(model: nn.Module, arm: Arm, steps: int) -> Callable[[int], None] | None:
    """Return what follows each step of a worker's own optimizer. It is called with the number of steps so far.

    Args:
        model: This worker's model.
        arm: Way of averaging parameters.
        steps: Of the training.
    """
    options = arm.options
    if arm.method == "alone":
        return None
    if arm.method == "local":
        return _local_steps(model, arm, steps)
    if arm.method == "sparseloco":
        mean: rivals.Mean = rivals.SparseMean(int(arm.message), options["decay"], senders=bool(options["senders"]))
    else:
        mean = {"fp32": rivals.exact_mean, "fp4": rivals.mean_in_4_bits}[arm.message]
    return rivals.Rounds(model, int(options["every"]), mean, options["outer"], options.get("momentum", 0.0))


def _local_steps(model: nn.Module, arm: Arm, steps: int) -> Callable[[int], None]:
    def outer(shared: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(shared, lr=arm.options["outer"])

    config = None
    if arm.message.startswith("sparse"):
        config = PowerSGDConfig(quantize="sparse", compression=float(arm.message.removeprefix("sparse")[:-1]))
    elif arm.message.endswith("x"):
        config = PowerSGDConfig(compression=float(arm.message[:-1]))
    elif arm.message.isdigit():
        config = PowerSGDConfig(rank=int(arm.message))
    elif arm.message != "exact":
        config = PowerSGDConfig(quantize=arm.message)
    every: int | Callable[[int], int] = int(arm.options["every"])
    if arm.options["grow"]:
        every = growing(int(arm.options["every"]), steps, lambda step: train.learning_rate_factor(step, steps))
    sync = LocalSteps(model, config, every, outer, delay=int(arm.options["delay"]), keep=arm.options["keep"] or None)

    def then(done: int) -> None:
        sync.step()
        if done == steps:
            sync.finish()

    return then


def growing(every: int, steps: int, rate: Callable[[int], float]) -> Callable[[int], int]:
    """Return lengths of rounds, over each of which the learning rate adds up to the same.

    Args:
        every: Mean length.
        steps: Steps of the training.
        rate: Returns the learning rate of a step.

    Returns:
        A function from the number of steps before a round to its length.
    """
    sums = list(itertools.accumulate(rate(step) for step in range(steps)))
    rounds = steps // every
    # A little less than the share, so that the last round ends with the training whatever was rounded.
    ends = [bisect.bisect_left(sums, sums[-1] * (k + 1) / rounds * (1 - 1e-12)) + 1 for k in range(rounds)]
    return lambda done: next((end - done for end in ends if end > done), every)
