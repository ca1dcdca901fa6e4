"""The four operators behind the two-phase C API of CANN's aclnn libraries, for code ported from it.

Phase one, ``aclnn<Operator>GetWorkspaceSize``, checks the tensors and returns ``(status,
workspace_size, executor)``; on failure ``(status, 0, None)``. Phase two, ``aclnn<Operator>``, runs
the executor on a stream, with scratch memory that the caller owns, and returns a status. A bad
argument never raises and never leaves a result half-written: the status says what is wrong, and
`aclGetRecentErrMsg` says it in words. Tensors are NumPy or CuPy arrays of one library and device,
float32, float16 or bfloat16, in any memory layout.

.. warning::
   `aclnnModulate` computes ``self * (1 + scale) + shift``, `aclnnModulateBackward` multiplies by
   ``scale`` without the 1: **they are not forward and backward of one function**, here as in the
   C library. ``cupyops.modulate`` and ``cupyops.modulate_backward`` with the same
   ``one_plus_scale`` are; with ``one_plus_scale=True`` they match the forward of this module.

Every check comes before the early return for empty tensors. A missing tensor is reported before
any other fault of the tensors. Where ``cupyops.modulate_backward`` and ``cupyops.modulate`` accept
an output that is the very same view as an input, so does this layer; any other overlap is refused.
"""

from __future__ import annotations

from typing import Any

from cupyops._aclnn import (
    EXP_SEGSUM,
    EXP_SEGSUM_BACKWARD,
    MODULATE,
    MODULATE_BACKWARD,
    PhaseOne,
    aclDestroyAclOpExecutor,
    aclOpExecutor,
    aclSetAclOpExecutorRepeatable,
    phase_one,
    phase_two,
)
from cupyops._arrays import Array
from cupyops._status import aclGetRecentErrMsg, aclnnStatus

__all__ = [
    "ACLNN_ERR_INNER",
    "ACLNN_ERR_PARAM_INVALID",
    "ACLNN_ERR_PARAM_NULLPTR",
    "ACLNN_ERR_RUNTIME_ERROR",
    "ACLNN_SUCCESS",
    "aclDestroyAclOpExecutor",
    "aclGetRecentErrMsg",
    "aclOpExecutor",
    "aclSetAclOpExecutorRepeatable",
    "aclnnExpSegsum",
    "aclnnExpSegsumBackward",
    "aclnnExpSegsumBackwardGetWorkspaceSize",
    "aclnnExpSegsumGetWorkspaceSize",
    "aclnnModulate",
    "aclnnModulateBackward",
    "aclnnModulateBackwardGetWorkspaceSize",
    "aclnnModulateGetWorkspaceSize",
    "aclnnStatus",
]

ACLNN_SUCCESS = aclnnStatus.ACLNN_SUCCESS
ACLNN_ERR_PARAM_NULLPTR = aclnnStatus.ACLNN_ERR_PARAM_NULLPTR
ACLNN_ERR_PARAM_INVALID = aclnnStatus.ACLNN_ERR_PARAM_INVALID
ACLNN_ERR_RUNTIME_ERROR = aclnnStatus.ACLNN_ERR_RUNTIME_ERROR
ACLNN_ERR_INNER = aclnnStatus.ACLNN_ERR_INNER


