"""Property suite: any shape, dtype, memory layout and values, for all four operators."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import modulate_backward_exact, modulate_exact
from oracle_bits import DTYPES, largest, store, widen
from support import (
    DTYPE_NAMES,
    LAYOUT_NAMES,
    STRIDINGS,
    array,
    assert_exp_segsum,
    assert_exp_segsum_backward,
    assert_modulate_bits,
    assert_same_bits,
    assert_same_gradients,
    assert_within,
    forward_part,
    laid_out,
    modulate_layouts,
    positional,
    sprinkled,
)

NEAR_POWERS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33]
PRIMES = [11, 13, 19, 23, 29, 37]
LONGER = [63, 64, 65, 67, 127, 128, 129, 131]
LONGEST = [191, 192, 193, 255, 256, 257, 300, 449, 511, 512, 513, 577, 600]

LEADING = st.sampled_from([(), (1,), (2,), (2, 2), (0,), (3, 1)])

names = st.sampled_from(DTYPE_NAMES)
seeds = st.integers(0, 2**32 - 1)
stridings = st.sampled_from(STRIDINGS)
# shares of special values: mostly none, so that sums stay finite and are judged to the last bit
shares = st.sampled_from([0.0, 0.0, 0.0, 0.02, 0.3])
spreads = st.sampled_from([1e-4, 1.0, 1.0, 50.0])


def sizes(*more: list[int]):
    return st.sampled_from(NEAR_POWERS + PRIMES + [n for extra in more for n in extra])


@st.composite
def drawn_array(draw, shape, name: str) -> np.ndarray:
    """Random numbers of any magnitude, some of them special, in any memory layout."""
    rng = np.random.default_rng(draw(seeds))
    values = array(draw(spreads) * rng.standard_normal(shape), name)
    values = sprinkled(rng, values, draw(shares))
    axes = [n for n in range(values.ndim) if values.shape[n]]
    if axes and values.size and draw(st.integers(0, 5)) == 0:  # stride 0 along one axis
        axis = draw(st.sampled_from(axes))
        return np.broadcast_to(values.take([0], axis), shape)
    return laid_out(values, draw(stridings))


@st.composite
def modulation_shapes(draw) -> tuple[int, int, int]:
    batch, length = draw(st.sampled_from([(0, 1), (1, 0), (0, 0), (1, 2), (2, 1)] + 4 * [(1, 1)]))
    shape = [
        draw(st.sampled_from([1, 1, 2, 3, 5, 7, 8, 9])),
        draw(sizes(LONGER)),
        draw(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33])),
    ]
    if batch == 2:  # a long batch, for the sums over it
        shape[0], shape[1] = shape[1], draw(st.sampled_from([1, 1, 2, 3]))
    elif batch == 0:
        shape[0] = 0
    if length == 0:
        shape[1] = 0
    return tuple(shape)


@st.composite
def modulations(draw, shapes) -> dict[str, np.ndarray]:
    shape, name, parameter = draw(shapes), draw(names), draw(names)
    layouts = modulate_layouts(shape)
    problem = {key: draw(drawn_array(shape, name)) for key in ("x", "grad_output")}
    for key in ("scale", "shift"):
        layout = draw(st.sampled_from([None, *LAYOUT_NAMES]))
        if layout is not None:
            problem[key] = draw(drawn_array(layouts[layout], parameter))
    return problem


# ---- modulation


@settings(max_examples=700)
@given(problem=modulations(modulation_shapes()), plus=st.booleans())
def test_modulation_has_the_contracts_bits(call, problem, plus):
    assert_modulate_bits(call, problem, plus)


small_shapes = st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 3))


@settings(max_examples=150)
@given(problem=modulations(small_shapes), plus=st.booleans())
def test_modulation_is_within_the_error_bounds(call, problem, plus):
    x, arguments = positional(forward_part(problem))
    got = call("modulate", x, **arguments, one_plus_scale=plus)
    assert_within(got, *modulate_exact(x, **arguments, one_plus_scale=plus))
    x, arguments = positional(problem)
    got = call("modulate_backward", x, **arguments, one_plus_scale=plus)
    exact = modulate_backward_exact(x, **arguments, one_plus_scale=plus)
    for part, pair in zip(got, exact, strict=True):
        if pair is not None:
            assert_within(part, *pair)


@settings(max_examples=150)
@given(problem=modulations(modulation_shapes()), data=st.data())
def test_a_sample_alone_has_the_bits_it_has_in_the_batch(call, problem, data):
    batch = problem["x"].shape[0]
    if batch == 0:
        return
    b = data.draw(st.integers(0, batch - 1))
    x, arguments = positional(problem)
    whole = call("modulate_backward", x, **arguments)
    shape = x.shape
    alone = {
        key: value[b : b + 1] if value.ndim > 1 and value.shape[0] == batch else value
        for key, value in problem.items()
    }
    x, arguments = positional(alone)
    single = call("modulate_backward", x, **arguments)
    assert_same_bits(single.grad_input, whole.grad_input[b : b + 1])
    for key in ("scale", "shift"):
        part = getattr(whole, f"grad_{key}")
        if part is not None and part.ndim > 1 and part.shape[0] == shape[0]:
            assert_same_bits(getattr(single, f"grad_{key}"), part[b : b + 1])


@settings(max_examples=150)
@given(problem=modulations(modulation_shapes()), moves=st.tuples(*4 * [stridings]))
def test_modulation_bits_do_not_depend_on_memory_layout(call, problem, moves):
    x, arguments = positional(problem)
    want = call("modulate_backward", x, **arguments)
    moved = {
        key: laid_out(np.ascontiguousarray(value), striding)
        for (key, value), striding in zip(problem.items(), moves, strict=False)
    }
    x, arguments = positional(moved)
    assert_same_gradients(call("modulate_backward", x, **arguments), want)


@settings(max_examples=100)
@given(problem=modulations(modulation_shapes()), striding=stridings, plus=st.booleans())
def test_modulation_into_out_has_the_same_bits(call, problem, striding, plus):
    if striding == "readonly":
        striding = "sliced"
    x, arguments = positional(problem)
    want = call("modulate_backward", x, **arguments, one_plus_scale=plus)
    out = tuple(None if w is None else laid_out(np.zeros_like(w), striding) for w in want)
    got = call("modulate_backward", x, **arguments, one_plus_scale=plus, out=out)
    assert all(part is given for part, given in zip(got, out, strict=True))
    assert_same_gradients(got, want)
    x, arguments = positional(forward_part(problem))
    y = laid_out(np.zeros_like(x), striding)
    assert call("modulate", x, **arguments, one_plus_scale=plus, out=y) is y
    assert_same_bits(y, call("modulate", x, **arguments, one_plus_scale=plus))


# ---- exponential segment sum


def tame(values: np.ndarray) -> np.ndarray:
    """Without the largest numbers: whether two of them overflow depends on the grouping."""
    wild = np.abs(widen(values)) == largest(values.dtype.name)
    if not wild.any():
        return values
    return np.where(wild, values.dtype.type(1), values).astype(values.dtype)


@st.composite
def sequences(draw, lengths, leading=LEADING):
    shape, name = (*draw(leading), draw(lengths)), draw(names)
    values = tame(draw(drawn_array(shape, name)))
    if draw(st.integers(0, 2)) == 0:  # decays with resets, as in packed sequences
        values = store(-np.abs(widen(values)), name)
    return values


@settings(max_examples=400)
@given(x=sequences(sizes()))
def test_exp_segsum_is_within_the_error_bound(call, x):
    assert_exp_segsum(call("exp_segsum", x), x)


@settings(max_examples=40)
@given(x=sequences(st.sampled_from(LONGER), st.just(())))
def test_longer_exp_segsum_is_within_the_error_bound(call, x):
    assert_exp_segsum(call("exp_segsum", x), x)


@settings(max_examples=12)
@given(x=sequences(st.sampled_from(LONGEST), st.just(())))
def test_longest_exp_segsum_is_within_the_error_bound(call, x):
    assert_exp_segsum(call("exp_segsum", x), x)


@settings(max_examples=150)
@given(x=sequences(sizes(LONGER)), striding=stridings, data=st.data())
def test_exp_segsum_bits_do_not_depend_on_batch_or_layout(call, x, striding, data):
    want = call("exp_segsum", x)
    assert_same_bits(call("exp_segsum", laid_out(np.array(x), striding)), want)
    out = laid_out(np.zeros_like(want), "sliced" if striding == "readonly" else striding)
    assert call("exp_segsum", x, out=out) is out
    assert_same_bits(out, want)
    if x.size:
        index = tuple(data.draw(st.integers(0, n - 1)) for n in x.shape[:-1])
        assert_same_bits(call("exp_segsum", x[index]), want[index])


@settings(max_examples=60)
@given(x=sequences(st.sampled_from([1, 2, 3, 8, 17, 33, 64, 65]), st.just(())), data=st.data())
def test_exp_segsum_of_a_part_is_a_part_of_exp_segsum(call, x, data):
    first = data.draw(st.integers(0, x.size - 1))
    last = data.draw(st.integers(first + 1, x.size))
    whole = call("exp_segsum", x)
    assert_exp_segsum(np.ascontiguousarray(whole[first:last, first:last]), x[first:last])
    padded = np.concatenate([x, np.zeros(3, x.dtype)])
    assert_exp_segsum(np.ascontiguousarray(call("exp_segsum", padded)[: x.size, : x.size]), x)


@st.composite
def gradients(draw, lengths, leading=LEADING):
    """(y, grad_output), arbitrary; not only what a forward pass could give."""
    length = draw(lengths)
    shape, name = (*draw(leading), length, length), draw(names)
    return tuple(tame(draw(drawn_array(shape, name))) for _ in range(2))


@settings(max_examples=400)
@given(pair=gradients(sizes()))
def test_exp_segsum_backward_is_within_the_error_bound(call, pair):
    y, grad = pair
    assert_exp_segsum_backward(call("exp_segsum_backward", y, grad_output=grad), y, grad)


@settings(max_examples=40)
@given(pair=gradients(st.sampled_from(LONGER + LONGEST), st.just(())), data=st.data())
def test_longer_exp_segsum_backward_is_within_the_error_bound(call, pair, data):
    y, grad = pair
    got = call("exp_segsum_backward", y, grad_output=grad)
    few = {0, 1, len(y) - 1, *data.draw(st.lists(st.integers(0, len(y) - 1), max_size=3))}
    assert_exp_segsum_backward(got, y, grad, sorted(few))


@settings(max_examples=150)
@given(pair=gradients(sizes(LONGER)), striding=stridings, data=st.data())
def test_exp_segsum_backward_bits_do_not_depend_on_batch_or_layout(call, pair, striding, data):
    y, grad = pair
    want = call("exp_segsum_backward", y, grad_output=grad)
    moved = laid_out(np.array(y), striding), laid_out(np.array(grad), striding)
    assert_same_bits(call("exp_segsum_backward", moved[0], grad_output=moved[1]), want)
    out = laid_out(np.zeros_like(want), "sliced" if striding == "readonly" else striding)
    assert call("exp_segsum_backward", y, grad_output=grad, out=out) is out
    assert_same_bits(out, want)
    if y.size:
        index = tuple(data.draw(st.integers(0, n - 1)) for n in y.shape[:-2])
        single = call("exp_segsum_backward", y[index], grad_output=grad[index])
        assert_same_bits(single, want[index])


@settings(max_examples=100)
@given(pair=gradients(sizes(LONGER), st.just(())), value=st.sampled_from([math.nan, math.inf, 9.0]))
def test_the_upper_triangle_never_shows(call, pair, value):
    y, grad = (np.array(a) for a in pair)
    want = call("exp_segsum_backward", y, grad_output=grad)
    unread = np.triu(np.ones(y.shape, bool))
    y[unread] = grad[unread] = DTYPES[y.dtype.name].type(value)
    assert_same_bits(call("exp_segsum_backward", y, grad_output=grad), want)
