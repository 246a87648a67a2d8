"""The complete examples of the guides: each is a file in docs/examples, and prints what its guide says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import ROOT, output_of

EXAMPLES = ROOT / "docs" / "examples"
FRAMEWORKS = {"accelerate": 2, "lightning": 2, "transformers": 2, "torchtitan": 4}
"""The number of workers of each framework's example."""


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
    done = run_example(framework, tmp_path)
    printed = [line for line in done.splitlines() if line in expected]
    assert printed == expected, done


@pytest.mark.slow
def test_torchtitan_with_four_replicas(tmp_path: Path):
    pytest.importorskip("torchtitan")
    losses = [float(line.split()[-1]) for line in run_example("torchtitan", tmp_path, "4", "1").splitlines()[-4:]]
    assert losses[-1] < losses[0] - 1


def run_example(framework: str, folder: Path, *arguments: str) -> str:
    """Return what an example prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(FRAMEWORKS[framework])]
    return output_of(*launcher, EXAMPLES / f"train_{framework}.py", *arguments, cwd=folder)