def aclnnModulateGetWorkspaceSize(
    self: Array, scaleOptional: Array, shiftOptional: Array, out: Array
) -> PhaseOne:
    """Phase one of ``out = self * (1 + scale) + shift``.

    .. warning::
       The factor is ``1 + scale``; `aclnnModulateBackward` has ``scale``. For a forward and a
       backward that belong together use ``cupyops.modulate`` and ``cupyops.modulate_backward`` with
       one ``one_plus_scale``.

    Parameters
    ----------
    self : array, shape (B, L, D)
        float32, float16 or bfloat16.
    scaleOptional, shiftOptional : array, shape (B, D) or (B, 1, D)
        Of the dtype of `self`. Required all the same, as in C: None is 161002.
    out : array, shape (B, L, D)
        Receives the result in phase two; has the dtype of `self`.

    Returns
    -------
    status : aclnnStatus
        161001 if `self` or `out` is None, 161002 for any other bad argument.
    workspace_size : int
        Bytes of scratch memory that phase two needs; always 0 on NumPy.
    executor : aclOpExecutor or None
        For `aclnnModulate`; None on failure.

    Notes
    -----
    ``out = self * (1 + scale) + shift``. Source: ``aclnnModulate`` of CANN's ops-nn library; the
    formula is adaptive layer norm's, Peebles and Xie, arXiv:2212.09748, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyops.aclnn import *
    >>> x, out = np.ones((1, 2, 3), np.float32), np.empty((1, 2, 3), np.float32)
    >>> scale, shift = np.full((1, 3), 0.5, np.float32), np.full((1, 3), 2, np.float32)
    >>> status, workspace_size, executor = aclnnModulateGetWorkspaceSize(x, scale, shift, out)
    >>> assert status == ACLNN_SUCCESS, aclGetRecentErrMsg()
    >>> workspace = np.empty(workspace_size, np.uint8)
    >>> status = aclnnModulate(workspace, workspace_size, executor, None)
    >>> assert status == ACLNN_SUCCESS, aclGetRecentErrMsg()
    >>> out[0, 0]
    array([3.5, 3.5, 3.5], dtype=float32)
    """
    return phase_one(MODULATE, self, scaleOptional, shiftOptional, out)


def aclnnModulate(
    workspace: Array | None, workspace_size: int, executor: aclOpExecutor | None, stream: Any
) -> aclnnStatus:
    """Phase two: run an executor of `aclnnModulateGetWorkspaceSize`.

    Parameters
    ----------
    workspace : array, shape (n,), or None
        Scratch memory: contiguous uint8 at any alignment, of the library and on the device of the
        tensors. None only if `workspace_size` is 0.
    workspace_size : int
        Bytes of `workspace` that may be used: no fewer than phase one said, no more than it has.
    executor : aclOpExecutor
        Used up by the run, unless it is repeatable.
    stream : cupy.cuda.Stream or None
        None is the current stream, and the only choice on NumPy. Nothing is synchronised: tensors
        and workspace have to live until the stream has got there.

    Returns
    -------
    aclnnStatus
        161001 if `executor` is None, or `workspace` is None while its size is not 0; 161002 for any
        other bad argument, an executor that was already used among them; 361001 if a launch failed.

    Notes
    -----
    Computes ``out = self * (1 + scale) + shift`` on the tensors of phase one; nothing is written
    unless all arguments fit. Source: ``aclnnModulate`` of CANN's ops-nn library.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyops.aclnn import *
    >>> x, out = np.ones((1, 2, 3), np.float32), np.empty((1, 2, 3), np.float32)
    >>> row = np.full((1, 3), 2, np.float32)
    >>> status, workspace_size, executor = aclnnModulateGetWorkspaceSize(x, row, row, out)
    >>> aclnnModulate(None, workspace_size, None, None).name
    'ACLNN_ERR_PARAM_NULLPTR'
    >>> print(aclGetRecentErrMsg())
    aclnnModulate: executor is None; expected an aclOpExecutor
    >>> aclnnModulate(None, workspace_size, executor, None).name  # no workspace where it is 0 bytes
    'ACLNN_SUCCESS'
    >>> out[0, 0]
    array([5., 5., 5.], dtype=float32)
    """
    return phase_two(MODULATE, workspace, workspace_size, executor, stream)


