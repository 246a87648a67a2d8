"""The wheel holds the package with its adapters, and works when installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "powersgd_triton"
SOURCES = ("pyproject.toml", "LICENSE", "README.md", "powersgd_triton", "integrations")


def call(*arguments: str | Path, cwd: Path, **variables: str) -> str:
    """Output of a Python process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("packaging")
    source, dist = folder / "source", folder / "dist"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    call("-m", "build", "--wheel", "--no-isolation", "--outdir", dist, cwd=source)
    (built,) = dist.iterdir()
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def modules() -> set[str]:
    """All modules of the package, the adapters where they are imported from."""
    # rglob does not follow the link to the adapters.
    files = {path.relative_to(ROOT) for path in PACKAGE.rglob("*.py")}
    files |= {path.relative_to(ROOT) for path in (PACKAGE / "integrations").glob("**/*.py")}
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


def test_wheel_holds_every_module(names: set[str]) -> None:
    assert {"powersgd_triton/config.py", "powersgd_triton/integrations/ddp/__init__.py"} <= modules()
    assert {name for name in names if name.endswith(".py")} == modules()


def test_every_folder_with_modules_is_a_package(names: set[str]) -> None:
    for module in modules():
        assert f"{Path(module).parent.as_posix()}/__init__.py" in names


def test_wheel_is_typed(names: set[str]) -> None:
    assert "powersgd_triton/py.typed" in names


def test_wheel_holds_the_demos_configuration(names: set[str]) -> None:
    assert "powersgd_triton/demo/ds_config.json" in names


def test_wheel_has_nothing_beside_the_package(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"powersgd_triton"}


def test_installed_adapter_is_imported(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    elsewhere.mkdir()
    call("-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=elsewhere)
    code = "import powersgd_triton.integrations.ddp as ddp; ddp.PowerSGDState(None); print(ddp.__file__)"
    printed = call("-c", code, cwd=elsewhere, PYTHONPATH=str(target), OMP_NUM_THREADS="1")
    imported = Path(printed.splitlines()[-1])
    assert imported == target / "powersgd_triton" / "integrations" / "ddp" / "__init__.py"
    assert not imported.is_symlink()
