"""Measure the rounding errors of the four operators; the tables of ``numerics.md``.

    python docs/measure_errors.py           print the tables
    python docs/measure_errors.py --write   replace them in docs/numerics.md
    python docs/measure_errors.py --quick   print them for the first seed only

Every result of the NumPy back end is compared with an exact reference: fractions for products and
sums, 50 decimal digits for exponentials. Inputs are the same for everyone: seeds 0, 1, 2, ...
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from decimal import Context, Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

import cupyops

PAGE = Path(__file__).parent / "numerics.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SEEDS = range(5)

CHUNK_ROWS = 64
DECIMAL = Context(prec=50)


class Format(NamedTuple):
    """A floating-point format: its spacing at 1 and its smallest subnormal number."""

    dtype: np.dtype
    eps: Fraction
    tiny: Fraction


def _format(dtype: object, precision: int, low: int) -> Format:
    tiny = Fraction(2) ** (low - precision + 1)
    return Format(np.dtype(dtype), Fraction(1, 2 ** (precision - 1)), tiny)


FORMATS = {
    "float16": _format(np.float16, 11, -14),
    "bfloat16": _format(ml_dtypes.bfloat16, 8, -126),
    "float32": _format(np.float32, 24, -126),
    "float64": _format(np.float64, 53, -1022),
}


def compute_format(name: str) -> Format:
    return FORMATS["float64" if name == "float64" else "float32"]


def ulp(form: Format, value: Fraction) -> Fraction:
    """Spacing of the format at `value`; never below the smallest subnormal."""
    if value == 0:
        return form.tiny
    value = abs(value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    return max(Fraction(2) ** exponent * form.eps, form.tiny)


class Error(NamedTuple):
    """The error of one element: as a share of its bound, and in the units that the bound counts.

    The unit is eps * sum of |terms| for a sum, an ulp of the result otherwise.
    """

    share: float
    units: float


def _error(got: float, exact: Fraction, form: Format, allowed: Fraction, unit: Fraction) -> Error:
    """`allowed` lacks half an ulp of the storage type, which the last rounding adds."""
    error = abs(Fraction(got) - exact)
    bound = allowed + ulp(form, abs(exact) + allowed) / 2
    return Error(float(error / bound), float(error / unit) if unit else 0.0)


def _wide(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float64)  # exact


# ---- modulation


def affine_errors(
    name: str, x: np.ndarray, s: np.ndarray, t: np.ndarray | None, plus: bool
) -> Iterator[Error]:
    """Of ``x * factor + t``, through the operator that computes it."""
    form, compute = FORMATS[name], compute_format(name)
    if t is None:
        got = cupyops.modulate_backward(x, grad_output=x, scale=s, one_plus_scale=plus).grad_input
    else:
        got = cupyops.modulate(x, scale=s, shift=t, one_plus_scale=plus)
    arrays = (x, s, got) if t is None else (x, s, got, t)
    u = compute.eps / 2
    for values in zip(*(_wide(a).ravel().tolist() for a in arrays), strict=True):
        product = Fraction(values[0]) * (Fraction(values[1]) + (1 if plus else 0))
        exact = product + (Fraction(values[3]) if t is not None else 0)
        allowed = (2 if plus else 1) * u * abs(product) + compute.tiny / 2
        allowed += u * abs(exact) if t is not None else 0
        allowed *= 1 + 2 * u
        yield _error(values[2], exact, form, allowed, ulp(form, exact))


def sum_errors(
    name: str, got: np.ndarray, factors: tuple[np.ndarray, ...], constant: int
) -> Iterator[Error]:
    """Of sums along axis 0 of a product (or of one array), all of shape (terms, sums)."""
    form, compute = FORMATS[name], compute_format(name)
    wide = [_wide(f) for f in factors]
    underflow = len(wide[0]) * compute.tiny / 2 if len(wide) > 1 else Fraction(0)
    for column, result in enumerate(_wide(got).ravel().tolist()):
        lists = [f[:, column].tolist() for f in wide]
        exact, size = _exact_sum(lists, name == "float64")
        unit = compute.eps * size
        yield _error(result, exact, form, constant * unit + underflow, unit)


def _exact_sum(factors: list[list[float]], wide: bool) -> tuple[Fraction, Fraction]:
    """The sum of the products, and of their magnitudes (the latter may be rounded)."""
    if len(factors) > 1 and wide:
        scale = 1 << 1074  # times it, every float64 is an integer
        integers = [[_times(v, scale) for v in values] for values in factors]
        terms = [a * b for a, b in zip(*integers, strict=True)]
        return Fraction(sum(terms), scale**2), Fraction(sum(map(abs, terms)), scale**2)
    # Products of two narrower numbers are exact in float64, and fsum rounds once at the end; the
    # second fsum finds what that rounding dropped.
    terms = [math.prod(pair) for pair in zip(*factors, strict=True)]
    total = math.fsum(terms)
    exact = Fraction(total) + Fraction(math.fsum([*terms, -total]))
    return exact, Fraction(math.fsum(map(abs, terms)))


def _times(value: float, scale: int) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * (scale // denominator)


def _sum_constant(name: str, rows: int, samples: int = 1) -> int:
    chunks = samples * -(-rows // CHUNK_ROWS)
    return 16 + chunks if name == "float64" else 16


def _store(values: np.ndarray, name: str) -> np.ndarray:
    return values.astype(FORMATS[name].dtype)


def _normal(rng: np.random.Generator, name: str, *shape: int) -> np.ndarray:
    return _store(rng.standard_normal(shape), name)


def _near_underflow(rng: np.random.Generator, name: str, *shape: int) -> tuple[np.ndarray, ...]:
    """Two arrays whose products lie around the smallest subnormal number of the dtype."""
    tiny = FORMATS[name].tiny
    exponent = 4 - tiny.denominator.bit_length()
    halves = exponent // 2, exponent - exponent // 2
    return tuple(_store(rng.standard_normal(shape) * 2.0**e, name) for e in halves)


def outputs_normal(rng: np.random.Generator, name: str) -> Iterator[Error]:
    x, s, t = (_normal(rng, name, 2, 16, 24) for _ in range(3))
    for plus in (False, True):
        yield from affine_errors(name, x, s, t, plus)


def outputs_cancelling(rng: np.random.Generator, name: str) -> Iterator[Error]:
    x, s = _normal(rng, name, 2, 16, 24), _normal(rng, name, 2, 16, 24)
    for plus in (False, True):
        product = _wide(x) * (_wide(s) + plus)
        yield from affine_errors(name, x, s, (-product).astype(x.dtype), plus)


def outputs_subnormal(rng: np.random.Generator, name: str) -> Iterator[Error]:
    x, s = _near_underflow(rng, name, 2, 16, 24)
    t = (_wide(x) * _wide(s)).astype(x.dtype)
    yield from affine_errors(name, x, s, t, False)


def grad_input_normal(rng: np.random.Generator, name: str) -> Iterator[Error]:
    g, s = _normal(rng, name, 2, 16, 24), _normal(rng, name, 2, 16, 24)
    for plus in (False, True):
        yield from affine_errors(name, g, s, None, plus)


def grad_input_subnormal(rng: np.random.Generator, name: str) -> Iterator[Error]:
    g, s = _near_underflow(rng, name, 2, 16, 24)
    yield from affine_errors(name, g, s, None, False)


def _grad_scale(name: str, x: np.ndarray, g: np.ndarray) -> Iterator[Error]:
    scale = np.ones(x.shape[::2], x.dtype)
    got = cupyops.modulate_backward(x, grad_output=g, scale=scale).grad_scale
    constant = _sum_constant(name, x.shape[1])
    for b in range(len(x)):
        yield from sum_errors(name, got[b], (g[b], x[b]), constant)


def grad_scale_normal(rng: np.random.Generator, name: str) -> Iterator[Error]:
    yield from _grad_scale(name, _normal(rng, name, 2, 1000, 8), _normal(rng, name, 2, 1000, 8))


def grad_scale_cancelling(rng: np.random.Generator, name: str) -> Iterator[Error]:
    x, g = _normal(rng, name, 2, 500, 8), _normal(rng, name, 2, 500, 8)
    order = rng.permutation(1000)
    x, g = np.concatenate([x, x], axis=1), np.concatenate([g, -g], axis=1)
    yield from _grad_scale(name, x[:, order], g[:, order])


def grad_scale_subnormal(rng: np.random.Generator, name: str) -> Iterator[Error]:
    yield from _grad_scale(name, *_near_underflow(rng, name, 2, 200, 8))


def grad_shift_long(rng: np.random.Generator, name: str) -> Iterator[Error]:
    g = (0.2 * rng.random((1, 100_000, 2))).astype(FORMATS[name].dtype)
    shift = np.ones((1, 2), g.dtype)
    got = cupyops.modulate_backward(g, grad_output=g, shift=shift).grad_shift
    yield from sum_errors(name, got, (g[0],), _sum_constant(name, g.shape[1]))


def grad_shift_shared(rng: np.random.Generator, name: str) -> Iterator[Error]:
    g = _normal(rng, name, 20, 200, 4)
    got = cupyops.modulate_backward(g, grad_output=g, shift=g[0, 0]).grad_shift
    yield from sum_errors(name, got, (g.reshape(-1, 4),), _sum_constant(name, 200, samples=20))


# ---- exponential segment sum


def segment_errors(
    rng: np.random.Generator, name: str, x: np.ndarray, entries: int
) -> Iterator[Error]:
    """Of `entries` finite entries (i, j), i > j, of the matrices of ``x`` (n, T)."""
    form, compute = FORMATS[name], compute_format(name)
    length = x.shape[1]
    got = cupyops.exp_segsum(x)
    greatest = _exponents(name)[2]
    for n in range(entries):
        row = n % len(x)
        i = int(rng.integers(1, length))
        j = int(rng.integers(0, i))
        terms = _wide(x[row, j + 1 : i + 1]).tolist()
        total = math.fsum(terms)
        if total > greatest:
            continue
        partial = np.cumsum([0.0, *terms])
        exponent = float(compute.eps) * (len(terms) + 4) * float(np.ptp(partial))
        rest = math.fsum([*terms, -total])
        exact = Fraction(DECIMAL.exp(DECIMAL.add(Decimal(total), Decimal(rest))))
        relative = Fraction(math.expm1(min(exponent, 700.0))) + 4 * form.eps
        bound = max(exact * relative, form.tiny)
        error = abs(Fraction(float(got[row, i, j])) - exact)
        yield Error(float(error / bound), float(error / ulp(form, exact)))


def _exponents(name: str) -> tuple[float, float, float]:
    """Logarithms of the smallest subnormal, of the smallest normal and of the largest number."""
    form = FORMATS[name]
    low = math.log(form.tiny.numerator) - math.log(form.tiny.denominator)
    high = 11.0 if name == "float16" else 88.0 if name != "float64" else 709.0
    return low, low - math.log(form.eps), high


def exponentials(
    rng: np.random.Generator, name: str, *, subnormal: bool = False
) -> Iterator[Error]:
    low, normal, high = _exponents(name)
    values = rng.uniform(low, normal, 300) if subnormal else rng.uniform(normal, high, 1500)
    x = _store(np.stack([np.zeros_like(values), values], axis=1), name)
    yield from segment_errors(rng, name, x, len(x))


def decays(rng: np.random.Generator, name: str, *, length: int) -> Iterator[Error]:
    """Products of `length` factors come down to about exp(-8)."""
    yield from segment_errors(rng, name, _store(-rng.random((2, length)) * 16 / length, name), 300)


def decays_behind_a_large_term(rng: np.random.Generator, name: str) -> Iterator[Error]:
    x = -rng.random((8, 40)) / 4
    x[:, 1] = -2e4
    yield from segment_errors(rng, name, _store(x, name), 400)


def segments_cancelling(rng: np.random.Generator, name: str) -> Iterator[Error]:
    terms = rng.uniform(-30, 30, (8, 40))
    terms[:, 1::2] = -terms[:, ::2] + rng.uniform(-0.1, 0.1, (8, 20))
    yield from segment_errors(rng, name, _store(terms, name), 400)


def _backward(name: str, y: np.ndarray, g: np.ndarray, positions: list[int]) -> Iterator[Error]:
    length = len(y)
    got = cupyops.exp_segsum_backward(y, grad_output=g)
    for k in positions:
        factors = tuple(a[k:, :k].reshape(-1, 1) for a in (g, y))
        yield from sum_errors(name, got[k : k + 1], factors, length + 8)


def segment_gradients(
    rng: np.random.Generator, name: str, *, length: int, step: int = 1
) -> Iterator[Error]:
    y = cupyops.exp_segsum(_store(-rng.random(length) * 4 / length, name))
    yield from _backward(name, y, _normal(rng, name, length, length), list(range(0, length, step)))


def segment_gradients_block(rng: np.random.Generator, name: str) -> Iterator[Error]:
    """Large products in rows and columns below 8, of which the gradients from 8 on hold none."""
    y = cupyops.exp_segsum(_store(-rng.random(64) / 16, name))
    g = _normal(rng, name, 64, 64)
    g[:8, :8] = 1e8 if name != "float16" else 1e3
    yield from _backward(name, y, g, list(range(64)))


def segment_gradients_subnormal(rng: np.random.Generator, name: str) -> Iterator[Error]:
    yield from _backward(name, *_near_underflow(rng, name, 32, 32), list(range(32)))


# ---- the tables

Case = Callable[[np.random.Generator, str], Iterator[Error]]

CASES: dict[str, Case] = {
    "`y`, normal": outputs_normal,
    "`y`, product and shift cancel": outputs_cancelling,
    "`y`, near underflow": outputs_subnormal,
    "`grad_input`, normal": grad_input_normal,
    "`grad_input`, near underflow": grad_input_subnormal,
    "`grad_scale`, L = 1000, normal": grad_scale_normal,
    "`grad_scale`, L = 1000, sum is 0": grad_scale_cancelling,
    "`grad_scale`, L = 200, near underflow": grad_scale_subnormal,
    "`grad_shift`, L = 100 000, one sign": grad_shift_long,
    "`grad_shift`, shared, B = 20, L = 200": grad_shift_shared,
    "`exp_segsum`, one term": exponentials,
    "`exp_segsum`, one term, subnormal result": partial(exponentials, subnormal=True),
    "`exp_segsum`, decay, T = 256": partial(decays, length=256),
    "`exp_segsum`, decay, T = 1000": partial(decays, length=1000),
    "`exp_segsum`, large term elsewhere, T = 40": decays_behind_a_large_term,
    "`exp_segsum`, terms up to 30 cancel, T = 40": segments_cancelling,
    "`exp_segsum_backward`, T = 64": partial(segment_gradients, length=64),
    "`exp_segsum_backward`, T = 256": partial(segment_gradients, length=256, step=51),
    "`exp_segsum_backward`, T = 64, large block": segment_gradients_block,
    "`exp_segsum_backward`, T = 32, near underflow": segment_gradients_subnormal,
}

# Rows of the second table: what the bound allows in its own units, in float32 and in float64.
UNITS = {
    "`grad_scale`, L = 1000, normal": (16, 16 + 16),
    "`grad_scale`, L = 1000, sum is 0": (16, 16 + 16),
    "`grad_shift`, L = 100 000, one sign": (16, 16 + 1563),
    "`grad_shift`, shared, B = 20, L = 200": (16, 16 + 80),
    "`exp_segsum_backward`, T = 64": (72, 72),
    "`exp_segsum_backward`, T = 64, large block": (72, 72),
    "`exp_segsum_backward`, T = 256": (264, 264),
    "`exp_segsum`, one term: ulp": (4, 4),
}

Cells = dict[tuple[str, str], Error]


def measure(seeds: range = SEEDS) -> Cells:
    """Worst share of the bound and worst error in units, for each (case, dtype)."""
    worst: Cells = {}
    for number, (label, case) in enumerate(CASES.items()):
        for name in FORMATS:
            errors = [
                error
                for seed in seeds
                for error in case(np.random.default_rng([seed, number]), name)
            ]
            worst[label, name] = Error(max(e.share for e in errors), max(e.units for e in errors))
    return worst


def _digits(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def tables(cells: Cells) -> str:
    """The two Markdown tables."""
    lines = ["| worst error / bound | " + " | ".join(FORMATS) + " |", "|---|" + "---:|" * 4]
    for label in CASES:
        shares = (_digits(cells[label, name].share) for name in FORMATS)
        lines.append(f"| {label} | " + " | ".join(shares) + " |")
    lines += ["", "| worst $c$ | float32 | bound | float64 | bound |", "|---|" + "---:|" * 4]
    for label, bounds in UNITS.items():
        case = label.removesuffix(": ulp")
        units = (_digits(cells[case, name].units) for name in ("float32", "float64"))
        pairs = (f"{unit} | {bound}" for unit, bound in zip(units, bounds, strict=True))
        lines.append(f"| {label} | " + " | ".join(pairs) + " |")
    return "\n".join(lines)


def write(text: str, page: Path = PAGE) -> None:
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the errors that numerics.md states.")
    parser.add_argument("--write", action="store_true", help="replace the tables in numerics.md")
    parser.add_argument("--quick", action="store_true", help="the first seed only")
    options = parser.parse_args()
    if options.write and options.quick:
        parser.error("the page holds the full measurement: --write goes without --quick")
    text = tables(measure(SEEDS[:1] if options.quick else SEEDS))
    if options.write:
        write(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
