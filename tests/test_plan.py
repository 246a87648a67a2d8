"""``python -m powersgd_triton plan`` predicts steps and recommends one; ``doctor`` finds a broken step broken."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from powersgd_triton import PowerSGDConfig, doctor
from powersgd_triton.__main__ import main
from powersgd_triton.ops.torch_backend import TorchBackend
from powersgd_triton.planning import bucket_caps, command
from powersgd_triton.planning.cost import ComputeTime, Job, Network, predicted_compute
from powersgd_triton.planning.models import MODELS
from powersgd_triton.planning.trial import sample, time_compute
from tests.support.checks import CPU
from tests.support.distributed import on_workers
from tests.support.exchanges import latency_decides
from tests.support.thinned import slow


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compression that computes hardly anything."""
    monkeypatch.setattr(command, "time_compute", lambda *_: ComputeTime((1e-4, 2e-4, 1e-3)))


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "--device", "cpu", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [*MODELS, "of 1 MiB"])
def test_buckets_are_those_of_ddp(name: str) -> None:
    """DDP's first bucket is smaller only by default."""
    tensors = command.load(name, 1.0, CPU)[0] if name in MODELS else {str(i): (256, 1024) for i in range(60)}
    empty = [torch.empty(shape, device="meta") for shape in tensors.values()]
    for caps, limits in (([], [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 << 20]), ([5], [5 << 20])):  # type: ignore[attr-defined]
        expected, _ = dist._compute_bucket_assignment_by_size(empty, limits)  # type: ignore[attr-defined]
        names, buckets = list(tensors), bucket_caps.ddp_buckets(tensors, *caps)
        assert [list(bucket) for bucket in buckets] == [[names[i] for i in each] for each in expected]


def test_a_slow_network_is_recommended_a_budget(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    before = {"rank": 1, "parameters": None}
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "powersgd": before}))
    text = output(capsys, "gpt2", "--step-ms", "100", "--bandwidth", "1", "--write", str(file))
    for said in (
        "124,439,808 parameters in 13 buckets, 100 ms of compute",
        "2 × 1 workers, 1 Gbit/s a node, 10 µs",
        *("all-reduce, fp32", "all-reduce, bf16", "rank 4, float32", "rank 16, int4", "compression=160"),
        *("compression: timed on cpu", "Recommended: PowerSGDConfig(compression=", "DDP: leave bucket_cap_mb out."),
        *("Start with compression=100 or less: see docs/choosing.md.", f"in place of {json.dumps(before)}"),
    ):
        assert said in text
    assert "e+" not in text
    written = json.loads(file.read_text())
    assert written["train_micro_batch_size_per_gpu"] == 4
    assert written["powersgd"].pop("parameters", "gone") is None
    chosen = PowerSGDConfig.from_dict(written["powersgd"])
    assert chosen.planned
    assert f"compression={chosen.compression!r}" in text


def test_a_fast_network_or_costly_compression_is_recommended_an_all_reduce(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text("{}")
    assert "do not compress" in output(capsys, "gpt2", "--step-ms", "200", "--bandwidth", "400", "--write", str(file))
    assert file.read_text() == "{}"
    # Faster than an all-reduce in fp32, and slower than one in bf16.
    monkeypatch.setattr(command, "time_compute", lambda *_: ComputeTime((0.3, 0.4, 0.5)))
    assert "Recommended: do not compress" in output(capsys, "gpt2", "--step-ms", "100", "--bandwidth", "10")
    factors, whole = ComputeTime((0.02, 0.05, 0.2)), ComputeTime((1.0, 1.0, 1.0))
    monkeypatch.setattr(command, "time_compute", lambda kind, *_: whole if kind.quantize else factors)
    arguments = ("gpt2", "--step-ms", "100", "--bandwidth", "0.1")
    assert "Recommended: PowerSGDConfig" in output(capsys, *arguments)
    assert "do not compress" in output(capsys, *arguments, "--max-overhead", "0.01")


@pytest.mark.parametrize(("bandwidth", "name"), [("3", "int4"), ("100", "int8")])
def test_quantized_gradients_are_recommended_where_factors_cost_too_much(
    bandwidth: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"powersgd": {"rank": 1}}))
    monkeypatch.setattr(command, "time_compute", lambda kind, *_: ComputeTime((1e-4 if kind.quantize else 1.0,) * 3))
    text = output(capsys, "gpt2", "--step-ms", "100", "--bandwidth", bandwidth, "--write", str(file))
    assert f"Recommended: PowerSGDConfig(quantize='{name}'). A step" in text
    assert f"quantize={name} *" in text
    assert json.loads(file.read_text()) == {"powersgd": {"quantize": name}}
    for kept, bits in (("bf16", 16), ("int8", 8 + 16 / 128), ("int4", 4 + 16 / 128)):
        (row,) = (line.replace(" *", "") for line in text.splitlines() if line.startswith(f"quantize={kept}"))
        assert row.split()[1] == f"{124_439_808 * bits / 8:,.0f}"


