"""The NumPy arithmetic of ``exp_segsum`` and ``exp_segsum_backward``, in blocks of bounded size.

Both walk the rows of many matrices at once. What exp and sum see lies in contiguous scratch,
whatever the number of matrices: NumPy takes another path, with other bits, on other data.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyops._arrays import Arrays
from cupyops._host import BLOCK_BYTES, Floats, Scratch, batches, blocks, store


def _matrices_per_block(t: int, dtype: np.dtype[Any]) -> int:
    return max(1, BLOCK_BYTES // dtype.itemsize // t)


def exp_segsum_host(inputs: Arrays, outs: Arrays, *, dtype: np.dtype[Any]) -> None:
    x, out = inputs[0], outs[0]
    if out.size == 0:
        return
    scratch = Scratch(dtype)
    step = _matrices_per_block(x.shape[-1], dtype)
    for xs, results in batches((x, out), x.ndim - 1):
        for block in blocks(len(xs), step):
            _exp_segsum_rows(xs[block], results[block], scratch)


def _exp_segsum_rows(x: Floats, out: Floats, scratch: Scratch) -> None:
    """(n, T) -> (n, T, T), a row of every matrix at a time."""
    n, t = x.shape
    x = scratch.load("x", x)
    sums = scratch.block("sums", (n, t))
    for i in range(t):
        if i > 0:
            row = sums[:, :i]
            np.add(row, x[:, i, None], out=row)
            powers = scratch.block("powers", row.shape)
            np.copyto(powers, row)
            store(np.exp(powers, out=powers), out[:, i, :i])
        sums[:, i] = 0
        out[:, i, i] = 1
        out[:, i, i + 1 :] = 0


def exp_segsum_backward_host(inputs: Arrays, outs: Arrays, *, dtype: np.dtype[Any]) -> None:
    y, grad_output = inputs
    out = outs[0]
    if out.size == 0:
        return
    scratch = Scratch(dtype)
    step = _matrices_per_block(y.shape[-1], dtype)
    for ys, grads, results in batches((y, grad_output, out), y.ndim - 2):
        for block in blocks(len(ys), step):
            _exp_segsum_backward_rows(ys[block], grads[block], results[block], scratch)


def _exp_segsum_backward_rows(
    y: Floats, grad_output: Floats, out: Floats, scratch: Scratch
) -> None:
    """(n, T, T) -> (n, T), upward from the last row.

    At row k, ``columns[j]`` is the sum of the products at (i, j) over i >= k, for j < k; the
    gradient at k is the sum of these columns.
    """
    n, t = out.shape
    columns = scratch.block("columns", (n, t))
    columns[...] = 0
    grads = scratch.block("grads", (n, t))
    grads[:, 0] = 0
    for k in range(t - 1, 0, -1):
        upstream = scratch.load("grad_output", grad_output[:, k, :k])
        factors = scratch.load("y", y[:, k, :k])
        products = np.multiply(upstream, factors, out=scratch.block("products", (n, k)))
        np.add(columns[:, :k], products, out=columns[:, :k])
        row = scratch.block("row", (n, k))
        np.copyto(row, columns[:, :k])
        np.add.reduce(row, axis=1, out=grads[:, k])
    store(grads, out)
