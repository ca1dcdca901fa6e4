"""The NumPy arithmetic of ``modulate`` and ``modulate_backward``, in blocks of bounded size.

Gives the same bits as the kernels in ``kernels_cu``: each step is rounded once, and the order of
every sum is the one that `CHUNK_ROWS` and `LANES` define. Neither blocks nor threads change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cupyops._arrays import Arrays
from cupyops._host import BLOCK_BYTES, Floats, Scratch, store
from cupyops._modulate_rows import CHUNK_ROWS, LANES, Rows
from cupyops._modulate_sums import Total, add_in_order, chunk_sum
from cupyops._threads import run_in_threads

Views: TypeAlias = tuple[Any, ...]
"""Arrays of rank 3, or None. The first is x, an axis of length 1 of the others broadcasts."""

PART_ELEMENTS = 1 << 20
"""Elements that are worth a thread of their own."""
FEW_ELEMENTS = 1 << 18
"""Up to so many elements, settings, blocks and threads cost more than they save."""
WHOLE_BYTES = 4 << 20
"""Up to so many bytes, backward sums and products gain more from few calls than from the L2 cache,
provided that nothing but products needs scratch."""
KEPT_SUMS = 1 << 17
"""Sums of samples, in float64, that wait to be added up over the batch."""
STACKED_ELEMENTS = 1 << 14
"""Up to so many elements, a call that sums more at once is worth a copy."""
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


def _cuts(views: Views, axis: int, step: int) -> Iterable[Views]:
    """All pieces along one axis, in order."""
    length = views[0].shape[axis]
    if length <= step:
        return (views,)
    return (_cut(views, axis, start, start + step) for start in range(0, length, step))


def _in_parts(work: Callable[[Views], None], views: Views, axis: int) -> None:
    """Do the work on all views; if they are large, cut along an axis for two threads."""
    x = views[0]
    if x.size <= FEW_ELEMENTS:
        work(views)
        return

    def part(start: int, stop: int) -> None:
        np.setbufsize(UFUNC_BUFFER)  # undone where the error state of this part ends
        work(_cut(views, axis, start, stop))

    count = x.shape[axis]
    run_in_threads(part, count, minimum=-(-PART_ELEMENTS * count // x.size))


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
    views = (x, scale, shift, out)
    # `out` may be the very view of shift, which is read last.
    in_place = shift is not None and shift.size == out.size and np.may_share_memory(out, shift)
    direct = out.dtype == dtype and not in_place
    if x.size <= FEW_ELEMENTS:
        _modulate_block(views, Scratch(dtype), one_plus_scale, direct)
        return
    work = partial(_modulate_blocks, dtype=dtype, one_plus_scale=one_plus_scale, direct=direct)
    _in_parts(work, views, axis=_slowest_axis(x.shape))


def _slowest_axis(shape: tuple[int, ...]) -> int:
    """The first that can be cut into halves of about one size."""
    return next((i for i, n in enumerate(shape) if n % 2 == 0 or n > 16), 2)


def _modulate_blocks(
    views: Views, *, dtype: np.dtype[Any], one_plus_scale: bool, direct: bool
) -> None:
    x = views[0]
    scratch = Scratch(dtype)
    sizes = _block_sizes(x.shape, dtype)
    for columns in _cuts(views, 2, sizes.d):
        for samples in _cuts(columns, 0, sizes.b):
            for block in _cuts(samples, 1, sizes.rows):
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


_GRAD_INPUT, _GRAD_SCALE, _GRAD_SHIFT = 3, 4, 5
"""Places among the views: x, grad_output, scale, grad_input, grad_scale, grad_shift."""


class BackwardCall(NamedTuple):
    """What is the same in all calls of one plan."""

    dtype: np.dtype[Any]
    one_plus_scale: bool
    sums_over_b: dict[int, bool]
    sums_over_l: dict[int, bool]
    """From the place of a gradient to whether it is one sum over the whole batch as well."""
    per_token: tuple[int, ...]
    """Places of the outputs that are not sums."""

    @classmethod
    def of(
        cls,
        dtype: np.dtype[Any],
        one_plus_scale: bool,
        scale_rows: Rows | None,
        shift_rows: Rows | None,
    ) -> BackwardCall:
        rows = {_GRAD_SCALE: scale_rows, _GRAD_SHIFT: shift_rows}
        return cls(
            dtype,
            one_plus_scale,
            sums_over_b={p: False for p, r in rows.items() if r is Rows.PER_POSITION},
            sums_over_l={
                p: r is Rows.SHARED for p, r in rows.items() if r in (Rows.PER_SAMPLE, Rows.SHARED)
            },
            per_token=(_GRAD_INPUT, *(p for p, r in rows.items() if r is Rows.PER_TOKEN)),
        )


def modulate_backward_host(inputs: Arrays, outs: Arrays, *, call: BackwardCall) -> None:
    x, grad_output, scale, _ = inputs
    grad_input, grad_scale, grad_shift = outs
    if x.size == 0:
        for out in outs:
            if out is not None:
                out[...] = 0
        return
    views = (
        *(x, grad_output, _with_rows(scale)),
        *(grad_input, _with_rows(grad_scale), _with_rows(grad_shift)),
    )
    direct = _can_store_directly(views, call)
    if _is_one_chunk(x, call):
        _backward_chunk(views, call=call, direct=direct)
        return
    if call.sums_over_b:
        # Sums over B are sums over rows of the transposed arrays. They come first: the pass below
        # may write into x or grad_output.
        swapped = tuple(v if v is None else v.swapaxes(0, 1) for v in views)
        _in_parts(partial(_backward_pass, sums=call.sums_over_b, call=call), swapped, axis=0)
    last = partial(_backward_pass, sums=call.sums_over_l, call=call, last=True, direct=direct)
    shared = [place for place, whole_batch in call.sums_over_l.items() if whole_batch]
    if shared:
        _sum_batch(last, views, shared, call)
    else:
        _in_parts(last, views, axis=0 if call.sums_over_l else _slowest_axis(x.shape))


def _can_store_directly(views: Views, call: BackwardCall) -> bool:
    """Whether the outputs per token can be computed where they are stored."""
    if views[_GRAD_INPUT].dtype != call.dtype:
        return False
    # Alone, grad_input may replace an input: all else that needs a block of it comes before.
    if len(call.per_token) == 1:
        return True
    outs = [views[place] for place in call.per_token]
    return all(out.dtype == call.dtype for out in outs) and not any(
        given is not None and np.may_share_memory(out, given)
        for out in outs
        for given in views[:_GRAD_INPUT]
    )


def _is_one_chunk(x: Floats, call: BackwardCall) -> bool:
    """Whether there are two sums, each that of one chunk in each sample."""
    b, length, _ = x.shape
    return (
        x.size <= STACKED_ELEMENTS
        and length <= CHUNK_ROWS
        and len(call.sums_over_l) == 2
        and (b == 1 or not any(call.sums_over_l.values()))
    )


def _backward_chunk(views: Views, *, call: BackwardCall, direct: bool) -> None:
    """What `_backward_part` does, with the two sums in one, for arrays where calls cost most."""
    x, grad_output, _, _, grad_scale, grad_shift = views
    scratch = Scratch(call.dtype)
    terms = scratch.block("terms", (2, *x.shape))
    products, grad = terms
    np.copyto(grad, grad_output)
    np.multiply(grad, scratch.load("x", x), out=products)
    sums = chunk_sum(terms)
    _store_block(views, grad, None, call, scratch, direct)
    store(sums[0], grad_scale[:, 0])
    store(sums[1], grad_shift[:, 0])


def _sum_batch(
    work: Callable[[Views], None], views: Views, shared: list[int], call: BackwardCall
) -> None:
    """Do the work, which gives the sums of each sample, and add up those of all samples."""
    for columns in _cuts(views, 2, KEPT_SUMS):
        d = columns[0].shape[2]
        totals: dict[int, Floats] = {}
        for samples in _samples_of(columns):
            for some in _cuts(samples, 0, max(1, KEPT_SUMS // d)):
                sums = {place: np.empty((len(some[0]), 1, d)) for place in shared}
                _in_parts(work, tuple(sums.get(i, view) for i, view in enumerate(some)), axis=0)
                for place, terms in sums.items():
                    totals[place] = add_in_order(totals.get(place), terms.swapaxes(0, 1))
        for place, total in totals.items():
            store(total.astype(call.dtype, copy=False), columns[place][:, 0])


def _samples_of(views: Views) -> tuple[Views, ...]:
    """The samples; one that is alone as a batch of its chunks, which are added in the same way."""
    b, length, d = views[0].shape
    rest = length % CHUNK_ROWS
    whole = length - rest
    if b > 1 or not whole:
        return (views,)
    body = tuple(
        v if v is None or v.shape[1] == 1 else v.reshape((-1, CHUNK_ROWS, d), copy=False)
        for v in _cut(views, 1, 0, whole)
    )
    return (body, _cut(views, 1, whole, length)) if rest else (body,)


def _backward_pass(
    views: Views,
    *,
    sums: dict[int, bool],
    call: BackwardCall,
    direct: bool = False,
    last: bool = False,
) -> None:
    """Form the gradients that are sums over axis 1; in the last pass also those per token."""
    x = views[0]
    scratch = Scratch(call.dtype)
    whole = x.size <= FEW_ELEMENTS or (direct and x.size * call.dtype.itemsize <= WHOLE_BYTES)
    sizes = _BlockSizes(*x.shape) if whole else _block_sizes(x.shape, call.dtype)
    for columns in _cuts(views, 2, sizes.d):
        for samples in _cuts(columns, 0, sizes.b):
            totals = {place: Total() for place in sums}
            for block in _cuts(samples, 1, sizes.rows):
                grad, products = _load_block(block, sums, call, scratch, direct and last)
                for place, total in totals.items():
                    total.add(products if place == _GRAD_SCALE else grad)
                if last:
                    _store_block(block, grad, products, call, scratch, direct)
            for place, total in totals.items():
                value = total.value()
                if not sums[place]:  # else it stays in float64
                    value = value.astype(call.dtype, copy=False)
                store(value, samples[place][:, 0])


def _load_block(
    block: Views, sums: dict[int, bool], call: BackwardCall, scratch: Scratch, direct: bool
) -> tuple[Floats, Any]:
    """grad_output in the compute type and, where they are needed, its products with x."""
    x, grad_output = block[:2]
    grad = (scratch.load_ordered if sums else scratch.load)("grad_output", grad_output)
    per_token = _GRAD_SCALE in call.per_token
    if not per_token and _GRAD_SCALE not in sums:
        return grad, None
    factors = scratch.load("products", x)
    in_place = direct and per_token
    into = block[_GRAD_SCALE] if in_place else scratch.block("products", x.shape)
    return grad, np.multiply(grad, factors, out=into)


def _store_block(
    block: Views,
    grad: Floats,
    products: Any,
    call: BackwardCall,
    scratch: Scratch,
    direct: bool,
) -> None:
    """Store the gradients per token."""
    scale, grad_input, grad_scale, grad_shift = block[2:]
    # All values exist before the first is stored, unless no output is the view of an input.
    grad_x = grad
    if scale is not None:
        factor = _load_factor(scratch, scale, call.one_plus_scale)
        into = grad_input if direct else scratch.block("grad_input", grad.shape)
        grad_x = np.multiply(grad, factor, out=into)
    if _GRAD_SHIFT in call.per_token:
        store(grad, grad_shift)
    if _GRAD_SCALE in call.per_token and products is not grad_scale:
        store(products, grad_scale)
    if grad_x is not grad_input:
        store(grad_x, grad_input)
