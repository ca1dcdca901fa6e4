"""The array libraries of this machine, and what the commands need of each of them."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyops._arrays import import_cupy, require_device
from cupyops.cli.errors import CommandError
from cupyops.cli.reference import Floats

NAMES = ("numpy", "cupy")


class Backend(NamedTuple):
    name: str
    xp: Any
    """The module with the functions of the array library."""
    put: Callable[[Floats], Any]
    """The library's array with the values and the strides of a NumPy array."""
    get: Callable[[Any], Floats]
    seconds: Callable[[Callable[[], Any], int], float]
    """``seconds(run, loops)``: the time that so many runs in a row take."""


class State(NamedTuple):
    """Whether a library can be used here, and if not, why."""

    usable: bool
    reason: str | None = None


def one_line(error: BaseException) -> str:
    """An exception as a line: its type, where its text does not say enough by itself."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def state_of(name: str) -> State:
    return State(True) if name == "numpy" else _cupy_state()


def _cupy_state() -> State:
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        return State(False, "CuPy is not installed")
    try:
        cupy = import_cupy()
    except Exception as error:  # a broken installation may raise anything
        cause = error.__cause__ if isinstance(error, ImportError) and error.__cause__ else error
        return State(False, f"CuPy is installed but cannot be imported: {one_line(cause)}")
    try:
        require_device(None)
    except Exception as error:
        return State(False, _why_no_device(cupy, error))
    return State(True)


def _why_no_device(cupy: Any, error: Exception) -> str:
    try:
        driver = int(cupy.cuda.runtime.driverGetVersion())
    except Exception:
        driver = 0
    detail = one_line(error.__cause__ or error)
    if not driver:
        return f"no CUDA driver answers: {detail}"
    return f"the CUDA driver answers, but no GPU can be used: {detail}"


def usable_backends(wanted: str | None) -> list[Backend]:
    """The back ends to work on; asking by name for one that cannot be used is an error."""
    names = NAMES if wanted is None else (wanted,)
    states = {name: state_of(name) for name in names}
    if wanted is not None and not states[wanted].usable:
        raise CommandError(f"back end {wanted} cannot be used here: {states[wanted].reason}")
    return [backend(name) for name in names if states[name].usable]


def backend(name: str) -> Backend:
    return _numpy() if name == "numpy" else _cupy(import_cupy())


def _numpy() -> Backend:
    return Backend("numpy", np, lambda values: values, lambda array: array, _host_seconds)


def _host_seconds(run: Callable[[], Any], loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        run()
    return time.perf_counter() - start


def _cupy(cupy: Any) -> Backend:
    def put(values: Floats) -> Any:
        # By bytes and strides: the values may be a view, of a dtype that CuPy does not copy.
        base, offset = _memory_of(values)
        memory = cupy.asarray(base)
        return cupy.ndarray(
            values.shape, values.dtype, memory.data + offset, strides=values.strides
        )

    def get(array: Any) -> Floats:
        values: Floats = array.get()
        return values

    def seconds(run: Callable[[], Any], loops: int) -> float:
        """The GPU's own time, by events in the current stream."""
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(loops):
            run()
        end.record()
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3

    return Backend("cupy", cupy, put, get, seconds)


def _memory_of(values: Floats) -> tuple[Floats, int]:
    """The contiguous array that a view looks at, as bytes, and where the view starts in it."""
    base = values if values.flags.c_contiguous else values.base
    if not isinstance(base, np.ndarray) or not base.flags.c_contiguous:
        base = values = np.ascontiguousarray(values)
    offset = values.ctypes.data - base.ctypes.data
    return base.reshape(-1).view(np.uint8), offset
