"""Python programs that tests run, and the pages of the documentation with their code blocks."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.distributed import HUNG

ROOT = Path(__file__).resolve().parents[2]


def output_of(*arguments: str | Path, cwd: Path = ROOT, **variables: str | None) -> str:
    """What a Python process prints that must end well. Environment variables that are None are not set."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={name: value for name, value in environment.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=HUNG)
    finally:
        # It and what it has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, printed + errors
    return printed


DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.relative_to(DOCS).parts)]
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def snippets(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]
