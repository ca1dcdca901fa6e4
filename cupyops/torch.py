"""The operators for PyTorch: tensors in, tensors out, and derivatives.

``modulate`` and ``exp_segsum`` are differentiable, any number of times, and ``torch.compile``
follows them. Tensors on the CPU share memory with the NumPy back end, those on a GPU with CuPy, on
torch's current stream. The functions of the package itself take tensors too and are these; this
module has to be imported by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

try:
    import torch
except ImportError as error:
    raise ImportError(
        f"cupyops: PyTorch could not be imported: {error}; install cupyops with its extra 'torch'"
    ) from error
from torch import Tensor

from cupyops import _torch_ops as ops
from cupyops._checks import check_flag, fail
from cupyops._modulate import _MODULATE_BACKWARD, ModulateGrads
from cupyops._plan import unpack_out
from cupyops._torch_arrays import check_no_grad, check_tensors
from cupyops._torch_modes import ON_CPU, is_plain
from cupyops._torch_ops import Arguments, Results

__all__ = ["exp_segsum", "exp_segsum_backward", "modulate", "modulate_backward"]


def modulate(
    x: Tensor,
    /,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    one_plus_scale: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Scale and shift every token: ``y = x * scale + shift``; differentiable.

    Parameters
    ----------
    x : Tensor, shape (B, L, D)
        float16, bfloat16, float32 or float64, on the CPU or a GPU, with any strides.
    scale, shift : Tensor, optional
        One row for each sample: (B, D) or (B, 1, D). Shared by the batch: (D,), (1, D) or
        (1, 1, D). One row for each token: (B, L, D), or (1, L, D) shared by the batch. A rank-2
        tensor is never (L, D). Both have one dtype, which may differ from that of `x`. An absent
        `scale` is the factor 1, an absent `shift` adds nothing.
    one_plus_scale : bool
        Compute ``x * (1 + scale) + shift``, as diffusion transformers do.
    out : Tensor, shape (B, L, D), optional
        Receives the result, which then has no derivative; has the dtype of `x`. May be the very
        same view as `x` (or as a per-token parameter); must not overlap an input otherwise.

    Returns
    -------
    Tensor, shape (B, L, D)
        `out` if it was given, else a new contiguous tensor with the dtype of `x` (no promotion).

    Raises
    ------
    TypeError
        An argument is not a dense tensor, or has an unsupported dtype.
    ValueError
        A shape does not fit, devices differ, or `out` overlaps itself or an input.
    RuntimeError
        `out` is given while gradients are recorded and an argument requires one; or, on a GPU, a
        kernel could not be compiled and loaded.
    NotImplementedError
        Forward-mode differentiation, or a transform of ``torch.func`` other than ``vmap``.

    Notes
    -----
    The bits are those of ``cupyops.modulate`` on arrays: computed in float32, or in float64 if
    any input is float64, each step rounded once. The gradients are those of
    ``cupyops.modulate_backward``, formed in one pass; saved for it are `x` if `scale` requires
    grad, and `scale` if `x` does.

    The formula, ``y = x * (1 + scale) + shift``, is adaptive layer norm's modulation: Peebles and
    Xie, "Scalable Diffusion Models with Transformers", arXiv:2212.09748, section 3.2. Their
    function of this name takes `shift` before `scale`; here both are keywords.

    Examples
    --------
    >>> import torch, cupyops.torch
    >>> x = torch.ones(2, 3, 4)
    >>> scale = torch.full((2, 4), 0.5, requires_grad=True)
    >>> y = cupyops.torch.modulate(x, scale=scale, one_plus_scale=True)
    >>> y.sum().backward()
    >>> y[0, 0].tolist(), scale.grad[0].tolist()
    ([1.5, 1.5, 1.5, 1.5], [3.0, 3.0, 3.0, 3.0])
    """
    name = "modulate"
    plus = check_flag(name, "one_plus_scale", one_plus_scale)
    inputs = {"x": x} | _present(scale=scale, shift=shift)
    compute = _checked(ops.modulate, name, inputs)
    if out is None:
        return compute(x, scale, shift, plus)
    _check_out(name, inputs, {"out": out})
    ops.modulate_out(x, scale, shift, plus, out)
    return out


