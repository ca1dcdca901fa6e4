"""Every misuse has its class and its text, comes before any work, and leaves the outputs alone."""

from __future__ import annotations

import re
import warnings

import ml_dtypes
import numpy as np
import pytest

import cupyops
from misuse import (
    FUNCTIONS,
    GRADIENTS,
    MODULATE_SIZES,
    OUTPUTS,
    SEGSUM_SIZES,
    assert_refused,
    everywhere,
    filled,
    invoke,
    size_id,
    valid,
)
from oracle_bits import DTYPES
from support import DTYPE_NAMES, bits, modulate_layouts


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_valid_calls_of_this_file_are_accepted(function):
    for size in MODULATE_SIZES if function.startswith("modulate") else SEGSUM_SIZES:
        for name in DTYPE_NAMES:
            invoke(function, valid(function, size, name))


# ---- not an array


class Duck:
    """Claims everything an array claims, and is none."""

    shape, ndim, dtype, size, strides = (2, 3, 4), 3, np.dtype(np.float32), 24, (48, 16, 4)

    def __array__(self, dtype=None, copy=None):
        return np.zeros(self.shape, np.float32)

    def __array_namespace__(self, api_version=None):
        return np


NOT_ARRAYS = {
    "list": [[[1.0]]],
    "tuple": (1.0,),
    "float": 1.0,
    "int": 0,
    "str": "x",
    "float32": np.float32(1),
    "memoryview": memoryview(b"1234"),
    "Duck": Duck(),
}


@pytest.mark.parametrize("kind", NOT_ARRAYS)
@everywhere()
def test_what_is_not_an_array_is_refused(function, argument, size, kind):
    call = valid(function, size) | {argument: NOT_ARRAYS[kind]}
    if kind == "tuple" and argument == "out":
        call[argument] = (np.zeros(3), None, None)
    assert_refused(function, call, TypeError, kind, argument=argument)


@everywhere(("x", "y", "grad_output"))
def test_none_is_refused_where_an_array_is_required(function, argument, size):
    call = valid(function, size) | {argument: None}
    assert_refused(function, call, TypeError, "None", argument=argument)


class Subclass(np.ndarray):
    pass


def as_matrix(values):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.matrix(np.zeros((2, 4), values.dtype))