def aclnnModulateBackwardGetWorkspaceSize(
    grad_output: Array,
    input: Array,
    scale: Array | None,
    shift: Array | None,
    grad_input: Array,
    grad_scale: Array | None,
    grad_shift: Array | None,
) -> PhaseOne:
    """Phase one of ``grad_input = grad_output * scale`` and of the sums over L.

    ``grad_scale = sum(grad_output * input)`` and ``grad_shift = sum(grad_output)``.

    .. warning::
       The factor is ``scale``, without the 1 that `aclnnModulate` adds: this is **not** the
       gradient of `aclnnModulate`. That is ``cupyops.modulate_backward(...,
       one_plus_scale=True)``.

    Parameters
    ----------
    grad_output, input : array, shape (B, L, D)
        float32, float16 or bfloat16, the same for all tensors.
    scale, shift : array, shape (B, D), or None
        An absent `scale` is the factor 1. Values of `shift` are not used. Where L is 0, both have
        to be empty or absent.
    grad_input : array, shape (B, L, D)
        Receives the gradient in phase two.
    grad_scale, grad_shift : array, shape (B, D), or None
        Receive the sums. Given exactly where `scale` or `shift` is.

    Returns
    -------
    status : aclnnStatus
        161001 if `grad_output`, `input` or `grad_input` is None, or `grad_scale` (`grad_shift`) is
        None although `scale` (`shift`) is given; 161002 for any other bad argument, a gradient
        without its parameter among them.
    workspace_size : int
        Bytes of scratch memory that phase two needs; always 0 on NumPy.
    executor : aclOpExecutor or None
        For `aclnnModulateBackward`; None on failure.

    Notes
    -----
    ``grad_input = grad_output * scale``, and sums over L. Source: ``aclnnModulateBackward`` of
    CANN's ops-nn library.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyops.aclnn import *
    >>> x = np.array([[[10.0]], [[20.0]]], np.float32)
    >>> scale, shift = np.array([[20.0], [30.0]], np.float32), np.zeros((2, 1), np.float32)
    >>> grads = np.empty_like(x), np.empty_like(scale), np.empty_like(shift)
    >>> status, workspace_size, executor = aclnnModulateBackwardGetWorkspaceSize(
    ...     x, x, scale, shift, *grads)
    >>> assert status == ACLNN_SUCCESS, aclGetRecentErrMsg()
    >>> workspace = np.empty(workspace_size, np.uint8)
    >>> status = aclnnModulateBackward(workspace, workspace_size, executor, None)
    >>> assert status == ACLNN_SUCCESS, aclGetRecentErrMsg()
    >>> [grad.ravel().tolist() for grad in grads]
    [[200.0, 600.0], [100.0, 400.0], [10.0, 20.0]]
    """
    gradients = (grad_input, grad_scale, grad_shift)
    return phase_one(MODULATE_BACKWARD, grad_output, input, scale, shift, *gradients)


def aclnnModulateBackward(
    workspace: Array | None, workspace_size: int, executor: aclOpExecutor | None, stream: Any
) -> aclnnStatus:
    """Phase two: run an executor of `aclnnModulateBackwardGetWorkspaceSize`.

    Parameters
    ----------
    workspace : array, shape (n,), or None
        Scratch memory, as in `aclnnModulate`.
    workspace_size : int
        Bytes of `workspace` that may be used.
    executor : aclOpExecutor
        Used up by the run, unless it is repeatable.
    stream : cupy.cuda.Stream or None
        None is the current stream, and the only choice on NumPy.

    Returns
    -------
    aclnnStatus
        As from `aclnnModulate`.

    Notes
    -----
    Computes ``grad_input = grad_output * scale``, ``grad_scale = sum(grad_output * input)`` and
    ``grad_shift = sum(grad_output)`` over L, into the tensors of phase one. Source:
    ``aclnnModulateBackward`` of CANN's ops-nn library.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyops.aclnn import *
    >>> x, grad_input = np.ones((1, 2, 3), np.float32), np.empty((1, 2, 3), np.float32)
    >>> shift, grad_shift = np.zeros((1, 3), np.float32), np.empty((1, 3), np.float32)
    >>> status, workspace_size, executor = aclnnModulateBackwardGetWorkspaceSize(
    ...     x, x, None, shift, grad_input, None, grad_shift)
    >>> assert status == ACLNN_SUCCESS, aclGetRecentErrMsg()
    >>> aclnnModulateBackward(None, workspace_size, executor, None).name
    'ACLNN_SUCCESS'
    >>> grad_shift
    array([[2., 2., 2.]], dtype=float32)
    """
    return phase_two(MODULATE_BACKWARD, workspace, workspace_size, executor, stream)


