"""Check every operator on the GPU at hand against float64 formulas, then time it.

    python tests/bench/gpu.py [--quick] [--json FILE]

Needs this checkout, CuPy, NumPy, array-api-compat and ml_dtypes; torch is timed beside it if it is
installed. Times are those of the GPU, from events around a run whose buffers are in no cache. Rates
count the least bytes that any implementation has to move; the yardstick is a copy on the device.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gpu_cases import (  # noqa: E402 - needs cupyops
    DTYPES,
    MODULATION,
    OPERATORS,
    SEGMENTS,
    TIMED,
    Case,
    check_all,
)
from torch_formulas import TORCH  # noqa: E402 - knows no torch itself

import cupyops  # noqa: E402 - of this checkout, whatever is installed

LARGE = 256e6
"""Bytes of the largest array of a call from which the bandwidth targets hold."""
SECONDS = 150
"""After so long torch is no longer timed: the whole takes less than three minutes."""


# -- times --------------------------------------------------------------------------------------


@functools.cache
def block(operator: str, dtype: str) -> np.ndarray:
    return Case(operator, dtype, ()).draw((1 << 22,), 1).view(np.uint8)


class Card:
    """The GPU, how long things take on it, and the bandwidth of a copy."""

    def __init__(self, cupy: Any, quick: bool) -> None:
        self.cupy, self.repeats = cupy, 7 if quick else 30
        runtime = cupy.cuda.runtime
        self.properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
        # Long enough, too, for the host to get ahead, so that no time contains its overhead.
        self.flushed = cupy.zeros(max(1 << 28, 4 * self.properties.get("l2CacheSize", 0)), np.uint8)
        size = 1 << (28 if quick else 30)
        source, target = cupy.zeros(size, np.uint8), cupy.zeros(size, np.uint8)
        copy = functools.partial(target.data.copy_from_device_async, source.data, size)
        self.copy_rate = 2 * size / self.microseconds([copy]) / 1e3

    def microseconds(self, runs: list[Callable[[], Any]], repeats: int | None = None) -> float:
        """Median time on the GPU; the runs take turns, each behind a flush of the L2 cache."""
        cuda, pairs = self.cupy.cuda, []
        for run in runs:
            run()
        for i in range(repeats or self.repeats):
            self.flushed.fill(i % 256)
            start, end = cuda.Event(), cuda.Event()
            start.record()
            runs[i % len(runs)]()
            end.record()
            pairs.append((start, end))
        pairs[-1][1].synchronize()
        return 1e3 * statistics.median(cuda.get_elapsed_time(*pair) for pair in pairs)

    def filled(self, case: Case, shape: tuple[int, ...]) -> Any:
        """An array of a block of random values, over and over."""
        dtype = DTYPES[case.dtype][0]
        memory = self.cupy.empty(math.prod(shape) * dtype.itemsize, np.uint8)
        source = self.cupy.asarray(block(case.operator, case.dtype))
        for start in range(0, memory.nbytes, source.nbytes):
            part = memory[start : start + source.nbytes]
            part[...] = source[: part.nbytes]
        return self.cupy.ndarray(shape, dtype, memory.data)

    def buffers(self, case: Case) -> list[Call]:
        """Arrays for up to three runs in rotation, as far as memory goes."""
        pool = self.cupy.get_default_memory_pool()
        pool.free_all_blocks()
        free = self.cupy.cuda.runtime.memGetInfo()[0]
        return [Call(self, case) for _ in range(min(3, free // (4 * case.nbytes)))]


class Call:
    """A planned operator with all the memory of its run."""

    def __init__(self, card: Card, case: Case) -> None:
        cupy, self.operator, self.options = card.cupy, case.operator, case.options()
        self.arrays = {name: card.filled(case, shape) for name, shape in case.inputs().items()}
        self.first, self.rest = next(iter(self.arrays.values())), dict([*self.arrays.items()][1:])
        plan = getattr(cupyops, f"plan_{case.operator}")(self.first, **self.rest, **self.options)
        outs = tuple(cupy.empty(spec.shape, spec.dtype) for spec in plan.outputs)
        self.plan, self.out = plan, outs if len(outs) > 1 else outs[0]
        self.workspace = cupy.empty(plan.workspace_size, np.uint8)

    def run(self) -> Any:
        return self.plan.run(self.first, **self.rest, out=self.out, workspace=self.workspace)

    def eager(self) -> Any:
        return getattr(cupyops, self.operator)(self.first, **self.rest, **self.options)


class Torch:
    """The same operators as chains of torch operations, on the same memory."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("this torch has no CUDA")
        self.torch, self.version = torch, torch.__version__

    def tensor(self, cupy: Any, array: Any) -> Any:
        torch = self.torch
        if array.dtype == np.float32:
            return torch.as_tensor(array, device="cuda")
        bits = cupy.ndarray(array.shape, np.int16, array.data)  # torch knows no ml_dtypes
        return torch.as_tensor(bits, device="cuda").view(getattr(torch, array.dtype.name))

    def microseconds(
        self, card: Card, case: Case, calls: list[Call], compiled: bool
    ) -> float | str:
        torch, function = self.torch, TORCH[case.operator]
        try:
            if compiled:
                torch._dynamo.reset()
                function = torch.compile(function, dynamic=False)
            sets = [
                {name: self.tensor(card.cupy, array) for name, array in call.arrays.items()}
                for call in calls
            ]
            runs = [functools.partial(function, **arrays) for arrays in sets]
            return card.microseconds(runs, min(card.repeats, 11))
        except Exception as error:
            return f"failed: {type(error).__name__}: {error}".splitlines()[0]
        finally:
            torch.cuda.empty_cache()


