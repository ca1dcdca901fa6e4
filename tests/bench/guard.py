"""Whether the operators are as fast as they were, beside plain NumPy lines. Takes under a minute.

    python tests/bench/guard.py             compare with tests/bench/recorded_ratios.json
    python tests/bench/guard.py --record    write that file

Ratios are compared, not times: both sides slow down together on a slow or busy machine. A case that
has lost more than 40 % is measured again, for longer, before it counts. The exit status is 0 if
nothing was lost, 1 if something was or a result is wrong, 2 if there is nothing to compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: this checkout, whatever is installed
    ROOT = Path(__file__).resolve().parents[2]
    sys.path[:1] = [str(ROOT), str(ROOT / "tests")]
    # Read when NumPy is loaded, so before anything else is known.
    os.environ["OPENBLAS_NUM_THREADS"] = str(min(2, os.cpu_count() or 1))

from bench import cases, environment, peers, run
from bench.peers import OURS
from cupyops.cli.measure import settle_allocator
from cupyops.cli.progress import progress

RECORDED = Path(__file__).with_name("recorded_ratios.json")
LOSS = 0.4
"""Of the ratio that was recorded."""
ROUNDS = (5, 15, 25)
"""Of the first attempt, and of those that follow where a case seems to have lost."""
PLAIN = "naive"


class Wrong(Exception):
    """A result is not right, and so has no time."""


def ratio_of(case: cases.Case, rounds: int) -> float:
    """Time of cupyops / time of the plain lines, results in new arrays.

    Of the least times: what else runs on the machine makes a round longer, never shorter.
    """
    both = {n: p for n, p in peers.all_peers(run.ON.seconds).items() if n in (OURS, PLAIN)}
    (line,) = run.measure_case(case, both, {}, rounds=rounds, modes=(False,))
    for name, figures in line["contenders"].items():
        if figures["fault"] is not None:
            raise Wrong(f"{name} is not timed: {figures['fault']}")
    ours, plain = (line["contenders"][name]["ms_least"] for name in (OURS, PLAIN))
    return float(ours / plain)


def lost(now: float, then: float) -> bool:
    return now > then * (1 + LOSS)


def check(case: cases.Case, then: float) -> tuple[float, str | None]:
    """The ratio, the best of as many attempts as it took, and what is wrong with it."""
    now = float("inf")
    for rounds in ROUNDS:
        now = min(now, ratio_of(case, rounds))
        if not lost(now, then):
            return now, None
    return now, f"was {then:.3f}, lost {now / then - 1:.0%} in {len(ROUNDS)} attempts"


def compare(chosen: list[cases.Case], recorded: dict[str, float]) -> dict[str, str]:
    """What is wrong, by case."""
    faults = {}
    with progress(len(chosen), "guard") as bar:
        for case in chosen:
            name = str(case)
            bar.step(name)
            if name not in recorded:
                faults[name] = "was never recorded; run guard.py --record"
                continue
            try:
                now, fault = check(case, recorded[name])
            except Wrong as error:
                faults[name] = str(error)
                bar.print(f"{name:<45} {error}")
                continue
            if fault is not None:
                faults[name] = fault
            text = f"{name:<45} {now:7.3f}  recorded {recorded[name]:7.3f}"
            bar.print(f"{text}  LOST" if fault is not None else text)
    return faults


def record(chosen: list[cases.Case], path: Path) -> None:
    found: dict[str, float] = {}
    with progress(len(chosen), "record") as bar:
        for case in chosen:
            bar.step(str(case))
            # The worst of as many attempts as a comparison makes: no lucky ratio is recorded.
            found[str(case)] = round(max(ratio_of(case, rounds) for rounds in ROUNDS[:2]), 4)
            bar.print(f"{case!s:<45} {found[str(case)]:7.3f}")
    known = environment.collect("guard.py", {})
    kept = ("date", "cpu", "caches", "threads", "load_before", "python", "cupyops", "packages")
    report = {
        "ratio": "least time of cupyops / least time of plain NumPy lines, results in new arrays",
        "environment": {name: known[name] for name in kept},
        "ratios": found,
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--record", action="store_true", help="write the file of ratios")
    parser.add_argument("--file", type=Path, default=RECORDED, help="another file of ratios")
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    chosen = cases.guarded()
    settle_allocator()
    if arguments.record:
        try:
            record(chosen, arguments.file)
        except Wrong as error:
            print(f"guard: nothing is recorded: {error}", file=sys.stderr)
            return 1
        print(f"guard: recorded in {arguments.file.name}")
        return 0
    try:
        recorded: Any = json.loads(arguments.file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"guard: no ratios to compare with: {error}", file=sys.stderr)
        return 2
    faults = compare(chosen, recorded["ratios"])
    seconds = time.perf_counter() - started
    for name, fault in faults.items():
        print(f"FAILED {name}: {fault}")
    verdict = f"{len(faults)} of {len(chosen)} cases failed" if faults else "nothing was lost"
    print(f"guard: {verdict}, {seconds:.0f} seconds")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
