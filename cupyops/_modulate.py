"""Modulation (adaptive layer norm): ``modulate`` and ``modulate_backward``.

Top to bottom: the public pair, the plan pair, shapes and plans. The NumPy arithmetic is in
``_modulate_host.py``, the kernel launches in ``_modulate_device.py``, the kernels in
``kernels_cu/modulate.cu`` and ``modulate_backward.cu``. B batch, L sequence length, D hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from cupyops._arrays import Array, ArraySpec, contiguous
from cupyops._checks import (
    check_flag,
    check_out,
    check_same_dtype,
    check_shape,
    compute_dtype,
    fail,
)
from cupyops._launch import Launch
from cupyops._modulate_device import modulate_backward_launches, modulate_launches
from cupyops._modulate_host import BackwardCall, modulate_backward_host, modulate_host
from cupyops._modulate_rows import Rows
from cupyops._plan import Operator, Plan, Specs, plan_for, run_eagerly


class ModulateGrads(NamedTuple):
    """Gradients of ``modulate``, as ``modulate_backward`` returns them and as its `out` takes them.

    Parameters
    ----------
    grad_input : array, shape (B, L, D)
        ``grad_output * scale``, or ``grad_output * (1 + scale)``; has the dtype of `x`.
    grad_scale : array or None
        ``sum(grad_output * x)``, with shape and dtype of `scale`; None if that was absent.
    grad_shift : array or None
        ``sum(grad_output)``, with shape and dtype of `shift`; None if that was absent.

    Examples
    --------
    >>> import numpy as np, cupyops
    >>> x = np.ones((2, 3, 4), np.float32)
    >>> grad_input, grad_scale, grad_shift = cupyops.modulate_backward(
    ...     x, grad_output=x, scale=np.ones((2, 4), np.float16))
    >>> grad_input.shape, grad_scale.shape, grad_scale.dtype, grad_shift
    ((2, 3, 4), (2, 4), dtype('float16'), None)
    """

    grad_input: Array
    grad_scale: Array | None
    grad_shift: Array | None


def modulate(
    x: Array,
    /,
    *,
    scale: Array | None = None,
    shift: Array | None = None,
    one_plus_scale: bool = False,
    out: Array | None = None,
) -> Array:
    """Scale and shift every token: ``y = x * scale + shift``.

    Parameters
    ----------
    x : array, shape (B, L, D)
        float16, bfloat16, float32 or float64.
    scale, shift : array, optional
        One row for each sample: (B, D) or (B, 1, D). Shared by the batch: (D,), (1, D) or
        (1, 1, D). One row for each token: (B, L, D), or (1, L, D) shared by the batch. A rank-2
        array is never (L, D). Both have one dtype, which may differ from that of `x`. An absent
        `scale` is the factor 1, an absent `shift` adds nothing.
    one_plus_scale : bool
        Compute ``x * (1 + scale) + shift``, as diffusion transformers do.
    out : array, shape (B, L, D), optional
        Receives the result; has the dtype of `x`. May be the very same view as `x` (or as a
        per-token parameter); must not overlap an input otherwise.

    Returns
    -------
    array, shape (B, L, D)
        `out` if it was given, else a new C-contiguous array with the dtype of `x`.

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
    Computed in float32, or in float64 if any input is float64; each step is rounded once and
    the result is rounded to the dtype of `x`. The bits do not depend on batch size or layout.

    The formula, ``y = x * (1 + scale) + shift``, is adaptive layer norm's modulation: Peebles and
    Xie, "Scalable Diffusion Models with Transformers", arXiv:2212.09748, section 3.2. Without the 1
    it is the general affine form.

    Examples
    --------
    >>> import numpy as np, cupyops
    >>> x = np.ones((2, 3, 4), np.float32)
    >>> scale, shift = np.full((2, 4), 0.5, np.float32), np.full((2, 4), 2, np.float32)
    >>> cupyops.modulate(x, scale=scale, shift=shift, one_plus_scale=True)[0, 0]
    array([3.5, 3.5, 3.5, 3.5], dtype=float32)
    """
    options = (check_flag("modulate", "one_plus_scale", one_plus_scale),)
    return run_eagerly(_MODULATE, (x, scale, shift), out, options)


def modulate_backward(
    x: Array,
    /,
    *,
    grad_output: Array,
    scale: Array | None = None,
    shift: Array | None = None,
    one_plus_scale: bool = False,
    out: ModulateGrads | tuple[Array | None, Array | None, Array | None] | None = None,
) -> ModulateGrads:
    """Gradients of ``modulate`` with respect to its input, scale and shift.

    ``grad_input = grad_output * scale`` (``* (1 + scale)`` if `one_plus_scale`),
    ``grad_scale = sum(grad_output * x)`` and ``grad_shift = sum(grad_output)``, summed over the
    axes along which the parameter was broadcast.

    Parameters
    ----------
    x : array, shape (B, L, D)
        The input of the forward call: float16, bfloat16, float32 or float64.
    grad_output : array, shape (B, L, D)
        Gradient with respect to the result of the forward call; has the dtype of `x`.
    scale, shift : array, optional
        The parameters of the forward call, in any shape that ``modulate`` accepts. The values of
        `shift` are not used: it decides whether there is a ``grad_shift``, and its form.
    one_plus_scale : bool
        As in the forward call.
    out : ModulateGrads or tuple of three, optional
        Arrays that receive the gradients; None for one that is to be allocated or does not
        exist. ``grad_input`` may be the very same view as `x` or `grad_output`.

    Returns
    -------
    ModulateGrads
        ``grad_input`` with shape and dtype of `x`, ``grad_scale`` and ``grad_shift`` with shape
        and dtype of their parameter, or None if it is absent.

    Raises
    ------
    TypeError
        An argument is not an array of a supported library, or has an unsupported dtype.
    ValueError
        A shape does not fit, an entry of `out` is read-only, overlaps itself, an input or
        another entry, or is given for a gradient that does not exist.
    RuntimeError
        CuPy only: a kernel could not be compiled and loaded.

    Notes
    -----
    Products and sums are formed in float32, or in float64 if any input is float64. The order of
    a sum depends on the summed extent alone: chunks of 64 rows, in each chunk 8 accumulators
    that take rows l mod 8 in turn and are then added in order; chunks are added in order in
    float64, and so are the samples' totals for a parameter shared by the batch. The bits depend
    neither on batch size, nor on layout or alignment. A sum over nothing is 0.

    The derivative of ``y = x * scale + shift`` by the product rule. Source of ``modulate``: Peebles
    and Xie, arXiv:2212.09748, section 3.2.

    Examples
    --------
    >>> import numpy as np, cupyops
    >>> x = np.array([[[10.0]], [[20.0]]], np.float32)
    >>> scale, shift = np.array([[20.0], [30.0]], np.float32), np.zeros((2, 1), np.float32)
    >>> grads = cupyops.modulate_backward(x, grad_output=x, scale=scale, shift=shift)
    >>> grads.grad_input.ravel(), grads.grad_scale.ravel(), grads.grad_shift.ravel()
    (array([200., 600.], dtype=float32), array([100., 400.], dtype=float32), array([10., 20.], dtype=float32))
    """  # noqa: E501 - a doctest's output cannot be wrapped
    options = (check_flag("modulate_backward", "one_plus_scale", one_plus_scale),)
    inputs = (x, grad_output, scale, shift)
    grads: ModulateGrads = run_eagerly(_MODULATE_BACKWARD, inputs, out, options)
    return grads


def plan_modulate(
    x: Array,
    /,
    *,
    scale: Array | None = None,
    shift: Array | None = None,
    one_plus_scale: bool = False,
    out: Array | None = None,
) -> Plan:
    """Plan ``modulate`` for arrays like these: same arguments and checks, nothing is computed.

    Parameters
    ----------
    x, scale, shift, out : array or ArraySpec
        As for ``modulate``: (B, L, D), (B, D) and so on, float16, bfloat16, float32 or float64. The
        plan keeps shapes, dtypes, strides and device, never the arrays. With `out` absent, the
        results of its runs are C-contiguous.
    one_plus_scale : bool
        As for ``modulate``; a run has no such argument.

    Returns
    -------
    Plan
        Its ``run(x, scale=..., shift=...)`` does what ``modulate`` does.

    Raises
    ------
    TypeError
        As ``modulate``, with the same message.
    ValueError
        As ``modulate``, with the same message.
    RuntimeError
        CuPy only: no GPU or driver answers, or a kernel could not be compiled and loaded.

    Notes
    -----
    A run computes ``y = x * scale + shift``, or ``x * (1 + scale) + shift``: Peebles and Xie,
    "Scalable Diffusion Models with Transformers", arXiv:2212.09748, section 3.2. It needs no
    workspace.

    Examples
    --------
    >>> import numpy as np, cupyops
    >>> x, scale = np.ones((2, 3, 4), np.float32), np.full((2, 4), 0.5, np.float32)
    >>> plan = cupyops.plan_modulate(x, scale=scale, one_plus_scale=True)
    >>> plan.run(x, scale=scale)[0, 0]
    array([1.5, 1.5, 1.5, 1.5], dtype=float32)
    """
    options = (check_flag("modulate", "one_plus_scale", one_plus_scale),)
    return plan_for(_MODULATE, (x, scale, shift), out, options)


def plan_modulate_backward(
    x: Array,
    /,
    *,
    grad_output: Array,
    scale: Array | None = None,
    shift: Array | None = None,
    one_plus_scale: bool = False,
    out: ModulateGrads | tuple[Array | None, Array | None, Array | None] | None = None,
) -> Plan:
    """Plan ``modulate_backward`` for arrays like these: same checks, nothing is computed.

    Parameters
    ----------
    x, grad_output, scale, shift : array or ArraySpec
        As for ``modulate_backward``: (B, L, D), (B, D) and so on, float16, bfloat16, float32 or
        float64. The plan keeps shapes, dtypes, strides and device, never the arrays.
    one_plus_scale : bool
        As for ``modulate_backward``; a run has no such argument.
    out : ModulateGrads or tuple of three, optional
        As for ``modulate_backward``; any entry may be an ArraySpec. Gradients whose entry is absent
        are C-contiguous in every run.

    Returns
    -------
    Plan
        Its ``run(x, grad_output=..., scale=..., shift=...)`` does what ``modulate_backward`` does.

    Raises
    ------
    TypeError
        As ``modulate_backward``, with the same message.
    ValueError
        As ``modulate_backward``, with the same message.
    RuntimeError
        CuPy only: no GPU or driver answers, or a kernel could not be compiled and loaded.

    Notes
    -----
    A run computes ``grad_input = grad_output * scale`` (``* (1 + scale)`` if `one_plus_scale`),
    ``grad_scale = sum(grad_output * x)`` and ``grad_shift = sum(grad_output)``, the derivative of
    ``modulate``: Peebles and Xie, arXiv:2212.09748, section 3.2. On a GPU it needs a workspace
    where a sum extends over more than one chunk of 64 rows.

    Examples
    --------
    >>> import numpy as np, cupyops
    >>> x, scale = np.ones((2, 3, 4), np.float32), np.full((2, 4), 0.5, np.float32)
    >>> plan = cupyops.plan_modulate_backward(x, grad_output=x, scale=scale)
    >>> plan.workspace_size
    0
    >>> plan.run(x, grad_output=x, scale=scale).grad_scale[0]
    array([3., 3., 3., 3.], dtype=float32)
    """
    options = (check_flag("modulate_backward", "one_plus_scale", one_plus_scale),)
    return plan_for(_MODULATE_BACKWARD, (x, grad_output, scale, shift), out, options)


# ---------------------------------------------------------------------------------------------
# Shapes and plans


def check_x(function: str, x: ArraySpec) -> None:
    if len(x.shape) != 3:
        fail(ValueError, function, "x", f"has shape {x.shape}", "three axes (B, L, D)")


def check_parameters(
    function: str, x: ArraySpec, scale: ArraySpec | None, shift: ArraySpec | None
) -> tuple[Rows | None, Rows | None]:
    if scale is not None and shift is not None:
        check_same_dtype(function, "shift", shift, "scale", scale)
    return rows_of(function, "scale", scale, x), rows_of(function, "shift", shift, x)


def rows_of(function: str, name: str, spec: ArraySpec | None, x: ArraySpec) -> Rows | None:
    if spec is None:
        return None
    b, length, d = x.shape
    # The order decides where two forms coincide: a parameter with a row of its own for every
    # token sums nothing, and (1, 1, D) is shared by the batch whatever L is.
    accepted = (
        ((b, length, d), Rows.PER_TOKEN),
        ((d,), Rows.SHARED),
        ((1, d), Rows.SHARED),
        ((1, 1, d), Rows.SHARED),
        ((b, d), Rows.PER_SAMPLE),
        ((b, 1, d), Rows.PER_SAMPLE),
        ((1, length, d), Rows.PER_POSITION),
    )
    for shape, rows in accepted:
        if spec.shape == shape:
            return rows
    expected = (
        f"(B, D) = {(b, d)}, (B, 1, D) = {(b, 1, d)}, (D,) = {(d,)}, (1, D) = {(1, d)}, "
        f"(1, 1, D) = {(1, 1, d)}, (B, L, D) = {(b, length, d)} or (1, L, D) = {(1, length, d)}"
    )
    fail(ValueError, function, name, f"has shape {spec.shape}", expected)


def _in_place(outputs: dict[str, bool], inputs: dict[str, bool]) -> frozenset[tuple[str, str]]:
    """Pairs of outputs and inputs that are both per token, and so may be the very same view."""
    return frozenset((o, i) for o in outputs if outputs[o] for i in inputs if inputs[i])


def _plan_modulate(operator: Operator, inputs: Specs, outs: Specs, one_plus_scale: bool) -> Plan:
    x, scale, shift = inputs
    assert x is not None
    check_x(operator.name, x)
    scale_rows, shift_rows = check_parameters(operator.name, x, scale, shift)
    out = check_out(operator.name, "out", outs[0], contiguous(x.shape, x, x.dtype), "x")
    assert out is not None
    on_host = x.library == "numpy"
    compute = partial(
        modulate_host, dtype=compute_dtype(x, scale, shift), one_plus_scale=one_plus_scale
    )
    return Plan(
        operator=operator,
        inputs=inputs,
        outputs=(out,),
        options=(("one_plus_scale", one_plus_scale),),
        in_place=_in_place(
            {"out": True},
            {
                "x": True,
                "scale": scale_rows is Rows.PER_TOKEN,
                "shift": shift_rows is Rows.PER_TOKEN,
            },
        ),
        traffic=sum(spec.nbytes for spec in (x, scale, shift, out) if spec is not None),
        compute=compute if on_host else None,
        launches=() if on_host else modulate_launches(x, scale, shift, out, one_plus_scale),
    )


def _plan_modulate_backward(
    operator: Operator, inputs: Specs, outs: Specs, one_plus_scale: bool
) -> Plan:
    name = operator.name
    x, grad_output, scale, shift = inputs
    assert x is not None
    assert grad_output is not None
    check_x(name, x)
    check_same_dtype(name, "grad_output", grad_output, "x", x)
    check_shape(name, "grad_output", grad_output, x)
    scale_rows, shift_rows = check_parameters(name, x, scale, shift)
    wanted = tuple(
        None if spec is None else contiguous(spec.shape, x, spec.dtype)
        for spec in (x, scale, shift)
    )
    outputs = tuple(
        check_out(name, operator.label(output), given, spec, source)
        for output, given, spec, source in zip(
            operator.outputs, outs, wanted, ("x", "scale", "shift"), strict=True
        )
    )
    grad_input, grad_scale, grad_shift = outputs
    assert grad_input is not None
    compute = None
    launches: tuple[Launch, ...] = ()
    workspace_size = 0
    if x.library == "numpy":
        dtype = compute_dtype(x, scale, shift)
        call = BackwardCall.of(dtype, one_plus_scale, scale_rows, shift_rows)
        compute = partial(modulate_backward_host, call=call)
    else:
        launches, workspace_size = modulate_backward_launches(
            x,
            grad_output,
            scale,
            grad_input,
            (grad_scale, scale_rows),
            (grad_shift, shift_rows),
            one_plus_scale,
        )
    scale_per_token = scale_rows is Rows.PER_TOKEN
    shift_per_token = shift_rows is Rows.PER_TOKEN
    return Plan(
        operator=operator,
        inputs=inputs,
        outputs=outputs,
        options=(("one_plus_scale", one_plus_scale),),
        in_place=_in_place(
            {
                "grad_input": True,
                "grad_scale": scale_per_token,
                "grad_shift": shift_per_token,
            },
            {
                "x": True,
                "grad_output": True,
                "scale": scale_per_token,
                "shift": shift_per_token,
            },
        ),
        traffic=_backward_traffic(inputs, outputs, scale_rows, shift_rows) + 2 * workspace_size,
        compute=compute,
        launches=launches,
        workspace_size=workspace_size,
    )


def _backward_traffic(
    inputs: Specs, outputs: Specs, scale_rows: Rows | None, shift_rows: Rows | None
) -> int:
    """Bytes of the arrays: x is read for grad_scale only, the values of shift never."""
    x, grad_output, scale, _ = inputs
    read = [grad_output, scale, x if scale is not None else None]
    kinds = {scale_rows, shift_rows}
    if Rows.PER_POSITION in kinds and kinds & {Rows.PER_SAMPLE, Rows.SHARED}:
        # Sums along two axes take two passes.
        read += [grad_output] if scale_rows is not Rows.PER_POSITION else [grad_output, x]
    return sum(spec.nbytes for spec in (*read, *outputs) if spec is not None)


_PARAMETERS = frozenset({"scale", "shift"})
_MODULATE = Operator(
    name="modulate",
    inputs=("x", "scale", "shift"),
    optional=_PARAMETERS,
    outputs=("out",),
    result=None,
    build=_plan_modulate,
    options=("one_plus_scale",),
)
_MODULATE_BACKWARD = Operator(
    name="modulate_backward",
    inputs=("x", "grad_output", "scale", "shift"),
    optional=_PARAMETERS,
    outputs=ModulateGrads._fields,
    result=ModulateGrads,
    build=_plan_modulate_backward,
    options=("one_plus_scale",),
)
