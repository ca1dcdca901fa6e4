"""Time the operators on the CPU beside every peer that is installed.

    python tests/bench/run.py                      everything; says beforehand how long
    python tests/bench/run.py --quick              one small shape for each operator, float32
    python tests/bench/run.py --operator exp_segsum --dtype bfloat16 --shape 512x128 --peer torch
    python tests/bench/run.py --json results.json --plot pictures/cpu.png --markdown tables.md

Results are compared with float64 first; a contender that is wrong gets no time. Then all take
turns. A peer that is not installed is listed as absent. Needs this checkout and what cupyops needs;
torch (a CPU build), jax, numba and matplotlib are used if they are there; the extras 'peers' and
'bench' list them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this checkout, whatever is installed
    ROOT = Path(__file__).resolve().parents[2]
    sys.path[:1] = [str(ROOT), str(ROOT / "tests")]
    # Read when NumPy is loaded, so before anything else is known.
    os.environ["OPENBLAS_NUM_THREADS"] = str(min(2, os.cpu_count() or 1))

import numpy as np

from bench import cases, environment, peers, report
from bench.cases import Absent, Case, Work
from bench.peers import FLOOR, OURS, Peer
from cupyops.cli.arguments import parse_shape, positive
from cupyops.cli.backends import backend, one_line
from cupyops.cli.bench import check_writable, figures, judged
from cupyops.cli.errors import CommandError
from cupyops.cli.measure import Contender, Outcome, measure, settle_allocator
from cupyops.cli.progress import progress
from cupyops.cli.reference import RIGHT, Expected, expected
from cupyops.cli.table import header, row

ROUNDS, QUICK_ROUNDS = 7, 3
ON = backend("numpy")


# -- one case -----------------------------------------------------------------------------------


class Gate:
    """What is expected of a case, by the arithmetic that a contender claims."""

    def __init__(self, case: Case, arrays: dict[str, Any]) -> None:
        self.case = case
        self.part = {name: case.part(values) for name, values in arrays.items()}
        self.wanted: dict[str | None, list[Expected]] = {}

    def judge(self, peer: Peer) -> Callable[[Any], Any]:
        if peer.arithmetic == "none":
            return lambda results: RIGHT
        compute = "float64" if self.case.dtype == "float64" else "float32"
        named: dict[str, str | None]
        named = {"contract": None, "storage": self.case.dtype, "compute": compute}
        arithmetic = named[peer.arithmetic]
        if arithmetic not in self.wanted:
            self.wanted[arithmetic] = expected(
                self.case.operator, self.part, self.case.options, arithmetic=arithmetic
            )
        want, strict = self.wanted[arithmetic], peer.arithmetic == "contract"

        def verdict(results: tuple[Any, ...]) -> Any:
            fetched = tuple(peer.fetch(result) for result in results)
            return judged(self.case, ON, want, fetched, same_dtype=strict)

        return verdict


def measure_case(
    case: Case,
    chosen: dict[str, Peer],
    missing: dict[str, str],
    *,
    rounds: int,
    modes: tuple[bool, ...],
) -> list[dict[str, Any]]:
    """A line of the report for each mode. The arrays of the case live only in here."""
    free, needed = environment.available_bytes(), cases.memory_bytes(case)
    try:
        if free is not None and needed > free:
            raise MemoryError
        arrays = case.inputs()
        gate = Gate(case, arrays)
        return [_measure(case, gate, arrays, chosen, missing, rounds, mode) for mode in modes]
    except MemoryError:
        reason = f"too little memory: {needed / 1e9:.1f} GB are needed"
        outcomes = {name: Outcome(None, reason, None) for name in chosen}
        return [_line(case, mode, outcomes, {}) for mode in modes]


def _measure(
    case: Case,
    gate: Gate,
    arrays: dict[str, Any],
    chosen: dict[str, Peer],
    missing: dict[str, str],
    rounds: int,
    with_out: bool,
) -> dict[str, Any]:
    outs = None
    if with_out:  # one set for all: each result is judged before the next contender runs
        dtype = cases.FORMATS[case.dtype].dtype
        outs = tuple(np.zeros(shape, dtype) for shape in cases.outputs(case))
    contenders, absent, failed = {}, {}, {}
    for name, peer in chosen.items():
        try:
            if name in missing:
                raise Absent(missing[name])
            run = peer.bind(Work(case, arrays, outs))
            contenders[name] = Contender(run, gate.judge(peer))
        except Absent as reason:
            absent[name] = str(reason)
        except MemoryError:
            raise
        except Exception as error:  # of one contender; the others still run
            failed[name] = Outcome(None, f"cannot be prepared: {one_line(error)}"[:300], None)
    outcomes = measure(contenders, rounds=rounds, clock=ON.seconds) | failed
    return _line(case, with_out, {n: outcomes[n] for n in chosen if n in outcomes}, absent)


def _line(
    case: Case, with_out: bool, outcomes: dict[str, Outcome], absent: dict[str, str]
) -> dict[str, Any]:
    found = {name: figures(outcome, case.least_bytes) for name, outcome in outcomes.items()}
    if FLOOR in found:
        found[FLOOR]["error"] = None  # it has no result
    found |= {n: {"error": None, "fault": None, "ms": None, "absent": r} for n, r in absent.items()}
    times = {name: one["ms"] for name, one in found.items() if one["ms"]}
    mine, floor = times.get(OURS), times.pop(FLOOR, None)
    return {
        "operator": case.operator,
        "shape": list(case.shape),
        "dtype": case.dtype,
        "with_out": with_out,
        "least_bytes": case.least_bytes,
        "judged": case.judged,
        "contenders": found,
        "ratios": {n: mine / ms for n, ms in times.items() if n != OURS} if mine else {},
        "floor_over_ours": floor / mine if floor and mine else None,
    }


# -- the command --------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    description, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several: dict[str, Any] = {"action": "append", "metavar": "NAME"}
    names = [name for name in peers.all_peers(ON.seconds) if name != OURS]
    parser.add_argument(
        "--operator", choices=cases.OPERATORS, help=", ".join(cases.OPERATORS), **several
    )
    formats = tuple(cases.FORMATS)
    parser.add_argument("--dtype", choices=formats, help=", ".join(formats), **several)
    parser.add_argument(
        "--peer", choices=names, help=f"{', '.join(names)}; these options are repeatable", **several
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--shape", type=parse_shape, action="append", help="2x256x1152 or 512x128; repeatable"
    )
    which.add_argument("--quick", action="store_true", help="small, float32, three rounds")
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"default {ROUNDS}")
    parser.add_argument(
        "--out",
        action=argparse.BooleanOptionalAction,
        help="results into arrays that are there already, or into new ones; default: both",
    )
    parser.add_argument("--json", metavar="FILE", help="all figures")
    parser.add_argument("--plot", metavar="FILE", help="pictures; names say what they show")
    parser.add_argument("--markdown", metavar="FILE", help="the tables of a documentation page")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        return run(arguments)
    except CommandError as error:
        print(f"run.py: error: {error}", file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    os.environ.update(cases.THREAD_VARIABLES)
    selected = cases.select(
        arguments.operator,
        arguments.dtype,
        arguments.shape,
        quick=arguments.quick,
        everything=not arguments.quick,
    )
    if not selected:
        raise CommandError("no operator takes these shapes")
    if arguments.plot is not None:
        from bench import plot

        plot.check(arguments.plot)
    for path in (arguments.json, arguments.markdown):
        if path is not None:
            check_writable(path)
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    modes = (False, True) if arguments.out is None else (arguments.out,)
    chosen = {
        name: peer
        for name, peer in peers.all_peers(ON.seconds).items()
        if name == OURS or arguments.peer is None or name in arguments.peer
    }
    missing = peers.absent(chosen)
    found: dict[str, Any] = {
        "environment": environment.collect("run.py", peers.versions(chosen)),
        "rounds": rounds,
        "peers": {
            name: {"title": peer.title, "about": peer.about, "absent": missing.get(name)}
            for name, peer in chosen.items()
        },
        "cases": [],
    }
    present = [name for name in chosen if name not in missing]
    seconds = sum(cases.estimated_seconds(c, present, rounds) for c in selected) * len(modes)
    started = time.perf_counter()
    settle_allocator()
    with progress(len(selected), "bench") as bar:
        for text in report.head(found):
            bar.print(text)
        minutes = max(1, round(seconds / 60))
        bar.print(f"\n{_count(len(selected), 'case')}, about {_count(minutes, 'minute')}\n")
        columns = report.speed_columns(found)
        bar.print(header(columns))
        for case in selected:
            bar.step(str(case))
            lines = measure_case(case, chosen, missing, rounds=rounds, modes=modes)
            found["cases"] += lines
            for line in lines:
                mode = report.MODES[line["with_out"]]
                cells = [*report.case_cells(line), mode, *report.speed_cells(found, line)]
                bar.print(row(columns, cells))
                for fault in report.faults(found, line):
                    bar.print(fault)
    found["seconds"] = time.perf_counter() - started
    _print_errors(found)
    print(f"\n{report.NOTES}\n\n{found['seconds']:.0f} seconds")
    _write(arguments, found)
    wrong = [line["contenders"][OURS]["fault"] for line in found["cases"]]
    return 1 if any(fault is not None for fault in wrong) else 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _print_errors(found: dict[str, Any]) -> None:
    columns = report.error_columns(found)
    print(f"\nlargest errors against float64\n{header(columns)}")
    for line in report.judgements(found):
        print(row(columns, [*report.case_cells(line), *report.error_cells(found, line)]))


def _write(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.markdown is not None:
        Path(arguments.markdown).write_text(report.markdown(found), encoding="utf-8")
    if arguments.plot is not None:
        from bench import plot

        for path in plot.draw(found, arguments.plot):
            print(f"drawn: {path}")


if __name__ == "__main__":
    sys.exit(main())
