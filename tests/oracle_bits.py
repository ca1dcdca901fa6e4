"""Number formats, and a model of the modulation family that predicts its results bit for bit.

Nothing here is shared with the package. Rounding to float16, bfloat16 and float32 is done on a grid
in float64 (scale by a power of two, round half to even, scale back), not by a library's conversion.
Sums are scalar loops over the rows in the order that the numerical contract fixes; only the columns
are vectorised, and only by element-wise additions.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import ml_dtypes
import numpy as np

CHUNK_ROWS = 64
ACCUMULATORS = 8

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

# significand bits (the hidden one included), least and greatest exponent of a normal number
_FORMATS = {
    "float16": (11, -14, 15),
    "bfloat16": (8, -126, 127),
    "float32": (24, -126, 127),
    "float64": (53, -1022, 1023),
}


def eps(name: str) -> float:
    """Distance from 1 to the next number."""
    return 2.0 ** (1 - _FORMATS[name][0])


def tiny(name: str) -> float:
    """Smallest subnormal number."""
    precision, low, _ = _FORMATS[name]
    return 2.0 ** (low - precision + 1)


def largest(name: str) -> float:
    precision, _, high = _FORMATS[name]
    return (2.0 - 2.0 ** (1 - precision)) * 2.0**high


def overflow_threshold(name: str) -> Fraction:
    """Least magnitude that rounds to infinity."""
    precision, _, high = _FORMATS[name]
    return (2 - Fraction(1, 2**precision)) * 2**high


def ulp(name: str, value) -> np.ndarray:
    """Spacing of the format at ``value``; never below the smallest subnormal."""
    precision, low, high = _FORMATS[name]
    magnitude = np.abs(np.asarray(value, np.float64))
    usable = np.where(np.isfinite(magnitude), magnitude, largest(name))
    exponent = np.clip(np.frexp(usable)[1] - 1, low, high)
    exponent = np.where(usable == 0, low, exponent)
    return np.ldexp(1.0, exponent - precision + 1)


def round_to_grid(values: np.ndarray, name: str) -> np.ndarray:
    """Float64 values rounded to the numbers of a narrower format, to nearest, ties to even."""
    values = np.asarray(values, np.float64)
    if name == "float64":
        return values
    with np.errstate(all="ignore"):
        step = ulp(name, values)
        rounded = np.where(np.isfinite(values), np.rint(values / step) * step, values)
        overflow = np.abs(rounded) > largest(name)
        return np.where(overflow, np.copysign(np.inf, rounded), rounded)


def widen(array: np.ndarray) -> np.ndarray:
    """Exact float64 values of an array of any accepted dtype (bfloat16 through its bits)."""
    array = np.asarray(array)
    if array.dtype == DTYPES["bfloat16"]:
        bits = np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << np.uint32(16)
        array = bits.view(np.float32).reshape(array.shape)
    with np.errstate(all="ignore"):
        return array.astype(np.float64)


def store(values: np.ndarray, name: str) -> np.ndarray:
    """Values of a compute type as an array of the storage dtype; 16 bits are reached through
    float32."""
    values = widen(values)
    if name == "float64":
        return values.copy()
    single = round_to_grid(values, "float32")
    if name == "float32":
        return np.asarray(single.astype(np.float32))
    narrow = round_to_grid(single, name)
    if name == "float16":
        return np.asarray(narrow.astype(np.float16))  # exact: the values are on the float16 grid
    bits = np.asarray(narrow.astype(np.float32)).view(np.uint32) >> np.uint32(16)
    return np.asarray(bits.astype(np.uint16)).view(DTYPES["bfloat16"])


def compute_name(*arrays: np.ndarray | None) -> str:
    return "float64" if any(a is not None and a.dtype == np.float64 for a in arrays) else "float32"


def load(array: np.ndarray, compute: str) -> np.ndarray:
    return widen(array).astype(DTYPES[compute])  # exact: widening only


def layout_of(shape: tuple[int, ...], x_shape: tuple[int, int, int]) -> str:
    """Which row of the table of layouts a parameter's shape is: what its gradient is summed
    over."""
    batch, length, width = x_shape
    if shape[-1] != width:
        raise ValueError(shape)
    if shape in [(width,), (1, width), (1, 1, width)]:
        return "shared"
    if shape in [(batch, width), (batch, 1, width)]:
        return "sample"
    if shape == x_shape:
        return "token"
    if shape == (1, length, width):
        return "token_shared"
    raise ValueError(shape)


def row_of(parameter: np.ndarray, b: int, r: int, x_shape) -> np.ndarray:
    """The parameter's row that acts on row (b, r) of x."""
    layout = layout_of(parameter.shape, x_shape)
    if layout == "shared":
        return parameter.reshape(-1)
    if layout == "sample":
        return parameter[b].reshape(-1)
    return parameter[b, r] if layout == "token" else parameter[0, r]


