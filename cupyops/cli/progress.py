"""A progress bar on standard error: only on a terminal, only where tqdm is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """Counts steps in silence."""

    def step(self, label: str) -> None:
        """The next step begins."""

    def print(self, line: str) -> None:
        """A line on standard output; flushed, since a reader may be waiting for it."""
        print(line, flush=True)


class _Bar(Progress):
    def __init__(self, bar: Any) -> None:
        self._bar, self._begun = bar, False

    def step(self, label: str) -> None:
        if self._begun:
            self._bar.update()
        self._begun = True
        self._bar.set_postfix_str(label)

    def print(self, line: str) -> None:
        with self._bar.external_write_mode(file=sys.stdout):
            super().print(line)


@contextmanager
def progress(total: int, title: str) -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield Progress()
        return
    try:
        tqdm: Any = importlib.import_module("tqdm").tqdm
    except ImportError:
        yield Progress()
        return
    with tqdm(total=total, desc=title, file=sys.stderr, leave=False, dynamic_ncols=True) as bar:
        yield _Bar(bar)