def aclnnExpSegsumGetWorkspaceSize(self: Array, out: Array) -> PhaseOne:
    """Phase one of ``out[i, j] = exp(self[j+1] + ... + self[i])`` below the diagonal, 1 on it.

    Parameters
    ----------
    self : array, rank 3 or 4, shape (..., T)
        float32, float16 or bfloat16.
    out : array, shape (..., T, T)
        Receives the result in phase two, 0 above the diagonal; has the dtype of `self`.

    Returns
    -------
    status : aclnnStatus
        161001 if an argument is None, 161002 for any other bad argument.
    workspace_size : int
        Bytes of scratch memory that phase two needs; always 0 on NumPy.
    executor : aclOpExecutor or None
        For `aclnnExpSegsum`; None on failure.

    Notes
    -----
    ``out[i, j] = exp(self[j+1] + ... + self[i])``. Source: ``aclnnExpSegsum`` of CANN's ops-math
    library; the formula is Dao and Gu's, "Transformers are SSMs", arXiv:2405.21060, listing 1.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyops.aclnn import *
    >>> x, out = np.zeros((1, 1, 3), np.float32), np.empty((1, 1, 3, 3), np.float32)
    >>> status, workspace_size, executor = aclnnExpSegsumGetWorkspaceSize(x, out)
    >>> assert status == ACLNN_SUCCESS, aclGetRecentErrMsg()
    >>> workspace = np.empty(workspace_size, np.uint8)
    >>> status = aclnnExpSegsum(workspace, workspace_size, executor, None)
    >>> assert status == ACLNN_SUCCESS, aclGetRecentErrMsg()
    >>> out[0, 0].tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """
    return phase_one(EXP_SEGSUM, self, out)


