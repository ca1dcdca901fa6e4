"""What the operators should give, in float64 and straight from the formulas, and how closely.

Independent of the arithmetic of the package: sums carry their rounding errors along, so that the
references are exact to the last place of float64 also where float64 itself is judged. The error
bounds are those of the numerical contract; what the reference itself may be off is added to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[Any]
Arrays: TypeAlias = Mapping[str, Floats]
"""The inputs of a call by name; an absent parameter is not among them."""

CHUNK_ROWS = 64
"""Rows whose sum is a chunk; chunks are added in float64."""


class Format(NamedTuple):
    dtype: np.dtype[Any]
    eps: float
    """Distance from 1 to the next number."""
    tiny: float
    """The smallest subnormal number."""
    largest: float


FORMATS = {
    "float16": Format(np.dtype(np.float16), 2.0**-10, 2.0**-24, 65504.0),
    "bfloat16": Format(np.dtype(ml_dtypes.bfloat16), 2.0**-7, 2.0**-133, (2 - 2.0**-7) * 2.0**127),
    "float32": Format(np.dtype(np.float32), 2.0**-23, 2.0**-149, (2 - 2.0**-23) * 2.0**127),
    "float64": Format(np.dtype(np.float64), 2.0**-52, 2.0**-1074, (2 - 2.0**-52) * 2.0**1023),
}
OWN = 2 * FORMATS["float64"].eps
"""What the reference itself may be off, relative to the terms it is made of."""


class Expected(NamedTuple):
    """A result: values, the error allowed to each element, and the dtype it is stored in."""

    value: Floats
    allowed: Floats
    storage: str


class _Arithmetic(NamedTuple):
    """In which type an implementation computes, and what it promises about its sums."""

    name: str
    contract: bool
    """The orders of the numerical contract; else any order of additions, one after another."""

    @property
    def unit(self) -> float:
        return FORMATS[self.name].eps

    @property
    def underflow(self) -> float:
        """What a product may lose below the normal numbers."""
        return _half(FORMATS[self.name].tiny)


def expected(
    operator: str,
    arrays: Arrays,
    options: Mapping[str, bool],
    *,
    arithmetic: str | None = None,
) -> list[Expected]:
    """The results of an operator, in order; none for an absent parameter.

    By default with the bounds that cupyops promises. `arithmetic` names the dtype in which another
    implementation computes from end to end, adding up in whatever order.
    """
    compute = "float64" if any(a.dtype == np.float64 for a in arrays.values()) else "float32"
    rules = _Arithmetic(arithmetic or compute, arithmetic is None)
    one_plus_scale = options.get("one_plus_scale", False)
    with np.errstate(all="ignore"):
        if operator == "modulate":
            return [_modulate(arrays, one_plus_scale, rules)]
        if operator == "modulate_backward":
            return _modulate_backward(arrays, one_plus_scale, rules)
        reference = {"exp_segsum": _exp_segsum, "exp_segsum_backward": _exp_segsum_backward}
        return [reference[operator](arrays, rules)]


# -- rounding -----------------------------------------------------------------------------------


def _half(least: float) -> float:
    return least / 2 or least  # half of the smallest float64 is no float64


def _half_ulp(name: str, magnitude: Floats) -> Floats:
    form = FORMATS[name]
    # A number is m * 2**exponent with 0.5 <= m < 1. Zero has exponent 0, which says nothing.
    exponent = np.frexp(magnitude)[1]
    half = np.where(magnitude == 0, 0.0, np.ldexp(form.eps / 2, exponent - 1))
    return np.maximum(half, _half(form.tiny))


def _stored(value: Floats, error: Floats, storage: str, rules: _Arithmetic) -> Expected:
    """Adds the rounding to the storage type; from float64 to 16 bits it passes through float32."""
    near = np.abs(value) + error
    allowed = error + _half_ulp(storage, near)
    if rules.name == "float64" and FORMATS[storage].dtype.itemsize == 2:
        allowed = allowed + _half_ulp("float32", near)
    # A non-finite value has to be that value; comparing says so by itself.
    return Expected(value, np.where(np.isfinite(value), allowed, 0.0), storage)


class _ExactSum:
    """A running sum of arrays that keeps what each addition rounds away."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.high, self.low = np.zeros(shape), np.zeros(shape)

    def add(self, term: Floats) -> None:
        total = self.high + term
        rest = total - self.high
        self.low += (self.high - (total - rest)) + (term - rest)
        self.high = total

    @property
    def value(self) -> Floats:
        """Once an infinity or a NaN takes part, the sum is what IEEE additions make of it."""
        return np.where(np.isfinite(self.high), self.high + self.low, self.high)


