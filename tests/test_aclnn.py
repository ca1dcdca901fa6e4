"""The two-phase layer of the C API: every row of its two tables, in both directions."""

from __future__ import annotations

import doctest
import inspect
import re
from typing import Any

import numpy as np
import pytest

from aclnn_calls import assert_failed, eager, memory, phase_one, phase_two, put, ready
from aclnn_table import (
    ACCEPTED,
    ARGUMENTS,
    CALLS,
    DTYPES,
    FULL,
    FUNCTIONS,
    INVALID,
    NULLPTR,
    OUTPUTS,
    SIZES,
    SUCCESS,
    refused_rows,
    tensors,
)
from cupyops import _aclnn, _status, aclnn
from reported import CASES
from support import array, assert_same_bits, bits, laid_out

# -- the tables ---------------------------------------------------------------------------------


def test_the_codes_are_those_of_the_c_api() -> None:
    assert {status.name: int(status) for status in aclnn.aclnnStatus} == {
        "ACLNN_SUCCESS": 0,
        "ACLNN_ERR_PARAM_NULLPTR": 161001,
        "ACLNN_ERR_PARAM_INVALID": 161002,
        "ACLNN_ERR_RUNTIME_ERROR": 361001,
        "ACLNN_ERR_INNER": 561000,
    }
    for status in aclnn.aclnnStatus:
        assert getattr(aclnn, status.name) is status


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_have_the_names_and_order_of_c(function: str) -> None:
    first = inspect.signature(getattr(aclnn, f"{function}GetWorkspaceSize"))
    assert list(first.parameters) == list(CALLS[function])
    second = inspect.signature(getattr(aclnn, function))
    assert list(second.parameters) == ["workspace", "workspace_size", "executor", "stream"]


