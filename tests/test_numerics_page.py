"""The measured errors of docs/numerics.md are those of this code, and within its bounds."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import cupyops

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "numerics.md"

modulate_backward = cupyops.modulate_backward

SLACK = 1.5
"""Another machine's exponential, or another order of the sums, may be that much worse."""


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_errors", DOCS / "measure_errors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture(scope="module")
def quick():
    return script.measure(script.SEEDS[:1])


def parse(text: str) -> list[list[list[str]]]:
    """Tables as lists of rows of cells, the header row first."""
    found = re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in found
    ]


def page_tables() -> list[list[list[str]]]:
    measured = PAGE.read_text().split(script.BEGIN)[1].split(script.END)[0]
    return parse(measured)


def test_the_page_holds_the_tables_that_the_script_prints(quick) -> None:
    def frame(tables):
        shares, units = tables
        return shares[0], [r[0] for r in shares], units[0], [(r[0], r[2], r[4]) for r in units]

    assert frame(page_tables()) == frame(parse(script.tables(quick)))


def test_the_pages_measured_values_are_not_exceeded(quick) -> None:
    shares, units = page_tables()
    for label, *cells in shares[2:]:
        for name, cell in zip(script.FORMATS, cells, strict=True):
            got = quick[label, name].share
            assert got <= SLACK * float(cell), (label, name)
    for label, single, _, double, _ in units[2:]:
        for name, cell in (("float32", single), ("float64", double)):
            got = quick[label.removesuffix(": ulp"), name].units
            assert got <= SLACK * float(cell), (label, name)


def test_the_bounds_of_the_page_hold(quick) -> None:
    shares, units = page_tables()
    assert len(shares) == 2 + len(script.CASES)
    assert len(units) == 2 + len(script.UNITS)
    for _, *cells in shares[2:]:
        assert all(0 <= float(cell) <= 1 for cell in cells)
    for _, single, single_bound, double, double_bound in units[2:]:
        assert float(single) <= float(single_bound)
        assert float(double) <= float(double_bound)
    assert all(error.share <= 1 for error in quick.values())


def prefix_differences(x, /, **_) -> np.ndarray:
    sums = np.cumsum(x, axis=-1, dtype=x.dtype)
    with np.errstate(over="ignore"):  # above the diagonal
        return np.tril(np.exp(sums[..., :, None] - sums[..., None, :]))


def differences_of_sums(y, /, *, grad_output) -> np.ndarray:
    m = np.tril(grad_output * y, -1)
    grad = (m.sum(axis=-1) - m.sum(axis=-2))[..., ::-1]
    return np.cumsum(grad, axis=-1)[..., ::-1]


def truncated(x, /, *, grad_output, **parameters):
    """Without the last rounding: the results of float32 are cut to ten bits."""
    grads = modulate_backward(x, grad_output=grad_output, **parameters)
    cut = (grads.grad_input.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return grads._replace(grad_input=cut)


@pytest.mark.parametrize(
    ("function", "replacement", "label"),
    [
        ("exp_segsum", prefix_differences, "`exp_segsum`, large term elsewhere, T = 40"),
        ("exp_segsum_backward", differences_of_sums, "`exp_segsum_backward`, T = 64, large block"),
        ("modulate_backward", truncated, "`grad_input`, normal"),
    ],
)
def test_the_measurement_sees_a_worse_implementation(
    monkeypatch: pytest.MonkeyPatch, function: str, replacement, label: str
) -> None:
    monkeypatch.setattr(script.cupyops, function, replacement)
    errors = script.CASES[label](np.random.default_rng(0), "float32")
    assert max(error.share for error in errors) > 1


def test_the_reference_is_exact() -> None:
    """Against values worked out by hand, where float64 alone would be wrong."""
    exact, size = script._exact_sum([[1e16, 1.0, -1e16]], False)
    assert (exact, size) == (1, 2e16)
    exact, _ = script._exact_sum([[1 + 2.0**-52, -1.0], [1 - 2.0**-52, 1.0]], True)
    assert exact == -(script.Fraction(2) ** -104)
    single, half = script.FORMATS["float32"], script.FORMATS["float16"]
    assert script.ulp(single, script.Fraction(1)) == 2.0**-23
    assert script.ulp(single, 1 - script.Fraction(1, 2**30)) == 2.0**-24
    assert script.ulp(single, script.Fraction(0)) == 2.0**-149
    assert script.ulp(half, script.Fraction(3, 2**16)) == 2.0**-24
    assert half.tiny == float(np.finfo(np.float16).smallest_subnormal)
    assert float(single.eps) == np.finfo(np.float32).eps


def test_writing_replaces_the_tables_alone(tmp_path: Path, quick) -> None:
    page = tmp_path / "numerics.md"
    shutil.copy(PAGE, page)
    before, after = PAGE.read_text().split(script.BEGIN)[0], PAGE.read_text().split(script.END)[1]
    for _ in range(2):
        script.write(script.tables(quick), page)
        text = page.read_text()
        assert text == (f"{before}{script.BEGIN}\n\n{script.tables(quick)}\n\n{script.END}{after}")


def test_a_subnormal_reference_is_not_lost() -> None:
    """exp(-744.4) is the smallest float64, half of the next: errors there are counted in it."""
    x = np.array([[0.0, -744.4]])
    (error,) = script.segment_errors(np.random.default_rng(0), "float64", x, 1)
    exact = script.Fraction(script.DECIMAL.exp(script.Decimal(-744.4)))
    want = abs(script.Fraction(math.exp(-744.4)) - exact) / script.FORMATS["float64"].tiny
    assert error.units == pytest.approx(float(want), abs=1e-9)
