"""Which trainings the comparison with other methods has."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Trainings:
    """Trainings of one model.

    Attributes:
        model: Key of ``loss_per_byte.MODELS``.
        workers, steps: Of each training.
        seeds: Each arm is trained with each of them.
        arms: As on the command line.
    """

    model: str
    workers: int
    steps: int
    seeds: Sequence[int]
    arms: Sequence[str]


EACH_STEP = ["allreduce", "ours:19x"]
CODED = [f"local:ternary+every{every}+outer0.8" for every in (2, 5, 10, 20)]
GROWING = [f"local:ternary+every{every}+grow1+outer0.8" for every in (5, 10)]
PLAIN = [f"local:ternary+every{every}" for every in (10, 20)]
# Of 100, 200 and 400 times fewer bytes, what is not sent in the workers' own parameters.
KEPT = [f"local:{codes}+keep0.9" for codes in ("sparse50x+every2", "sparse100x+every2", "sparse80x+every5")]
KEPT += ["local:ternary+every10+keep0.9"]
LATE = f"{CODED[2]}+delay1"
# With the learning rate that averaging parameters asks for, and all-reduce with it.
FASTER = ["allreduce+inner1.5", *(f"{arm}+inner1.5" for arm in KEPT[:3])]
EXACT = "local:exact+every5+outer0.8"
# With four workers, rate 1 is better. Exact rounds show what the workers' own optimizers cost, without any messages.
FOUR = ["local:ternary+every5", *(f"local:exact+every{every}" for every in (5, 2, 1))]
FOUR += [
    "ours:51.6x",
    "ours:16+int4",
    KEPT[1],
    *(f"{arm}+inner{rate}" for arm in ("allreduce", KEPT[0]) for rate in (1.5, 2)),
]
MUON = ["allreduce", "allreduce+inner1.5", "ours:19.5x", "local:exact+every2", *KEPT[:3], f"{KEPT[0]}+inner1.5"]
SPARSELOCO = "sparseloco:512+every5+outer0.7+senders1"
# Three rates of each, and other messages at the best one.
RIVALS = [f"diloco:fp4+every12+outer{rate}+momentum0.5" for rate in (0.3, 0.5, 0.7)]
RIVALS += [f"sparseloco:512+every5+outer{rate}" for rate in (0.7, 1, 1.4)]
RIVALS += [f"sparseloco:512+every5+outer{rate}+senders1" for rate in (0.5, 0.7, 1)]
RIVALS += [f"demo:32+rate{rate}" for rate in (0.001, 0.003, 0.01)]
RIVALS += [*(f"diloco:fp4+every{every}+outer0.5+momentum0.5" for every in (25, 50)), "sparseloco:256+every6+outer1"]
TUNING = [f"diloco:fp32+every10+outer{rate}+momentum0.9" for rate in (0.1, 0.7)]
TUNING += [f"diloco:fp32+every10+outer{rate}+momentum0.5" for rate in (0.4, 0.5)]
TUNING += ["demo:32+rate0.0003", "demo:32+rate0.001+decay0.99", f"{SPARSELOCO}+inner1.5"]
TUNING += ["allreduce+inner0.7", "ours:19x+inner1.5", "local:ternary+every5+inner1.5"]
TUNING += [f"sparseloco:512+every5+outer1+inner{rate}" for rate in (1.5, 2)]
TUNING += [f"{arm}+inner2" for arm in ("allreduce", *KEPT[:3])]
MORE = [
    "alone",
    "allreduce+bf16",
    "torch:1",
    "ours:100x",
    "local:20x+every5+outer0.8",
    EXACT,
    "local:sparse40x+every5+keep0.9",
    "local:ternary+every5+keep0.9",
]
MORE += [f"sparseloco:{message}+outer1" for message in ("256+every3", "512+every2", "64+every15")]
DIGITS = ["local:exact+every5", "local:exact+every10", *(f"local:ternary+every{every}" for every in (2, 5, 10, 20))]
DIGITS += ["local:20x+every5", *(f"local:ternary+every10+delay{delay}" for delay in (1, 2))]
DIGITS += [f"diloco:fp32+every10+{outer}" for outer in ("outer0.5+momentum0.5", "outer0.7+momentum0.9")]
PLAN = [
    Trainings(
        "text",
        2,
        600,
        range(3),
        [*EACH_STEP, "torch:4", "ours:51.6x", *CODED, *GROWING, *PLAIN, *KEPT, *FASTER, LATE, *RIVALS],
    ),
    Trainings("text", 2, 600, range(1), [*TUNING, *MORE]),
    Trainings("text", 4, 600, range(3), ["allreduce", KEPT[0]]),
    Trainings("text", 4, 600, range(1), [*EACH_STEP, *FOUR]),
    *(Trainings("muon", workers, 600, range(1), MUON) for workers in (2, 4)),
    Trainings("text", 8, 600, range(1), [*EACH_STEP, FOUR[0], f"{KEPT[0]}+inner1.5"]),
    Trainings("text", 2, 3000, range(1), [*EACH_STEP, CODED[2], *FASTER[1:], SPARSELOCO]),
    Trainings("digits", 2, 300, range(5), ["allreduce", "ours:40x", "ours:100x", *DIGITS, *CODED, EXACT]),
]
