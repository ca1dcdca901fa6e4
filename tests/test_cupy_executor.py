"""The thin layer between plans and CuPy, against a stand-in for CuPy.

The stand-in has CuPy's names and notes how it is called; its kernels run from their PTX on the CPU.
Tests that need the real one carry the marker `gpu`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupyops
import simulated
from cupyops import _kernels, _launch, _plan
from ptx import Executor, Memory, memory


class Device:
    """Only a number: the package sets devices through the runtime."""

    current = 0

    def __init__(self, number: int) -> None:
        self.id = number


class Stream:
    current: Stream

    def __init__(self, device_id: int = 0) -> None:
        self.device_id = device_id

    def use(self) -> None:
        Stream.current = self


NULL_STREAM = Stream.current = Stream(-1)


class ExternalStream(Stream):
    pass


class CompileException(Exception):
    pass


class Runtime:
    count = 2

    class CUDARuntimeError(RuntimeError):
        pass

    def getDeviceCount(self) -> int:
        if self.count == 0:
            raise self.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return self.count

    def getDevice(self) -> int:
        return Device.current

    def setDevice(self, number: int) -> None:
        Device.current = number


class ndarray:
    def __init__(self, values: np.ndarray, device: int = 0) -> None:
        self.values = values
        self.shape, self.dtype, self.strides = values.shape, values.dtype, values.strides
        self.device = Device(device)
        self.data = types.SimpleNamespace(ptr=values.ctypes.data)


ndarray.__module__ = "cupy"


class Cupy(types.ModuleType):
    """The parts of CuPy that the package uses."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.ndarray = ndarray
        self.compiled: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = []
        self.launched: list[dict[str, Any]] = []
        self.allocated: list[tuple[int, Stream]] = []
        self.compile_error: Exception | None = None
        self.cuda = types.SimpleNamespace(
            Device=Device,
            Stream=Stream,
            ExternalStream=ExternalStream,
            runtime=Runtime(),
            get_current_stream=lambda: Stream.current,
            compiler=types.SimpleNamespace(CompileException=CompileException),
        )

    def empty(self, shape: tuple[int, ...], dtype: Any) -> ndarray:
        self.allocated.append((Device.current, Stream.current))
        return ndarray(memory.empty(shape, dtype), Device.current)

    def RawModule(self, *, code: str, options: tuple[str, ...], name_expressions: Any) -> Any:
        return Module(self, code, options, name_expressions)


class Module:
    def __init__(self, cupy: Cupy, code: str, options: tuple[str, ...], names: Any) -> None:
        self.cupy, self.code, self.options, self.names = cupy, code, options, names
        self.built = False

    def get_function(self, name: str) -> Any:
        if not self.built:  # as in CuPy, compilation waits for the first look-up
            if self.cupy.compile_error is not None:
                raise self.cupy.compile_error
            time.sleep(0.01)  # long enough for another thread to get in between
            self.cupy.compiled.append((Device.current, self.names, self.options))
            self.built = True
        assert name in self.names
        (source,) = (s for s in simulated.SOURCES if self.code == _kernels.source_text(s))
        return Function(self.cupy, source, name, Device.current)


class Function:
    max_dynamic_shared_size_bytes = _kernels.DEFAULT_SHARED_BYTES

    def __init__(self, cupy: Cupy, source: str, name: str, device: int) -> None:
        self.cupy, self.source, self.name, self.device = cupy, source, name, device

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int, stream: Any) -> None:
        assert Device.current == self.device
        self.cupy.launched.append({"name": self.name, "args": args, "stream": stream})
        Executor(Memory()).launch(
            simulated.module(self.source, simulated.TARGETS[0]),
            self.name,
            grid=grid,
            block=block,
            args=args,
            shared_bytes=shared_mem,
        )


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cupy]:
    stand_in = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    monkeypatch.setitem(_plan.EXECUTORS, "cupy", _kernels.CupyExecutor())
    _plan._cached_plan.cache_clear()
    with contextlib.ExitStack() as stack:
        stack.callback(_plan._cached_plan.cache_clear)
        yield stand_in


