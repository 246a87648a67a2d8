"""Python programs that tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.distributed import HUNG

ROOT = Path(__file__).resolve().parents[2]


def output_of(*arguments: str | Path, cwd: Path = ROOT, **variables: str | None) -> str:
    """What a Python process prints that must end well. Environment variables that are None are not set."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
