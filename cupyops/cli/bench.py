"""``python -m cupyops bench``: the operators against plain array code, case by case."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cupyops
from cupyops.cli import info
from cupyops.cli.arguments import PROG
from cupyops.cli.backends import Backend, backend, state_of, usable_backends
from cupyops.cli.cases import JUDGED_ELEMENTS, Case, select
from cupyops.cli.errors import CommandError
from cupyops.cli.measure import Contender, Outcome, measure, settle_allocator
from cupyops.cli.naive import NAIVE
from cupyops.cli.progress import Progress, progress
from cupyops.cli.reference import Expected, Floats, Verdict, combined, expected, judge
from cupyops.cli.table import Column, header, row

OURS, PLAIN = "cupyops", "naive"
ROUNDS, QUICK_ROUNDS = 7, 3
COLUMNS = [
    Column("operator", 19, right=False),
    Column("shape", 12, right=False),
    Column("dtype", 8, right=False),
    Column("ours ms", 9),
    Column("naive ms", 9),
    Column("ratio", 6),
    Column("GB/s", 6),
    Column("error", 8),
    Column("naive", 8),
]
NOTES = f"""\
ratio: ours / naive, below 1 is faster. GB/s: ours, counting the least bytes that have to be moved.
error, naive: the largest error of a result against float64, relative to the result's largest value
(above {JUDGED_ELEMENTS:,} elements: of a part)."""


def run(arguments: argparse.Namespace) -> int:
    cases = select(
        arguments.operator,
        arguments.dtype,
        arguments.shape,
        quick=arguments.quick,
        everything=arguments.all,
    )
    for shape in arguments.shape or ():
        if shape not in (case.shape for case in cases):
            text = "x".join(map(str, shape))
            raise CommandError(
                f"none of the operators takes the shape {text}; modulation takes BxLxD, "
                "segment sums take segments x T"
            )
    on = _backend(arguments.backend)
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    if arguments.plot is not None:
        from cupyops.cli import plot

        plot.check(arguments.plot)
    for path in (arguments.json, arguments.plot):
        if path not in (None, "-"):
            check_writable(path)

    table = arguments.json != "-"
    report = _environment(arguments, on, rounds)
    settle_allocator()
    with progress(len(cases), "bench") as bar:
        if table:
            _print_head(bar, arguments, on, rounds)
        for case in cases:
            bar.step(str(case))
            line = measure_case(case, on, rounds=rounds, with_out=arguments.out)
            report["cases"].append(line)
            if table:
                _print_line(bar, line)
    if table:
        print(f"\n{NOTES}")
    if arguments.json is not None:
        _write_json(report, arguments.json)
    if arguments.plot is not None:
        plot.draw(report, arguments.plot)
    faults = [line["contenders"][OURS]["fault"] for line in report["cases"]]
    return 1 if any(fault is not None for fault in faults) else 0


def _backend(name: str | None) -> Backend:
    if name is not None:
        (found,) = usable_backends(name)
        return found
    return backend("cupy" if state_of("cupy").usable else "numpy")


def check_writable(path: str) -> None:
    """Before anything is measured; leaves no file behind, and an existing one as it is."""
    target = Path(path)
    new = not target.exists()
    try:
        with target.open("ab"):
            pass
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
    if new:
        target.unlink()


def _environment(arguments: argparse.Namespace, on: Backend, rounds: int) -> dict[str, Any]:
    return {
        "command": shlex.join([PROG, *sys.argv[1:]]).replace(shlex.quote(PROG), PROG),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "backend": on.name,
        "with_out": arguments.out,
        "rounds": rounds,
        "environment": info.collect(),
        "cases": [],
    }


# -- one case -----------------------------------------------------------------------------------


def measure_case(case: Case, on: Backend, *, rounds: int, with_out: bool) -> dict[str, Any]:
    """One line of the table as plain values. The arrays of the case live only in here."""
    try:
        outcomes = measure(contenders(case, on, with_out), rounds=rounds, clock=on.seconds)
    except MemoryError:
        outcomes = {n: Outcome(None, "too little memory", None) for n in (OURS, PLAIN)}
    line: dict[str, Any] = {
        "operator": case.operator,
        "shape": list(case.shape),
        "dtype": case.dtype,
        "least_bytes": case.least_bytes,
        "judged": case.judged,
        "contenders": {name: figures(out, case.least_bytes) for name, out in outcomes.items()},
    }
    mine, theirs = (line["contenders"][name]["ms"] for name in (OURS, PLAIN))
    line["ratio"] = mine / theirs if mine and theirs else None
    return line


def contenders(case: Case, on: Backend, with_out: bool) -> dict[str, Contender]:
    """cupyops and the plain lines, on the same inputs; results go where `with_out` says."""
    host = case.inputs()
    part = {name: case.part(values) for name, values in host.items()}
    strict = expected(case.operator, part, case.options)
    # The plain lines compute and add up in the dtype of the arrays.
    loose = expected(case.operator, part, case.options, arithmetic=case.dtype)
    arrays = {name: on.put(values) for name, values in host.items()}
    first, *others = arrays.items()
    plan = getattr(cupyops, f"plan_{case.operator}")(first[1], **dict(others), **case.options)
    outs = None
    if with_out:
        outs = tuple(on.xp.empty(spec.shape, spec.dtype) for spec in plan.outputs)
    ours = partial(_ours, case, first[1], dict(others), outs)
    plain = partial(_plain, case, on, arrays, outs)
    return {
        OURS: Contender(ours, partial(judged, case, on, strict, same_dtype=True)),
        PLAIN: Contender(plain, partial(judged, case, on, loose, same_dtype=False)),
    }


def _ours(case: Case, first: Any, others: Mapping[str, Any], outs: Any) -> tuple[Any, ...]:
    # The eager call, which finds its plan in a cache: what users write.
    out = outs[0] if outs is not None and len(outs) == 1 else outs
    results = getattr(cupyops, case.operator)(first, **others, **case.options, out=out)
    return results if isinstance(results, tuple) else (results,)


def _plain(case: Case, on: Backend, arrays: Mapping[str, Any], outs: Any) -> tuple[Any, ...]:
    with np.errstate(all="ignore"):  # float16 overflows on its way
        return NAIVE[case.operator](on.xp, arrays, outs)


def judged(
    case: Case, on: Backend, want: list[Expected], results: tuple[Any, ...], *, same_dtype: bool
) -> Verdict:
    """The verdict on the judged part of all results."""
    names = ["result"] if len(want) == 1 else ["grad_input", "grad_scale", "grad_shift"]
    parts: list[Floats] = [case.part(on.get(result)) for result in results]
    verdict = combined(
        [judge(n, p, w, same_dtype=same_dtype) for n, p, w in zip(names, parts, want, strict=True)]
    )
    if verdict.fault is None or case.judged == "all":
        return verdict
    return verdict._replace(fault=f"{verdict.fault}; indices are those in {case.judged}")


def figures(outcome: Outcome, least_bytes: int) -> dict[str, Any]:
    """A contender's outcome as plain values; rates count the least bytes."""
    timing = outcome.timing
    error = outcome.error
    found: dict[str, Any] = {
        "error": error if error is not None and math.isfinite(error) else None,
        "fault": outcome.fault,
        "ms": None,
    }
    if timing is not None:
        found |= {
            "ms": timing.median * 1e3,
            "ms_least": timing.least * 1e3,
            "ms_quartiles": [timing.low * 1e3, timing.high * 1e3],
            "loops": timing.loops,
            "gb_s": least_bytes / timing.median / 1e9,
        }
    return found


