"""Fixtures: the array library under test, and calls that watch their inputs."""

from __future__ import annotations

import os
import shutil
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from libraries import LIBRARIES, Cupy
from ptx import nvrtc
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


def pytest_sessionstart(session) -> None:
    """Without its tools the suite would prove nothing about the kernels: stop and say so."""
    if shutil.which("g++") is None:
        pytest.exit(
            "g++ is missing: the tests run the kernels' PTX through it. Install it first, for "
            "example with 'apt-get install g++' or 'dnf install gcc-c++'.",
            returncode=1,
        )
    try:
        nvrtc.version()
    except RuntimeError as error:
        pytest.exit(str(error), returncode=1)


@pytest.fixture(params=LIBRARIES, scope="session")
def xp(request):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield request.param(monkeypatch)


@pytest.fixture(scope="module")
def gpu():
    """A real one, for tests with the marker; skips with the reason where there is none."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Cupy(monkeypatch)


@pytest.fixture(scope="module")
def cupy(gpu):
    return gpu.cupy


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

    Arrays go in and come out as NumPy arrays, whatever the library under test. ``out`` keeps its
    strides and its surroundings, and comes back as the object it is; an input that ``out`` shares
    memory with has to be given through ``cupyops`` directly.
    """
    import cupyops

    def run(name: str, x, /, **arguments):
        out = arguments.pop("out", None)
        inputs = {"x": x} | {k: v for k, v in arguments.items() if isinstance(v, np.ndarray)}
        before = {key: bits(value).copy() for key, value in inputs.items()}
        given = {key: xp.put(frozen(value)) for key, value in inputs.items()}
        outs = out if isinstance(out, tuple) else (out,)
        sent = tuple(None if part is None else xp.put(part) for part in outs)
        if isinstance(out, tuple):
            kind = type(out)
            arguments["out"] = kind(*sent) if hasattr(kind, "_fields") else kind(sent)
        elif out is not None:
            arguments["out"] = sent[0]
        result = getattr(cupyops, name)(given.pop("x"), **(arguments | given))
        for key, value in inputs.items():
            assert np.array_equal(bits(value), before[key]), f"{name} wrote into {key}"
        for mine, theirs in zip(outs, sent, strict=True):
            if mine is not None:
                xp.copy_back(theirs, mine)

        def received(part, mine=None, theirs=None):
            return mine if mine is not None and part is theirs else xp.get(part)

        if not isinstance(result, tuple):
            return received(result, outs[0], sent[0])
        places = zip(result, *((outs, sent) if out is not None else [(None,) * 3] * 2), strict=True)
        return type(result)(*(None if r is None else received(r, m, t) for r, m, t in places))

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
