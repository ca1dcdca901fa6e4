"""The array libraries that the contract is tested on: NumPy, a simulated GPU, CuPy on a GPU."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import pytest

import simulated


class Numpy:
    """Arrays are what the tests write."""

    name = "numpy"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pass

    def put(self, values: np.ndarray) -> Any:
        """The same values with the same strides, as the library's array."""
        return values

    def get(self, array: Any) -> np.ndarray:
        return array

    def copy_back(self, array: Any, values: np.ndarray) -> None:
        """Bring what an operator wrote into ``put(values)`` back to `values`."""


def aligned(values: np.ndarray) -> np.ndarray:
    """No GPU array lies at an address that is not a multiple of its item size."""
    return values if values.flags.aligned else values.copy()


class SimulatedGpu(Numpy):
    """The kernels' PTX, run on the CPU; arrays share memory with the tests' own."""

    name = "simulated"

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, target: str = simulated.TARGETS[0], **options: Any
    ) -> None:
        self.executor = simulated.SimulatedExecutor(target, **options)
        simulated.install(monkeypatch, self.executor)

    def put(self, values: np.ndarray) -> Any:
        return simulated.GpuArray(aligned(values))

    def get(self, array: Any) -> np.ndarray:
        return array.values

    def copy_back(self, array: Any, values: np.ndarray) -> None:
        if not values.flags.aligned:
            values[...] = array.values


class Cupy(Numpy):
    """A real GPU. A view travels with the whole of its base, so that its gaps can be checked."""

    name = "cupy"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cupy = require_gpu()

    def put(self, values: np.ndarray) -> Any:
        values = aligned(values)
        base, offset = _base_bytes(values)
        memory = self.cupy.asarray(base)
        return self.cupy.ndarray(
            values.shape, values.dtype, memory.data + offset, strides=values.strides
        )

    def get(self, array: Any) -> np.ndarray:
        return array.get()

    def copy_back(self, array: Any, values: np.ndarray) -> None:
        if not values.flags.aligned:
            values[...] = array.get()
            return
        base, offset = _base_bytes(values)
        base[...] = self.cupy.ndarray(base.shape, np.uint8, array.data - offset).get()


def _base_bytes(values: np.ndarray) -> tuple[np.ndarray, int]:
    """The memory of the array that a view belongs to, as bytes, and where the view starts."""
    root = values
    while isinstance(root.base, np.ndarray):
        root = root.base
    low, high = np.lib.array_utils.byte_bounds(root)
    memory = (ctypes.c_ubyte * (high - low)).from_address(low)
    return np.frombuffer(memory, np.uint8), values.ctypes.data - low


@functools.cache
def require_gpu() -> Any:
    """CuPy, or a skip that says what is missing."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no CUDA GPU: {error}")
    if not count:
        pytest.skip("no CUDA GPU")
    return cupy


LIBRARIES = [
    pytest.param(Numpy, id="numpy"),
    pytest.param(SimulatedGpu, id="simulated"),
    pytest.param(Cupy, id="cupy", marks=pytest.mark.gpu),
]
