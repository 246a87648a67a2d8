"""The DeepSpeed runner says so if the program never calls ``deepspeed.initialize``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import deepspeed

from powersgd_triton.integrations import deepspeed as adapter
from powersgd_triton.integrations.deepspeed import runner

WITHOUT = {
    "ends": ("import deepspeed", None),
    "raises": ("raise RuntimeError('broken')", RuntimeError),
    "exits": ("import sys; sys.exit(3)", SystemExit),
}
WITH = {
    "import deepspeed": "import deepspeed; deepspeed.initialize(model=1)",
    "from deepspeed": "from deepspeed import initialize; initialize(model=1)",
    "the adapter": "from powersgd_triton.integrations import deepspeed; deepspeed.initialize(model=1)",
    "from the adapter": "from powersgd_triton.integrations.deepspeed import initialize; initialize(model=1)",
    "fails after it": "import deepspeed; deepspeed.initialize(model=1); raise SystemExit(1)",
}


@pytest.fixture
def initialized(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Models for which the adapter's ``initialize`` was called. What the runner replaces is restored."""
    models: list[Any] = []
    monkeypatch.setattr(adapter, "initialize", lambda *, model: models.append(model))
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("RANK", raising=False)
    return models


def run(program: str, folder: Path) -> None:
    path = folder / "train.py"
    path.write_text(program)
    runner.main([str(path)])


@pytest.mark.parametrize("rank", [None, "0", "1"])
@pytest.mark.parametrize("case", WITHOUT)
def test_worker_0_says_that_nothing_was_compressed(
    case: str,
    rank: str | None,
    initialized: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    program, error = WITHOUT[case]
    if error is None:
        run(program, tmp_path)
    else:
        with pytest.raises(error):
            run(program, tmp_path)
    said = "powersgd: off, nothing was compressed: the program did not call deepspeed.initialize\n"
    assert capsys.readouterr().out == ("" if rank == "1" else said)
    assert initialized == []


@pytest.mark.parametrize("case", WITH)
def test_nothing_is_said_after_initialize(
    case: str, initialized: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        run(WITH[case], tmp_path)
    except SystemExit:
        assert case == "fails after it"
    assert initialized == [1]
    assert capsys.readouterr().out == ""
