"""The operators as torch knows them, ``torch.ops.cupyops``: results, shapes, derivatives.

Each has two forms: a function of tensors that is differentiable any number of times, and ``*_out``,
which writes into given tensors (torch must know of that: it counts the versions of a tensor's
values). Derivatives are made of these functions, so they are differentiable too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import new_class
from typing import Any, Generic, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from cupyops._checks import check_same_dtype, check_shape
from cupyops._exp_segsum import (
    _EXP_SEGSUM,
    _EXP_SEGSUM_BACKWARD,
    check_matrices,
    check_sequences,
)
from cupyops._modulate import _MODULATE, _MODULATE_BACKWARD, check_parameters, check_x
from cupyops._torch_arrays import run, spec_of
from cupyops._torch_modes import ANYWHERE, check_transforms, is_plain

_DEVICES = ("cpu", "cuda")
_in_place = partial(torch.library.custom_op, device_types=_DEVICES)

Arguments = TypeVarTuple("Arguments")
Results = TypeVar("Results")


class Differentiable(Generic[*Arguments, Results]):
    """An operator with derivatives, registered as ``torch.ops.cupyops.<name>``.

    Calls go through torch's dispatcher only where somebody watches the tensors, else past it, with
    the same arithmetic and the same derivatives.

    Parameters
    ----------
    compute
        The arithmetic, by whose type hints torch knows the operator.
    shapes
        Results without values, after checks of the shapes.
    save, gradients
        The derivative, as ``torch.library.register_autograd`` takes it.
    """

    def __init__(
        self,
        name: str,
        compute: Callable[[*Arguments], Results],
        shapes: Callable[[*Arguments], Results],
        save: Callable[..., None],
        gradients: Callable[..., Any],
    ) -> None:
        self._name, self._compute = name, compute
        self._arguments = tuple(inspect.signature(compute).parameters)
        self._operator = torch.library.custom_op(
            f"cupyops::{name}", compute, mutates_args=(), device_types=_DEVICES
        )
        self._operator.register_fake(shapes)
        self._operator.register_autograd(gradients, setup_context=save)

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = compute(*arguments)
            save(ctx, arguments, output)
            return output

        # One `forward` that does both: a `setup_context` has torch look up a signature each time.
        members = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
        self._function: Any = new_class(
            f"cupyops_{name}", (torch.autograd.Function,), exec_body=lambda own: own.update(members)
        )

    def __call__(self, *arguments: *Arguments) -> Results:
        values: tuple[Any, ...] = arguments
        if is_plain([value for value in values if isinstance(value, Tensor)], ANYWHERE):
            return self.directly(*arguments)
        check_transforms(self._name, dict(zip(self._arguments, values, strict=True)))
        results: Results = self._operator(*arguments)
        return results

    def directly(self, *arguments: *Arguments) -> Results:
        """Past the dispatcher."""
        values: tuple[Any, ...] = arguments
        records = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if records and any([isinstance(value, Tensor) and value.requires_grad for value in values]):
            results: Results = self._function.apply(*arguments)
            return results
        return self._compute(*arguments)


# ---------------------------------------------------------------------------------------------
# modulate


def _modulate(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, one_plus_scale: bool
) -> Tensor:
    y: Tensor
    (y,) = run(_MODULATE, (x, scale, shift), (one_plus_scale,))
    return y


@_in_place("cupyops::modulate_out", mutates_args=("out",))
def modulate_out(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, one_plus_scale: bool, out: Tensor
) -> None:
    run(_MODULATE, (x, scale, shift), (one_plus_scale,), (out,))


def _modulate_shapes(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, one_plus_scale: bool
) -> Tensor:
    _check_modulate("modulate", x, scale, shift)
    return x.new_empty(x.shape)


def _check_modulate(function: str, x: Tensor, scale: Tensor | None, shift: Tensor | None) -> None:
    specs = [None if tensor is None else spec_of(tensor) for tensor in (scale, shift)]
    check_x(function, spec_of(x))
    check_parameters(function, spec_of(x), *specs)


def _save_modulate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale, shift, ctx.one_plus_scale = inputs
    needs_x, needs_scale = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_scale else None, scale if needs_x else None)
    ctx.scale_form, ctx.shift_form = _form_of(scale), _form_of(shift)


def _modulate_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, scale = ctx.saved_tensors
    needs_x, needs_scale, needs_shift, _ = ctx.needs_input_grad
    if needs_scale or needs_shift:
        # What is not saved has no part in the gradients that are asked for: a stand-in will do.
        if scale is None and needs_scale:
            scale = _stand_in(grad, ctx.scale_form)
        shift = None
        if needs_shift:
            alike = scale is not None and ctx.scale_form == ctx.shift_form
            shift = scale if alike else _stand_in(grad, ctx.shift_form)
        x = grad if x is None else x
        grads = modulate_backward(x, grad, scale, shift, ctx.one_plus_scale)
        asked_for = zip(grads, (needs_x, needs_scale, needs_shift), strict=True)
        return (*(gradient if needed else None for gradient, needed in asked_for), None)
    if scale is not None:
        grad = modulate(grad, scale, None, ctx.one_plus_scale)
    return grad, None, None, None


def _form_of(parameter: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if parameter is None else (parameter.shape, parameter.dtype)


def _stand_in(like: Tensor, form: tuple[torch.Size, torch.dtype]) -> Tensor:
    """A tensor of that form on one row of memory, contiguous so that kernels like it."""
    shape, dtype = form
    return like.new_zeros(shape[-1], dtype=dtype).expand(shape)


modulate = Differentiable(
    "modulate", _modulate, _modulate_shapes, _save_modulate, _modulate_gradients
)


# ---------------------------------------------------------------------------------------------
# modulate_backward


def _modulate_backward(
    x: Tensor,
    grad_output: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    one_plus_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient that does not exist is a tensor without elements: results are not optional."""
    inputs = (x, grad_output, scale, shift)
    grads = run(_MODULATE_BACKWARD, inputs, (one_plus_scale,))
    a, b, c = (x.new_empty(0) if grad is None else grad for grad in grads)
    return a, b, c