def sum_of_rows(rows: Iterable[np.ndarray], width: int) -> np.ndarray:
    """The scheme of the contract over one axis; float64, not yet rounded to the compute type."""
    rows = list(rows)
    if not rows:
        return np.zeros(width)
    total = None
    for start in range(0, len(rows), CHUNK_ROWS):
        accumulators: list[np.ndarray | None] = [None] * ACCUMULATORS
        for position in range(start, min(start + CHUNK_ROWS, len(rows))):
            slot = position % ACCUMULATORS
            held = accumulators[slot]
            accumulators[slot] = rows[position] if held is None else held + rows[position]
        chunk = accumulators[0]
        for held in accumulators[1:]:
            chunk = chunk if held is None else chunk + held
        wide = chunk.astype(np.float64)
        total = wide if total is None else total + wide
    return total


def modulate_bits(x, scale=None, shift=None, one_plus_scale=False) -> np.ndarray:
    compute = compute_name(x, scale, shift)
    wide, one = load(x, compute), DTYPES[compute].type(1)
    factor = None if scale is None else load(scale, compute)
    offset = None if shift is None else load(shift, compute)
    result = np.empty(x.shape, np.float64)
    with np.errstate(all="ignore"):
        for b in range(x.shape[0]):
            for r in range(x.shape[1]):
                row = wide[b, r]
                if factor is not None:
                    weight = row_of(factor, b, r, x.shape)
                    row = row * ((one + weight) if one_plus_scale else weight)
                if offset is not None:
                    row = row + row_of(offset, b, r, x.shape)
                result[b, r] = row
    return store(result, x.dtype.name)


def _gradient(terms, parameter, x_shape, compute: str) -> np.ndarray:
    """Sum ``terms[b, r]`` over what the layout of the parameter asks for; then round and store."""
    batch, length, width = x_shape
    layout = layout_of(parameter.shape, x_shape)
    if layout == "token":
        result = terms.astype(np.float64)
    elif layout == "token_shared":
        sums = [sum_of_rows((terms[b, r] for b in range(batch)), width) for r in range(length)]
        result = np.array(sums, np.float64).reshape(1, length, width)
    else:
        sums = [sum_of_rows(terms[b], width) for b in range(batch)]
        if layout == "shared":
            total = np.zeros(width)
            for b, sample in enumerate(sums):
                total = sample if b == 0 else total + sample
            sums = [total]
        result = np.array(sums, np.float64).reshape(parameter.shape)
    return store(round_to_grid(result, compute), parameter.dtype.name)


def modulate_backward_bits(x, grad_output, scale=None, shift=None, one_plus_scale=False):
    """(grad_input, grad_scale, grad_shift); None for an absent parameter."""
    compute = compute_name(x, grad_output, scale, shift)
    grad, one = load(grad_output, compute), DTYPES[compute].type(1)
    grad_input = grad.astype(np.float64)
    grad_scale = grad_shift = None
    with np.errstate(all="ignore"):
        if scale is not None:
            factor = load(scale, compute)
            for b in range(x.shape[0]):
                for r in range(x.shape[1]):
                    weight = row_of(factor, b, r, x.shape)
                    grad_input[b, r] = grad[b, r] * ((one + weight) if one_plus_scale else weight)
            grad_scale = _gradient(grad * load(x, compute), scale, x.shape, compute)
        if shift is not None:
            grad_shift = _gradient(grad, shift, x.shape, compute)
    return store(grad_input, x.dtype.name), grad_scale, grad_shift
