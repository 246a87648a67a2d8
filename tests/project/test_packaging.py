"""Wheel and sdist hold the package with its adapters, and work where they are installed."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

import powersgd_triton
from tests.support.programs import ROOT, output_of

PACKAGE = ROOT / "powersgd_triton"
ADAPTERS = PACKAGE / "integrations"
DATA = {"powersgd_triton/py.typed", "powersgd_triton/demo/ds_config.json"}
# What a checkout may hold beside the tracked files.
UNTRACKED = (".*", "__pycache__", "build", "demo-results", "dist", "*.egg-info", "*.so")


def modules() -> set[str]:
    """Files of all modules, with the adapters at the place from which they are imported."""
    # rglob does not follow a link that it meets on its way; it does follow the one that it begins with.
    files = {path for folder in (PACKAGE, ADAPTERS) for path in folder.rglob("*.py")}
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel and sdist, built from a copy of the checkout, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("packaging")
    source, dist = folder / "source", folder / "dist"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*UNTRACKED))
    output_of("-m", "build", "--wheel", "--sdist", "--no-isolation", "--outdir", dist, cwd=source, PYTHONPATH=None)
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module")
def targets(distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders into which wheel and sdist are installed; pip builds a second wheel from the sdist."""
    folder = tmp_path_factory.mktemp("installed")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--no-compile")
    for kind, path in distributions.items():
        output_of("-m", "pip", "install", *options, "--target", folder / kind, path, cwd=folder, PYTHONPATH=None)
    return {kind: folder / kind for kind in distributions}


def files(folder: Path) -> dict[str, bytes]:
    """What is below a folder, without what pip writes about the installation, and without what a compiler has built."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.parent.name.endswith(".dist-info")]
    paths = [path for path in paths if path.suffix != ".so"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_every_folder_with_modules_is_a_package():
    # setup.py finds no others, and leaves out their modules without a word.
    assert {"powersgd_triton/config.py", "powersgd_triton/integrations/optimizer.py"} <= modules()
    for module in modules():
        assert (ROOT / module).with_name("__init__.py").is_file(), module


def test_wheel_and_sdist_install_the_package(targets: dict[str, Path]):
    for target in targets.values():
        installed = files(target)
        assert {name for name in installed if "/licenses/" not in name} == modules() | DATA
        for name in modules() | DATA:
            assert installed[name] == (ROOT / name).read_bytes(), name
        assert not [path for path in target.rglob("*") if path.is_symlink()]
    assert files(targets["sdist"]) == files(targets["wheel"])


def test_distributions_hold_nothing_else(distributions: dict[str, Path], targets: dict[str, Path]):
    wheel, sdist = (next(folder.glob("*.dist-info/METADATA")).read_text() for folder in targets.values())
    assert wheel == sdist
    assert f"\nVersion: {powersgd_triton.__version__}\n" in wheel
    with zipfile.ZipFile(distributions["wheel"]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/top_level.txt")]
        assert archive.read(name).decode().split() == ["powersgd_triton"]
    with tarfile.open(distributions["sdist"]) as sources:
        names = {Path(*Path(member.name).parts[1:]).as_posix() for member in sources if member.isfile()}
    expected = {
        name.removeprefix("powersgd_triton/") if "/integrations/" in name else name for name in modules() | DATA
    } | {f"powersgd_triton/ops/{name}" for name in ("clones.h", "host.c", "panels.c", "products.c", "products.h")}
    assert {name for name in names if "/" in name and ".egg-info/" not in name} == expected


@pytest.mark.slow
def test_installed_package_runs_its_checks(targets: dict[str, Path], tmp_path: Path):
    """The wheel's, which has the same files as the sdist's."""
    code = """
import importlib, runpy, sys
import powersgd_triton
print(powersgd_triton.__file__)
for name in ("ddp", "fsdp1", "fsdp2", "optimizer"):
    print(importlib.import_module(f"powersgd_triton.integrations.{name}").__file__)
powersgd_triton.integrations.ddp.PowerSGDState(None)
try:
    import integrations
except ModuleNotFoundError as error:
    print(error)
sys.argv = ["powersgd_triton", "doctor"]
runpy.run_module("powersgd_triton", run_name="__main__")
"""
    lines = output_of("-c", code, cwd=tmp_path, PYTHONPATH=str(targets["wheel"])).splitlines()
    assert all(Path(file).is_relative_to(targets["wheel"]) for file in lines[:5]), lines
    assert lines[5] == "No module named 'integrations'"
    assert "All checks passed" in "\n".join(lines)
    # Without a C compiler, the package is installed without its library.
    (codec,) = [line.split(maxsplit=2)[2] for line in lines if line.startswith("  CPU codec")]
    assert codec == ("compiled" if shutil.which("cc") else "plain torch, slower: no C compiler at installation")
