"""``compression="auto"`` and ``max_overhead``: steps are measured, times predicted, and all workers settle the same."""

import dataclasses
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.integrations.ddp import PowerSGDState
from powersgd_triton.planning import cost, tuning
from powersgd_triton.planning.cost import ComputeTime, Job, Network, Prediction, choose, kinds, options, step_seconds
from powersgd_triton.planning.trial import measure_network
from powersgd_triton.planning.tuning import Tuning
from tests.support.checks import gradients as random_gradients
from tests.support.checks import set_times
from tests.support.checks import step as averaged
from tests.support.distributed import run
from tests.support.training import digest, linear_stack, training

SHAPES = {"wide": (96, 400), "tall": (500, 64), "bias": (96,)}
FIRST = tuning.WARM_UP + tuning.MEASURED + 1
"""Steps after which the choice is in force."""
SLOW, FAST = Network(2, card=1e4), Network(2, card=1e12, latency=0.0)
MIDDLE = Network(2, card=1e8)
"""On which an all-reduce takes 2.8 ms."""
AUTO = PowerSGDConfig(compression="auto")


def gradients(worker: int, number: int) -> dict[str, torch.Tensor]:
    return random_gradients(100 * number + worker, SHAPES)


def train(compressor: Compressor, worker: int, steps: range) -> list[bool]:
    """Whether each step was exact. Conservation: what was averaged and what is left over is what came."""
    exact = []
    for number in steps:
        before, own = compressor.error(), gradients(worker, number)
        averages = averaged(compressor, own)
        after, (one, two) = compressor.error(), (gradients(w, number) for w in range(2))
        exact.append(all(torch.allclose(averages[name], (one[name] + two[name]) / 2) for name in SHAPES))
        for name in after:
            mean = Communicator().mean(own[name] + before.get(name, torch.zeros(())) - after[name])
            torch.testing.assert_close(averages[name], mean, rtol=1e-4, atol=1e-5)
    return exact


def cheap(*formats: str) -> Any:
    """A trial that finds everything but these formats costly."""
    return lambda kind, *_: ComputeTime((1e-5 if kind.quantize in formats else 1.0,) * 3)