@_in_place(
    "cupyops::modulate_backward_out", mutates_args=("grad_input", "grad_scale", "grad_shift")
)
def modulate_backward_out(
    x: Tensor,
    grad_output: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    one_plus_scale: bool,
    grad_input: Tensor,
    grad_scale: Tensor | None,
    grad_shift: Tensor | None,
) -> None:
    inputs, outs = (x, grad_output, scale, shift), (grad_input, grad_scale, grad_shift)
    run(_MODULATE_BACKWARD, inputs, (one_plus_scale,), outs)


def check_modulate_backward(
    x: Tensor, grad_output: Tensor, scale: Tensor | None, shift: Tensor | None
) -> None:
    name, spec = "modulate_backward", spec_of(x)
    check_x(name, spec)
    check_same_dtype(name, "grad_output", spec_of(grad_output), "x", spec)
    check_shape(name, "grad_output", spec_of(grad_output), spec)
    _check_modulate(name, x, scale, shift)


def _modulate_backward_shapes(
    x: Tensor,
    grad_output: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    one_plus_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    check_modulate_backward(x, grad_output, scale, shift)
    grads = [
        x.new_empty(0) if parameter is None else parameter.new_empty(parameter.shape)
        for parameter in (x, scale, shift)
    ]
    return grads[0], grads[1], grads[2]


def _save_modulate_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, grad, scale, shift, ctx.one_plus_scale = inputs
    ctx.set_materialize_grads(False)
    needs_x, needs_grad, needs_scale = ctx.needs_input_grad[:3]
    ctx.save_for_backward(
        x if needs_grad and scale is not None else None,
        grad if needs_x or needs_scale else None,
        scale if needs_grad else None,
    )
    ctx.grad_form, ctx.scale_form, ctx.shift_form = map(_form_of, (grad, scale, shift))


def _modulate_backward_gradients(
    ctx: Any, of_input: Tensor | None, of_scale: Tensor | None, of_shift: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The adjoint of grad_input = grad w, grad_scale = sum(grad x), grad_shift = sum(grad)."""
    x, grad, scale = ctx.saved_tensors
    needs_x, needs_grad, needs_scale, _, _ = ctx.needs_input_grad
    to_x = to_grad = to_scale = None
    if ctx.scale_form is None:  # then there is no such gradient
        of_scale = None
    if ctx.shift_form is None:
        of_shift = None
    if needs_x and of_scale is not None:
        to_x = modulate(grad, of_scale, None, False)
    if needs_grad:
        to_grad = _sum_of_terms(ctx, of_input, scale, x, of_scale, of_shift)
    if needs_scale and of_input is not None:
        stand_in = _stand_in(of_input, ctx.scale_form)
        to_scale = modulate_backward(of_input, grad, stand_in, None, False)[1]
    return to_x, to_grad, to_scale, None, None


def _sum_of_terms(
    ctx: Any,
    of_input: Tensor | None,
    scale: Tensor | None,
    x: Tensor | None,
    of_scale: Tensor | None,
    of_shift: Tensor | None,
) -> Tensor | None:
    """of_input w + x of_scale + of_shift, of what there is."""
    total = None
    if of_input is not None:
        total = of_input
        if scale is not None or of_shift is not None:
            total = modulate(of_input, scale, of_shift, ctx.one_plus_scale)
        of_shift = None
    if of_scale is not None:
        assert x is not None
        term = modulate(x, of_scale, of_shift, False)
        return term if total is None else total + term
    if of_shift is not None:
        zero = _stand_in(of_shift, ctx.grad_form)
        return modulate(zero, None, of_shift, False)
    return total


modulate_backward = Differentiable(
    "modulate_backward",
    _modulate_backward,
    _modulate_backward_shapes,
    _save_modulate_backward,
    _modulate_backward_gradients,
)


# ---------------------------------------------------------------------------------------------
# exp_segsum


def _exp_segsum(x: Tensor) -> Tensor:
    y: Tensor
    (y,) = run(_EXP_SEGSUM, (x,))
    return y


@_in_place("cupyops::exp_segsum_out", mutates_args=("out",))
def exp_segsum_out(x: Tensor, out: Tensor) -> None:
    run(_EXP_SEGSUM, (x,), outs=(out,))


def _exp_segsum_shapes(x: Tensor) -> Tensor:
    check_sequences("exp_segsum", spec_of(x))
    return x.new_empty((*x.shape, x.shape[-1]))


def _save_exp_segsum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _exp_segsum_gradient(ctx: Any, grad: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return exp_segsum_backward(y, grad)


exp_segsum = Differentiable(
    "exp_segsum", _exp_segsum, _exp_segsum_shapes, _save_exp_segsum, _exp_segsum_gradient
)


# ---------------------------------------------------------------------------------------------
# exp_segsum_backward


def _exp_segsum_backward(y: Tensor, grad_output: Tensor) -> Tensor:
    grad: Tensor
    (grad,) = run(_EXP_SEGSUM_BACKWARD, (y, grad_output))
    return grad


@_in_place("cupyops::exp_segsum_backward_out", mutates_args=("out",))
def exp_segsum_backward_out(y: Tensor, grad_output: Tensor, out: Tensor) -> None:
    run(_EXP_SEGSUM_BACKWARD, (y, grad_output), outs=(out,))


def _exp_segsum_backward_shapes(y: Tensor, grad_output: Tensor) -> Tensor:
    check_matrices("exp_segsum_backward", spec_of(y), spec_of(grad_output))
    return y.new_empty(y.shape[:-1])


def _save_exp_segsum_backward(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    y, grad = inputs
    needs_y, needs_grad = ctx.needs_input_grad[:2]
    ctx.save_for_backward(y if needs_grad else None, grad if needs_y else None)


def _exp_segsum_backward_gradients(
    ctx: Any, of_input: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """grad_input[k] is the sum of grad[i, j] y[i, j] over j < k <= i: both factors meet the sums
    of `of_input` over these k. They are needed for second derivatives only, so torch adds them."""
    y, grad = ctx.saved_tensors
    t = of_input.shape[-1]
    # Above the diagonal nothing is used, whatever it holds: selected, not multiplied.
    columns = of_input[..., None].expand(*of_input.shape, t).tril(-1)
    sums = columns.cumsum(-2, dtype=torch.promote_types(of_input.dtype, torch.float32))
    return (
        None if grad is None else (grad * sums).tril(-1).to(of_input.dtype),
        None if y is None else (y * sums).tril(-1).to(of_input.dtype),
    )


exp_segsum_backward = Differentiable(
    "exp_segsum_backward",
    _exp_segsum_backward,
    _exp_segsum_backward_shapes,
    _save_exp_segsum_backward,
    _exp_segsum_backward_gradients,
)


# ---------------------------------------------------------------------------------------------
# Without a device there is nothing to write.


@modulate_out.register_fake
def _modulate_out_shapes(*args: Any) -> None: ...


@modulate_backward_out.register_fake
def _modulate_backward_out_shapes(*args: Any) -> None: ...


@exp_segsum_out.register_fake
def _exp_segsum_out_shapes(*args: Any) -> None: ...


@exp_segsum_backward_out.register_fake
def _exp_segsum_backward_out_shapes(*args: Any) -> None: ...
