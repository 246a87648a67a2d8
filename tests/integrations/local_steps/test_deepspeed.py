"""Local steps across nodes of DeepSpeed engines with ZeRO inside a node, with four processes as two nodes of two."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.local_steps import LocalSteps
from tests.support.deepspeed_jobs import Job
from tests.support.local_steps import theta
from tests.support.local_wrappers import (
    EVERY,
    RATE,
    STEPS,
    TERNARY,
    WORKERS,
    Net,
    across,
    batch,
    conserves,
    equals_averaging,
    in_deepspeed,
    node,
    resumes,
    same_bits,
    watched,
)
from tests.support.sharded_training import in_one_group, outcome

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
CLIPPED: dict[str, Any] = {"gradient_clipping": 0.2}
KINDS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 1, bf16": {"stage": 1, **BF16},
    "stage 2, bf16": {"stage": 2, **BF16},
    "BF16_Optimizer": {"stage": 1, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    "stage 2, offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
}
CODED = ("exact", "ternary", "int2, delay")


def clips() -> tuple[float, float]:
    """The difference from DDP that clips gradients in each node and averages by hand, and what clipping changes."""
    found = []
    for clipping in (CLIPPED["gradient_clipping"], 1e9):
        net = DistributedDataParallel(Net(), process_group=node())
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=RATE, momentum=0.5)
        for step in range(STEPS):
            x, y = batch(dist.get_rank(), step)
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), clipping)
            optimizer.step()
            if (step + 1) % EVERY == 0:
                for parameter in net.parameters():
                    dist.all_reduce(parameter.data, group=across())
                    parameter.data /= 2
        found.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    setup = in_deepspeed(Net(), stage=2, **CLIPPED)
    setup.train(range(STEPS), LocalSteps(setup.model, None, EVERY, group=across()))
    return float((setup.whole() - found[0]).abs().max()), float((found[1] - found[0]).abs().max())


def trains(**options: Any) -> dict[str, Any]:
    """A longer run in ternary codes, with clipping: losses, bits, and the groups of collectives."""
    setup = in_deepspeed(Net(), **options, gradient_clipping=1.0)
    sync = LocalSteps(setup.model, TERNARY, EVERY, group=across())
    losses, crossing = [], 0
    own = {*dist.get_process_group_ranks(node())}
    for step in range(60):
        with watched() as groups:
            losses.append(float(setup.advance(*batch(dist.get_rank(), step % 6))))
        crossing += sum(not own.issuperset(group) for group in groups)
        assert groups
        sync.step()
    return {
        "fell to": sum(losses[-6:]) / sum(losses[:6]),
        "crossing": crossing,
        "same": same_bits(setup.whole(), None) and same_bits(theta(sync), across()),
        "follow": float((setup.flat() - theta(sync)).abs().max()),
    }


def refuses() -> dict[str, str]:
    import deepspeed

    def attempt(make: Any, config: Any = TERNARY) -> str:
        deepspeed.utils.groups.mpu = None
        try:
            LocalSteps(make(), config, EVERY, group=across())
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    def everywhere() -> Any:
        net = Net().requires_grad_()
        config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}}
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        config["zero_allow_untested_optimizer"] = True
        return deepspeed.initialize(model=net, config=config, optimizer=optimizer)[0]

    def compressed() -> Any:
        from powersgd_triton.integrations import deepspeed as adapter

        engine = in_deepspeed(Net(), stage=2).model
        adapter.enable(engine, PowerSGDConfig(rank=2, min_compression_rate=0))
        return engine

    return {
        "stage 0": attempt(lambda: in_deepspeed(Net(), stage=0).model),
        "stage 3": attempt(lambda: in_deepspeed(Net(), stage=3).model),
        "all workers": attempt(everywhere),
        "compressed": attempt(compressed),
        "rank": attempt(lambda: in_deepspeed(Net()).model, PowerSGDConfig(rank=2)),
    }


REFUSED = {
    "stage 0": "local steps need DeepSpeed's ZeRO stage 1 or 2.*got stage 0",
    "stage 3": "local steps need DeepSpeed's ZeRO stage 1 or 2.*got stage 3",
    "all workers": r"DeepSpeed averages gradients over the workers \[0, 1, 2, 3\].*mpu=node_mpu\(node, across\)",
    "compressed": "compresses gradients within its node.*take the section out",
    "rank": "no matrices of low rank: give codes",
}
QUICK = ("stage 2, bf16",)


def named(name: str) -> dict[str, Any]:
    """Cases of one kind of engine."""
    cases: dict[str, Any] = {
        f"trains {name}": functools.partial(trains, **KINDS[name]),
        f"conserves {name}": functools.partial(conserves, "deepspeed", CODED, **KINDS[name]),
    }
    if name in RESUMED:
        cases[f"resumes {name}"] = functools.partial(resumes, "deepspeed", **KINDS[name])
    if name in AVERAGED:
        cases[f"averages {name}"] = functools.partial(equals_averaging, "deepspeed", **KINDS[name])
    return cases


AVERAGED = ("stage 1", "stage 2")
RESUMED = ("stage 2, bf16", "stage 2", "BF16_Optimizer")


@functools.cache
def results(*, slow: bool) -> dict[str, list[Any]]:
    kinds = [name for name in KINDS if (name in QUICK) is not slow]
    cases = {} if slow else {"clips": clips, "refuses": refuses}
    cases |= {key: case for name in kinds for key, case in named(name).items()}
    return in_one_group({name: Job(case) for name, case in cases.items()}, WORKERS)


def of(kind: str, case: str) -> list[Any]:
    """Results of a case for a kind of engine."""
    return outcome(results(slow=kind not in QUICK), f"{case} {kind}")


def each(kinds: Iterable[str]) -> Any:
    return pytest.mark.parametrize(
        "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]
    )


@each(AVERAGED)
def test_exact_messages_average_the_replicas(kind: str) -> None:
    for difference, learned, inside in of(kind, "averages"):
        assert difference <= 1e-5 < 0.01 < learned
        assert inside


def test_gradients_are_clipped_within_a_node() -> None:
    for difference, clipped in outcome(results(slow=False), "clips"):
        assert difference <= 1e-5 < 0.01 < clipped


@each(KINDS)
def test_nothing_is_lost_and_all_workers_have_the_same_bits(kind: str) -> None:
    for seen in of(kind, "conserves"):
        assert {key: missing for key, (missing, _) in seen.items() if not missing <= 3e-6} == {}
        assert {key for key, (_, same) in seen.items() if not same} == set()


@each(KINDS)
def test_nodes_learn_together_and_communicate_in_exchanges_only(kind: str) -> None:
    for seen in of(kind, "trains"):
        assert seen["crossing"] == 0
        assert seen["same"]
        assert seen["follow"] == 0
        assert seen["fell to"] < 0.5


@each(RESUMED)
def test_a_resumed_round_goes_on_with_the_same_bits(kind: str) -> None:
    assert all(all(seen.values()) for seen in of(kind, "resumes"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    for texts in outcome(results(slow=False), "refuses"):
        assert re.search(REFUSED[name], texts[name], re.DOTALL), texts[name]
