"""Tensors of PyTorch: whose memory is used, what is written, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cupyops
import cupyops.torch
from cupyops import _torch_arrays
from support import DTYPE_NAMES, LAYOUT_NAMES, forward_part
from tensors import call, equal_bits, leaves, modulation, numpy, tensor

BACKWARD = ["modulate_backward", "exp_segsum_backward"]


# -- memory -------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, np.ndarray]]]:
    """The arrays of each run of an operator, in order."""
    calls: list[tuple[str, dict[str, np.ndarray]]] = []
    run = _torch_arrays.run_on_arrays

    def watched(operator: Any, inputs: Any, outs: Any, options: Any) -> Any:
        result = run(operator, inputs, outs, options)
        results = result if isinstance(result, tuple) else (result,)
        arrays = dict(zip(("first", *operator.inputs[1:]), inputs, strict=True))
        arrays |= {f"result{i}": part for i, part in enumerate(results)}
        kept = {key: array for key, array in arrays.items() if array is not None}
        calls.append((operator.name, kept))
        return result

    monkeypatch.setattr(_torch_arrays, "run_on_arrays", watched)
    return calls


def place(value: Tensor | np.ndarray) -> tuple[int, tuple[int, ...]]:
    """Address and strides in bytes."""
    if isinstance(value, np.ndarray):
        return value.ctypes.data, value.strides
    return value.data_ptr(), tuple(step * value.element_size() for step in value.stride())


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_arrays_lie_where_the_tensors_lie(seen: Any, layout: str, dtype: str) -> None:
    p = modulation(layout, layout, dtype)
    given = leaves(p)
    y = call("modulate", given)
    y.backward(p["grad_output"])
    (_, forward), (_, backward) = seen
    assert place(forward["first"]) == place(given["x"]) == place(backward["first"])
    assert place(forward["scale"]) == place(given["scale"]) == place(backward["scale"])
    assert place(forward["shift"]) == place(given["shift"])
    assert place(forward["result0"]) == place(y)
    assert place(backward["grad_output"]) == place(p["grad_output"])
    for i, value in enumerate(given.values()):
        assert place(backward[f"result{i}"]) == place(value.grad)


def test_strided_tensors_are_not_copied(seen: Any, dtype: str) -> None:
    rows = modulation("B,D", None, dtype)["scale"].repeat(1, 6)
    shift, scale, *_ = rows.chunk(6, dim=1)
    x = modulation(None, None, dtype)["x"].transpose(0, 1).contiguous().transpose(0, 1)
    cupyops.modulate(x, scale=scale, shift=shift)
    ((_, arrays),) = seen
    for key, value in (("first", x), ("scale", scale), ("shift", shift)):
        assert not value.is_contiguous()
        assert place(arrays[key]) == place(value)


def test_the_gradient_of_a_sum_is_not_expanded(seen: Any) -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    a = torch.randn(3, 5, requires_grad=True)
    (cupyops.modulate(x, scale=torch.ones(4)).sum() + cupyops.exp_segsum(a).sum()).backward()
    gradients = {name: arrays for name, arrays in seen[2:]}
    assert gradients["modulate"]["first"].strides == (0, 0, 0)
    assert gradients["exp_segsum_backward"]["grad_output"].strides == (0, 0, 0)


def test_segment_sums_share_memory(seen: Any, dtype: str) -> None:
    x = tensor(np.zeros((2, 5), numpy(modulation(dtype=dtype)["x"]).dtype)).requires_grad_()
    y = cupyops.exp_segsum(x)
    y.backward(torch.ones_like(y))
    (_, forward), (_, backward) = seen
    assert place(forward["first"]) == place(x)
    assert place(forward["result0"]) == place(y) == place(backward["first"])
    assert place(backward["result0"]) == place(x.grad)


# -- out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_out_is_filled_and_returned(seen: Any, dtype: str) -> None:
    p = modulation("B,D", "D", dtype)
    wide = torch.full((2, 3, 8), torch.nan, dtype=p["x"].dtype)
    out = wide[..., ::2]
    assert call("modulate", forward_part(p), out=out) is out
    assert equal_bits(out, call("modulate", forward_part(p)))
    assert wide[..., 1::2].isnan().all()
    assert place(seen[0][1]["result0"]) == place(out)

    given = torch.empty_like(p["scale"])
    grads, want = (
        call("modulate_backward", p, out=(None, given, None)),
        call("modulate_backward", p),
    )
    assert grads.grad_scale is given
    assert all(equal_bits(a, b) for a, b in zip(grads, want, strict=True))

    x = torch.zeros(2, 5, dtype=p["x"].dtype)
    y, grad = x.new_empty(2, 5, 5), torch.empty_like(x)
    assert cupyops.exp_segsum(x, out=y) is y
    assert equal_bits(y, torch.ones_like(y).tril())
    assert cupyops.exp_segsum_backward(y, grad_output=y, out=grad) is grad
    assert equal_bits(grad, cupyops.exp_segsum_backward(y, grad_output=y))


def test_out_may_be_the_very_view_of_an_input() -> None:
    p = modulation("B,D", None)
    want, values = call("modulate", forward_part(p)), p["x"].clone()
    assert cupyops.modulate(values, scale=p["scale"], out=values) is values
    assert equal_bits(values, want)
    grad = p["grad_output"].clone()
    arguments = {"grad_output": grad, "scale": p["scale"]}
    grads = cupyops.modulate_backward(p["x"], **arguments, out=(grad, None, None))
    assert grads.grad_input is grad
    assert equal_bits(grad, call("modulate_backward", p).grad_input)


def test_autograd_notices_that_out_was_written() -> None:
    x, out = torch.randn(2, 3, 4, requires_grad=True), torch.ones(2, 3, 4)
    y = (x * out).sum()
    cupyops.modulate(x.detach(), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_out_without_derivatives_is_for_calls_without_derivatives() -> None:
    p, out = modulation("B,D", None), torch.empty(2, 3, 4, dtype=torch.float64)
    for requiring in (leaves(p, "scale"), leaves(p, "x")):
        with pytest.raises(RuntimeError, match=r"^modulate: (x|scale) requires grad; expected det"):
            call("modulate", requiring, out=out)
    with pytest.raises(RuntimeError, match=r"^modulate: out requires grad"):
        call("modulate", forward_part(p), out=out.clone().requires_grad_())
    with pytest.raises(RuntimeError, match=r"^exp_segsum: x requires grad"):
        cupyops.exp_segsum(torch.zeros(3, requires_grad=True), out=torch.empty(3, 3))
    with torch.no_grad():
        assert equal_bits(call("modulate", leaves(p), out=out), call("modulate", forward_part(p)))


# -- no silent zero gradients -------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["x", "grad_output", "scale", "shift"])
def test_modulate_backward_refuses_what_requires_grad(argument: str) -> None:
    p = modulation("B,D", "D")
    requiring = p | {argument: p[argument].clone().requires_grad_()}
    message = rf"^modulate_backward: {argument} requires grad; .*cupyops\.modulate by itself"
    for more in ({}, {"out": (None, None, None)}):
        with pytest.raises(RuntimeError, match=message):
            call("modulate_backward", requiring, **more)
    with torch.no_grad():
        got = call("modulate_backward", requiring)
    assert all(equal_bits(a, b) for a, b in zip(got, call("modulate_backward", p), strict=True))


@pytest.mark.parametrize("argument", ["y", "grad_output"])
def test_exp_segsum_backward_refuses_what_requires_grad(argument: str) -> None:
    arguments = {"y": torch.ones(3, 3), "grad_output": torch.ones(3, 3)}
    arguments[argument].requires_grad_()
    message = rf"^exp_segsum_backward: {argument} requires grad; .*cupyops\.exp_segsum by itself"
    with pytest.raises(RuntimeError, match=message):
        call("exp_segsum_backward", arguments)
    with torch.no_grad():
        assert call("exp_segsum_backward", arguments).tolist() == [0, 2, 2]


# -- errors -------------------------------------------------------------------------------------

X = torch.ones(2, 3, 4)
ROW = torch.ones(2, 4)
IMAGINARY = torch.ones(2, 3, 4, dtype=torch.complex64).conj().imag
JAGGED = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=torch.jagged)
REFUSED = {
    "an array for a tensor": (
        (TypeError, "scale is a numpy.ndarray; expected a torch.Tensor (torch.from_dlpack makes"),
        lambda: cupyops.modulate(X, scale=ROW.numpy()),
    ),
    "a tensor for an array": (
        (TypeError, "x is a numpy.ndarray; expected a torch.Tensor (torch.from_dlpack makes one)"),
        lambda: cupyops.modulate(X.numpy(), scale=ROW),
    ),
    "an array as out": (
        (TypeError, "out is a numpy.ndarray; expected a torch.Tensor"),
        lambda: cupyops.modulate(X, out=X.numpy()),
    ),
    "a tensor as out of arrays": (
        (TypeError, "out is a torch.Tensor; expected a numpy.ndarray or cupy.ndarray"),
        lambda: cupyops.modulate(X.numpy(), out=X),
    ),
    "a number": (
        (TypeError, "scale is a float; expected a torch.Tensor"),
        lambda: cupyops.modulate(X, scale=0.5),
    ),
    "a flag for a tensor": (
        (TypeError, "scale is a bool; expected a torch.Tensor"),
        lambda: cupyops.modulate(X, scale=True),
    ),
    "a flag for the first": (
        (TypeError, "x is a bool; expected a torch.Tensor"),
        lambda: cupyops.torch.modulate(True),
    ),
    "nothing for the first": (
        (TypeError, "x is None; expected a torch.Tensor"),
        lambda: cupyops.torch.modulate(None, shift=ROW),
    ),
    "nothing for the first, backward": (
        (TypeError, "x is None; expected a torch.Tensor"),
        lambda: cupyops.torch.modulate_backward(None, grad_output=X),
    ),
    "a missing gradient": (
        (TypeError, "grad_output is None; expected a torch.Tensor"),
        lambda: cupyops.modulate_backward(X, grad_output=None),
    ),
    "a plan": (
        (TypeError, "x is a torch.Tensor; expected a numpy.ndarray or cupy.ndarray (numpy.from_dl"),
        lambda: cupyops.plan_modulate(X),
    ),
    "integers": (
        (TypeError, "x has dtype torch.int64; expected torch.float16, torch.bfloat16, torch.float"),
        lambda: cupyops.modulate(X.long()),
    ),
    "8 bits": (
        (TypeError, "scale has dtype torch.float8_e5m2; expected torch.float16"),
        lambda: cupyops.modulate(X, scale=ROW.to(torch.float8_e5m2)),
    ),
    "complex": (
        (TypeError, "x has dtype torch.complex64; expected torch.float16"),
        lambda: cupyops.modulate(X.to(torch.complex64).conj()),
    ),
    "two dtypes": (
        (TypeError, "shift has dtype float64; expected float32, the dtype of scale"),
        lambda: cupyops.modulate(X, scale=ROW, shift=ROW.double()),
    ),
    "sparse": (
        (TypeError, "x has layout torch.sparse_coo; expected a dense tensor"),
        lambda: cupyops.modulate(X.to_sparse()),
    ),
    "nested": (
        (TypeError, "x is a nested tensor; expected a dense tensor"),
        lambda: cupyops.modulate(JAGGED),
    ),
    "two devices": (
        (ValueError, "scale is on device meta; expected cpu, the device of the first tensor"),
        lambda: cupyops.modulate(X, scale=ROW.to("meta")),
    ),
    "out elsewhere": (
        (ValueError, "out is on device meta; expected cpu, the device of the first tensor"),
        lambda: cupyops.modulate(X, out=X.to("meta")),
    ),
    "a shape": (
        (ValueError, "scale has shape (3, 4); expected (B, D) = (2, 4), (B, 1, D)"),
        lambda: cupyops.modulate(X, scale=X[0]),
    ),
    "a flag": (
        (TypeError, "one_plus_scale is a torch.Tensor; expected True or False"),
        lambda: cupyops.modulate(X, one_plus_scale=torch.tensor(True)),
    ),
    "out on itself": (
        (ValueError, "out overlaps itself"),
        lambda: cupyops.modulate(X, out=X[:1].expand(2, 3, 4)),
    ),
    "out on an input": (
        (ValueError, "out overlaps x; expected memory of its own"),
        lambda: cupyops.modulate(X[:, 1:], out=X[:, :-1]),
    ),
    "negated out": (
        (ValueError, "out is a view with negated values; expected memory of its own"),
        lambda: cupyops.modulate(X, out=IMAGINARY),
    ),
    "one out for three": (
        (TypeError, "out is a torch.Tensor; expected a tuple (grad_input, grad_scale, grad_shift)"),
        lambda: cupyops.modulate_backward(X, grad_output=X, out=X),
    ),
    "out for nothing": (
        (ValueError, "out.grad_shift is given although shift is None; expected None"),
        lambda: cupyops.modulate_backward(X, grad_output=X, out=(None, None, ROW)),
    ),
    "an array in out": (
        (TypeError, "out.grad_input is a numpy.ndarray; expected a torch.Tensor"),
        lambda: cupyops.modulate_backward(X, grad_output=X, out=(X.numpy(), None, None)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named(case: str) -> None:
    (error, message), function = REFUSED[case]
    with pytest.raises(error, match=rf"^modulate(_backward)?: {re.escape(message)}"):
        function()
    assert (X == 1).all()


def test_plans_point_to_the_functions() -> None:
    with pytest.raises(TypeError, match=r"the functions, but no plans, take a torch\.Tensor"):
        cupyops.plan_exp_segsum(X)


def test_other_devices_are_refused() -> None:
    class Elsewhere(Tensor):
        device = torch.device("mps:0")

    x = torch.ones(2, 3, 4).as_subclass(Elsewhere)
    with pytest.raises(ValueError, match="modulate: x is on device mps:0; expected cpu, cuda or m"):
        cupyops.modulate(x)


def test_negated_views_are_read_as_what_they_show() -> None:
    assert IMAGINARY.is_neg()
    assert equal_bits(cupyops.modulate(IMAGINARY), IMAGINARY.resolve_neg())


def test_empty_tensors_have_empty_results() -> None:
    x, row = torch.empty(2, 0, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    cupyops.modulate(x, scale=row, shift=row).sum().backward()
    assert x.grad.shape == (2, 0, 3)
    assert equal_bits(row.grad, torch.zeros(2, 3))
    a = torch.empty(3, 0, requires_grad=True)
    cupyops.exp_segsum(a).sum().backward()
    assert a.grad.shape == (3, 0)