def arrays(device: int = 0, length: int = 130) -> dict[str, ndarray]:
    rng = np.random.default_rng(1)
    shapes = {
        "x": (2, length, 12),
        "grad_output": (2, length, 12),
        "scale": (2, 12),
        "shift": (12,),
    }
    return {
        key: ndarray(memory.copy(rng.standard_normal(shape, np.float32)), device)
        for key, shape in shapes.items()
    }


def backward(given: dict[str, Any]) -> Any:
    rest = dict(given)
    return cupyops.modulate_backward(rest.pop("x"), **rest)


def host(given: dict[str, ndarray]) -> dict[str, np.ndarray]:
    return {key: value.values for key, value in given.items()}


def test_cupy_arrays_give_the_bits_of_numpy(cupy: Cupy) -> None:
    given = arrays()
    got, want = backward(given), backward(host(given))
    for mine, theirs in zip(got, want, strict=True):
        assert isinstance(mine, ndarray)
        assert mine.values.tobytes() == theirs.tobytes()


def test_planning_compiles_all_forms_at_once_and_running_compiles_nothing(cupy: Cupy) -> None:
    given = arrays()
    rest = dict(given)
    plan = cupyops.plan_modulate_backward(rest.pop("x"), **rest)
    ((device, names, options),) = cupy.compiled
    assert device == 0
    assert set(names) == {
        "modulate_backward_rows<f32, f32, true>",
        "modulate_backward_rows<f32, f32, false>",
        "modulate_backward_combine<f32, f32>",
    }
    assert options == _kernels.OPTIONS
    assert not cupy.launched
    plan.run(given["x"], **rest)
    backward(given)
    assert len(cupy.compiled) == 1
    assert len(cupy.launched) == 4


def test_the_scalar_form_takes_over_at_unaligned_addresses(cupy: Cupy) -> None:
    given = arrays()
    want = backward(host(given))
    rest = dict(given)
    plan = cupyops.plan_modulate_backward(rest.pop("x"), **rest)
    shifted = memory.empty(given["x"].shape, np.float32, offset=4)
    shifted[...] = given["x"].values
    got = plan.run(ndarray(shifted), **rest)
    assert cupy.launched[0]["name"] == "modulate_backward_rows<f32, f32, false>"
    assert len(cupy.compiled) == 1
    assert all(g.values.tobytes() == w.tobytes() for g, w in zip(got, want, strict=True))


def test_every_argument_has_an_explicit_type(cupy: Cupy) -> None:
    backward(arrays())
    y = cupyops.exp_segsum(ndarray(memory.copy(np.zeros((3, 8), np.float16))))
    cupyops.exp_segsum_backward(y, grad_output=y)
    cupyops.modulate(arrays()["x"])
    assert len({launch["name"] for launch in cupy.launched}) == 5
    for launch in cupy.launched:
        assert {type(a) for a in launch["args"]} <= {np.uint64, np.int64, np.int32}


def test_each_device_compiles_for_itself(cupy: Cupy) -> None:
    for device in (0, 1, 1, 0):
        got = backward(arrays(device))
        assert got.grad_input.device.id == device
    assert [device for device, _, _ in cupy.compiled] == [0, 1]
    assert Device.current == 0


def test_threads_compile_once(cupy: Cupy) -> None:
    barrier = threading.Barrier(8)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            barrier.wait()
            backward(arrays())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(cupy.compiled) == 1


def test_a_run_uses_the_given_stream_for_launches_and_allocations(cupy: Cupy) -> None:
    given = arrays()
    rest = dict(given)
    plan = cupyops.plan_modulate_backward(rest.pop("x"), **rest)
    for stream in (Stream(), ExternalStream(-1), None):
        cupy.launched.clear()
        cupy.allocated.clear()
        plan.run(given["x"], **rest, stream=stream)
        assert {launch["stream"] for launch in cupy.launched} == {stream}
        # Three gradients and the workspace.
        assert cupy.allocated == [(0, NULL_STREAM if stream is None else stream)] * 4
        assert Stream.current is NULL_STREAM


