"""Times of any number of contenders on one case: right results first, then rounds by turns.

Knows no operator. A contender whose results are wrong gets no time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyops.cli.backends import one_line
from cupyops.cli.reference import Verdict

SAMPLE_SECONDS = 0.02
"""A sample runs a contender as often as this needs, so that the clock's own steps do not matter."""
MAX_LOOPS = 100_000

Clock = Callable[[Callable[[], Any], int], float]
"""``clock(run, loops)``: the seconds that so many runs in a row take."""


def settle_allocator() -> None:
    """Bring malloc into the state of a program that has run for a while; once is enough.

    The GNU C library hands memory of a freed block back to the system until it has seen blocks
    of that size go; from then on it keeps them (up to 32 MiB). Before, every new array costs page
    faults, up to ten times the arithmetic, and times would depend on the order of the cases.
    """
    np.ones(31 << 20, np.uint8)


class Contender(NamedTuple):
    run: Callable[[], Any]
    """One call, on memory of its own; returns the results."""
    judge: Callable[[Any], Verdict]
    """Whether these results are right."""


class Timing(NamedTuple):
    """Seconds of one call: the median of all rounds, and how far they spread."""

    median: float
    least: float
    low: float
    high: float
    """Quartiles: half of the rounds lie between `low` and `high`."""
    rounds: int
    loops: int
    """Calls in a sample."""


class Outcome(NamedTuple):
    error: float | None
    """The largest error of a result relative to its largest value; None if there is no result."""
    fault: str | None
    """Why there is no time."""
    timing: Timing | None


def measure(
    contenders: Mapping[str, Contender],
    *,
    rounds: int,
    clock: Clock,
    sample_seconds: float = SAMPLE_SECONDS,
) -> dict[str, Outcome]:
    """Judge all contenders, then time those that are right, in turns.

    The order of the turns rotates from round to round, so that no contender always finds the
    caches as the same other one left them.
    """
    outcomes = {name: _judged(contender) for name, contender in contenders.items()}
    running = [name for name, outcome in outcomes.items() if outcome.fault is None]
    loops = {name: _loops(contenders[name].run, clock, sample_seconds) for name in running}
    samples: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(rounds):
        first = turn % max(1, len(running))
        for name in running[first:] + running[:first]:
            seconds = clock(contenders[name].run, loops[name])
            samples[name].append(seconds / loops[name])
    for name in running:
        timing = summary(samples[name], loops[name])
        outcomes[name] = outcomes[name]._replace(timing=timing)
    return outcomes


def _judged(contender: Contender) -> Outcome:
    try:
        verdict = contender.judge(contender.run())
    except Exception as error:  # of one contender; the others still run
        return Outcome(None, one_line(error), None)
    return Outcome(verdict.error, verdict.fault, None)


def _loops(run: Callable[[], Any], clock: Clock, sample_seconds: float) -> int:
    """How many calls make a sample; warms up on the way."""
    loops = 1
    while True:
        seconds = clock(run, loops)
        if seconds >= sample_seconds / 2 or loops >= MAX_LOOPS:
            break
        # Towards half a sample, but not faster than tenfold: the first calls may be slow ones.
        wanted = loops * sample_seconds / max(seconds, 1e-9)
        loops = min(MAX_LOOPS, 10 * loops, max(loops + 1, round(wanted)))
    return loops


def summary(samples: Sequence[float], loops: int) -> Timing:
    low, high = samples[0], samples[0]
    if len(samples) > 1:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(statistics.median(samples), min(samples), low, high, len(samples), loops)
