"""The four functions for Dask arrays of NumPy or CuPy chunks: they check, and return lazy arrays.

`cupyops._arrays.LAYERS` leads here. What the tasks do is in ``_dask_blocks.py``. Nothing is
computed while a graph is built, and shapes and dtypes are checked then, by planning the same call
on NumPy arrays of these shapes.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import normalize_chunks
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from cupyops._arrays import Array, ArraySpec, contiguous, spec_of, type_name
from cupyops._checks import check_array, check_same_place, compute_dtype, fail
from cupyops._dask_blocks import (
    SUMMED_AXIS,
    BackwardBlock,
    add_sums,
    chunk_count,
    entry_of,
    exp_segsum_backward_block,
    exp_segsum_block,
    finish_sum,
    join_sums,
    modulate_backward_block,
    modulate_block,
    no_sum,
)
from cupyops._exp_segsum import plan_exp_segsum, plan_exp_segsum_backward
from cupyops._modulate import ModulateGrads, plan_modulate, plan_modulate_backward, rows_of
from cupyops._modulate_rows import CHUNK_ROWS, Rows

SUMMED_AT_ONCE = 4
"""Chunks whose sums are added to a total together, however many chunks there are. A scheduler may
hold the results of as many chunks until the last of them is there."""

_AXES = {Rows.PER_TOKEN: "bld", Rows.PER_SAMPLE: "bd", Rows.SHARED: "d", Rows.PER_POSITION: "ld"}
"""The axes of x along which a parameter has values of its own."""

Chunks = tuple[tuple[int, ...], ...]


def modulate(
    x: Array,
    /,
    *,
    scale: Array | None = None,
    shift: Array | None = None,
    one_plus_scale: bool = False,
    out: None = None,
) -> Array:
    function = "modulate"
    _refuse_out(function, out)
    specs = _checked(function, x=x, scale=scale, shift=shift)
    plan_modulate(
        specs["x"], scale=specs["scale"], shift=specs["shift"], one_plus_scale=one_plus_scale
    )
    x = _chunked(x, _chunks_of(specs["x"], x, scale, shift))
    pairs, present = [x, "bld"], {}
    for name, parameter in (("scale", scale), ("shift", shift)):
        rows = _rows(function, name, specs)
        if rows is not None:
            pairs += [_core(parameter, rows, x.chunks), _AXES[rows]]
            present[name] = rows
    block = partial(modulate_block, present=present, one_plus_scale=one_plus_scale)
    return _blockwise(function, block, "bld", *pairs, meta=x._meta)


def modulate_backward(
    x: Array,
    /,
    *,
    grad_output: Array,
    scale: Array | None = None,
    shift: Array | None = None,
    one_plus_scale: bool = False,
    out: None = None,
) -> ModulateGrads:
    function = "modulate_backward"
    _refuse_out(function, out)
    specs = _checked(function, x=x, grad_output=grad_output, scale=scale, shift=shift)
    plan_modulate_backward(
        specs["x"],
        grad_output=specs["grad_output"],
        scale=specs["scale"],
        shift=specs["shift"],
        one_plus_scale=one_plus_scale,
    )
    chunks = _chunks_of(specs["x"], x, grad_output, scale, shift)
    grad_output = _chunked(grad_output, chunks)
    scale_rows, shift_rows = (_rows(function, name, specs) for name in ("scale", "shift"))
    parameter = specs["scale"] or specs["shift"]
    call = BackwardBlock(
        one_plus_scale,
        compute_dtype(specs["x"], parameter),
        (parameter or specs["x"]).dtype,
        scale_rows,
        shift_rows,
        whole=all(_is_whole(rows, chunks) for rows in (scale_rows, shift_rows)),
    )
    pairs = [grad_output, "bld"]
    if scale_rows is not None:  # else nothing depends on x
        pairs += [_chunked(x, chunks), "bld", _core(scale, scale_rows, chunks), _AXES[scale_rows]]
    block = partial(modulate_backward_block, call=call)
    # One task for each chunk gives all that depends on it.
    blocks = _blockwise(function, block, "bld", *pairs, meta=np.empty((0, 0, 0), object))
    grad_input = _entry(blocks, 0, meta=grad_output._meta)
    grads = _parameter_grads(blocks, specs, call, grad_output._meta)
    return ModulateGrads(grad_input, *grads)


def exp_segsum(x: Array, /, *, out: None = None) -> Array:
    function = "exp_segsum"
    _refuse_out(function, out)
    specs = _checked(function, x=x)
    plan_exp_segsum(specs["x"])
    _check_whole(function, "x", x, 1)
    axes = tuple(range(x.ndim))
    meta = meta_from_array(x._meta, ndim=x.ndim + 1)
    added = {x.ndim: x.shape[-1]}
    return _blockwise(
        function, exp_segsum_block, (*axes, x.ndim), x, axes, new_axes=added, meta=meta
    )


def exp_segsum_backward(y: Array, /, *, grad_output: Array, out: None = None) -> Array:
    function = "exp_segsum_backward"
    _refuse_out(function, out)
    specs = _checked(function, y=y, grad_output=grad_output)
    plan_exp_segsum_backward(specs["y"], grad_output=specs["grad_output"])
    _check_whole(function, "y", y, 2)
    _check_whole(function, "grad_output", grad_output, 2)
    chunks = _chunks_of(specs["y"], y, grad_output)
    y, grad_output = _chunked(y, chunks), _chunked(grad_output, chunks)
    axes = tuple(range(y.ndim))
    pairs = (y, axes, grad_output, axes)
    meta = meta_from_array(y._meta, ndim=y.ndim - 1)
    return _blockwise(function, exp_segsum_backward_block, axes[:-1], *pairs, meta=meta)


# ---------------------------------------------------------------------------------------------
# Checks


def _refuse_out(function: str, out: object) -> None:
    if out is not None:
        fail(TypeError, function, "out", "is given", "None for Dask arrays, which are lazy")


def _checked(function: str, **arrays: Array) -> dict[str, Any]:
    """By name what a plan on NumPy takes for these arrays: a spec; else what it will refuse."""
    specs: dict[str, Any] = {}
    first = None
    for name, array in arrays.items():
        specs[name] = array
        if array is None:
            continue
        spec = _spec(function, name, array)
        if first is None:
            first = name, spec
        check_same_place(function, name, spec, *first)
        specs[name] = contiguous(spec.shape, spec, spec.dtype)._replace(
            library="numpy", device="cpu"
        )
    return specs


def _spec(function: str, name: str, array: Array) -> ArraySpec:
    """Shape, dtype and library of a Dask array or of a plain one. Chunks may be on any device."""
    if not isinstance(array, da.Array):
        return check_array(function, name, array)._replace(device="")
    chunk = spec_of(array._meta)
    if chunk is None:
        kind = type_name(array._meta)
        expected = "chunks of numpy.ndarray or cupy.ndarray"
        fail(TypeError, function, name, f"is a Dask array with chunks of {kind}", expected)
    if any(np.isnan(length) for length in array.shape):
        got = f"has chunks of unknown size (shape {array.shape})"
        expected = f"known sizes: {name}.compute_chunk_sizes()"
        fail(ValueError, function, name, got, expected)
    return chunk._replace(shape=array.shape, device="")


def _check_whole(function: str, name: str, array: Array, count: int) -> None:
    """Refuse chunks that divide the last axes, whose elements depend on each other."""
    if not isinstance(array, da.Array) or max(array.numblocks[-count:]) == 1:
        return
    got = f"is in chunks that divide its last {'axis' if count == 1 else 'two axes'}"
    whole = ", ".join(f"{axis}: -1" for axis in range(-count, 0))
    fail(ValueError, function, name, got, f"one chunk there: {name}.rechunk({{{whole}}})")


def _rows(function: str, name: str, specs: dict[str, Any]) -> Rows | None:
    return rows_of(function, name, specs[name], specs["x"])


# ---------------------------------------------------------------------------------------------
# Chunks


def _chunks_of(spec: ArraySpec, *arrays: Array) -> Chunks:
    """The chunks of the first Dask array of this shape, else some that leave the bits alone."""
    for array in arrays:
        if isinstance(array, da.Array) and array.shape == spec.shape:
            chunks: Chunks = array.chunks
            return chunks
    if spec.size == 0:  # by which "auto" divides
        return tuple((length,) for length in spec.shape)
    chunks = normalize_chunks((-1, "auto", -1), spec.shape, dtype=spec.dtype)
    if len(chunks[1]) > 1:
        rows = max(CHUNK_ROWS, chunks[1][0] // CHUNK_ROWS * CHUNK_ROWS)
        chunks = normalize_chunks((-1, rows, -1), spec.shape)
    return chunks


def _chunked(array: Array, chunks: Chunks) -> Array:
    if not isinstance(array, da.Array):
        return da.from_array(array, chunks=chunks)
    if array.size == 0 and array.chunks != chunks:
        # Without elements, rechunk may leave an array as it is, or forget its library.
        return da.zeros_like(array, chunks=chunks)
    return array.rechunk(chunks)


def _is_whole(rows: Rows | None, chunks: Chunks) -> bool:
    """Whether a chunk has all rows that each sum over L, or over B and L, runs over.

    Never so for sums over B: one row of such a parameter would look like one that all rows share.
    """
    in_b, in_l, _ = map(len, chunks)
    match rows:
        case Rows.PER_SAMPLE:
            return in_l == 1
        case Rows.SHARED:
            return in_b == in_l == 1
        case Rows.PER_POSITION:
            return False
    return True  # there is no sum


def _core(parameter: Array, rows: Rows, chunks: Chunks) -> Array:
    """A parameter without the axes that it broadcasts along, in chunks that match those of x."""
    own = _AXES[rows]
    core = parameter[tuple(slice(None) if axis in own else 0 for axis in _axes_of(parameter))]
    return _chunked(core, tuple(chunks["bld".index(axis)] for axis in own))


def _axes_of(parameter: Array | ArraySpec) -> str:
    return ("d", "bd", "bld")[len(parameter.shape) - 1]


def _with_axes(core: Array, own: str, axes: str) -> Array:
    """The reverse of `_core`: with axes of length 1 for those that are not its own."""
    return core[tuple(slice(None) if axis in own else None for axis in axes)]


# ---------------------------------------------------------------------------------------------
# Graphs


def _blockwise(function: str, block: Any, axes: Any, *pairs: Any, meta: Any, **options: Any) -> Any:
    """One task for each chunk of the result."""
    token = f"cupyops-{function}"
    options |= {"token": token, "meta": meta, "dtype": meta.dtype, "align_arrays": False}
    return da.blockwise(block, axes, *pairs, **options)


def _entry(blocks: Array, place: int, *, meta: Any, axes: str = "bld", **options: Any) -> Any:
    """An array of its own from one entry of each block's results."""
    return _blockwise("entry", entry_of, axes, blocks, "bld", place, None, meta=meta, **options)