def test_the_device_and_stream_of_the_caller_stay(cupy: Cupy) -> None:
    mine = Stream(1)
    mine.use()
    Device.current = 1
    try:
        given = arrays(0)
        rest = dict(given)
        plan = cupyops.plan_modulate_backward(rest.pop("x"), **rest)
        plan.run(given["x"], **rest, stream=Stream(0))
        assert Device.current == 1
        assert Stream.current is mine
    finally:
        Device.current = 0
        NULL_STREAM.use()


def test_a_run_with_out_and_workspace_allocates_nothing(cupy: Cupy) -> None:
    given = arrays()
    rest = dict(given)
    plan = cupyops.plan_modulate_backward(rest.pop("x"), **rest)
    out = plan.run(given["x"], **rest)
    workspace = ndarray(memory.empty(plan.workspace_size, np.uint8, offset=3))
    cupy.allocated.clear()
    again = plan.run(given["x"], **rest, out=out, workspace=workspace)
    assert not cupy.allocated
    assert all(a is b for a, b in zip(again, out, strict=True))


def test_what_is_no_stream_of_the_device_is_refused(cupy: Cupy) -> None:
    given = arrays()
    rest = dict(given)
    plan = cupyops.plan_modulate_backward(rest.pop("x"), **rest)
    with pytest.raises(TypeError, match=r"modulate_backward: stream is an int; expected a cupy\."):
        plan.run(given["x"], **rest, stream=0)
    with pytest.raises(ValueError, match=r"stream belongs to device cuda:1; expected .* cuda:0"):
        plan.run(given["x"], **rest, stream=Stream(1))
    assert not cupy.launched


@pytest.mark.parametrize("name", ["grad_output", "scale", "shift"])
def test_numpy_and_cupy_do_not_mix(cupy: Cupy, name: str) -> None:
    given: dict[str, Any] = arrays()
    given[name] = given[name].values
    message = f"modulate_backward: {name} is an array of numpy; expected one of cupy, as x"
    with pytest.raises(TypeError, match=message):
        backward(given)
    given = {key: getattr(value, "values", value) for key, value in given.items()}
    out = (ndarray(memory.empty(given["x"].shape, np.float32)), None, None)
    with pytest.raises(TypeError, match=r"out\.grad_input is an array of cupy; expected one of"):
        backward(given | {"out": out})


def test_arrays_of_two_devices_are_refused_by_name(cupy: Cupy) -> None:
    given = arrays() | {"scale": arrays(1)["scale"]}
    message = "scale is on device cuda:1; expected cuda:0, the device of x"
    with pytest.raises(ValueError, match=message):
        backward(given)
    x = arrays()["x"]
    plan, workspace = cupyops.plan_modulate(x), ndarray(memory.empty(8, np.uint8), 1)
    with pytest.raises(ValueError, match="workspace is on device cuda:1"):
        plan.run(x, workspace=workspace)


def test_elements_off_their_boundary_are_refused(cupy: Cupy) -> None:
    raw = memory.empty(2 * 3 * 4 * 4 + 2, np.uint8)
    x = ndarray(raw[2:].view(np.float32).reshape(2, 3, 4))
    with pytest.raises(ValueError, match="modulate: x has elements at addresses that are not mult"):
        cupyops.modulate(x)
    fields = np.zeros((2, 3, 4), np.dtype([("a", np.float32), ("b", np.uint16)]))["a"]
    with pytest.raises(ValueError, match="modulate: x has elements at addresses that are not mult"):
        cupyops.modulate(ndarray(fields))


def test_an_empty_array_launches_nothing_but_zeros(cupy: Cupy) -> None:
    given = arrays(length=0)
    got = backward(given)
    assert got.grad_input.shape == (2, 0, 12)
    assert not got.grad_scale.values.any()
    assert not got.grad_shift.values.any()
    assert {launch["name"] for launch in cupy.launched} == {"modulate_backward_combine<f32, f32>"}
    y = cupyops.exp_segsum(ndarray(memory.empty((3, 0), np.float32)))
    assert y.shape == (3, 0, 0)


