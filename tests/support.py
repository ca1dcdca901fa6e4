"""What the test files share: array layouts, special values, and element-wise comparisons."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from oracle import exp_segsum_backward_exact, exp_segsum_exact
from oracle_bits import (
    DTYPES,
    eps,
    largest,
    modulate_backward_bits,
    modulate_bits,
    overflow_threshold,
    store,
    tiny,
    widen,
)

DTYPE_NAMES = list(DTYPES)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# layouts in memory that keep the values of an array
STRIDINGS = [
    "contiguous",
    "fortran",
    "reversed",
    "sliced",
    "transposed",
    "offset",
    "unaligned",
    "chunk",
    "readonly",
]


def shape_id(shape) -> str:
    return "x".join(str(n) for n in shape) or "scalar"


def array(values, name: str) -> np.ndarray:
    """Values rounded once to the named dtype, by the oracle's own rounding."""
    return store(np.asarray(values, np.float64), name)


def normal(rng, shape, name: str, spread: float = 1.0) -> np.ndarray:
    return array(spread * rng.standard_normal(shape), name)


def laid_out(values: np.ndarray, striding: str) -> np.ndarray:
    """The same values in another memory layout; gaps hold NaN, so that a stray read shows."""
    dtype, shape = values.dtype, values.shape
    if striding == "contiguous":
        return values.copy()
    if striding == "fortran":
        return np.asfortranarray(values)
    if striding == "reversed":
        flip = (slice(None, None, -1),) * values.ndim
        return np.ascontiguousarray(values[flip])[flip]
    if striding == "transposed":
        if values.ndim < 2:
            return values.copy()
        return np.ascontiguousarray(values.swapaxes(-1, -2)).swapaxes(-1, -2)
    if striding == "sliced":
        every = (slice(1, None, 2),) * values.ndim
        view = poisoned(tuple(2 * n + 1 for n in shape), dtype)[every]
    elif striding == "chunk":
        width = shape[-1]
        view = poisoned((*shape[:-1], 6 * width), dtype)[..., 2 * width : 3 * width]
    elif striding in ("offset", "unaligned"):
        shift = dtype.itemsize if striding == "offset" else 1
        raw = np.full(values.nbytes + shift, 0xFF, np.uint8)
        view = raw[shift : shift + values.nbytes].view(dtype).reshape(shape)
    elif striding == "readonly":
        view = values.copy()
    else:
        raise ValueError(striding)
    view[...] = values
    view.flags.writeable = striding != "readonly"
    return view


def poisoned(shape, dtype) -> np.ndarray:
    """An array full of NaN, also for bfloat16."""
    result = np.empty(shape, dtype)
    result.view(np.uint8)[...] = 0xFF
    return result


def bits(values: np.ndarray) -> np.ndarray:
    dense = np.ascontiguousarray(values)
    return dense.view(_UNSIGNED[values.dtype.itemsize]).reshape(values.shape)


def assert_same_bits(got, want) -> None:
    """Same dtype, shape and bits; any NaN equals any NaN (payloads are not promised)."""
    assert type(got) is np.ndarray
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    different = (bits(got) != bits(want)) & ~(np.isnan(widen(got)) & np.isnan(widen(want)))
    assert not different.any(), _first(different, got, want)


def _first(different, got, want) -> str:
    index = tuple(int(n[0]) for n in np.nonzero(different))
    return (
        f"{int(different.sum())} differ, first at {index}: got {got[index]!r}, not {want[index]!r}"
    )


def assert_within(got, reference, allowed) -> None:
    """Every element within its own allowed error; a non-finite reference must be met exactly.

    ``allowed`` None or NaN: the bound says nothing here, because a step overflows the compute type.
    """
    assert type(got) is np.ndarray
    assert got.shape == reference.shape
    limit = overflow_threshold(got.dtype.name)
    wide = widen(got)
    for index in np.ndindex(got.shape):
        problem = _fault(float(wide[index]), reference[index], allowed[index], limit)
        assert problem is None, f"at {index}: got {got[index]!r}, {problem}"


def _fault(value: float, want, error, limit: Fraction) -> str | None:
    if error is None or (isinstance(error, float) and math.isnan(error)):
        return None
    if not isinstance(want, Fraction) and not math.isfinite(want):
        same = value == want or (math.isnan(value) and math.isnan(want))
        return None if same else f"not {want!r}"
    if math.isnan(value):
        return f"not {float(want)!r}"
    if error == math.inf:
        return None
    if math.isinf(value):
        near = value * want > 0 and abs(Fraction(want)) + Fraction(error) >= limit
        return None if near else f"infinite, not {float(want)!r}"
    off = abs(Fraction(value) - Fraction(want))
    if off <= error:
        return None
    return f"not {float(want)!r}: off by {float(off):.3g}, allowed {float(error):.3g}"


def modulate_layouts(x_shape) -> dict[str, tuple[int, ...]]:
    """Every accepted shape of a parameter, by the name used in test ids."""
    batch, length, width = x_shape
    return {
        "B,D": (batch, width),
        "B,1,D": (batch, 1, width),
        "D": (width,),
        "1,D": (1, width),
        "1,1,D": (1, 1, width),
        "B,L,D": (batch, length, width),
        "1,L,D": (1, length, width),
    }


LAYOUT_NAMES = list(modulate_layouts((2, 3, 4)))


def _special(name: str) -> list[float]:
    least, step, most = tiny(name), eps(name), largest(name)
    ordinary = [0.0, -0.0, math.inf, -math.inf, math.nan, -1.0, 1.0, step, -1.0 + step]
    return [*ordinary, least, -least, 3 * least, least / step, most, -most]


