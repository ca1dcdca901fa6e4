"""Write ``executor_life_cycle.svg``: the states of an executor of the aclnn layer.

python docs/figures/executor_life_cycle.py
"""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 808, 356
BOX_WIDTH, BOX_HEIGHT = 158, 62
# The card makes the picture legible on a page of any colour.
CARD, INK, LIVE, ENDED = "#f8f8f6", "#24292f", "#d3e5f7", "#dedede"
DESCRIPTION = (
    "GetWorkspaceSize makes an executor that is ready for one run. A run that has begun makes it "
    "used. aclSetAclOpExecutorRepeatable makes it repeatable: it may run any number of times, "
    "until aclDestroyAclOpExecutor. Destroying a ready one is allowed too. A refused call changes "
    "no state. In the states used and destroyed every call returns 161002."
)
STYLE = (
    "text{font-family:sans-serif;font-size:14px;fill:#24292f;text-anchor:middle}"
    ".name{font-weight:bold}.call{font-family:monospace;font-size:12.5px}"
    ".note{font-size:12.5px}.edge{fill:none;stroke:#24292f;stroke-width:1.4}"
)

START, READY, REPEATABLE = (14, 60), (262, 60), (262, 214)
USED, DESTROYED = (636, 60), (636, 214)


def box(place: tuple[int, int], name: str, meaning: str, fill: str, corner: int = 6) -> list[str]:
    x, y = place
    middle = x + BOX_WIDTH // 2
    return [
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="{corner}" '
        f'fill="{fill}" stroke="{INK}"/>',
        text(middle, y + 26, name, "name"),
        text(middle, y + 46, meaning, "note"),
    ]


def text(x: int, y: int, words: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{words}</text>'


def edge(path: str) -> str:
    return f'<path class="edge" d="{path}" marker-end="url(#head)"/>'


def on_card(x: int, y: int, words: str, kind: str = "call") -> list[str]:
    """A label written across its edge."""
    width = 8 * len(words)
    ground = f'<rect x="{x - width // 2}" y="{y - 13}" width="{width}" height="18" fill="{CARD}"/>'
    return [ground, text(x, y, words, kind)]


def picture() -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-labelledby="title desc">',
        '<title id="title">The life of an executor</title>',
        f'<desc id="desc">{DESCRIPTION}</desc>',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8Z" fill="{INK}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{CARD}"/>',
        # Phase one.
        edge("M172 91H260"),
        text(215, 82, "success", "note"),
        edge("M93 122V226"),
        *on_card(93, 180, "failure", "note"),
        text(93, 246, "(status, 0, None)", "call"),
        text(93, 266, "no executor", "note"),
        # Phase two, once.
        edge("M420 91H634"),
        text(527, 82, "aclnn&lt;Operator&gt;(...)", "call"),
        text(527, 109, "has begun to run", "note"),
        # Phase two, repeatedly.
        edge("M341 122V212"),
        *on_card(341, 172, "aclSetAclOpExecutorRepeatable"),
        edge("M312 276C306 318 376 318 370 278"),
        text(341, 324, "aclnn&lt;Operator&gt;(...)", "call"),
        text(341, 342, "any number of times", "note"),
        # The end.
        edge("M420 245H634"),
        text(527, 264, "aclDestroyAclOpExecutor", "call"),
        edge("M420 114L634 218"),
        *on_card(556, 176, "aclDestroyAclOpExecutor"),
        *box(START, "phase one", "...GetWorkspaceSize", "#ffffff", BOX_HEIGHT // 2),
        *box(READY, "ready", "may run once", LIVE),
        *box(REPEATABLE, "repeatable", "may run again", LIVE),
        *box(USED, "used", "holds no tensor", ENDED),
        *box(DESTROYED, "destroyed", "holds no tensor", ENDED),
        text(715, 144, "every call: 161002", "note"),
        text(715, 298, "every call: 161002", "note"),
        text(
            400, 30, "A call that is refused (161001, 161002) leaves every state as it is.", "note"
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    target = Path(__file__).with_suffix(".svg")
    target.write_text(picture(), encoding="utf-8", newline="\n")
