"""Tables of a benchmark report, as text while it runs and as Markdown."""

from __future__ import annotations

from typing import Any

from bench import environment
from bench.peers import FLOOR, OURS
from cupyops.cli.table import Column

Line = dict[str, Any]
MODES = {False: "new arrays", True: "out="}
NOTES = """\
ratios: time of cupyops / time of the other, below 1 cupyops is faster. floor: time of the floor /
time of cupyops, at most 1 in theory. +-: half of the distance of the quartiles, of the median.
GB/s: of cupyops, counting the least bytes that have to be moved. error: the largest error of a
result against float64, relative to the result's largest value."""


def others(report: Line) -> list[str]:
    """Contenders with a column of ratios."""
    return [name for name in report["peers"] if name not in (OURS, FLOOR)]


def judged(report: Line) -> list[str]:
    """Contenders whose results have errors."""
    return [name for name in report["peers"] if name != FLOOR]


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def ratio_text(value: float | None) -> str:
    """Two digits that count."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def spread(figures: Line) -> float | None:
    if figures["ms"] is None:
        return None
    low, high = figures["ms_quartiles"]
    return float((high - low) / 2 / figures["ms"])


def case_cells(line: Line) -> list[str]:
    return [line["operator"], "x".join(map(str, line["shape"])), line["dtype"]]


def speed_cells(report: Line, line: Line) -> list[str]:
    mine = line["contenders"][OURS]
    off = spread(mine)
    return [
        number(mine["ms"], ".3f"),
        "-" if off is None else f"{off:.0%}",
        *(ratio_text(line["ratios"].get(name)) for name in others(report)),
        ratio_text(line["floor_over_ours"]),
        number(mine.get("gb_s"), ".1f"),
    ]


def error_cells(report: Line, line: Line) -> list[str]:
    return [number(line["contenders"][name]["error"], ".1e") for name in judged(report)]


def speed_titles(report: Line) -> list[str]:
    titles = [report["peers"][name]["title"] for name in others(report)]
    return ["ours ms", "+-", *titles, "floor", "GB/s"]


def error_titles(report: Line) -> list[str]:
    return [report["peers"][name]["title"] for name in judged(report)]


# -- text ---------------------------------------------------------------------------------------

CASE = [Column("operator", 19, False), Column("shape", 12, False), Column("dtype", 8, False)]


def speed_columns(report: Line) -> list[Column]:
    """One row for each case and way of returning results."""
    titles = speed_titles(report)
    return [*CASE, Column("into", 10, False), *(Column(t, max(6, len(t))) for t in titles)]


def error_columns(report: Line) -> list[Column]:
    return [*CASE, *(Column(t, 8) for t in error_titles(report))]


def faults(report: Line, line: Line) -> list[str]:
    """Of contenders that should have had a time."""
    return [
        f"  {report['peers'][name]['title']} is not timed: {figures['fault']}"
        for name, figures in line["contenders"].items()
        if figures["fault"] is not None
    ]


def head(report: Line) -> list[str]:
    lines = environment.as_lines(report["environment"])
    lines += [("rounds", f"{report['rounds']}, medians; contenders take turns")]
    for peer in report["peers"].values():
        absent = f"ABSENT: {peer['absent']}" if peer["absent"] else peer["about"]
        lines.append((peer["title"], absent))
    width = max(len(title) for title, _ in lines)
    return [f"{title:<{width}}  {text}" for title, text in lines]


def judgements(report: Line) -> list[Line]:
    """A line for each case: with and without `out=` the results are the same, or one is missing."""
    found: dict[tuple[str, ...], Line] = {}
    for line in report["cases"]:
        key = tuple(case_cells(line))
        if key not in found:
            found[key] = {**line, "contenders": dict(line["contenders"])}
            continue
        for name, figures in line["contenders"].items():
            if found[key]["contenders"][name]["error"] is None:
                found[key]["contenders"][name] = figures
    return list(found.values())


# -- Markdown -----------------------------------------------------------------------------------


def _table(titles: list[str], rows: list[list[str]], left: int) -> list[str]:
    """Without the columns in which no row has a figure."""
    rules = ["---"] * left + ["---:"] * (len(titles) - left)
    kept = [i for i in range(len(titles)) if any(cells[i] != "-" for cells in rows)]
    lines = (titles, rules, *rows)
    return [f"| {' | '.join(cells[i] for i in kept)} |" for cells in lines]


def markdown(report: Line) -> str:
    """Sections for a page: the environment, the contenders, the tables of each operator."""
    lines = ["| | |", "|---|---|"]
    lines += [
        f"| {title} | {text} |" for title, text in environment.as_lines(report["environment"])
    ]
    lines.append(f"| rounds | {report['rounds']}, medians; contenders take turns |")
    lines.append("")
    for peer in report["peers"].values():
        absent = f"**absent**: {peer['absent']}" if peer["absent"] else peer["about"]
        lines.append(f"* {peer['title']}: {absent}")
    lines += ["", NOTES.replace("ratios:", "Ratios:").replace("+-", "±")]
    for operator in dict.fromkeys(line["operator"] for line in report["cases"]):
        lines += ["", f"### {operator}"]
        for with_out in MODES:
            chosen = [
                line
                for line in report["cases"]
                if line["operator"] == operator and line["with_out"] is with_out
            ]
            if chosen:
                title = "Results in new arrays:" if not with_out else "Results into `out=`:"
                rows = [case_cells(line)[1:] + speed_cells(report, line) for line in chosen]
                titles = ["shape", "dtype", *speed_titles(report)]
                titles = ["±" if t == "+-" else t for t in titles]
                lines += ["", title, "", *_table(titles, rows, 2)]
                notes = [fault.strip() for line in chosen for fault in faults(report, line)]
                lines += ["", *(f"* {note}" for note in notes)] if notes else []
        errors = [line for line in judgements(report) if line["operator"] == operator]
        rows = [case_cells(line)[1:] + error_cells(report, line) for line in errors]
        titles = ["shape", "dtype", *error_titles(report)]
        lines += ["", "Errors:", "", *_table(titles, rows, 2)]
    return "\n".join(lines) + "\n"
