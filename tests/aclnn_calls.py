"""Calls of the aclnn layer by the name of the function, and the proof that one has failed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

import cupyops
from aclnn_table import OUTPUTS, SUCCESS, tensors
from cupyops import aclnn

Tensors = dict[str, Any]


def phase_one(function: str, given: Tensors) -> tuple[Any, int, Any]:
    return getattr(aclnn, f"{function}GetWorkspaceSize")(*given.values())


def phase_two(function: str, *arguments: Any) -> Any:
    return getattr(aclnn, function)(*arguments)


def memory(given: Tensors, xp: Any = None) -> dict[str, bytes]:
    """The bytes of all tensors, to see that a call has left them alone."""
    arrays = {k: v if xp is None else xp.get(v) for k, v in given.items() if v is not None}
    return {k: v.tobytes() for k, v in arrays.items() if type(v) is np.ndarray}


def eager(function: str, given: Tensors) -> dict[str, Any]:
    """The results of the top-level functions, by the names of C."""
    names = [name for name in given if name in OUTPUTS]
    if function == "aclnnModulate":
        x, scale, shift, _ = given.values()
        results = cupyops.modulate(x, scale=scale, shift=shift, one_plus_scale=True)
    elif function == "aclnnModulateBackward":
        grad_output, x, scale, shift, *_ = given.values()
        results = cupyops.modulate_backward(x, grad_output=grad_output, scale=scale, shift=shift)
    elif function == "aclnnExpSegsum":
        results = cupyops.exp_segsum(given["self"])
    else:
        y = given["gradSelf"]
        results = cupyops.exp_segsum_backward(y, grad_output=given["gradOutput"])
    return dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))


def put(xp: Any, given: Tensors) -> Tensors:
    return {name: None if value is None else xp.put(value) for name, value in given.items()}


def ready(function: str, given: Tensors | None = None) -> tuple[Any, Tensors]:
    """An executor that waits for phase two, and its tensors."""
    given = given or tensors(function)
    status, size, executor = phase_one(function, given)
    assert (status, size) == (SUCCESS, 0), aclnn.aclGetRecentErrMsg()
    return executor, given


def assert_failed(function: str, status: Any, expected: int, named: str | None = None) -> str:
    text = aclnn.aclGetRecentErrMsg()
    assert isinstance(status, aclnn.aclnnStatus)
    assert status == expected, f"{status!r}: {text}"
    assert text.startswith(f"{function}: "), text
    assert "\n" not in text
    if named is not None:
        assert re.search(rf"\b{named}\b", text), f"{named} is not named: {text}"
    return text