def quantized(worker: int, world_size: int) -> list[Any]:
    """Gradients in the format that was chosen, also by a run that goes on."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, errors in (("int8", []), ("int4", [*SHAPES])):
            set_times(patch, MIDDLE, 3e-3, cheap(name))
            compressor, resumed = Compressor(AUTO, SHAPES), Compressor(AUTO, SHAPES)
            exact = train(compressor, worker, range(FIRST + 4))
            saved = compressor.state_dict()
            resumed.load_state_dict(saved)
            exact += train(resumed, worker, range(FIRST + 4, FIRST + 6))
            assert exact == [True] * FIRST + [False] * 6
            assert saved["plan"]["settled"] == resumed.state_dict()["plan"]["settled"] == {"quantize": name}
            assert resumed.config.quantize == name
            assert [*compressor.error()] == [*resumed.error()] == errors
            assert str(resumed.report()).count(name) == len(SHAPES)
            found.append(digest(averaged(resumed, gradients(worker, 0)).values()))
            model = linear_stack()
            state = PowerSGDState(AUTO, module=model)
            trained = training(model, worker, state, range(FIRST + 2))
            assert pickle.loads(pickle.dumps(state)).config == state.config == resumed.config
            found.append(digest(trained[-1].values()))
            # What was chosen is given up with a state without a choice, whose errors are kept.
            assert not resumed.load_state_dict(saved_with({})).dropped
            assert (resumed.config, resumed._engine.plan.measures) == (AUTO, True)
    return found


def choices(worker: int, world_size: int) -> list[Any]:
    """What workers settle on networks and with trials that are given."""
    found: list[Any] = []
    # This worker's own times differ from those of the others.
    times = tuple((1 + worker) * 1e-5 * rank for rank in (4, 16, 64))
    with pytest.MonkeyPatch.context() as patch:
        for network, seconds in ((SLOW, 25.0), (FAST, 1e-3)):
            # The slowest network counts, which one of the workers has measured.
            trial = lambda kind, *_: ComputeTime((1e3,) * 3 if kind.quantize else times)  # noqa: E731
            set_times(patch, network if worker else FAST, seconds + 1e-4 * worker, trial)
            compressor, resumed = Compressor(AUTO, SHAPES), Compressor(AUTO, SHAPES)
            assert "exact" in str(compressor.report())
            exact = train(compressor, worker, range(FIRST + 4))
            saved = compressor.state_dict()
            resumed.load_state_dict(saved)
            later, settled = train(resumed, worker, range(FIRST + 4, FIRST + 6)), saved["plan"]["settled"]
            if network is SLOW:
                assert exact + later == [True] * FIRST + [False] * 6
                assert settled["compression"] == resumed.config.compression > 10  # type: ignore[operator]
            else:
                assert all(exact + later)
                assert (settled, resumed.config.compression) == ({"compression": None}, "auto")
            found.append(settled)
        times = tuple((1 + worker) * 1e-6 * rank for rank in (4, 16, 64))
        patch.setattr(tuning, "time_compute", lambda *_: ComputeTime(times))
        limited = Compressor(PowerSGDConfig(compression=4, max_overhead=0.01, replan_every=5), SHAPES)
        assert limited.report().tensors[0].rank > 5
        train(limited, worker, range(FIRST + 8))
        # Somewhat less than 1 ms of a step is not compression. 1% of it is four columns of the slower worker.
        assert (limited.config.max_rank, [row.rank for row in limited.report().tensors]) == (4, [4, 4, 0])
    network = measure_network(Communicator(), torch.device("cpu"))
    assert (network.nodes, network.node_size) == (2, 1)
    # On a busy machine they may have any size.
    assert 0 < network.card < math.inf
    assert 0 <= network.latency < math.inf
    return [*found, network]


@pytest.mark.parametrize("case", [choices, quantized])
def test_all_workers_settle_the_same_and_lose_nothing(case: Any) -> None:
    first, second = run(case, 2)
    assert first == second


def saved_with(settled: dict[str, Any]) -> dict[str, Any]:
    compressor = Compressor(PowerSGDConfig(compression=4), SHAPES)
    compressor.compress(gradients(0, 0))
    saved = compressor.state_dict()
    saved["plan"]["settled"] = settled
    return saved


def test_a_choice_that_cannot_be_is_refused() -> None:
    refused: list[dict[str, Any]] = [
        *({"max_rank": value} for value in ("wide", [1], 3.5, 0, None)), {"compression": 0.5}, {"compression": "auto"},
        {"compression": None, "wire_dtype": None}, {"wire_dtype": "int4"}, {"rank": 3}, {"quantize": "int9"},
        {"quantize": None}, {"quantize": "int8", "compression": 10}, {"quantize": "int8", "error_feedback": 1},
    ]  # fmt: skip
    for settled in refused:
        with pytest.raises(ValueError, match="expected a plan of ranks with ranks"):
            Compressor(PowerSGDConfig(compression=4), SHAPES).load_state_dict(saved_with(settled))


@pytest.mark.parametrize(
    ("given", "settled", "used"),
    [
        ({"compression": "auto"}, {"max_rank": 1}, False),
        ({"compression": "auto"}, {"compression": None}, True),
        ({"compression": "auto"}, {"compression": 10, "wire_dtype": "float32"}, True),
        ({"compression": "auto"}, {"quantize": "int8"}, True),
        ({"compression": "auto"}, {"quantize": "int8", "error_feedback": True}, True),
        # This budget is too small for the model: it is measured again.
        ({"compression": "auto"}, {"compression": 1e6, "wire_dtype": "int4"}, False),
        ({"compression": 4, "max_overhead": 0.5}, {"compression": 10, "wire_dtype": "float32"}, False),
        ({"compression": 4, "max_overhead": 0.5}, {"compression": None}, False),
        ({"compression": 4, "max_overhead": 0.5}, {"quantize": "int8"}, False),
        ({"bytes_per_step": 40_000, "max_overhead": 0.5}, {"max_rank": 2}, True),
        # These have nothing to choose.
        ({"compression": 4}, {"max_rank": 7}, None),
        ({"compression": 4}, {"compression": None}, None),
        ({"compression": 4}, {"quantize": "int8"}, None),
        ({"compression": 4}, {"compression": 20, "wire_dtype": "int4"}, None),
    ],
)
def test_a_choice_belongs_to_what_was_to_be_chosen(given: Any, settled: dict[str, Any], used: bool | None) -> None:
    compressor = Compressor(PowerSGDConfig(**given), SHAPES)
    compressor.load_state_dict(saved_with(settled))
    if used is None:
        assert (compressor.config.compression, compressor.config.max_rank) == (4, 64)
        return
    assert compressor.state_dict()["plan"].get("settled") == (settled if used else None)
    # If it is not used, the first steps are measured again.
    assert compressor._engine.plan.measures is not used


@pytest.mark.parametrize("name", [None, *cost.FORMATS])
def test_errors_of_a_saved_state_are_sent_whatever_is_chosen(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nothing is compressed, and in formats that need no error feedback."""
    if name is not None:
        set_times(monkeypatch, MIDDLE, 3e-3, cheap(name))
    before, compressor = Compressor(PowerSGDConfig(rank=2), SHAPES), Compressor(AUTO, SHAPES)
    before.compress(gradients(0, 0))
    errors = before.error()
    compressor.load_state_dict(before.state_dict())
    assert not compressor._engine.compressing
    total = {shape: torch.zeros(SHAPES[shape]) for shape in SHAPES}
    for number in range(1, FIRST + 4):
        own = gradients(0, number)
        for tensor, average in averaged(compressor, own).items():
            total[tensor] += average - own[tensor]
    assert compressor.config.quantize == name
    assert compressor.state_dict()["plan"]["settled"].get("quantize", "none") == (name or "none")
    for tensor, error in errors.items():
        assert error.norm() > 1
        torch.testing.assert_close(total[tensor], error, rtol=1e-4, atol=1e-4)
    assert compressor._engine.compressing == (name is not None)
    assert name is not None or not compressor.error()


