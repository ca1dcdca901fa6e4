"""Pictures of a benchmark report: ratios by operator, and rates beside the measured floor.

python tests/bench/plot.py results.json pictures/cpu.png
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this checkout, whatever is installed
    ROOT = Path(__file__).resolve().parents[2]
    sys.path[:1] = [str(ROOT), str(ROOT / "tests")]

from bench.peers import FLOOR, OURS
from cupyops.cli.errors import CommandError
from cupyops.cli.plot import check

__all__ = ["check", "draw"]

COLOURS = {
    "naive": "#8c8c8c",
    "torch": "#d1603d",
    "autograd": "#e8a87c",
    "compile": "#7b3f61",
    "jax": "#3a7d44",
    "numba": "#c9a227",
    "numba2": "#857012",
    "float16": "#7fb3d5",
    "bfloat16": "#48c9b0",
    "float32": "#2f6db3",
    "float64": "#1b2a49",
}
INCHES = {"bar": 0.105, "group": 0.14, "panel": 0.75, "width": 5.4}
"""Of a bar, the gap between two cases, what a panel needs besides, and a panel's width."""


def draw(report: dict[str, Any], path: str) -> list[Path]:
    """Write all pictures; `path` with what they show in front of its suffix."""
    found = []
    for operator in dict.fromkeys(line["operator"] for line in report["cases"]):
        lines = [line for line in report["cases"] if line["operator"] == operator]
        for with_out in (False, True):
            chosen = [line for line in lines if line["with_out"] is with_out and line["ratios"]]
            if chosen:
                name = f"ratios-{operator}{'-out' if with_out else ''}"
                found.append(_save(_ratios(report, operator, chosen), path, name))
    floor = [line for line in report["cases"] if line["floor_over_ours"] is not None]
    if floor:
        found.append(_save(_rates(report, floor), path, "floor"))
    return found


def _save(figure: Any, path: str, name: str) -> Path:
    target = Path(path)
    target = target.with_name(f"{target.stem}-{name}{target.suffix}")
    try:
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise CommandError(f"cannot write {target}: {error.strerror}") from error
    return target


def _figure(panels: int, bars: int, groups: int, title: str) -> tuple[Any, list[Any]]:
    """Panels in two columns, each with room for so many bars in so many groups."""
    columns = min(2, panels)
    rows = -(-panels // columns)
    height = INCHES["panel"] + bars * INCHES["bar"] + groups * INCHES["group"]
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(INCHES["width"] * columns, height * rows + 0.9), layout="constrained"
    )
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel().tolist()
    for panel in axes[panels:]:
        panel.set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure, axes[:panels]


def _where(report: dict[str, Any]) -> str:
    found = report["environment"]
    return f"cupyops {found['cupyops']}, {found['cpu']}, {found['threads']} threads"


