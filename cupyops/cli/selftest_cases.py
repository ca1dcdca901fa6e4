"""What the self test runs: inputs by operator and dtype, and golden results."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from cupyops.cli.reference import FORMATS, Expected, Floats

PARAMETER_FORMS: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "(B, D)": lambda b, length, d: (b, d),
    "(B, 1, D)": lambda b, length, d: (b, 1, d),
    "(D,)": lambda b, length, d: (d,),
    "(1, D)": lambda b, length, d: (1, d),
    "(1, 1, D)": lambda b, length, d: (1, 1, d),
    "(B, L, D)": lambda b, length, d: (b, length, d),
    "(1, L, D)": lambda b, length, d: (1, length, d),
}


class Case(NamedTuple):
    label: str
    arrays: dict[str, Floats]
    """The inputs by name, the positional one first."""
    options: dict[str, bool]
    golden: tuple[Floats, ...] | None = None
    """Exact results worked out by hand, instead of the reference."""

    def exact(self) -> list[Expected] | None:
        if self.golden is None:
            return None
        wide = [values.astype(np.float64) for values in self.golden]
        storage = next(iter(self.arrays.values())).dtype.name
        return [Expected(values, np.zeros(values.shape), storage) for values in wide]


def cases(operator: str, dtype: str) -> Iterator[Case]:
    if operator.startswith("modulate"):
        return _modulation(operator, dtype)
    return _sums(dtype) if operator == "exp_segsum" else _sums_backward(dtype)


class _Values:
    """Random inputs of one dtype; the same ones in every run."""

    def __init__(self, label: str, dtype: str) -> None:
        self._random = np.random.default_rng(zlib.crc32(f"{label} {dtype}".encode()))
        self.dtype = dtype

    def normal(self, shape: tuple[int, ...], dtype: str | None = None) -> Floats:
        return stored(self._random.standard_normal(shape), dtype or self.dtype)

    def sprinkled(self, values: Floats, extremes: list[float], share: float = 0.1) -> Floats:
        """A copy in which a share of the elements is replaced."""
        chosen = self._random.choice(stored(extremes, values.dtype.name), values.shape)
        return np.where(self._random.random(values.shape) < share, chosen, values)


def stored(values: object, dtype: str) -> Floats:
    return np.asarray(values, np.float64).astype(FORMATS[dtype].dtype)


def reversed_view(values: Floats) -> Floats:
    """The same values, from the last to the first in memory and with gaps between them."""
    base = np.zeros((*values.shape, 2), values.dtype)
    flipped = tuple(slice(None, None, -1) for _ in values.shape)
    view: Floats = base[..., 0][flipped]
    view[...] = values
    return view


def every_view_reversed(case: Case, label: str) -> Case:
    arrays = {name: reversed_view(values) for name, values in case.arrays.items()}
    return case._replace(label=label, arrays=arrays)


# -- modulation ---------------------------------------------------------------------------------


def _modulation(operator: str, dtype: str) -> Iterator[Case]:
    backward = operator == "modulate_backward"

    def case(
        label: str,
        shape: tuple[int, int, int],
        form: str | None = "(B, D)",
        *,
        plus: bool = True,
        parameter_dtype: str | None = None,
        change: Callable[[_Values, Floats], Floats] = lambda _, values: values,
    ) -> Case:
        values = _Values(label, dtype)
        arrays = {"x": change(values, values.normal(shape))}
        if backward:
            arrays["grad_output"] = change(values, values.normal(shape))
        if form is not None:
            row = PARAMETER_FORMS[form](*shape)
            for name in ("scale", "shift"):
                arrays[name] = change(values, values.normal(row, parameter_dtype))
        return Case(label, arrays, {"one_plus_scale": plus})

    for plus in (False, True):
        # Even and odd, less and more than a chunk of rows; without elements.
        for shape in ((1, 1, 1), (2, 4, 8), (3, 67, 37), (2, 200, 64), (2, 0, 3)):
            yield case(f"{shape}, one_plus_scale={plus}", shape, plus=plus)
    for form in PARAMETER_FORMS:
        yield case(f"scale and shift {form}", (3, 70, 6), form)
    yield case("no scale, no shift", (2, 5, 7), None)
    for absent in ("scale", "shift"):
        full = case(f"no {absent}", (2, 5, 7))
        del full.arrays[absent]
        yield full
    other = "float64" if dtype == "float32" else "float32"
    if dtype != "float64":
        yield case(f"scale and shift in {other}", (2, 70, 9), parameter_dtype=other)
    yield every_view_reversed(case("", (2, 70, 9)), "reversed views with gaps")
    tiny = FORMATS[dtype].tiny
    small = [3 * tiny, -5 * tiny, 7 * tiny]
    yield case(
        "non-finite values",
        (2, 9, 33),
        change=lambda values, array: values.sprinkled(
            array, [np.nan, np.inf, -np.inf, 0.0, -0.0, *small]
        ),
    )
    subnormal = case("subnormal values", (2, 9, 33), plus=False)
    # All of one array, so that sums are subnormal too; the others keep the products from 0.
    name = "grad_output" if backward else "x"
    draw = _Values("subnormal", dtype)
    subnormal.arrays[name] = draw.sprinkled(subnormal.arrays[name], small, 1.0)
    if not backward:
        subnormal.arrays["shift"] = draw.sprinkled(subnormal.arrays["shift"], small, 1.0)
    yield subnormal
    for plus in (False, True):
        yield _modulation_golden(backward, dtype, plus)


def _modulation_golden(backward: bool, dtype: str, plus: bool) -> Case:
    cube = (2, 1, 1)
    arrays = {"x": stored([10, 20], dtype).reshape(cube)}
    if backward:
        arrays["grad_output"] = arrays["x"].copy()
    arrays["scale"] = stored([[20], [30]], dtype)
    arrays["shift"] = stored([[30], [40]], dtype)
    if backward:
        grad_input = stored([210, 620] if plus else [200, 600], dtype)
        sums = stored([[100], [400]], dtype), stored([[10], [20]], dtype)
        golden: tuple[Floats, ...] = (grad_input.reshape(cube), *sums)
    else:
        golden = (stored([240, 660] if plus else [230, 640], dtype).reshape(cube),)
    return Case(f"golden, one_plus_scale={plus}", arrays, {"one_plus_scale": plus}, golden)


# -- exponential segment sum --------------------------------------------------------------------


def _sums(dtype: str) -> Iterator[Case]:
    def case(label: str, values: Floats) -> Case:
        return Case(label, {"x": values}, {})

    for shape in ((1,), (2,), (3, 5), (2, 3, 8), (2, 33), (1, 64), (1, 300), (0,), (0, 4)):
        label = f"decays {shape}"
        yield case(label, -abs(_Values(label, dtype).normal(shape)))
    draw = _Values("signs", dtype)
    signs = case("both signs (2, 50)", draw.normal((2, 50)))
    yield signs
    yield every_view_reversed(signs, "reversed views with gaps")
    resets = draw.sprinkled(draw.normal((3, 21)), [-np.inf], 0.15)
    yield case("resets by -inf", resets)
    wild = draw.sprinkled(draw.normal((4, 21)), [np.nan, np.inf, -np.inf], 0.1)
    yield case("non-finite values", wild)
    # A difference of prefix sums would lose the small terms behind the large one.
    yield case("a large term before small ones", stored([-2e4, -1e-3, -1e-3], dtype))
    yield case("overflow and back", stored([0, 60, 40, -99, 7, -8], dtype))
    lowest = float(np.log(FORMATS[dtype].tiny))
    yield case("subnormal results", stored([0, lowest + 5, 1, -2], dtype))
    ones = stored(np.tri(6), dtype)
    yield Case("golden", {"x": stored(np.zeros(6), dtype)}, {}, (ones,))


def _sums_backward(dtype: str) -> Iterator[Case]:
    def case(
        label: str, shape: tuple[int, ...], extremes: list[float] | None = None, share: float = 0.1
    ) -> Case:
        """NaN on the diagonal and above it, where nothing may be used."""
        draw, arrays = _Values(label, dtype), {}
        square = (*shape, shape[-1])
        for name in ("y", "grad_output"):
            values = draw.normal(square)
            if extremes is not None:
                values = draw.sprinkled(values, extremes, share)
            arrays[name] = _below_diagonal(values)
        return Case(label, arrays, {})

    for shape in ((1,), (2,), (3, 5), (2, 3, 8), (2, 33), (1, 64), (2, 130), (1, 1100)):
        yield case(f"{shape}", shape)
    yield case("no elements (0,)", (0,))
    yield case("no elements (0, 4)", (0, 4))
    yield every_view_reversed(case("", (2, 33)), "reversed views with gaps")
    yield case("non-finite values", (4, 24), [np.nan, np.inf, -np.inf], 0.01)
    tiny = FORMATS[dtype].tiny
    subnormal = case("subnormal values", (2, 20))
    draw, y = _Values("subnormal", dtype), subnormal.arrays["y"]
    subnormal.arrays["y"] = _below_diagonal(draw.sprinkled(y, [3 * tiny, -5 * tiny], 1.0))
    yield subnormal
    yield case("large entries among small ones", (2, 20), [6e4, -6e4], 0.02)
    length = 9
    ones = stored(np.ones((length, length)), dtype)
    k = np.arange(length)
    golden = (stored(k * (length - k), dtype),)
    yield Case("golden", {"y": ones, "grad_output": ones.copy()}, {}, golden)


def _below_diagonal(values: Floats) -> Floats:
    below = np.tri(values.shape[-1], k=-1, dtype=bool)
    return np.where(below, values, values.dtype.type(np.nan))