def _parameter_grads(
    blocks: Array, specs: dict[str, Any], call: BackwardBlock, like: Array
) -> list[Array | None]:
    """The gradients of scale and shift, from what the blocks have of them; in chunks as `like`."""
    totals: dict[int, Array] = {}
    grads: list[Array | None] = []
    for number, (name, rows) in enumerate((("scale", call.scale_rows), ("shift", call.shift_rows))):
        if rows is None:
            grads.append(None)
            continue
        parameter = specs[name]
        axis = SUMMED_AXIS[rows]
        if axis is None or call.whole:
            own = _AXES[rows]
            meta = meta_from_array(like, ndim=len(own), dtype=parameter.dtype)
            grad = _entry(blocks, 1 + number, meta=meta, axes=own)
            grads.append(_with_axes(grad, own, _axes_of(parameter)))
            continue
        if axis not in totals:
            totals[axis] = _sum_in_order(_chunk_sums(blocks, 1 + number, axis, call))
        half = number if call.stacked else None
        grads.append(_finished(totals[axis], half, rows, parameter, call, like))
    return grads


def _chunk_sums(blocks: Array, place: int, axis: int, call: BackwardBlock) -> Array:
    """(B, chunks, D), or (L, chunks, D) for sums along axis 0."""
    chunks: dict[str, Any] = dict(zip("bld", blocks.chunks, strict=True))
    adjusted = {"bld"[axis]: tuple(map(chunk_count, blocks.chunks[axis]))}
    if call.stacked:
        adjusted["d"] = tuple(2 * width for width in chunks["d"])
    meta = np.empty((0, 0, 0), call.compute)
    axes = "bld" if axis == 1 else "lbd"
    return _entry(blocks, place, meta=meta, axes=axes, adjust_chunks=adjusted)


