"""Fixtures: the array library under test, and calls that watch their inputs."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from support import DTYPE_NAMES, bits

settings.register_profile(
    "cupyops",
    deadline=None,
    derandomize="HYPOTHESIS_EXPLORE" not in os.environ,  # set it to look for new examples
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("cupyops")


class NumpyLibrary:
    """How tests reach an array library; another one answers the same three questions."""

    name = "numpy"

    @staticmethod
    def put(values: np.ndarray):
        """The same values with the same strides, as the library's array."""
        return values

    @staticmethod
    def get(values) -> np.ndarray:
        return values


@pytest.fixture(params=[NumpyLibrary()], ids=lambda library: library.name, scope="session")
def xp(request):
    return request.param


@pytest.fixture(params=DTYPE_NAMES)
def dtype(request) -> str:
    return request.param


def frozen(values: np.ndarray) -> np.ndarray:
    view = values.view()
    view.flags.writeable = False
    return view


@pytest.fixture(scope="session")
def call(xp):
    """``call(name, x, **arguments)``: read-only inputs, and the proof that they did not change.

    Results come back as NumPy arrays. ``out`` is passed on as it is; an input that ``out`` shares
    memory with has to be given through ``cupyops`` directly.
    """
    import cupyops

    def run(name: str, x, /, **arguments):
        inputs = {"x": x} | {
            key: value
            for key, value in arguments.items()
            if isinstance(value, np.ndarray) and key != "out"
        }
        before = {key: bits(value).copy() for key, value in inputs.items()}
        given = {key: xp.put(frozen(value)) for key, value in inputs.items()}
        result = getattr(cupyops, name)(given.pop("x"), **(arguments | given))
        for key, value in inputs.items():
            assert np.array_equal(bits(value), before[key]), f"{name} wrote into {key}"
        if isinstance(result, tuple):
            return type(result)(*(None if part is None else xp.get(part) for part in result))
        return xp.get(result)

    return run


@pytest.fixture
def peak_bytes():
    """``peak_bytes(function)``: most bytes held at once during the call, and the result."""

    def measure(function):
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            result = function()
            return tracemalloc.get_traced_memory()[1] - before, result
        finally:
            tracemalloc.stop()

    return measure
