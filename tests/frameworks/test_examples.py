"""The complete examples of the guides: each is a file in docs/examples, and prints what its guide says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import DOCS, snippets
from tests.support.programs import output_of

FRAMEWORKS = {"accelerate": 2, "lightning": 2, "ray": 0, "ray_torchft": 0, "transformers": 2, "torchtitan": 4}
"""The number of workers of each framework's example, or 0 if it starts them itself."""
LOSS = re.compile(r"\b\d+\.\d\d+\b(?! kB)")


def shown(example: str, language: str) -> list[str]:
    return snippets(DOCS / "guides" / f"{example.split('_')[0]}.md", language)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_guide_shows_the_example(framework: str):
    assert (DOCS / "examples" / f"train_{framework}.py").read_text(encoding="utf-8") in shown(framework, "python")


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_example_prints_what_the_guide_says(framework: str, tmp_path: Path):
    for name in framework.split("_"):
        pytest.importorskip(name)
    expected = shown(framework, "text")["_" in framework].splitlines()
    done = run_example(framework, tmp_path)
    words = {LOSS.sub("", line) for line in expected}
    printed = [line for line in done.splitlines() if LOSS.sub("", line) in words]
    assert [LOSS.sub("", line) for line in printed] == [LOSS.sub("", line) for line in expected], done
    pairs = set(zip(LOSS.findall("\n".join(expected)), LOSS.findall("\n".join(printed)), strict=True))
    # Losses of another processor differ by rounding, but what the guide shows as equal is equal.
    assert len(pairs) == len({shown for shown, _ in pairs}), done
    assert all(abs(float(a) - float(b)) <= 0.02 + 0.02 * float(a) for a, b in pairs), done


@pytest.mark.slow
def test_torchtitan_with_four_replicas(tmp_path: Path):
    pytest.importorskip("torchtitan")
    losses = [float(line.split()[-1]) for line in run_example("torchtitan", tmp_path, "4", "1").splitlines()[-4:]]
    assert losses[-1] < losses[0] - 1


def run_example(framework: str, folder: Path, *arguments: str) -> str:
    """Return what an example prints."""
    workers = FRAMEWORKS[framework]
    program: list[str | Path] = [DOCS / "examples" / f"train_{framework}.py", *arguments]
    if not workers:
        # Ray writes a token into the home folder, and reports its use.
        return output_of(*program, cwd=folder, HOME=str(folder), RAY_USAGE_STATS_ENABLED="0")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    return output_of(*launcher, *program, cwd=folder)
