"""`selftest`: it passes here, and every kind of fault turns it red."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyops
import libraries
from cupyops.cli import backends, main, reference, selftest, selftest_cases
from oracle import exp_segsum_backward_nine_steps
from support import DTYPE_NAMES

OPERATORS = ("modulate", "modulate_backward", "exp_segsum", "exp_segsum_backward")


def run(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["selftest", "--backend", "numpy"])
    out, err = capsys.readouterr()
    assert not err
    return status, out


def test_all_is_right_here(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys)
    assert status == 0
    for operator in OPERATORS:
        for dtype in DTYPE_NAMES:
            found = re.findall(rf"^{operator} +{dtype} +numpy +(\d+) +\S+  ok$", out, re.MULTILINE)
            assert len(found) == 1
            assert int(found[0]) >= 15
    assert out.splitlines()[-1].endswith("cases are within their bounds.")


def test_json_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--backend", "numpy", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["backends"] == ["numpy"]
    assert [(r["operator"], r["dtype"]) for r in found["results"]] == [
        (operator, dtype) for operator in OPERATORS for dtype in reference.FORMATS
    ]
    for result in found["results"]:
        assert result["ok"]
        assert result["faults"] == []
        assert 0 <= result["worst"] <= 1


def test_the_cases_cover_what_they_promise() -> None:
    for operator in OPERATORS:
        for dtype in DTYPE_NAMES:
            cases = list(selftest_cases.cases(operator, dtype))
            labels = [case.label for case in cases]
            assert len(set(labels)) == len(labels)
            joined = "\n".join(labels)
            for word in ("golden", "non-finite", "reversed"):
                assert word in joined
            if operator.startswith("modulate"):
                forms = [label for label in labels if label.startswith("scale and shift (")]
                assert len(forms) == 7
            shapes = [next(iter(case.arrays.values())).shape for case in cases]
            assert {shape[-1] % 2 for shape in shapes} == {0, 1}


def test_asking_for_a_back_end_that_cannot_be_used_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(backends, "_cupy_state", lambda: backends.State(False, "out of order"))
    assert main(["selftest", "--backend", "cupy"]) == 2
    out, err = capsys.readouterr()
    assert not out
    expected = "python -m cupyops selftest: error: back end cupy cannot be used here: out of order"
    assert err.strip() == expected


# -- planted faults -----------------------------------------------------------------------------

Fault = Callable[..., Any]
REAL = {operator: getattr(cupyops, operator) for operator in OPERATORS}


def changed(operator: str, change: Callable[[np.ndarray], None]) -> Fault:
    """The operator, with its last result changed in place."""

    def fault(x: Any, /, **arguments: Any) -> Any:
        results = REAL[operator](x, **arguments)
        parts = results if isinstance(results, tuple) else (results,)
        last = [part for part in parts if part is not None][-1]
        if last.size:
            change(last)
        return results

    return fault


def off_by_a_little(values: np.ndarray) -> None:
    """The last element, by about 200 units of float32 or 4 of a 16-bit type."""
    step = {2: 2.0**-5, 4: 2.0**-15, 8: 2.0**-44}[values.dtype.itemsize]
    flat = values.reshape(-1)
    flat[-1] = values.dtype.type(float(flat[-1]) * (1 + step) + step)


def one_nan(values: np.ndarray) -> None:
    values.reshape(-1)[0] = np.nan


def nan_to_zero(values: np.ndarray) -> None:
    values[np.isnan(values)] = 0


def infinities_to_nan(values: np.ndarray) -> None:
    values[np.isinf(values)] = np.nan


def subnormals_flushed(values: np.ndarray) -> None:
    form = reference.FORMATS[values.dtype.name]
    values[abs(values.astype(np.float64)) < form.tiny / form.eps] = 0


COMMON = [off_by_a_little, one_nan, nan_to_zero, infinities_to_nan]


@pytest.mark.parametrize("change", [*COMMON, subnormals_flushed])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_wrong_element_fails(
    operator: str,
    change: Callable[[np.ndarray], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cupyops, operator, changed(operator, change))
    monkeypatch.setattr(selftest, "OPERATORS", (operator,))  # the others take their time
    status, out = run(capsys)
    assert status == 1
    assert re.search(rf"^{operator} +float32 +numpy .* FAILED$", out, re.MULTILINE)
    assert re.search(
        rf"^{operator} float32 numpy: case '.*': \w+\[.*\] is .*; expected ", out, re.M
    )
    assert re.search(r"^\d+ of \d+ cases FAILED\.$", out.splitlines()[-1])


def scale_and_shift_swapped(x: Any, /, *, scale: Any = None, shift: Any = None, **rest: Any) -> Any:
    return REAL["modulate"](x, scale=shift, shift=scale, **rest)


def the_one_forgotten(x: Any, /, *, one_plus_scale: bool, **rest: Any) -> Any:
    del one_plus_scale
    return REAL["modulate"](x, one_plus_scale=False, **rest)


def gradients_swapped(x: Any, /, **arguments: Any) -> Any:
    grads = REAL["modulate_backward"](x, **arguments)
    if grads.grad_scale is None or grads.grad_shift is None:
        return grads
    return grads._replace(grad_scale=grads.grad_shift, grad_shift=grads.grad_scale)


def the_one_forgotten_backward(x: Any, /, *, one_plus_scale: bool, **rest: Any) -> Any:
    del one_plus_scale
    return REAL["modulate_backward"](x, one_plus_scale=False, **rest)


def sums_in_storage(x: Any, /, *, grad_output: Any, shift: Any = None, **rest: Any) -> Any:
    """grad_shift added up one after another in the dtype of the arrays."""
    grads = REAL["modulate_backward"](x, grad_output=grad_output, shift=shift, **rest)
    if shift is None or shift.ndim != 2 or shift.shape[0] != x.shape[0] or not x.size:
        return grads
    running = np.cumsum(grad_output, axis=1, dtype=grad_output.dtype)[:, -1]
    return grads._replace(grad_shift=running.astype(shift.dtype))


def by_prefix_differences(x: Any, /) -> Any:
    with np.errstate(all="ignore"):
        prefix = np.cumsum(x.astype(np.float64), axis=-1)
        power = np.exp(prefix[..., :, None] - prefix[..., None, :])
        return np.tril(power).astype(x.dtype)


def upper_triangle_times_zero(y: Any, /, *, grad_output: Any) -> Any:
    """Masks by multiplication: 0 * NaN is NaN."""
    with np.errstate(all="ignore"):
        m = grad_output.astype(float) * y.astype(float)
        columns = m[..., ::-1, :].cumsum(-2)[..., ::-1, :]
        return (columns * np.tri(y.shape[-1], k=-1)).sum(-1).astype(y.dtype)


def totals_minus_prefix(y: Any, /, *, grad_output: Any) -> Any:
    """Column sums minus row sums: inf - inf, and cancellation."""
    with np.errstate(all="ignore"):
        m = np.tril(np.where(np.tri(y.shape[-1], k=-1), grad_output.astype(float) * y, 0), -1)
        steps = m.sum(-1) - m.sum(-2)
        return steps[..., ::-1].cumsum(-1)[..., ::-1].astype(y.dtype)


def returns_nothing(*_: Any, **__: Any) -> None:
    return None


def raises(*_: Any, **__: Any) -> None:
    raise RuntimeError("the kernel\nis gone")


@pytest.mark.parametrize(
    ("operator", "fault"),
    [
        ("modulate", scale_and_shift_swapped),
        ("modulate", the_one_forgotten),
        ("modulate_backward", gradients_swapped),
        ("modulate_backward", the_one_forgotten_backward),
        ("modulate_backward", sums_in_storage),
        ("exp_segsum", by_prefix_differences),
        ("exp_segsum_backward", upper_triangle_times_zero),
        ("exp_segsum_backward", totals_minus_prefix),
        *((operator, fault) for operator in OPERATORS for fault in (returns_nothing, raises)),
    ],
)
def test_a_wrong_formula_fails(
    operator: str,
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cupyops, operator, fault)
    monkeypatch.setattr(selftest, "OPERATORS", (operator,))
    status, out = run(capsys)
    assert status == 1
    assert re.search(rf"^{operator} .* FAILED$", out, re.MULTILINE)
    assert "Traceback" not in out
    if fault is raises:
        assert re.search(
            rf"^{operator} float64 numpy: case 'golden.*': RuntimeError: the kernel is gone$",
            out,
            re.MULTILINE,
        )


def test_a_failure_is_in_the_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cupyops, "exp_segsum", raises)
    assert main(["selftest", "--backend", "numpy", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    wrong = [r for r in found["results"] if not r["ok"]]
    assert {r["operator"] for r in wrong} == {"exp_segsum"}  # the others are judged all the same
    assert len(found["results"]) == len(OPERATORS) * len(reference.FORMATS)
    assert all(r["worst"] is None and r["faults"] for r in wrong)


# -- the kernels, as a GPU would run them -------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> backends.Backend:
    """A back end whose arrays only kernels touch, in the place of CuPy's."""
    library = libraries.SimulatedGpu(monkeypatch)
    numpy = backends.backend("numpy")
    return numpy._replace(name="cupy", xp=None, put=library.put, get=library.get)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_kernels_pass(operator: str, gpu: backends.Backend) -> None:
    host = backends.backend("numpy")
    for line in selftest.check(operator, "float32", [host, gpu]):
        assert line.ok, line.faults
        assert line.cases >= 15


