"""The comparison with other methods: their messages and arithmetic, and its report."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import arms, digits, loss_per_byte, packing, rivals, trainings, versus

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


def test_floats_of_4_bits_are_the_nearest_powers_of_two() -> None:
    magnitudes = torch.tensor([8.0, -4.0, 2.9, 0.125, -0.05, 0.0, 0.1, 1.0]).repeat(2, 16)
    encoded = packing.float_codes(magnitudes)
    assert len(encoded) == magnitudes.numel() // 2 + 2 * len(magnitudes)
    expected = torch.tensor([8.0, -4.0, 2.0, 0.125, 0.0, 0.0, 0.125, 1.0]).repeat(2, 16)
    # 2.9 / 8 lies between 2⁻¹ and 2⁻², nearer to the former on a logarithmic scale.
    expected[expected == 2.0] = 4.0
    torch.testing.assert_close(packing.from_float_codes(encoded, magnitudes.shape), expected)


def test_chunks_are_tiles_and_can_be_put_together() -> None:
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

    def all_gather(gathered: list[Tensor], tensor: Tensor) -> None:
        for one in gathered:
            one.copy_(tensor)

    monkeypatch.setattr(dist, "all_gather", all_gather)


@pytest.mark.parametrize("mean", [rivals.exact_mean, rivals.mean_in_4_bits, rivals.SparseMean(N, 1.0)])
def test_a_mean_of_equal_tensors_is_that_tensor(twice: None, mean: rivals.Mean) -> None:
    """Up to what codes lose: half a power of two of 4 bits, and the two magnitudes of a whole chunk."""
    tensors = [torch.randn(64, 128), torch.randn(N)]
    for tensor, found in zip(tensors, mean(tensors), strict=True):
        assert found.shape == tensor.shape
        assert (found - tensor).norm() < 0.4 * tensor.norm()


def test_what_a_sparse_mean_does_not_send_is_sent_later(twice: None) -> None:
    """Without decay, what was sent and the error sum up to what was to be sent."""
    mean = rivals.SparseMean(64, decay=1.0)
    gradients = [[torch.randn(64, 128), torch.randn(64)] for _ in range(3)]
    sent = [mean(tensors) for tensors in gradients]
    error = mean._error
    assert error is not None
    total = sum(tensor.sum().item() for tensors in gradients for tensor in tensors)
    assert sum(tensor.sum().item() for tensors in sent for tensor in tensors) + error.sum().item() == pytest.approx(
        total, abs=1e-3
    )


def nesterov(theta: Tensor, changes: list[Tensor], rate: float, momentum: float) -> Tensor:
    """DiLoCo's outer steps, as its paper states them."""
    velocity = torch.zeros_like(theta)
    for change in changes:
        velocity = momentum * velocity + change
        theta = theta - rate * (change + momentum * velocity)
    return theta


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_rounds_are_those_of_diloco(twice: None, rate: float, momentum: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    start = model.weight.detach().clone()
    rounds = rivals.Rounds(model, 2, rivals.exact_mean, rate, momentum)
    for step in range(1, 7):
        with torch.no_grad():
            model.weight.sub_(0.1 * step)
        rounds(step)
    # Steps of 0.1 · (1 + 2), 0.1 · (3 + 4) and 0.1 · (5 + 6).
    expected = nesterov(start, [torch.tensor([[change]]) for change in (0.3, 0.7, 1.1)], rate, momentum)
    torch.testing.assert_close(model.weight.detach(), expected)


def test_demo_moves_by_signs_and_keeps_what_it_did_not_send(twice: None) -> None:
    parameters = [nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64))]
    optimizer = rivals.DeMo(parameters, rate=0.1, k=N, decay=0.5, weight_decay=0.0)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    for parameter, momentum in zip(parameters, optimizer._momenta, strict=True):
        assert parameter.grad is not None
        # All coefficients were sent, in bf16.
        assert momentum.norm() < 2**-7 * parameter.grad.norm()
        moved = -10 * parameter.detach()
        certain = parameter.grad.abs() > 0.1
        torch.testing.assert_close(moved[certain], parameter.grad.sign()[certain])
    few = rivals.DeMo(parameters, rate=0.1, k=1, decay=0.5, weight_decay=0.0)
    few.step()
    for parameter, momentum in zip(parameters, few._momenta, strict=True):
        assert parameter.grad is not None
        assert 0 < (parameter.grad - momentum).norm() < parameter.grad.norm()


