"""The NumPy arithmetic of ``exp_segsum`` and ``exp_segsum_backward``, in blocks of bounded size.

Both walk the panels of ``_exp_segsum_panels.py`` in many matrices at once, and treat the tiles
of all panels and matrices together, as the fast axis ("lanes"). What exp and sum see lies in
scratch, with the same strides for any number of matrices: NumPy takes another path, with other
bits, on other data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyops._arrays import Arrays
from cupyops._convert import narrow
from cupyops._exp_segsum_panels import Panels, panels_of
from cupyops._host import Floats, Scratch, batches, blocks, store
from cupyops._threads import run_in_threads

THREAD_ELEMENTS = 1 << 17
"""Matrix elements that are worth a thread."""
CACHE_LINE = 64
FEW_POWERS = 256
"""Powers that NumPy's cast may round to float16: it takes 60 ns for each that underflows."""


def _in_blocks(
    arrays: Arrays, dtype: np.dtype[Any], work: Callable[..., None], *, blocks_at_once: int = 1
) -> None:
    """Call ``work(*blocks, panels, scratch)`` on blocks (n, T, ...) of arrays (..., T, ...)."""
    t = arrays[0].shape[-1]
    panels = panels_of(t)
    step = blocks_at_once * panels.matrices
    for group in batches(arrays, min(a.ndim for a in arrays) - 1):

        def part(start: int, stop: int, group: Arrays = group) -> None:
            scratch = Scratch(dtype)
            for block in blocks(stop - start, step):
                n = slice(start + block.start, start + block.stop)
                work(*(a[n] for a in group), panels, scratch)

        run_in_threads(part, len(group[0]), minimum=max(1, THREAD_ELEMENTS // (t * t)))


def _lanes(
    scratch: Scratch,
    name: str,
    rows: tuple[int, ...],
    lanes: tuple[int, int],
    dtype: np.dtype[Any] | None = None,
) -> tuple[Floats, Floats]:
    """A block (*rows, padded lanes) and its view (*rows, *lanes), which leaves the padding out.

    Each row has an odd number of cache lines: rows a power of two apart would share few sets of
    a cache, and columns are copied to and from them.
    """
    count, line = lanes[0] * lanes[1], CACHE_LINE // (dtype or scratch.dtype).itemsize
    block = scratch.block(name, (*rows, (-(-count // line) | 1) * line), dtype)
    block[..., count:] = 0
    return block, block[..., :count].reshape((*rows, *lanes), copy=False)


def exp_segsum_host(inputs: Arrays, outs: Arrays, *, dtype: np.dtype[Any]) -> None:
    x, out = inputs[0], outs[0]
    if out.size:
        # Twice as many matrices, since no scratch has their size.
        _in_blocks((x, out), dtype, _exp_segsum_block, blocks_at_once=2)


def _exp_segsum_block(x: Floats, out: Floats, panels: Panels, scratch: Scratch) -> None:
    """(n, T) -> (n, T, T), downward from the first panel."""
    n, t = x.shape
    _, width, count, _, _ = panels
    terms = scratch.block("terms", (n, count, width))
    flat_terms = terms.reshape(n, -1)
    flat_terms[:, :t] = x
    flat_terms[:, t:] = 0  # numbers that cost nothing; their results are left out
    padded_steps, steps = _lanes(scratch, "steps", (width,), (count, n))
    steps[...] = terms.transpose(2, 1, 0)
    padded_tiles, tiles = _lanes(scratch, "tiles", (width, width), (count, n))
    _sum_segments(padded_steps, padded_tiles)
    if count > 1:
        # to_rows[i]: the terms from the corner of its panel to row i
        # from_columns[j]: the terms after column j up to the corner of the panel that is next
        to_rows = scratch.block("to_rows", (n, count, width))
        to_rows[..., 0] = steps[0].T
        to_rows[..., 1:] = np.add(tiles[1:, 0], steps[0]).transpose(2, 1, 0)
        from_columns = terms  # no longer needed
        from_columns[...] = tiles[-1].transpose(2, 1, 0)
        to_rows, from_columns = to_rows.reshape(n, -1), flat_terms
        out[...] = 0  # all at once costs less than in pieces what is above the diagonal
    for i in range(1, width):
        row = padded_tiles[i, :i]
        np.exp(row, out=row)
    tiles.reshape((width * width, count, n), copy=False)[:: width + 1] = 1
    if out.dtype != tiles.dtype:
        _, rounded = _lanes(scratch, "rounded", (width, width), (count, n), out.dtype)
        _store_powers(tiles, rounded)
        tiles = rounded
    for p in range(count):
        rows = panels.rows(p)
        start, height = rows.start, rows.stop - rows.start
        out[:, rows, rows] = tiles[:height, :height, p].transpose(2, 0, 1)
        if p:
            powers = scratch.block("powers", (n, height, start))
            np.add(to_rows[:, rows, None], from_columns[:, None, :start], out=powers)
            np.exp(powers, out=powers)
            _store_powers(powers, out[:, rows, :start])
            passed = from_columns[:, :start]
            np.add(passed, to_rows[:, rows.stop - 1, None], out=passed)


def _sum_segments(steps: Floats, sums: Floats) -> None:
    """(width, ...) -> (width, width, ...): the segment sums below the diagonal, else 0."""
    sums[...] = 0
    for i in range(1, len(steps)):
        np.add(sums[i - 1, :i], steps[i], out=sums[i, :i])


def _store_powers(powers: Floats, out: Floats) -> None:
    if powers.dtype == out.dtype:
        np.copyto(out, powers)
    else:
        narrow(powers, out, few=FEW_POWERS)


def exp_segsum_backward_host(inputs: Arrays, outs: Arrays, *, dtype: np.dtype[Any]) -> None:
    y, grad_output = inputs
    out = outs[0]
    if out.size:
        _in_blocks((y, grad_output, out), dtype, _exp_segsum_backward_block)


def _exp_segsum_backward_block(
    y: Floats, grad_output: Floats, out: Floats, panels: Panels, scratch: Scratch
) -> None:
    """(n, T, T) -> (n, T), upward from the last panel.

    The rectangle of the gradient at k is cut by the tile of k in four: rows of this panel and of
    later ones, and columns of this tile and of earlier ones. What is outside the tile is summed
    to one more row below it and one more column left of it, and then the tile is summed. All
    these are sums of products that belong to the same gradients, so nothing cancels, and a
    non-finite product reaches its own gradients only.
    """
    n, t = out.shape
    _, width, count, _, _ = panels
    padded_tiles, tiles = _lanes(scratch, "tiles", (width + 1, width + 1), (count, n))
    tiles[:, 0, 0] = 0
    tiles[-1] = 0
    if count > 1:
        # below[j]: the sum of column j over the panels walked
        below = scratch.block("below", (n, count * width))
        below[...] = 0
    for group in panels.groups():
        top, stop = group[0] * width, panels.rows(group[-1]).stop
        products = _products(scratch, y[:, top:stop, :stop], grad_output[:, top:stop, :stop])
        for p in reversed(group):
            rows = panels.rows(p)
            start, height = rows.start, rows.stop - rows.start
            panel = products[:, start - top : rows.stop - top]
            tiles[:height, 1 : height + 1, p] = panel[:, :, rows].transpose(1, 2, 0)
            if height < width:
                tiles[height:-1, :, p] = 0
            if p:
                left, columns = panel[:, :, :start], below[:, :start]
                tiles[:height, 0, p] = np.einsum("nij->ni", left).T
                tiles[-1, 0, p] = np.einsum("nj->n", columns)
                np.add(columns, np.einsum("nij->nj", left), out=columns)
    if count > 1:
        # Of the columns of a tile: nothing was added to them once its panel was reached.
        tiles[-1, 1:] = below.reshape(n, count, width).transpose(2, 1, 0)
    _sum_tiles(padded_tiles)
    grads = scratch.block("grads", (n, count, width))
    grads[...] = tiles[:-1, 0].transpose(2, 1, 0)
    store(grads.reshape(n, -1)[:, :t], out)


def _products(scratch: Scratch, y: Floats, grad_output: Floats) -> Floats:
    upstream = scratch.load("products", grad_output)  # where it needs a copy
    factors = scratch.load("factors", y)
    return np.multiply(upstream, factors, out=scratch.block("products", y.shape))


def _sum_tiles(tiles: Floats) -> None:
    """(width + 1, width + 1, ...), in place: the gradients come to lie in ``tiles[:-1, 0]``.

    The gradient at k is the sum over rows from k on, the row below included, and over the column
    left of the tile and those before k: in the shifted columns, up to k.
    """
    for k in reversed(range(len(tiles) - 1)):
        np.add(tiles[k, : k + 1], tiles[k + 1, : k + 1], out=tiles[k, : k + 1])
    grads = tiles[:-1, 0]
    for j in range(1, len(grads)):
        np.add(grads[j:], tiles[j:-1, j], out=grads[j:])
