"""``python -m cupyops selftest``: every operator against float64, on all usable back ends."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any, NamedTuple

import numpy as np

import cupyops
from cupyops.cli.arguments import OPERATORS
from cupyops.cli.backends import Backend, backend, one_line, usable_backends
from cupyops.cli.progress import Progress, progress
from cupyops.cli.reference import FORMATS, Expected, Floats, combined, expected, judge
from cupyops.cli.selftest_cases import Case, cases
from cupyops.cli.table import Column, header, row

COLUMNS = [
    Column("operator", 19, right=False),
    Column("dtype", 8, right=False),
    Column("back end", 8, right=False),
    Column("cases", 5),
    Column("worst error / bound", 19),
    Column("", 6, right=False),
]


class Line(NamedTuple):
    """All cases of an operator in a dtype on a back end."""

    operator: str
    dtype: str
    backend: str
    cases: int
    worst: float
    """The largest error relative to the one allowed."""
    faults: list[str]

    @property
    def ok(self) -> bool:
        return not self.faults

    def cells(self) -> list[str]:
        return [
            self.operator,
            self.dtype,
            self.backend,
            str(self.cases),
            format(self.worst, ".3f" if self.worst < 1000 else ".1e"),
            "ok" if self.ok else "FAILED",
        ]

    def as_json(self) -> dict[str, Any]:
        worst = self.worst if math.isfinite(self.worst) else None  # JSON knows no infinity
        return {**self._asdict(), "worst": worst, "ok": self.ok}


def run(arguments: argparse.Namespace) -> int:
    backends = usable_backends(arguments.backend)
    lines: list[Line] = []
    with progress(len(OPERATORS) * len(FORMATS), "selftest") as bar:
        if not arguments.json:
            bar.print(header(COLUMNS))
        for operator in OPERATORS:
            for dtype in FORMATS:
                bar.step(f"{operator} {dtype}")
                found = check(operator, dtype, backends)
                lines += found
                if not arguments.json:
                    _print(bar, found)
    wrong = [line for line in lines if not line.ok]
    if arguments.json:
        names = [each.name for each in backends]
        found_all = [line.as_json() for line in lines]
        print(json.dumps({"ok": not wrong, "backends": names, "results": found_all}, indent=2))
    else:
        print(_summary(lines, wrong))
    return 1 if wrong else 0


def _print(bar: Progress, lines: list[Line]) -> None:
    for line in lines:
        bar.print(row(COLUMNS, line.cells()))


def _summary(lines: list[Line], wrong: list[Line]) -> str:
    total = sum(line.cases for line in lines)
    if not wrong:
        return f"\nAll {total} cases are within their bounds."
    faults = [
        f"{line.operator} {line.dtype} {line.backend}: {fault}"
        for line in wrong
        for fault in line.faults
    ]
    return "\n".join(["", *faults, "", f"{len(faults)} of {total} cases FAILED."])


def check(operator: str, dtype: str, backends: list[Backend]) -> list[Line]:
    lines = [Line(operator, dtype, each.name, 0, 0.0, []) for each in backends]
    for case in cases(operator, dtype):
        want = case.exact() or expected(operator, case.arrays, case.options)
        for index, each in enumerate(backends):
            worst, fault = _check_case(operator, case, want, each)
            line = lines[index]
            if fault is not None:
                line.faults.append(f"case {case.label!r}: {fault}")
            lines[index] = line._replace(cases=line.cases + 1, worst=max(line.worst, worst))
    return lines


def _check_case(
    operator: str, case: Case, want: list[Expected], on: Backend
) -> tuple[float, str | None]:
    try:
        results = call(operator, case, on)
        names = _names(operator, case)
        if sorted(results) != sorted(names):
            return math.inf, f"returned {', '.join(results)}; expected {', '.join(names)}"
        verdict = combined([judge(n, results[n], w) for n, w in zip(names, want, strict=True)])
        if verdict.fault is not None or on.name == "numpy" or not operator.startswith("modulate"):
            return verdict.worst, verdict.fault
        return verdict.worst, _other_bits(results, call(operator, case, backend("numpy")))
    except Exception as error:  # reported, so that the other cases still run
        return math.inf, one_line(error)


def call(operator: str, case: Case, on: Backend) -> dict[str, Floats]:
    """The results of an operator by name, as NumPy arrays; absent ones are left out."""
    first, *others = (on.put(values) for values in case.arrays.values())
    named = dict(zip(list(case.arrays)[1:], others, strict=True))
    results = getattr(cupyops, operator)(first, **named, **case.options)
    if not isinstance(results, tuple):
        return {"result": on.get(results)}
    parts = zip(results._fields, results, strict=True)  # type: ignore[attr-defined]
    return {name: on.get(part) for name, part in parts if part is not None}


def _names(operator: str, case: Case) -> list[str]:
    if operator != "modulate_backward":
        return ["result"]
    parameters = [name for name in ("scale", "shift") if name in case.arrays]
    return ["grad_input", *(f"grad_{name}" for name in parameters)]


def _other_bits(mine: dict[str, Floats], host: dict[str, Floats]) -> str | None:
    """Where bits differ from NumPy's, which the modulation pair promises not to; NaN is NaN."""
    for name, values in mine.items():
        theirs = host[name]
        unsigned = f"u{values.dtype.itemsize}"
        left, right = (np.ascontiguousarray(a).view(unsigned) for a in (values, theirs))
        nan = np.isnan(values) & np.isnan(theirs)
        differ = (left != right) & ~nan
        if differ.any():
            at = tuple(map(int, np.argwhere(differ)[0]))
            place = f"{name}[{', '.join(map(str, at))}]"
            count = f"{int(differ.sum())} of {differ.size}"
            return f"{place} is {values[at]} and {theirs[at]} on NumPy: other bits ({count})"
    return None
