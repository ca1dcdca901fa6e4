"""The launches of ``exp_segsum`` and ``exp_segsum_backward``: grids, arguments and workspace.

The kernels in ``exp_segsum.cu`` and ``exp_segsum_backward.cu`` say what each argument means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

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

KERNEL_AXES = 4
"""Leading axes that a kernel takes; what cannot be merged to so few is launched index by index."""
LEAST_ITEM_ROWS = 32
"""Rows of an item of `exp_segsum`; a 32nd of T where that is more, see `_item_rows`."""
ENOUGH_BLOCKS = 264
"""Blocks that keep a large GPU busy: two for each of 132 multiprocessors."""
BAND_ROWS = 128
"""Rows of a tile of exp_segsum_backward, and the most columns of a strip; part of the order."""
WHOLE_ROWS = 320
"""Rows of the largest matrix that a block takes whole; part of the order."""
MOST_THREADS = 512
"""Threads of a block of exp_segsum_backward, where a matrix has many strips."""
WALKER_ROWS = 16
"""Rows of a walker where a block has threads for so many walkers; part of the order."""


class _Leading(NamedTuple):
    """Leading axes of the arrays of a launch, merged as far as all strides allow."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    """For each array, in elements."""

    def split(self) -> Iterator[tuple[tuple[int, ...], _Leading]]:
        """Element offsets of each array, and the KERNEL_AXES innermost axes."""
        outer = len(self.sizes) - KERNEL_AXES
        if outer <= 0:
            pad = (1,) * -outer, (0,) * -outer
            yield (
                (0,) * len(self.strides),
                _Leading(pad[0] + self.sizes, tuple(pad[1] + steps for steps in self.strides)),
            )
            return
        inner = _Leading(self.sizes[outer:], tuple(steps[outer:] for steps in self.strides))
        for index in itertools.product(*(range(n) for n in self.sizes[:outer])):
            offsets = (
                sum(i * s for i, s in zip(index, steps, strict=False)) for steps in self.strides
            )
            yield tuple(offsets), inner

    @property
    def matrices(self) -> int:
        return math.prod(self.sizes)


def _merge(sizes: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> _Leading:
    merged: list[tuple[int, tuple[int, ...]]] = []
    for axis in reversed(range(len(sizes))):
        size, steps = sizes[axis], tuple(array[axis] for array in strides)
        if size == 1:
            continue
        if merged and steps == tuple(merged[-1][0] * inner for inner in merged[-1][1]):
            merged[-1] = (size * merged[-1][0], merged[-1][1])
        else:
            merged.append((size, steps))
    # Matrices are independent, so the order of the axes is free: the largest go into the kernel.
    merged.sort()
    return _Leading(
        tuple(size for size, _ in merged),
        tuple(tuple(steps[i] for _, steps in merged) for i in range(len(strides))),
    )


class _Array(NamedTuple):
    """An array of a launch, split into leading axes and the axes of one matrix or segment."""

    name: str
    spec: ArraySpec
    core: int

    @property
    def leading(self) -> tuple[int, ...]:
        return element_strides(self.spec)[: len(self.spec.shape) - self.core]

    @property
    def inner(self) -> tuple[int, ...]:
        return element_strides(self.spec)[len(self.spec.shape) - self.core :]

    def args(self, offset: int, strides: tuple[int, ...]) -> tuple[Argument, ...]:
        pointer = Pointer(self.name, offset * self.spec.dtype.itemsize)
        return (pointer, *int64s((*strides, *self.inner)))

    def rows_are_aligned(self) -> bool:
        itemsize = self.spec.dtype.itemsize
        *outer, column = (*self.leading, *self.inner)
        return column == 1 and all(step * itemsize % VECTOR_BYTES == 0 for step in outer)


class _Strips(NamedTuple):
    """How the columns of a matrix are dealt out: `number` strips of `lanes` groups."""

    lanes: int
    number: int
    width: int


def _strips(t: int, itemsize: int, most_lanes: int = WARP) -> _Strips:
    group = VECTOR_BYTES // itemsize
    lanes = min(most_lanes, power_of_two(ceil_div(t, group)))
    return _Strips(lanes, ceil_div(t, lanes * group), lanes * group)


def _launch(
    source: str, template: tuple[str, str], in_vectors: tuple[_Array, ...], **launch: Any
) -> Launch:
    """The vector form where shapes and strides allow it, else the scalar form alone."""
    scalar = Launch(kernel=Kernel(source, instance(*template, False)), **launch)
    spec = in_vectors[0].spec
    if spec.shape[-1] % (VECTOR_BYTES // spec.dtype.itemsize):
        return scalar
    if not all(array.rows_are_aligned() for array in in_vectors):
        return scalar
    aligned = ((array.name, VECTOR_BYTES) for array in in_vectors)
    return scalar.with_vector_form(Kernel(source, instance(*template, True)), aligned)


def _item_rows(t: int) -> int:
    """An item repeats the additions of the rows above its own: few items, for a large T."""
    return max(LEAST_ITEM_ROWS, t // 32)


def exp_segsum_launches(x: ArraySpec, out: ArraySpec) -> tuple[Launch, ...]:
    if out.size == 0:
        return ()
    t = x.shape[-1]
    segments, matrices = _Array("x", x, 1), _Array("out", out, 2)
    strips = _strips(t, x.dtype.itemsize)
    rows = _item_rows(t)
    row_tiles = ceil_div(t, rows)
    template = ("exp_segsum", c_type(x.dtype))
    launches = []
    leading = _merge(x.shape[:-1], (segments.leading, matrices.leading))
    for (x_offset, out_offset), axes in leading.split():
        items = axes.matrices * row_tiles * strips.number
        # Smaller blocks where there are few items, so that more multiprocessors get some; not the
        # smallest, since the items of a block share what they read.
        wanted = max(THREADS // 2 // strips.lanes, items // ENOUGH_BLOCKS)
        in_block = min(THREADS // strips.lanes, power_of_two(wanted))
        launch = _launch(
            "exp_segsum.cu",
            template,
            (matrices,),
            grid=grid(ceil_div(items, in_block)),
            block=(strips.lanes, in_block, 1),
            shared_bytes=0,
            args=(
                *segments.args(x_offset, axes.strides[0]),
                *matrices.args(out_offset, axes.strides[1]),
                *int64s((*axes.sizes[1:], t, rows, row_tiles, strips.number, items)),
            ),
        )
        launches.append(launch)
    return tuple(launches)


class _Walk(NamedTuple):
    """How exp_segsum_backward goes through a matrix: a function of T and the dtype alone."""

    strips: _Strips
    walkers: int
    """Of a strip in a block, one below the other."""
    bands: int
    """0 where a block takes whole matrices."""

    @classmethod
    def of(cls, t: int, itemsize: int) -> _Walk:
        strips = _strips(t, itemsize, min(WARP, BAND_ROWS * itemsize // VECTOR_BYTES))
        if t > WHOLE_ROWS:
            return cls(strips, THREADS // strips.lanes, ceil_div(t, BAND_ROWS))
        threads = THREADS if strips.number <= 2 else MOST_THREADS
        room = threads // (strips.lanes * strips.number)
        room -= room % (WARP // strips.lanes)  # no warp works on two strips
        return cls(strips, min(room, power_of_two(ceil_div(t, WALKER_ROWS))), 0)

    @property
    def tiles(self) -> int:
        """Of a matrix, on and below the diagonal; in the last band some may lie beyond T."""
        return self.bands * (self.bands + 1) // 2 * (BAND_ROWS // self.strips.width)

    def matrices_in_block(self, matrices: int) -> int:
        of_matrix = self.strips.number * self.walkers * self.strips.lanes
        # At least a warp, since its shuffles name all 32 lanes.
        least = WARP // min(WARP, of_matrix)
        most = min(max(1, THREADS // of_matrix), MAX_BLOCK_Z // self.strips.number)
        return max(least, min(most, power_of_two(max(1, matrices // ENOUGH_BLOCKS))))

    def shared_values(self, strips: int, t: int, padded: bool) -> int:
        """Of a block of so many strips: the columns of its walkers, and its rows."""
        columns = strips * self.walkers * self.strips.width
        rows = BAND_ROWS if self.bands else t | 1
        return columns + padded * (columns // 32 * 4) + strips * rows


def exp_segsum_backward_launches(
    y: ArraySpec, grad_output: ArraySpec, out: ArraySpec
) -> tuple[tuple[Launch, ...], int]:
    """The launches, and the bytes of workspace they need."""
    if out.size == 0:
        return (), 0
    t = y.shape[-1]
    ys, grads, outs = (
        _Array("y", y, 2),
        _Array("grad_output", grad_output, 2),
        _Array("out", out, 1),
    )
    itemsize = compute_dtype(y).itemsize
    walk = _Walk.of(t, y.dtype.itemsize)
    strips = walk.strips
    template = ("exp_segsum_backward_rows", c_type(y.dtype))
    workspace = WorkspacePlan()
    sums: tuple[Argument, ...] = ()
    launches = []
    leading = _merge(y.shape[:-2], (ys.leading, grads.leading, outs.leading))
    for offsets, axes in leading.split():
        arrays = zip((ys, grads, outs), offsets, axes.strides, strict=True)
        y_args, grad_args, out_args = (a.args(offset, steps) for a, offset, steps in arrays)
        sizes = axes.sizes[1:]
        if walk.bands:
            blocks, in_block = axes.matrices * walk.tiles, 1
            # Launches follow one another on one stream, so all may use the same pieces.
            sums = sums or tuple(
                workspace.take(axes.matrices * values * itemsize)
                for values in (strips.number * t, walk.bands * t, walk.bands * strips.number)
            )
        else:
            matrices = walk.matrices_in_block(axes.matrices)
            blocks, in_block = ceil_div(axes.matrices, matrices), matrices * strips.number
            sums = (NULL, NULL, NULL)
        padded = y.dtype.itemsize < itemsize
        launch = _launch(
            "exp_segsum_backward.cu",
            template,
            (ys, grads),
            grid=grid(blocks),
            block=(strips.lanes, walk.walkers, in_block),
            shared_bytes=walk.shared_values(in_block, t, padded) * itemsize,
            args=(
                *(*y_args, *grad_args, *out_args, *sums),
                *int64s((*sizes, axes.matrices, t, strips.number)),
                *int64s((walk.bands, walk.tiles, blocks)),
            ),
        )
        launches.append(launch)
        if walk.bands:
            name = instance("exp_segsum_backward_combine", c_type(y.dtype))
            launches.append(
                Launch(
                    kernel=Kernel("exp_segsum_backward.cu", name),
                    grid=grid(axes.matrices * walk.bands),
                    block=(BAND_ROWS, 2, 1),
                    shared_bytes=0,
                    args=(
                        *(*sums, *out_args),
                        *int64s((*sizes, axes.matrices, t)),
                        *int64s((strips.number, walk.bands, strips.width)),
                    ),
                )
            )
    return tuple(launches), workspace.size
