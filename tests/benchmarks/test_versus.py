"""The comparison with other methods: their messages and arithmetic, and its reports."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import arms, loss_per_byte, packing, rivals, trainings, versus, versus_plan
from benchmarks.network import links
from benchmarks.network.links_report import crossover, steps_to
from powersgd_triton.demo.arms import PARALLELISMS, Arm

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


def test_chunks_are_tiles_and_can_be_put_together_and_floats_are_the_nearest_powers_of_two() -> None:
    magnitudes = torch.tensor([8.0, -4.0, 2.9, 0.125, -0.05, 0.0, 0.1, 1.0]).repeat(2, 16)
    encoded = packing.float_codes(magnitudes)
    assert len(encoded) == magnitudes.numel() // 2 + 2 * len(magnitudes)
    # 2.9 / 8 lies between 2⁻¹ and 2⁻², nearer to the former on a logarithmic scale.
    expected = torch.tensor([8.0, -4.0, 4.0, 0.125, 0.0, 0.0, 0.125, 1.0]).repeat(2, 16)
    torch.testing.assert_close(packing.from_float_codes(encoded, magnitudes.shape), expected)
    tensors = [torch.randn(2 * rivals.SIDE, 3 * rivals.SIDE), torch.randn(rivals.SIDE), torch.randn(rivals.SIDE, 64)]
    basis = rivals.cosines(rivals.SIDE)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(rivals.SIDE), rtol=0.0, atol=1e-5)
    matrices, vectors = rivals.to_chunks(tensors)
    assert (matrices.shape, vectors.shape) == ((7, N), (1, rivals.SIDE))
    assert torch.equal(matrices[1].view(64, 64), tensors[0][:64, 64:128])
    for tensor, back in zip(tensors, rivals.from_chunks(matrices, vectors, tensors), strict=True):
        assert torch.equal(tensor, back)
    with pytest.raises(ValueError, match=r"multiples of 64 rows and columns; got \(10, 64\)"):
        rivals.to_chunks([torch.empty(10, 64)])


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


def test_arms_are_parsed() -> None:
    one = arms.Arm.parse("local:19.5x+every10+outer0.8")
    assert (one.method, one.message) == ("local", "19.5x")
    assert one.options == {"every": 10, "grow": 0, "outer": 0.8, "delay": 0, "keep": 0, "inner": 1}
    sparse = "local:sparse50x+every2+keep0.9"
    assert (versus.family(sparse), versus.label(sparse)) == ("local codes", "sparse50x, H = 2 keep 0.9")
    assert versus.label("sparseloco:512+every5+senders1+inner1.5") == "512, H = 5 senders rate × 1.5"
    assert versus.label("ours:19x+inner2") == "19× rate × 2"
    for those in versus_plan.PLAN:
        for arm in those.arms:
            arms.check(arm)
    for model in loss_per_byte.MODELS.values():
        for text in model.arms:
            Arm.parse(text, loss_per_byte.DEFAULT_RANK)
    for text in [*links.TRAINED, *links.SHARDED]:
        *parallelism, name = text.split()
        assert {*parallelism} <= PARALLELISMS.keys()
        Arm.parse(name, 1)
    for text in ("local:exact", "local:exact+every5+rate2", "diloko:fp32+every5", "demo", "diloco:int4+every5"):
        with pytest.raises(ValueError, match=r"expected .*got "):
            arms.check(text)


def test_a_crossover_lies_on_a_power_law_and_a_loss_is_reached_between_two_points() -> None:
    ours = {10.0: 1.0, 100.0: 1.0, 1000.0: 1.0, None: 1.0}
    base = {10.0: 40.0, 100.0: 4.0, 1000.0: 0.4, None: 0.1, 30.0: 9.0}
    assert crossover(ours, base) == pytest.approx(400)
    for times, expected in ((0.9, 0.0), (1.0, 0.0), (1.1, math.inf)):
        assert crossover({10.0: 1.0, 100.0: 1.0}, {10.0: times, 100.0: times}) == expected
    with pytest.raises(ValueError, match=r"same rates; got rates \[10\.0\] and \[None\]"):
        crossover({10.0: 1.0}, {None: 1.0})
    for loss, steps in ((5.0, 10), (3.0, 20), (2.5, 22.5), (0.9, None)):
        assert steps_to([4.0, 3.0, 1.0, 2.0], loss, interval=10) == steps


def record(arm: str, seed: int, loss: float, sent: float) -> trainings.Record:
    common = {"model": "text", "seed": seed, "steps": 600, "workers": 2}
    return {**common, "arm": arm, "loss": loss, "bytes_per_step": sent, "sent": sent, "received": sent}


def test_reports_have_each_methods_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [record("allreduce", seed, 1.0 + seed, 1e6) for seed in range(3)]
    losses += [record("ours:4", seed, 1.1 + 1.3 * seed, 5e4) for seed in range(2)]
    rows = [
        record("diloco:fp32+every20", 0, 1.5, 1e6 / 20),
        record("diloco:fp32+every20+outer0.5", 0, 1.2, 1e6 / 20),
        # Chosen at seed 0, whatever the others say.
        record("diloco:fp32+every20+outer0.5", 1, 2.8, 1e6 / 20),
        record("local:ternary+every5", 0, 1.1, 1e6 / 92),
        record("alone", 0, 1.16, 0.0),
    ]
    monkeypatch.setattr(sys, "argv", ["", "report"])
    for program, content in ((loss_per_byte, losses), (versus, rows)):
        monkeypatch.setattr(program, "FILE", tmp_path / f"{program.__name__}.json")
        monkeypatch.setattr(program, "PICTURE", tmp_path / f"{program.__name__}.png")
        program.FILE.write_text(json.dumps(content))
    loss_per_byte.main()
    # Seed by seed 10% and 20%.
    assert "| ours:4 | 50,000 | 20.0× | **1.750** ± 0.919 | +15.0 ± 5.0% | 2 |" in capsys.readouterr().out
    versus.main()
    printed = capsys.readouterr().out
    assert "| DiLoCo | +30.0 ± 10.0% (20×, fp32, H = 20) | – | – | – | – |" in printed
    # 92 times fewer bytes are as good as 100 times, but not as 200 times.
    cell = "**+10.0%** (92×, ternary, H = 5)"
    assert f"| local steps, codes | {cell} | {cell} | {cell} | – | – |" in printed
    assert all(program.PICTURE.is_file() for program in (loss_per_byte, versus))
