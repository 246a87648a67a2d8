"""The demo's ways of distributing its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from powersgd_triton.__main__ import main
from powersgd_triton.demo.model import CONTEXT, LAYERS, WIDTH
from powersgd_triton.demo.text import VOCABULARY


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--parallelism", "hsdp", "--workers", "3"], ["hsdp", "2 replicas", "3"]),
        (["--parallelism", "fsdp2", "--arms", "torch"], ["torch's hook", "fsdp2"]),
    ],
)
def test_what_cannot_be_is_explained(
    arguments: list[str], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments, "--device", "cpu", "--output", str(tmp_path / "results")]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts), message
    assert not (tmp_path / "results").exists()


def sent_bytes(rank: int, shards: int) -> int:
    """By the formula in the README."""
    matrices = [(VOCABULARY, WIDTH), (CONTEXT, WIDTH), (VOCABULARY, WIDTH)]
    matrices += LAYERS * [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    vectors = [WIDTH, WIDTH, *LAYERS * [WIDTH, WIDTH, WIDTH, WIDTH, 3 * WIDTH, WIDTH, 4 * WIDTH, WIDTH]]
    total = sum(vectors) // shards
    for n, m in matrices:
        k = n // shards
        total += min((k + m) * rank if 2 * (k + m) * rank < k * m else k * m, k * m)
    return 4 * total


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "workers"), [("fsdp1", 2), ("fsdp2", 2), ("hsdp", 4)])
def test_bytes_are_those_of_the_formula(parallelism: str, workers: int, tmp_path: Path) -> None:
    arguments = ["--steps", "3", "--workers", str(workers), "--arms", "allreduce", "ours:4", "--device", "cpu"]
    assert main(["demo", "--parallelism", parallelism, *arguments, "--output", str(tmp_path)]) == 0
    exact, ours = json.loads((tmp_path / "results.json").read_text())["arms"]
    shards = 2 if parallelism == "hsdp" else 1
    assert exact["bytes_per_step"] == exact["gradient_bytes"]
    assert ours["bytes_per_step"] == sent_bytes(4, shards)
    assert ours["losses"][-1] < ours["losses"][0]
