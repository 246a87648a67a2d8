"""The pages of the documentation and their code blocks."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.programs import ROOT

DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.relative_to(DOCS).parts)]
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def snippets(page: Path, language: str) -> list[str]:
    """The page's code blocks in a language."""
    return [code for found, code in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]