def test_arms_are_parsed() -> None:
    one = arms.Arm.parse("local:19.5x+every10+outer0.8")
    assert (one.method, one.message) == ("local", "19.5x")
    assert one.options == {"every": 10, "grow": 0, "outer": 0.8, "delay": 0}
    for those in versus.PLAN:
        for arm in those.arms:
            arms.check(arm)
    for text in ("local:exact", "local:exact+every5+rate2", "diloko:fp32+every5", "demo", "diloco:int4+every5"):
        with pytest.raises(ValueError, match=r"expected .*got "):
            arms.check(text)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(versus, "FILE", tmp_path / "versus.json")
    monkeypatch.setattr(versus, "PICTURE", tmp_path / "versus.png")
    monkeypatch.setattr(loss_per_byte, "FILE", tmp_path / "losses.json")
    return tmp_path


def record(arm: str, seed: int, loss: float, sent: float) -> trainings.Record:
    common = {"model": "text", "seed": seed, "steps": 600, "workers": 2}
    return {**common, "arm": arm, "loss": loss, "bytes_per_step": sent, "sent": sent, "received": sent}


def test_a_budget_has_each_methods_best(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss_per_byte.FILE.write_text(json.dumps([record("allreduce", seed, 1.0 + seed, 1e6) for seed in range(3)]))
    rows = [
        record("allreduce+bf16", 0, 1.0, 5e5),
        record("diloco:fp32+every20", 0, 1.5, 1e6 / 20),
        record("diloco:fp32+every20+outer0.5", 0, 1.2, 1e6 / 20),
        # Chosen at seed 0, whatever the others say.
        record("diloco:fp32+every20+outer0.5", 1, 2.8, 1e6 / 20),
        record("local:ternary+every5", 0, 1.1, 1e6 / 92),
        record("sparseloco:512+every5", 1, 1.0, 1e6 / 92),
        record("alone", 0, 1.16, 0.0),
    ]
    versus.FILE.write_text(json.dumps(rows))
    monkeypatch.setattr(sys, "argv", ["versus.py", "report"])
    versus.main()
    printed = capsys.readouterr().out
    assert "| DiLoCo | +30.0 ± 10.0% (20×, fp32, H = 20) | – | – | – | – |" in printed
    # 92 times fewer bytes are as good as 100 times, but not as 200 times.
    cell = "**+10.0%** (92×, ternary, H = 5)"
    assert f"| local steps, codes | {cell} | {cell} | {cell} | – | – |" in printed
    assert "SparseLoCo" not in printed
    assert "| alone | 0 |  | **1.160** | +16.0% | 1 |" in printed
    assert versus.PICTURE.read_bytes().startswith(b"\x89PNG")


def test_only_what_no_file_has_is_trained(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss_per_byte.FILE.write_text(json.dumps([record("allreduce", 0, 1.0, 1e6)]))
    trained: list[tuple[str, int]] = []

    def train(chosen: Sequence[str], seed: int, steps: int, workers: int) -> Any:
        for arm in chosen:
            trained.append((arm, seed))
            yield {"loss": 1.0, "bytes_per_step": 1.0}

    model = loss_per_byte.MODELS["text"]
    monkeypatch.setitem(loss_per_byte.MODELS, "text", dataclasses.replace(model, train=train))
    wanted = versus.Trainings("text", 2, 600, [0, 1], ["allreduce", "alone"])
    for _ in range(2):
        versus.run([wanted])
    assert trained == [("alone", 0), ("allreduce", 1), ("alone", 1)]
    with pytest.raises(ValueError, match="expected an arm"):
        versus.run([versus.Trainings("text", 2, 600, [0], ["nothing"])])


@pytest.mark.slow
def test_local_methods_train_digits(files: Path) -> None:
    steps, arm = 4, "diloco:fp32+every2+outer1+momentum0"
    whole, local = digits.train_arms(["allreduce", arm], 0, steps, 2)
    assert whole.bytes_per_step == 2 * local.bytes_per_step > 0
    assert 0 < local.loss < 2 * math.log(10)