def _finish(figure: Any, panels: list[Any], label: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for panel in panels:
        panel.set_xscale("log")
        panel.invert_yaxis()
        panel.spines[["top", "right"]].set_visible(False)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.tick_params(labelsize=8, labelbottom=True)
        panel.grid(axis="x", which="major", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    figure.supxlabel(label, fontsize=9)
    found: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(
        found.values(), found.keys(), loc="outside upper right", ncols=len(found),
        frameon=False, fontsize=8,
    )  # fmt: skip


def _shape(line: dict[str, Any]) -> str:
    return "x".join(map(str, line["shape"]))


def _ratios(report: dict[str, Any], operator: str, lines: list[dict[str, Any]]) -> Any:
    """A panel for each dtype, a group of bars for each shape; bars begin at 1."""
    dtypes = list(dict.fromkeys(line["dtype"] for line in lines))
    peers = [name for name in report["peers"] if any(name in line["ratios"] for line in lines)]
    by_dtype = {d: [line for line in lines if line["dtype"] == d] for d in dtypes}
    most = max(map(len, by_dtype.values()))
    how = "out=" if lines[0]["with_out"] else "new arrays"
    title = f"{operator}, results into {how}\n{_where(report)}"
    figure, panels = _figure(len(dtypes), most * len(peers), most, title)
    step = len(peers) + 1.4
    for panel, dtype in zip(panels, dtypes, strict=True):
        for index, name in enumerate(peers):
            chosen = [(i, one["ratios"].get(name)) for i, one in enumerate(by_dtype[dtype])]
            places = [i * step + index for i, ratio in chosen if ratio]
            ratios = [ratio for _, ratio in chosen if ratio]
            # On a logarithmic axis a bar from 1 to the ratio has length log(ratio).
            widths = [ratio - 1 for ratio in ratios]
            bars = panel.barh(
                places, widths, 0.95, left=1, label=report["peers"][name]["title"],
                color=COLOURS.get(name),
            )  # fmt: skip
            for bar, ratio in zip(bars, ratios, strict=True):
                panel.annotate(
                    f"{ratio:.2g}", (ratio, bar.get_y() + 0.475), (3 if ratio >= 1 else -3, 0),
                    textcoords="offset points", va="center_baseline",
                    ha="left" if ratio >= 1 else "right", fontsize=5.5,
                )  # fmt: skip
        panel.axvline(1, color="black", linewidth=0.9)
        ticks = [i * step + (len(peers) - 1) / 2 for i in range(len(by_dtype[dtype]))]
        panel.set_yticks(ticks, [_shape(line) for line in by_dtype[dtype]])
        panel.set_title(dtype, loc="left", fontsize=10, fontweight="bold")
        panel.margins(x=0.16, y=0.02)
    _finish(figure, panels, "time of cupyops / time of the other (left of 1: cupyops is faster)")
    return figure


def _rates(report: dict[str, Any], lines: list[dict[str, Any]]) -> Any:
    """A panel for each operator, bars of our rate, and where the floor lies as a tick above."""
    operators = list(dict.fromkeys(line["operator"] for line in lines))
    dtypes = list(dict.fromkeys(line["dtype"] for line in lines))
    shapes = {
        o: list(dict.fromkeys(_shape(line) for line in lines if line["operator"] == o))
        for o in operators
    }
    most = max(map(len, shapes.values()))
    title = f"Rates beside the measured floor, results into out=\n{_where(report)}"
    figure, panels = _figure(len(operators), most * len(dtypes), most, title)
    step = len(dtypes) + 1.4
    for panel, operator in zip(panels, operators, strict=True):
        for index, dtype in enumerate(dtypes):
            chosen = [ln for ln in lines if ln["operator"] == operator and ln["dtype"] == dtype]
            places = [shapes[operator].index(_shape(line)) * step + index for line in chosen]
            rates = [line["contenders"][OURS]["gb_s"] for line in chosen]
            floors = [line["contenders"][FLOOR]["gb_s"] for line in chosen]
            panel.barh(places, rates, 0.9, left=0, label=dtype, color=COLOURS[dtype])
            for place, low, high in zip(places, rates, floors, strict=True):
                panel.plot([low, high], [place, place], color="#bbbbbb", linewidth=0.7, zorder=0)
                share = f"{low / high:.0%}"
                panel.annotate(
                    share, (max(low, high), place), (5, 0), textcoords="offset points",
                    va="center_baseline", fontsize=5.5,
                )  # fmt: skip
            panel.plot(
                floors, places, "|", color="#c0392b", markersize=7, markeredgewidth=1.4,
                label="floor" if index == len(dtypes) - 1 else "_",
            )  # fmt: skip
        ticks = [i * step + (len(dtypes) - 1) / 2 for i in range(len(shapes[operator]))]
        panel.set_yticks(ticks, shapes[operator])
        panel.set_title(operator, loc="left", fontsize=10, fontweight="bold")
        panel.margins(x=0.12, y=0.02)
    label = "GB/s, counting the least bytes; beside the tick: share of the floor that is reached"
    _finish(figure, panels, label)
    low = min(line["contenders"][OURS]["gb_s"] for line in lines)
    panels[0].set_xlim(left=low / 2)
    return figure


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python tests/bench/plot.py RESULTS.json PICTURE.png", file=sys.stderr)
        return 2
    try:
        check(argv[1])
        for path in draw(json.loads(Path(argv[0]).read_text(encoding="utf-8")), argv[1]):
            print(f"drawn: {path}")
    except (CommandError, OSError, ValueError) as error:
        print(f"plot.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
