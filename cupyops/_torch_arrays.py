"""Tensors as arrays: what is accepted, the NumPy or CuPy view of a tensor's memory, the stream.

No operator is known here. A view shares the tensor's memory, whatever its strides: no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from cupyops._arrays import CUDA_DEVICE, ArraySpec, import_cupy
from cupyops._checks import BFLOAT16, DTYPES, a_type, fail
from cupyops._plan import EXECUTORS

_STORAGE = {
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: BFLOAT16,
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
_TORCH = {dtype: key for key, dtype in _STORAGE.items()}
assert _TORCH.keys() == set(DTYPES)
_DEVICES = ("cpu", "cuda", "meta")

# ---------------------------------------------------------------------------------------------
# What is accepted


def check_tensors(
    function: str, tensors: Mapping[str, object], first: Tensor | None = None
) -> None:
    """Refuse what is no dense tensor of a supported dtype on the device of the first."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            got = "is None" if value is None else f"is {a_type(value)}"
            fail(TypeError, function, name, got, "a torch.Tensor (torch.from_dlpack makes one)")
        if value.layout is not torch.strided or value.is_nested:
            got = "is a nested tensor" if value.is_nested else f"has layout {value.layout}"
            fail(TypeError, function, name, got, "a dense tensor (layout torch.strided)")
        if value.dtype not in _STORAGE:
            *some, last = map(str, _STORAGE)
            accepted = f"{', '.join(some)} or {last}"
            fail(TypeError, function, name, f"has dtype {value.dtype}", accepted)
        first = value if first is None else first
        if value.device.type not in _DEVICES:
            accepted = f"{', '.join(_DEVICES[:-1])} or {_DEVICES[-1]}"
            fail(ValueError, function, name, f"is on device {value.device}", accepted)
        if value.device != first.device:
            expected = f"{first.device}, the device of the first tensor"
            fail(ValueError, function, name, f"is on device {value.device}", expected)


def check_transforms(function: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Refuse what would lose derivatives: torch.library has reverse mode of ``backward`` only.

    Forward mode would give a tangent of zeros without a word.
    """
    if torch.compiler.is_compiling():  # which has checks of its own, and cannot trace these
        return
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if torch._C._functorch.is_gradtrackingtensor(tensor):
            got = "is differentiated by torch.func"
        elif forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            got = "has a tangent of forward-mode differentiation"
        else:
            continue
        way = "reverse mode: torch.autograd.grad or Tensor.backward"
        fail(NotImplementedError, function, name, got, way)


def check_no_grad(function: str, tensors: Mapping[str, Tensor], why: str) -> None:
    """Refuse a result that would be a constant to autograd although an argument is none."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            expected = f"detached tensors or torch.no_grad(), since {why}"
            fail(RuntimeError, function, name, "requires grad", expected)


def spec_of(tensor: Tensor) -> ArraySpec:
    """Shape and dtype, for checks of a tensor without memory; its sizes may be symbols."""
    return ArraySpec._make((tuple(tensor.shape), _STORAGE[tensor.dtype], (), "numpy", "cpu"))


# ---------------------------------------------------------------------------------------------
# Memory


class Place(NamedTuple):
    """How tensors of one device are handed to a plan."""

    view: Callable[[Tensor], Any]
    """The array that is the tensor's memory."""
    stream: Any
    """The plan runs on this stream; None on the CPU."""


def _numpy_view(tensor: Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:  # which NumPy knows by the name of ml_dtypes only
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


def _cupy_view(tensor: Tensor) -> Any:
    tensor, from_dlpack = tensor.detach(), import_cupy().from_dlpack
    if tensor.dtype is torch.bfloat16:
        return from_dlpack(tensor.view(torch.int16)).view(BFLOAT16)
    return from_dlpack(tensor)


_HOST = Place(_numpy_view, None)


@contextmanager
def _on_gpu(device: torch.device) -> Iterator[Place]:
    # The stream becomes CuPy's current one before the first view is made: DLPack then has nothing
    # to wait for, which could not be captured into a CUDA graph.
    with torch.cuda.device(device):
        stream = _stream(device.index, torch.cuda.current_stream(device).cuda_stream)
        with EXECUTORS["cupy"].context(f"{CUDA_DEVICE}{device.index}", stream):
            yield Place(_cupy_view, stream)


class _Handle(NamedTuple):
    """A stream as CuPy's ``from_external`` takes it."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


@cache
def _stream(device: int, handle: int) -> Any:
    """CuPy's object for a stream of torch.

    Kept for good: CuPy 14 destroys a stream with the object that ``from_external`` made, while
    torch goes on using it. There are few, since torch takes its streams from a pool.
    """
    cupy = import_cupy()
    with cupy.cuda.Device(device):  # from_external gives the stream to the current device
        return cupy.cuda.Stream.from_external(_Handle(handle))


def run(
    plan_for: Callable[..., Any],
    first: Tensor,
    others: Mapping[str, Tensor | None],
    options: Mapping[str, bool],
    outs: tuple[Tensor | None, ...] | None = None,
) -> tuple[Tensor | None, ...]:
    """Plan and run an operator on the memory of tensors; results are made by torch if absent.

    All checks are those of the plan, and come before anything is allocated.
    """
    if first.device.type == "cpu":
        return _run(_HOST, plan_for, first, others, options, outs)
    with _on_gpu(first.device) as place:
        return _run(place, plan_for, first, others, options, outs)


def _run(
    place: Place,
    plan_for: Callable[..., Any],
    first: Tensor,
    others: Mapping[str, Tensor | None],
    options: Mapping[str, bool],
    outs: tuple[Tensor | None, ...] | None,
) -> tuple[Tensor | None, ...]:
    def views(tensors: Any) -> list[Any]:
        return [None if tensor is None else place.view(tensor) for tensor in tensors]

    def out_of(arrays: list[Any]) -> Any:
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=first.device)

    array = place.view(first)
    named = dict(zip(others, views(others.values()), strict=True))
    given = None if outs is None else out_of(views(outs))
    plan = plan_for(array, **named, **options, out=given)
    if outs is None:
        outs = tuple(None if s is None else empty(s.shape, _TORCH[s.dtype]) for s in plan.outputs)
        given = out_of(views(outs))
    workspace = None
    if plan.workspace_size:
        workspace = place.view(empty((plan.workspace_size,), torch.uint8))
    plan.run(array, **named, out=given, workspace=workspace, stream=place.stream)
    return outs
