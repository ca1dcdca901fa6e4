"""Tensors of PyTorch on a GPU: streams, allocations and views, against stand-ins and the real one.

The stand-ins are the CuPy of `test_cupy_executor` with DLPack and foreign streams, and tensors on
the CPU that say they are on a GPU; the kernels run from their PTX.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import cupyops
import cupyops.torch
import test_cupy_executor as stand_in
from cupyops import _torch_arrays
from libraries import require_gpu
from support import DTYPE_NAMES, assert_same_bits, forward_part
from tensors import BFLOAT16, call, leaves, modulation, numpy
from test_cupy_executor import cupy  # noqa: F401 - a fixture

HANDLE = 0x5EED
"""Of torch's current stream."""


class GpuTensor(Tensor):
    device = torch.device("cuda:1")
    is_cpu = False


def on_gpu(given: Tensor) -> Tensor:
    return given.as_subclass(GpuTensor)


class Array(stand_in.ndarray):
    def view(self, dtype: Any) -> Array:
        return Array(self.values.view(dtype), self.device.id)


Array.__module__ = "cupy"
Array.__qualname__ = "ndarray"


class Stream(stand_in.Stream):
    handle: int
    destroyed: list[int] = []  # noqa: RUF012 - by all

    @classmethod
    def from_external(cls, foreign: Any) -> Stream:
        version, handle = foreign.__cuda_stream__()
        assert version == 0
        made = cls(stand_in.Device.current)
        made.handle = handle
        return made

    def __del__(self) -> None:  # as in CuPy 14, which takes a foreign stream for its own
        self.destroyed.append(self.handle)


class Device(stand_in.Device):
    def __enter__(self) -> None:
        self.before, stand_in.Device.current = stand_in.Device.current, self.id

    def __exit__(self, *_: object) -> None:
        stand_in.Device.current = self.before


