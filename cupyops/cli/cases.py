"""What is timed: operators, shapes, dtypes, and the bytes that no implementation can avoid."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cupyops.cli.arguments import OPERATORS
from cupyops.cli.reference import FORMATS, Floats

MODULATION: tuple[tuple[int, ...], ...] = (
    (2, 256, 1152),
    (8, 4096, 1152),
    (1, 32760, 1536),
    (32, 8, 1024),
    (48, 10, 20000),
)
"""B, L, D."""
SEGMENTS: tuple[tuple[int, ...], ...] = (
    (512, 128),
    (256, 256),
    (8192, 64),
    (16384, 8),
    (1, 2048),
    (4096, 8),
    (700, 50),
    (300, 257),
)
"""Number of segments, T."""
QUICK = {(2, 256, 1152), (700, 50)}
JUDGED_ELEMENTS = 400_000
"""Of a larger case only a part is compared with float64."""
JUDGED_COLUMNS = 32


class Case(NamedTuple):
    operator: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.operator} {self.shape_text} {self.dtype}"

    @property
    def shape_text(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def is_modulation(self) -> bool:
        return self.operator.startswith("modulate")

    @property
    def elements(self) -> int:
        """Of x, or of the matrices."""
        size = math.prod(self.shape)
        return size if self.is_modulation else size * self.shape[1]

    @property
    def least_bytes(self) -> int:
        """Every input element that is needed is read once, every output element written once."""
        if self.is_modulation:
            row = self.shape[0] * self.shape[2]
            # x, scale, shift; out. And x, grad_output, scale; three gradients.
            count = {"modulate": 2 * self.elements + 2 * row}.get(
                self.operator, 3 * self.elements + 3 * row
            )
        else:
            segments, t = self.shape
            below = segments * t * (t - 1) // 2
            # x; the matrices. And both matrices below the diagonal; a row of gradients.
            count = {"exp_segsum": self.elements}.get(self.operator, 2 * below) + segments * t
        return count * FORMATS[self.dtype].dtype.itemsize

    @property
    def options(self) -> dict[str, bool]:
        return {"one_plus_scale": True} if self.is_modulation else {}

    def inputs(self) -> dict[str, Floats]:
        """Arrays by name, the positional one first: normal values, or log decays."""
        if self.is_modulation:
            row = (self.shape[0], self.shape[2])
            grad = {"grad_output": self.shape} if self.operator == "modulate_backward" else {}
            shapes = {"x": self.shape, **grad, "scale": row, "shift": row}
        elif self.operator == "exp_segsum":
            shapes = {"x": self.shape}
        else:
            square = (*self.shape, self.shape[1])
            shapes = {"y": square, "grad_output": square}
        return {name: self._draw(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}

    def _draw(self, shape: tuple[int, ...], seed: int) -> Floats:
        wide = np.float64 if self.dtype == "float64" else np.float32
        values: Floats = np.random.default_rng(seed).standard_normal(shape, wide)
        if self.operator == "exp_segsum":
            values = -abs(values) / 10
        return values.astype(FORMATS[self.dtype].dtype, copy=False)

    # -- the part that is judged ----------------------------------------------------------------

    @property
    def judged(self) -> str:
        """Which part of the results is compared with float64, in words."""
        batch, columns = self._judged_axes()
        if len(batch) == self.shape[0] and columns is None:
            return "all"
        if columns is None:
            return f"{len(batch)} of {self.shape[0]} segments"
        samples = f"{len(batch)} of {self.shape[0]} samples"
        return f"{samples}, {len(columns)} of {self.shape[2]} columns"

    def part(self, array: Floats) -> Floats:
        """The judged part of an input or of a result."""
        batch, columns = self._judged_axes()
        if len(batch) < self.shape[0]:
            array = array[batch]
        return array if columns is None else array[..., columns]

    def _judged_axes(self) -> tuple[list[int], list[int] | None]:
        """Indices along the first axis, and along D where D is cut; sums need whole rows of L."""
        first = self.shape[0]
        if self.elements <= JUDGED_ELEMENTS:
            return list(range(first)), None
        if self.is_modulation:
            columns = np.linspace(0, self.shape[2] - 1, min(JUDGED_COLUMNS, self.shape[2]))
            return sorted({0, first - 1}), [int(column) for column in columns]
        count = min(first, max(1, JUDGED_ELEMENTS // self.shape[1] ** 2))
        return sorted({int(i) for i in np.linspace(0, first - 1, count)}), None


def select(
    operators: list[str] | None,
    dtypes: list[str] | None,
    shapes: list[tuple[int, ...]] | None,
    *,
    quick: bool = False,
    everything: bool = False,
) -> list[Case]:
    """The cases that the user's choice leaves; by default all shapes in float32."""
    found = []
    for operator in operators or OPERATORS:
        modulation = operator.startswith("modulate")
        if shapes is not None:
            fitting = [shape for shape in shapes if (len(shape) == 3) == modulation]
        else:
            table = MODULATION if modulation else SEGMENTS
            fitting = [shape for shape in table if not quick or shape in QUICK]
        for dtype in dtypes or (FORMATS if everything else ["float32"]):
            found += [Case(operator, shape, dtype) for shape in fitting]
    return list(dict.fromkeys(found))
