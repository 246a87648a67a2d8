"""Wheel and sdist hold the package with its adapters, and work where they are installed."""

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


def build(folder: Path, **variables: str | None) -> tuple[Path, Path]:
    """An sdist and a wheel that is built from it, of a copy of the checkout, so that the checkout stays as it is."""
    source, dist = folder / "source", folder / "dist"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*UNTRACKED))
    output_of("-m", "build", "--no-isolation", "--outdir", dist, cwd=source, PYTHONPATH=None, **variables)
    return next(dist.glob("*.tar.gz")), next(dist.glob("*.whl"))


def test_sdist_and_wheel_hold_the_package_and_nothing_else(tmp_path: Path):
    """Built as without a C compiler, which is slow. The wheel is the package's folder, ready to be imported.

    setup.py finds only folders that are packages, and leaves out the modules of others without a word.
    """
    sdist, wheel = build(tmp_path, CC="false")
    with tarfile.open(sdist) as sources:
        names = {Path(*Path(member.name).parts[1:]).as_posix() for member in sources if member.isfile()}
    expected = {
        name.removeprefix("powersgd_triton/") if "/integrations/" in name else name for name in modules() | DATA
    } | {path.relative_to(ROOT).as_posix() for path in (ROOT / "powersgd_triton/ops").glob("*.[ch]")}
    assert {name for name in names if "/" in name and ".egg-info/" not in name} == expected
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    (info,) = target.glob("*.dist-info")
    assert (info / "top_level.txt").read_text().split() == ["powersgd_triton"]
    assert f"\nVersion: {powersgd_triton.__version__}\n" in (info / "METADATA").read_text()
    paths = [path for path in target.rglob("*") if path.is_file() and info not in path.parents]
    assert {path.relative_to(target).as_posix() for path in paths} == modules() | DATA
    for path in paths:
        assert path.read_bytes() == (ROOT / path.relative_to(target)).read_bytes(), path
    code = "import powersgd_triton.integrations.ddp as ddp; ddp.PowerSGDState(None); print(ddp.__file__)"
    assert Path(output_of("-c", code, cwd=tmp_path, PYTHONPATH=str(target)).strip()).is_relative_to(target)


@pytest.mark.slow
def test_installed_package_runs_its_checks(tmp_path: Path):
    """Of a wheel that pip builds from the sdist."""
    sdist, _ = build(tmp_path, CC="false")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--no-compile")
    target = tmp_path / "installed"
    output_of("-m", "pip", "install", *options, "--target", target, sdist, cwd=tmp_path, PYTHONPATH=None)
    code = """
import importlib, runpy, sys
import powersgd_triton
print(powersgd_triton.__file__)
for name in ("ddp", "fsdp1", "fsdp2", "optimizer"):
    print(importlib.import_module(f"powersgd_triton.integrations.{name}").__file__)
try:
    import integrations
except ModuleNotFoundError as error:
    print(error)
sys.argv = ["powersgd_triton", "doctor"]
runpy.run_module("powersgd_triton", run_name="__main__")
"""
    lines = output_of("-c", code, cwd=tmp_path, PYTHONPATH=str(target)).splitlines()
    assert all(Path(file).is_relative_to(target) for file in lines[:5]), lines
    assert lines[5] == "No module named 'integrations'"
    assert "All checks passed" in "\n".join(lines)
    # Without a C compiler, the package is installed without its library.
    (codec,) = [line.split(maxsplit=2)[2] for line in lines if line.startswith("  CPU codec")]
    assert codec == ("compiled" if shutil.which("cc") else "plain torch, slower: no C compiler at installation")
