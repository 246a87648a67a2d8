"""Imports point one way, triton stays in kernels/, no test is imported, and the adapters have one name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "powersgd_triton"
ORDER = ("config", "checkpoint", "layout", "kernels", "ops", "comm", "ranks", "core", "compressor", "integrations")
"""A module imports from its own part of the package and from those before it. What is not listed comes last."""

MODULES = sorted(path for path in [*PACKAGE.rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])


def part(module: str) -> str:
    """The package's file or folder that a module name stands for; "" is the package itself."""
    return [*module.split("."), ""][1]


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


def is_test(module: str) -> bool:
    """Whether pytest collects it, or a name in it."""
    return any(part == "conftest" or part.startswith("test_") for part in module.split("."))


def test_files_were_found():
    names = {module_of(path) for path in MODULES}
    assert {"powersgd_triton.config", "powersgd_triton.ops.reference", "powersgd_triton.integrations.fsdp1"} <= names


def place(module: str) -> int:
    """Of the part that a module belongs to."""
    return ORDER.index(part(module)) if part(module) in ORDER else len(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_imports_point_one_way(path: Path):
    own = module_of(path)
    if part(own) == "__init__":
        return
    for name in imported(path):
        if name == "powersgd_triton" or name.startswith("powersgd_triton."):
            # A name taken from the package itself would import everything.
            below = place(name) < place(own) or place(own) == len(ORDER)
            assert below or part(name) == part(own), f"{own} imports {name}, which is above it"


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_torch_distributed_only_from_comm_on(path: Path):
    uses = any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in imported(path))
    assert not uses or place(module_of(path)) >= ORDER.index("comm")


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_plain_torch_does_not_import_kernels(path: Path):
    own = module_of(path)
    # The choice between the backends, and the backend that launches kernels.
    may = part(own) == "kernels" or own.startswith(("powersgd_triton.ops.triton_", "powersgd_triton.ops.backends"))
    assert may or not any(name.startswith("powersgd_triton.kernels") for name in imported(path))


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_triton_only_in_kernels(path: Path):
    uses = any(name == "triton" or name.startswith("triton.") for name in imported(path))
    assert not uses or part(module_of(path)) == "kernels"


def test_no_test_is_imported():
    """What tests share lies in tests/support/."""
    files = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    found = {module_of(path): sorted(filter(is_test, imported(path))) for path in files}
    assert {"tests.support.checks", "tests.project.test_imports"} <= found.keys()
    assert not {importer: names for importer, names in found.items() if names}


def test_benchmarks_do_not_import_tests():
    for path in (ROOT / "benchmarks").rglob("*.py"):
        names = {name for name in imported(path) if name.split(".")[0] == "tests"}
        assert not names, f"{path.name} imports {sorted(names)}"


def test_the_checks_can_fail(tmp_path: Path):
    source = tmp_path / "layout.py"
    source.write_text(
        "def f():\n    from powersgd_triton import compressor\n    import triton\n    torch.distributed.barrier()\n"
    )
    assert {"powersgd_triton.compressor", "triton", "torch.distributed"} <= imported(source)
    source.write_text("def f():\n    from tests.ops import test_wire\n")
    assert any(map(is_test, imported(source)))


def test_adapters_have_one_name():
    result = subprocess.run(
        [sys.executable, "-c", "import integrations"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert "powersgd_triton.integrations" in result.stderr


def test_symlink_is_tracked():
    link = PACKAGE / "integrations"
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        ["git", "ls-files", "--stage", "powersgd_triton/integrations"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert listing.startswith("120000 "), f"expected a tracked symlink; got {listing!r}"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "integrations"


def test_the_package_does_not_load_what_only_some_wrappers_need():
    # FSDP alone takes about a second.
    program = (
        "import sys, powersgd_triton; print(*{'torch.distributed.fsdp', 'deepspeed', 'accelerate'} & {*sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
