"""Graphs of Dask arrays: lazy, checked when built; nothing is gathered, nothing read twice."""

from __future__ import annotations

import subprocess
import sys

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from dask.callbacks import Callback
from dask.core import get_dependencies

import cupyops
from chunked import call, computed
from cupyops._dask import SUMMED_AT_ONCE
from cupyops._modulate_rows import CHUNK_ROWS
from support import (
    LAYOUT_NAMES,
    assert_same_bits,
    assert_same_gradients,
    modulate_layouts,
    modulation_problem,
)

FUNCTIONS = ["modulate", "modulate_backward", "exp_segsum", "exp_segsum_backward"]


def no_scheduler(*arguments, **options):
    raise AssertionError("something was computed")


# ---- lazy arrays


def lazy_call(name: str) -> dict:
    shape, chunks = ((4, 130, 6), (2, 64, 3)) if "modulate" in name else ((4, 9, 9), (2, 9, 9))
    first = "y" if name == "exp_segsum_backward" else "x"
    made = {first: da.ones(shape, dtype=np.float32, chunks=chunks)}
    if "backward" in name:
        made["grad_output"] = da.ones(shape, dtype=np.float32, chunks=chunks)
    if "modulate" in name:
        made["scale"] = da.ones((4, 6), dtype=np.float32)
        made["shift"] = np.ones((1, 130, 6), np.float32)
    return made


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_computed_while_a_graph_is_built(name):
    with dask.config.set(scheduler=no_scheduler):
        result = call(name, lazy_call(name))
    again = call(name, lazy_call(name))
    parts, others = (r if isinstance(r, tuple) else (r,) for r in (result, again))
    assert [part.name for part in parts] == [part.name for part in others]  # for Dask's caches
    assert all(part.chunks for part in parts)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_results_have_the_chunks_of_x(layout):
    x = da.ones((4, 130, 6), dtype=ml_dtypes.bfloat16, chunks=(3, 64, 4))
    of_axis = dict(zip("BLD", x.chunks, strict=True))
    problem = modulation_problem(np.random.default_rng(0), x.shape, "float32", layout, layout)
    lazy = problem | {"x": x, "grad_output": da.ones_like(x, chunks=(4, 130, 1))}
    grads = call("modulate_backward", lazy)
    assert grads.grad_input.chunks == x.chunks
    expected = tuple(of_axis.get(axis, (1,)) for axis in layout.split(","))
    assert grads.grad_scale.chunks == grads.grad_shift.chunks == expected
    assert call("modulate", lazy).chunks == x.chunks
    assert [part.dtype for part in grads] == [x.dtype, np.float32, np.float32]


def test_a_plain_x_beside_a_dask_parameter_is_divided_by_whole_chunks_of_rows():
    rng = np.random.default_rng(3)
    problem = modulation_problem(rng, (2, 500, 4), "float32", "B,D", "B,L,D")
    want = call("modulate_backward", problem)
    lazy = problem | {"scale": da.from_array(problem["scale"], chunks=(1, 3))}
    with dask.config.set({"array.chunk-size": 5000}):
        grads = call("modulate_backward", lazy)
    assert grads.grad_input.chunks == ((2,), (128, 128, 128, 116), (4,))
    assert_same_gradients(computed(grads), want)
    lazy = problem | {"shift": da.from_array(problem["shift"], chunks=(1, 64, 2))}
    grads = call("modulate_backward", lazy)
    assert grads.grad_input.chunks == lazy["shift"].chunks
    assert_same_gradients(computed(grads), want)
    assert_same_bits(computed(call("modulate", lazy)), call("modulate", problem))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_an_empty_plain_x_beside_dask_parameters(shape, layout):
    problem = modulation_problem(np.random.default_rng(0), shape, "float32", layout, layout)
    lazy = problem | {key: da.from_array(problem[key], -1) for key in ("scale", "shift")}
    assert_same_bits(computed(call("modulate", lazy)), call("modulate", problem))
    want = call("modulate_backward", problem)
    assert_same_gradients(computed(call("modulate_backward", lazy)), want)


def counted(array: np.ndarray, chunks, reads: list) -> da.Array:
    def read(block, block_info=None):
        reads.append(block_info[0]["chunk-location"])
        return block

    return da.from_array(array, chunks=chunks).map_blocks(read, dtype=array.dtype)


