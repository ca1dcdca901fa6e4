"""The code of a Markdown page: what its fences say, and how they are run.

``python`` fences run from top to bottom in one namespace per page; ``pycon`` fences are doctests
in the same namespace. A fence after the line ``<!-- gpu -->`` needs a GPU: it is compiled
everywhere and runs only where that is asked for. Other languages are not run.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(
    r"^(?P<gpu><!-- gpu -->\n\n?)?```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Fence(NamedTuple):
    language: str
    code: str
    line: int
    """Of the first line of the code, counted from 0."""
    gpu: bool


def fences(page: Path) -> list[Fence]:
    """The Python of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Fence(
            found["language"],
            found["code"],
            text.count("\n", 0, found.start("code")),
            found["gpu"] is not None,
        )
        for found in _FENCE.finditer(text)
        if found["language"] in ("python", "pycon")
    ]


def run_page(page: Path, *, gpu: bool = False) -> dict[str, object]:
    """Run the fences of a page, and return the names that they leave."""
    names: dict[str, object] = {"__name__": page.stem}
    for fence in fences(page):
        if fence.language == "python":
            # Blank lines in front, so that a traceback has the line numbers of the page.
            code = compile("\n" * fence.line + fence.code, str(page), "exec")
            if gpu or not fence.gpu:
                exec(code, names)
        elif gpu or not fence.gpu:
            _run_doctest(page, fence, names)
    return names


def _run_doctest(page: Path, fence: Fence, names: dict[str, object]) -> None:
    parser = doctest.DocTestParser()
    test = parser.get_doctest(fence.code, names, page.stem, str(page), fence.line)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    if report:
        raise AssertionError("".join(report))