def _wide(array: Floats) -> Floats:
    return array.astype(np.float64)


# -- modulation ---------------------------------------------------------------------------------


def _rank3(parameter: Floats) -> Floats:
    """(B, D) is (B, 1, D) and (D,) is (1, 1, D): an axis of length 1 is shared."""
    if parameter.ndim == 1:
        return parameter[None, None, :]
    return parameter[:, None, :] if parameter.ndim == 2 else parameter


def _scaled(
    x: Floats, scale: Floats | None, one_plus_scale: bool, rules: _Arithmetic
) -> tuple[Floats, Floats]:
    """``x * scale`` or ``x * (1 + scale)``, and its error before it is stored."""
    if scale is None:
        return x, np.zeros(x.shape)
    factor = _rank3(_wide(scale))
    product = x * (1 + factor if one_plus_scale else factor)
    roundings = 2 if one_plus_scale else 1
    error = np.abs(product) * (roundings * rules.unit / 2 * (1 + rules.unit) + OWN)
    return product, error + rules.underflow


def _modulate(arrays: Arrays, one_plus_scale: bool, rules: _Arithmetic) -> Expected:
    x, shift = arrays["x"], arrays.get("shift")
    value, error = _scaled(_wide(x), arrays.get("scale"), one_plus_scale, rules)
    if shift is not None:
        value = value + _rank3(_wide(shift))
        error = error * (1 + rules.unit) + np.abs(value) * (rules.unit / 2 + OWN)
    return _stored(value, error, x.dtype.name, rules)


def _modulate_backward(arrays: Arrays, one_plus_scale: bool, rules: _Arithmetic) -> list[Expected]:
    x, grad = _wide(arrays["x"]), _wide(arrays["grad_output"])
    scale, shift = arrays.get("scale"), arrays.get("shift")
    value, error = _scaled(grad, scale, one_plus_scale, rules)
    results = [_stored(value, error, arrays["x"].dtype.name, rules)]
    if scale is not None:
        results.append(_summed(grad * x, scale, rules.underflow, rules))
    if shift is not None:
        results.append(_summed(grad, shift, 0.0, rules))
    return results


def _summed(terms: Floats, parameter: Floats, lost: float, rules: _Arithmetic) -> Expected:
    """The sum of the terms that share an element of a parameter; `lost` is the error of a term."""
    shape = _rank3(parameter).shape
    axes = tuple(axis for axis in range(2) if shape[axis] == 1)
    count = math.prod(terms.shape[axis] for axis in axes)
    rows = np.moveaxis(terms, axes, range(len(axes))).reshape(count, *_others(terms.shape, axes))
    total = _ExactSum(rows.shape[1:])
    for row in rows:
        total.add(row)
    factor: float = count + 2
    if rules.contract:
        factor = _sum_factor(axes, terms.shape, rules)
    size = np.abs(rows).sum(axis=0)
    error = (factor * rules.unit + OWN) * size + count * lost
    value, error = (part.reshape(parameter.shape) for part in (total.value, error))
    return _stored(value, error, parameter.dtype.name, rules)


