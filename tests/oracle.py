"""Exact references and error bounds, written straight from the formulas.

Values of the modulation family are ``fractions.Fraction``; segment sums are exact integers; sums of
products are exact through ``math.fsum``. A non-finite reference is a Python float. Bounds are those
of the written contract; what is added to them is named where it is added.
"""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np

from oracle_bits import (
    CHUNK_ROWS,
    compute_name,
    eps,
    layout_of,
    load,
    overflow_threshold,
    row_of,
    tiny,
    ulp,
    widen,
)

HALF = Fraction(1, 2)


def _half_ulp(name: str, value: float) -> Fraction:
    return HALF * Fraction(float(ulp(name, value)))


def _double_rounding(storage: str, compute: str, value: float) -> Fraction:
    """A float64 result reaches 16 bits through float32, which adds one rounding in float32."""
    through = compute == "float64" and storage in ("float16", "bfloat16")
    return _half_ulp("float32", value) if through else Fraction(0)


def _float(value) -> float:
    """Fraction to float, infinities beyond the range."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


# ---- modulation: one element, one sum


def affine(x: float, s: float | None, t: float | None, plus: bool, compute: str, storage: str):
    """Reference and allowed error of ``x * factor + t``; the error is None where a step overflows.

    ``s`` None is the factor 1, ``t`` None adds nothing. Each step rounds once to the compute type.
    """
    if not all(math.isfinite(v) for v in (x, s or 0.0, t or 0.0)):
        factor = 1.0 if s is None else (1.0 + s if plus else s)
        return x * factor + (0.0 if t is None else t), Fraction(0)
    factor = Fraction(1) if s is None else Fraction(s) + (1 if plus else 0)
    product = Fraction(x) * factor
    value = product + (Fraction(t) if t is not None else 0)
    if max(abs(product), abs(factor)) > _surely_finite(compute):
        return value, None
    unit, least = Fraction(eps(compute)) / 2, Fraction(tiny(compute)) / 2
    error = Fraction(0)
    if s is not None:
        error += unit * abs(product) + least  # the product
        error += unit * abs(product) if plus else 0  # 1 + scale
    if t is not None:
        error = error * (1 + unit) + unit * abs(value)  # the addition (exact when subnormal)
    error += error * unit  # second order: the factor's error passes through the product
    near = _float(abs(value) + error)
    return value, error + _half_ulp(storage, near) + _double_rounding(storage, compute, near)


def _surely_finite(name: str) -> Fraction:
    """Magnitudes up to this stay finite whatever the roundings on the way."""
    return overflow_threshold(name) * (1 - 4 * Fraction(eps(name)))


def total(terms: list[tuple[float, ...]], compute: str, storage: str, chunks: int):
    """Reference and allowed error of a sum of products (or of single values).

    The contract: c * eps(compute) * sum of |terms| + half an ulp of the storage type, c = 16 for
    float32, 16 + number of chunks for float64. Added: half a smallest subnormal per product that
    may underflow, and the rounding in float32 of a float64 total on its way to 16 bits.
    """
    narrow = np.float32 if compute == "float32" else np.float64
    with np.errstate(all="ignore"):
        rounded = [float(np.prod([narrow(v) for v in term], dtype=narrow)) for term in terms]
    wild = [v for v in rounded if not math.isfinite(v)]
    if wild:
        return non_finite_sum(wild), Fraction(0)
    exact = [math.prod((Fraction(v) for v in term), start=Fraction(1)) for term in terms]
    value, size = sum(exact, Fraction(0)), sum((abs(v) for v in exact), Fraction(0))
    if size > _surely_finite(compute):
        return value, None
    c = 16 if compute == "float32" else 16 + chunks
    error = c * Fraction(eps(compute)) * size
    if any(len(term) > 1 for term in terms):
        error += len(terms) * Fraction(tiny(compute)) / 2
    near = _float(abs(value) + error)
    return value, error + _half_ulp(storage, near) + _double_rounding(storage, compute, near)


def non_finite_sum(values: list[float]) -> float:
    """What any order of IEEE additions gives once a non-finite value takes part."""
    if any(math.isnan(v) for v in values) or {math.inf, -math.inf} <= set(values):
        return math.nan
    return values[0]


def _scalar(parameter, b, r, d, x_shape):
    return None if parameter is None else float(row_of(parameter, b, r, x_shape)[d])


def modulate_exact(x, scale=None, shift=None, one_plus_scale=False):
    """Arrays of references and of allowed errors (both of dtype object), of the shape of ``x``."""
    compute, storage = compute_name(x, scale, shift), x.dtype.name
    wide, s, t = (None if a is None else widen(a) for a in (x, scale, shift))
    value, error = np.empty(x.shape, object), np.empty(x.shape, object)
    for b, r, d in np.ndindex(x.shape):
        value[b, r, d], error[b, r, d] = affine(
            float(wide[b, r, d]),
            _scalar(s, b, r, d, x.shape),
            _scalar(t, b, r, d, x.shape),
            one_plus_scale,
            compute,
            storage,
        )
    return value, error


def summed_rows(index, layout: str, x_shape) -> list[tuple[int, int]]:
    """The (b, r) whose terms belong to the gradient's element at ``index``."""
    batch, length, _ = x_shape
    if layout == "shared":
        return [(b, r) for b in range(batch) for r in range(length)]
    if layout == "sample":
        return [(index[0], r) for r in range(length)]
    if layout == "token_shared":
        return [(b, index[1]) for b in range(batch)]
    return [(index[0], index[1])]