# Predicted times of steps, and the choice among them. Plain numbers only ---------------------------------------------

BUCKETS = [{"head": (512, 256), "bias": (512,)}, {"body": (256, 1024), "norm": (256,)}]
CHEAP = ComputeTime((1e-4, 2e-4, 6e-4))
CONFIG = PowerSGDConfig(compression=20)
JOB = Job(BUCKETS, 0.05, Network(2, card=12.5e6))


def test_the_longest_time_of_any_worker_counts():
    """Of those that average with each other, and of those with other shards."""
    double = SimpleNamespace(gather=lambda times, _: torch.stack([times, 2 * times]))
    longer = SimpleNamespace(gather=lambda times, _: torch.stack([times, times + 1]), others=[double])
    tuned: Any = SimpleNamespace(_engine=SimpleNamespace(communicator=longer))
    assert Tuning._agreed(tuned, [[1.0], [2.0, 3.0]], torch.device("cpu")) == [(4.0,), (6.0, 8.0)]


def test_a_time_between_measured_ranks_is_on_a_line():
    time = ComputeTime((1.0, 2.0, 8.0))
    assert [time(rank) for rank in (4, 10, 16, 40, 64)] == [1, 1.5, 2, 5, 8]
    assert time(2) == pytest.approx(1 - 1 / 6)
    assert time(256) == pytest.approx(8 + 192 / 8)
    # A disturbed measurement does not make a higher rank cheaper.
    assert ComputeTime((3.0, 2.0, 4.0))(16) == 3
    assert ComputeTime((1e-3, 1.0, 2.0))(1) == 0