class World:
    """What the stand-ins note."""

    def __init__(self, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cupy, self.viewed, self.allocated = fake, [], []
        fake.ndarray, fake.from_dlpack = Array, self.from_dlpack
        fake.cuda.Stream, fake.cuda.Device = Stream, Device
        self.torch_device: int | None = None
        monkeypatch.setattr(torch.cuda, "device", self.device)
        stream = types.SimpleNamespace(cuda_stream=HANDLE)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        self.empty = torch.empty
        monkeypatch.setattr(torch, "empty", self.noted_empty)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.torch_device = device.index
        yield
        self.torch_device = None

    def from_dlpack(self, given: Tensor) -> Array:
        # torch refuses on another device, or where a derivative would be lost; and it would let
        # the streams wait for each other if they were not one.
        assert self.torch_device == 1
        assert not given.requires_grad
        assert stand_in.Stream.current.handle == HANDLE
        self.viewed.append(given.data_ptr())
        assert given.dtype is not torch.bfloat16  # which CuPy's DLPack does not know
        return Array(numpy(given.as_subclass(Tensor)), 1)

    def noted_empty(self, shape: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append((dtype, device))
        return on_gpu(self.empty(shape, dtype=dtype))


@pytest.fixture
def world(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:  # noqa: F811
    _torch_arrays._stream.cache_clear()
    Stream.destroyed.clear()
    yield World(cupy, monkeypatch)
    _torch_arrays._stream.cache_clear()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_kernels_run_on_the_memory_and_the_stream_of_torch(world: World, dtype: str) -> None:
    p = modulation("B,D", "D", dtype)
    given = {key: on_gpu(value.detach()).requires_grad_() for key, value in leaves(p).items()}
    y = call("modulate", given, one_plus_scale=True)
    y.backward(p["grad_output"])
    a = on_gpu(torch.zeros(2, 5, dtype=p["x"].dtype)).requires_grad_()
    z = cupyops.exp_segsum(a)
    z.backward(torch.ones_like(z))
    want = call("modulate_backward", p, one_plus_scale=True)
    for key, expected in zip(("x", "scale", "shift"), want, strict=True):
        assert_same_bits(numpy(given[key].grad.as_subclass(Tensor)), numpy(expected))
    assert a.grad.tolist() == [[0, 4, 6, 6, 4]] * 2

    assert {launch["stream"].handle for launch in world.cupy.launched} == {HANDLE}
    assert world.cupy.allocated == []  # by CuPy
    assert {device for _, device in world.allocated} == {GpuTensor.device}
    for value in (*given.values(), y, p["grad_output"], a, z):
        assert value.data_ptr() in world.viewed
    assert stand_in.Stream.current is stand_in.NULL_STREAM
    assert stand_in.Device.current == 0


def test_the_workspace_is_torchs(world: World) -> None:
    x = on_gpu(torch.randn(2, 200, 8))
    row = on_gpu(torch.randn(2, 8))
    grads = cupyops.modulate_backward(x, grad_output=x, scale=row, shift=row)
    assert [dtype for dtype, _ in world.allocated] == [torch.float32] * 3 + [torch.uint8]
    want = cupyops.modulate_backward(numpy(x), grad_output=numpy(x), scale=numpy(row))
    assert_same_bits(numpy(grads.grad_scale.as_subclass(Tensor)), want.grad_scale)
    assert world.cupy.allocated == []


def test_out_is_written_in_place(world: World) -> None:
    p = modulation("B,D", None)
    given = {key: on_gpu(value) for key, value in forward_part(p).items()}
    out = on_gpu(torch.zeros(2, 3, 4, dtype=torch.float64))
    assert call("modulate", given, out=out) is out
    assert world.allocated == []
    assert_same_bits(numpy(out.as_subclass(Tensor)), numpy(call("modulate", forward_part(p))))


def test_streams_of_torch_are_not_destroyed(world: World) -> None:
    x = on_gpu(torch.randn(2, 3, 4))
    for _ in range(3):
        cupyops.modulate(x)
    first, *others = [launch["stream"] for launch in world.cupy.launched]
    assert all(other is first for other in others)
    assert first.device_id == 1
    assert Stream.destroyed == []


def test_nothing_is_allocated_for_wrong_arguments(world: World) -> None:
    with pytest.raises(ValueError, match=r"modulate: scale has shape \(2, 5\)"):
        cupyops.modulate(on_gpu(torch.ones(2, 3, 4)), scale=on_gpu(torch.ones(2, 5)))
    with pytest.raises(ValueError, match="scale is on device cpu; expected cuda:1, the device of"):
        cupyops.modulate(on_gpu(torch.ones(2, 3, 4)), scale=torch.ones(2, 4))
    assert world.allocated == []
    assert world.cupy.launched == []


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextmanager(lambda: (yield))())
    stream = types.SimpleNamespace(cuda_stream=HANDLE)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    with pytest.raises(ImportError, match=r"CuPy could not be imported: .*extra 'cuda13'"):
        cupyops.modulate(on_gpu(torch.ones(2, 3, 4)))


# -- a real GPU ---------------------------------------------------------------------------------


@pytest.fixture
def real() -> Any:
    found = require_gpu()
    if not torch.cuda.is_available():
        pytest.skip("this build of PyTorch sees no GPU")
    return found


def cuda(problem: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().cuda().requires_grad_() for key, value in problem.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("layout", ["B,D", "D", "B,L,D", "1,L,D"])
def test_modulation_on_a_gpu_has_the_bits_of_the_cpu(real: Any, layout: str, dtype: str) -> None:
    p = modulation(layout, layout, dtype)
    given = cuda(forward_part(p))
    y = call("modulate", given, one_plus_scale=True)
    y.backward(p["grad_output"].cuda())
    assert_same_bits(numpy(y.cpu()), numpy(call("modulate", forward_part(p), one_plus_scale=True)))
    want = call("modulate_backward", p, one_plus_scale=True)
    for key, expected in zip(("x", "scale", "shift"), want, strict=True):
        assert_same_bits(numpy(given[key].grad.cpu()), numpy(expected))


@pytest.mark.gpu
def test_derivatives_on_a_gpu_pass_gradcheck(real: Any) -> None:
    given = cuda(leaves(modulation("B,D", "D")))
    names = list(given)

    def function(*values: Tensor) -> Tensor:
        return call("modulate", dict(zip(names, values, strict=True)))

    x = torch.randn(2, 5, dtype=torch.float64, device="cuda", requires_grad=True)
    for f, values in ((function, tuple(given.values())), (cupyops.exp_segsum, (x,))):
        assert torch.autograd.gradcheck(f, values)
        assert torch.autograd.gradgradcheck(f, values)
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*values), f(*values))


@pytest.mark.gpu
def test_work_happens_in_the_order_of_torchs_stream(real: Any) -> None:
    """x is NaN until its stream has passed a long kernel; a step elsewhere reads NaN."""
    x = torch.full((8, 200, 64), torch.nan, device="cuda")
    ones, row, stream = torch.ones_like(x), torch.ones(8, 64, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(50):
        with torch.cuda.stream(stream):
            x.fill_(torch.nan)
            torch.cuda._sleep(300_000)
            x.copy_(ones)
            grads = cupyops.modulate_backward(x, grad_output=x, scale=row, shift=row)
            total = sum(grad.sum() for grad in grads)
        stream.synchronize()
        assert float(total) == x.numel() + 2 * 8 * 64 * 200
    assert stream.query()  # still there: nobody destroyed it


@pytest.mark.gpu
def test_memory_on_a_gpu_is_torchs(real: Any) -> None:
    x, row = torch.randn(4, 500, 64, device="cuda"), torch.randn(4, 64, device="cuda")
    pool = real.get_default_memory_pool()
    before = pool.used_bytes(), pool.total_bytes()
    grads = cupyops.modulate_backward(x, grad_output=x, scale=row, shift=row)
    y = cupyops.exp_segsum(row)
    assert (pool.used_bytes(), pool.total_bytes()) == before
    for given in (x, grads.grad_input, y, row.to(torch.bfloat16)):
        view = _torch_arrays._cupy_view(given)
        assert view.data.ptr == given.data_ptr()
    assert view.dtype == BFLOAT16


@pytest.mark.gpu
def test_a_cuda_graph_of_torch_captures_the_operators(real: Any) -> None:
    x, row = torch.randn(4, 500, 64, device="cuda"), torch.randn(4, 64, device="cuda")

    def step() -> tuple[Tensor, ...]:
        y = cupyops.modulate(x, scale=row, shift=row)
        return y, *cupyops.modulate_backward(x, grad_output=y, scale=row, shift=row)

    step()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
