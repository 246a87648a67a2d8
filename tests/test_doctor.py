"""``python -m powersgd_triton doctor`` finds a sound installation sound and a broken step broken."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from powersgd_triton import doctor
from powersgd_triton.__main__ import main
from powersgd_triton.ops.torch_backend import TorchBackend


def test_sound_installation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    assert "3 threads" in report
    assert torch.__version__ in report
    assert "backend 'auto': torch" in report
    assert "FAILED" not in report
    assert "All checks passed" in report
    assert "Not checked:" in report
    assert "fake" not in doctor.distributed_backends()


def test_wrong_arithmetic_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = TorchBackend.reconstruct

    def scaled(self: TorchBackend, out: Mapping[str, Tensor], overflow: Tensor | None) -> None:
        right(self, out, overflow)
        out["weight"].mul_(1.01)

    monkeypatch.setattr(TorchBackend, "reconstruct", scaled)
    assert main(["doctor"]) != 0
    assert "FAILED" in capsys.readouterr().out


def test_an_exception_is_a_failed_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(TorchBackend, "backproject", broken)
    assert doctor.run(argparse.Namespace()) == 1
    assert "no such instruction" in capsys.readouterr().out
