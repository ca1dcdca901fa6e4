"""The NumPy arithmetic of ``modulate`` and ``modulate_backward``, in blocks of bounded size.

Gives the same bits as the kernels in ``kernels_cu``: each step is rounded once, and the order of
every sum is the one that `CHUNK_ROWS` and `LANES` define. Neither blocks nor threads change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cupyops._arrays import Arrays
from cupyops._host import BLOCK_BYTES, Floats, Scratch, store
from cupyops._modulate_rows import CHUNK_ROWS, LANES, Rows
from cupyops._modulate_sums import Total, add_in_order
from cupyops._threads import run_in_threads

Views: TypeAlias = tuple[Any, ...]
"""Arrays of rank 3, or None. The first is x, an axis of length 1 of the others broadcasts."""

PART_ELEMENTS = 1 << 20
"""Elements that are worth a thread of their own."""
FEW_ELEMENTS = 1 << 16
"""Below so many elements, settings and threads cost more than they save."""
UFUNC_BUFFER = 1024
"""Elements that NumPy buffers where an operand is broadcast, strided or unaligned. With its default
of 8192 the buffers of three operands leave the first-level cache."""


class _BlockSizes(NamedTuple):
    b: int
    rows: int
    d: int


def _block_sizes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> _BlockSizes:
    """Whole samples where they are small, else whole chunks of rows; a piece of D where D is huge.

    Sums run over rows only, so blocks cut along b and d cannot change them, and blocks of whole
    chunks cannot either.
    """
    _, length, d = shape
    budget = BLOCK_BYTES // dtype.itemsize
    # Sums need a few rows of float64 beside the block.
    pieces = -(-d // (budget // max(LANES, min(length, CHUNK_ROWS))))
    columns = -(-d // pieces)
    rows = budget // columns
    if length <= rows:
        return _BlockSizes(rows // length, length, columns)
    return _BlockSizes(1, rows - rows % CHUNK_ROWS, columns)


def _with_rows(parameter: Floats | None) -> Floats | None:
    """A parameter (or its gradient) as a view of rank 3 that broadcasts against x."""
    if parameter is None or parameter.ndim == 3:
        return parameter
    return parameter[None, None, :] if parameter.ndim == 1 else parameter[:, None, :]


def _cut(views: Views, axis: int, start: int, stop: int) -> Views:
    """A piece of all views along one axis."""
    index = (slice(None),) * axis + (slice(start, stop),)
    return tuple(v if v is None or v.shape[axis] == 1 else v[index] for v in views)


def _cuts(views: Views, axis: int, length: int, step: int) -> Iterator[Views]:
    """All pieces along one axis, in order."""
    if length <= step:
        yield views
        return
    for start in range(0, length, step):
        yield _cut(views, axis, start, start + step)


def _in_parts(
    work: Callable[[Views], None], views: Views, shape: tuple[int, ...], axes: Sequence[int]
) -> None:
    """Do the work on all views, cut along one of these axes for two threads if it is large."""
    size = math.prod(shape)
    if size < FEW_ELEMENTS:
        work(views)
        return
    # An axis that can be cut into halves of about one size, the slowest of them.
    axis = next((a for a in axes if shape[a] % 2 == 0 or shape[a] > 16), axes[-1])

    def part(start: int, stop: int) -> None:
        np.setbufsize(UFUNC_BUFFER)  # undone where the error state of this part ends
        work(_cut(views, axis, start, stop))

    count = shape[axis]
    run_in_threads(part, count, minimum=-(-PART_ELEMENTS * count // size))


def _load_factor(scratch: Scratch, scale: Floats, one_plus_scale: bool) -> Floats:
    factor = scratch.load("factor", scale)
    if not one_plus_scale:
        return factor
    return np.add(factor, 1, out=scratch.block("factor", factor.shape), dtype=scratch.dtype)


# ---------------------------------------------------------------------------------------------
# modulate


def modulate_host(
    inputs: Arrays, outs: Arrays, *, dtype: np.dtype[Any], one_plus_scale: bool
) -> None:
    x, scale, shift = inputs[0], _with_rows(inputs[1]), _with_rows(inputs[2])
    out = outs[0]
    if x.size == 0:
        return
    views: Views = (x, scale, shift, out)
    # `out` may be the very view of shift, which is read last.
    in_place = shift is not None and np.may_share_memory(out, shift)
    direct = out.dtype == dtype and not in_place
    work = partial(_modulate_blocks, dtype=dtype, one_plus_scale=one_plus_scale, direct=direct)
    _in_parts(work, views, x.shape, (0, 1, 2))


def _modulate_blocks(
    views: Views, *, dtype: np.dtype[Any], one_plus_scale: bool, direct: bool
) -> None:
    x = views[0]
    scratch = Scratch(dtype)
    b, length, d = x.shape
    sizes = _block_sizes(x.shape, dtype)
    for columns in _cuts(views, 2, d, sizes.d):
        for samples in _cuts(columns, 0, b, sizes.b):
            for block in _cuts(samples, 1, length, sizes.rows):
                _modulate_block(block, scratch, one_plus_scale, direct)


def _modulate_block(block: Views, scratch: Scratch, one_plus_scale: bool, direct: bool) -> None:
    x, scale, shift, out = block
    values = scratch.load("values", x)
    result = out if direct else scratch.block("values", x.shape)
    if scale is not None:
        factor = _load_factor(scratch, scale, one_plus_scale)
        values = np.multiply(values, factor, out=result)
    if shift is not None:
        values = np.add(values, scratch.load("shift", shift), out=result)
    if values is not out:
        store(values, out)


# ---------------------------------------------------------------------------------------------
# modulate_backward


_GRAD_SCALE, _GRAD_SHIFT = 4, 5
"""Places among the views: x, grad_output, scale, grad_input, grad_scale, grad_shift."""


class _Backward(NamedTuple):
    """What is the same for all blocks of one call."""

    dtype: np.dtype[Any]
    one_plus_scale: bool
    scale_rows: Rows | None
    shift_rows: Rows | None
    direct: bool
    """Whether gradients per token can be computed where they are stored."""

    def axes(self) -> tuple[int, ...]:
        """The axes along which nothing is summed, slowest first."""
        kinds = {self.scale_rows, self.shift_rows}
        summed = {0} if kinds & {Rows.PER_POSITION, Rows.SHARED} else set()
        summed |= {1} if kinds & {Rows.PER_SAMPLE, Rows.SHARED} else set()
        return tuple(axis for axis in range(3) if axis not in summed)


def modulate_backward_host(
    inputs: Arrays,
    outs: Arrays,
    *,
    dtype: np.dtype[Any],
    one_plus_scale: bool,
    scale_rows: Rows | None,
    shift_rows: Rows | None,
) -> None:
    x, grad_output, scale = inputs[0], inputs[1], _with_rows(inputs[2])
    grad_input, grad_scale, grad_shift = outs
    if x.size == 0:
        for out in outs:
            if out is not None:
                out[...] = 0
        return
    per_token = [grad_input]
    per_token += [grad_scale] if scale_rows is Rows.PER_TOKEN else []
    per_token += [grad_shift] if shift_rows is Rows.PER_TOKEN else []
    # Alone, grad_input may replace an input: all else that needs a block of it comes before.
    direct = all(out.dtype == dtype for out in per_token) and (
        len(per_token) == 1
        or not any(
            given is not None and np.may_share_memory(out, given)
            for out in per_token
            for given in inputs[:3]
        )
    )
    call = _Backward(dtype, one_plus_scale, scale_rows, shift_rows, direct)
    views = (x, grad_output, scale, grad_input, _with_rows(grad_scale), _with_rows(grad_shift))
    _in_parts(partial(_backward_part, call=call), views, x.shape, call.axes())


def _backward_part(views: Views, call: _Backward) -> None:
    scratch = Scratch(call.dtype)
    if Rows.PER_POSITION in (call.scale_rows, call.shift_rows):
        # Sums over B are sums over rows of the transposed arrays. They come first: the pass below
        # may write into x or grad_output.
        swapped = tuple(v if v is None else v.swapaxes(0, 1) for v in views)
        _backward_pass(swapped, call, scratch, (Rows.PER_POSITION,), write=False)
    _backward_pass(views, call, scratch, (Rows.PER_SAMPLE, Rows.SHARED), write=True)


def _backward_pass(
    views: Views, call: _Backward, scratch: Scratch, kinds: tuple[Rows, ...], *, write: bool
) -> None:
    """Form the gradients that are sums over axis 1 and, with `write`, those per token."""
    x = views[0]
    b, length, d = x.shape
    sizes = _block_sizes(x.shape, call.dtype)
    rows_of = {_GRAD_SCALE: call.scale_rows, _GRAD_SHIFT: call.shift_rows}
    summed = [place for place, rows in rows_of.items() if rows in kinds]
    for columns in _cuts(views, 2, d, sizes.d):
        of_batch: dict[int, Floats] = {}
        for samples in _cuts(columns, 0, b, sizes.b):
            totals = {
                place: Total(scratch, place, samples[0].shape, sizes.rows) for place in summed
            }
            for block in _cuts(samples, 1, length, sizes.rows):
                _backward_block(block, totals, call, scratch, write)
            for place, total in totals.items():
                value = total.value()
                if rows_of[place] is Rows.SHARED:
                    of_batch[place] = add_in_order(of_batch.get(place), value[None])
                else:
                    store(value.astype(call.dtype, copy=False), samples[place][:, 0])
        for place, value in of_batch.items():
            store(value.astype(call.dtype, copy=False), columns[place][:, 0])


def _backward_block(
    block: Views, totals: dict[int, Total], call: _Backward, scratch: Scratch, write: bool
) -> None:
    x, grad_output, scale, grad_input, grad_scale, grad_shift = block
    grad = (scratch.load_ordered if totals else scratch.load)("grad_output", grad_output)
    products_per_token = write and call.scale_rows is Rows.PER_TOKEN
    if products_per_token or _GRAD_SCALE in totals:
        into = grad_scale if products_per_token and call.direct else None
        factors = scratch.load("products", x)
        into = scratch.block("products", x.shape) if into is None else into
        products = np.multiply(grad, factors, out=into)
    for place, total in totals.items():
        total.add(products if place == _GRAD_SCALE else grad)
    if not write:
        return
    # All values exist before the first is stored, unless no output is the view of an input.
    grad_x = grad
    if scale is not None:
        factor = _load_factor(scratch, scale, call.one_plus_scale)
        into = grad_input if call.direct else scratch.block("grad_input", x.shape)
        grad_x = np.multiply(grad, factor, out=into)
    if call.shift_rows is Rows.PER_TOKEN:
        store(grad, grad_shift)
    if products_per_token and products is not grad_scale:
        store(products, grad_scale)
    if grad_x is not grad_input:
        store(grad_x, grad_input)
