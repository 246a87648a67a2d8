"""The complete examples of the guides: each is a file in docs/examples, and prints what its guide says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.frameworks.table import TIMEOUT

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
EXAMPLES = ROOT / "docs" / "examples"
FRAMEWORKS = ["accelerate", "lightning", "transformers"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_guide_shows_the_example(framework: str):
    guide = (ROOT / "docs" / "guides" / f"{framework}.md").read_text(encoding="utf-8")
    assert f"```python\n{(EXAMPLES / f'train_{framework}.py').read_text(encoding='utf-8')}```" in guide


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_example_prints_what_the_guide_says(framework: str, tmp_path: Path):
    pytest.importorskip(framework)
    guide = (ROOT / "docs" / "guides" / f"{framework}.md").read_text(encoding="utf-8")
    expected = guide.split("```text\n")[1].split("```")[0].splitlines()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / f"train_{framework}.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if line in expected]
    assert printed == expected, done.stdout
