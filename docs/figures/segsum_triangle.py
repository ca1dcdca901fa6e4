"""Draw which products m[i, j] reach grad_input[k]; writes segsum_triangle.svg beside this file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

T, K = 8, 3
CELL, LEFT, TOP = 44, 74, 64
WIDTH, HEIGHT = LEFT + T * CELL + 250, TOP + T * CELL + 28

# Cells bring their own background; labels outside them are a grey that shows on light and on dark.
LABEL = "#808080"
REACHES = ("#f2b705", "#000000")  # fill, text
BELOW = ("#a9cbe8", "#000000")
UNUSED = ("#d9d9d9", "#5f5f5f")


def centre(index: float) -> float:
    return (index + 0.5) * CELL


def text(x: float, y: float, content: str, fill: str = LABEL, **more: str) -> str:
    attributes = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}"{attributes}>{content}</text>'


def cell(i: int, j: int) -> Iterator[str]:
    if j < i:
        (fill, ink), content = (REACHES if i >= K and j < K else BELOW), f"{i},{j}"
    else:
        (fill, ink), content = UNUSED, "1" if j == i else "0"
    x, y = LEFT + j * CELL, TOP + i * CELL
    yield f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" fill="{fill}"/>'
    middle = text(x + CELL / 2, y + CELL / 2 + 5, content, ink, text_anchor="middle")
    yield middle


def legend() -> Iterator[str]:
    entries = (
        (REACHES[0], f"reaches grad_input[{K}]: i ≥ {K}, j &lt; {K}"),
        (BELOW[0], "belongs to other positions"),
        (UNUSED[0], "constant 1 or 0, never used"),
    )
    x = LEFT + T * CELL + 22
    for number, (fill, content) in enumerate(entries):
        y = TOP + 8 + 30 * number
        yield f'<rect x="{x}" y="{y}" width="16" height="16" fill="{fill}"/>'
        yield text(x + 24, y + 13, content)


def svg() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="14" role="img">',
        f"<title>Entries of m that reach grad_input[{K}], T = {T}</title>",
        text(LEFT + T * CELL / 2, 22, "column j", text_anchor="middle"),
        text(8, TOP + T * CELL / 2 + 5, "row i"),
    ]
    for n in range(T):
        parts.append(text(LEFT + centre(n), TOP - 10, str(n), text_anchor="middle"))
        parts.append(text(LEFT - 14, TOP + centre(n) + 5, str(n), text_anchor="middle"))
    for i in range(T):
        for j in range(T):
            parts += cell(i, j)
    # The outline of the rectangle, whose upper right corner is just left of the diagonal in row k.
    parts.append(
        f'<rect x="{LEFT}" y="{TOP + K * CELL}" width="{K * CELL}" height="{(T - K) * CELL}" '
        'fill="none" stroke="#b3560a" stroke-width="3"/>'
    )
    parts += legend()
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(svg(), encoding="utf-8")
