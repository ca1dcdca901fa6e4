"""Phase two of the aclnn layer: workspace, stream, device, and failures of the driver."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import test_cupy_executor as gpu
from aclnn_calls import assert_failed, eager, memory, phase_one, phase_two, put, ready
from aclnn_table import FUNCTIONS, INVALID, NULLPTR, OUTPUTS, RUNTIME, SUCCESS, tensors
from cupyops import _kernels, _plan, aclnn
from support import assert_same_bits

BACKWARD = "aclnnModulateBackward"
LONG = {"B": 2, "L": 130, "D": 12}


def long_call(xp: Any, dtype: str = "float32", seed: int = 0) -> tuple[Any, int, dict[str, Any]]:
    """A call whose sums take more than one chunk, so that a GPU needs scratch memory."""
    given = put(xp, tensors(BACKWARD, sizes=LONG, dtype=dtype, seed=seed))
    status, size, executor = phase_one(BACKWARD, given)
    assert status == SUCCESS, aclnn.aclGetRecentErrMsg()
    assert (size > 0) == (xp.name != "numpy")
    return executor, size, given


def outputs(xp: Any, given: dict[str, Any]) -> dict[str, bytes]:
    return memory({name: given[name] for name in given if name in OUTPUTS}, xp)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_sequence_of_a_c_program(xp, dtype) -> None:
    given = put(xp, tensors(BACKWARD, sizes=LONG, dtype=dtype))
    grad_output, x, scale, shift, grad_input, grad_scale, grad_shift = given.values()

    status, workspace_size, executor = aclnn.aclnnModulateBackwardGetWorkspaceSize(
        grad_output, x, scale, shift, grad_input, grad_scale, grad_shift
    )
    assert status == aclnn.ACLNN_SUCCESS, aclnn.aclGetRecentErrMsg()
    workspace = None
    if workspace_size > 0:
        workspace = xp.put(np.empty(workspace_size, np.uint8))
    status = aclnn.aclnnModulateBackward(workspace, workspace_size, executor, None)
    assert status == aclnn.ACLNN_SUCCESS, aclnn.aclGetRecentErrMsg()

    for name, want in eager(BACKWARD, given).items():
        assert_same_bits(xp.get(given[name]), xp.get(want))


@pytest.mark.parametrize("more", [0, 1, 500])
@pytest.mark.parametrize("offset", [0, 1, 15])
def test_any_workspace_that_is_large_enough_will_do(xp, offset: int, more: int) -> None:
    executor, size, given = long_call(xp)
    workspace = xp.put(np.full(offset + size + more, 0xFF, np.uint8)[offset:])
    for claimed in (size, size + more):
        status, _, executor = phase_one(BACKWARD, given)
        assert status == SUCCESS
        assert phase_two(BACKWARD, workspace, claimed, executor, None) == SUCCESS
        for name, want in eager(BACKWARD, given).items():
            assert_same_bits(xp.get(given[name]), xp.get(want))


class Raises:
    """Whatever is asked of it is an error."""

    def __getattribute__(self, name: str) -> Any:
        raise OSError(name)

    def __index__(self) -> int:
        raise OSError

    __eq__ = __hash__ = __bool__ = __len__ = __index__  # type: ignore[assignment]


def test_other_workspaces_have_the_status_of_the_table_and_use_nothing_up(xp) -> None:
    executor, size, given = long_call(xp)
    bytes_ = np.zeros(2 * size + 64, np.uint8)
    enough = xp.put(bytes_)
    first = next(iter(given.values()))
    refused = [
        # workspace, workspace_size, status, named
        (None, size + 1, NULLPTR, "workspace"),
        (None, 1, NULLPTR, "workspace"),
        (enough, -1, INVALID, "workspace_size"),
        (None, -1, INVALID, "workspace_size"),
        (enough, len(bytes_) + 1, INVALID, "workspace_size"),
        (enough, 2**64, INVALID, "workspace_size"),
        (enough, 10**5000, INVALID, "workspace_size"),
        *((enough, bad, INVALID, "workspace_size") for bad in (None, 1.0, "1", [], Raises(), 1j)),
        *((bad, size, INVALID, "workspace") for bad in (b"", "", [], 0, object(), Raises())),
        (xp.put(np.zeros((2 * size + 64, 1), np.uint8)), size, INVALID, "workspace"),
        (xp.put(bytes_[::2]), size, INVALID, "workspace"),
        (xp.put(bytes_[::-1]), size, INVALID, "workspace"),
        (xp.put(np.zeros(size + 64, np.int8)), size, INVALID, "workspace"),
        (xp.put(np.zeros(size + 64, np.float32)), size, INVALID, "workspace"),
        (first, size, INVALID, "workspace"),
    ]
    if xp.name == "numpy":
        refused.append((np.frombuffer(b"read-only", np.uint8), 0, INVALID, "workspace"))
        shared = given["grad_scale"].reshape(-1).view(np.uint8)
        refused.append((shared, 0, INVALID, "workspace"))
    else:
        refused += [
            (None, size, NULLPTR, "workspace"),
            (None, 0, INVALID, "workspace_size"),
            (enough, 0, INVALID, "workspace_size"),
            (enough, size - 1, INVALID, "workspace_size"),
            (xp.put(bytes_[: size - 1]), size, INVALID, "workspace_size"),
            (xp.put(bytes_[: size - 1]), size - 1, INVALID, "workspace_size"),
            (np.zeros(size, np.uint8), size, INVALID, "workspace"),
        ]
    before = outputs(xp, given)
    for workspace, claimed, expected, named in refused:
        status = phase_two(BACKWARD, workspace, claimed, executor, None)
        assert_failed(BACKWARD, status, expected, named)
        assert outputs(xp, given) == before
    assert phase_two(BACKWARD, enough, size, executor, None) == SUCCESS
    for name, want in eager(BACKWARD, given).items():
        assert_same_bits(xp.get(given[name]), xp.get(want))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numpy_has_no_streams(function: str) -> None:
    executor, given = ready(function)
    before = memory(given)
    for stream in (0, "stream", object(), Raises(), np.zeros(3)):
        assert_failed(function, phase_two(function, None, 0, executor, stream), INVALID, "stream")
    assert memory(given) == before
    assert phase_two(function, None, 0, executor, None) == SUCCESS


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in = gpu.Cupy()
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    monkeypatch.setitem(_plan.EXECUTORS, "cupy", _kernels.CupyExecutor())
    _plan._cached_plan.cache_clear()
    yield stand_in
    _plan._cached_plan.cache_clear()


class Gpu:
    """Puts arrays on a device of the stand-in for CuPy."""

    name = "cupy"

    def __init__(self, device: int = 0) -> None:
        self.device = device

    def put(self, values: np.ndarray) -> Any:
        return gpu.ndarray(values, self.device)

    def get(self, given: Any) -> np.ndarray:
        return given.values


def test_streams_and_devices_have_to_agree(cupy) -> None:
    executor, size, given = long_call(Gpu())
    workspace = Gpu().put(np.zeros(size, np.uint8))
    before = outputs(Gpu(), given)
    for stream in (0, "stream", object(), Raises(), gpu.Stream(1)):
        status = phase_two(BACKWARD, workspace, size, executor, stream)
        assert_failed(BACKWARD, status, INVALID, "stream")
    elsewhere = Gpu(1).put(np.zeros(size, np.uint8))
    for foreign in (elsewhere, np.zeros(size, np.uint8)):
        status = phase_two(BACKWARD, foreign, size, executor, None)
        assert_failed(BACKWARD, status, INVALID, "workspace")
    assert outputs(Gpu(), given) == before
    assert not cupy.launched
    stream = gpu.Stream(0)
    assert phase_two(BACKWARD, workspace, size, executor, stream) == SUCCESS
    assert {launch["stream"] for launch in cupy.launched} == {stream}
    assert not cupy.allocated
    for name, want in eager(BACKWARD, {k: v.values for k, v in given.items()}).items():
        assert_same_bits(given[name].values, want)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_tensors_of_two_libraries_or_devices_are_refused(cupy, function: str) -> None:
    for name in tensors(function):
        for host in (True, False):
            given = put(Gpu(), tensors(function))
            given[name] = given[name].values if host else Gpu(1).put(given[name].values)
            status, *rest = phase_one(function, given)
            assert_failed(function, status, INVALID, name)
            assert rest == [0, None]


def test_a_failure_of_compiler_or_driver_is_a_runtime_error(cupy, monkeypatch) -> None:
    given = put(Gpu(), tensors("aclnnModulate"))
    cupy.compile_error = gpu.CompileException("no such thing")
    status, *rest = phase_one("aclnnModulate", given)
    text = aclnn.aclGetRecentErrMsg()
    assert status == RUNTIME
    assert "no such thing" in text
    assert rest == [0, None]
    cupy.compile_error = None

    def launch(*args: Any, **kwargs: Any) -> None:
        raise gpu.Runtime.CUDARuntimeError("cudaErrorLaunchFailure")

    status, size, executor = phase_one("aclnnModulate", given)
    assert (status, size) == (SUCCESS, 0)
    monkeypatch.setattr(gpu.Function, "__call__", launch)
    status = phase_two("aclnnModulate", None, 0, executor, None)
    assert "cudaErrorLaunchFailure" in assert_failed("aclnnModulate", status, RUNTIME)