def test_modulation_bits_are_compared_with_numpy(
    gpu: backends.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error far within the bound, but only on one back end."""

    def fault(x: Any, /, **arguments: Any) -> Any:
        grads = REAL["modulate_backward"](x, **arguments)
        if isinstance(x, np.ndarray) and x.size and grads.grad_shift is not None:
            grads.grad_shift[...] = np.nextafter(grads.grad_shift, np.float32(np.inf))
        return grads

    monkeypatch.setattr(cupyops, "modulate_backward", fault)
    (line,) = selftest.check("modulate_backward", "float32", [gpu])
    assert not line.ok
    assert "other bits" in "\n".join(line.faults)


# -- the reference ------------------------------------------------------------------------------


def test_the_reference_agrees_with_the_nine_steps() -> None:
    draw = np.random.default_rng(0)
    y, grad = draw.integers(-9, 9, (2, 3, 17, 17)).astype(float)
    (found,) = reference.expected("exp_segsum_backward", {"y": y, "grad_output": grad}, {})
    np.testing.assert_array_equal(found.value, exp_segsum_backward_nine_steps(grad, y))


def test_the_reference_keeps_what_float64_loses() -> None:
    x = np.zeros((1, 4, 1))
    grad = np.array([1.0, 1e20, 1.0, -1e20]).reshape(1, 4, 1)
    arrays = {"x": x, "grad_output": grad, "shift": np.zeros((1, 1))}
    _, total = reference.expected("modulate_backward", arrays, {})
    assert total.value == 2.0


def test_half_an_ulp_of_every_type() -> None:
    for name, form in reference.FORMATS.items():
        assert reference._half_ulp(name, np.array(1.0)) == form.eps / 2
        assert reference._half_ulp(name, np.array(1.99)) == form.eps / 2
        assert reference._half_ulp(name, np.array(2.0)) == form.eps
        assert reference._half_ulp(name, np.array(0.0)) == (form.tiny / 2 or form.tiny)


def allowed_to_sums(shape: tuple[int, int, int], parameter: tuple[int, ...], dtype: str) -> float:
    """In units of eps and of the sum of |terms|, on ones."""
    form = reference.FORMATS[dtype]
    x = np.ones(shape, form.dtype)
    arrays = {"x": x, "grad_output": x, "shift": np.ones(parameter, form.dtype)}
    _, found = reference.expected("modulate_backward", arrays, {})
    return float(found.allowed.reshape(-1)[0] / form.eps / found.value.reshape(-1)[0])


def test_sums_are_held_to_the_documented_bounds() -> None:
    # Half a unit for storing, and up to two of float64 for the reference, come on top.
    assert 16 < allowed_to_sums((2, 200, 3), (2, 3), "float32") < 16.6
    assert 16 < allowed_to_sums((5, 200, 3), (3,), "float32") < 16.6
    assert 20 < allowed_to_sums((2, 200, 3), (2, 3), "float64") < 22.6  # 4 chunks
    assert 36 < allowed_to_sums((5, 200, 3), (3,), "float64") < 38.6  # 5 x 4 chunks
    assert 18 < allowed_to_sums((70, 5, 3), (1, 5, 3), "float64") < 20.6  # 2 chunks of samples
    ones = np.ones((30, 30), np.float32)
    (found,) = reference.expected("exp_segsum_backward", {"y": ones, "grad_output": ones}, {})
    units = found.allowed[1:] / 2.0**-23 / found.value[1:]
    assert (units > 38).all()
    assert (units < 38.6).all()
    # 9 terms of 1: (9 + 4) * eps on the exponent, and 4 units of the result
    (found,) = reference.expected("exp_segsum", {"x": np.full(10, -1, np.float32)}, {})
    assert found.allowed[9, 0] == pytest.approx(np.exp(-9) * 2.0**-23 * (13 * 9 + 4), rel=1e-4)
    # x * (1 + scale) + shift: three roundings to float32, the last one counted again for storing
    cube, row = np.ones((1, 1, 1), np.float32), np.ones((1, 1), np.float32)
    arrays = {"x": cube, "scale": row, "shift": row}
    (found,) = reference.expected("modulate", arrays, {"one_plus_scale": True})
    assert found.allowed.item() == pytest.approx(2.0**-24 * (2 + 2 + 3 + 2), rel=1e-4)
    assert found.value.item() == 3


def test_an_error_beyond_the_bound_is_a_fault_and_one_within_is_none() -> None:
    want = reference.Expected(np.array([1.0, 2.0]), np.array([0.25, 0.5]), "float32")
    for error, fault in ((0.5, False), (0.5625, True), (-0.5, False), (-0.5625, True)):
        verdict = reference.judge("y", np.array([1, 2 + error], np.float32), want)
        assert verdict.worst == abs(error) / 0.5
        assert verdict.error == abs(error) / 2
        assert (verdict.fault is not None) == fault
    wrong = np.array([1, 3], np.float32)
    assert reference.judge("y", wrong, want).fault == (
        "y[1] is 3; expected 2 within 0.5 (1 of 2 wrong)"
    )


@pytest.mark.parametrize(
    ("got", "value", "right"),
    [
        (np.nan, np.nan, True),
        (np.inf, np.inf, True),
        (np.inf, -np.inf, False),
        (np.inf, np.nan, False),
        (np.nan, 1.0, False),
        (1.0, np.nan, False),
        (np.inf, 1e6, True),  # beyond float16
        (-np.inf, 1e6, False),
        (65504.0, 1e6, False),
        (np.inf, 6e4, False),
    ],
)
def test_non_finite_values_and_overflow(got: float, value: float, right: bool) -> None:
    want = reference.Expected(np.array([value]), np.array([1.0]), "float16")
    assert (reference.judge("y", np.array([got], np.float16), want).fault is None) == right
