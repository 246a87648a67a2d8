"""What the README and docs/ say of the project exists: links, files, snippets, configuration fields, API names.

Sphinx is not needed: ``make docs`` checks what only Sphinx can.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from powersgd_triton import PowerSGDConfig
from powersgd_triton.integrations.ddp import PowerSGDState
from tests.support.pages import DOCS, FENCE, PAGES, README, name_of, snippets
from tests.support.programs import ROOT, output_of

README_BYTES = 8_000

FOLDERS = ("powersgd_triton", "integrations", "tests", "benchmarks", "docs")
# With the older name of a field, which is no field itself.
FIELDS = {name: given.default for name, given in inspect.signature(PowerSGDConfig).parameters.items()}
# Of DDP's PowerSGDState, which takes every field of the configuration too, and of DeepSpeed's section.
STATE_ARGUMENTS = {*FIELDS, *inspect.signature(PowerSGDState).parameters} - {"options"}
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


def wrong_imports(page: Path) -> Iterator[str]:
    """Names that a snippet imports from the package and that it lacks. All snippets must be code."""
    for code in snippets(page, "json"):
        json.loads(code)
    for code in snippets(page, "python"):
        compile(code, name_of(page), "exec")
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("powersgd_triton"):
                yield from (alias.name for alias in node.names if not defines(str(node.module), alias.name))


def unknown_fields(page: Path) -> Iterator[str]:
    """Arguments and keys of configurations, in snippets and in the text, that do not exist."""
    known = {"PowerSGDConfig": {*FIELDS}, "from_dict": {*FIELDS}, "PowerSGDState": STATE_ARGUMENTS}
    inline = [code for code in CODE.findall(prose(page)) if re.match(r"PowerSGD(Config|State)\(\w.*\)$", code)]
    for code in [*snippets(page, "python"), *inline]:
        for function, words in calls(code):
            yield from words - known.get(function, words)
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


def calls(code: str) -> Iterator[tuple[str, set[str]]]:
    """(function's last name, its keywords) of a snippet's calls; keys of a dict that is the only argument count."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        words = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        if len(node.args) == 1 and isinstance(node.args[0], ast.Dict):
            words |= {str(key.value) for key in node.args[0].keys if isinstance(key, ast.Constant)}
        yield ast.unparse(node.func).rpartition(".")[2], words


def module_file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def exported(file: Path) -> list[str]:
    """The module's ``__all__``; empty where it has none."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def defines(module: str, name: str) -> bool:
    """Whether a module of this package has a public name, without importing it."""
    file = module_file(module)
    if file is None:
        return False
    body = ast.parse(file.read_text(encoding="utf-8")).body
    own = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    return name in own or name in exported(file) or module_file(f"{module}.{name}") is not None


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


@pytest.mark.parametrize("check", [broken_links, missing_names, wrong_imports, unknown_fields])
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


def test_the_first_lines_of_the_readme_run(tmp_path: Path):
    program = tmp_path / "train.py"
    # Gloo's threads now and then abort Python's shutdown, with plain DDP too.
    program.write_text(snippets(README, "python")[0] + "import os, sys\nsys.stdout.flush()\nos._exit(0)\n")
    said = output_of("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", program)
    assert re.search(r"powersgd: on, .* \(\d+.*x fewer\)", said)


def test_every_page_is_in_the_table_of_contents():
    listed = {
        line.strip()
        for toctree in snippets(DOCS / "index.md", "{toctree}")
        for line in toctree.splitlines()
        if line.strip() and not line.startswith(":")
    }
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES if page != README}
    assert listed | {"index"} == pages


def test_references_have_what_is_public():
    for name, path, _ in rows(DOCS / "architecture.md", "class"):
        source = (ROOT / "powersgd_triton" / path.strip("`")).read_text(encoding="utf-8")
        assert re.search(rf"^class {name.strip('`')}\b", source, re.MULTILINE), f"{path} has no class {name}"
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)", text, re.MULTILINE)
    for name in listed:
        module, _, attribute = name.rpartition(".")
        assert defines(module, attribute), f"there is no {name}"
    for module in PUBLIC:
        file = module_file(module)
        assert file is not None
        missing = [name for name in exported(file) if f"{module}.{name}" not in listed]
        assert not missing, f"docs/api.md lacks {missing} of {module}"