@pytest.mark.parametrize("layouts", [("B,D", "D"), ("D", "1,L,D"), ("B,L,D", "B,1,D")])
def test_all_gradients_together_read_each_chunk_once(layouts):
    problem = modulation_problem(np.random.default_rng(4), (3, 200, 4), "float32", *layouts)
    reads: dict[str, list] = {"x": [], "grad_output": []}
    lazy = problem | {key: counted(problem[key], (2, 64, 2), reads[key]) for key in reads}
    computed(call("modulate_backward", lazy))
    for locations in reads.values():
        assert len(locations) == len(set(locations)) == 2 * 4 * 2


def test_what_does_not_count_is_never_read():
    """The values of shift; and x, where no gradient needs it."""
    problem = modulation_problem(np.random.default_rng(5), (2, 70, 3), "float32", "B,D", "B,L,D")
    want = call("modulate_backward", problem)

    def unreadable(block):
        raise AssertionError("it was read")

    def closed(array):
        return da.from_array(array, chunks=-1).map_blocks(unreadable, dtype=array.dtype)

    shift = closed(problem["shift"])
    assert_same_gradients(computed(call("modulate_backward", problem | {"shift": shift})), want)
    without = {key: value for key, value in problem.items() if key != "scale"}
    got = computed(call("modulate_backward", without | {"x": closed(problem["x"])}))
    assert_same_gradients(got, call("modulate_backward", without))


# ---- the graph


@pytest.mark.parametrize("layout", ["B,D", "D", "1,L,D"])
def test_no_task_gathers_an_array(layout):
    x = da.ones((40, 64 * 40, 8), dtype=np.float32, chunks=(1, 64, 8))
    scale = np.ones(modulate_layouts(x.shape)[layout], np.float32)
    grads = cupyops.modulate_backward(x, grad_output=x + 1, scale=scale, shift=scale)
    graph = {k: v for a in dask.optimize(*grads) for k, v in dict(a.__dask_graph__()).items()}
    assert max(len(get_dependencies(graph, key)) for key in graph) == SUMMED_AT_ONCE


def tasks_of(*lazy: da.Array) -> int:
    """What a scheduler does for these arrays."""
    done = []
    with Callback(posttask=lambda key, *_: done.append(key)):
        dask.persist(*lazy, scheduler="synchronous")
    return len(done)


def divided(layout: str, chunks) -> dict:
    problem = modulation_problem(np.random.default_rng(6), (4, 130, 6), "float32", layout, layout)
    return problem | {key: da.from_array(problem[key], chunks) for key in ("x", "grad_output")}


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_parameters_add_no_task_to_a_chunk(layout):
    assert tasks_of(call("modulate", divided(layout, (1, 64, 6)))) == 4 * 3


@pytest.mark.parametrize("layout", ["B,D", "B,L,D"])
def test_a_chunk_of_whole_sums_gives_gradients_that_need_no_more(layout):
    """One task for the chunk, and one that picks each result."""
    assert tasks_of(*call("modulate_backward", divided(layout, (1, 130, 3)))) == 4 * 2 * (1 + 3)


class Discard:
    """Where results are stored that are too large to keep."""

    def __setitem__(self, index, value):
        pass


MEMORY = {
    "one array as both": ("x", ("scale", "shift")),
    "two arrays": ("g", ("scale", "shift")),
    "only scale": ("g", ("scale",)),
    "only shift": ("g", ("shift",)),
}


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "sums"])
@pytest.mark.parametrize("case", MEMORY)
def test_memory_stays_within_a_few_chunks(case, stored, peak_bytes):
    """In the order that Dask gives the tasks, which keeps what tasks still wait for."""
    shape, count = (1, CHUNK_ROWS, 4096), 48
    chunk = 4 * CHUNK_ROWS * 4096
    make = dask.delayed(lambda number: np.full(shape, number, np.float32))
    rows = [da.from_delayed(make(n), shape, np.float32) for n in range(2 * count)]
    arrays = {"x": da.concatenate(rows[:count], axis=1), "g": da.concatenate(rows[count:], axis=1)}
    other, names = MEMORY[case]
    parameters = dict.fromkeys(names, np.ones((1, 4096), np.float32))
    grads = cupyops.modulate_backward(arrays["x"], grad_output=arrays[other], **parameters)
    wanted = [grad for grad in grads[1:] if grad is not None]
    if stored:
        wanted.append(da.store(grads.grad_input, Discard(), compute=False, lock=False))
    peak, _ = peak_bytes(lambda: dask.compute(*wanted, scheduler="synchronous"))
    assert peak < 10 * chunk


# ---- errors


