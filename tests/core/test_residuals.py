"""The memory of errors of tensors that are sent whole, and the memory and the operations that a step takes."""

import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.buckets import FilledBucket
from benchmarks.shapes import SMALL_GRADIENT_SETS
from powersgd_triton import Compressor, PowerSGDConfig
from powersgd_triton.comm.communicator import Communicator
from powersgd_triton.core import whole
from powersgd_triton.core.engine import Engine
from powersgd_triton.core.loading import load, save
from powersgd_triton.integrations.ddp import PowerSGDState, powerSGD_hook
from powersgd_triton.layout.layout import Layout
from powersgd_triton.ops import blocks
from powersgd_triton.ops.host import library
from powersgd_triton.ops.step import LossScale, Step
from powersgd_triton.planning.models import Shapes, gpt2
from powersgd_triton.ranks.plan import RankPlan
from powersgd_triton.schemes.mixed import Mixed
from tests.support.checks import CPU, DTYPES, gradients, live_bytes, on_threads, same_bits
from tests.support.distributed import make_test
from tests.support.lines import in_nodes, together
from tests.support.programs import ROOT

INT4 = PowerSGDConfig(quantize="int4")
SHAPES = {"weight": (240, 200), "bias": (70,), "other": (160, 120)}
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
WORKERS = 3
WHOLE, HALVES = (["weight", "bias", "other"],), (["weight", "bias"], ["other"])


def documented_scheme() -> Any:
    """The one that docs/architecture.md adds."""
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["Sign"]()


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("scheme", [Mixed, documented_scheme])
def test_errors_take_four_bytes_and_lose_nothing(scheme: Callable[[], Any], scaled: bool, on_host: bool) -> None:
    """Over steps with other buckets from the second one on, one that is not finite, one that fails, and a saved state.

    Also if the host does not read verdicts, as on a GPU.
    """
    scale, lines = 1.0, in_nodes(WORKERS)
    engines = [Engine(scheme(), INT4, line, lambda: SHAPES) for line in lines]
    for engine in engines if scaled else ():
        engine.step.loss_scale = LossScale(lambda: scale)
    balance = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    before = live_bytes()

    def average(worker: int, step: int, names: list[str]) -> dict[str, Tensor]:
        engine, given = engines[worker], gradients(10 * step + worker, SHAPES)
        own = {name: given[name] * scale for name in names}
        if step == 3 and worker == 0 and "other" in own:
            own["other"][0, 0] = torch.inf
        engine.average(engine.begin(tuple(names), lambda: {n: SHAPES[n] for n in names}, CPU), own)
        if step == 5:
            engine.void()
        elif step != 3:
            for name in names:
                balance[name] += given[name].double() - own[name].double() / scale
        return own

    def reload(worker: int) -> None:
        saved = save(engines[worker])
        load(engines[worker], lambda: (saved, None))

    with mock.patch.object(whole, "on_host", return_value=on_host):
        for step in range(8):
            scale = 3.0**step if scaled else 1.0
            for names in WHOLE if step == 0 else HALVES[:1] if step == 5 else HALVES:
                averages = together(lines, functools.partial(average, step=step, names=names))
                assert step == 3 or all(same_bits(own, averages[0]) for own in averages)
                del averages
            if step != 5:
                together(lines, lambda worker: engines[worker].end_step())
            # The rest is what decides about 1024 steps. The memory of messages and of the old errors stays on the CPU.
            messages = 1.6 * NUMEL * (1 if step == 0 else 2)
            taken = (live_bytes() - before) / WORKERS - messages
            assert step == 7 or taken <= (2.5 if on_host else 1.5) * 4 * NUMEL, step
            if step == 6:
                together(lines, reload)
    errors = [engine.residuals.error(engine.step) for engine in engines]
    for name, shape in SHAPES.items():
        left = sum(error[name].double().view(shape) for error in errors)
        # Six steps that count, of elements of size 1, in fp32.
        lost = (left - balance[name]).square().mean().sqrt() / WORKERS
        assert lost <= 6 * 2**-23, (name, lost)


def test_errors_stay_if_no_memory_is_left_for_their_copies():
    """They are copied when other buckets take over."""
    errors, step, zeros = whole.WholeErrors(RankPlan(INT4)), Step(), {n: torch.zeros(s) for n, s in SHAPES.items()}
    first, second = (Layout.build({n: SHAPES[n] for n in names}, INT4) for (names, *_) in (WHOLE, HALVES))
    held = {s.name: torch.randn(s.rows, s.m) for s in first.segments}
    errors.hold(dict(held))
    errors.compensated(first, zeros, step)
    lacks = mock.patch.object(Tensor, "clone", side_effect=[torch.zeros(1), torch.OutOfMemoryError("no memory")])
    with lacks, pytest.raises(torch.OutOfMemoryError):
        errors.compensated(second, zeros, step)
    assert same_bits(errors.errors(step), held)


