"""Sums over rows in NumPy, in the one order that the numerical contract has.

Chunks of `CHUNK_ROWS` rows are summed in the compute type through `LANES` accumulators, then chunks
are added in float64. ``np.add.reduce`` adds strictly in order where the summed axis is not the fast
one in memory, and pairwise where it is: rows that come here have columns in unit stride (see
`Scratch.load_ordered`), and every result goes into C-ordered scratch.
"""

from __future__ import annotations

import numpy as np

from cupyops._host import Floats, Scratch
from cupyops._modulate_rows import CHUNK_ROWS, LANES

KEPT_CHUNKS = 32
"""Chunk sums that wait to be added in float64 with one call, if a block does not bring more."""


def chunks_of(rows: int) -> int:
    return -(-rows // CHUNK_ROWS)


class Total:
    """The sums over the rows of some samples, which come in blocks of whole chunks."""

    def __init__(
        self, scratch: Scratch, place: object, shape: tuple[int, int, int], block_rows: int
    ) -> None:
        samples, rows, columns = shape
        capacity = min(chunks_of(rows), max(KEPT_CHUNKS, chunks_of(block_rows)))
        self._scratch = scratch
        self._chunks = scratch.block(f"chunks of {place}", (samples, capacity, columns))
        self._used = 0
        self._added: Floats | None = None
        """In float64, (samples, columns)."""

    def add(self, rows: Floats) -> None:
        """Add the next rows: (samples, rows, columns), columns in unit stride."""
        samples, length, columns = rows.shape
        whole, rest = divmod(length, CHUNK_ROWS)
        if self._used + chunks_of(length) > self._chunks.shape[1]:
            self._add_chunks()
        if whole:
            body = rows[:, : whole * CHUNK_ROWS] if rest else rows
            body = body.reshape((samples, whole, CHUNK_ROWS, columns), copy=False)
            self._sum_chunks(body)
        if rest:
            self._sum_chunks(rows[:, None, whole * CHUNK_ROWS :])

    def value(self) -> Floats:
        """(samples, columns), in float64, or of one chunk, which is as exact, as it is."""
        if self._added is None and self._used == 1:
            return self._chunks[:, 0]
        return self._add_chunks()

    def _add_chunks(self) -> Floats:
        chunks = self._chunks[:, : self._used]
        if self._used:
            self._added = add_in_order(self._added, chunks)
            self._used = 0
        assert self._added is not None
        return self._added

    def _sum_chunks(self, rows: Floats) -> None:
        """Sum (samples, chunks, rows of a chunk, columns) over the rows."""
        samples, chunks, length, columns = rows.shape
        sums = self._chunks[:, self._used : self._used + chunks]
        self._used += chunks
        steps, rest = divmod(length, LANES)
        if steps == 0 or length == LANES:
            _sum_in_order(rows, sums)
            return
        lanes = self._scratch.block("lanes", (samples, chunks, LANES, columns))
        body = rows[:, :, : steps * LANES] if rest else rows
        body = body.reshape((samples, chunks, steps, LANES, columns), copy=False)
        if steps == 1:
            np.copyto(lanes, body[:, :, 0])
        else:
            np.add.reduce(body, axis=2, initial=-0.0, out=lanes)
        if rest:
            some = lanes[:, :, :rest]
            np.add(some, rows[:, :, steps * LANES :], out=some)
        _sum_in_order(lanes, sums)


def add_in_order(total: Floats | None, terms: Floats) -> Floats:
    """Add (samples, n, columns) in increasing n to a total (samples, columns), in float64."""
    before = [] if total is None else [total[:, None]]
    doubles = np.concatenate([*before, terms], axis=1, dtype=np.float64)
    result = np.empty((len(terms), terms.shape[2]))
    _sum_in_order(doubles, result)
    return result


def _sum_in_order(terms: Floats, out: Floats) -> None:
    """Sum over the last axis but one, strictly in increasing index."""
    if terms.shape[-1] > 1:
        # -0.0 is the neutral start: it keeps the sign of a sum of negative zeros.
        np.add.reduce(terms, axis=-2, initial=-0.0, out=out)
    else:
        # With a single column the summed axis is the fast one.
        out[...] = np.add.accumulate(terms, axis=-2)[..., -1, :]