def measure(card: Card, case: Case, torch: Torch | str, compile_too: bool, end: float) -> dict:
    """One line of the table; a time that is missing is replaced by the reason."""
    line: dict[str, Any] = {**case._asdict(), "least_bytes": case.least_bytes}
    calls = card.buffers(case)
    if not calls:
        return line | {"microseconds": "too little memory"}
    took = card.microseconds([call.run for call in calls])
    line |= {"microseconds": took, "gb_s": case.least_bytes / took / 1e3}
    line["of_copy"] = line["gb_s"] / card.copy_rate
    if case.operator == "exp_segsum_backward":
        line["of_copy_full_matrices"] = 2 * case.nbytes / took / 1e3 / card.copy_rate
    if case.nbytes >= LARGE:
        full = line.get("of_copy_full_matrices")
        line["target"] = "met" if (full >= 1.7 if full else line["of_copy"] >= 0.9) else "missed"
    for key, compiled in (("torch_eager", False), ("torch_compile", True)):
        if isinstance(torch, str):
            line[key] = "absent"
        elif compiled and not compile_too:
            line[key] = "not run"
        elif time.perf_counter() > end:
            line[key] = "out of time"
        else:
            line[key] = torch.microseconds(card, case, calls, compiled)
    return line


def host_overhead(card: Card, operator: str) -> dict[str, float]:
    """Microseconds of the host for a call, on arrays too small to keep the GPU busy."""
    call = Call(card, Case(operator, "float32", (2, 8, 64) if "mod" in operator else (2, 64)))
    found = {}
    for how, function in (("plan.run", call.run), ("eager", call.eager)):
        rounds = []
        for _ in range(20):
            card.cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            for _ in range(100):
                function()
            rounds.append((time.perf_counter() - start) / 100 * 1e6)
        found[how] = statistics.median(rounds)
    return found


FIRST_CALL = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import numpy as np, cupy, cupyops
rows, matrices = cupy.ones((2, 256, 64), np.float32), cupy.ones((2, 64, 64), np.float32)
arguments = {"modulate": (rows, {"scale": rows[:, 0]}),
             "modulate_backward": (rows, {"grad_output": rows, "scale": rows[:, 0]}),
             "exp_segsum": (matrices[0], {}),
             "exp_segsum_backward": (matrices, {"grad_output": matrices})}
cupy.cuda.Device().synchronize()
seconds = {}
for name, (first, rest) in arguments.items():
    start = time.perf_counter()
    getattr(cupyops, name)(first, **rest)
    cupy.cuda.Device().synchronize()
    seconds[name] = time.perf_counter() - start
print(json.dumps(seconds))
"""


def first_calls() -> dict[str, Any]:
    """Seconds of each operator's first call in new processes: the second finds a full cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"CUPY_CACHE_DIR": cache, "CUPY_CACHE_IN_MEMORY": "0"}
        command = [sys.executable, "-c", FIRST_CALL, str(ROOT)]
        found: dict[str, Any] = {}
        for state in ("cold", "warm"):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            lines = (done.stderr.strip() or "no output").splitlines()
            found[state] = json.loads(done.stdout) if done.returncode == 0 else lines[-1]
        return found


# -- the command --------------------------------------------------------------------------------


def require_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        sys.exit(f"gpu.py: CuPy could not be imported: {error}")
    try:
        if cupy.cuda.runtime.getDeviceCount():
            return cupy
        sys.exit("gpu.py: no CUDA GPU was found")
    except cupy.cuda.runtime.CUDARuntimeError as error:
        sys.exit(f"gpu.py: no CUDA GPU answers: {error}")


