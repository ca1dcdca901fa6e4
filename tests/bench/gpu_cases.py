"""The cases of gpu.py: shapes, least bytes, and checks against formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cupyops
from cupyops.cli import cases

OPERATORS = ("modulate", "modulate_backward", "exp_segsum", "exp_segsum_backward")
DTYPES = {
    "float16": (np.dtype(np.float16), 2.0**-10, 2.0**-24),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), 2.0**-7, 2.0**-133),
    "float32": (np.dtype(np.float32), 2.0**-23, 2.0**-149),
    "float64": (np.dtype(np.float64), 2.0**-52, 2.0**-1074),
}
"""dtype, distance from 1 to the next number, smallest subnormal."""
TIMED = ("float32", "bfloat16", "float16")
# Those of the CPU, and larger ones for the bandwidth of a GPU.
MODULATION = [*cases.MODULATION, (32, 4096, 1152)]
SEGMENTS = [*cases.SEGMENTS, (1024, 512), (8192, 128)]


class Case(NamedTuple):
    operator: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_modulation(self) -> bool:
        return self.operator.startswith("modulate")

    @property
    def elements(self) -> int:
        """Of x, or of the matrices."""
        size = math.prod(self.shape)
        return size if self.is_modulation else size * self.shape[1]

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPES[self.dtype][0].itemsize

    @property
    def least_bytes(self) -> int:
        """Read and written at the least; vectors of size B x D and T are not counted."""
        if self.operator == "exp_segsum_backward":
            t = self.shape[1]
            return 2 * self.nbytes * (t - 1) // (2 * t)
        return {"modulate": 2, "modulate_backward": 3, "exp_segsum": 1}[self.operator] * self.nbytes

    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The first is positional."""
        if self.is_modulation:
            row = (self.shape[0], self.shape[2])
            grad = {"grad_output": self.shape} if self.operator == "modulate_backward" else {}
            return {"x": self.shape, **grad, "scale": row, "shift": row}
        square = (*self.shape, self.shape[1])
        if self.operator == "exp_segsum":
            return {"x": self.shape}
        return {"y": square, "grad_output": square}

    def options(self) -> dict[str, bool]:
        return {"one_plus_scale": True} if self.is_modulation else {}

    def draw(self, shape: tuple[int, ...], seed: int) -> np.ndarray:
        """Values for an input: normal, or log decays for the exponential."""
        values = np.random.default_rng(seed).standard_normal(shape, np.float32)
        if self.operator == "exp_segsum":
            values = -0.1 * np.abs(values)
        return values.astype(DTYPES[self.dtype][0])


# -- correctness --------------------------------------------------------------------------------


def reference(case: Case, arrays: dict[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Float64 results, each with the error allowed to it before it is stored."""
    wide = {name: values.astype(np.float64) for name, values in arrays.items()}
    unit = DTYPES["float64"][1] if case.dtype == "float64" else DTYPES["float32"][1]
    if case.is_modulation:
        factor, shift = 1 + wide["scale"][:, None], wide["shift"][:, None]
        if case.operator == "modulate":
            product = wide["x"] * factor
            return [(product + shift, 4 * unit * (np.abs(product) + np.abs(shift)))]
        grad, x = wide["grad_output"], wide["x"]
        grad_input, terms = grad * factor, grad * x
        return [
            (grad_input, 4 * unit * np.abs(grad_input)),
            (terms.sum(1), 32 * unit * np.abs(terms).sum(1)),
            (grad.sum(1), 32 * unit * np.abs(grad).sum(1)),
        ]
    t = case.shape[1]
    if case.operator == "exp_segsum":
        sums = np.full((*case.shape, t), -np.inf)
        for i in range(t):
            sums[:, i, :i] = sums[:, i - 1, :i] + wide["x"][:, i, None]
            sums[:, i, i] = 0
        value = np.exp(sums)
        longest = np.where(np.isfinite(sums), np.abs(sums), 0)  # all x have one sign
        return [(value, value * np.expm1((t + 4) * unit * longest + 8 * unit))]
    product = np.tril(wide["grad_output"] * wide["y"], -1)
    return [(rectangles(product), 2 * (t + 8) * unit * rectangles(np.abs(product)))]


def rectangles(m: np.ndarray) -> np.ndarray:
    """For each k the sum of m[i, j] over i >= k, j < k."""
    below = np.cumsum(m[:, ::-1], axis=1)[:, ::-1]
    return np.tril(below, -1).sum(-1)


def check(case: Case, send: Callable[[np.ndarray], Any], fetch: Callable[[Any], Any]) -> str | None:
    """What is wrong with the operator on this case; None if nothing is."""
    shapes = case.inputs()
    arrays = {name: case.draw(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    sent = {name: send(values) for name, values in arrays.items()}
    first = sent.pop(next(iter(sent)))
    result = getattr(cupyops, case.operator)(first, **sent, **case.options())
    parts = result if isinstance(result, tuple) else (result,)
    _, eps, tiny = DTYPES[case.dtype]
    for got, (want, allowed) in zip(map(fetch, parts), reference(case, arrays), strict=True):
        if got.shape != want.shape or got.dtype != DTYPES[case.dtype][0]:
            return f"a result is {got.dtype}{list(got.shape)}"
        stored = eps / 2 * (np.abs(want) + allowed) + tiny
        wrong = ~(np.abs(got.astype(np.float64) - want) <= allowed + stored)
        if wrong.any():
            index = tuple(int(axis[0]) for axis in np.nonzero(wrong))
            found = f"{wrong.sum()} of {wrong.size} wrong, the first at {index}"
            return f"{found}: {got[index]}, not {want[index]:.9g}"
    return None


def check_all(send: Callable[[np.ndarray], Any], fetch: Callable[[Any], Any]) -> dict[str, Any]:
    """Results of the checks by operator; shapes with and without vectors, chunks and strips."""
    shapes = {True: [(2, 200, 64), (3, 67, 37)], False: [(3, 64), (2, 257), (1, 1100)]}
    found: dict[str, Any] = {}
    for operator in OPERATORS:
        found[operator] = {}
        for dtype in DTYPES:
            for shape in shapes[operator.startswith("modulate")]:
                try:
                    fault = check(Case(operator, dtype, shape), send, fetch)
                except Exception as error:
                    fault = f"{type(error).__name__}: {error}"
                if fault:
                    fault = f"{shape}: {fault}"
                    break
            found[operator][dtype] = fault or "ok"
    return found
