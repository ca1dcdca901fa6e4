"""What the tasks of `cupyops._dask` do: functions of chunks, which know nothing of graphs.

A chunk of ``modulate_backward`` gives its part of the sums as one sum for every `CHUNK_ROWS` rows,
in the compute type. That is what the numerical contract adds up in float64, so the parts of all
chunks, added in order, are the sums of the undivided arrays. The operators themselves give them:
a call in which every `CHUNK_ROWS` rows are a sample of their own, with parameters in the compute
type, returns these sums as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cupyops._arrays import Array, contiguous, empty, import_cupy, spec_of
from cupyops._exp_segsum import exp_segsum, exp_segsum_backward
from cupyops._host import Floats, store
from cupyops._modulate import modulate, modulate_backward
from cupyops._modulate_rows import CHUNK_ROWS, Rows
from cupyops._modulate_sums import add_in_order

SUMMED_AXIS = {Rows.PER_TOKEN: None, Rows.PER_SAMPLE: 1, Rows.SHARED: 1, Rows.PER_POSITION: 0}
"""The axis of x along which a chunk has sums over `CHUNK_ROWS` rows. For `Rows.SHARED` the sums of
the samples are added up later."""


class BackwardBlock(NamedTuple):
    """What is the same for all chunks of one call of ``modulate_backward``."""

    one_plus_scale: bool
    compute: np.dtype[Any]
    parameter: np.dtype[Any]
    """The dtype of scale and shift."""
    scale_rows: Rows | None
    shift_rows: Rows | None
    whole: bool
    """Whether every sum runs over rows of one chunk, so that each chunk gives whole gradients."""

    @property
    def stacked(self) -> bool:
        """Whether scale and shift have their sums side by side in one array."""
        if self.scale_rows is None or self.shift_rows is None:
            return False
        axis = SUMMED_AXIS[self.scale_rows]
        return axis is not None and axis == SUMMED_AXIS[self.shift_rows]


def chunk_count(rows: int) -> int:
    """How many sums stand for so many rows."""
    return -(-rows // CHUNK_ROWS)


def modulate_block(
    x: Array, *parameters: Array, present: dict[str, Rows], one_plus_scale: bool
) -> Array:
    """``modulate`` of one chunk; its parameters have the axes of x that are their own."""
    named = {
        name: parameter[None] if rows is Rows.PER_POSITION else parameter
        for (name, rows), parameter in zip(present.items(), parameters, strict=True)
    }
    return modulate(x, **named, one_plus_scale=one_plus_scale)


def modulate_backward_block(
    grad_output: Array, x: Array | None = None, scale: Array | None = None, *, call: BackwardBlock
) -> tuple[Array, Array | None, Array | None]:
    """grad_input of one chunk and, for scale and shift, the gradient or the chunk sums.

    Gradients are there per token and if `call.whole`; (B, D) or (D,) where they are sums.

    Chunk sums are NumPy arrays (samples, chunks, D), or (rows, chunks, D) for sums over B. If both
    parameters have such, along one axis, the first array has those of both, (..., 2 D), and the
    second is None. `x` is there only where it is needed, which is for the gradient of scale.
    """
    x = grad_output if x is None else x
    spec = spec_of(x)
    assert spec is not None
    grad_input = empty(contiguous(spec.shape, spec, spec.dtype))
    scale_rows, shift_rows = call.scale_rows, call.shift_rows
    grad_shift = None
    if call.whole:
        return grad_input, *_gradients(x, grad_output, scale, grad_input, call)
    if scale_rows and shift_rows and SUMMED_AXIS[scale_rows] != SUMMED_AXIS[shift_rows]:
        # This leaves a grad_input without scale; the call below has the last word.
        alone = call._replace(scale_rows=None)
        _, grad_shift = _parameter_grads(grad_output, grad_output, None, grad_input, alone)
        call = call._replace(shift_rows=None)
    grads = _parameter_grads(x, grad_output, scale, grad_input, call)
    return grad_input, grads[0], grads[1] if grad_shift is None else grad_shift


def _parameter_grads(
    x: Array, grad_output: Array, scale: Array | None, grad_input: Array, call: BackwardBlock
) -> tuple[Array | None, Array | None]:
    """The gradients of the parameters, whose sums run along one axis; fills `grad_input`."""
    rows = call.scale_rows or call.shift_rows
    axis = None if rows is None else SUMMED_AXIS[rows]
    if axis is None:
        return _gradients(x, grad_output, scale, grad_input, call)
    arrays = (x, grad_output, grad_input)
    if axis == 0:
        arrays = tuple(array.swapaxes(0, 1) for array in arrays)
    sums = _chunk_sums(arrays, scale, call)
    return (None, sums) if call.scale_rows is None else (sums, None)


def _gradients(
    x: Array, grad_output: Array, scale: Array | None, grad_input: Array, call: BackwardBlock
) -> tuple[Array | None, Array | None]:
    """What the operator makes of the chunk; the same bits as in the undivided array."""
    shift = None
    if call.shift_rows is not None:
        b, _, d = x.shape
        form = {Rows.PER_SAMPLE: (b, d), Rows.SHARED: (d,)}.get(call.shift_rows, x.shape)
        shift = _unread(x, form, call.parameter)
    grads = modulate_backward(
        x,
        grad_output=grad_output,
        scale=scale,
        shift=shift,
        one_plus_scale=call.one_plus_scale,
        out=(grad_input, None, None),
    )
    return grads.grad_scale, grads.grad_shift


def _chunk_sums(arrays: tuple[Array, ...], scale: Array | None, call: BackwardBlock) -> Floats:
    """The sums over every `CHUNK_ROWS` rows of axis 1: (samples, chunks, D), or 2 D for both."""
    like = spec_of(arrays[0])
    assert like is not None
    samples, length, d = like.shape
    if scale is not None:
        scale = np.broadcast_to(scale.astype(call.compute, copy=False), (samples, d))
    columns = 2 * d if call.stacked else d
    sums = empty(contiguous((samples, chunk_count(length), columns), like, call.compute))
    # Where they coincide, only one of them is used.
    of_scale, of_shift = sums[..., :d], sums[..., columns - d :]
    for piece in _pieces(arrays):
        count = (piece.samples.stop - piece.samples.start) * piece.chunks
        token_rows = slice(piece.row, piece.row + piece.chunks * piece.height)
        x, grad_output, grad_input = (
            array[piece.samples, token_rows].reshape(count, piece.height, d) for array in arrays
        )
        first = piece.row // CHUNK_ROWS
        places = (
            None
            if rows is None
            else into[piece.samples, first : first + piece.chunks].reshape(count, d)
            for rows, into in ((call.scale_rows, of_scale), (call.shift_rows, of_shift))
        )
        modulate_backward(
            x,
            grad_output=grad_output,
            scale=None if scale is None else np.repeat(scale[piece.samples], piece.chunks, axis=0),
            shift=None if call.shift_rows is None else _unread(x, (count, d), call.compute),
            one_plus_scale=call.one_plus_scale,
            out=(grad_input, *places),
        )
    return _on_host(sums)


class _Piece(NamedTuple):
    """Rows that one call takes, as samples of `height` rows."""

    samples: slice
    row: int
    chunks: int
    height: int


def _pieces(arrays: tuple[Array, ...]) -> Iterator[_Piece]:
    """Cover all rows with few calls, on views: nothing is copied to be summed."""
    samples, length, _ = arrays[0].shape
    chunks, rest = divmod(length, CHUNK_ROWS)
    if chunks:
        if rest == 0 and all(a.strides[0] == length * a.strides[1] for a in arrays):
            yield _Piece(slice(0, samples), 0, chunks, CHUNK_ROWS)
        elif samples <= chunks:
            for b in range(samples):
                yield _Piece(slice(b, b + 1), 0, chunks, CHUNK_ROWS)
        else:
            for n in range(chunks):
                yield _Piece(slice(0, samples), n * CHUNK_ROWS, 1, CHUNK_ROWS)
    if rest:
        yield _Piece(slice(0, samples), length - rest, 1, rest)


def _unread(like: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Stands for a shift, of which only shape and dtype count."""
    return np.broadcast_to(np.zeros_like(like, dtype=dtype, shape=()), shape)


