"""Status codes of the aclnn layer, which exception means which, and the last failure's text."""

from __future__ import annotations

import threading
from enum import IntEnum


class aclnnStatus(IntEnum):
    """What every function of ``cupyops.aclnn`` returns; the values are those of the C API.

    Examples
    --------
    >>> from cupyops.aclnn import aclnnStatus
    >>> for status in aclnnStatus:
    ...     print(status.value, status.name)
    0 ACLNN_SUCCESS
    161001 ACLNN_ERR_PARAM_NULLPTR
    161002 ACLNN_ERR_PARAM_INVALID
    361001 ACLNN_ERR_RUNTIME_ERROR
    561000 ACLNN_ERR_INNER
    """

    __module__ = "cupyops.aclnn"

    ACLNN_SUCCESS = 0
    """The call did what it was asked to do."""
    ACLNN_ERR_PARAM_NULLPTR = 161001
    """A tensor, executor or workspace that is required is None."""
    ACLNN_ERR_PARAM_INVALID = 161002
    """Any other argument that does not fit."""
    ACLNN_ERR_RUNTIME_ERROR = 361001
    """The driver, the compiler of the kernels or a launch failed."""
    ACLNN_ERR_INNER = 561000
    """Something unforeseen; a fault of this package and never of an argument."""


class NullPointerError(ValueError):
    """A required argument is None. The checks raise it; no caller ever sees it."""


def report(function: str, error: Exception, *, running: bool = False) -> aclnnStatus:
    """Note the failure for `aclGetRecentErrMsg`, and say which status it is.

    `running`: all arguments had been checked, so that none of them can be to blame.
    """
    try:
        text = str(error)
    except Exception:  # an argument may have raised an error that cannot even be printed
        text = type(error).__name__
    if isinstance(error, RuntimeError):  # as all errors of CuPy's driver and runtime are
        status = aclnnStatus.ACLNN_ERR_RUNTIME_ERROR
    elif running or not isinstance(error, TypeError | ValueError):
        status = aclnnStatus.ACLNN_ERR_INNER
        text = f"{type(error).__name__}: {text}"
    elif isinstance(error, NullPointerError):
        status = aclnnStatus.ACLNN_ERR_PARAM_NULLPTR
    else:
        status = aclnnStatus.ACLNN_ERR_PARAM_INVALID
    _recent.text = text if text.startswith(f"{function}: ") else f"{function}: {text}"
    return status


_recent = threading.local()


def aclGetRecentErrMsg() -> str:
    """The text of the last failure in this thread; "" before the first.

    A call that succeeds leaves the text alone, so only the status says whether a call failed.
    Reading does not clear it either, which the C function does.

    Returns
    -------
    str
        Function, argument, what it got and what it expected, on one line for a bad argument.

    Notes
    -----
    Source: ``aclGetRecentErrMsg`` of CANN's runtime API.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyops.aclnn import aclGetRecentErrMsg, aclnnExpSegsumGetWorkspaceSize
    >>> x = np.zeros((2, 3, 4), np.float32)
    >>> status, workspace_size, executor = aclnnExpSegsumGetWorkspaceSize(x, x)
    >>> status.name, workspace_size, executor
    ('ACLNN_ERR_PARAM_INVALID', 0, None)
    >>> aclGetRecentErrMsg()
    'aclnnExpSegsum: out has shape (2, 3, 4); expected (..., T, T) = (2, 3, 4, 4)'
    """
    text: str = getattr(_recent, "text", "")
    return text