@pytest.mark.parametrize("arguments", [("gpt2", "--step-ms", "180"), *slow([("llama-7b", "--step-ms", "2000")])])
def test_documented_tables_of_bucket_caps(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with latency_decides():
        text = output(capsys, *arguments, "--bucket-caps")
    assert text.count("workers |") == len(bucket_caps.WORKERS)
    page = Path(__file__).parents[1] / "docs" / "planning.md"
    assert f"`python -m powersgd_triton plan {' '.join(arguments)} --bucket-caps`:\n\n{text}" in page.read_text()


def test_a_cap_is_a_choice_between_latency_and_waiting() -> None:
    tensors = {str(number): (1024, 1024) for number in range(48)}
    config = PowerSGDConfig(rank=4)
    slow, far = Network(2, card=1.25e6), Network(2, latency=5e-3)
    seconds = {network: bucket_caps.cap_seconds(Job([tensors], 0.1, network), config) for network in (slow, far)}
    assert bucket_caps.best_cap(seconds[slow]) <= bucket_caps.DEFAULT_CAP < bucket_caps.best_cap(seconds[far])
    # All sizes about as good: DDP's default, so that nothing has to be set.
    assert bucket_caps.best_cap(dict.fromkeys(bucket_caps.CAPS, 1.0)) == bucket_caps.DEFAULT_CAP
    # A late message is counted on the CPU.
    job, free = Job(bucket_caps.ddp_buckets(tensors), 10.0, Network(2)), ComputeTime((0.0, 0.0, 0.0))
    late, early = (dataclasses.replace(job, late=late).compressed(config, free).seconds for late in (True, False))
    (*_, before, _) = dataclasses.replace(job, late=False).messages(job.layouts(config), config)
    assert late - early == pytest.approx(before / 2)
    # Quantized gradients of two workers travel in one message.
    whole = PowerSGDConfig(quantize="int8")
    for workers, waits in ((2, False), (3, True)):
        jobs = (dataclasses.replace(job, late=late, network=Network(workers)) for late in (True, False))
        late, early = (one.compressed(whole, free).seconds for one in jobs)
        assert (late > early) == waits


MODULE = """
import time
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))

def with_step():
    return model(), lambda: time.sleep(0.01)

def wrong():
    return 3

def alone():
    return model(),
"""


def test_a_model_is_made_by_a_function(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in (("planned_here.py", MODULE), ("list.json", "[]"), ("broken.json", "{")):
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    tensors, seconds = command.load("planned_here:with_step", None, CPU)
    assert tensors == {"1.bias": (4,), "1.weight": (4, 16), "0.bias": (16,), "0.weight": (16, 8)}
    assert next(iter(tensors)) == "1.bias"
    assert seconds >= 0.01
    assert command.load("planned_here:model", 5.0, CPU) == (tensors, 0.005)
    for arguments, complaint in (
        (["planned_here:model"], "returns no function that takes a step"),
        (["planned_here:wrong", "--step-ms", "1"], "must return a torch.nn.Module or (module, step); got int"),
        (["planned_here:alone", "--step-ms", "1"], "must return a torch.nn.Module or (module, step); got tuple"),
        (["planned_here:missing", "--step-ms", "1"], "has no attribute 'missing'"),
        (["not_a_module_here:f", "--step-ms", "1"], "No module named 'not_a_module_here'"),
        (["./planned_here:f", "--step-ms", "1"], "relative import"),
        (["gpt2", "--step-ms", "1", "--device", "meta"], "--device must be cpu, cuda or one of h100"),
        (["gpt3"], "expected gpt2, "),
        (["gpt2"], "--step-ms is missing"),
        (["gpt2", "--device", "a100"], "--step-ms is missing: a step on a100 cannot be measured here"),
        (["gpt2", "--step-ms", "-1"], "--step-ms must be a positive number; got -1.0"),
        (["gpt2", "--step-ms", "1", "--bandwidth", "0"], "--bandwidth must be a positive number; got 0.0"),
        (["gpt2", "--step-ms", "1", "--measure"], "start it by torchrun"),
        (["gpt2", "--step-ms", "1", "--write", "missing.json"], "missing.json"),
        (["gpt2", "--step-ms", "1", "--write", "list.json"], "list.json must contain an object"),
        (["gpt2", "--step-ms", "1", "--write", "broken.json"], "broken.json is not JSON"),
    ):
        assert main(["plan", *arguments]) == 2
        assert complaint in capsys.readouterr().err


@on_workers(2)
def test_the_network_of_a_job_is_measured(worker: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "time_compute", lambda *_: ComputeTime((1e-4, 2e-4, 3e-4)))
        patch.setattr(dist, "is_torchelastic_launched", lambda: True)
        assert main(["plan", "resnet-50", "--step-ms", "10", "--measure", "--device", "cpu"]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is timed")
def test_without_a_gpu_the_times_of_one_are_predicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 180 ms is not one of this CPU."""
    monkeypatch.setattr(command, "time_compute", None)
    assert main(["plan", "gpt2", "--bandwidth", "1", "--step-ms", "180"]) == 0
    text = capsys.readouterr().out
    assert "compression: estimated for h100" in text
    assert "Recommended: PowerSGDConfig(compression=" in text
    for config in (PowerSGDConfig(), PowerSGDConfig(quantize="int8")):
        slow, fast = (predicted_compute(gpu, {"": (1 << 20, 1 << 10)}, config) for gpu in ("rtx4090", "h100"))
        # A copy of 4 GiB takes 3 ms on the faster one.
        assert 0.005 < fast(4) < slow(4) < 1
        assert (slow(64) == slow(4)) == (config.quantize is not None)


@pytest.mark.parametrize("name", MODELS)
def test_a_part_of_every_model_is_timed(name: str) -> None:
    largest = 1 << 23
    tensors, _ = command.load(name, 1.0, CPU)
    matrices = {name: tuple(shape) for name, shape in tensors.items() if len(shape) > 1}
    part = sample(matrices, largest)
    whole = sum(map(math.prod, matrices.values()))
    numel = sum(map(math.prod, part.values()))
    assert min(whole, largest) / 4 <= numel <= min(whole, largest)
    # All shapes of matrices are in it, with enough rows for the highest rank or as many as there are.
    assert {shape[-1] for shape in part.values()} == {shape[-1] for shape in matrices.values()}
    assert all(math.prod(shape[:-1]) >= min(64, tensors[name][0]) for name, shape in part.items())


def test_what_compression_computes_is_timed() -> None:
    shapes = {"weight": (64, 48), "narrow": (8, 100), "bias": (64,), "none": (0, 4)}
    before = torch.get_rng_state()
    factors = PowerSGDConfig(rank=4), PowerSGDConfig(compression=8, start_iter=5, wire_dtype="int8")
    for config in (*factors, PowerSGDConfig(quantize="int4")):
        time = time_compute(config, [shapes, {"next": (30, 30)}], CPU)
        assert all(0 < seconds < 10 for seconds in time.seconds)
        assert config.quantize is None or time(4) == time(64)
    assert torch.equal(torch.get_rng_state(), before)
    assert time_compute(PowerSGDConfig(), [{"bias": (64,)}], CPU)(4) == 0
    assert time_compute(PowerSGDConfig(), [], CPU)(64) == 0


def test_sound_installation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    for said in ("3 threads", torch.__version__, "backend 'auto': torch", "All checks passed", "Not checked:"):
        assert said in report
    assert "FAILED" not in report
    assert "fake" not in doctor.distributed_backends()


def test_it_says_how_kernels_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    known = "launches take longer: Triton inspects arguments (known versions are 3.6 to 3.9)"
    cases = {"3.5.1": known, "3.6.0": "without inspection", "3.9.0+git": "without inspection", "3.10.0": known}
    for version, said in cases.items():
        monkeypatch.setattr(doctor, "_installed", lambda package: version if package == "triton" else "1")  # noqa: B023
        (found,) = [text for name, text, _ in doctor.versions() if name == "triton"]
        assert found.startswith(f"{version}; launches")
        assert said in found


def test_wrong_arithmetic_and_an_exception_are_failed_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = TorchBackend.reconstruct

    def scaled(self: TorchBackend, out: Mapping[str, Tensor], overflow: Tensor | None) -> None:
        right(self, out, overflow)
        out["weight"].mul_(1.01)

    def spoiled(self: TorchBackend, out: Mapping[str, Tensor], overflow: Tensor | None) -> None:
        right(self, out, overflow)
        out["bias"].fill_(torch.nan)

    broken = mock.Mock(side_effect=RuntimeError("no such instruction"))
    for phase, wrong, said in (
        ("reconstruct", scaled, "FAILED  nothing lost"),
        ("reconstruct", spoiled, "FAILED  exact average"),
        ("backproject", broken, "no such instruction"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(TorchBackend, phase, wrong)
            assert main(["doctor"]) == 1
        assert said in capsys.readouterr().out
