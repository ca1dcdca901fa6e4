"""Faults that people reported of this kind of operator, each tested as a whole kind.

``reported_cases.json`` holds the listed inputs and their sources. Modulate cases there mean
``one_plus_scale=True``, and ``out`` in the backward cases is ``y``. Left out of the file, because
they need a GPU: M11 (offsets beyond 2^31, 8 GiB) and M19 (work on the wrong stream). Where a rule
in the file differs from the contract, the contract wins: M20 (``ml_dtypes`` is required), S13
(subnormal results are kept), G02 (no wrapper; the flag names the form).
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import cupyops
from oracle import exp_segsum_exact
from oracle_bits import DTYPES, widen
from reported import CASES, expected, given, numbers, same
from support import (
    DTYPE_NAMES,
    array,
    assert_exp_segsum,
    assert_exp_segsum_backward,
    assert_same_bits,
    bits,
    poisoned,
)


def test_every_case_of_the_file_has_a_test():
    files = Path(__file__).parent.glob("test_reported_*.py")
    text = "".join(file.read_text() for file in files)
    assert [case for case in CASES if f'"{case}"' not in text] == []


# ---- exp_segsum


@pytest.mark.parametrize("case", ["S01", "S04", "S06", "S07", "S09", "S10", "S12", "S13", "S14"])
def test_listed_sequences_in_every_dtype(call, dtype, case):
    stalling = [0, 4] + [2.0**-9] * 64
    x = array(stalling, dtype) if case == "S04" else given(case, "x", dtype)
    assert_exp_segsum(call("exp_segsum", x), x)


@pytest.mark.parametrize("case", ["S01", "S06", "S07", "S09", "S10", "S12"])
def test_listed_matrices(call, case):
    x = given(case, "x")
    got = widen(call("exp_segsum", x))
    exact = numbers(CASES[case]["expected"]["out"]["float64"])
    reference, allowed = exp_segsum_exact(x, x.dtype.name)
    assert np.allclose(reference, exact, rtol=1e-15, atol=0, equal_nan=True)
    listed = expected(case, "out")
    # the listed numbers come from another exp; both are within the bound of the same reference
    with np.errstate(invalid="ignore"):  # inf - inf
        near = np.abs(got - listed) <= 2 * allowed
    assert (near | (got == listed) | (np.isnan(got) & np.isnan(listed))).all()


def test_a_large_decay_makes_no_nan_on_either_pass(call, dtype):
    """S01, S02: the unused half would be exp(+large); masking it by a product gives inf * 0."""
    for log in (-100.0, -1000.0, -30000.0):
        for length in (4, 33, 65):
            x = array(np.full(length, log), dtype)
            y = call("exp_segsum", x)
            assert_exp_segsum(y, x)
            ones = array(np.ones((length, length)), dtype)
            gradient = call("exp_segsum_backward", y, grad_output=ones)
            assert np.isfinite(widen(gradient)).all()
            assert_exp_segsum_backward(gradient, y, ones)
    y, grad = given("S02", "out"), given("S02", "grad_output")
    got = call("exp_segsum_backward", y, grad_output=grad)
    # subnormal terms: one product each is exact, and so is a sum of at most two of them
    assert same(got, expected("S02", "grad_input"))


def test_segment_sums_are_kept_in_the_compute_type(call, dtype):
    """S04: a sum in the storage type stops growing at half an ulp."""
    step = {"float16": 2.0**-9, "bfloat16": 2.0**-7}.get(dtype, 1e-6)
    x = array([0, 4] + [step] * 64, dtype)
    got = call("exp_segsum", x)
    assert_exp_segsum(got, x)
    if dtype == "float16":
        assert widen(got)[-1, 0] == CASES["S04"]["expected"]["out_last_row_col0"]["values"]


def test_padding_repeats_rows_and_blocks_stand_alone(call, dtype):
    """S10, S14: within the bound on NumPy."""
    x = given("S10", "x", dtype)
    got = call("exp_segsum", x)
    assert_exp_segsum(np.ascontiguousarray(got[:4, :4]), x[:4])
    for row in (4, 5):
        assert same(got[row, :4], widen(got)[3, :4])
    x = given("S14", "x", dtype)
    got = call("exp_segsum", x)
    for block in (slice(0, 4), slice(4, 8)):
        assert_exp_segsum(call("exp_segsum", x[block]), x[block])
        assert_exp_segsum(np.ascontiguousarray(got[block, block]), x[block])
    if dtype == "float64":
        assert np.allclose(got[-1], expected("S14", "last_row"), rtol=1e-14, atol=0)
        for j, k, i in [(0, 3, 7), (1, 1, 5), (2, 6, 6)]:
            assert math.isclose(got[i, j], got[i, k] * got[k, j], rel_tol=1e-14)


@pytest.mark.parametrize(
    "length", [1, 2, 3, 31, 32, 33, 40, 50, 63, 65, 127, 200, 255, 256, 257, 300]
)
def test_no_length_reads_stale_memory(call, dtype, length):
    """S11: the output starts as NaN, and every element is written."""
    x = array(-0.01 * ((np.arange(3 * length) % 7) + 1).reshape(3, length), dtype)
    out = poisoned((3, length, length), DTYPES[dtype])
    assert call("exp_segsum", x, out=out) is out
    assert not np.isnan(widen(out)).any()
    assert_exp_segsum(out[:1], x[:1])
    gradient = poisoned(x.shape, x.dtype)
    call("exp_segsum_backward", out, grad_output=out, out=gradient)
    assert not np.isnan(widen(gradient)).any()
    # the listed rtol of 1e-5 is for short sums; the contract's bound, checked above, wins beyond
    assert_exp_segsum(out[2:], x[2:])
    spots = CASES["S11"]["expected"]["spot"]
    for row, spot in ((0, "T=50 out[0,49,0]"), (2, "T=257 out[2,256,0]")):
        if dtype == "float32" and spot.startswith(f"T={length} "):
            reference, _ = exp_segsum_exact(x[row], dtype)
            assert math.isclose(reference[-1, 0], spots[spot], rel_tol=1e-6)


def test_packed_sequences_do_not_leak(call, dtype):
    """S12: a reset by -inf; its gradient is 0, not NaN."""
    x, grad = given("S12", "x", dtype), given("S12", "grad_output", dtype)
    y = call("exp_segsum", x)
    gradient = call("exp_segsum_backward", y, grad_output=grad)
    assert widen(gradient)[[0, 2]].tolist() == [0.0, 0.0]
    # one term each: the gradient is the entry itself
    assert widen(gradient)[[1, 3]].tolist() == widen(y)[[1, 3], [0, 2]].tolist()
    assert np.allclose(widen(gradient), expected("S12", "grad_input"), rtol=2.0**-8, atol=0)


def test_subnormal_results_are_kept(call):
    """S13: 27 smallest subnormals is the nearest float32."""
    got = call("exp_segsum", given("S13", "x"))
    assert bits(got)[1, 0] == 27
    assert same(got, expected("S13", "out_cpu"))


# ---- exp_segsum_backward


@pytest.mark.parametrize("case", ["B01", "B03", "B04", "B05"])
def test_listed_gradients(call, case):
    y, grad = given(case, "out"), given(case, "grad_output")
    got = call("exp_segsum_backward", y, grad_output=grad)
    assert_exp_segsum_backward(got, y, grad)
    listed = numbers(CASES[case]["expected"]["grad_input"]["float64"]) if case == "B03" else None
    listed = expected(case, "grad_input") if listed is None else listed
    assert np.allclose(widen(got), listed, rtol=2e-7 if case == "B03" else 1e-15, equal_nan=True)


@pytest.mark.parametrize("case", ["B01", "B03", "B05"])
def test_listed_gradients_in_every_dtype(call, dtype, case):
    y, grad = given(case, "out", dtype), given(case, "grad_output", dtype)
    assert_exp_segsum_backward(call("exp_segsum_backward", y, grad_output=grad), y, grad)


def test_an_overflowed_output_spoils_only_what_uses_it(call, dtype):
    y, grad = given("B04", "out", dtype), given("B04", "grad_output", dtype)
    got = call("exp_segsum_backward", y, grad_output=grad)
    assert same(got, expected("B04", "grad_input"))


def test_long_sums_do_not_stall(call, dtype):
    """B06: k * (512 - k), rounded once."""
    ones = array(np.ones((512, 512)), dtype)
    k = np.arange(512.0)
    got = call("exp_segsum_backward", ones, grad_output=ones)
    assert_same_bits(got, array(k * (512 - k), dtype))
    if dtype == "bfloat16":
        assert widen(got)[[0, 1, 2, 256]].tolist() == list(
            CASES["B06"]["expected"]["spot"].values()
        )


def test_bad_shapes_of_segsum_are_refused_and_other_ranks_are_right(call, dtype):
    cases = CASES["B07"]["input_spec"]["cases"]
    for case in cases[:3]:
        y, grad = (array(np.ones(case[key]), dtype) for key in ("out", "grad_output"))
        out = array(np.ones(case["grad_input"]), dtype) if "grad_input" in case else None
        with pytest.raises(ValueError, match=r"^exp_segsum_backward: "):
            cupyops.exp_segsum_backward(y, grad_output=grad, out=out)
    with pytest.raises(ValueError, match=r"^exp_segsum_backward: y .*\(1, 2, 3\)"):
        cupyops.exp_segsum_backward(array(np.ones((1, 2, 3)), dtype), grad_output=grad)
    y = array(np.ones(cases[4]["out"]), dtype)
    assert same(call("exp_segsum_backward", y, grad_output=y), np.tile([0.0, 1.0], (1, 1, 2, 2, 1)))


def test_an_empty_array_does_not_hide_other_errors():
    shapes = CASES["V01"]["input_spec"]["cases"][0]
    grad, y, out = (np.ones(shapes[k], np.float32) for k in ("grad_output", "out", "grad_input"))
    with pytest.raises(ValueError, match=r"grad_output"):
        cupyops.exp_segsum_backward(y, grad_output=grad)
    with pytest.raises(ValueError, match=r"\bout\b"):
        cupyops.exp_segsum_backward(grad, grad_output=grad, out=out)
    with pytest.raises(TypeError, match=r"\by\b"):
        cupyops.exp_segsum_backward(None, grad_output=grad)
    with pytest.raises(TypeError, match="int32"):
        cupyops.exp_segsum_backward(grad.astype(np.int32), grad_output=grad.astype(np.int32))


@pytest.mark.parametrize("other", DTYPE_NAMES)
def test_mixed_dtypes_are_never_misread(dtype, other):
    """V02, and the same for modulate_backward."""
    if dtype == other:
        return
    assert CASES["V02"]["kind"] == "validation"
    y, grad = array(np.ones((1, 1, 2, 2)), dtype), array(np.ones((1, 1, 2, 2)), other)
    with pytest.raises(TypeError, match=r"grad_output"):
        cupyops.exp_segsum_backward(y, grad_output=grad)
    with pytest.raises(TypeError, match=r"grad_output"):
        cupyops.modulate_backward(y[0], grad_output=grad[0])


def test_any_grouping_of_the_leading_axes_gives_the_same_bits(call, dtype):
    """D03."""
    assert CASES["D03"]["kind"] == "determinism"
    rng = np.random.default_rng(0)
    x = array(-np.log1p(np.exp(rng.standard_normal((2, 3, 4, 256)))), dtype)
    whole = call("exp_segsum", x)
    assert_same_bits(call("exp_segsum", x.reshape(24, 256)).reshape(whole.shape), whole)
    gradient = call("exp_segsum_backward", whole, grad_output=whole)
    for b, head in np.ndindex(2, 3):
        assert_same_bits(call("exp_segsum", x[b, head]), whole[b, head])
        part = whole[b, head]
        assert_same_bits(call("exp_segsum_backward", part, grad_output=part), gradient[b, head])
