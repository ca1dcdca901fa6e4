"""Exponential segment sum (Mamba-2): ``exp_segsum`` and ``exp_segsum_backward``.

Top to bottom: the public pair, the plan pair, shapes and plans. The NumPy arithmetic is in
``_exp_segsum_host.py``, the kernel launches in ``_exp_segsum_device.py``, the kernels in
``kernels_cu/exp_segsum.cu`` and ``exp_segsum_backward.cu``.
T segment length; any number of leading axes.
"""

from __future__ import annotations

from functools import partial

from cupyops._arrays import Array, ArraySpec, contiguous
from cupyops._checks import (
    check_out,
    check_same_dtype,
    check_shape,
    compute_dtype,
    fail,
)
from cupyops._exp_segsum_device import exp_segsum_backward_launches, exp_segsum_launches
from cupyops._exp_segsum_host import exp_segsum_backward_host, exp_segsum_host
from cupyops._launch import Launch
from cupyops._plan import Operator, Plan, Specs, plan_for, run_eagerly


def exp_segsum(x: Array, /, *, out: Array | None = None) -> Array:
    """Exponentials of all segment sums: ``out[i, j] = exp(x[j+1] + ... + x[i])`` for j < i.

    The diagonal is exactly 1 and everything above it exactly 0: the 1-semiseparable mask of a
    state-space model whose log decay is `x`.

    Parameters
    ----------
    x : array, shape (..., T)
        float16, bfloat16, float32 or float64. -inf is a reset: nothing reaches across it.
    out : array, shape (..., T, T), optional
        Receives the result; has the dtype of `x` and must not overlap it.

    Returns
    -------
    array, shape (..., T, T)
        `out` if it was given, else a new C-contiguous array with the dtype of `x`.

    Raises
    ------
    TypeError
        An argument is not an array of a supported library, or has an unsupported dtype.
    ValueError
        A shape does not fit, or `out` is read-only or overlaps itself or `x`.
    RuntimeError
        CuPy only: a kernel could not be compiled and loaded.

    Notes
    -----
    Computed in float32 (float64 for float64) and rounded once to the dtype of `x`. Sums run from
    j + 1 upward to i and are never differences of prefix sums, which cancel and turn a reset into
    NaN. ``x[k]`` influences ``out[i, j]`` only if j < k <= i. The bits depend neither on the
    leading axes, nor on layout or alignment.

    ``out[i, j] = exp(x[j+1] + ... + x[i])``: Dao and Gu, "Transformers are SSMs",
    arXiv:2405.21060, listing 1 (the exponential of ``segsum``).

    Examples
    --------
    >>> import numpy as np, cupyops
    >>> cupyops.exp_segsum(np.log(np.array([1.0, 2.0, 3.0])))
    array([[1., 0., 0.],
           [2., 1., 0.],
           [6., 3., 1.]])
    """
    return run_eagerly(_EXP_SEGSUM, (x,), out)


def exp_segsum_backward(y: Array, /, *, grad_output: Array, out: Array | None = None) -> Array:
    """Gradient of ``exp_segsum`` with respect to its input.

    ``grad_input[k] = sum(grad_output[i, j] * y[i, j] for i >= k for j < k)``: the entries of the
    rectangle whose upper right corner lies just left of the diagonal in row k.

    Parameters
    ----------
    y : array, shape (..., T, T)
        The result of the forward call: float16, bfloat16, float32 or float64.
    grad_output : array, shape (..., T, T)
        Gradient with respect to `y`; has the dtype of `y`. The diagonal and the upper triangle
        of both inputs are never used, whatever they hold.
    out : array, shape (..., T), optional
        Receives the result; has the dtype of `y` and must not overlap an input.

    Returns
    -------
    array, shape (..., T)
        `out` if it was given, else a new C-contiguous array with the dtype of `y`.
        ``grad_input[..., 0]`` is exactly 0.

    Raises
    ------
    TypeError
        An argument is not an array of a supported library, or has an unsupported dtype.
    ValueError
        A shape does not fit, or `out` is read-only or overlaps itself or an input.
    RuntimeError
        CuPy only: a kernel could not be compiled and loaded.

    Notes
    -----
    Products and sums are formed in float32 (float64 for float64). A NaN or infinity in the
    product at (i, j) reaches ``grad_input[k]`` for j < k <= i and no other; no sum is a
    difference of sums. The bits depend neither on the leading axes, nor on layout or alignment.

    The derivative of ``y[i, j] = exp(x[j+1] + ... + x[i])`` by the chain rule, since
    ``d y[i, j] / d x[k] = y[i, j]`` for j < k <= i. Source of ``exp_segsum``: Dao and Gu,
    arXiv:2405.21060, listing 1.

    Examples
    --------
    >>> import numpy as np, cupyops
    >>> ones = np.ones((4, 4), np.float32)
    >>> cupyops.exp_segsum_backward(ones, grad_output=ones)
    array([0., 3., 4., 3.], dtype=float32)
    """
    return run_eagerly(_EXP_SEGSUM_BACKWARD, (y, grad_output), out)


