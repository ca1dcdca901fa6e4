"""Sums over rows in NumPy, in the one order that the numerical contract has.

Chunks of `CHUNK_ROWS` rows are summed in the compute type through `LANES` accumulators, then chunks
are added in float64. ``np.add.reduce`` adds strictly in order where the summed axis is not the fast
one in memory, and pairwise where it is: rows that come here have columns in unit stride, see
`Scratch.load_ordered`.
"""

from __future__ import annotations

import numpy as np

from cupyops._host import Floats
from cupyops._modulate_rows import CHUNK_ROWS, LANES

KEPT_CHUNKS = 32
"""Chunk sums that wait to be added in float64 with one call, if a block does not bring more."""


class Total:
    """The sums over the rows of some samples, which come in blocks of whole chunks."""

    def __init__(self) -> None:
        self._sum: Floats | None = None
        """In float64, (samples, columns)."""
        self._chunks: list[Floats] = []
        """Not yet added, each (samples, chunks, columns) in the compute type."""
        self._count = 0

    def add(self, rows: Floats) -> None:
        """Add the next rows: (samples, rows, columns), columns in unit stride."""
        sums = _chunk_sums(rows)
        if self._count >= KEPT_CHUNKS:
            self._add_chunks()
        self._chunks.append(sums)
        self._count += sums.shape[1]

    def value(self) -> Floats:
        """(samples, columns), in float64; of a single chunk in the compute type, as exact."""
        if self._count == 1 and self._sum is None:
            return self._chunks[0][:, 0]
        return self._add_chunks()

    def _add_chunks(self) -> Floats:
        self._sum = add_in_order(self._sum, *self._chunks)
        self._chunks.clear()
        self._count = 0
        return self._sum


def add_in_order(total: Floats | None, *terms: Floats) -> Floats:
    """Add terms (samples, n, columns) in increasing n to a total (samples, columns), in float64."""
    before = [] if total is None else [total[:, None]]
    return _sum_in_order(np.concatenate([*before, *terms], axis=1, dtype=np.float64))


def _sum_in_order(terms: Floats) -> Floats:
    """Sum over the last axis but one, strictly in increasing index."""
    if terms.shape[-1] > 1:
        # -0.0 is the neutral start: it keeps the sign of a sum of negative zeros.
        total: Floats = np.add.reduce(terms, axis=-2, initial=-0.0)
        return total
    # With a single column the summed axis is the fast one.
    running: Floats = np.add.accumulate(terms, axis=-2)
    return running[..., -1, :]


def _chunk_sums(terms: Floats) -> Floats:
    """(samples, rows, columns) -> (samples, chunks, columns), in the compute type."""
    samples, length, columns = terms.shape
    if length <= CHUNK_ROWS:
        return chunk_sum(terms)[:, None]
    whole, rest = divmod(length, CHUNK_ROWS)
    body = terms[:, : whole * CHUNK_ROWS] if rest else terms
    sums = chunk_sum(body.reshape((samples, whole, CHUNK_ROWS, columns), copy=False))
    if rest:
        last = chunk_sum(terms[:, whole * CHUNK_ROWS :])
        sums = np.concatenate([sums, last[:, None]], axis=1)
    return sums


def chunk_sum(rows: Floats) -> Floats:
    """Sum the rows (last axis but one) of a chunk through LANES accumulators."""
    *leading, length, columns = rows.shape
    steps, rest = divmod(length, LANES)
    if steps == 0 or length == LANES:
        return _sum_in_order(rows)
    body = rows[..., : steps * LANES, :] if rest else rows
    # Not one axis of 8 D columns, since rows may lie apart; NumPy merges the two where it can.
    lanes: Floats = np.add.reduce(
        body.reshape((*leading, steps, LANES, columns), copy=False), axis=-3, initial=-0.0
    )
    if rest:
        some = lanes[..., :rest, :]
        np.add(some, rows[..., steps * LANES :, :], out=some)
    return _sum_in_order(lanes)
