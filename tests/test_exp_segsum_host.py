"""exp_segsum and its gradient on NumPy: neither blocks, groups nor threads may show in the bits."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cupyops
from cupyops import _exp_segsum_host, _exp_segsum_panels, _threads
from oracle import reached_by
from oracle_bits import DTYPES, widen
from support import (
    assert_exp_segsum,
    assert_exp_segsum_backward,
    assert_same_bits,
    gradient_pair,
    normal,
    poisoned,
    sequence,
)

# a tile, panels of every width and rest up to a few widths, and panels wider than the least
LENGTHS = [1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25, 40, 50, 63, 64, 65, 127, 161, 163, 200, 257, 300]


def both(x, y, grad) -> tuple[np.ndarray, np.ndarray]:
    return cupyops.exp_segsum(x), cupyops.exp_segsum_backward(y, grad_output=grad)


def problem(count: int, length: int, name: str):
    """Matrices of which some are unlike the others: resets, growth, infinities, large entries."""
    rng = np.random.default_rng(count + length)
    x = sequence(rng, (count, length), name, "decay")
    y, grad = gradient_pair(rng, (count, length, length), name)
    for n in range(0, count, 3):
        kind = ("normal", "steep", "growth")[n % 9 // 3]
        x[n] = sequence(rng, (length,), name, kind)
        x[n, rng.integers(length)] = (-math.inf, math.nan, math.inf, 1e4)[n % 4]
        i, j = sorted(rng.integers(0, length, 2))[::-1]
        grad[n, i, j] = (math.inf, math.nan, 1e4)[n % 3]
    return x, y, grad


def same(got, want) -> None:
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_number_of_matrices_does_not_show(dtype, length):
    x, y, grad = problem(11, length, dtype)
    whole = both(x, y, grad)
    for first, last in [(n, n + 1) for n in range(11)] + [(0, 2), (1, 6), (9, 11), (3, 11)]:
        part = slice(first, last)
        same(both(x[part], y[part], grad[part]), [a[part] for a in whole])


@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_of_matrices_and_groups_of_panels_do_not_show(monkeypatch, dtype, length):
    x, y, grad = problem(7, length, dtype)
    want = both(x, y, grad)
    panels = _exp_segsum_panels.panels_of(length)
    for matrices, group in ((1, 1), (2, 2), (3, 1), (7, 3), (100, 1000)):
        cut = panels._replace(matrices=matrices, group=min(group, panels.number))
        monkeypatch.setattr(_exp_segsum_host, "panels_of", lambda t, cut=cut: cut)
        same(both(x, y, grad), want)


@pytest.mark.parametrize("length", [1, 8, 17, 64, 257])
def test_the_number_of_threads_does_not_show(monkeypatch, dtype, length):
    x, y, grad = problem(9, length, dtype)
    monkeypatch.setattr(_threads, "THREADS", 1)
    want = both(x, y, grad)
    monkeypatch.setattr(_threads, "THREADS", 2)
    monkeypatch.setattr(_threads.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(_exp_segsum_host, "THREAD_ELEMENTS", 1)
    counts: list[int] = []
    block = _exp_segsum_host._exp_segsum_block

    def watched(x, *rest) -> None:
        counts.append(len(x))
        block(x, *rest)

    monkeypatch.setattr(_exp_segsum_host, "_exp_segsum_block", watched)
    with np.errstate(all="raise"):
        same(both(x, y, grad), want)
    assert sorted(counts) == [4, 5]


@pytest.mark.parametrize("length", LENGTHS)
def test_panels_cover_every_row_once(length):
    panels = _exp_segsum_panels.panels_of(length)
    rows = [panels.rows(p) for p in range(panels.number)]
    assert [r for s in rows for r in range(s.start, s.stop)] == list(range(length))
    for group in (1, 2, 5, panels.number):
        groups = list(panels._replace(group=group).groups())
        assert [p for g in reversed(groups) for p in g] == list(range(panels.number))
        assert max(map(len, groups)) <= group


@pytest.mark.parametrize("length", [161, 163, 200, 242, 243, 300])
def test_wide_panels_keep_the_error_bound(dtype, length):
    rng = np.random.default_rng(length)
    for kind in ("decay", "steep"):
        x = sequence(rng, (length,), dtype, kind)
        assert_exp_segsum(cupyops.exp_segsum(x), x)
    y, grad = gradient_pair(rng, (length, length), dtype)
    few = [0, 1, length // 2, length - 1, *rng.integers(0, length, 3).tolist()]
    assert_exp_segsum_backward(cupyops.exp_segsum_backward(y, grad_output=grad), y, grad, few)


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_every_entry_reaches_its_own_gradients_only(length):
    """A product of 2^k for each place, one at a time: all of a rectangle and nothing else."""
    rng = np.random.default_rng(length)
    places = [(i, j) for i in range(length) for j in range(i)]
    drawn = rng.permutation(len(places))[:300]
    y = poisoned((len(drawn), length, length), DTYPES["float32"])
    grad = poisoned(y.shape, y.dtype)
    below = np.tri(length, k=-1, dtype=bool)
    y[:, below], grad[:, below] = 0, 1
    for n, place in enumerate(drawn):
        y[n][places[place]] = 2.0 ** (n % 30)
    got = cupyops.exp_segsum_backward(y, grad_output=grad)
    for n, place in enumerate(drawn):
        want = np.zeros(length)
        want[reached_by(*places[place], length)] = 2.0 ** (n % 30)
        assert got[n].tolist() == want.tolist()


@pytest.mark.parametrize("length", [9, 40, 64, 257])
def test_no_sum_overflows_but_that_of_a_gradient(length):
    """Entries next to the diagonal belong to one gradient each, and so do no two of them."""
    for name, top in (("float32", 3e38), ("bfloat16", 3e38), ("float64", 1.7e308)):
        big = normal(np.random.default_rng(1), (), "float64") * 0 + top
        y = np.zeros((2, length, length), DTYPES[name])
        y[:, np.arange(1, length), np.arange(length - 1)] = big
        got = cupyops.exp_segsum_backward(y, grad_output=np.ones_like(y))
        assert np.isfinite(widen(got)).all()
        assert (got[:, 1:] == y[:, 1, :1]).all()