SPECIAL = {name: _special(name) for name in DTYPES}


def sprinkled(rng, values: np.ndarray, share: float) -> np.ndarray:
    """A copy with about ``share`` of the elements replaced by special values of its dtype."""
    special = array(SPECIAL[values.dtype.name], values.dtype.name)
    chosen = rng.random(values.shape) < share
    result = values.copy()
    result[chosen] = special[rng.integers(0, len(special), int(chosen.sum()))]
    return result


def modulation_problem(rng, shape, name, scale=None, shift=None, parameter_name=None):
    """Random ``x``, ``grad_output`` and the parameters of the named layouts (None: absent)."""
    layouts = modulate_layouts(shape)
    problem = {"x": normal(rng, shape, name), "grad_output": normal(rng, shape, name)}
    for key, layout in (("scale", scale), ("shift", shift)):
        if layout is not None:
            problem[key] = normal(rng, layouts[layout], parameter_name or name)
    return problem


def forward_part(problem: dict) -> dict:
    return {key: value for key, value in problem.items() if key != "grad_output"}


def positional(problem: dict) -> tuple[np.ndarray, dict]:
    """The first argument, and the rest by keyword."""
    rest = dict(problem)
    first = "x" if "x" in rest else "y"
    return rest.pop(first), rest


def assert_modulate_bits(call, problem: dict, plus: bool = False) -> None:
    """Both operators on one problem, bit for bit against the model."""
    x, arguments = positional(forward_part(problem))
    got = call("modulate", x, **arguments, one_plus_scale=plus)
    assert_same_bits(got, modulate_bits(x, **arguments, one_plus_scale=plus))
    x, arguments = positional(problem)
    got = call("modulate_backward", x, **arguments, one_plus_scale=plus)
    assert_same_gradients(got, modulate_backward_bits(x, **arguments, one_plus_scale=plus))


def assert_same_gradients(got, want) -> None:
    assert got._fields == ("grad_input", "grad_scale", "grad_shift")
    for part, expected in zip(got, want, strict=True):
        assert (part is None) == (expected is None)
        if expected is not None:
            assert_same_bits(part, expected)


def each_laid_out(problem: dict, striding: str, only: str | None = None) -> dict:
    """The problem with all arrays, or one of them, in another memory layout."""
    return {
        key: laid_out(value, striding) if only in (None, key) else value
        for key, value in problem.items()
    }


def assert_exp_segsum(got, x) -> None:
    """Every entry of a forward result within its bound; from the diagonal up, exact bits."""
    length = x.shape[-1]
    assert type(got) is np.ndarray
    assert got.dtype == x.dtype
    assert got.shape == (*x.shape, length)
    above = np.triu(np.ones((length, length), bool), 1)
    assert (bits(got)[..., above] == 0).all(), "not +0.0 above the diagonal"
    one = bits(array([1.0], x.dtype.name))
    assert (bits(got)[..., np.eye(length, dtype=bool)] == one).all(), "not 1 on the diagonal"
    limit = _overflow_limit(x.dtype.name)
    for index in np.ndindex(x.shape[:-1]):
        value, allowed = exp_segsum_exact(x[index], x.dtype.name)
        assert_floats_within(widen(got[index]), value, allowed, limit)


def _overflow_limit(name: str) -> float:
    return math.inf if name == "float64" else float(overflow_threshold(name))


def assert_floats_within(got, value, allowed, limit: float) -> None:
    """Like ``assert_within`` for float64 references; a NaN allowance judges nothing."""
    with np.errstate(all="ignore"):
        exact = ~np.isfinite(value)
        same = (got == value) | (np.isnan(got) & np.isnan(value))
        near = np.abs(got - value) <= allowed
        beyond = np.isinf(got) & (got * value > 0) & (np.abs(value) + allowed >= limit)
    fine = np.where(exact, same, near | beyond) | np.isnan(allowed)
    if not fine.all():
        index = tuple(int(n[0]) for n in np.nonzero(~fine))
        raise AssertionError(
            f"{int((~fine).sum())} wrong, first at {index}: got {got[index]!r}, "
            f"not {value[index]!r} within {allowed[index]!r}"
        )


def assert_exp_segsum_backward(got, y, grad_output, positions=None) -> None:
    """Every element of a gradient within its bound; element 0 is +0.0."""
    assert type(got) is np.ndarray
    assert got.dtype == y.dtype
    assert got.shape == y.shape[:-1]
    assert (bits(got)[..., :1] == 0).all(), "grad_input[0] is not +0.0"
    limit = _overflow_limit(y.dtype.name)
    for index in np.ndindex(y.shape[:-2]):
        value, allowed = exp_segsum_backward_exact(grad_output[index], y[index], positions)
        where = slice(None) if positions is None else list(positions)
        assert_floats_within(widen(got[index])[where], value[where], allowed[where], limit)


def sequence(rng, shape, name: str, kind: str = "normal") -> np.ndarray:
    draw = rng.standard_normal(shape)
    if kind == "decay":
        draw = -np.log1p(np.exp(draw))
    elif kind == "growth":
        draw = 0.05 * np.abs(draw)
    elif kind == "steep":
        draw = 40 * draw
    return array(draw, name)


def gradient_pair(rng, shape, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(y, grad_output) of a square shape, with rubbish where nothing may be read."""
    y, grad = normal(rng, shape, name), normal(rng, shape, name)
    unread = np.triu(np.ones(shape[-2:], bool))
    y[..., unread], grad[..., unread] = math.nan, math.inf
    return y, grad


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Results of ``work(0) ... work(count - 1)``, begun together; an exception is a result."""
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def target(i: int) -> None:
        barrier.wait()
        try:
            results[i] = work(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=target, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
