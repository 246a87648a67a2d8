"""Imports point one way, triton stays in kernels/, and the adapters have one name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "powersgd_triton"
# A module may import from those of a lower level, and from its own folder. What is not listed is at the top.
LEVELS = {"config": 0, "layout": 0, "loss_scale": 0, "saved_state": 0, "carried": 0, "wire_format": 0, "checkpoint": 0}
LEVELS |= {"kernels": 1, "planner": 1, "ops": 2, "rank_report": 2, "rank_plan": 3, "state": 4, "communication": 5}
LEVELS |= {"agreement": 6, "exchange": 6, "replanner": 6, "compressor": 7, "reducer": 8, "integrations": 9}
TOP = 10
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


def test_files_were_found():
    names = {module_of(path) for path in MODULES}
    assert {"powersgd_triton.config", "powersgd_triton.ops.reference", "powersgd_triton.integrations.ddp"} <= names


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_imports_point_one_way(path: Path):
    own = part(module_of(path))
    if own == "__init__":
        return
    for name in imported(path):
        if not (name == "powersgd_triton" or name.startswith("powersgd_triton.")):
            continue
        other = part(name)
        if own in LEVELS and other not in LEVELS:
            # A name taken from the package itself would import everything.
            pytest.fail(f"{module_of(path)} imports {name}, which is above it")
        ok = other == own or LEVELS.get(other, TOP) <= LEVELS.get(own, TOP)
        same_level = other != own and other in LEVELS and LEVELS[other] == LEVELS.get(own)
        assert ok, f"{module_of(path)} imports {name}, which is above it"
        sibling = own == "layout" and other in ("config", "wire_format")
        assert not same_level or sibling, f"{module_of(path)} imports its sibling {name}"


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_torch_distributed_only_from_communication_on(path: Path):
    own = part(module_of(path))
    uses = any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in imported(path))
    assert not uses or LEVELS.get(own, TOP) >= LEVELS["communication"]


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_triton_only_in_kernels(path: Path):
    uses = any(name == "triton" or name.startswith("triton.") for name in imported(path))
    assert not uses or part(module_of(path)) == "kernels"


def test_the_checks_can_fail(tmp_path: Path):
    source = tmp_path / "layout.py"
    source.write_text(
        "def f():\n    from powersgd_triton import state\n    import triton\n    torch.distributed.barrier()\n"
    )
    assert {"powersgd_triton.state", "triton", "torch.distributed"} <= imported(source)


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
