"""What a call costs besides the kernels: the host path, imports, and compiling kernels.

    python tests/bench/host.py [--json FILE]

No GPU is needed. CuPy is stood in for by objects with its names whose launches do nothing, so that
the time of a call is that of the package; what CuPy itself spends on a launch comes on top. Kernels
are compiled by NVRTC (the extra 'test' brings it) as CuPy would compile them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script: this checkout, whatever is installed
    sys.path[:1] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402

import cupyops  # noqa: E402
from bench.environment import as_lines, collect  # noqa: E402
from cupyops import _kernels, _plan  # noqa: E402
from cupyops.cli.arguments import OPERATORS  # noqa: E402
from cupyops.cli.backends import one_line  # noqa: E402
from cupyops.cli.table import Column, header, row  # noqa: E402

ARCHITECTURE = "sm_90"
TARGETS = {"plan.run": 15e-6, "eager": 40e-6, "compile": 0.5}
"""Seconds."""
ROUNDS, CALLS = 15, 200


class Figure(NamedTuple):
    what: str
    seconds: float | None
    target: float | None = None
    note: str = ""


# -- a CuPy whose launches do nothing -----------------------------------------------------------


class ndarray:
    """Metadata and an address."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        values = np.zeros(shape, dtype)
        self.shape, self.dtype, self.strides = shape, values.dtype, values.strides
        self.device = types.SimpleNamespace(id=0)
        self.data = types.SimpleNamespace(ptr=_address())


ndarray.__module__ = "cupy"
_next = 1 << 30


def _address() -> int:
    """Far from every other one, and aligned as CuPy's memory is."""
    global _next
    _next += 1 << 30
    return _next


class _Stream:
    device_id = -1


class _Function:
    max_dynamic_shared_size_bytes = _kernels.DEFAULT_SHARED_BYTES

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int, stream: Any) -> None:
        pass


def _stand_in() -> Any:
    cupy: Any = types.ModuleType("cupy")
    cupy.ndarray = cupy.empty = ndarray
    cupy.RawModule = lambda **_: types.SimpleNamespace(get_function=lambda name: _Function())
    cupy.cuda = types.SimpleNamespace(
        Stream=_Stream,
        runtime=types.SimpleNamespace(
            getDeviceCount=lambda: 1, getDevice=lambda: 0, setDevice=lambda number: None
        ),
        compiler=types.SimpleNamespace(CompileException=RuntimeError),
    )
    return cupy


@contextmanager
def stand_in() -> Iterator[Any]:
    real, executor = sys.modules.get("cupy"), _plan.EXECUTORS["cupy"]
    cupy = sys.modules["cupy"] = _stand_in()
    _plan.EXECUTORS["cupy"] = _kernels.CupyExecutor()
    _plan._cached_plan.cache_clear()
    try:
        yield cupy
    finally:
        _plan._cached_plan.cache_clear()
        _plan.EXECUTORS["cupy"] = executor
        del sys.modules["cupy"]
        if real is not None:
            sys.modules["cupy"] = real


# -- figures ------------------------------------------------------------------------------------


def inputs(operator: str, new: Callable[..., Any]) -> tuple[Any, dict[str, Any], dict[str, bool]]:
    """Small arrays, so that nothing is left of the NumPy arithmetic either: first, rest, options"""
    if operator.startswith("modulate"):
        shape, rows = (1, 16, 64), (1, 64)
        rest = {"grad_output": new(shape, np.float32)} if operator.endswith("backward") else {}
        rest |= {"scale": new(rows, np.float32), "shift": new(rows, np.float32)}
        return new(shape, np.float32), rest, {"one_plus_scale": True}
    if operator == "exp_segsum":
        return new((4, 16), np.float32), {}, {}
    return new((4, 16, 16), np.float32), {"grad_output": new((4, 16, 16), np.float32)}, {}