def plan_exp_segsum(x: Array, /, *, out: Array | None = None) -> Plan:
    """Plan ``exp_segsum`` for arrays like these: same arguments and checks, nothing is computed.

    Parameters
    ----------
    x, out : array or ArraySpec
        As for ``exp_segsum``: (..., T) and (..., T, T), float16, bfloat16, float32 or float64. The
        plan keeps shapes, dtypes, strides and device, never the arrays. With `out` absent, the
        results of its runs are C-contiguous.

    Returns
    -------
    Plan
        Its ``run(x)`` does what ``exp_segsum`` does.

    Raises
    ------
    TypeError
        As ``exp_segsum``, with the same message.
    ValueError
        As ``exp_segsum``, with the same message.
    RuntimeError
        CuPy only: no GPU or driver answers, or a kernel could not be compiled and loaded.

    Notes
    -----
    A run computes ``out[i, j] = exp(x[j+1] + ... + x[i])`` for j < i: Dao and Gu, "Transformers are
    SSMs", arXiv:2405.21060, listing 1. It needs no workspace.

    Examples
    --------
    >>> import numpy as np, cupyops
    >>> x = np.log(np.array([1.0, 2.0, 3.0]))
    >>> plan = cupyops.plan_exp_segsum(x)
    >>> plan.run(x)[2]
    array([6., 3., 1.])
    """
    return plan_for(_EXP_SEGSUM, (x,), out)


def plan_exp_segsum_backward(y: Array, /, *, grad_output: Array, out: Array | None = None) -> Plan:
    """Plan ``exp_segsum_backward`` for arrays like these: same checks, nothing is computed.

    Parameters
    ----------
    y, grad_output, out : array or ArraySpec
        As for ``exp_segsum_backward``: (..., T, T), (..., T, T) and (..., T), float16, bfloat16,
        float32 or float64. The plan keeps shapes, dtypes, strides and device, never the arrays.
        With `out` absent, the results of its runs are C-contiguous.

    Returns
    -------
    Plan
        Its ``run(y, grad_output=...)`` does what ``exp_segsum_backward`` does.

    Raises
    ------
    TypeError
        As ``exp_segsum_backward``, with the same message.
    ValueError
        As ``exp_segsum_backward``, with the same message.
    RuntimeError
        CuPy only: no GPU or driver answers, or a kernel could not be compiled and loaded.

    Notes
    -----
    A run computes ``grad_input[k] = sum(grad_output[i, j] * y[i, j] for i >= k for j < k)``, the
    derivative of ``exp_segsum``: Dao and Gu, arXiv:2405.21060, listing 1. On a GPU it needs a
    workspace where one block has no room for the sums of a whole matrix.

    Examples
    --------
    >>> import numpy as np, cupyops
    >>> ones = np.ones((4, 4), np.float32)
    >>> plan = cupyops.plan_exp_segsum_backward(ones, grad_output=ones)
    >>> plan.run(ones, grad_output=ones)
    array([0., 3., 4., 3.], dtype=float32)
    """
    return plan_for(_EXP_SEGSUM_BACKWARD, (y, grad_output), out)


# ---------------------------------------------------------------------------------------------
# Shapes and plans


def check_sequences(function: str, x: ArraySpec) -> None:
    if not x.shape:
        fail(ValueError, function, "x", "has shape ()", "at least one axis (..., T)")


def check_matrices(function: str, y: ArraySpec, grad_output: ArraySpec) -> None:
    if len(y.shape) < 2 or y.shape[-1] != y.shape[-2]:
        fail(ValueError, function, "y", f"has shape {y.shape}", "square matrices (..., T, T)")
    check_same_dtype(function, "grad_output", grad_output, "y", y)
    check_shape(function, "grad_output", grad_output, y)


def _plan_exp_segsum(operator: Operator, inputs: Specs, outs: Specs) -> Plan:
    name = operator.name
    (x,) = inputs
    assert x is not None
    check_sequences(name, x)
    wanted = contiguous((*x.shape, x.shape[-1]), x, x.dtype)
    out = check_out(name, operator.label("out"), outs[0], wanted, "x")
    assert out is not None
    on_host = x.library == "numpy"
    return Plan(
        operator=operator,
        inputs=inputs,
        outputs=(out,),
        options=(),
        in_place=frozenset(),
        traffic=x.nbytes + wanted.nbytes,
        compute=partial(exp_segsum_host, dtype=compute_dtype(x)) if on_host else None,
        launches=() if on_host else exp_segsum_launches(x, out),
    )


def _plan_exp_segsum_backward(operator: Operator, inputs: Specs, outs: Specs) -> Plan:
    name = operator.name
    y, grad_output = inputs
    assert y is not None
    assert grad_output is not None
    check_matrices(name, y, grad_output)
    wanted = contiguous(y.shape[:-1], y, y.dtype)
    out = check_out(name, operator.label("out"), outs[0], wanted, "y")
    assert out is not None
    compute = None
    launches: tuple[Launch, ...] = ()
    workspace_size = 0
    if y.library == "numpy":
        compute = partial(exp_segsum_backward_host, dtype=compute_dtype(y))
    else:
        launches, workspace_size = exp_segsum_backward_launches(y, grad_output, out)
    return Plan(
        operator=operator,
        inputs=inputs,
        outputs=(out,),
        options=(),
        in_place=frozenset(),
        traffic=2 * _bytes_below_diagonal(y) + wanted.nbytes + 2 * workspace_size,
        compute=compute,
        launches=launches,
        workspace_size=workspace_size,
    )


def _bytes_below_diagonal(y: ArraySpec) -> int:
    t = y.shape[-1]
    return y.nbytes * (t - 1) // (2 * t) if t else 0


_EXP_SEGSUM = Operator(
    name="exp_segsum",
    inputs=("x",),
    optional=frozenset(),
    outputs=("out",),
    result=None,
    build=_plan_exp_segsum,
)
_EXP_SEGSUM_BACKWARD = Operator(
    name="exp_segsum_backward",
    inputs=("y", "grad_output"),
    optional=frozenset(),
    outputs=("out",),
    result=None,
    build=_plan_exp_segsum_backward,
)