def _on_host(array: Array) -> Floats:
    spec = spec_of(array)
    assert spec is not None
    values: Floats = array if spec.library == "numpy" else array.get()
    return values


def entry_of(results: Any, place: int) -> Array:
    """One entry of a block's results, which are in lists of one where chunks are whole axes."""
    while isinstance(results, list):
        (results,) = results
    entry: Array = results[place]
    return entry


def join_sums(parts: list[Floats]) -> Floats:
    """The parts (n, m, D) of consecutive chunks as one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def add_sums(total: Floats | None, parts: Floats) -> Floats:
    """Add parts (n, m, D), in order along m, to a total (n, D), in float64.

    What stands alone stays in its type: it is a sum of one chunk, which has nothing to be added to.
    """
    if total is None and parts.shape[1] == 1:
        return parts[:, 0]
    with np.errstate(all="ignore"):
        return add_in_order(total, parts)


def no_sum(shape: tuple[int, ...]) -> Floats:
    """The sum over no rows: +0.0, where a sum that starts with its first term has none."""
    return np.zeros(shape)


def finish_sum(
    total: Floats, *, half: int | None, compute: np.dtype[Any], dtype: np.dtype[Any], library: str
) -> Array:
    """Round a total as the contract has it, and bring it to where the other arrays are.

    `half` picks the columns of scale (0) or shift (1) where a total has both.
    """
    if half is not None:
        total = np.split(total, 2, axis=-1)[half]
    out = np.empty(total.shape, dtype)
    with np.errstate(all="ignore"):
        store(total.astype(compute, copy=False), out)
    return out if library == "numpy" else import_cupy().asarray(out)


def exp_segsum_block(x: Array) -> Array:
    return exp_segsum(x)


def exp_segsum_backward_block(y: list[Array], grad_output: list[Array]) -> Array:
    """Chunks along the last axis come in lists, of one each."""
    return exp_segsum_backward(y[0], grad_output=grad_output[0])
