"""What the README and docs/ say of the project exists: links, files, configuration fields, API names.

Sphinx is not needed: ``make docs`` checks what only Sphinx can.
"""

import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.ddp import PowerSGDState
from tests.support.distributed import on_workers
from tests.support.programs import DOCS, FENCE, PAGES, README, ROOT, name_of, snippets

README_BYTES = 8_000

FOLDERS = ("powersgd_triton", "integrations", "tests", "benchmarks", "docs")
# With the older name of a field, which is no field itself.
FIELDS = {name: given.default for name, given in inspect.signature(PowerSGDConfig).parameters.items()}
# Of DDP's PowerSGDState, which takes every field of the configuration too, and of DeepSpeed's section.
KNOWN = {"Config": {*FIELDS}, "State": {*FIELDS, *inspect.signature(PowerSGDState).parameters} - {"options"}}
SECTION_KEYS = {*FIELDS, "enabled", "parameters", "node_group"} - {"codes"}
ADAPTERS = "ddp fsdp1 fsdp2 deepspeed optimizer local_steps accelerate lightning transformers"
PUBLIC = ["powersgd_triton", *(f"powersgd_triton.integrations.{name}" for name in ADAPTERS.split())]

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w./-]+\.(py|md|sh|json|png|toml|txt)|([\w.-]+/)+")


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def broken_links(page: Path) -> Iterator[str]:
    """Relative links and images of a page whose file does not exist. Sphinx checks their headings."""
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        if not (page.parent / (link.partition("#")[0] or page.name)).is_file():
            yield link


def missing_names(page: Path) -> Iterator[str]:
    """Files, tests, functions and make targets in backticks that do not exist."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for code in CODE.findall(prose(page)):
        if code.startswith("make "):
            exists = code.split()[1] in targets
        elif PATH.fullmatch(code):
            exists = any(path == code or path.endswith(f"/{code}") for path in files())
        elif re.fullmatch(r"test_\w+|\w+_reference", code):
            exists = code in functions()
        else:
            continue
        if not exists:
            yield code
    for name, path in re.findall(r"`(test_\w+)` in `(tests/[\w/]+\.py)`", prose(page)):
        if not re.search(rf"^(def )?{name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE):
            yield f"{name} in {path}"


def unknown_fields(page: Path) -> Iterator[str]:
    """Arguments of configurations in the text, and keys of those in JSON, that do not exist. Python blocks are run."""
    for code in CODE.findall(prose(page)):
        if found := re.match(r"PowerSGD(Config|State)\(\w.*\)$", code):
            call = ast.parse(code, mode="eval").body
            assert isinstance(call, ast.Call)
            yield from {str(keyword.arg) for keyword in call.keywords} - KNOWN[found[1]]
    for code in snippets(page, "json"):
        yield from {*json.loads(code).get("powersgd", {})} - SECTION_KEYS


@functools.cache
def files() -> set[str]:
    """Files and folders of the project, the latter with a slash at the end, relative to its root."""
    found = {path.name for path in ROOT.iterdir() if path.is_file()} | {f"{folder}/" for folder in FOLDERS}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            found.add(path.relative_to(ROOT).as_posix() + ("/" if path.is_dir() else ""))
    # The adapters under the name by which they are imported.
    return found | {f"powersgd_triton/{path}" for path in found if path.startswith("integrations/")}


@functools.cache
def functions() -> set[str]:
    """Names of all tests, and of the functions that specify the operations."""
    sources = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "powersgd_triton" / "ops").glob("*.py")]
    return {name for file in sources for name in re.findall(r"^def (\w+)\(", file.read_text("utf-8"), re.MULTILINE)}


def exported(module: str) -> list[str]:
    """The module's ``__all__``, also where the framework that it is for is not installed."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    (listed,) = re.findall(r"^__all__ = (\[.*?\])", Path(spec.origin).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    names: list[str] = ast.literal_eval(listed)
    return names


def rows(page: Path, heading: str) -> list[list[str]]:
    """Cells of the table whose first heading is given."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    cells: list[list[str]] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip().strip("|").split(" | ")])
    return cells


@pytest.mark.parametrize("check", [broken_links, missing_names, unknown_fields])
def test_pages_name_what_exists(check: Callable[[Path], Iterator[str]]):
    assert len(PAGES) > 20
    assert len(README.read_bytes()) <= README_BYTES
    assert {name_of(page): found for page in PAGES if (found := list(check(page)))} == {}


def test_every_field_is_documented_with_its_default():
    table = {cells[0]: cells for cells in rows(DOCS / "configuration.md", "`PowerSGDConfig`")}
    assert {name.strip("`") for name in table} == FIELDS.keys()
    for name, default in FIELDS.items():
        said = table[f"`{name}`"][2]
        if isinstance(default, bool):
            assert said.split()[0] == ("on" if default else "off"), name
        elif default is not None:
            assert said.split()[0] == (f'`"{default}"`' if isinstance(default, str) else f"{default:g}"), name


@on_workers(2)
def test_the_first_lines_of_the_readme_run(worker: int, world_size: int) -> None:
    """In the process group of this test, in place of one that torchrun would make."""
    makes_group, said = "torch.distributed.init_process_group()", io.StringIO()
    program = snippets(README, "python")[0]
    assert makes_group in program
    with contextlib.redirect_stdout(said):
        exec(program.replace(makes_group, ""), {})
    assert worker != 0 or re.search(r"powersgd: on, .* \(\d+.*x fewer\)", said.getvalue())


def test_the_reference_has_what_is_public():
    """Sphinx looks for the names that it has."""
    listed = re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE)
    for module in PUBLIC:
        missing = [name for name in exported(module) if f"{module}.{name}" not in listed]
        assert not missing, f"docs/api.md lacks {missing} of {module}"
