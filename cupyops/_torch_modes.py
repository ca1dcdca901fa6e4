"""Who takes part in a call on tensors: compilation, tracing, modes, transforms, subclasses.

Torch's dispatcher tells them all, but what it takes to be called by it is felt up to some million
elements. The parts of torch that answer these questions are not public; without one of them, the
dispatcher has every call.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cupyops._checks import fail

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of tensors that are accepted."""

_PLAIN_TYPES: tuple[type, ...] = (Tensor, torch.nn.Parameter)
try:
    _dispatch_keys = torch._C._dispatch_keys
    # What the dispatcher goes by for dense memory and nothing else; made in inference mode, or not.
    # By name, since a tensor made here would look as the mode wants of the call that imports this.
    _KEYS, _SET = torch._C.DispatchKey, torch._C.DispatchKeySet
    _CPU = _SET(_KEYS.CPU).add(_KEYS.AutocastCPU)
    _CUDA = _SET(_KEYS.CUDA).add(_KEYS.AutocastCUDA)
    ON_CPU = {
        _CPU.raw_repr(),
        _CPU.add(_KEYS.ADInplaceOrView).add(_KEYS.AutogradCPU).raw_repr(),
    }
    ANYWHERE = ON_CPU | {
        _CUDA.raw_repr(),
        _CUDA.add(_KEYS.ADInplaceOrView).add(_KEYS.AutogradCUDA).raw_repr(),
    }
    _WATCHERS: tuple[Callable[[], Any], ...] = (
        torch._C._len_torch_dispatch_stack,
        torch._C._len_torch_function_stack,
        torch._C._are_functorch_transforms_active,
        torch._C._get_tracing_state,
        torch._C._autograd._profiler_enabled,
    )
except AttributeError:
    _PLAIN_TYPES, _WATCHERS, ON_CPU, ANYWHERE = (), (), set(), set()


def is_plain(tensors: Iterable[Any], where: Container[int]) -> bool:
    """Whether these are dense tensors of no class of their own, which nobody but autograd watches.

    They are `ON_CPU` or `ANYWHERE`, and of `FLOATS`.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    for watches in _WATCHERS:
        if watches():
            return False
    for value in tensors:
        if type(value) not in _PLAIN_TYPES or value.dtype not in FLOATS:
            return False
        if _dispatch_keys(value).raw_repr() not in where:
            return False
    return True


def check_transforms(function: str, arguments: Mapping[str, object]) -> None:
    """Refuse what would lose derivatives: torch.library has reverse mode of ``backward`` only.

    Forward mode would give a tangent of zeros without a word.
    """
    forward = forward_ad._current_level >= 0
    if not forward and not torch._C._are_functorch_transforms_active():
        return
    compiling = torch.compiler.is_compiling()  # what tensors are then, cannot be seen here
    for name, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            continue
        if not compiling and torch._C._functorch.is_gradtrackingtensor(tensor):
            got = "is differentiated by torch.func"
        elif forward and (compiling or _has_tangent(tensor)):
            got = "has a tangent of forward-mode differentiation"
        else:
            continue
        way = "reverse mode: torch.autograd.grad or Tensor.backward"
        fail(NotImplementedError, function, name, got, way)


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