# -- output -------------------------------------------------------------------------------------


def _print_head(bar: Progress, arguments: argparse.Namespace, on: Backend, rounds: int) -> None:
    where = "existing arrays (out=)" if arguments.out else "new arrays"
    bar.print(
        f"{on.name}, results into {where}, medians of {rounds} round{'s' if rounds > 1 else ''}"
    )
    if not (arguments.all or arguments.dtype):
        bar.print("float32 alone; --dtype takes others")
    bar.print("")
    bar.print(header(COLUMNS))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _print_line(bar: Progress, line: dict[str, Any]) -> None:
    mine, theirs = (line["contenders"][name] for name in (OURS, PLAIN))
    shape = "x".join(map(str, line["shape"]))
    cells = [
        line["operator"],
        shape,
        line["dtype"],
        _number(mine["ms"], ".3f"),
        _number(theirs["ms"], ".3f"),
        _number(line["ratio"], ".2f"),
        _number(mine.get("gb_s"), ".1f"),
        _number(mine["error"], ".1e"),
        _number(theirs["error"], ".1e"),
    ]
    bar.print(row(COLUMNS, cells))
    for name, found in ((OURS, mine), (PLAIN, theirs)):
        if found["fault"] is not None:
            bar.print(f"  {name} is not timed: {found['fault']}")


def _write_json(report: dict[str, Any], path: str) -> None:
    text = json.dumps(report, indent=2)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
