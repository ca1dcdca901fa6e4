"""Behind ``cupyops.aclnn``: what each function accepts, executors, and the two phases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import Any, NamedTuple, NoReturn, TypeAlias

from cupyops._arrays import (
    ACCEPTED_TYPES,
    Array,
    Arrays,
    ArraySpec,
    address_of,
    is_writable,
    spec_of,
)
from cupyops._checks import DTYPES, FLOAT64, a_type, check_same_place, fail
from cupyops._exp_segsum import _EXP_SEGSUM, _EXP_SEGSUM_BACKWARD
from cupyops._modulate import _MODULATE, _MODULATE_BACKWARD
from cupyops._plan import Operator, Plan, plan_for
from cupyops._status import NullPointerError, aclnnStatus, report

Shape: TypeAlias = tuple[int, ...]
Accepted: TypeAlias = Mapping[str, Shape]
"""Shapes that one tensor may have, by the form that messages name."""

STORED = tuple(dtype for dtype in DTYPES if dtype != FLOAT64)
"""FLOAT16, BFLOAT16 and FLOAT; the C library has no double."""


@dataclass(frozen=True, eq=False)
class Function:
    """A function of the C API: an operator under the names and within the limits of C."""

    operator: Operator
    options: tuple[Any, ...]
    arguments: tuple[str, ...]
    """In the order of C; the first decides library, device, dtype and all shapes."""
    required: tuple[str, ...]
    """Null pointers if None."""
    ranks: tuple[int, ...]
    """Of the first tensor."""
    shapes: Callable[[Shape], Mapping[str, Accepted]]
    """From the shape of the first tensor, those of all that are tied to it."""
    optional_in_name: tuple[str, ...] = ()
    """Invalid if None, whatever C calls them."""
    gradients: tuple[tuple[str, str], ...] = ()
    """(gradient, parameter): both or neither."""
    empty_together: tuple[str, ...] = ()
    """Tensors that have to be empty where the first is."""

    @property
    def name(self) -> str:
        return self.operator.name

    def check(self, tensors: Mapping[str, Array | None]) -> None:
        """Refuse, from metadata alone, what C refuses; null pointers come first, as there."""
        self._check_presence(tensors)
        specs = {key: _read(self.name, key, t) for key, t in tensors.items() if t is not None}
        first_name = self.arguments[0]
        first = specs[first_name]
        for key, spec in specs.items():
            check_same_place(self.name, key, spec, first_name, first)
        for key, spec in specs.items():
            self._check_dtype(key, spec, first)
        self._check_shapes(specs, first)

    def _check_presence(self, tensors: Mapping[str, Array | None]) -> None:
        for key in self.required:
            if tensors[key] is None:
                fail(NullPointerError, self.name, key, "is None", ACCEPTED_TYPES)
        for gradient, parameter in self.gradients:
            if tensors[gradient] is None and tensors[parameter] is not None:
                wanted = f"{ACCEPTED_TYPES}, since {parameter} is given"
                fail(NullPointerError, self.name, gradient, "is None", wanted)
        for gradient, parameter in self.gradients:
            if tensors[gradient] is not None and tensors[parameter] is None:
                got = f"is given although {parameter} is None"
                fail(ValueError, self.name, gradient, got, "None")
        for key in self.optional_in_name:
            if tensors[key] is None:
                fail(ValueError, self.name, key, "is None", f"{ACCEPTED_TYPES} despite its name")

    def _check_dtype(self, key: str, spec: ArraySpec, first: ArraySpec) -> None:
        if spec.dtype not in STORED:
            wanted = f"{', '.join(map(str, STORED[:-1]))} or {STORED[-1]} in native byte order"
        elif spec.dtype != first.dtype:
            wanted = f"{first.dtype}, the dtype of {self.arguments[0]}"
        else:
            return
        fail(ValueError, self.name, key, f"has dtype {spec.dtype}", wanted)

    def _check_shapes(self, specs: Mapping[str, ArraySpec], first: ArraySpec) -> None:
        if len(first.shape) not in self.ranks:
            got, wanted = f"has shape {first.shape}", " or ".join(map(str, self.ranks))
            fail(ValueError, self.name, self.arguments[0], got, f"{wanted} axes")
        accepted = self.shapes(first.shape)
        for key, spec in specs.items():
            if key in accepted and spec.shape not in accepted[key].values():
                wanted = " or ".join(f"{form} = {shape}" for form, shape in accepted[key].items())
                fail(ValueError, self.name, key, f"has shape {spec.shape}", wanted)
        for key in self.empty_together:
            if key in specs and specs[key].size and not first.size:
                got = f"has shape {specs[key].shape} although {self.arguments[0]} is empty"
                fail(ValueError, self.name, key, got, "an empty tensor or None")


def _read(function: str, argument: str, value: object) -> ArraySpec:
    """The metadata of an array; what raises when it is looked at is a bad argument too."""
    try:
        spec = spec_of(value)
        if spec is not None:  # all that a plan is going to ask
            address_of(value)
            is_writable(value)
    except Exception:
        fail(TypeError, function, argument, "cannot be read as an array", ACCEPTED_TYPES)
    if spec is None:
        fail(TypeError, function, argument, f"is {_kind(value)}", ACCEPTED_TYPES)
    return spec


def _kind(value: object) -> str:
    try:
        return a_type(value)
    except Exception:
        return "an object that does not tell its type"


# ---------------------------------------------------------------------------------------------
# Executors


class _Call(NamedTuple):
    function: Function
    plan: Plan
    inputs: Arrays
    outs: Arrays


class aclOpExecutor:
    """A checked call, bound to its tensors. Made by the ``GetWorkspaceSize`` functions.

    Phase two may run it **once**, unless `aclSetAclOpExecutorRepeatable` was called before. A run
    that is refused because of its arguments does not count; one that has begun does, even if a
    launch fails then. A used or destroyed executor holds no tensor any more. Threads that share an
    executor run it one after another. It can be neither copied nor pickled: TypeError.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyops.aclnn import *
    >>> x, out = np.zeros((1, 1, 3), np.float32), np.empty((1, 1, 3, 3), np.float32)
    >>> status, workspace_size, executor = aclnnExpSegsumGetWorkspaceSize(x, out)
    >>> executor
    <aclOpExecutor of aclnnExpSegsum>
    >>> aclnnExpSegsum(None, 0, executor, None).name
    'ACLNN_SUCCESS'
    >>> executor
    <aclOpExecutor was already used>
    >>> aclnnExpSegsum(None, 0, executor, None).name
    'ACLNN_ERR_PARAM_INVALID'
    """

    __module__ = "cupyops.aclnn"

    _call: _Call | None = None
    _ended: str = "was not made by a GetWorkspaceSize function"
    """Why there is no call."""
    _repeatable: bool = False
    _lock = threading.RLock()  # not a plain lock: a finalizer may destroy what its thread runs

    def _live(self, function: str) -> _Call:
        """The call, for as long as the lock is held."""
        if self._call is None:
            fail(ValueError, function, "executor", self._ended, "one that is still to run")
        return self._call

    def _end(self, reason: str) -> None:
        self._call, self._ended = None, reason

    def __repr__(self) -> str:
        call = self._call
        state = self._ended if call is None else f"of {call.function.name}"
        return f"<aclOpExecutor {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an aclOpExecutor cannot be copied or pickled: it may run only once")


def aclSetAclOpExecutorRepeatable(executor: aclOpExecutor | None) -> aclnnStatus:
    """Let phase two run an executor any number of times, until `aclDestroyAclOpExecutor`.

    Parameters
    ----------
    executor : aclOpExecutor
        From a ``GetWorkspaceSize`` function, and not yet run.

    Returns
    -------
    aclnnStatus
        161001 if `executor` is None, 161002 if it is none, or was already used or destroyed.

    Notes
    -----
    Every run reads and writes the tensors of phase one anew. Source:
    ``aclSetAclOpExecutorRepeatable`` of CANN's aclnn API.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyops.aclnn import *
    >>> x, out = np.zeros((1, 1, 3), np.float32), np.empty((1, 1, 3, 3), np.float32)
    >>> status, workspace_size, executor = aclnnExpSegsumGetWorkspaceSize(x, out)
    >>> assert aclSetAclOpExecutorRepeatable(executor) == ACLNN_SUCCESS, aclGetRecentErrMsg()
    >>> for decay in (1, 2):
    ...     x[...] = np.log(decay)
    ...     assert aclnnExpSegsum(None, 0, executor, None) == ACLNN_SUCCESS, aclGetRecentErrMsg()
    ...     print(out[0, 0, 2].tolist())
    [1.0, 1.0, 1.0]
    [4.0, 2.0, 1.0]
    >>> assert aclDestroyAclOpExecutor(executor) == ACLNN_SUCCESS, aclGetRecentErrMsg()
    """
    name = "aclSetAclOpExecutorRepeatable"
    try:
        checked = _check_executor(name, executor)
        with checked._lock:
            checked._live(name)
            checked._repeatable = True
    except Exception as error:
        return report(name, error)
    return aclnnStatus.ACLNN_SUCCESS


def aclDestroyAclOpExecutor(executor: aclOpExecutor | None) -> aclnnStatus:
    """End an executor that has not been used up, and let go of its tensors.

    A repeatable executor lives until then. One that is not ends by its run and must not be
    destroyed again, as in C; destroying it instead of running it is fine.

    Parameters
    ----------
    executor : aclOpExecutor
        From a ``GetWorkspaceSize`` function.

    Returns
    -------
    aclnnStatus
        161001 if `executor` is None, 161002 if it is none, or was already used or destroyed.

    Notes
    -----
    Source: ``aclDestroyAclOpExecutor`` of CANN's aclnn API.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyops.aclnn import *
    >>> x, out = np.zeros((1, 1, 3), np.float32), np.empty((1, 1, 3, 3), np.float32)
    >>> status, workspace_size, executor = aclnnExpSegsumGetWorkspaceSize(x, out)
    >>> aclDestroyAclOpExecutor(executor).name
    'ACLNN_SUCCESS'
    >>> aclDestroyAclOpExecutor(executor).name
    'ACLNN_ERR_PARAM_INVALID'
    >>> print(aclGetRecentErrMsg())
    aclDestroyAclOpExecutor: executor was destroyed; expected one that is still to run
    """
    name = "aclDestroyAclOpExecutor"
    try:
        checked = _check_executor(name, executor)
        with checked._lock:
            checked._live(name)
            checked._end("was destroyed")
    except Exception as error:
        return report(name, error)
    return aclnnStatus.ACLNN_SUCCESS


PhaseOne: TypeAlias = tuple[aclnnStatus, int, aclOpExecutor | None]


def _check_executor(function: str, executor: aclOpExecutor | None) -> aclOpExecutor:
    if executor is None:
        fail(NullPointerError, function, "executor", "is None", "an aclOpExecutor")
    if type(executor) is not aclOpExecutor:  # isinstance would ask the object
        fail(TypeError, function, "executor", f"is {_kind(executor)}", "an aclOpExecutor")
    return executor


# ---------------------------------------------------------------------------------------------
# The two phases


def phase_one(function: Function, *tensors: Array | None) -> PhaseOne:
    """Check the tensors, plan the call, and bind it to an executor."""
    try:
        by_name = dict(zip(function.arguments, tensors, strict=True))
        function.check(by_name)
        operator = function.operator
        inputs = tuple(by_name[operator.label(name)] for name in operator.inputs)
        outs = tuple(by_name[operator.label(name)] for name in operator.outputs)
        out = outs[0] if operator.result is None else outs
        plan = plan_for(operator, inputs, out, function.options)
    except Exception as error:
        return report(function.name, error), 0, None
    executor = aclOpExecutor()
    executor._call = _Call(function, plan, inputs, outs)
    executor._lock = threading.RLock()
    return aclnnStatus.ACLNN_SUCCESS, plan.workspace_size, executor


def phase_two(
    function: Function,
    workspace: Array | None,
    workspace_size: int,
    executor: aclOpExecutor | None,
    stream: Any,
) -> aclnnStatus:
    """Run an executor once all arguments have been checked."""
    name, running = function.name, False
    try:
        checked = _check_executor(name, executor)
        size = _check_workspace(name, workspace, workspace_size)
        with checked._lock:
            call = checked._live(name)
            plan, inputs, outs = call.plan, call.inputs, call.outs
            if call.function is not function:
                fail(ValueError, name, "executor", f"is of {call.function.name}", f"one of {name}")
            if size < plan.workspace_size:
                wanted = f"at least {plan.workspace_size}, as phase one said"
                fail(ValueError, name, "workspace_size", f"is {size}", wanted)
            _check_stream(plan, stream)
            addresses = plan.check_run(inputs, outs, workspace, stream)
            if not checked._repeatable:
                checked._end("was already used")
            running = True
            plan.execute(inputs, outs, addresses, workspace, stream)
    except Exception as error:
        return report(name, error, running=running)
    return aclnnStatus.ACLNN_SUCCESS


def _check_workspace(function: str, workspace: Array | None, workspace_size: object) -> int:
    """The size as a number; type and layout of the array are left to the plan."""
    name = "workspace_size"
    try:
        size = index(workspace_size)  # type: ignore[arg-type]
    except Exception:
        fail(TypeError, function, name, f"is {_kind(workspace_size)}", "a number of bytes")
    if not 0 <= size < 2**64:
        fail(ValueError, function, name, "is out of range", "what a uint64_t can hold")
    if workspace is None:
        if size:
            got = f"is None although workspace_size is {size}"
            fail(NullPointerError, function, "workspace", got, "an array of uint8")
        return size
    spec = _read(function, "workspace", workspace)
    if size > spec.nbytes:
        wanted = f"at most {spec.nbytes}, the bytes of workspace"
        fail(ValueError, function, name, f"is {size}", wanted)
    return size


def _check_stream(plan: Plan, stream: Any) -> None:
    name = plan.operator.name
    try:
        plan.executor.check_stream(name, stream, plan.place.device)
    except (TypeError, ValueError):
        raise
    except Exception:  # the object raised when it was asked what it is
        fail(TypeError, name, "stream", f"is {_kind(stream)}", "a stream of the tensors' library")


# ---------------------------------------------------------------------------------------------
# What the C library accepts


def _modulate_shapes(shape: Shape) -> Mapping[str, Accepted]:
    b, _, d = shape
    rows = {"(B, D)": (b, d), "(B, 1, D)": (b, 1, d)}
    return {"scaleOptional": rows, "shiftOptional": rows, "out": {"(B, L, D)": shape}}


def _modulate_backward_shapes(shape: Shape) -> Mapping[str, Accepted]:
    b, _, d = shape
    full, row = {"(B, L, D)": shape}, {"(B, D)": (b, d)}
    return {
        **dict.fromkeys(("input", "grad_input"), full),
        **dict.fromkeys(("scale", "shift", "grad_scale", "grad_shift"), row),
    }


def _exp_segsum_shapes(shape: Shape) -> Mapping[str, Accepted]:
    return {"out": {"(..., T, T)": (*shape, shape[-1])}}


def _exp_segsum_backward_shapes(shape: Shape) -> Mapping[str, Accepted]:
    t = shape[-1]
    square = {"(..., T, T)": (*shape[:-2], t, t)}
    return {"gradOutput": square, "gradSelf": square, "gradInput": {"(..., T)": shape[:-1]}}


def _named(operator: Operator, name: str, **labels: str) -> Operator:
    """The operator under the names of C, which its messages use then."""
    same = {key: key for key in (*operator.inputs, *operator.outputs)}
    return replace(operator, name=name, labels=same | labels)


MODULATE = Function(
    operator=_named(
        _MODULATE, "aclnnModulate", x="self", scale="scaleOptional", shift="shiftOptional"
    ),
    options=(True,),  # the forward of C has 1 + scale
    arguments=("self", "scaleOptional", "shiftOptional", "out"),
    required=("self", "out"),
    optional_in_name=("scaleOptional", "shiftOptional"),
    ranks=(3,),
    shapes=_modulate_shapes,
)
MODULATE_BACKWARD = Function(
    operator=_named(_MODULATE_BACKWARD, "aclnnModulateBackward", x="input"),
    options=(False,),  # the backward of C has scale alone
    arguments=(
        *("grad_output", "input", "scale", "shift"),
        *("grad_input", "grad_scale", "grad_shift"),
    ),
    required=("grad_output", "input", "grad_input"),
    gradients=(("grad_scale", "scale"), ("grad_shift", "shift")),
    ranks=(3,),
    shapes=_modulate_backward_shapes,
    empty_together=("scale", "shift"),
)
EXP_SEGSUM = Function(
    operator=_named(_EXP_SEGSUM, "aclnnExpSegsum", x="self"),
    options=(),
    arguments=("self", "out"),
    required=("self", "out"),
    ranks=(3, 4),
    shapes=_exp_segsum_shapes,
)
EXP_SEGSUM_BACKWARD = Function(
    operator=_named(
        *(_EXP_SEGSUM_BACKWARD, "aclnnExpSegsumBackward"),
        y="gradSelf",
        grad_output="gradOutput",
        out="gradInput",
    ),
    options=(),
    arguments=("gradOutput", "gradSelf", "gradInput"),
    required=("gradOutput", "gradSelf", "gradInput"),
    ranks=(4, 5),
    shapes=_exp_segsum_backward_shapes,
)
