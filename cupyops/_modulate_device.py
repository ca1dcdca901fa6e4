"""The launches of ``modulate`` and ``modulate_backward``: grids, arguments and workspace.

The kernels in ``modulate.cu`` and ``modulate_backward.cu`` say what each argument means.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyops._arrays import ArraySpec
from cupyops._checks import compute_dtype
from cupyops._launch import (
    MAX_BLOCK_Z,
    NULL,
    THREADS,
    VECTOR_BYTES,
    WARP,
    Argument,
    Kernel,
    Launch,
    Pointer,
    WorkspacePlan,
    c_type,
    ceil_div,
    element_strides,
    grid,
    instance,
    int64s,
    power_of_two,
)
from cupyops._modulate_rows import CHUNK_ROWS, LANES, Rows

TILE_ROWS = 64
"""Rows of a tile of `modulate`, which share the loads of scale and shift."""
ROWS_PER_THREAD = 8
"""Rows of a tile that one thread of `modulate` takes, where there are so many."""
ENOUGH_BLOCKS = 264
"""Blocks that keep a large GPU busy: two for each of 132 multiprocessors."""
LEAST_GROUPS = 8
"""Groups of columns that a block must not fall below: 128 bytes, a line of the cache."""
COMBINED_ROWS = 16
"""Rows of chunk sums that a block loads side by side, where there are so many."""

# Flags and modes, as in the kernels.
HAS_SCALE = 1
ONE_PLUS_SCALE = 2
HAS_SHIFT = 4  # of modulate
WRITE_GRAD_INPUT = 4  # of modulate_backward
NO_SUM, PER_TOKEN, CHUNK_SUMS, FINAL = range(4)


class _View(NamedTuple):
    """An array of a launch as the kernels see it: an address and three strides in elements."""

    name: str
    spec: ArraySpec | None
    strides: tuple[int, int, int]
    """Along sample, row and column; 0 broadcasts."""

    def args(self) -> tuple[Argument, ...]:
        return (NULL if self.spec is None else Pointer(self.name), *int64s(self.strides))

    def alignment(self, group: int) -> int:
        """Bytes that a vector access to `group` elements moves at once; 1 for an absent array."""
        return 1 if self.spec is None else min(VECTOR_BYTES, group * self.spec.dtype.itemsize)

    def fits_vectors(self, group: int) -> bool:
        """Whether every group of columns starts at a multiple of `alignment` if the first does."""
        if self.spec is None:
            return True
        *outer, inner = self.strides
        itemsize = self.spec.dtype.itemsize
        return inner == 1 and all(s * itemsize % self.alignment(group) == 0 for s in outer)


def _view(name: str, spec: ArraySpec | None, swapped: bool = False) -> _View:
    """A view of x, or of a parameter of any accepted rank; `swapped` exchanges B and L."""
    if spec is None:
        return _View(name, None, (0, 0, 0))
    strides = element_strides(spec)
    if len(strides) == 1:
        b, rows, d = (0, 0, *strides)
    elif len(strides) == 2:
        b, rows, d = (strides[0], 0, strides[1])
    else:
        b, rows, d = strides
    return _View(name, spec, (rows, b, d) if swapped else (b, rows, d))


def _launch(
    source: str,
    template: tuple[str, ...],
    in_vectors: tuple[_View, ...],
    columns: int,
    group: int,
    **launch: Any,
) -> Launch:
    """The vector form where shapes and strides allow it, else the scalar form alone."""
    scalar = Launch(kernel=Kernel(source, instance(*template, False)), **launch)
    if columns % group or not all(view.fits_vectors(group) for view in in_vectors):
        return scalar
    aligned = ((v.name, v.alignment(group)) for v in in_vectors if v.spec is not None)
    return scalar.with_vector_form(Kernel(source, instance(*template, True)), aligned)


def _block(groups: int, rows: int, pieces: int) -> tuple[int, int, int]:
    """Threads along column groups, rows and pieces (stretches of rows of one sample).

    No order of sums depends on the first and the last, so they make way for more blocks where
    there are few.
    """
    x, y = min(WARP, power_of_two(groups)), min(LANES, power_of_two(rows))
    z = min(THREADS // (x * y), power_of_two(pieces), MAX_BLOCK_Z)
    while ceil_div(groups, x) * ceil_div(pieces, z) < ENOUGH_BLOCKS and x * y * z > WARP:
        if z > 1:
            z //= 2
        elif x > LEAST_GROUPS:
            x //= 2
        else:
            break
    return x, y, z


def _types(x: ArraySpec, *parameters: ArraySpec | None) -> tuple[str, str]:
    """Names of the storage types of x and of the parameters."""
    given = [p for p in parameters if p is not None]
    return c_type(x.dtype), c_type(given[0].dtype if given else x.dtype)


def modulate_launches(
    x: ArraySpec,
    scale: ArraySpec | None,
    shift: ArraySpec | None,
    out: ArraySpec,
    one_plus_scale: bool,
) -> tuple[Launch, ...]:
    if x.size == 0:
        return ()
    b, length, d = x.shape
    group = VECTOR_BYTES // x.dtype.itemsize
    groups = ceil_div(d, group)
    row_tiles = ceil_div(length, TILE_ROWS)
    block = _block(groups, max(1, min(length, TILE_ROWS) // ROWS_PER_THREAD), b * row_tiles)
    column_tiles = ceil_div(groups, block[0])
    tiles = ceil_div(b * row_tiles, block[2]) * column_tiles
    flags = (
        (HAS_SCALE if scale is not None else 0)
        | (ONE_PLUS_SCALE if one_plus_scale else 0)
        | (HAS_SHIFT if shift is not None else 0)
    )
    arrays = (_view("x", x), _view("scale", scale), _view("shift", shift), _view("out", out))
    return (
        _launch(
            "modulate.cu",
            ("modulate", *_types(x, scale, shift)),
            arrays,
            d,
            group,
            grid=grid(tiles),
            block=block,
            shared_bytes=0,
            args=(
                *(arg for array in arrays for arg in array.args()),
                *int64s((b, length, d, TILE_ROWS, row_tiles, column_tiles, tiles)),
                np.int32(flags),
            ),
        ),
    )


class _Gradient(NamedTuple):
    """The gradient of scale or of shift."""

    name: str
    spec: ArraySpec | None
    rows: Rows | None


def modulate_backward_launches(
    x: ArraySpec,
    grad_output: ArraySpec,
    scale: ArraySpec | None,
    grad_input: ArraySpec,
    grad_scale: tuple[ArraySpec | None, Rows | None],
    grad_shift: tuple[ArraySpec | None, Rows | None],
    one_plus_scale: bool,
) -> tuple[tuple[Launch, ...], int]:
    """The launches, and the bytes of workspace they need."""
    gradients = (_Gradient("grad_scale", *grad_scale), _Gradient("grad_shift", *grad_shift))
    dtype = compute_dtype(x, scale, *(g.spec for g in gradients))
    if x.size == 0:
        return _sums_over_nothing(x, gradients, dtype), 0
    over_b = any(g.rows is Rows.PER_POSITION for g in gradients)
    over_l = any(g.rows in (Rows.PER_SAMPLE, Rows.SHARED) for g in gradients)
    # A pass sums along one axis. The one that writes grad_input, and so may write into x or
    # grad_output, comes last.
    passes = [True, False] if over_b and over_l else [over_b]
    workspace = WorkspacePlan()
    launches: list[Launch] = []
    for swapped in passes:
        launches += _backward_pass(
            x,
            grad_output,
            scale,
            grad_input,
            gradients,
            one_plus_scale,
            dtype,
            swapped=swapped,
            last=swapped == passes[-1],
            workspace=workspace,
        )
    return tuple(launches), workspace.size


def _backward_pass(
    x: ArraySpec,
    grad_output: ArraySpec,
    scale: ArraySpec | None,
    grad_input: ArraySpec,
    gradients: tuple[_Gradient, _Gradient],
    one_plus_scale: bool,
    dtype: np.dtype[Any],
    *,
    swapped: bool,
    last: bool,
    workspace: WorkspacePlan,
) -> list[Launch]:
    """Sum over the rows of each sample (with `swapped`, over samples of each row)."""
    b, length, d = x.shape
    samples, rows = (length, b) if swapped else (b, length)
    chunks = ceil_div(rows, CHUNK_ROWS)

    modes = [_mode(g, swapped, last, samples, chunks) for g in gradients]
    sums: list[Argument | None] = [
        workspace.take(samples * chunks * d * dtype.itemsize) if mode == CHUNK_SUMS else None
        for mode in modes
    ]
    # What a pass does not touch is absent from it.
    grads = [
        _view(g.name, None if mode in (NO_SUM, CHUNK_SUMS) else g.spec, swapped)
        for g, mode in zip(gradients, modes, strict=True)
    ]
    arrays = (
        _view("x", x if modes[0] != NO_SUM else None, swapped),
        _view("grad_output", grad_output, swapped),
        _view("scale", scale if last else None, swapped),
        _view("grad_input", grad_input if last else None, swapped),
        *grads,
    )
    group = VECTOR_BYTES // x.dtype.itemsize
    groups = ceil_div(d, group)
    block = _block(groups, min(rows, CHUNK_ROWS), samples * chunks)
    column_tiles = ceil_div(groups, block[0])
    tiles = ceil_div(samples * chunks, block[2]) * column_tiles
    flags = (
        (HAS_SCALE if scale is not None else 0)
        | (ONE_PLUS_SCALE if one_plus_scale else 0)
        | (WRITE_GRAD_INPUT if last else 0)
    )
    # A sum is stored element by element, in any layout.
    in_vectors = (*arrays[:4], *(g for g, m in zip(grads, modes, strict=True) if m == PER_TOKEN))
    first = _launch(
        "modulate_backward.cu",
        ("modulate_backward_rows", *_types(x, scale, *(g.spec for g in gradients))),
        in_vectors,
        d,
        group,
        grid=grid(tiles),
        block=block,
        shared_bytes=0,
        args=(
            *(arg for array in arrays for arg in array.args()),
            *(NULL if piece is None else piece for piece in sums),
            *int64s((samples, rows, d, chunks, column_tiles, tiles)),
            *(np.int32(value) for value in (flags, *modes)),
        ),
    )
    pending = [(g, piece) for g, piece in zip(gradients, sums, strict=True) if piece is not None]
    return [first, *_combine(pending, swapped, samples, chunks, d, dtype)]


def _mode(gradient: _Gradient, swapped: bool, last: bool, samples: int, chunks: int) -> int:
    """What a pass does for a gradient."""
    match gradient.rows:
        case Rows.PER_TOKEN if last:
            return PER_TOKEN
        case Rows.PER_POSITION if swapped:
            return FINAL if chunks == 1 else CHUNK_SUMS
        case Rows.PER_SAMPLE if not swapped:
            return FINAL if chunks == 1 else CHUNK_SUMS
        case Rows.SHARED if not swapped:
            return FINAL if chunks == samples == 1 else CHUNK_SUMS
    return NO_SUM


def _combine(
    pending: list[tuple[_Gradient, Argument]],
    swapped: bool,
    samples: int,
    chunks: int,
    d: int,
    dtype: np.dtype[Any],
) -> list[Launch]:
    """Add up the chunk sums, of both gradients in one launch; no chunks add up to 0."""
    args: list[Argument] = []
    parameter: ArraySpec | None = None
    lengths, rows = [0], [0]  # chunk sums of a column, and rows of the gradient
    for gradient, sums in pending:
        parameter = gradient.spec
        b, _, column = _view(gradient.name, gradient.spec, swapped).strides
        shared = gradient.rows is Rows.SHARED
        lengths.append(samples * chunks if shared else chunks)
        rows.append(1 if shared else samples)
        args += [sums, Pointer(gradient.name), *int64s((b, column)), np.int32(shared)]
    if parameter is None or max(rows) * d == 0:
        return []
    if len(pending) == 1:
        args += [NULL, NULL, *int64s((0, 0)), np.int32(0)]
    name = instance("modulate_backward_combine", c_type(dtype), c_type(parameter.dtype))
    at_once = min(COMBINED_ROWS, power_of_two(max(lengths)))
    columns = THREADS // at_once
    return [
        Launch(
            kernel=Kernel("modulate_backward.cu", name),
            grid=(grid(max(rows) * ceil_div(d, columns))[0], len(pending), 1),
            block=(columns, at_once, 1),
            shared_bytes=0,
            args=(*args, *int64s((samples, chunks, d))),
        )
    ]


def _sums_over_nothing(
    x: ArraySpec, gradients: tuple[_Gradient, _Gradient], dtype: np.dtype[Any]
) -> tuple[Launch, ...]:
    """Zeros for the gradients that are not empty although x is."""
    launches: list[Launch] = []
    for gradient in gradients:
        if gradient.spec is not None and gradient.spec.size:
            swapped = gradient.rows is Rows.PER_POSITION
            samples = x.shape[1] if swapped else x.shape[0]
            launches += _combine([(gradient, NULL)], swapped, samples, 0, x.shape[2], dtype)
    return tuple(launches)