def _finished(
    totals: Array,
    half: int | None,
    rows: Rows,
    parameter: ArraySpec,
    call: BackwardBlock,
    like: Array,
) -> Array:
    """A gradient from the totals (B, D) or (L, D), which may have those of both parameters."""
    if rows is Rows.SHARED:
        totals = _sum_in_order(totals[None])[0]
    spec = spec_of(like)
    assert spec is not None
    finish = partial(
        finish_sum, half=half, compute=call.compute, dtype=parameter.dtype, library=spec.library
    )
    meta = meta_from_array(like, ndim=totals.ndim, dtype=parameter.dtype)
    widths = totals.chunks[-1] if half is None else tuple(n // 2 for n in totals.chunks[-1])
    own = _AXES[rows]
    grad = _blockwise("finish", finish, own, totals, own, meta=meta, adjust_chunks={"d": widths})
    return _with_axes(grad, own, _axes_of(parameter))


def _sum_in_order(parts: Array) -> Array:
    """The sums (n, D) of parts (n, m, D) along m, in float64 and strictly in order.

    A total passes from task to task and takes up the next few parts in each, so that no task needs
    all of them.
    """
    kept, counts, columns = parts.chunks
    name = f"cupyops-sum-{tokenize(parts)}"
    filled = [j for j, count in enumerate(counts) if count]
    graph: dict[Any, Any] = {}
    for i, k in product(range(len(kept)), range(len(columns))):
        total: Any = None
        for first in range(0, len(filled), SUMMED_AT_ONCE):
            group = filled[first : first + SUMMED_AT_ONCE]
            # Joined by a task of their own: with all parts as its dependencies, Dask's ordering
            # takes a chain of totals for urgent, and leaves what else a chunk has for later.
            joined = (f"{name}-join", first, i, k)
            graph[joined] = (join_sums, [(parts.name, i, j, k) for j in group])
            last = first + SUMMED_AT_ONCE >= len(filled)
            key = (name, i, k) if last else (f"{name}-before", first, i, k)
            graph[key] = (add_sums, total, joined)
            total = key
        if not filled:
            graph[name, i, k] = (partial(no_sum, (kept[i], columns[k])),)
    layers = HighLevelGraph.from_collections(name, graph, dependencies=[parts])
    return da.Array(layers, name, (kept, columns), meta=np.empty((0, 0)))