def refused(error, message: str, name: str, problem: dict, **options):
    with dask.config.set(scheduler=no_scheduler), pytest.raises(error) as caught:
        call(name, problem, **options)
    assert str(caught.value).startswith(f"{name}: {message}"), caught.value


def zeros(*shape, chunks=2, dtype=np.float32):
    return da.zeros(shape, dtype=dtype, chunks=chunks)


def unknown(*shape):
    array = zeros(*shape)
    return array[(array.sum(axis=tuple(range(1, array.ndim))) >= 0)]


REFUSED = {
    "rank": (ValueError, "x has shape (4, 6); expected three axes", {"x": zeros(4, 6)}),
    "shape": (ValueError, "scale has shape (4, 5); expected", {"scale": zeros(4, 5)}),
    "plain shape": (
        ValueError,
        "scale has shape (5,); expected",
        {"scale": np.zeros(5, np.float32)},
    ),
    "dtype": (TypeError, "x has dtype int64; expected", {"x": zeros(4, 130, 6, dtype=int)}),
    "two dtypes": (
        TypeError,
        "shift has dtype float64; expected float32, the dtype of scale",
        {"shift": zeros(6, dtype=np.float64)},
    ),
    "list": (TypeError, "scale is a list; expected a numpy", {"scale": [1.0]}),
    "None": (TypeError, "grad_output is None; expected", {"grad_output": None}),
    "grad dtype": (
        TypeError,
        "grad_output has dtype float16; expected float32",
        {"grad_output": zeros(4, 130, 6, dtype=np.float16)},
    ),
    "grad shape": (
        ValueError,
        "grad_output has shape (4, 130, 5); expected (4, 130, 6)",
        {"grad_output": zeros(4, 130, 5)},
    ),
    "unknown": (ValueError, "x has chunks of unknown size (shape (nan,", {"x": unknown(4, 130, 6)}),
    "unknown scale": (ValueError, "scale has chunks of unknown size", {"scale": unknown(4, 6)}),
    "masked": (
        TypeError,
        "x is a Dask array with chunks of numpy.ma.MaskedArray; expected chunks of numpy.ndarray",
        {"x": da.ma.masked_equal(zeros(4, 130, 6), 1)},
    ),
    "out": (
        TypeError,
        "out is given; expected None for Dask arrays",
        {"out": (np.zeros((4, 130, 6), np.float32), None, None)},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_misuse_is_refused_while_the_graph_is_built(case):
    error, message, changed = REFUSED[case]
    refused(error, message, "modulate_backward", lazy_call("modulate_backward") | changed)


def test_one_plus_scale_is_checked_as_everywhere():
    message = "one_plus_scale is an int; expected True or False"
    refused(TypeError, message, "modulate", lazy_call("modulate"), one_plus_scale=1)


def test_divided_matrices_are_refused_with_the_call_that_helps():
    x, y = zeros(4, 6, chunks=(4, 3)), zeros(4, 6, 6, chunks=(4, 6, 3))
    message = "x is in chunks that divide its last axis; expected one chunk there: "
    refused(ValueError, message + "x.rechunk({-1: -1})", "exp_segsum", {"x": x})
    message = "{} is in chunks that divide its last two axes; expected one chunk there: {}.rechunk"
    whole = zeros(4, 6, 6, chunks=(2, 6, 6))
    for first, second, name in ((y, whole, "y"), (whole, y, "grad_output")):
        arguments = {"y": first, "grad_output": second}
        said = message.format(name, name) + "({-2: -1, -1: -1})"
        refused(ValueError, said, "exp_segsum_backward", arguments)
    cupyops.exp_segsum(x.rechunk({-1: -1}))
    cupyops.exp_segsum_backward(y.rechunk({-2: -1, -1: -1}), grad_output=whole)


def test_out_is_refused_everywhere():
    for name in FUNCTIONS:
        refused(TypeError, "out is given; expected None", name, lazy_call(name), out=np.zeros(3))


QUERY_PLANNING = """
import dask
dask.config.set({"array.query-planning": True})
try:
    import dask.array as da
except ImportError:
    raise SystemExit(77)
import cupyops
try:
    cupyops.exp_segsum(da.zeros((2, 3)))
except TypeError as error:
    print(error)
"""


def test_arrays_of_another_kind_of_graph_are_refused():
    script = [sys.executable, "-W", "ignore", "-c", QUERY_PLANNING]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this Dask needs one more package for such arrays")
    assert done.stdout.startswith("exp_segsum: x is a dask."), done.stderr
    assert "; expected a numpy.ndarray" in done.stdout