def test_messages_before_the_last_one_travel_during_the_backward_pass():
    assert step_seconds(0.3, 0.01, [0.1, 0.1, 0.05]) == pytest.approx(0.36)
    assert step_seconds(0.3, 0.01, [0.2, 0.1, 0.05]) == pytest.approx(0.46)
    for messages in ([], [0.1], [0.02, 0.1], [0.5, 0.5, 0.1]):
        assert cost.compute_of(step_seconds(0.2, 0.0, messages), messages) == pytest.approx(0.2)


def test_predicted_steps_have_the_bytes_and_ranks_of_their_plans():
    elements = sum(math.prod(shape) for shape in JOB.tensors.values())
    exact, half, compressed = JOB.exact(), JOB.exact(2), JOB.compressed(CONFIG, CHEAP)
    assert [exact.bytes_per_step, half.bytes_per_step] == [4 * elements, 2 * elements]
    assert exact.seconds - 0.05 > 1.5 * (half.seconds - 0.05) > 0
    assert compressed.ranks.keys() == {"head", "body"}
    assert compressed.bytes_per_step <= 4 * elements / 20
    assert 0 < compressed.overhead < 0.02
    assert compressed.seconds < exact.seconds
    with pytest.raises(ValueError, match="the budget is"):
        JOB.compressed(PowerSGDConfig(compression=1e6), CHEAP)


def test_a_choice_gives_away_little_time_for_quality():
    exact = Prediction(None, {}, 1e6, 1.0)
    configs = [dataclasses.replace(CONFIG, compression=c) for c in (10, 20, 40)]
    times = (0.5 * (1 + cost.TOLERANCE) + 0.01, 0.5 * (1 + cost.TOLERANCE), 0.5)
    found = [Prediction(c, {"a": 40 - 10 * i}, 1e5, t) for i, (c, t) in enumerate(zip(configs, times, strict=True))]
    assert choose(exact, found) is found[1]
    # An all-reduce that takes about as long loses nothing.
    assert choose(dataclasses.replace(exact, seconds=0.51), found).config is None
    assert choose(exact, []) is exact


def test_quantized_gradients_lose_less_than_factors_and_more_than_an_all_reduce():
    exact = Prediction(None, {}, 1e6, 1.0)
    low_rank = Prediction(CONFIG, {"a": 64}, 1e5, 1.0)
    formats = [Prediction(PowerSGDConfig(quantize=name), {}, 2e5, 1.0) for name in cost.FORMATS]
    for number, best in enumerate(found := [exact, *formats, low_rank]):
        assert choose(low_rank, found[number:][::-1]) is best
    # The compute of factors, and then that of quantization, is more than may be.
    times = {kind: ComputeTime((1e-3 if kind.quantize else 1.0,) * 3) for kind in kinds(CONFIG)}
    half, *others = options(JOB, times, 0.5)
    assert [p.config and p.config.quantize for p in (half, *others)] == [*cost.FORMATS]
    assert half.seconds > others[0].seconds > others[1].seconds
    assert half.bytes_per_step == JOB.exact(2).bytes_per_step
    assert not options(JOB, times, 1e-3)


def test_budgets_that_are_too_small_or_the_same_are_left_out():
    found = options(JOB, dict.fromkeys(kinds(CONFIG, ()), CHEAP), None)
    compressions = [float(p.config.compression or 0) for p in found if p.config is not None]
    assert compressions == sorted(set(compressions))
    plans = [tuple(sorted(p.ranks.items())) for p in found]
    assert len(set(plans)) == len(plans)
    # What is averaged exactly is more than 1/1280 of the bytes.
    assert 1280 not in compressions
