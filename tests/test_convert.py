"""float32 <-> 16-bit storage: the bits of NumPy's casts, which round once, in any memory layout."""

from __future__ import annotations

import numpy as np
import pytest

from cupyops._convert import FEW, TILE, narrow, widen
from oracle_bits import DTYPES
from oracle_bits import widen as model_widen
from support import STRIDINGS, assert_same_bits, laid_out, poisoned

NAMES = ["float16", "bfloat16"]
EVERY = np.arange(1 << 16, dtype=np.uint16)


def every_value(name: str) -> np.ndarray:
    return EVERY.view(DTYPES[name])


def narrowed(values: np.ndarray, name: str) -> np.ndarray:
    got = poisoned(values.shape, DTYPES[name])
    narrow(values, got)
    return got


def assert_narrowed(values: np.ndarray, name: str) -> None:
    assert values.dtype == np.float32
    with np.errstate(all="ignore"):
        assert_same_bits(narrowed(values, name), values.astype(DTYPES[name]))


def float32s(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


@pytest.fixture(autouse=True)
def no_warnings():
    with np.errstate(all="ignore"):  # as in the package; warnings are errors here
        yield


@pytest.mark.parametrize("finite", [True, False], ids=["finite", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_every_value_widens_exactly(name, finite):
    values = every_value(name)
    if finite:  # no infinity, which selects another path
        values = values[np.isfinite(model_widen(values))]
    got = poisoned(values.shape, np.float32)
    widen(values, got)
    assert values.size > FEW
    assert_same_bits(got, model_widen(values).astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_infinity_and_nan_widen_wherever_they_are(name):
    for special in (np.inf, -np.inf, np.nan):
        for place in (0, FEW, TILE - 1, TILE, 2 * TILE + 4):
            values = np.ones(2 * TILE + 5, DTYPES[name])
            values[place] = special
            got = poisoned(values.shape, np.float32)
            widen(values, got)
            assert_same_bits(got, values.astype(np.float32))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("beyond", [False, True], ids=["in-range", "overflowing"])
@pytest.mark.parametrize("name", NAMES)
def test_every_tie_and_its_neighbours_narrow_to_nearest_even(name, beyond, sign):
    values = np.sort(np.abs(model_widen(every_value(name))))
    values = values[np.isfinite(values)]
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    if beyond:
        last = 65520 if name == "float16" else 2.0**128 * (1 - 2.0**-9)
        ties = np.concatenate([ties, np.float32([last, np.inf])])
    near = [np.nextafter(ties, np.float32(way)) for way in (-np.inf, np.inf)]
    assert_narrowed(sign * np.concatenate([values.astype(np.float32), ties, *near]), name)


@pytest.mark.parametrize("name", NAMES)
def test_values_below_the_least_narrow_to_signed_zeros_or_the_least(name):
    powers = np.float32(2) ** np.arange(-149, 16, dtype=np.float32)
    few = np.concatenate([powers, np.float32(1.5) * powers, np.nextafter(powers, np.float32(9))])
    assert_narrowed(np.tile(np.concatenate([few, -few, [0, -0.0]]).astype(np.float32), 64), name)


@pytest.mark.parametrize("name", NAMES)
def test_random_bits_narrow_as_numpy_rounds(name):
    rng = np.random.default_rng(1)
    for _ in range(40):
        values = float32s(rng.integers(0, 1 << 32, TILE + 7, np.uint32))
        assert_narrowed(values, name)
        # all of them where float16 is finite, too
        assert_narrowed(np.where(np.abs(values) < 65520, values, values * 0), name)
        moderate = rng.standard_normal(TILE + 7, np.float32) * np.float32(2.0**-14)
        assert_narrowed(moderate, name)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, 65520, -65520, 65519.996, 7e4, -1e5])
@pytest.mark.parametrize("name", NAMES)
def test_what_overflows_narrows_wherever_it_is(name, special):
    for place in (0, FEW, TILE - 1, TILE, 2 * TILE + 4):
        values = np.ones(2 * TILE + 5, np.float32)
        values[place] = special
        assert_narrowed(values, name)


@pytest.mark.parametrize("striding", STRIDINGS)
@pytest.mark.parametrize("shape", [(3, 67, 433), (1, 1, 2 * TILE + 3), (2, TILE, 1), (9, 5, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_conversion_takes_any_memory_layout(name, shape, striding):
    rng = np.random.default_rng(2)
    values = rng.standard_normal(shape, np.float32)
    half = values.astype(DTYPES[name])
    before = laid_out(values, striding)
    for target in {striding, "contiguous"} - {"readonly"}:
        got = laid_out(np.zeros(shape, DTYPES[name]), target)
        narrow(before, got)
        assert_same_bits(got, half)
        assert_same_bits(before, values)
        wide = laid_out(np.zeros(shape, np.float32), target)
        widen(laid_out(half, striding), wide)
        assert_same_bits(wide, half.astype(np.float32))