def _sum_exact(factors, parameter, x_shape, compute):
    layout, storage = layout_of(parameter.shape, x_shape), parameter.dtype.name
    value, error = np.empty(parameter.shape, object), np.empty(parameter.shape, object)
    chunks_of_sample = -(-x_shape[1] // CHUNK_ROWS)
    for index in np.ndindex(parameter.shape):
        rows = summed_rows(index, layout, x_shape)
        chunks = {"shared": x_shape[0] * chunks_of_sample, "sample": chunks_of_sample}.get(
            layout, -(-len(rows) // CHUNK_ROWS)
        )
        terms = [tuple(float(f[b, r, index[-1]]) for f in factors) for b, r in rows]
        if layout == "token":
            value[index], error[index] = affine_product(terms[0], compute, storage)
        else:
            value[index], error[index] = total(terms, compute, storage, chunks)
    return value, error


def affine_product(term: tuple[float, ...], compute: str, storage: str):
    """A gradient that sums nothing: one product, or one value."""
    return affine(term[0], term[1] if len(term) > 1 else None, None, False, compute, storage)


def modulate_backward_exact(x, grad_output, scale=None, shift=None, one_plus_scale=False):
    """Three pairs (references, allowed errors); None for an absent parameter."""
    compute = compute_name(x, grad_output, scale, shift)
    wide, grad = widen(x), widen(grad_output)
    grad_input = _grad_input_exact(grad, scale, one_plus_scale, compute, x.dtype.name)
    grad_scale = None if scale is None else _sum_exact((grad, wide), scale, x.shape, compute)
    grad_shift = None if shift is None else _sum_exact((grad,), shift, x.shape, compute)
    return grad_input, grad_scale, grad_shift


def _grad_input_exact(grad, scale, plus, compute, storage):
    s = None if scale is None else widen(scale)
    value, error = np.empty(grad.shape, object), np.empty(grad.shape, object)
    for b, r, d in np.ndindex(grad.shape):
        value[b, r, d], error[b, r, d] = affine(
            float(grad[b, r, d]), _scalar(s, b, r, d, grad.shape), None, plus, compute, storage
        )
    return value, error


# ---- exponential segment sum


def segment_sums(row: np.ndarray):
    """Exact sums of x[j+1..i] as (nearest float64, remainder), and the largest |partial sum|
    inside.

    Running sums are integers on a common power-of-two grid. The largest partial sum is taken over
    every run of consecutive terms inside the segment, because the grouping of the additions is
    free.
    """
    values = [float(v) for v in row]
    length = len(values)
    finite = [Fraction(v) for v in values if math.isfinite(v)]
    grid = max((f.denominator for f in finite), default=1)
    steps = [int(Fraction(v) * grid) if math.isfinite(v) else None for v in values]
    nearest, rest, span = (np.zeros((length, length)) for _ in range(3))
    for j in range(length):
        running, high, low, wild = 0, 0, 0, []
        for i in range(j + 1, length):
            if steps[i] is None:
                wild.append(values[i])
            else:
                running += steps[i]
            if wild:
                nearest[i, j] = non_finite_sum(wild)
                continue
            high, low = max(high, running), min(low, running)
            nearest[i, j] = running / grid
            rest[i, j] = (running - int(Fraction(float(nearest[i, j])) * grid)) / grid
            span[i, j] = (high - low) / grid
    return nearest, rest, span


def exp_segsum_exact(row: np.ndarray, storage: str, compute: str | None = None):
    """Float64 reference of one (T,) row and the allowed error, both (T, T).

    Allowed: |reference| * (expm1(bound on the exponent's error) + 4 ulp), at least the smallest
    subnormal. Added: 2 ulp of float64 for the reference's own exponential. Outside j < i nothing is
    allowed.
    """
    compute = compute or ("float64" if storage == "float64" else "float32")
    nearest, rest, span = segment_sums(widen(row))
    length = len(row)
    terms = np.arange(length)[:, None] - np.arange(length)[None, :]
    with np.errstate(all="ignore"):
        value = np.exp(nearest) * (1.0 + np.where(np.isfinite(nearest), rest, 0.0))
        exponent = (terms + 4) * eps(compute) * span
        beyond = np.exp(nearest + exponent) - value
        error = np.where(exponent < 1, value * np.expm1(exponent), beyond)
        error = error + value * (4 * eps(storage) + 2 * eps("float64"))
        error = np.maximum(error, tiny(storage))
        error = np.where(np.isfinite(nearest), error, 0.0)
    below = terms > 0
    value = np.where(below, value, np.where(terms == 0, 1.0, 0.0))
    return value, np.where(below, error, 0.0)


def exp_segment(row: np.ndarray, i: int, j: int, digits: int = 60) -> mpmath.mpf:
    """One finite entry with as many digits as asked for."""
    with mpmath.workdps(digits):
        exact = sum((Fraction(float(v)) for v in widen(row)[j + 1 : i + 1]), Fraction(0))
        return mpmath.exp(mpmath.mpf(exact.numerator) / exact.denominator)


def exact_products(a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    """Arrays whose element-wise exact sum is a * b: one for narrow types, Veltkamp's four for
    float64."""
    if a.dtype != np.float64:
        return [widen(a) * widen(b)]  # 24 + 24 bits fit

    def halves(v):
        # a power of two first, so that the splitting constant cannot overflow
        scale = np.where(np.abs(v) > 2.0**900, 2.0**-100, 1.0)
        big = v * scale
        split = big * 134217729.0
        high = split - (split - big)
        return high / scale, (big - high) / scale

    (a_high, a_low), (b_high, b_low) = halves(a), halves(b)
    return [a_high * b_high, a_high * b_low, a_low * b_high, a_low * b_low]


def lower_products(grad_output: np.ndarray, y: np.ndarray) -> np.ndarray:
    """m in the compute type: what decides which outputs are non-finite."""
    compute = compute_name(grad_output, y)
    with np.errstate(all="ignore"):
        product = load(grad_output, compute) * load(y, compute)
    length = y.shape[-1]
    below = np.arange(length)[:, None] > np.arange(length)[None, :]
    return np.where(below, product, product.dtype.type(0)).astype(np.float64)


def exp_segsum_backward_exact(grad_output, y, positions=None):
    """Float64 reference of one (T, T) matrix pair and the allowed error, both (T,).

    The definition: for each k the sum of m[i, j] over i >= k, j < k. Allowed: (T + 8) *
    eps(compute) * sum of |terms| + half an ulp of the storage type. Added: smallest subnormals for
    products that may underflow (half a one here; in float64 the four parts of the reference may
    lose some too), and half an ulp of float64 for the reference. The error is NaN where partial
    sums may overflow. ``positions`` restricts the work to some k; the others come back as NaN with
    an infinite allowance.
    """
    length, storage = y.shape[-1], y.dtype.name
    compute = compute_name(grad_output, y)
    m = lower_products(grad_output, y)
    below = np.arange(length)[:, None] > np.arange(length)[None, :]
    clean = np.where(below & np.isfinite(m), 1, 0).astype(bool)
    zero = np.zeros((), y.dtype)
    parts = exact_products(np.where(clean, grad_output, zero), np.where(clean, y, zero))
    value, error = np.full(length, np.nan), np.full(length, np.inf)
    lost = 3.0 if compute == "float64" else 0.5
    for k in range(length) if positions is None else positions:
        block = m[k:, :k]
        wild = block[~np.isfinite(block)]
        if wild.size:
            value[k], error[k] = non_finite_sum(wild.tolist()), 0.0
            continue
        value[k] = math.fsum(v for part in parts for v in part[k:, :k].ravel().tolist())
        size = math.fsum(np.abs(block).ravel().tolist())
        if size > _surely_finite(compute):
            error[k] = np.nan
            continue
        error[k] = (length + 8) * eps(compute) * size + lost * block.size * tiny(compute)
        error[k] += ulp(storage, abs(value[k]) + error[k]) / 2 + ulp("float64", value[k]) / 2
        if block.size == 0:
            error[k] = 0.0
    return value, error


def exp_segsum_backward_nine_steps(grad_output: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The literal form, in float64: the operator as a chain of array operations."""
    length = y.shape[-1]
    below = np.arange(length)[:, None] > np.arange(length)[None, :]
    on_or_below = np.arange(length)[:, None] >= np.arange(length)[None, :]
    with np.errstate(all="ignore"):
        grad, out = widen(grad_output), widen(y)  # 1, 2: convert
        product = grad * out  # 3: multiply
        kept = np.where(on_or_below, product, 0.0)  # 4: zero the upper triangle
        flipped = kept[..., ::-1, :]  # 5: reverse along axis -2
        summed = np.cumsum(flipped, axis=-2)  # 6: cumulate
        restored = summed[..., ::-1, :]  # 7: reverse back
        strict = np.where(below, restored, 0.0)  # 8: zero the diagonal and the upper triangle
        return strict.sum(axis=-1)  # 9: sum along the last axis


def reached_by(i: int, j: int, length: int) -> list[int]:
    """Positions k of the gradient that m[i, j] belongs to."""
    return [k for k in range(length) if j < k <= i]
