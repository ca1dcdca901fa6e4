"""Tensors as arrays: what is accepted, the NumPy or CuPy view of a tensor's memory, the stream.

No operator is known here. A view shares the tensor's memory, whatever its strides: no copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cupyops._arrays import CUDA_DEVICE, ArraySpec, import_cupy
from cupyops._checks import BFLOAT16, DTYPES, a_type, fail
from cupyops._plan import EXECUTORS, Operator, plan_for, run_on_arrays
from cupyops._torch_modes import FLOATS

_STORAGE = dict(zip(FLOATS, DTYPES, strict=True))
_TORCH = {dtype: key for key, dtype in _STORAGE.items()}
Tensors: TypeAlias = tuple[Any, ...]
"""The tensors of one call in the order of the operator's names; None for one that is absent."""
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
            way_in = " (torch.from_dlpack makes one)" if hasattr(value, "__dlpack__") else ""
            fail(TypeError, function, name, got, f"a torch.Tensor{way_in}")
        # A compiled backward pass may not ask for the layout; there, NumPy and CuPy refuse others.
        dense = torch.compiler.is_compiling() or value.layout is torch.strided
        if not dense or value.is_nested:
            got = "is a nested tensor" if value.is_nested else f"has layout {value.layout}"
            fail(TypeError, function, name, got, "a dense tensor (layout torch.strided)")
        if value.dtype not in _STORAGE:
            fail(TypeError, function, name, f"has dtype {value.dtype}", _one_of(_STORAGE))
        if first is None:
            first, device = value, value.device
            if device.type not in _DEVICES:
                fail(ValueError, function, name, f"is on device {device}", _one_of(_DEVICES))
        elif value.device != first.device:
            expected = f"{first.device}, the device of the first tensor"
            fail(ValueError, function, name, f"is on device {value.device}", expected)


def _one_of(accepted: Iterable[object]) -> str:
    *some, last = map(str, accepted)
    return f"{', '.join(some)} or {last}"


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


def _numpy_view(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype is torch.bfloat16:  # which NumPy knows by the name of ml_dtypes only
        return _numpy_view(tensor.view(torch.int16)).view(BFLOAT16)
    try:
        array: np.ndarray[Any, Any] = tensor.numpy()
    except RuntimeError:  # it requires grad, in inference mode with gradients enabled
        array = tensor.detach().numpy()
    return array


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _cupy_view(tensor: Tensor) -> Any:
    tensor, from_dlpack = tensor.detach(), import_cupy().from_dlpack
    if tensor.dtype is torch.bfloat16:
        return from_dlpack(tensor.view(torch.int16)).view(BFLOAT16)
    return from_dlpack(tensor)


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
    operator: Operator,
    inputs: Tensors,
    options: tuple[bool, ...] = (),
    outs: Tensors | None = None,
) -> Tensors:
    """Compute on the memory of tensors. Results are allocated if `outs` is None.

    All checks of shapes and memory are those of the array functions.
    """
    if not inputs[0].is_cpu:
        return _run_on_gpu(operator, inputs, options, outs)
    # Few calls, since large arrays have emptied the caches that this code runs from.
    arrays = tuple([None if tensor is None else _numpy_view(tensor) for tensor in inputs])
    if outs is not None:
        into = tuple([None if out is None else _numpy_view(out) for out in outs])
        run_on_arrays(operator, arrays, into, options)
        return outs
    # NumPy's memory serves better than torch's: it comes in huge pages, where the system has
    # them on demand, and large new memory is written in a fifth of the time.
    made = run_on_arrays(operator, arrays, (None,) * len(operator.outputs), options)
    if operator.result is None:
        return (_from_numpy(made),)
    return tuple([None if array is None else _from_numpy(array) for array in made])


def _run_on_gpu(
    operator: Operator, inputs: Tensors, options: tuple[bool, ...], outs: Tensors | None
) -> Tensors:
    """Outputs and workspace are of torch's allocator, which knows the stream."""
    device = inputs[0].device
    empty = partial(torch.empty, device=device)
    with torch.cuda.device(device):
        stream = _stream(device.index, torch.cuda.current_stream(device).cuda_stream)
        # Current before the first view is made: DLPack then has nothing to wait for, which
        # could not be captured into a CUDA graph.
        with EXECUTORS["cupy"].context(f"{CUDA_DEVICE}{device.index}", stream):
            arrays = _cupy_views(inputs)
            out = None if outs is None else _as_out(_cupy_views(outs))
            plan = plan_for(operator, arrays, out, options)
            if outs is None:
                outs = tuple(
                    None if spec is None else empty(spec.shape, dtype=_TORCH[spec.dtype])
                    for spec in plan.outputs
                )
                out = _as_out(_cupy_views(outs))
            workspace = None
            if plan.workspace_size:
                workspace = _cupy_view(empty(plan.workspace_size, dtype=torch.uint8))
            named = dict(zip(operator.inputs[1:], arrays[1:], strict=True))
            plan.run(arrays[0], **named, out=out, workspace=workspace, stream=stream)
    return outs


def _cupy_views(tensors: Tensors) -> tuple[Any, ...]:
    return tuple(None if tensor is None else _cupy_view(tensor) for tensor in tensors)


def _as_out(arrays: tuple[Any, ...]) -> Any:
    return arrays[0] if len(arrays) == 1 else arrays
