"""What the tests of Dask arrays share."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np

import cupyops
from support import (
    forward_part,
    positional,
)


def call(name: str, problem: dict, **options):
    """The arrays of a problem by their names, NumPy arrays or Dask arrays."""
    first, others = positional(forward_part(problem) if name == "modulate" else problem)
    return getattr(cupyops, name)(first, **others, **options)


def computed(result):
    """The NumPy arrays behind lazy ones that say beforehand what they will be."""
    parts = result if isinstance(result, tuple) else (result,)
    got = dask.compute(*parts, scheduler="synchronous")
    for lazy, array in zip(parts, got, strict=True):
        assert (lazy is None) == (array is None)
        if lazy is not None:
            assert isinstance(lazy, da.Array)
            assert lazy.shape == array.shape
            assert lazy.dtype == array.dtype
            assert type(lazy._meta) is np.ndarray
            assert lazy._meta.dtype == array.dtype
            assert lazy._meta.ndim == array.ndim
    return type(result)(*got) if isinstance(result, tuple) else got[0]


def in_chunks(problem: dict, chunks) -> dict:
    """Arrays of the shape of x as Dask arrays; parameters, which are small, as they are."""
    shape = problem["x"].shape
    return {
        key: da.from_array(value, chunks=chunks) if value.shape == shape else value
        for key, value in problem.items()
    }
