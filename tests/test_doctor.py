"""``python -m powersgd_triton doctor`` finds a sound installation sound and a broken step broken."""

from __future__ import annotations

from collections.abc import Mapping
from unittest import mock

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
    for said in ("3 threads", torch.__version__, "backend 'auto': torch", "All checks passed", "Not checked:"):
        assert said in report
    assert "FAILED" not in report
    assert "fake" not in doctor.distributed_backends()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("3.5.1", "arguments (known versions are 3.6 to 3.9)"),
        ("3.6.0", "without inspection"),
        ("3.9.0+git", "without inspection"),
        ("3.10.0", "launches take longer: Triton inspects arguments (known versions are 3.6 to 3.9)"),
    ],
)
def test_it_says_how_kernels_are_launched(version: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(doctor, "_installed", lambda package: version if package == "triton" else "1")
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
