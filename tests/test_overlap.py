"""Outputs that are read-only, or overlap an input, each other or themselves."""

from __future__ import annotations

import numpy as np
import pytest

import cupyops
from misuse import (
    FUNCTIONS,
    OUTPUTS,
    SENTINEL,
    assert_refused,
    everywhere,
    filled,
    invoke,
    size_id,
    valid,
)

# ---- out: read-only, overlapping itself


@everywhere(OUTPUTS)
def test_read_only_out_is_refused(function, argument, size):
    call = valid(function, size)
    call[argument].flags.writeable = False
    assert_refused(function, call, ValueError, "read-only", argument=argument)


def writable_view(base, shape, strides) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(base, shape, strides, writeable=True)


@pytest.mark.parametrize(
    ("function", "argument"),
    [(f, a) for f, names in FUNCTIONS.items() for a in names if a in OUTPUTS],
)
def test_out_that_overlaps_itself_is_refused(function, argument):
    size = (2, 3, 4) if function.startswith("modulate") else (2, 3)
    shape = valid(function, size)[argument].shape
    strides = [int(n) for n in valid(function, size)[argument].strides]
    for axis in range(len(shape)):
        for stride in (0, 4 * (shape[-1] - 1)) if axis < len(shape) - 1 else (0,):
            bent = [stride if n == axis else own for n, own in enumerate(strides)]
            base = filled((4096,))
            call = valid(function, size) | {argument: writable_view(base, shape, bent)}
            assert_refused(function, call, ValueError, "overlap", argument=argument)
            assert (base == SENTINEL).all()


def test_a_stride_of_zero_on_an_axis_of_length_one_is_no_overlap():
    x = filled((1, 3, 4), value=1)
    out = writable_view(filled((12,)), (1, 3, 4), (0, 16, 4))
    assert cupyops.modulate(x, out=out) is out
    assert (out == 1).all()


# ---- out that overlaps an input


def windows(shape, name, shift: int):
    """Two arrays of one shape in one buffer, the second ``shift`` elements behind the first."""
    count = int(np.prod(shape))
    base = filled((count + abs(shift),), name)
    early, late = base[:count].reshape(shape), base[abs(shift) :].reshape(shape)
    return (early, late) if shift >= 0 else (late, early)


@pytest.mark.parametrize("shift", [1, -1, 4, -4, 12, -12, 23, -23])
@pytest.mark.parametrize(
    ("function", "argument", "target"),
    [
        ("modulate", "x", "out"),
        ("modulate_backward", "x", "grad_input"),
        ("modulate_backward", "grad_output", "grad_input"),
    ],
)
def test_out_shifted_against_an_input_is_refused(dtype, function, argument, target, shift):
    call = valid(function, (2, 3, 4), dtype)
    call[argument], call[target] = windows((2, 3, 4), dtype, shift)
    assert_refused(function, call, ValueError, "overlap", argument, argument=target)


@pytest.mark.parametrize("shift", [24, -24])
def test_out_beside_an_input_is_accepted(dtype, shift):
    call = valid("modulate", (2, 3, 4), dtype)
    call["x"], call["out"] = windows((2, 3, 4), dtype, shift)
    invoke("modulate", call)


@pytest.mark.parametrize("target", ["x", "grad_output"])
def test_the_same_memory_in_another_order_is_refused(target):
    for view in (
        lambda a: a[::-1],
        lambda a: a[:, ::-1],
        lambda a: a[..., ::-1],
        lambda a: a.transpose(0, 2, 1),
        lambda a: a.transpose(1, 0, 2),
    ):
        call = valid("modulate_backward", (3, 3, 3))
        call["grad_input"] = view(call[target])
        assert_refused("modulate_backward", call, ValueError, "overlap", target)
        if target == "x":
            call = valid("modulate", (3, 3, 3))
            call["out"] = view(call["x"])
            assert_refused("modulate", call, ValueError, "overlap", "x", argument="out")


def test_sums_may_not_replace_what_they_are_summed_from():
    """Only what is element-wise may work in place; a sum's output is no view of any input."""
    for argument in ("scale", "shift"):
        for target in ("grad_scale", "grad_shift"):
            call = valid("modulate_backward", (2, 3, 4))
            call[target] = call[argument]
            assert_refused("modulate_backward", call, ValueError, "overlap", argument)
    for argument in ("x", "grad_output"):
        call = valid("modulate_backward", (2, 3, 4))
        call["grad_scale"] = call[argument][:, 1]
        assert_refused("modulate_backward", call, ValueError, "overlap", argument)
    call = valid("modulate_backward", (2, 3, 4))
    call["scale"] = filled((1, 3, 4))
    call["grad_scale"] = call["scale"]
    assert_refused("modulate_backward", call, ValueError, "overlap", "scale")


def test_an_element_wise_output_may_not_cover_a_shared_row():
    call = valid("modulate", (2, 3, 4))
    call["scale"] = call["out"][:, 1]
    assert_refused("modulate", call, ValueError, "overlap", "scale", argument="out")
    call = valid("modulate_backward", (2, 3, 4))
    call["shift"] = call["grad_input"][:, 0]
    call["shift"].flags.writeable = False
    assert_refused("modulate_backward", call, ValueError, "overlap", argument="grad_input")