def errors_stay_if_an_average_does_not_fit(worker: int, world_size: int) -> None:
    """With a loss scale, ``decompress`` decides about the step. Without it, the next step or a look at the errors."""
    for on_host in (True, False):
        compressor = Compressor(INT4, SHAPES)
        compressor.attach(lambda: 1.0)
        with mock.patch.object(whole, "on_host", return_value=on_host):
            compressor.compress(gradients(worker, SHAPES))
            before = compressor.error()
            assert before["weight"].any()
            large = {name: 1e5 * tensor for name, tensor in gradients(worker, SHAPES).items()}
            narrow = {name: torch.empty(shape, dtype=torch.float16) for name, shape in SHAPES.items()}
            compressed = compressor.compress(large)
            compressor.decompress(compressed, out=narrow)
            assert not compressed.verdict
            assert all(torch.equal(error, before[name]) for name, error in compressor.error().items())
            compressor.compress(large)
            compressor.decompress(compressor.compress(large))
            assert not torch.equal(compressor.error()["weight"], before["weight"])


@pytest.mark.parametrize(
    ("rank", "dtype", "start_iter"), [(1, torch.float32, 2), (8, torch.bfloat16, 0), (8, torch.float64, 0)]
)
def test_memory_is_one_buffer_and_the_factors(rank: int, dtype: torch.dtype, start_iter: int):
    shapes = {"a": (512, 300), "b": (512, 300), "c": (300, 128, 3), "bias": (512,)}
    before = live_bytes()
    compressor = Compressor(PowerSGDConfig(rank=rank, start_iter=start_iter), shapes)
    now = gradients(0, shapes, dtype)
    own = live_bytes() - before
    for _ in range(start_iter + 3):
        compressor.decompress(compressor.compress(now), out=now)
    extra = live_bytes() - before - own
    layout = compressor.layout
    width = 8 if dtype == torch.float64 else 4
    buffers = width * sum(segment.numel for segment in layout.compressed)
    # P and P̂; own Q, Q̄ and the basis; the bypass tensors in the first message.
    factors = width * (2 * layout.p_numel + 3 * layout.q_numel + layout.bypass_numel)
    assert buffers > 0
    assert extra <= 1.05 * buffers + factors, f"{(extra - factors) / buffers:.3f} × the compressed gradients"


class Allocations(TorchDispatchMode):
    """Storages that operations newly made: their bytes, and the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        found = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.made += [(storage.nbytes(), str(func)) for storage in found if storage.data_ptr() not in given]
        return result


@pytest.mark.parametrize("kind", ["finite", "zero", "non-finite"])
@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        *((dtype, {}) for dtype in DTYPES),
        *((torch.bfloat16, {field: False}) for field in ("error_feedback", "warm_start")),
    ],
)
def test_nothing_full_size_is_allocated_in_a_step(
    dtype: torch.dtype, fields: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(blocks, "block_bytes", lambda _: 1 << 14)
    monkeypatch.setattr(blocks, "FEWEST_ROWS", 8)
    shapes = {"a": (256, 192), "b": (256, 192), "c": (160, 192), "bias": (64,)}
    compressor = Compressor(PowerSGDConfig(rank=2, **fields), shapes)
    now = gradients(0, shapes, dtype)
    for _ in range(2):
        compressor.compress(now)
    if kind == "zero":
        now["a"].zero_()
    elif kind == "non-finite":
        now["a"][5, 5] = float("inf")
    with Allocations() as seen:
        compressor.decompress(compressor.compress(now), out=now)
    # A block, of which fp64 may need two. Factors are smaller, the smallest matrix is larger.
    limit = 2 << 14
    assert limit < 160 * 192 * dtype.itemsize
    size, operation = max(seen.made)
    assert 0 < size <= limit, f"{operation} allocated {size} bytes"


def calls(shapes: Shapes) -> int:
    """Return the operations of a step, those that they ask for themselves included."""
    bucket = FilledBucket(shapes)
    state = PowerSGDState(None, 16, start_powerSGD_iter=0, explore_every=0)

    def step() -> None:
        bucket.refill()
        powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    return sum(event.name.startswith("aten::") for event in seen.events())


def test_calls_of_a_small_models_step(one_worker: None) -> None:
    """Matrices of equal shape share their operations. Each tensor has a view, and some are copied."""
    more_layers = gpt2(layers=8, width=128, vocabulary=96, context=128)
    # More threads divide large products into more parts.
    for _ in on_threads(1):
        few, many = calls(SMALL_GRADIENT_SETS["demo"]), calls(more_layers)
    # Without a C compiler, torch computes each stage of each group by calls of its own.
    assert few <= (1200 if library() is None else 600), few
    assert many - few <= 2.5 * (len(more_layers) - len(SMALL_GRADIENT_SETS["demo"]))


def an_exact_average_fits_fp16_where_the_sum_does_not(worker: int, world_size: int) -> None:
    engine = Engine(Mixed(), PowerSGDConfig(start_iter=1), Communicator(), lambda: {"weight": (4, 4)})
    buffer = torch.full((16,), 40000.0, dtype=torch.float16)
    engine.begin("all", lambda: {"weight": (4, 4)}, CPU, last=True)
    engine.average_exactly(buffer)
    assert torch.equal(buffer, torch.full_like(buffer, 40000.0))


test_two_workers = make_test(
    (errors_stay_if_an_average_does_not_fit, an_exact_average_fits_fp16_where_the_sum_does_not), 2
)
