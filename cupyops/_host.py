"""What the NumPy halves of both families share: blocks, scratch, and storage <-> compute types.

The counterpart of ``kernels_cu/common.cuh``. Everything here works on blocks of bounded size, so
that no temporary grows with the arrays of the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupyops._convert import narrow, widen

Floats: TypeAlias = NDArray[Any]

BLOCK_BYTES = 1 << 20
"""Bytes of one block in the compute type: a block and its scratch stay in a core's L2 cache."""


class Scratch:
    """Named blocks in the compute type, allocated once in a run and reused block after block."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._buffers: dict[str, Floats] = {}

    def block(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None
    ) -> Floats:
        """A C-ordered block with undefined contents; the previous one of that name is gone."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, dtype or self.dtype)
        return buffer[:size].reshape(shape)

    def load(self, name: str, stored: Floats) -> Floats:
        """`stored` in the compute type, for element-wise use: itself where it has that type."""
        return stored if stored.dtype == self.dtype else self._copy(name, stored)

    def load_ordered(self, name: str, stored: Floats) -> Floats:
        """`stored` in the compute type, for sums over its last axis but one in a fixed order.

        NumPy walks memory upward with the smallest stride innermost, so columns have unit stride
        and rows follow each other without overlap.
        """
        row, column = stored.strides[-2:]
        unit = self.dtype.itemsize
        plain = stored.dtype == self.dtype and stored.flags.aligned
        if plain and column == unit and row >= stored.shape[-1] * unit:
            return stored
        return self._copy(name, stored)

    def _copy(self, name: str, stored: Floats) -> Floats:
        block = self.block(name, stored.shape)
        if stored.dtype.itemsize == 2 and self.dtype == np.float32:
            widen(stored, block)
        else:
            np.copyto(block, stored)
        return block


def store(values: Floats, out: Floats) -> None:
    """Round once to the storage type; from float64 to a 16-bit type by way of float32."""
    if out.dtype.itemsize == 2 and values.dtype.itemsize > 2:
        narrow(values.astype(np.float32, copy=False), out)
    else:
        np.copyto(out, values, casting="unsafe")


def blocks(length: int, step: int) -> Iterator[slice]:
    """Consecutive slices of at most `step` that cover ``range(length)``."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def batches(arrays: tuple[Floats, ...], leading: int) -> Iterator[tuple[Floats, ...]]:
    """Groups of views of `arrays` in which their `leading` first axes are flattened to one.

    One group if all strides allow, else one for each index of the shortest leading axis, and so
    on: nothing is copied. The arrays have the same leading shape and at least one element each.
    """
    try:
        group = tuple(a.reshape((-1, *a.shape[leading:]), copy=False) for a in arrays)
    except ValueError:
        shape = arrays[0].shape[:leading]
        axis = shape.index(min(shape))
        for index in range(shape[axis]):
            picked = (slice(None),) * axis + (index,)
            yield from batches(tuple(a[picked] for a in arrays), leading - 1)
    else:
        yield group
