"""Imports point one way, and wheel and sdist contain the package with its adapters."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import powersgd_triton
from tests.support.programs import ROOT, output_of

PACKAGE = ROOT / "powersgd_triton"
ORDER = (
    *("autoload", "config", "checkpoint", "layout", "kernels", "ops", "comm", "ranks", "core", "schemes", "planning"),
    *("elastic", "handle", "compressor", "integrations"),
)
"""A module imports from its own part of the package and from those before it. What is not listed comes last."""

MODULES = sorted(path for path in [*PACKAGE.rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])


def part(module: str) -> str:
    """The package's file or folder that a module name stands for; "" is the package itself."""
    return [*module.split("."), ""][1]


@functools.cache
def imported(path: Path) -> set[str]:
    """Names of all modules that a file imports anywhere, also names from them, since these may be modules."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: relative import"
            assert node.module is not None
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.update({f"{node.value.id}.{node.attr}"} & {"torch.distributed"})
    return names


def module_of(path: Path) -> str:
    """Name under which a file is imported."""
    path = path.relative_to(ROOT)
    parts = path.with_suffix("").parts
    return ".".join(("powersgd_triton", *parts) if parts[0] == "integrations" else parts)


def place(module: str) -> int:
    """Of the part that a module belongs to."""
    return ORDER.index(part(module)) if part(module) in ORDER else len(ORDER)


def points_up(own: str, name: str) -> bool:
    """A name taken from the package itself would import everything."""
    within = name == "powersgd_triton" or name.startswith("powersgd_triton.")
    below = place(name) < place(own) or place(own) == len(ORDER)
    return within and part(own) not in ("__init__", part(name)) and not below


def is_distributed_below_comm(own: str, name: str) -> bool:
    return f"{name}.".startswith("torch.distributed.") and place(own) < ORDER.index("comm")


def is_kernel_in_plain_torch(own: str, name: str) -> bool:
    # The choice between the backends, and the backend that launches kernels, may.
    may = part(own) == "kernels" or own.startswith(("powersgd_triton.ops.triton_", "powersgd_triton.ops.backends"))
    return not may and name.startswith("powersgd_triton.kernels")


def is_triton_outside_kernels(own: str, name: str) -> bool:
    return f"{name}.".startswith("triton.") and part(own) != "kernels"


@pytest.mark.parametrize(
    "broken", [points_up, is_distributed_below_comm, is_kernel_in_plain_torch, is_triton_outside_kernels]
)
def test_modules_import_what_they_may(broken: Callable[[str, str], bool]):
    assert PACKAGE / "ops" / "reference.py" in MODULES
    pairs = [(module_of(path), name) for path in MODULES for name in sorted(imported(path))]
    assert [(own, name) for own, name in pairs if broken(own, name)] == []


def dependencies() -> dict[str, set[str]]:
    """{module: modules of the package that it imports}, also within a part of the package, lazily, and for types."""
    names = {module_of(path).removesuffix(".__init__") for path in MODULES}
    found: dict[str, set[str]] = {}
    for path in MODULES:
        own = module_of(path).removesuffix(".__init__")
        # A name in a module stands for the module.
        modules = {name if name in names else name.rpartition(".")[0] for name in imported(path)}
        found[own] = (modules & names) - {own, "powersgd_triton"}
    return found


def test_no_module_needs_itself():
    order = graphlib.TopologicalSorter(dependencies())
    assert len([*order.static_order()]) > 100
    broken = {**dependencies(), "powersgd_triton.config": {"powersgd_triton.core.engine"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(broken).prepare()


def test_adapters_use_no_part_of_the_engine():
    """An engine's own methods and attributes, its communicator among them, are what adapters call."""
    part = re.compile(r"\b_?engine\.(buckets|plan|residuals|schedule|step)\.\w+")
    files = [PACKAGE / "compressor.py", *(ROOT / "integrations").rglob("*.py")]
    assert {str(path): found for path in files if (found := part.findall(path.read_text(encoding="utf-8")))} == {}


def test_adapters_have_one_name_and_are_a_tracked_link():
    command = [sys.executable, "-c", "import integrations"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert "powersgd_triton.integrations" in result.stderr
    assert (PACKAGE / "integrations").readlink() == Path("..", "integrations")
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--stage", "powersgd_triton/integrations"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert listing.startswith("120000 "), f"expected a tracked symlink; got {listing!r}"


def test_the_package_does_not_load_what_only_some_wrappers_need():
    # FSDP alone takes about a second.
    heavy = "{'torch.distributed.fsdp', 'deepspeed', 'accelerate'}"
    assert output_of("-c", f"import sys, powersgd_triton; print(*{heavy} & {{*sys.modules}})").strip() == ""


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
    } | {f"powersgd_triton/ops/{name}" for name in ("clones.h", "host.c", "products.c")}
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
