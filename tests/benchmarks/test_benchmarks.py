"""The GPU benchmarks run in a dry run; methods that are trained beside ours follow their papers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _pytest.mark.expression import Expression
from torch import nn

from benchmarks import loss_per_byte, packing, rivals, tune
from benchmarks.cases import step_cases
from tests.support.programs import ROOT, output_of


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    options = ["-m", "gpu", "--dry", "--record", "dry", "--tests", "passed", "--benchmark-quiet"]
    output_of("-m", "pytest", "benchmarks", "-q", "-p", "no:cacheprovider", *options, OUT=str(tmp_path))
    recorded = json.loads((tmp_path / "dry.json").read_text())
    assert recorded["machine"]["dry"]
    assert recorded["machine"]["tests"] == "passed"
    seen = {(row["kind"], row["provider"]) for row in recorded["rows"]}
    assert seen >= {
        *(("step", provider) for provider in ("ours", "reference", "torch", "torch batched", "copy")),
        *(("overlap", way) for way in ("one by one", "overlapped")),
        *(("kernel", provider) for provider in ("triton", "reference", "compiled", "copy")),
        *(("orthogonalize", provider) for provider in ("triton", "reference", "torch.linalg.qr", "geqrf + orgqr")),
        *(("launches", "ours"), ("replay", "ours")),
    }
    table = (tmp_path / "dry.md").read_text()
    assert "A dry run" in table
    for title in ("Targets", "Hook step", "Launches of one hook step", "Kernels", "Orthogonalization"):
        assert f"\n## {title}\n" in table
    assert not (ROOT / "benchmarks" / "results" / "dry.json").exists()


def session(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHON": sys.executable, **environment}
    command = ["bash", "benchmarks/gpu_session.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def test_a_gpu_session_fits_ten_minutes_and_begins_with_what_tells_most(tmp_path: Path) -> None:
    """Its plan, which runs nothing."""
    out = tmp_path / "results"
    found = session("--dry", OUT=str(out))
    *lines, total = found.stdout.splitlines()
    limits = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert list(limits)[:5] == ["doctor", "first", "tests", "bench", "trace"]
    # The first results come within three minutes.
    assert limits["doctor"] + limits["first"] <= 180
    assert total.split() == ["together", str(sum(limits.values())), "s"]
    assert (found.returncode, sum(limits.values()) <= 600) == (0, True)
    assert session("--dry", LIMIT="100").returncode == 1
    assert session("--dry", "no such part").returncode == 2
    # A part alone has all the time.
    assert session("--dry", "tests").stdout.split()[:2] == ["tests", "570"]
    assert not out.exists()


def test_the_first_part_of_a_session_checks_a_step_and_times_it_beside_torchs() -> None:
    said = session("--dry", "first").stdout
    chosen = Expression.compile(said.split(" -k ")[1].split(" --record")[0])
    cases = [case.id for case in step_cases(full=False, dry=False)]
    found = [case for case in cases if chosen.evaluate(lambda name, /, **_: name.lower() in case.lower())]  # noqa: B023
    assert found == [f"gpt2-124M-r4-fp32-{provider}" for provider in ("ours", "torch", "torchbatched")]


def test_arms_of_loss_per_byte_have_a_place_in_its_figure() -> None:
    for arm in {arm for model in loss_per_byte.MODELS.values() for arm in model.arms} | {"ours:16+int4+pairs"}:
        assert loss_per_byte.kind(arm) in loss_per_byte.STYLES
        assert loss_per_byte.width(arm) in loss_per_byte.COLOURS


def test_tuning_gives_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    tune.main(["--dry"])
    printed = capsys.readouterr().out
    assert "failed" not in printed
    for kernel in tune.KERNELS:
        assert f"    {kernel}=Launch(" in printed


CHUNKS, N = 5, rivals.SIDE**2


@pytest.mark.parametrize("two_bits", [False, True])
@pytest.mark.parametrize(("n", "k"), [(N, 1), (N, 8), (N, 512), (rivals.SIDE, 32), (rivals.SIDE, rivals.SIDE)])
def test_a_message_has_the_largest_entries(n: int, k: int, two_bits: bool) -> None:
    chunks = torch.randn(CHUNKS, n, generator=torch.Generator().manual_seed(0))
    message = packing.TopK(n, k, two_bits)
    encoded = message.encode(chunks)
    decoded = message.decode(encoded, CHUNKS)
    largest = chunks.abs().topk(k).indices
    sent = torch.zeros_like(chunks).scatter_(1, largest, chunks.gather(1, largest))
    if two_bits:
        torch.testing.assert_close(decoded.sign(), sent.sign())
        # Each half of a chunk's values has its mean, so that their sum stays.
        torch.testing.assert_close(decoded.abs().sum(1), sent.abs().sum(1), rtol=2**-8, atol=0.0)
    else:
        torch.testing.assert_close(decoded, sent.bfloat16().float(), rtol=0.0, atol=0.0)
    values = 2 * k + 32 if two_bits else 16 * k
    least = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    assert CHUNKS * (least + values) / 8 <= len(encoded) <= CHUNKS * (least + 2 * k + 1 + values) / 8 + 1


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers that do the same: what this process sends comes back as everybody's."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))
    monkeypatch.setattr(dist, "all_gather", lambda gathered, tensor: [one.copy_(tensor) for one in gathered])


def test_what_a_sparse_mean_does_not_send_is_sent_later(twice: None) -> None:
    """Without decay, what was sent and the error sum up to what was to be sent."""
    mean = rivals.SparseMean(64, decay=1.0)
    gradients = [[torch.randn(64, 128), torch.randn(64)] for _ in range(3)]
    sent = [mean(tensors) for tensors in gradients]
    assert mean._error is not None
    given, arrived = (sum(float(x.sum()) for tensors in each for x in tensors) for each in (gradients, sent))
    assert arrived + float(mean._error.sum()) == pytest.approx(given, abs=1e-3)


@pytest.mark.parametrize("senders", [False, True])
def test_an_entry_is_the_mean_of_its_senders_or_of_all(monkeypatch: pytest.MonkeyPatch, senders: bool) -> None:
    nothing = packing.TopK(N, 64, two_bits=True).encode(torch.zeros(2, N))
    monkeypatch.setattr(rivals, "_gather", lambda own: [own, nothing])
    mean, tensors = rivals.SparseMean(64, decay=1.0, senders=senders), [torch.randn(64, 64), torch.zeros(64)]
    arrived = mean(tensors)[0]
    assert mean._error is not None
    sent = tensors[0] - mean._error[0].view(64, 64)
    torch.testing.assert_close(arrived, sent if senders else sent / 2)


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_rounds_are_those_of_diloco(twice: None, rate: float, momentum: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    theta, velocity = model.weight.detach().clone(), 0.0
    rounds = rivals.Rounds(model, 2, rivals.exact_mean, rate, momentum)
    for step in range(1, 7):
        with torch.no_grad():
            model.weight.sub_(0.1 * step)
        rounds(step)
    # Nesterov's outer steps, as the paper states them, of 0.1 · (1 + 2), 0.1 · (3 + 4) and 0.1 · (5 + 6).
    for change in (0.3, 0.7, 1.1):
        velocity = momentum * velocity + change
        theta = theta - rate * (change + momentum * velocity)
    torch.testing.assert_close(model.weight.detach(), theta)


def test_demo_moves_by_signs_and_keeps_what_it_did_not_send(twice: None) -> None:
    parameters = [nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64))]
    gradients = [torch.randn(parameter.shape) for parameter in parameters]
    for k in (N, 1):
        optimizer = rivals.DeMo(parameters, rate=0.1, k=k, decay=0.5, weight_decay=0.0)
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter, G in zip(parameters, gradients, strict=True):
            parameter.grad = G
        optimizer.step()
        for parameter, old, G, kept in zip(parameters, before, gradients, optimizer._momenta, strict=True):
            if k == 1:
                assert 0 < (G - kept).norm() < G.norm()
                continue
            # All coefficients were sent, in bf16.
            assert kept.norm() < 2**-7 * G.norm()
            certain = G.abs() > 0.1
            torch.testing.assert_close((10 * (old - parameter.detach()))[certain], G.sign()[certain])
