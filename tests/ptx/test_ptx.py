"""The kernels' PTX on the CPU in random schedules, and that the emulator still finds planted mistakes."""

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


CASES = [
    "tests/ptx/cases.py",
    "tests/kernels/test_orthogonalize.py::test_hard_inputs",
    "tests/kernels/test_differences.py::test_same_bits_as_the_reference",
]


@pytest.mark.parametrize(("tests", "schedules"), [(CASES, 3), (["tests/ptx/plants.py"], 1)], ids=["cases", "plants"])
def test_emulated(tests: list[str], schedules: int):
    """In a process of its own, in which kernels are compiled and not interpreted."""
    options = ["-m", "not slow", "-p", "no:cacheprovider", "--schedules", str(schedules), "-q", "--tb", "short"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.ptx.plugin", *tests, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
