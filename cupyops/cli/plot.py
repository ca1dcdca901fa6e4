"""The rates of a benchmark as bars; the only user of matplotlib, which is imported when needed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from cupyops.cli.errors import CommandError

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = {"cupyops": "#2f6db3", "naive": "#b8bcc2"}


def check(path: str) -> None:
    """Refuse what cannot be drawn before anything is measured."""
    _figure_class()
    if Path(path).suffix.lower() not in SUFFIXES:
        accepted = ", ".join(SUFFIXES)
        raise CommandError(f"cannot draw {path}: expected a name that ends in {accepted}")


def _figure_class() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise CommandError(
            f"--plot needs matplotlib: {error}; the extra 'bench' of cupyops brings it"
        ) from error


def draw(report: dict[str, Any], path: str) -> None:
    """One group of bars for each case, one panel for each operator."""
    operators = list(dict.fromkeys(line["operator"] for line in report["cases"]))
    lines = {o: [c for c in report["cases"] if c["operator"] == o] for o in operators}
    heights = [0.6 + 0.45 * len(lines[operator]) for operator in operators]
    figure = _figure_class()(figsize=(8, sum(heights) + 1.2), layout="constrained")
    axes = figure.subplots(len(operators), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, operator in zip(axes, operators, strict=True):
        _draw_panel(panel, lines[operator])
        panel.set_title(operator, loc="left", fontsize=10, fontweight="bold")
    axes[-1].set_xlabel("GB/s, counting the least bytes that have to be moved (longer is faster)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False)
    figure.suptitle(_title(report), x=0.01, ha="left", fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


def _title(report: dict[str, Any]) -> str:
    device = report["environment"]["device"]
    place = report["backend"] if device is None else f"{report['backend']}, {device['name']}"
    return f"cupyops {report['environment']['cupyops']} on {place}"


def _draw_panel(panel: Any, lines: list[dict[str, Any]]) -> None:
    names = list(lines[0]["contenders"])
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        rates = [line["contenders"][name].get("gb_s") or 0.0 for line in lines]
        places = [place + (index - (len(names) - 1) / 2) * height for place in range(len(lines))]
        bars = panel.barh(places, rates, height, label=name, color=COLOURS.get(name))
        labels = [f"{rate:.3g}" if rate else "no time" for rate in rates]
        panel.bar_label(bars, labels, padding=3, fontsize=8)
    titles = [f"{'x'.join(map(str, line['shape']))} {line['dtype']}" for line in lines]
    panel.set_yticks(range(len(lines)), titles, fontsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.spines[["top", "right"]].set_visible(False)