def test_in_place_of_a_parameter_of_another_dtype_is_refused():
    raw = filled((2, 3, 4), "bfloat16")
    call = {"x": filled((2, 3, 4), "bfloat16"), "scale": raw.view(np.float16), "out": raw}
    assert_refused("modulate", call, ValueError, "overlap", "scale", argument="out")


@pytest.mark.parametrize("size", [(2, 3), (1, 1), (3, 1)], ids=size_id)
def test_segsum_outputs_may_not_overlap_any_input(size):
    square = (*size, size[-1])
    base = filled((64,))
    x, out = base[: np.prod(size)].reshape(size), base[: np.prod(square)].reshape(square)
    assert_refused("exp_segsum", {"x": x, "out": out}, ValueError, "overlap", "x", argument="out")
    for argument in ("y", "grad_output"):
        call = valid("exp_segsum_backward", size)
        call[argument] = out
        call["out"] = x
        words = ("overlap", argument)
        assert_refused("exp_segsum_backward", call, ValueError, *words, argument="out")


# ---- overlap is exact for columns of one row stride


def columns(shape, starts, width: int, row: int) -> list[np.ndarray]:
    base = filled((*shape[:-1], row))
    return [base[..., start : start + width] for start in starts]


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 5, 4), (4, 1, 4), (1, 1, 4)], ids=size_id)
def test_disjoint_columns_may_be_input_and_output(shape):
    for first, second in ((0, 4), (4, 0), (0, 8), (8, 4), (3, 7), (1, 8)):
        x, out = columns(shape, (first, second), 4, 12)
        x[...] = 2
        scale = filled((shape[0], 4), value=3)
        assert cupyops.modulate(x, scale=scale, out=out) is out
        assert (out == 6).all()
        assert (x == 2).all()


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 5, 4), (4, 1, 4), (1, 1, 4)], ids=size_id)
def test_columns_that_overlap_by_one_are_refused(shape):
    for first, second in ((0, 3), (3, 0), (0, 1), (5, 2), (8, 7), (7, 8)):
        x, out = columns(shape, (first, second), 4, 12)
        call = {"x": x, "out": out}
        assert_refused("modulate", call, ValueError, "overlap", "x", argument="out")


def test_disjoint_columns_may_be_parameters_and_gradients():
    scale, shift, grad_scale, grad_shift = columns((2, 4), (0, 4, 8, 12), 4, 24)
    call = valid("modulate_backward", (2, 3, 4))
    call |= {"scale": scale, "shift": shift, "grad_scale": grad_scale, "grad_shift": grad_shift}
    invoke("modulate_backward", call)
    assert (grad_scale == 12).all()
    assert (grad_shift == 12).all()
    assert (scale == SENTINEL).all()
    for name, other in (("grad_scale", "shift"), ("grad_shift", "scale"), ("grad_shift", "shift")):
        target, source = columns((2, 4), (4, 7), 4, 24)
        wrong = call | {name: target, other: source}
        if {name, other} == {"grad_shift", "scale"}:
            wrong["shift"] = filled((2, 4))
        assert_refused("modulate_backward", wrong, ValueError, "overlap", other, argument=name)


def test_every_second_row_is_a_column_of_twice_the_row():
    base = filled((2, 6, 4))
    x, out = base[:, ::2], base[:, 1::2]
    x[...] = 3
    assert cupyops.modulate(x, out=out) is out
    assert (out == 3).all()


# ---- outputs that overlap each other


@pytest.mark.parametrize(
    ("first", "second"),
    [("grad_input", "grad_scale"), ("grad_input", "grad_shift"), ("grad_scale", "grad_shift")],
)
def test_outputs_that_overlap_each_other_are_refused(first, second):
    call = valid("modulate_backward", (2, 3, 4))
    if first == "grad_input":
        call[second] = call[first][:, 0]
        assert_refused("modulate_backward", call, ValueError, "overlap", first, second)
        for name in ("scale", "shift"):
            call[name] = filled((2, 3, 4))
        call["grad_scale"], call["grad_shift"] = filled((2, 3, 4)), filled((2, 3, 4))
    call[second] = call[first]
    assert_refused("modulate_backward", call, ValueError, "overlap", first, second)
    call[first], call[second] = windows(call[first].shape, "float32", 1)
    assert_refused("modulate_backward", call, ValueError, "overlap", first, second)
    call[first], call[second] = windows(call[first].shape, "float32", call[first].size)
    invoke("modulate_backward", call)


def test_two_outputs_may_not_share_the_input_they_replace():
    call = valid("modulate_backward", (2, 3, 4))
    call |= {"scale": filled((2, 3, 4)), "shift": filled((2, 3, 4))}
    call |= {"grad_input": call["x"], "grad_scale": call["x"], "grad_shift": filled((2, 3, 4))}
    assert_refused("modulate_backward", call, ValueError, "overlap", "grad_input", "grad_scale")