def modulate_backward(
    x: Tensor,
    /,
    *,
    grad_output: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    one_plus_scale: bool = False,
    out: ModulateGrads | tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> ModulateGrads:
    """Gradients of ``modulate`` for code that differentiates by hand; itself without derivative.

    Parameters
    ----------
    x : Tensor, shape (B, L, D)
        The input of the forward call: float16, bfloat16, float32 or float64.
    grad_output : Tensor, shape (B, L, D)
        Gradient with respect to the result of the forward call; has the dtype of `x`.
    scale, shift : Tensor, optional
        The parameters of the forward call, in any shape that ``modulate`` accepts. The values of
        `shift` are not used: it decides whether there is a ``grad_shift``, and its form.
    one_plus_scale : bool
        As in the forward call.
    out : ModulateGrads or tuple of three, optional
        Tensors that receive the gradients; None for one that is to be allocated or does not
        exist. ``grad_input`` may be the very same view as `x` or `grad_output`.

    Returns
    -------
    ModulateGrads
        ``grad_input`` with shape and dtype of `x`, ``grad_scale`` and ``grad_shift`` with shape
        and dtype of their parameter, or None if it is absent.

    Raises
    ------
    TypeError
        An argument is not a dense tensor, or has an unsupported dtype.
    ValueError
        A shape does not fit, devices differ, an entry of `out` overlaps itself, an input or another
        entry, or is given for a gradient that does not exist.
    RuntimeError
        Gradients are recorded and an argument requires one: the results would be constants to
        autograd. Or, on a GPU, a kernel could not be compiled and loaded.

    Notes
    -----
    ``grad_input = grad_output * scale`` (``* (1 + scale)`` if `one_plus_scale`),
    ``grad_scale = sum(grad_output * x)`` and ``grad_shift = sum(grad_output)``, with the bits of
    ``cupyops.modulate_backward`` on arrays, where the order of the sums is described. Source of
    ``modulate``: Peebles and Xie, arXiv:2212.09748, section 3.2.

    Examples
    --------
    >>> import torch, cupyops.torch
    >>> x, scale = torch.full((2, 3, 4), 2.0), torch.full((2, 4), 0.5)
    >>> grads = cupyops.torch.modulate_backward(x, grad_output=x, scale=scale)
    >>> grads.grad_input[0, 0].tolist(), grads.grad_scale[0].tolist(), grads.grad_shift
    ([1.0, 1.0, 1.0, 1.0], [12.0, 12.0, 12.0, 12.0], None)
    """
    name = "modulate_backward"
    plus = check_flag(name, "one_plus_scale", one_plus_scale)
    inputs = {"x": x, "grad_output": grad_output} | _present(scale=scale, shift=shift)
    compute = _checked(ops.modulate_backward, name, inputs)
    check_no_grad(name, inputs, _CONSTANT.format("modulate"))
    if out is None:
        grads = compute(x, grad_output, scale, shift, plus)
        sources = (x, scale, shift)
        return ModulateGrads(
            *(None if s is None else g for s, g in zip(sources, grads, strict=True))
        )
    entries = unpack_out(_MODULATE_BACKWARD, out)
    names = ("out.grad_input", "out.grad_scale", "out.grad_shift")
    given = {n: entry for n, entry in zip(names, entries, strict=True) if entry is not None}
    _check_out(name, inputs, given)
    ops.check_modulate_backward(x, grad_output, scale, shift)
    results = tuple(
        torch.empty_like(source, memory_format=torch.contiguous_format)
        if entry is None and source is not None
        else entry
        for entry, source in zip(entries, (x, scale, shift), strict=True)
    )
    ops.modulate_backward_out(x, grad_output, scale, shift, plus, *results)
    return ModulateGrads(*results)


def exp_segsum(x: Tensor, /, *, out: Tensor | None = None) -> Tensor:
    """Exponentials of all segment sums; differentiable.

    ``out[i, j] = exp(x[j+1] + ... + x[i])`` for j < i, exactly 1 on the diagonal, 0 above it.

    Parameters
    ----------
    x : Tensor, shape (..., T)
        float16, bfloat16, float32 or float64, on the CPU or a GPU, with any strides. -inf is a
        reset: nothing reaches across it.
    out : Tensor, shape (..., T, T), optional
        Receives the result, which then has no derivative; has the dtype of `x` and must not
        overlap it.

    Returns
    -------
    Tensor, shape (..., T, T)
        `out` if it was given, else a new contiguous tensor with the dtype of `x`.

    Raises
    ------
    TypeError
        An argument is not a dense tensor, or has an unsupported dtype.
    ValueError
        A shape does not fit, devices differ, or `out` overlaps itself or `x`.
    RuntimeError
        `out` is given while gradients are recorded and an argument requires one; or, on a GPU, a
        kernel could not be compiled and loaded.
    NotImplementedError
        Forward-mode differentiation, or a transform of ``torch.func`` other than ``vmap``.

    Notes
    -----
    The bits are those of ``cupyops.exp_segsum`` on arrays, the gradients those of
    ``cupyops.exp_segsum_backward``. Only the result is saved for them, which the products around
    it save anyway.

    ``out[i, j] = exp(x[j+1] + ... + x[i])``: Dao and Gu, "Transformers are SSMs",
    arXiv:2405.21060, listing 1 (the exponential of ``segsum``).

    Examples
    --------
    >>> import torch, cupyops.torch
    >>> x = torch.zeros(3, requires_grad=True)
    >>> y = cupyops.torch.exp_segsum(x)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], [0.0, 2.0, 2.0])
    """
    inputs = {"x": x}
    compute = _checked(ops.exp_segsum, "exp_segsum", inputs)
    if out is None:
        return compute(x)
    _check_out("exp_segsum", inputs, {"out": out})
    ops.exp_segsum_out(x, out)
    return out


def exp_segsum_backward(y: Tensor, /, *, grad_output: Tensor, out: Tensor | None = None) -> Tensor:
    """Gradient of ``exp_segsum`` for code that differentiates by hand; itself without derivative.

    ``grad_input[k] = sum(grad_output[i, j] * y[i, j] for i >= k for j < k)``.

    Parameters
    ----------
    y : Tensor, shape (..., T, T)
        The result of the forward call: float16, bfloat16, float32 or float64.
    grad_output : Tensor, shape (..., T, T)
        Gradient with respect to `y`; has the dtype of `y`. The diagonal and the upper triangle
        of both inputs are never used, whatever they hold.
    out : Tensor, shape (..., T), optional
        Receives the result; has the dtype of `y` and must not overlap an input.

    Returns
    -------
    Tensor, shape (..., T)
        `out` if it was given, else a new contiguous tensor with the dtype of `y`.
        ``grad_input[..., 0]`` is exactly 0.

    Raises
    ------
    TypeError
        An argument is not a dense tensor, or has an unsupported dtype.
    ValueError
        A shape does not fit, devices differ, or `out` overlaps itself or an input.
    RuntimeError
        Gradients are recorded and an argument requires one: the result would be a constant to
        autograd. Or, on a GPU, a kernel could not be compiled and loaded.

    Notes
    -----
    The bits are those of ``cupyops.exp_segsum_backward`` on arrays. Source of ``exp_segsum``: Dao
    and Gu, arXiv:2405.21060, listing 1.

    Examples
    --------
    >>> import torch, cupyops.torch
    >>> ones = torch.ones(4, 4)
    >>> cupyops.torch.exp_segsum_backward(ones, grad_output=ones)
    tensor([0., 3., 4., 3.])
    """
    name = "exp_segsum_backward"
    inputs = {"y": y, "grad_output": grad_output}
    compute = _checked(ops.exp_segsum_backward, name, inputs)
    check_no_grad(name, inputs, _CONSTANT.format("exp_segsum"))
    if out is None:
        return compute(y, grad_output)
    _check_out(name, inputs, {"out": out})
    ops.exp_segsum_backward_out(y, grad_output, out)
    return out


_CONSTANT = "the result is a constant to autograd, which differentiates cupyops.{} by itself"
_WRITTEN = "what is written into out is a constant to autograd"


def _present(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _checked(
    operator: ops.Differentiable[*Arguments, Results], name: str, inputs: Mapping[str, Tensor]
) -> Callable[[*Arguments], Results]:
    """The operator for these tensors: plain ones have passed all checks, and take the short way."""
    if is_plain(inputs.values(), ON_CPU):
        return operator.directly
    check_tensors(name, inputs)
    return operator


def _check_out(name: str, inputs: Mapping[str, Tensor], outs: Mapping[str, Tensor]) -> None:
    check_tensors(name, outs, next(iter(inputs.values())))
    for argument, out in outs.items():
        if not torch.compiler.is_compiling() and out.is_neg():
            fail(ValueError, name, argument, "is a view with negated values", "memory of its own")
    check_no_grad(name, {**inputs, **outs}, _WRITTEN)