def sent(cupy: Any, values: np.ndarray) -> Any:
    memory = cupy.asarray(values.reshape(-1).view(np.uint8))
    return cupy.ndarray(values.shape, values.dtype, memory.data)


def find_torch() -> Torch | str:
    try:
        return Torch()
    except (ImportError, OSError, RuntimeError) as error:
        return f"absent: {error}"


def environment_of(cupy: Any, card: Card, torch: Torch | str) -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown (nvidia-smi does not answer)"
    runtime, name = cupy.cuda.runtime, card.properties["name"]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "card": name.decode() if isinstance(name, bytes) else name,
        "driver": driver,
        "driver_cuda": runtime.driverGetVersion(),
        "runtime_cuda": runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "python": platform.python_version(),
        "cupyops": cupyops.__version__,
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "torch": torch if isinstance(torch, str) else torch.version,
    }


def cases(quick: bool, operators: list[str]) -> list[Case]:
    found = []
    for operator in operators:
        shapes = MODULATION if operator.startswith("modulate") else SEGMENTS
        for dtype in ("bfloat16",) if quick else TIMED:
            picked = (shapes[0], shapes[-1]) if quick else shapes
            found += [Case(operator, dtype, shape) for shape in picked]
    return found


def cell(line: dict[str, Any], key: str, form: str) -> str:
    value = line.get(key, "")
    return format(value, form) if isinstance(value, float) else str(value).partition(":")[0]


COLUMNS = {
    "microseconds": ("us", ".1f"),
    "gb_s": ("GB/s", ".0f"),
    "of_copy": ("/copy", ".2f"),
    "of_copy_full_matrices": ("/copy, full", ".2f"),
    "target": ("target", ""),
    "torch_eager": ("torch us", ".1f"),
    "torch_compile": ("compile us", ".1f"),
}


def print_row(first: tuple[str, ...], rest: list[str]) -> None:
    print("{:<20}{:<10}{:<16}".format(*first) + "".join(f"{text:>12}" for text in rest), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="bfloat16, two shapes, few repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    cupy = require_cupy()
    started = time.perf_counter()
    checks = check_all(functools.partial(sent, cupy), lambda array: array.get())
    wrong = []
    for operator, by_dtype in checks.items():
        faults = {dtype: fault for dtype, fault in by_dtype.items() if fault != "ok"}
        wrong += [operator] if faults else []
        for dtype, fault in faults.items():
            print(f"WRONG {operator} {dtype} {fault}")
        print(f"check {operator}: {'WRONG, no times follow' if faults else 'ok, all dtypes'}")
    right = [operator for operator in OPERATORS if operator not in wrong]

    card, torch = Card(cupy, arguments.quick), find_torch()
    report = environment_of(cupy, card, torch)
    print("\n" + "\n".join(f"{key}: {value}" for key, value in report.items()))
    print(f"copy on the device: {card.copy_rate:.0f} GB/s, read and written\n")
    report |= {"copy_gb_s": card.copy_rate, "checks": checks, "cases": []}
    print_row(("operator", "dtype", "shape"), [title for title, _ in COLUMNS.values()])
    for case in cases(arguments.quick, right):
        shapes = MODULATION if case.is_modulation else SEGMENTS
        # To compile takes torch seconds: one shape, and the types that most people use.
        compile_too = not arguments.quick and case.shape == shapes[-1] and case.dtype != "float16"
        line = measure(card, case, torch, compile_too, started + SECONDS)
        report["cases"].append(line)
        shape = "x".join(map(str, case.shape))
        texts = [cell(line, key, form) for key, (_, form) in COLUMNS.items()]
        print_row((case.operator, case.dtype, shape), texts)

    report["host_microseconds"] = {name: host_overhead(card, name) for name in right}
    report["first_call_seconds"] = first_calls() if right else {}
    print("\nmicroseconds of the host for a call")
    for name, found in report["host_microseconds"].items():
        print(f"  {name:<20} plan.run {found['plan.run']:6.1f}   eager {found['eager']:6.1f}")
    print("seconds of a first call, without and with a kernel cache")
    for state, seconds in report["first_call_seconds"].items():
        each = (
            seconds
            if isinstance(seconds, str)
            else "  ".join(f"{name} {value:.3f}" for name, value in seconds.items())
        )
        print(f"  {state}: {each}")
    print(f"\n{time.perf_counter() - started:.0f} seconds")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
