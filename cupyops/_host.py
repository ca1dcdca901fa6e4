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

Floats: TypeAlias = NDArray[Any]

BLOCK_BYTES = 1 << 20
"""Bytes of one block in the compute type: a block and its scratch stay in a core's L2 cache."""


class Scratch:
    """Named blocks in the compute type, allocated once in a run and reused block after block."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._buffers: dict[str, Floats] = {}

    def block(self, name: str, shape: tuple[int, ...]) -> Floats:
        """A C-ordered block with undefined contents; the previous one of that name is gone."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, self.dtype)
        return buffer[:size].reshape(shape)

    def load(self, name: str, stored: Floats) -> Floats:
        """`stored` in the compute type, for element-wise use: itself where it has that type."""
        return stored if stored.dtype == self.dtype else self._copy(name, stored)

    def load_ordered(self, name: str, stored: Floats) -> Floats:
        """`stored` in the compute type, C-ordered and aligned, for sums whose order is fixed."""
        flags = stored.flags
        plain = stored.dtype == self.dtype and flags.c_contiguous and flags.aligned
        return stored if plain else self._copy(name, stored)

    def _copy(self, name: str, stored: Floats) -> Floats:
        block = self.block(name, stored.shape)
        np.copyto(block, stored)
        return block


def store(values: Floats, out: Floats) -> None:
    """Round once to the storage type; from float64 to a 16-bit type by way of float32."""
    if values.dtype == np.float64 and out.dtype.itemsize == 2:
        values = values.astype(np.float32)
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
