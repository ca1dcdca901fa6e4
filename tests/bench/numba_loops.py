"""The operators and the bandwidth floor as loops that numba compiles: what a machine can do.

One pass over the arrays, the reads, writes and accumulation of the numerical contract, and nothing
else: no checks, no special values, no choice of algorithm. Every loop is compiled for one thread
and for several. 16-bit numbers come as their bits; conversions are single LLVM instructions, so
that they vectorise. What numba compiles has no annotations: their types are those of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

CHUNK = 64
"""Rows whose sum is a chunk, as in the numerical contract."""
ACCUMULATORS = 8
COLUMNS = 2048
"""Columns of modulation that are summed at once: accumulators stay in the first-level cache."""
STRIP = 512
"""Columns of a matrix that a task walks along."""
TASK = 4096
"""Least number of columns of a task, over all its matrices."""

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


# -- conversions --------------------------------------------------------------------------------


@intrinsic
def half_to_float(context, bits):
    def emit(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), F32)

    return types.float32(types.uint16), emit


@intrinsic
def float_to_half(context, value):
    def emit(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), I16)

    return types.uint16(types.float32), emit


@intrinsic
def brain_to_float(context, bits):
    def emit(context, builder, signature, args):
        wide = builder.shl(builder.zext(args[0], I32), I32(16))
        return builder.bitcast(wide, F32)

    return types.float32(types.uint16), emit


@intrinsic
def float_to_brain(context, value):
    def emit(context, builder, signature, args):
        bits = builder.bitcast(args[0], I32)
        # To nearest, ties to even: half a unit, and one bit less where the last bit is 0.
        last = builder.and_(builder.lshr(bits, I32(16)), I32(1))
        rounded = builder.add(bits, builder.add(last, I32(0x7FFF)))
        high = builder.trunc(builder.lshr(rounded, I32(16)), I16)
        nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.select(nan, I16(0x7FC0), high)

    return types.uint16(types.float32), emit


@intrinsic
def power_of_two(context, exponent):
    """2 to a whole number, given and returned as a float of the same type; normal results only."""
    single = exponent == types.float32
    integer, bias, digits = (I32, 127, 23) if single else (I64, 1023, 52)

    def emit(context, builder, signature, args):
        whole = builder.fptosi(args[0], integer)
        bits = builder.shl(builder.add(whole, integer(bias)), integer(digits))
        return builder.bitcast(bits, args[0].type)

    return exponent(exponent), emit


@njit
def unchanged(value):
    return value


# -- exponential, from the Cephes library: vectorises, two units in the last place --------------

LOG2E = 1.4426950408889634
F = np.float32
F_LOG2E, F_ROUND, F_LOW, F_HIGH = F(LOG2E), F(1.5 * 2**23), F(-104), F(88.7)
F_LN2, F_LN2_REST, F_HALF, F_ONE = F(0.693359375), F(-2.12194440e-4), F(0.5), F(1)
F_P = tuple(
    F(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)


@njit
def exp_single(x):
    x = F_LOW if x < F_LOW else x
    x = F_HIGH if x > F_HIGH else x
    whole = (x * F_LOG2E + F_ROUND) - F_ROUND
    x = (x - whole * F_LN2) - whole * F_LN2_REST
    p = F_P[0]
    p = p * x + F_P[1]
    p = p * x + F_P[2]
    p = p * x + F_P[3]
    p = p * x + F_P[4]
    p = p * x + F_P[5]
    p = p * (x * x) + x + F_ONE
    # In two steps, so that results below the normal numbers survive.
    first = (whole * F_HALF + F_ROUND) - F_ROUND
    return p * power_of_two(first) * power_of_two(whole - first)


@njit
def exp_double(x):
    x = -746.0 if x < -746.0 else x
    x = 709.7 if x > 709.7 else x
    whole = (x * LOG2E + 6755399441055744.0) - 6755399441055744.0
    x = (x - whole * 6.93145751953125e-1) - whole * 1.42860682030941723212e-6
    xx = x * x
    p = x * ((1.26177193074810590878e-4 * xx + 3.02994407707441961300e-2) * xx + 1.0)
    q = (3.00198505138664455042e-6 * xx + 2.52448340349684104192e-3) * xx
    q = (q + 2.27265548208155028766e-1) * xx + 2.0
    value = 1.0 + 2.0 * (p / (q - p))
    first = (whole * 0.5 + 6755399441055744.0) - 6755399441055744.0
    return value * power_of_two(first) * power_of_two(whole - first)


# -- loops --------------------------------------------------------------------------------------


def _modulate(load, store, compute, exp):
    one = compute(1)

    def modulate(x, scale, shift, out):
        batch, length, width = x.shape
        for row in prange(batch * length):
            b = row // length
            line, result = x[b, row % length], out[b, row % length]
            factor, term = scale[b], shift[b]
            for d in range(width):
                result[d] = store(load(line[d]) * (one + load(factor[d])) + load(term[d]))

    return modulate


def _modulate_backward(load, store, compute, exp):
    one = compute(1)

    def modulate_backward(x, grad, scale, gx, gscale, gshift, parts):
        batch, length, width = x.shape
        chunks = (length + CHUNK - 1) // CHUNK
        for task in prange(batch * chunks):
            b, chunk = task // chunks, task % chunks
            end = min(length, (chunk + 1) * CHUNK)
            sum_scale = np.empty(min(width, COLUMNS), compute)
            sum_shift = np.empty(min(width, COLUMNS), compute)
            # Slices, so that indices count from 0, and a loop for each result: neither an index
            # that might be negative nor a loop over so many arrays would be vectorised.
            for left in range(0, width, COLUMNS):
                right = min(left + COLUMNS, width)
                factor = scale[b, left:right]
                for k in range(ACCUMULATORS):
                    sum_scale[:] = compute(-0.0)
                    sum_shift[:] = compute(-0.0)
                    for row in range(chunk * CHUNK + k, end, ACCUMULATORS):
                        line, given = x[b, row, left:right], grad[b, row, left:right]
                        result = gx[b, row, left:right]
                        for j in range(right - left):
                            result[j] = store(load(given[j]) * (one + load(factor[j])))
                        for j in range(right - left):
                            sum_scale[j] += load(given[j]) * load(line[j])
                        for j in range(right - left):
                            sum_shift[j] += load(given[j])
                    part_scale = parts[0, b, chunk, left:right]
                    part_shift = parts[1, b, chunk, left:right]
                    for j in range(right - left):
                        part_scale[j] = sum_scale[j] + (part_scale[j] if k > 0 else compute(-0.0))
                    for j in range(right - left):
                        part_shift[j] = sum_shift[j] + (part_shift[j] if k > 0 else compute(-0.0))
        total = np.empty(width, np.float64)
        for b in range(batch):
            for which in range(2):
                total[:] = -0.0
                for chunk in range(chunks):
                    part = parts[which, b, chunk]
                    for d in range(width):
                        total[d] += part[d]
                result = gscale[b] if which == 0 else gshift[b]
                for d in range(width):
                    result[d] = store(compute(total[d]))

    return modulate_backward


def _exp_segsum(load, store, compute, exp):
    def exp_segsum(x, out):
        number, t = x.shape
        one, zero = store(compute(1)), store(compute(0))
        strips = (t + STRIP - 1) // STRIP
        each = max(1, TASK // t)
        for task in prange((number + each - 1) // each * strips):
            left = task % strips * STRIP
            right = min(t, left + STRIP)
            sums = np.empty(right - left, compute)
            for n in range(task // strips * each, min(number, (task // strips + 1) * each)):
                sums[:] = compute(0)
                for i in range(t):
                    value, row = load(x[n, i]), out[n, i, left:right]
                    below = max(0, min(i, right) - left)
                    for j in range(below):
                        sums[j] += value
                    for j in range(below):
                        row[j] = store(exp(sums[j]))
                    row[below:] = zero
                    if left <= i < right:
                        row[below] = one

    return exp_segsum


def _exp_segsum_backward(load, store, compute, exp):
    def exp_segsum_backward(y, grad, out, parts):
        number, t, _ = y.shape
        strips = (t + STRIP - 1) // STRIP
        each = max(1, TASK // t)
        for task in prange((number + each - 1) // each * strips):
            strip = task % strips
            left, right = strip * STRIP, min(t, (strip + 1) * STRIP)
            sums = np.empty(right - left, compute)
            for n in range(task // strips * each, min(number, (task // strips + 1) * each)):
                sums[:] = compute(0)
                for i in range(t - 1, -1, -1):
                    mine, given = y[n, i, left:right], grad[n, i, left:right]
                    total = compute(0)
                    for j in range(max(0, min(i, right) - left)):
                        sums[j] += load(mine[j]) * load(given[j])
                        total += sums[j]
                    parts[n, strip, i] = total
        for n in range(number):
            for i in range(t):
                total = compute(0)
                for strip in range(strips):
                    total += parts[n, strip, i]
                out[n, i] = store(total)

    return exp_segsum_backward


LOOPS = {
    "modulate": _modulate,
    "modulate_backward": _modulate_backward,
    "exp_segsum": _exp_segsum,
    "exp_segsum_backward": _exp_segsum_backward,
}


# -- the floor: the same arrays read and written, and no arithmetic ------------------------------


def _move(x, scale, shift, out):
    batch, length, width = x.shape
    for row in prange(batch * length):
        line, result = x[row // length, row % length], out[row // length, row % length]
        for d in range(width):
            result[d] = line[d]


def _move_two(x, grad, scale, gx, gscale, gshift, parts):
    batch, length, width = x.shape
    for row in prange(batch * length):
        b, place = row // length, row % length
        line, given, result = x[b, place], grad[b, place], gx[b, place]
        for d in range(width):
            result[d] = line[d] ^ given[d]


def _fill(x, out):
    number, t = x.shape
    for row in prange(number * t):
        result = out[row // t, row % t]
        value = x[row // t, row % t]
        for j in range(t):
            result[j] = value


def _read_below(y, grad, out, parts):
    number, t, _ = y.shape
    for n in prange(number):
        for i in range(t):
            mine, given, total = y[n, i], grad[n, i], y[n, 0, 0]
            for j in range(i):
                total ^= mine[j] ^ given[j]
            out[n, i] = total


FLOORS = {
    "modulate": _move,
    "modulate_backward": _move_two,
    "exp_segsum": _fill,
    "exp_segsum_backward": _read_below,
}


# -- compiled -----------------------------------------------------------------------------------

TYPES: dict[str, tuple[Any, Any, type, Any, type]] = {
    "float16": (half_to_float, float_to_half, np.float32, exp_single, np.uint16),
    "bfloat16": (brain_to_float, float_to_brain, np.float32, exp_single, np.uint16),
    "float32": (unchanged, unchanged, np.float32, exp_single, np.float32),
    "float64": (unchanged, unchanged, np.float64, exp_double, np.float64),
}
"""Load, store, compute type, exponential, and the type that the loop sees in memory."""


@functools.cache
def loop(operator: str, dtype: str, parallel: bool) -> Callable[..., None]:
    load, store, compute, exp, _ = TYPES[dtype]
    # Sums along a row may be taken in any order, so that they vectorise; nothing is contracted.
    fast = {"reassoc"} if operator == "exp_segsum_backward" else False
    made = LOOPS[operator](load, store, compute, exp)
    return njit(made, parallel=parallel, fastmath=fast, error_model="numpy")


@functools.cache
def floor_loop(operator: str, parallel: bool) -> Callable[..., None]:
    return njit(FLOORS[operator], parallel=parallel)


def arguments(
    operator: str, arrays: dict[str, Any], outs: tuple[Any, ...], memory: Any, compute: Any
) -> tuple[Any, ...]:
    """What a loop takes: the arrays as `memory`, and room for partial sums."""
    inputs = [a.view(memory) for name, a in arrays.items()]
    results = [out.view(memory) for out in outs]
    if operator == "modulate_backward":
        x, grad, scale, _ = inputs
        batch, length, width = x.shape
        parts = np.empty((2, batch, -(-length // CHUNK), width), compute)
        return (x, grad, scale, *results, parts)
    if operator == "exp_segsum_backward":
        number, t, _ = inputs[0].shape
        return (*inputs, *results, np.empty((number, -(-t // STRIP), t), compute))
    return (*inputs, *results)


def threads(number: int) -> None:
    numba.set_num_threads(number)
