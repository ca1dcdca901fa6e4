"""The NumPy arithmetic of ``modulate`` and ``modulate_backward``, in blocks of bounded size.

Gives the same bits as the kernels in ``kernels_cu``: each step is rounded once, and the order of
every sum is the one that `CHUNK_ROWS` and `LANES` define.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cupyops._arrays import Arrays
from cupyops._host import BLOCK_BYTES, Floats, Scratch, blocks, store
from cupyops._modulate_rows import CHUNK_ROWS, LANES, Rows

Block: TypeAlias = tuple[slice, slice, slice]


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
    columns = min(d, budget // CHUNK_ROWS)
    rows = budget // columns
    if length <= rows:
        return _BlockSizes(max(1, rows // length), length, columns)
    return _BlockSizes(1, rows - rows % CHUNK_ROWS, columns)


def _with_rows(parameter: Floats | None) -> Floats | None:
    """A parameter (or its gradient) as a view of rank 3 that broadcasts against x."""
    if parameter is None or parameter.ndim == 3:
        return parameter
    return parameter[None, None, :] if parameter.ndim == 1 else parameter[:, None, :]


def _load_rows(scratch: Scratch, name: str, parameter: Floats, block: Block) -> Floats:
    """The rows of a parameter that belong to `block`, in the compute type."""
    b, rows, d = block
    every = slice(None)
    piece = parameter[
        every if parameter.shape[0] == 1 else b, every if parameter.shape[1] == 1 else rows, d
    ]
    return scratch.load(name, piece)


def _load_factor(scratch: Scratch, scale: Floats, block: Block, one_plus_scale: bool) -> Floats:
    factor = _load_rows(scratch, "factor", scale, block)
    if not one_plus_scale:
        return factor
    return np.add(factor, 1, out=scratch.block("factor", factor.shape), dtype=scratch.dtype)


def modulate_host(
    inputs: Arrays, outs: Arrays, *, dtype: np.dtype[Any], one_plus_scale: bool
) -> None:
    x, scale, shift = inputs[0], _with_rows(inputs[1]), _with_rows(inputs[2])
    out = outs[0]
    if x.size == 0:
        return
    scratch = Scratch(dtype)
    sizes = _block_sizes(x.shape, dtype)
    for d in blocks(x.shape[2], sizes.d):
        for b in blocks(x.shape[0], sizes.b):
            for rows in blocks(x.shape[1], sizes.rows):
                block = (b, rows, d)
                values = scratch.load("values", x[block])
                # Into scratch, not into `out`, which may be the view of a parameter read later.
                result = scratch.block("values", values.shape)
                if scale is not None:
                    factor = _load_factor(scratch, scale, block, one_plus_scale)
                    values = np.multiply(values, factor, out=result)
                if shift is not None:
                    addend = _load_rows(scratch, "shift", shift, block)
                    values = np.add(values, addend, out=result)
                store(values, out[block])


class _Sum(NamedTuple):
    """A gradient that is summed over rows."""

    out: Floats
    """(B, 1, D), or (1, 1, D) for a parameter shared by the batch."""
    of_products: bool
    """Sum grad_output * x, as for scale; else grad_output, as for shift."""

    @property
    def shared(self) -> bool:
        return bool(self.out.shape[0] == 1)


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
    scratch = Scratch(dtype)
    sums: dict[Rows, list[_Sum]] = {rows: [] for rows in Rows}
    for grad, rows, of_products in (
        (_with_rows(grad_scale), scale_rows, True),
        (_with_rows(grad_shift), shift_rows, False),
    ):
        if grad is not None and rows is not None:
            sums[rows].append(_Sum(grad, of_products))

    if positions := sums[Rows.PER_POSITION]:
        # Sums over B are sums over rows of the transposed arrays. They come first: the pass below
        # may write into x or grad_output.
        swapped = [s._replace(out=s.out.swapaxes(0, 1)) for s in positions]
        _sum_rows(x.swapaxes(0, 1), grad_output.swapaxes(0, 1), swapped, scratch)

    def write_per_token(block: Block, grad: Floats) -> None:
        # All values exist before the first is stored: an output may be the view of an input.
        products = None
        if scale_rows is Rows.PER_TOKEN:
            products = _products(scratch, grad, x[block])
        grad_x = grad
        if scale is not None:
            factor = _load_factor(scratch, scale, block, one_plus_scale)
            grad_x = np.multiply(grad, factor, out=scratch.block("grad_input", grad.shape))
        if shift_rows is Rows.PER_TOKEN:
            store(grad, grad_shift[block])
        if products is not None:
            store(products, grad_scale[block])
        store(grad_x, grad_input[block])

    tokens = sums[Rows.PER_SAMPLE] + sums[Rows.SHARED]
    _sum_rows(x, grad_output, tokens, scratch, write_per_token)


def _products(scratch: Scratch, grad: Floats, x: Floats) -> Floats:
    return np.multiply(grad, scratch.load("x", x), out=scratch.block("products", grad.shape))


def _sum_rows(
    x: Floats,
    grad_output: Floats,
    sums: list[_Sum],
    scratch: Scratch,
    visit: Callable[[Block, Floats], None] | None = None,
) -> None:
    """Sum over axis 1 in the order of the numerical contract; call `visit` on each block read."""
    sizes = _block_sizes(x.shape, scratch.dtype)
    for d in blocks(x.shape[2], sizes.d):
        of_batch = [_Total() for _ in sums]
        for b in blocks(x.shape[0], sizes.b):
            of_samples = [_Total() for _ in sums]
            for rows in blocks(x.shape[1], sizes.rows):
                block = (b, rows, d)
                grad = scratch.load_ordered("grad_output", grad_output[block])
                for entry, total in zip(sums, of_samples, strict=True):
                    terms = _products(scratch, grad, x[block]) if entry.of_products else grad
                    total.add(_chunk_sums(terms))
                if visit is not None:
                    visit(block, grad)
            for entry, total, batch_total in zip(sums, of_samples, of_batch, strict=True):
                if entry.shared:
                    batch_total.add(total.value[None])
                else:
                    store(total.value.astype(scratch.dtype, copy=False), entry.out[b, 0, d])
        for entry, total in zip(sums, of_batch, strict=True):
            if entry.shared:
                store(total.value.astype(scratch.dtype, copy=False), entry.out[:, 0, d])


class _Total:
    """A running sum in float64."""

    value: Floats

    def __init__(self) -> None:
        self._empty = True

    def add(self, parts: Floats) -> None:
        """Add parts (samples, n, columns) in increasing n to the value (samples, columns)."""
        if self._empty and parts.shape[1] == 1:
            self.value = parts[:, 0]  # of any type: it loses nothing in float64, or back
        else:
            before = [] if self._empty else [self.value[:, None]]
            terms = np.concatenate([*before, parts], axis=1, dtype=np.float64)
            self.value = _sum_in_order(terms)
        self._empty = False


def _sum_in_order(terms: Floats) -> Floats:
    """Sum over the last axis but one, strictly in increasing index, of a C-ordered array."""
    if terms.shape[-1] > 1:
        # -0.0 is the neutral start: it keeps the sign of a sum of negative zeros.
        total: Floats = np.add.reduce(terms, axis=-2, initial=-0.0)
        return total
    # With a single column the summed axis is the fast one, where reduce sums pairwise.
    running: Floats = np.add.accumulate(terms, axis=-2)
    return running[..., -1, :]


def _chunk_sums(terms: Floats) -> Floats:
    """(samples, rows, columns) -> (samples, chunks, columns), in the compute type."""
    samples, rows, columns = terms.shape
    whole = rows // CHUNK_ROWS
    body, rest = terms[:, : whole * CHUNK_ROWS], terms[:, whole * CHUNK_ROWS :]
    sums = []
    if whole:
        chunks = body.reshape((samples, whole, CHUNK_ROWS, columns), copy=False)
        sums.append(_chunk_sum(chunks))
    if rest.shape[1]:
        sums.append(_chunk_sum(rest)[:, None])
    return sums[0] if len(sums) == 1 else np.concatenate(sums, axis=1)


def _chunk_sum(rows: Floats) -> Floats:
    """Sum the rows (last axis but one) of a chunk through LANES accumulators."""
    *leading, length, columns = rows.shape
    steps = length // LANES
    if steps == 0:
        return _sum_in_order(rows)
    body, rest = rows[..., : steps * LANES, :], rows[..., steps * LANES :, :]
    lanes = _sum_in_order(body.reshape((*leading, steps, LANES * columns), copy=False))
    lanes = lanes.reshape((*leading, LANES, columns))
    if length % LANES:
        lanes[..., : length % LANES, :] += rest
    return _sum_in_order(lanes)