def calls(operator: str, new: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """`plan.run` with all memory given, and the eager call that allocates its results."""
    first, rest, options = inputs(operator, new)
    plan = getattr(cupyops, f"plan_{operator}")(first, **rest, **options)
    outs = tuple(new(spec.shape, spec.dtype) for spec in plan.outputs)
    workspace = new((plan.workspace_size,), np.uint8)
    out = outs if len(outs) > 1 else outs[0]
    run = partial(plan.run, first, **rest, out=out, workspace=workspace)
    return {"plan.run": run, "eager": partial(getattr(cupyops, operator), first, **rest, **options)}


def seconds_of(call: Callable[[], Any]) -> float:
    """Of the quickest round: what else runs on the machine makes a round longer, never shorter."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS)
    return min(rounds)


def host_path() -> list[Figure]:
    found = []
    with stand_in() as cupy:
        for operator in OPERATORS:
            for how, call in calls(operator, cupy.empty).items():
                found.append(Figure(f"{operator} {how}", seconds_of(call), TARGETS[how], "CuPy"))
    for operator in OPERATORS:
        for how, call in calls(operator, np.zeros).items():
            note = "NumPy, arithmetic of a tiny array included"
            found.append(Figure(f"{operator} {how}", seconds_of(call), None, note))
    return found


IMPORT = """
import sys, time
sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "after": import numpy
start = time.perf_counter()
import cupyops
print(time.perf_counter() - start)
"""


def imports() -> list[Figure]:
    found = []
    for when, note in (("before", "NumPy included"), ("after", "after NumPy")):
        command = [sys.executable, "-c", IMPORT, str(ROOT), when]
        times = [
            float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(4)
        ]
        found.append(Figure("import cupyops", min(times), None, note))
    return found


def compile_times() -> list[Figure]:
    """Of what a first call of each operator compiles, in float32."""
    try:
        from ptx import nvrtc

        start = time.perf_counter()
        nvrtc.version()
        loaded = time.perf_counter() - start
    except Exception as error:
        return [Figure("compile kernels", None, TARGETS["compile"], f"absent: {one_line(error)}")]
    found = [Figure("load NVRTC", loaded, None, "once in a process")]
    options = [*_kernels.OPTIONS, f"-arch={ARCHITECTURE}", "-ftz=true"]
    for operator in OPERATORS:
        with stand_in() as cupy:
            first, rest, flags = inputs(operator, cupy.empty)
            plan = getattr(cupyops, f"plan_{operator}")(first, **rest, **flags)
        by_source: dict[str, list[str]] = {}
        for kernel, _ in _kernels.kernels_of(plan.launches):
            by_source.setdefault(kernel.source, []).append(kernel.name)
        start = time.perf_counter()
        for source, names in by_source.items():
            nvrtc.compile_cubin(_kernels.source_text(source), options, list(dict.fromkeys(names)))
        took, count = time.perf_counter() - start, len(set().union(*by_source.values()))
        note = f"{ARCHITECTURE}, float32, {count} kernels, cold"
        found.append(Figure(f"{operator} compile", took, TARGETS["compile"], note))
    return found


# -- the command --------------------------------------------------------------------------------

COLUMNS = [
    Column("what", 30, False),
    Column("measured", 10),
    Column("target", 10),
    Column("", 6, False),
    Column("of", 20, False),
]


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    scale, unit = (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 0.1 else (1.0, "s")
    return f"{seconds * scale:.3g} {unit}"


def cells(figure: Figure) -> list[str]:
    verdict = ""
    if figure.target is not None and figure.seconds is not None:
        verdict = "met" if figure.seconds <= figure.target else "MISSED"
    target = "" if figure.target is None else duration(figure.target)
    return [figure.what, duration(figure.seconds), target, verdict, figure.note]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args(argv)
    known = collect("host.py", {})
    for title, text in as_lines(known):
        if title not in ("threads", "system"):
            print(f"{title:<10} {text}")
    print(f"\n{header(COLUMNS)}")
    found: list[Figure] = []
    for measured in (host_path, imports, compile_times):
        for figure in measured():
            found.append(figure)
            print(row(COLUMNS, cells(figure)), flush=True)
    if arguments.json is not None:
        report = {"environment": known, "figures": [figure._asdict() for figure in found]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