def run_accepted(xp: Any, function: str, changes: Any, sizes: Any, dtype: str) -> None:
    host = tensors(function, changes, sizes, dtype)
    given = put(xp, host)
    before = memory(given, xp)
    status, size, executor = phase_one(function, given)
    assert status == SUCCESS, aclnn.aclGetRecentErrMsg()
    assert memory(given, xp) == before
    if function.startswith("aclnnExpSegsum") and not sizes["N"] * sizes["H"] * sizes["T"]:
        assert size == 0
    workspace = xp.put(np.full(size, 0xA5, np.uint8))
    assert phase_two(function, workspace, size, executor, None) == SUCCESS
    expected = eager(function, given)
    for name, value in given.items():
        if name not in OUTPUTS:
            assert value is None or xp.get(value).tobytes() == before[name], f"wrote into {name}"
        elif value is not None:
            assert_same_bits(xp.get(value), xp.get(expected[name]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_accepted_calls_give_the_bits_of_the_top_level_functions(xp, function, dtype) -> None:
    rows = [row for row in ACCEPTED if row[0] == function]
    assert len(rows) >= 18
    for row in rows:
        run_accepted(xp, *row, dtype)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_refused_calls_have_the_status_of_the_table_and_touch_nothing(xp, function) -> None:
    rows = [row for row in refused_rows() if row[0] == function]
    assert len(rows) >= 60
    for _, changes, sizes, expected, named in rows:
        for dtype in DTYPES:
            given = put(xp, tensors(function, changes, sizes, dtype))
            before = memory(given, xp)
            status, size, executor = phase_one(function, given)
            assert_failed(function, status, expected, named)
            assert (size, executor) == (0, None)
            assert memory(given, xp) == before


@pytest.mark.parametrize(
    ("present", "absent", "named"),
    [("scale", "shift", "scale"), ("shift", "scale", "shift"), (None, None, "scale")],
)
def test_parameters_that_are_not_empty_need_rows(present, absent, named) -> None:
    changes = {} if absent is None else {absent: None, f"grad_{absent}": None}
    given = tensors("aclnnModulateBackward", changes, FULL | {"L": 0})
    status, *_ = phase_one("aclnnModulateBackward", given)
    assert "grad_output is empty" in assert_failed("aclnnModulateBackward", status, INVALID, named)


FOREIGN = ["float64", "int32", "uint8", "bool", "complex64", ">f4", ">f2", "longdouble", "object"]
FOREIGN += ["f4,f4", "S4", "M8[s]"]


@pytest.mark.parametrize("dtype", FOREIGN)
@pytest.mark.parametrize(("function", "argument"), ARGUMENTS)
def test_other_dtypes_are_refused(function, argument, dtype) -> None:
    for sizes in SIZES:
        given = tensors(function, sizes=sizes)
        given[argument] = np.zeros(given[argument].shape, dtype)
        before = memory(given)
        status, *rest = phase_one(function, given)
        assert "has dtype" in assert_failed(function, status, INVALID, argument)
        assert rest == [0, None]
        assert memory(given) == before
        given = {name: np.zeros(value.shape, dtype) for name, value in given.items()}
        assert_failed(function, phase_one(function, given)[0], INVALID, next(iter(given)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("function", "argument"), ARGUMENTS)
def test_all_tensors_have_one_dtype(function, argument, dtype) -> None:
    for other in DTYPES:
        given = tensors(function, dtype=dtype)
        given[argument] = array(np.zeros(given[argument].shape), other)
        status, *_ = phase_one(function, given)
        if other == dtype:
            assert status == SUCCESS
        else:
            assert_failed(function, status, INVALID, argument)


# -- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("striding", ["fortran", "reversed", "sliced", "unaligned", "chunk"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_any_memory_layout_is_accepted(function: str, striding: str) -> None:
    plain = tensors(function)
    given = {name: laid_out(value, striding) for name, value in plain.items()}
    executor, _ = ready(function, given)
    assert phase_two(function, None, 0, executor, None) == SUCCESS
    for name, want in eager(function, plain).items():
        np.testing.assert_array_equal(bits(given[name]), bits(want))


@pytest.mark.parametrize(("function", "argument"), [row for row in ARGUMENTS if row[1] in OUTPUTS])
def test_outputs_are_writable_and_have_memory_of_their_own(function, argument) -> None:
    plain = tensors(function)
    shape = plain[argument].shape
    frozen = plain[argument].copy()
    frozen.flags.writeable = False
    repeated = np.broadcast_to(plain[argument][:1], shape)
    repeated.flags.writeable = True
    refused = [frozen, repeated]
    size = plain[argument].size
    for other, value in plain.items():
        if other != argument:  # shares its last element with the first of the other
            buffer = np.zeros(size + value.size - 1, np.float32)
            refused.append((other, buffer[size - 1 :].reshape(value.shape), buffer[:size]))
    for case in refused:
        given = dict(plain)
        if isinstance(case, tuple):
            given[case[0]], given[argument] = case[1], case[2].reshape(shape)
        else:
            given[argument] = case
        before = memory(given)
        status, *rest = phase_one(function, given)
        assert_failed(function, status, INVALID, argument)
        assert rest == [0, None]
        assert memory(given) == before


@pytest.mark.parametrize("name", ["grad_output", "input"])
def test_grad_input_may_be_the_very_same_view(name: str) -> None:
    given = tensors("aclnnModulateBackward")
    want = eager("aclnnModulateBackward", given)
    given["grad_input"] = given[name]
    executor, _ = ready("aclnnModulateBackward", given)
    assert aclnn.aclnnModulateBackward(None, 0, executor, None) == SUCCESS
    for key, value in want.items():
        assert_same_bits(given[key], value)


@pytest.mark.parametrize(("function", "argument"), ARGUMENTS)
def test_a_tensor_that_changes_after_phase_one_is_refused(function, argument) -> None:
    executor, given = ready(function)
    shape = given[argument].shape
    outs = memory({name: given[name] for name in given if name in OUTPUTS})
    given[argument].shape = (*shape, 1)
    status = phase_two(function, None, 0, executor, None)
    assert "as in the plan" in assert_failed(function, status, INVALID, argument)
    given[argument].shape = shape
    if argument in OUTPUTS:
        given[argument].flags.writeable = False
        status = phase_two(function, None, 0, executor, None)
        assert "is read-only" in assert_failed(function, status, INVALID, argument)
        given[argument].flags.writeable = True
    assert memory({name: given[name] for name in outs}) == outs
    assert phase_two(function, None, 0, executor, None) == SUCCESS


# -- reported cases and documentation -----------------------------------------------------------


def zeros(entry: Any) -> np.ndarray | None:
    if entry is None or isinstance(entry, list):
        return None if entry is None else np.zeros(entry, np.float32)
    dtype, shape = re.fullmatch(r"(\w+) \[(.*)\]", entry).groups()
    return np.zeros([int(n) for n in shape.split(",")], dtype)


@pytest.mark.parametrize("case", ["B07", "V01"])
def test_reported_segment_sums_are_refused(case: str) -> None:
    for spec in CASES[case]["input_spec"]["cases"]:
        grad_output, y = zeros(spec["grad_output"]), zeros(spec["out"])
        out = (
            zeros(spec["grad_input"])
            if "grad_input" in spec
            else np.zeros_like(grad_output[..., 0])
        )
        status, *_ = aclnn.aclnnExpSegsumBackwardGetWorkspaceSize(grad_output, y, out)
        assert_failed("aclnnExpSegsumBackward", status, NULLPTR if y is None else INVALID)


def test_reported_mixed_dtypes_are_refused() -> None:
    spec = CASES["V02"]["input_spec"]
    given = [np.ones(spec[name]["shape"], spec[name]["dtype"]) for name in ("grad_output", "out")]
    out = np.zeros(given[0].shape[:-1], np.float16)
    status, *_ = aclnn.aclnnExpSegsumBackwardGetWorkspaceSize(*given, out)
    assert_failed("aclnnExpSegsumBackward", status, INVALID, "gradSelf")


def test_reported_modulation_shapes_are_refused() -> None:
    for spec in CASES["V03"]["input_spec"]["cases"]:
        grad_output, x, scale = (zeros(spec[name]) for name in ("grad_output", "input", "scale"))
        shift = zeros(spec.get("shift"))
        grads = np.zeros_like(grad_output), zeros(spec.get("grad_scale", spec["scale"])), shift
        given = (grad_output, x, scale, shift, *grads)
        status, *_ = aclnn.aclnnModulateBackwardGetWorkspaceSize(*given)
        assert_failed("aclnnModulateBackward", status, INVALID)
    names = {"x": "self", "scale": "scaleOptional", "shift": "shiftOptional", "out": "out"}
    for spec in CASES["M16"]["input_spec"]["bad"]:
        b, length, d = CASES["M16"]["input_spec"]["x"]
        given = {"self": (b, length, d), "scaleOptional": (b, d), "shiftOptional": (b, d)}
        given |= {"out": (b, length, d)} | {names[key]: shape for key, shape in spec.items()}
        status, *_ = phase_one(
            "aclnnModulate",
            {k: None if s is None else np.zeros(s, np.float32) for k, s in given.items()},
        )
        assert_failed("aclnnModulate", status, NULLPTR if given["self"] is None else INVALID)


@pytest.mark.parametrize("module", [aclnn, _aclnn, _status])
def test_examples_run(module: Any) -> None:
    failed, attempted = doctest.testmod(module)
    assert not failed
    assert attempted or module is _aclnn


def test_everything_public_is_documented_and_listed() -> None:
    own = {n for n in vars(aclnn) if n.lower().startswith("acl") and n != "Array"}
    assert own == set(aclnn.__all__)
    for name in own:
        assert inspect.getdoc(getattr(aclnn, name))
    for name in ("aclnnModulateGetWorkspaceSize", "aclnnModulateBackwardGetWorkspaceSize"):
        text = inspect.getdoc(getattr(aclnn, name)) or ""
        assert ".. warning::" in text
        assert "one_plus_scale" in text