def _others(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[int]:
    return [length for axis, length in enumerate(shape) if axis not in axes]


def _sum_factor(axes: tuple[int, ...], shape: tuple[int, ...], rules: _Arithmetic) -> float:
    """Units of error that the contract allows for each term of a sum."""
    if not axes:
        return 0.5  # nothing is added; a product is rounded once
    if rules.name == "float32":
        return 16
    chunks = math.ceil(shape[axes[-1]] / CHUNK_ROWS)
    return 16 + chunks * (shape[0] if len(axes) == 2 else 1)


# -- exponential segment sum --------------------------------------------------------------------


def _exp_segsum(arrays: Arrays, rules: _Arithmetic) -> Expected:
    storage, x = arrays["x"].dtype.name, _wide(arrays["x"])
    t = x.shape[-1]
    value, allowed = np.zeros((2, *x.shape, t))
    sums, (low, high) = _ExactSum(x.shape), np.zeros((2, *x.shape))
    for i in range(t):
        if i > 0:
            # Column j adds up x[j + 1] ... x[i]; the largest partial sum counts every run of them.
            term = np.where(np.arange(t) < i, x[..., i, None], 0.0)
            sums.add(term)
            low, high = np.minimum(low, sums.high), np.maximum(high, sums.high)
            row = slice(0, i)
            exponent, span = sums.value[..., row], (high - low)[..., row]
            off = (i - np.arange(i) + 4) * rules.unit * span
            power = np.exp(exponent)
            value[..., i, row] = power
            allowed[..., i, row] = _power_error(exponent, power, off, storage)
        value[..., i, i] = 1.0
    return Expected(value, allowed, storage)


def _power_error(exponent: Floats, power: Floats, off: Floats, storage: str) -> Floats:
    """The error allowed to ``exp(exponent)`` where the exponent may be `off`."""
    form = FORMATS[storage]
    grown = power * np.expm1(np.minimum(off, 1.0))
    grown = np.where(off < 1, grown, np.exp(exponent + off) - power)
    grown += power * (4 * form.eps + OWN * (1 + np.abs(exponent)))
    return np.where(np.isfinite(exponent), np.maximum(grown, form.tiny), 0.0)


def _exp_segsum_backward(arrays: Arrays, rules: _Arithmetic) -> Expected:
    y, grad = arrays["y"], arrays["grad_output"]
    t = y.shape[-1]
    value, size = np.zeros((2, *y.shape[:-1]))
    columns, sizes = _ExactSum(y.shape[:-1]), np.zeros(y.shape[:-1])
    for k in range(t - 1, 0, -1):
        # Column j adds up the products at (i, j) over i >= k; those with j < k belong to k.
        terms = np.zeros(y.shape[:-1])
        terms[..., :k] = _wide(grad[..., k, :k]) * _wide(y[..., k, :k])
        columns.add(terms)
        sizes += np.abs(terms)
        value[..., k] = _exact_row_sums(columns, k)
        size[..., k] = sizes[..., :k].sum(axis=-1)
    units = t + 8 if rules.contract else 2 * t + 8
    counts = np.arange(t) * (t - np.arange(t))
    error = (units * rules.unit + OWN) * size + counts * rules.underflow
    result = _stored(value, error, y.dtype.name, rules)
    result.allowed[..., :1] = 0.0
    return result


def _exact_row_sums(columns: _ExactSum, k: int) -> Floats:
    high, low = columns.high[..., :k], columns.low[..., :k]
    sums = np.asarray(high.sum(axis=-1))  # of infinities and NaNs, in whatever order
    for index in np.ndindex(sums.shape):
        if math.isfinite(sums[index]):
            sums[index] = math.fsum([*high[index].tolist(), *low[index].tolist()])
    return sums


# -- the judgement ------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """How far results are from what is expected."""

    worst: float
    """The largest error relative to the one allowed; infinite for what no error explains."""
    error: float
    """The largest error of a result relative to the largest value of that result."""
    fault: str | None
    """What is wrong, for a reader; None if nothing is."""


RIGHT = Verdict(0.0, 0.0, None)


def judge(name: str, got: Floats, want: Expected, *, same_dtype: bool = True) -> Verdict:
    """Compare every element of one result."""
    if got.shape != want.value.shape or (same_dtype and got.dtype.name != want.storage):
        expected_array = f"{want.storage}{list(want.value.shape)}"
        fault = f"{name} is {got.dtype.name}{list(got.shape)}; expected {expected_array}"
        return Verdict(math.inf, math.inf, fault)
    if not got.size:
        return RIGHT
    with np.errstate(all="ignore"):
        wide, (value, allowed, storage) = _wide(got), want
        distance = np.abs(wide - value)
        # Beyond the largest number the rounded result is infinite.
        overflow = np.isinf(wide) & (np.sign(wide) == np.sign(value))
        overflow &= np.abs(value) + allowed >= FORMATS[storage].largest
        same = (wide == value) | (np.isnan(wide) & np.isnan(value)) | overflow
        distance = np.where(same, 0.0, distance)
        ratio = np.where(distance == 0, 0.0, distance / allowed)
    ratio[np.isnan(ratio)] = math.inf
    distance[np.isnan(distance)] = math.inf
    finite = np.abs(value[np.isfinite(value)])
    largest = float(finite.max()) if finite.size else 0.0
    error = float(distance.max()) / (largest or 1.0)
    worst = float(ratio.max())
    if worst <= 1:
        return Verdict(worst, error, None)
    at = tuple(map(int, np.unravel_index(ratio.argmax(), ratio.shape)))
    place = f"{name}[{', '.join(map(str, at))}]"
    count = f"{int((ratio > 1).sum())} of {ratio.size} wrong"
    within = f" within {allowed[at]:.3g}" if allowed[at] else ""
    fault = f"{place} is {wide[at]:.9g}; expected {value[at]:.9g}{within} ({count})"
    return Verdict(worst, error, fault)


def combined(verdicts: list[Verdict]) -> Verdict:
    """The worst of several, and the first fault."""
    faults = [verdict.fault for verdict in verdicts if verdict.fault is not None]
    return Verdict(
        max((verdict.worst for verdict in verdicts), default=0.0),
        max((verdict.error for verdict in verdicts), default=0.0),
        faults[0] if faults else None,
    )