@pytest.mark.parametrize(
    ("kind", "convert"),
    [
        ("matrix", as_matrix),
        ("MaskedArray", np.ma.masked_array),
        ("Subclass", lambda values: values.view(Subclass)),
        ("recarray", lambda values: values.view(np.recarray)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
@everywhere()
def test_subclasses_of_ndarray_are_refused(function, argument, size, kind, convert):
    call = valid(function, size)
    call[argument] = convert(call[argument])
    assert_refused(function, call, TypeError, kind, argument=argument)


# ---- dtypes

FOREIGN = {
    "int32": np.int32,
    "int8": np.int8,
    "uint64": np.uint64,
    "bool": np.bool_,
    "complex64": np.complex64,
    "complex128": np.complex128,
    np.dtype(np.longdouble).name: np.longdouble,
    ">f4": ">f4",
    ">f8": ">f8",
    ">f2": ">f2",
    "object": object,
    "datetime64": "M8[s]",
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "int4": ml_dtypes.int4,
    "'a'": [("a", np.float32)],
    "<U3": "U3",
    "|V4": "V4",
}


@pytest.mark.parametrize("kind", FOREIGN)
@everywhere()
def test_other_dtypes_are_refused(function, argument, size, kind):
    call = valid(function, size)
    call[argument] = np.zeros(call[argument].shape, FOREIGN[kind])
    text = assert_refused(function, call, TypeError, kind, argument=argument)
    accepted = DTYPE_NAMES if argument in ("x", "y", "scale", "shift") else ["float32"]
    assert all(re.search(rf"\b{name}\b", text) for name in accepted), text


@pytest.mark.parametrize("other", DTYPE_NAMES)
@everywhere(("grad_output", *OUTPUTS))
def test_dtypes_that_have_to_agree_are_checked(function, argument, size, other, dtype):
    if other == dtype:
        other = DTYPE_NAMES[DTYPE_NAMES.index(dtype) - 1]
    call = valid(function, size, dtype)
    call[argument] = filled(call[argument].shape, other)
    assert_refused(function, call, TypeError, other, dtype, argument=argument)


@pytest.mark.parametrize("function", ["modulate", "modulate_backward"])
@pytest.mark.parametrize("size", MODULATE_SIZES, ids=size_id)
def test_scale_and_shift_share_one_dtype(function, size, dtype):
    other = DTYPE_NAMES[DTYPE_NAMES.index(dtype) - 1]
    call = valid(function, size)
    call["scale"], call["shift"] = (filled(call["scale"].shape, n) for n in (dtype, other))
    if function == "modulate_backward":
        call["out"] = None
        for name in GRADIENTS:
            call.pop(name)
    assert_refused(function, call, TypeError, "scale", dtype, other, argument="shift")


@pytest.mark.parametrize("argument", ["grad_scale", "grad_shift"])
def test_the_gradient_of_a_parameter_has_the_dtype_of_the_parameter(argument):
    call = valid("modulate_backward", (2, 3, 4), "bfloat16")
    for name in ("scale", "shift", "grad_scale", "grad_shift"):
        call[name] = filled((2, 4), "float32")
    invoke("modulate_backward", call)
    call[argument] = filled((2, 4), "bfloat16")
    assert_refused("modulate_backward", call, TypeError, "bfloat16", "float32", argument=argument)


# ---- shapes


def other_shapes(argument: str, shape) -> list[tuple[int, ...]]:
    """Shapes that are wrong whatever the layout (``scale`` and ``shift`` have their own table)."""
    return [(*shape[:-1], shape[-1] + 1), (shape[0] + 1, *shape[1:]), (1, *shape), shape[1:], ()]


@everywhere(("grad_output", *OUTPUTS))
def test_shapes_that_have_to_agree_are_checked(function, argument, size):
    good = valid(function, size)[argument].shape
    for shape in other_shapes(argument, good):
        call = valid(function, size) | {argument: filled(shape)}
        assert_refused(function, call, ValueError, shape, good, argument=argument)


@pytest.mark.parametrize("function", ["modulate", "modulate_backward"])
@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (2, 3, 4, 1), (0, 4), (0,)], ids=str)
def test_x_of_modulate_has_three_axes(function, shape):
    call = valid(function, (2, 3, 4)) | {"x": filled(shape)}
    assert_refused(function, call, ValueError, shape, "(B, L, D)", argument="x")


@pytest.mark.parametrize("argument", ["scale", "shift"])
@pytest.mark.parametrize("function", ["modulate", "modulate_backward"])
@pytest.mark.parametrize("size", [*MODULATE_SIZES, (3, 3, 4), (5, 1, 2)], ids=size_id)
def test_other_layouts_are_refused_with_all_accepted_ones(function, argument, size):
    batch, length, width = size
    accepted = set(modulate_layouts(size).values())
    sizes = {0, 1, batch, length, width, width + 1}
    wrong = {(), (2, 2, 1, width), (width, 1), (length, width), (batch, 1, 1, width), (1, 1)}
    wrong |= {(n,) for n in sizes} | {(a, b) for a in sizes for b in sizes}
    wrong |= {(a, b, c) for a in sizes for b in sizes for c in (width, 1, width + 1)}
    for shape in sorted(wrong - accepted):
        call = valid(function, size)
        call[argument] = filled(shape)
        if function == "modulate_backward":
            call[argument.replace("s", "grad_s", 1)] = None
        words = [shape, (batch, width), (width,), (1, length, width), size]
        assert_refused(function, call, ValueError, *words, argument=argument)


def test_x_of_exp_segsum_has_an_axis():
    assert_refused("exp_segsum", {"x": filled(())}, ValueError, "()", "T", argument="x")


@pytest.mark.parametrize(
    "shape", [(), (3,), (0,), (3, 4), (2, 3, 2), (0, 3, 2), (2, 0, 3)], ids=str
)
def test_y_of_exp_segsum_backward_is_square(shape):
    call = {"y": filled(shape), "grad_output": filled(shape)}
    assert_refused("exp_segsum_backward", call, ValueError, shape, "T", argument="y")


# ---- out of modulate_backward


def backward_with_out(out) -> dict:
    call = valid("modulate_backward", (2, 3, 4))
    return {key: value for key, value in call.items() if key not in GRADIENTS} | {"out": out}


@pytest.mark.parametrize(
    "out",
    [filled((2, 3, 4)), "text", 3, {"grad_input": filled((2, 3, 4))}],
    ids=["array", "str", "int", "dict"],
)
def test_out_of_modulate_backward_is_a_tuple(out):
    text = assert_refused("modulate_backward", backward_with_out(out), TypeError, argument="out")
    assert "tuple" in text or "ModulateGrads" in text


@pytest.mark.parametrize("length", [0, 1, 2, 4])
def test_out_of_modulate_backward_has_three_entries(length):
    call = backward_with_out((None,) * length)
    with pytest.raises((TypeError, ValueError), match=r"^modulate_backward: .*\bout\b") as caught:
        invoke("modulate_backward", call)
    assert str(length) in str(caught.value)
    assert "ModulateGrads" in str(caught.value) or all(n in str(caught.value) for n in GRADIENTS)


@pytest.mark.parametrize("parameter", ["scale", "shift"])
@pytest.mark.parametrize("size", MODULATE_SIZES, ids=size_id)
def test_an_array_for_a_gradient_that_does_not_exist_is_refused(parameter, size):
    call = valid("modulate_backward", size) | {parameter: None}
    assert_refused("modulate_backward", call, ValueError, parameter, argument=f"grad_{parameter}")


# ---- calls


@pytest.mark.parametrize("function", FUNCTIONS)
def test_everything_but_the_first_argument_is_keyword_only(function):
    call = valid(function, (2, 3, 4) if function.startswith("modulate") else (2, 3))
    first = call[FUNCTIONS[function][0]]
    with pytest.raises(TypeError):
        getattr(cupyops, function)(first, *list(call.values())[1:2])
    with pytest.raises(TypeError):
        getattr(cupyops, function)(**{FUNCTIONS[function][0]: first})
    with pytest.raises(TypeError):
        getattr(cupyops, function)(first, scales=first)


@pytest.mark.parametrize("function", ["modulate_backward", "exp_segsum_backward"])
def test_grad_output_is_required(function):
    call = valid(function, (2, 3, 4) if function.startswith("modulate") else (2, 3))
    with pytest.raises(TypeError, match="grad_output"):
        getattr(cupyops, function)(call[FUNCTIONS[function][0]])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_error_does_not_spoil_the_next_call(function, dtype):
    size = (2, 3, 4) if function.startswith("modulate") else (2, 3)
    want = invoke(function, valid(function, size, dtype))
    bad = valid(function, size, dtype)
    bad[FUNCTIONS[function][0]] = filled((), dtype)
    with pytest.raises(ValueError, match=function):
        invoke(function, bad)
    got = invoke(function, valid(function, size, dtype))
    pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
    for one, other in pairs:
        assert (bits(one) == bits(other)).all()
        assert one.dtype == DTYPES[dtype]