def test_shared_memory_beyond_the_default_is_permitted_at_load(cupy: Cupy) -> None:
    executor = _kernels.CupyExecutor()
    kernel = _launch.Kernel("modulate.cu", "modulate<f32, f32, true>")
    for shared_bytes, allowed in ((1024, 48 * 1024), (60_000, 60_000), (50_000, 60_000)):
        launch = _launch.Launch(kernel, (1, 1, 1), (1, 1, 1), shared_bytes, ())
        executor.prepare((launch,), "cuda:0")
        assert executor._functions["cuda:0", kernel].max_dynamic_shared_size_bytes == allowed


def test_a_compiler_that_is_missing_names_the_extra_to_install(cupy: Cupy) -> None:
    for error in (
        # As CuPy 13 and 14 put it, and as its loader did before.
        RuntimeError("CuPy failed to load libnvrtc.so.13: OSError: no such file"),
        RuntimeError("Failed to find CUDA headers"),
        ImportError("libnvrtc.so.13"),
    ):
        cupy.compile_error = error
        expected = rf"could not be compiled and loaded: {error}; .*NVRTC.*headers.*'cuda13'"
        with pytest.raises(RuntimeError, match=expected):
            backward(arrays())
    cupy.compile_error = CompileException("modulate_backward.cu(7): error: no")
    with pytest.raises(RuntimeError, match=r"does not compile(.|\n)*cu\(7\)"):
        backward(arrays())
    cupy.compile_error = None
    backward(arrays())  # a failure is not remembered


def test_a_plan_needs_no_arrays(cupy: Cupy) -> None:
    x = cupyops.ArraySpec((2, 130, 12), "float32", library="cupy")
    row = cupyops.ArraySpec((2, 12), np.float32, library="cupy", device="cuda:0")
    shared = cupyops.ArraySpec((12,), np.float32, library="cupy", device=0)
    plan = cupyops.plan_modulate_backward(x, grad_output=x, scale=row, shift=shared)
    assert len(cupy.compiled) == 1
    assert not cupy.allocated
    given = arrays()
    rest = dict(given)
    x = rest.pop("x")
    assert cupyops.plan_modulate_backward(x, **rest) is plan
    got, want = plan.run(x, **rest), backward(host(given))
    assert all(g.values.tobytes() == w.tobytes() for g, w in zip(got, want, strict=True))
    Device.current = 1
    assert cupyops.ArraySpec((3,), "float32", library="cupy").device == "cuda:1"
    Device.current = 0


def test_what_is_missing_is_named(cupy: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    x = cupyops.ArraySpec((2, 3, 4), "float32", library="cupy", device=0)
    cupy.cuda.runtime.count = 0
    with pytest.raises(RuntimeError, match=r"no CUDA driver or GPU answers: cudaErrorNoDevice"):
        cupyops.plan_modulate(x)
    with pytest.raises(RuntimeError, match=r"no CUDA driver or GPU answers: cudaErrorNoDevice"):
        cupyops.ArraySpec((2, 3, 4), "float32", library="cupy")
    cupy.cuda.runtime.count = 1
    other = cupyops.ArraySpec((2, 3, 4), "float32", library="cupy", device=1)
    with pytest.raises(RuntimeError, match=r"there is no device cuda:1; 1 GPU"):
        cupyops.plan_modulate(other)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"CuPy could not be imported.*extra 'cuda13'"):
        cupyops.plan_modulate(x)
    with pytest.raises(ImportError, match=r"CuPy could not be imported.*extra 'cuda13'"):
        cupyops.ArraySpec((2, 3, 4), "float32", library="cupy")


def test_a_missing_source_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(_kernels, "__file__", str(tmp_path / "cupyops" / "_kernels.py"))
    with pytest.raises(FileNotFoundError, match="installation is incomplete"):
        _kernels.source_directory()
