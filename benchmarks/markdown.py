"""Markdown that the programs print."""

from collections.abc import Iterable, Sequence


def markdown_table(lines: Iterable[Sequence[str]]) -> str:
    """Return a table. The second line has the sides of the columns, such as "---" and "--:"."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
