"""Imports point one way, triton stays in kernels/, no test is imported, and the adapters have one name."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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


def is_test(module: str) -> bool:
    """Whether pytest collects it, or a name in it."""
    return any(part == "conftest" or part.startswith("test_") for part in module.split("."))


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


def test_no_test_is_imported():
    """What tests share lies in tests/support/."""
    files = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    found = {module_of(path): sorted(filter(is_test, imported(path))) for path in files}
    assert {"tests.support.checks", "tests.project.test_imports"} <= found.keys()
    assert not {importer: names for importer, names in found.items() if names}
    for path in (ROOT / "benchmarks").rglob("*.py"):
        assert not {name for name in imported(path) if name.split(".")[0] == "tests"}, path


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


def test_kernels_name_their_constants():
    """Triton compiles a kernel anew if a constant that it names has changed, not if that of a module has."""
    for path in (PACKAGE / "kernels").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list):
                found = {ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
                assert not {name for name in found if re.search(r"^(?!tl\.).*\.[A-Z_]+$", name)}, (
                    f"{path}: {function.name}"
                )
