"""Plain-text tables that can be printed row by row."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    title: str
    width: int
    """At least; a longer cell pushes the rest of its row to the right."""
    right: bool = True
    """Aligned to the right, as numbers are."""


def header(columns: list[Column]) -> str:
    return row(columns, [column.title for column in columns])


def row(columns: list[Column], cells: list[str]) -> str:
    parts = [
        cell.rjust(column.width) if column.right else cell.ljust(column.width)
        for column, cell in zip(columns, cells, strict=True)
    ]
    return "  ".join(parts).rstrip()
