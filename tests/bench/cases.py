"""What the suite times, beside the shapes, inputs and byte formulas of `cupyops.cli.cases`."""

from __future__ import annotations

import math
from typing import NamedTuple

from cupyops.cli.arguments import OPERATORS
from cupyops.cli.cases import MODULATION, SEGMENTS, Case, select
from cupyops.cli.info import cpu_count
from cupyops.cli.measure import SAMPLE_SECONDS
from cupyops.cli.reference import FORMATS, Floats

__all__ = ["FORMATS", "MODULATION", "OPERATORS", "SEGMENTS", "Case", "select"]

THREADS = min(2, cpu_count())
"""Of every contender that has threads: the number that cupyops takes by itself."""
THREAD_VARIABLES = {
    "OMP_NUM_THREADS": str(THREADS),
    "MKL_NUM_THREADS": str(THREADS),
    "OPENBLAS_NUM_THREADS": str(THREADS),
    "NUMBA_NUM_THREADS": str(THREADS),
    "NPROC": str(THREADS),  # of XLA
    # Threads of torch and numba that spin at a barrier take the processor from the one they wait
    # for as soon as anything else runs: up to 20 ms for a call of 0.2 ms, to our advantage.
    "OMP_WAIT_POLICY": "passive",
}
"""Read by the libraries when they are loaded, so they have to be set before that."""

GUARDED: dict[bool, tuple[tuple[int, ...], ...]] = {
    True: ((2, 256, 1152), (4, 16, 256)),
    False: ((128, 128), (16, 16)),
}
"""By whether it is modulation: one shape of middle size and a small one."""


class Absent(Exception):
    """Why a contender does not take part."""


class Work(NamedTuple):
    """What a contender computes on: all of them on the same memory, where they can."""

    case: Case
    arrays: dict[str, Floats]
    """Inputs by name, in the order of the call."""
    outs: tuple[Floats, ...] | None
    """Where the results go; None for new arrays in each call."""


def guarded() -> list[Case]:
    return [
        Case(operator, shape, dtype)
        for operator in OPERATORS
        for shape in GUARDED[operator.startswith("modulate")]
        for dtype in FORMATS
    ]


def outputs(case: Case) -> list[tuple[int, ...]]:
    """Shapes of the results."""
    if case.operator == "modulate":
        return [case.shape]
    if case.operator == "modulate_backward":
        row = (case.shape[0], case.shape[2])
        return [case.shape, row, row]
    return [case.shape if case.operator.endswith("_backward") else (*case.shape, case.shape[1])]


# -- how long it takes --------------------------------------------------------------------------

ASSUMED = {
    # GB/s of the least bytes, and seconds to compile
    "cupyops": (4.0, 0.0),
    "naive": (1.5, 0.0),
    "torch": (1.5, 0.0),
    "autograd": (1.5, 0.0),
    "compile": (3.0, 1.5),
    "jax": (1.5, 0.3),
    "numba": (5.0, 0.3),
    "numba2": (6.0, 0.5),
    "floor": (10.0, 0.2),
}
"""Rough, of two shared cores; only the estimate of the whole time rests on them."""
GATE_SECONDS_PER_MB = 0.01
WARM_UPS = 3


def estimated_seconds(case: Case, peers: list[str], rounds: int) -> float:
    """Of a case in one mode."""
    judged = min(case.elements, 400_000) * FORMATS["float64"].dtype.itemsize / 1e6
    total = judged * GATE_SECONDS_PER_MB * len(peers)
    for name in peers:
        rate, setup = ASSUMED.get(name, (1.0, 0.0))
        once = case.least_bytes / rate / 1e9
        total += setup + (rounds + WARM_UPS) * max(SAMPLE_SECONDS, once)
    return total


def memory_bytes(case: Case) -> int:
    """At the most, at once: inputs twice, results, and the temporaries of the plain lines."""
    size = FORMATS[case.dtype].dtype.itemsize
    return size * (case.elements * 8 + sum(math.prod(shape) for shape in outputs(case)))
