"""The kernels' PTX on the CPU in random schedules, and that the emulator still finds planted mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ptx.decode import COMPILER

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler"),
    pytest.mark.skipif(torch.version.hip is not None, reason="Triton for ROCm compiles no PTX"),
]


@pytest.mark.parametrize(("file", "schedules"), [("cases", 3), ("plants", 1)])
def test_emulated(file: str, schedules: int):
    """In a process of its own, in which kernels are compiled and not interpreted."""
    options = ["-m", "not slow", "-p", "no:cacheprovider", "--schedules", str(schedules), "-q", "--tb", "short"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.ptx.plugin", f"tests/ptx/{file}.py", *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
