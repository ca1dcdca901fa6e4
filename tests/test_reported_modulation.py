"""The reported faults of modulation; see ``test_reported_cases.py``."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import cupyops
from oracle import modulate_exact
from oracle_bits import DTYPES, store, widen
from reported import CASES, expected, given, same
from support import (
    DTYPE_NAMES,
    array,
    assert_modulate_bits,
    assert_same_bits,
    assert_same_gradients,
    assert_within,
    modulate_layouts,
    normal,
    poisoned,
    positional,
)

# ---- modulate


@pytest.mark.parametrize("case", ["M01", "M02", "M03", "M13", "M14", "M21"])
def test_listed_modulations(call, dtype, case):
    x, scale, shift = (given(case, key) for key in ("x", "scale", "shift"))
    want = CASES[case]["expected"]
    key = "out" if "out" in want else "out_if_supported"
    got = call("modulate", x, scale=scale, shift=shift, one_plus_scale=True)
    assert same(got, expected(case, key))
    problem = {k: given(case, k, dtype) for k in ("x", "scale", "shift")}
    x, arguments = positional(problem)
    got = call("modulate", x, **arguments, one_plus_scale=True)
    assert_within(got, *modulate_exact(x, **arguments, one_plus_scale=True))
    assert_modulate_bits(call, problem | {"grad_output": problem["x"]}, plus=True)


def test_absent_parameters(call, dtype):
    """M04: a zero keeps its sign when nothing is added to it."""
    x, scale, shift = (given("M04", k, dtype) for k in ("x", "scale", "shift"))
    for key, arguments in {
        "shift_none": {"scale": scale},
        "scale_none": {"shift": shift},
        "both_none": {},
    }.items():
        got = call("modulate", x, **arguments, one_plus_scale=True)
        assert_same_bits(got, array(expected("M04", key), dtype))


def test_chunk_views_broadcasts_and_transposes_use_their_strides(call, dtype):
    base, x = given("M05", "base", dtype), given("M05", "x", dtype)
    got = call("modulate", x, scale=base[:, 2:4], shift=base[:, :2], one_plus_scale=True)
    want = np.repeat(expected("M05", "out_per_token")[:, None], 3, axis=1)
    assert same(got, want)
    assert CASES["M06"]["expected"]["out"]["fill"] == 4.0
    x = np.broadcast_to(array([2.0], dtype), (2, 3, 4))
    scale, shift = (np.broadcast_to(array([v], dtype), (2, 4)) for v in (0.5, 1.0))
    got = call("modulate", x, scale=scale, shift=shift, one_plus_scale=True)
    assert same(got, np.full((2, 3, 4), 4.0))
    x = array(np.arange(12.0).reshape(2, 3, 2), dtype).transpose(0, 2, 1)
    scale, shift = array([[0, 1, 2], [3, 4, 5]], dtype), array([[1, 1, 1], [0, 0, 0]], dtype)
    for view in (x, np.asfortranarray(x), np.concatenate([x, x], axis=-1)[:, :, :3]):
        got = call("modulate", view, scale=scale, shift=shift, one_plus_scale=True)
        assert same(got, expected("M08", "out"))


@pytest.mark.parametrize(
    "shape", [(65536, 1, 1), (70000, 2, 3), (1, 65537, 1), (1, 1, 65537)], ids=str
)
def test_no_axis_has_a_limit(call, shape):
    assert CASES["M10"]["expected"]["out_fill"] == 3.0
    ones, rows = np.ones(shape, np.float32), np.ones((shape[0], shape[2]), np.float32)
    out = poisoned(shape, ones.dtype)
    call("modulate", ones, scale=rows, shift=rows, one_plus_scale=True, out=out)
    assert (out == 3).all()
    got = call("modulate_backward", ones, grad_output=ones, scale=rows, shift=rows)
    assert (got.grad_input == 1).all()
    assert (got.grad_scale == shape[1]).all()
    assert (got.grad_shift == shape[1]).all()


def test_many_matrices_are_no_limit(call, dtype):
    x = array(np.zeros((70000, 2)), dtype)
    y = call("exp_segsum", x)
    assert (widen(y) == np.tri(2)).all()
    assert (widen(call("exp_segsum_backward", y, grad_output=y)) == [0, 1]).all()


def test_empty_arrays(call, dtype):
    """M12: sums over nothing are zeros, not what the memory held."""
    for shape in CASES["M12"]["input_spec"]["shapes"]:
        for layout in modulate_layouts(tuple(shape)).values():
            rng = np.random.default_rng(0)
            problem = {k: normal(rng, tuple(shape), dtype) for k in ("x", "grad_output")}
            problem |= {k: normal(rng, layout, dtype) for k in ("scale", "shift")}
            assert_modulate_bits(call, problem)
    for shape in CASES["M12"]["input_spec"]["segsum_shapes"]:
        y = call("exp_segsum", array(np.zeros(shape), dtype))
        assert y.shape == (*shape, shape[-1])
        assert call("exp_segsum_backward", y, grad_output=y).shape == tuple(shape)


def test_layouts_equal_their_explicit_expansion(call, dtype):
    """M15: (1, 3) must not read row 1; per frame is refused by name."""
    rng = np.random.default_rng(1)
    shape = tuple(CASES["M15"]["input_spec"]["x"])
    x = normal(rng, shape, dtype)
    for text in CASES["M15"]["input_spec"]["layouts"]:
        layout = tuple(int(n) for n in re.findall(r"\d+", text))
        values = normal(rng, layout, dtype)
        if len(layout) == 4:
            with pytest.raises(ValueError, match=r"^modulate: scale .*\(2, 2, 1, 3\)"):
                cupyops.modulate(x, scale=values)
            continue
        spread = values[:, None] if values.ndim == 2 else values
        full = np.ascontiguousarray(np.broadcast_to(spread, shape))
        for key in ("scale", "shift"):
            got = call("modulate", x, **{key: values}, one_plus_scale=True)
            assert_same_bits(got, call("modulate", x, **{key: full}, one_plus_scale=True))


def test_bad_ranks_and_sizes_are_refused(dtype):
    """M16, V03: nothing is read or written beyond the smaller array."""
    good = {"x": (4, 3, 8), "scale": (4, 8), "shift": (4, 8), "out": (4, 3, 8)}
    bad = [{"x": (4, 3)}, {"scale": (4,)}, {"scale": (4, 5)}, {"scale": (4, 1, 5)}]
    bad += [{"shift": (4, 5)}, {"shift": (4, 1, 5)}, {"out": (4, 3, 5)}]
    assert len(CASES["M16"]["input_spec"]["bad"]) == len(bad) + 1
    for change in bad:
        arrays = {k: array(np.ones(v), dtype) for k, v in (good | change).items()}
        name = next(iter(change))
        with pytest.raises(ValueError, match=rf"^modulate: .*\b{name}\b"):
            cupyops.modulate(arrays.pop("x"), **arrays)
    with pytest.raises(TypeError, match=r"^modulate: x .*None"):
        cupyops.modulate(None)
    for case in CASES["V03"]["input_spec"]["cases"]:
        keys = ("grad_output", "scale", "shift")
        arrays = {k: array(np.ones(case[k]), dtype) for k in keys if k in case}
        if "grad_scale" in case:
            arrays["out"] = (None, array(np.ones(case["grad_scale"]), dtype), None)
        with pytest.raises(ValueError, match=r"^modulate_backward: (grad_output|out|shift)"):
            cupyops.modulate_backward(array(np.ones(case["input"]), dtype), **arrays)


def test_what_is_no_array_of_the_library_is_refused_by_name():
    """M17: no silent conversion."""
    assert CASES["M17"]["kind"] == "namespace"
    x, rows = np.ones((1, 2, 3), np.float32), np.ones((1, 3), np.float32)
    with pytest.raises(TypeError, match=r"^modulate: scale .*list"):
        cupyops.modulate(x, scale=rows.tolist(), shift=rows)
    with pytest.raises(TypeError, match=r"^modulate: x .*list"):
        cupyops.modulate(x.tolist(), scale=rows)


@pytest.mark.parametrize("operator", ["modulate", "modulate_backward", "exp_segsum"])
def test_bfloat16_is_a_dtype_like_the_others(call, operator):
    """M20."""
    assert CASES["M20"]["kind"] == "dtype"
    x = array(np.arange(8.0).reshape(1, 2, 4), "bfloat16")
    arguments = {"grad_output": x} if operator == "modulate_backward" else {}
    got = call(operator, x, **arguments)
    assert (got[0] if operator == "modulate_backward" else got).dtype == DTYPES["bfloat16"]


# ---- modulate_backward


@pytest.mark.parametrize("plus", [False, True], ids=["spec", "autograd"])
@pytest.mark.parametrize("case", ["G01", "G02"])
def test_listed_modulation_gradients(call, dtype, case, plus):
    key = "grad_input_autograd" if plus else "grad_input_spec"
    x, grad, scale = (given(case, k, dtype) for k in ("input", "grad_output", "scale"))
    shift = array(np.zeros(scale.shape), dtype)
    got = call(
        "modulate_backward", x, grad_output=grad, scale=scale, shift=shift, one_plus_scale=plus
    )
    assert same(got.grad_input, expected(case, key))
    assert same(got.grad_scale, expected(case, "grad_scale"))
    assert same(got.grad_shift, expected(case, "grad_shift"))


@pytest.mark.parametrize("case", ["G03", "G04"])
def test_long_sums_over_length_do_not_stall(call, dtype, case):
    """A sum in the storage type stops at 256 (bfloat16) or 2048 (float16)."""
    x, grad = given(case, "input", dtype), given(case, "grad_output", dtype)
    scale = given(case, "scale", dtype)
    got = call("modulate_backward", x, grad_output=grad, scale=scale, shift=scale)
    assert same(got.grad_scale, expected(case, "grad_scale"))
    assert same(got.grad_shift, expected(case, "grad_shift"))


def test_partial_sums_may_pass_the_range_of_the_result(call, dtype):
    """G06: 60000 twice, then -60000; and 65536 ones, which float16 cannot hold."""
    grad, x = given("G06", "grad_output", dtype), given("G06", "input", dtype)
    row = array(np.zeros((1, 1)), dtype)
    got = call("modulate_backward", x, grad_output=grad, shift=row)
    assert_same_bits(got.grad_shift, array([[60000.0]], dtype))
    ones = array(np.ones((1, 65536, 1)), dtype)
    got = call("modulate_backward", ones, grad_output=ones, shift=row)
    assert widen(got.grad_shift).item() == (math.inf if dtype == "float16" else 65536.0)
    if dtype != "float64":
        got = call("modulate_backward", ones, grad_output=ones, shift=np.zeros((1, 1), np.float32))
        assert got.grad_shift.item() == 65536.0


def test_a_long_float32_sum_does_not_drift(call):
    grad, ones = given("G07", "grad_output"), given("G07", "input")
    rows = np.zeros((1, 1), np.float32)
    got = call("modulate_backward", ones, grad_output=grad, scale=rows, shift=rows)
    want = expected("G07", "grad_shift")
    assert abs(got.grad_shift.item() / want - 1) <= 1e-6
    assert abs(got.grad_scale.item() / want - 1) <= 1e-6


def test_an_expanded_read_only_gradient(call, dtype):
    """G08: stride 0 as sum() gives it, in both backward operators; ``call`` guards the inputs."""
    grad = np.broadcast_to(array(1.0, dtype), (2, 3, 4))
    x, rows = array(np.arange(24.0).reshape(2, 3, 4), dtype), array(np.ones((2, 4)), dtype)
    got = call("modulate_backward", x, grad_output=grad, scale=rows, shift=rows)
    assert same(got.grad_shift, expected("G08", "grad_shift"))
    assert same(got.grad_scale, expected("G08", "grad_scale"))
    y = array(np.ones((2, 3, 3)), dtype)
    got = call("exp_segsum_backward", y, grad_output=np.broadcast_to(array(1.0, dtype), y.shape))
    assert same(got, [[0, 2, 2]] * 2)


@pytest.mark.parametrize("parameter", DTYPE_NAMES, ids=lambda v: f"parameters-{v}")
def test_each_gradient_has_the_dtype_of_its_parameter(call, dtype, parameter):
    """G10: 257 ones are 257 in float32, and 256 once narrowed to bfloat16."""
    assert CASES["G10"]["kind"] == "dtype-mix"
    for count in (257, 300):
        ones, rows = array(np.ones((1, count, 1)), dtype), array(np.zeros((1, 1)), parameter)
        got = call("modulate_backward", ones, grad_output=ones, scale=rows, shift=rows)
        assert [part.dtype.name for part in got] == [dtype, parameter, parameter]
        want = widen(store(np.array([[count]]), parameter))
        assert (widen(got.grad_scale) == want).all()
        assert (widen(got.grad_shift) == want).all()


@pytest.mark.parametrize(
    "shape", [s for s in CASES["G11"]["input_spec"]["shapes"] if math.prod(s) < 10**6], ids=str
)
def test_sizes_off_every_vector_width(call, dtype, shape):
    rng = np.random.default_rng(CASES["G11"]["input_spec"]["shapes"].index(shape))
    problem = {k: array(rng.uniform(-5, 5, shape), dtype) for k in ("x", "grad_output")}
    rows = (shape[0], shape[2])
    problem |= {k: array(rng.uniform(-5, 5, rows), dtype) for k in ("scale", "shift")}
    assert_modulate_bits(call, problem, plus=True)


# ---- determinism


def test_fifty_runs_give_the_same_bits(call, dtype):
    """D01; a smaller D than listed, for the time it takes."""
    assert CASES["D01"]["input_spec"]["runs"] == 50
    rng = np.random.default_rng(123)
    x, grad = (normal(rng, (2, 4096, 16), dtype) for _ in range(2))
    rows = normal(rng, (2, 16), dtype)
    first = call("modulate_backward", x, grad_output=grad, scale=rows, shift=rows)
    for _ in range(49):
        got = call("modulate_backward", x, grad_output=grad, scale=rows, shift=rows)
        assert_same_gradients(got, first)