def aclnnExpSegsum(
    workspace: Array | None, workspace_size: int, executor: aclOpExecutor | None, stream: Any
) -> aclnnStatus:
    """Phase two: run an executor of `aclnnExpSegsumGetWorkspaceSize`.

    Parameters
    ----------
    workspace : array, shape (n,), or None
        Scratch memory, as in `aclnnModulate`.
    workspace_size : int
        Bytes of `workspace` that may be used.
    executor : aclOpExecutor
        Used up by the run, unless it is repeatable.
    stream : cupy.cuda.Stream or None
        None is the current stream, and the only choice on NumPy.

    Returns
    -------
    aclnnStatus
        As from `aclnnModulate`.

    Notes
    -----
    Computes ``out[i, j] = exp(self[j+1] + ... + self[i])`` for j < i, 1 on the diagonal and 0 above
    it, into the tensor of phase one. Source: ``aclnnExpSegsum`` of CANN's ops-math library.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyops.aclnn import *
    >>> x, out = np.full((1, 1, 3), -np.inf, np.float16), np.empty((1, 1, 3, 3), np.float16)
    >>> status, workspace_size, executor = aclnnExpSegsumGetWorkspaceSize(x, out)
    >>> assert status == ACLNN_SUCCESS, aclGetRecentErrMsg()
    >>> aclnnExpSegsum(None, workspace_size, executor, None).name
    'ACLNN_SUCCESS'
    >>> out[0, 0].tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    return phase_two(EXP_SEGSUM, workspace, workspace_size, executor, stream)


def aclnnExpSegsumBackwardGetWorkspaceSize(
    gradOutput: Array, gradSelf: Array, gradInput: Array
) -> PhaseOne:
    """Phase one of ``gradInput[k] = sum(gradOutput[i, j] * gradSelf[i, j] for i >= k for j < k)``.

    Parameters
    ----------
    gradOutput : array, rank 4 or 5, shape (..., T, T)
        Gradient with respect to the result of `aclnnExpSegsum`: float32, float16 or bfloat16.
    gradSelf : array, shape (..., T, T)
        **The result of** `aclnnExpSegsum`, despite its name; has the dtype of `gradOutput`. The
        diagonal and the upper triangle of both are never used.
    gradInput : array, shape (..., T)
        Receives the gradient in phase two; has the dtype of `gradOutput`.

    Returns
    -------
    status : aclnnStatus
        161001 if an argument is None, 161002 for any other bad argument.
    workspace_size : int
        Bytes of scratch memory that phase two needs; always 0 on NumPy and for empty tensors.
    executor : aclOpExecutor or None
        For `aclnnExpSegsumBackward`; None on failure.

    Notes
    -----
    ``gradInput[k] = sum(gradOutput[i, j] * gradSelf[i, j] for i >= k for j < k)``. Source:
    ``aclnnExpSegsumBackward`` of CANN's ops-math library.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyops.aclnn import *
    >>> ones, grad = np.ones((1, 1, 4, 4), np.float32), np.empty((1, 1, 4), np.float32)
    >>> status, workspace_size, executor = aclnnExpSegsumBackwardGetWorkspaceSize(ones, ones, grad)
    >>> assert status == ACLNN_SUCCESS, aclGetRecentErrMsg()
    >>> workspace = np.empty(workspace_size, np.uint8)
    >>> status = aclnnExpSegsumBackward(workspace, workspace_size, executor, None)
    >>> assert status == ACLNN_SUCCESS, aclGetRecentErrMsg()
    >>> grad.ravel().tolist()
    [0.0, 3.0, 4.0, 3.0]
    """
    return phase_one(EXP_SEGSUM_BACKWARD, gradOutput, gradSelf, gradInput)


def aclnnExpSegsumBackward(
    workspace: Array | None, workspace_size: int, executor: aclOpExecutor | None, stream: Any
) -> aclnnStatus:
    """Phase two: run an executor of `aclnnExpSegsumBackwardGetWorkspaceSize`.

    Parameters
    ----------
    workspace : array, shape (n,), or None
        Scratch memory, as in `aclnnModulate`.
    workspace_size : int
        Bytes of `workspace` that may be used.
    executor : aclOpExecutor
        Used up by the run, unless it is repeatable.
    stream : cupy.cuda.Stream or None
        None is the current stream, and the only choice on NumPy.

    Returns
    -------
    aclnnStatus
        As from `aclnnModulate`.

    Notes
    -----
    Computes ``gradInput[k] = sum(gradOutput[i, j] * gradSelf[i, j] for i >= k for j < k)`` into the
    tensor of phase one. Source: ``aclnnExpSegsumBackward`` of CANN's ops-math library.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyops.aclnn import *
    >>> ones, grad = np.ones((1, 1, 3, 3), np.float32), np.empty((1, 1, 3), np.float32)
    >>> status, workspace_size, executor = aclnnExpSegsumBackwardGetWorkspaceSize(ones, ones, grad)
    >>> assert status == ACLNN_SUCCESS, aclGetRecentErrMsg()
    >>> workspace = np.empty(workspace_size, np.uint8)
    >>> aclnnExpSegsumBackward(workspace, workspace_size, executor, None).name
    'ACLNN_SUCCESS'
    >>> grad.ravel().tolist()
    [0.0, 2.0, 2.0]
    """
    return phase_two(EXP_SEGSUM_BACKWARD, workspace, workspace_size, executor, stream)
