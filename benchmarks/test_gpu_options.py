"""Hook steps with options on a GPU: whether the host waits for the device, the device's time and the host's.

One worker stands for two: it receives what it has sent.
"""

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks.buckets import FilledBucket
from benchmarks.cases import Case
from benchmarks.measuring import fits, record
from benchmarks.results_file import Results
from benchmarks.shapes import GRADIENT_SETS
from benchmarks.timing import Clock, why_it_waits
from powersgd_triton.integrations import ddp
from powersgd_triton.planning.trial import StandIn

pytestmark = pytest.mark.gpu

WARM_UP = 3
"""Steps before the host must not wait: a plan of ranks, for one, is measured in the first and holds in the third."""


@dataclasses.dataclass(frozen=True)
class Option:
    """Keywords of ``PowerSGDConfig``, and what else makes the step another one."""

    keywords: dict[str, Any]
    dtype: torch.dtype = torch.float32
    telemetry: bool = False


OPTIONS = {
    "rank 4": Option({"rank": 4}),
    "telemetry in each step": Option({"rank": 4}, telemetry=True),
    "alternating": Option({"rank": 4, "algorithm": "alternating"}),
    "factors in int8": Option({"rank": 4, "wire_dtype": "int8"}),
    "ranks planned in every second step": Option({"compression": 20, "replan_every": 2}),
    "quantize int8": Option({"quantize": "int8"}),
    "quantize int4": Option({"quantize": "int4"}),
    "quantize ternary": Option({"quantize": "ternary"}),
    "fp64, plain torch": Option({"rank": 4}, dtype=torch.float64),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option(benchmark: Any, name: str, clock: Clock, results: Results, pytestconfig: pytest.Config) -> None:
    option, gradients = OPTIONS[name], "demo" if pytestconfig.option.dry else "gpt2-124M"
    with fits():
        bucket = FilledBucket(GRADIENT_SETS[gradients], clock.device, option.dtype)
        module = torch.nn.ParameterList(bucket.gradients())
        bucket.parameters = lambda: list(module)  # type: ignore[method-assign]
        state = ddp.PowerSGDState(None, start_iter=0, module=module, **option.keywords)
        state._engine.connect(StandIn())
        if option.telemetry:
            state.telemetry(every=1)

        def step() -> None:
            ddp.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]

        def steps(number: int) -> None:
            for _ in range(number):
                bucket.refill()
                step()

        steps(WARM_UP)
        synchronizes = why_it_waits(lambda: steps(2), clock.device)
        case = Case(gradients, 0, str(option.dtype).removeprefix("torch."), name)
        record(
            *(benchmark, clock, results, "option", case, step, bucket.refill),
            synchronizes=synchronizes,
            bytes=2 * bucket.buffer().nbytes,
        )
    assert not synchronizes
